"""The eight networks of Checkflow section IV-A, and what they are fed.

"Configurations same to these used in" MODeL (Steiner et al., ICML 2023), whose public benchmark
says which: half-width MNASNet, ResNet-18, R3D-18 on clips of one frame, a Transformer of one layer
on each side, VGG-11, ViT-B/16, and as BERT the encoder of RoBERTa base on sentences of four tokens;
plain SGD.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from everstep.config.given import nearest
from everstep.errors import OptionError
from everstep.workloads.attention import BERT, SmallTransformer, VisionTransformer
from everstep.workloads.convolutional import (
    VGG11,
    AlexNet,
    MNASNet,
    ResNet3D18,
    ResNet18,
)

__all__ = ["PUBLISHED", "Published", "published", "sentences"]

_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Published:
    """A network with its inputs.

    Attributes:
        make: the model, on the default device.
        inputs: for a batch size, on the default device.
        params: parameters it has.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    params: int

    def training(self, batch: int) -> tuple[nn.Module, Callable[[], Tensor]]:
        """A model on the default device, and its loss on a batch: random, with targets 0."""
        model = self.make()
        inputs = self.inputs(batch)

        def loss() -> Tensor:
            logits = model(*inputs).flatten(0, -2)
            targets = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
            return nn.functional.cross_entropy(logits, targets)

        return model, loss


def _images(batch: int) -> tuple[Tensor, ...]:
    return (torch.rand(batch, 3, 224, 224),)


def _clips(batch: int) -> tuple[Tensor, ...]:
    return (torch.rand(batch, 3, 1, 112, 112),)


def sentences(batch: int, tokens: int = _TOKENS) -> tuple[Tensor, ...]:
    """Random tokens, ``(batch, tokens)``."""
    return (torch.randint(2, 50_000, (batch, tokens)),)


def _sequences(batch: int) -> tuple[Tensor, ...]:
    return torch.rand(10, batch, 512), torch.rand(20, batch, 512)


PUBLISHED = {
    found.name: found
    for found in (
        Published("alexnet", AlexNet, _images, 61_100_840),
        Published("bert", BERT, sentences, 124_054_272),
        Published("mnasnet", MNASNet, _images, 2_218_512),
        Published("resnet", ResNet18, _images, 11_689_512),
        Published("resnet3d", ResNet3D18, _clips, 33_371_472),
        Published("transformer", SmallTransformer, _sequences, 7_358_464),
        Published("vgg", VGG11, _images, 132_863_336),
        Published("vit", VisionTransformer, _images, 86_567_656),
    )
}
"""By name."""


def published(name: str) -> Published:
    """The network of that name.

    Raises:
        OptionError: with the nearest name that there is.
    """
    if name not in PUBLISHED:
        guess = nearest(name, PUBLISHED)
        raise OptionError(
            f"no network {name!r}; there are: {', '.join(PUBLISHED)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    return PUBLISHED[name]
