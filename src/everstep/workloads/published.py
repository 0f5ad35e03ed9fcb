"""Networks of Checkflow section IV-A, in plain torch, and their inputs.

Their configurations are those of MODeL's public benchmark (Steiner et al., ICML 2023): half-width
_MNASNet, ResNet-18, R3D-18 on clips of one frame, a Transformer of one layer on each side, VGG-11,
ViT-B/16, and as BERT the encoder of RoBERTa base on sentences of four tokens; plain SGD.

Shapes of the convolutional networks: ``B`` images or clips, 3 channels, 224 x 224 pixels (112 x 112
and ``T`` frames for clips); all return ``(B, classes)`` logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from everstep.config.given import one_of


class _BERT(nn.Module):
    """The encoder of RoBERTa base (Liu et al., arXiv 1907.11692): 124,054,272 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50_265, 768, padding_idx=1)
        # Sentences of 512 tokens at most; two more positions are there for padding.
        self.positions = nn.Embedding(514, 768, padding_idx=1)
        self.norm = nn.LayerNorm(768)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(768, 12, 3072, 0.1, "gelu", batch_first=True)
            for _ in range(12)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """``(B, T)`` int64 to features ``(B, T, 768)``."""
        places = torch.arange(2, tokens.shape[1] + 2, device=tokens.device)
        x: Tensor = self.dropout(self.norm(self.tokens(tokens) + self.positions(places)))
        for layer in self.layers:
            x = layer(x)
        return x


class _VisionTransformer(nn.Module):
    """ViT-B/16 (Dosovitskiy et al., arXiv 2010.11929): 86,567,656 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, stride=16)
        self.first = nn.Parameter(torch.zeros(1, 1, 768))
        self.positions = nn.Parameter(torch.empty(1, 197, 768).normal_(std=0.02))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(12)
        )
        self.norm = nn.LayerNorm(768)
        self.classifier = nn.Linear(768, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, 224, 224)`` to ``(B, classes)``."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.classifier(self.norm(x)[:, 0])
        return logits


class _SmallTransformer(nn.Module):
    """One encoder and one decoder layer with a single head, of torch's default widths (512 and
    2048): 7,358,464 parameters."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.TransformerEncoder(  # as nn.Transformer makes it, without its warning
            nn.TransformerEncoderLayer(512, 1), 1, nn.LayerNorm(512), enable_nested_tensor=False
        )
        self.layers = nn.Transformer(nhead=1, num_decoder_layers=1, custom_encoder=encoder)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """``(S, B, 512)`` and ``(T, B, 512)`` to ``(T, B, 512)``."""
        out: Tensor = self.layers(source, target)
        return out


def _alexnet() -> nn.Module:
    """AlexNet in its single-tower form (Krizhevsky, arXiv 1404.5997): 61,100,840 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(inplace=True)),
        nn.MaxPool2d(3, stride=2),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True)),
        nn.MaxPool2d(3, stride=2),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True)),
        nn.MaxPool2d(3, stride=2),
        *(nn.AdaptiveAvgPool2d(6), nn.Flatten()),
        *(nn.Dropout(0.5), nn.Linear(256 * 36, 4096), nn.ReLU(inplace=True)),
        *(nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(inplace=True)),
        nn.Linear(4096, 1000),
    )


def _vgg11() -> nn.Module:
    """VGG configuration A (Simonyan and Zisserman, arXiv 1409.1556): 132,863,336 parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers,
        *(nn.AdaptiveAvgPool2d(7), nn.Flatten()),
        *(nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        nn.Linear(4096, 1000),
    )


class _Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(
        self,
        convolution: Callable[..., nn.Module],
        normalise: Callable[[int], nn.Module],
        channels: int,
        width: int,
        stride: int,
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(channels, width, 3, stride=stride, padding=1, bias=False),
            *(normalise(width), nn.ReLU(inplace=True)),
            convolution(width, width, 3, padding=1, bias=False),
            normalise(width),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.around = nn.Sequential(
                convolution(channels, width, 1, stride=stride, bias=False), normalise(width)
            )
        self.out = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.body(x) + self.around(x))
        return out


def _stages(
    convolution: Callable[..., nn.Module], normalise: Callable[[int], nn.Module]
) -> nn.Module:
    """Four stages of two residual blocks; each but the first halves the resolution."""
    blocks = []
    channels = 64
    for width in (64, 128, 256, 512):
        stride = 1 if width == channels else 2
        blocks.append(_Residual(convolution, normalise, channels, width, stride))
        blocks.append(_Residual(convolution, normalise, width, width, 1))
        channels = width
    return nn.Sequential(*blocks)


def _resnet18() -> nn.Module:
    """ResNet-18 (He et al., arXiv 1512.03385): 11,689,512 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        *(nn.BatchNorm2d(64), nn.ReLU(inplace=True)),
        nn.MaxPool2d(3, stride=2, padding=1),
        _stages(nn.Conv2d, nn.BatchNorm2d),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)),
    )


def _resnet3d18() -> nn.Module:
    """R3D-18, 3 x 3 x 3 throughout (Tran et al., arXiv 1711.11248): 33,371,472 parameters."""
    return nn.Sequential(
        nn.Conv3d(3, 64, (3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3), bias=False),
        *(nn.BatchNorm3d(64), nn.ReLU(inplace=True)),
        _stages(nn.Conv3d, nn.BatchNorm3d),
        *(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(512, 400)),
    )


class _Inverted(nn.Module):
    """Widen, one filter a channel, narrow; around it where shapes allow."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, factor: int) -> None:
        super().__init__()
        wide = channels * factor
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide)),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False),
            *(nn.BatchNorm2d(wide), nn.ReLU(inplace=True)),
            *(nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.around = channels == out and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out + x if self.around else out


class _MNASNet(nn.Module):
    """MNASNet-B1 of half the width (Tan et al., arXiv 1807.11626): 2,218,512 parameters."""

    # out, kernel, stride, factor, blocks
    _STAGES = (
        (16, 3, 2, 3, 3),
        (24, 5, 2, 3, 3),
        (40, 5, 2, 6, 3),
        (48, 3, 1, 6, 2),
        (96, 5, 2, 6, 4),
        (160, 3, 1, 6, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            *_normalised(nn.Conv2d(3, 16, 3, 2, 1, bias=False)),
            *_normalised(nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False)),
            *(nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)),
        ]
        channels = 8
        for out, kernel, stride, factor, blocks in self._STAGES:
            for number in range(blocks):
                first = number == 0
                layers.append(_Inverted(channels, out, kernel, stride if first else 1, factor))
                channels = out
        layers += _normalised(nn.Conv2d(channels, 1280, 1, bias=False))
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, 224, 224)`` to ``(B, classes)``."""
        logits: Tensor = self.classifier(self.layers(images).mean((2, 3)))
        return logits


def _normalised(convolution: nn.Conv2d) -> Sequence[nn.Module]:
    return convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU(inplace=True)


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


def sentences(batch: int, tokens: int = 4) -> tuple[Tensor, ...]:
    """Random tokens, ``(batch, tokens)``."""
    return (torch.randint(2, 50_000, (batch, tokens)),)


def _sequences(batch: int) -> tuple[Tensor, ...]:
    return torch.rand(10, batch, 512), torch.rand(20, batch, 512)


PUBLISHED = {
    found.name: found
    for found in (
        Published("alexnet", _alexnet, _images, 61_100_840),
        Published("bert", _BERT, sentences, 124_054_272),
        Published("mnasnet", _MNASNet, _images, 2_218_512),
        Published("resnet", _resnet18, _images, 11_689_512),
        Published("resnet3d", _resnet3d18, _clips, 33_371_472),
        Published("transformer", _SmallTransformer, _sequences, 7_358_464),
        Published("vgg", _vgg11, _images, 132_863_336),
        Published("vit", _VisionTransformer, _images, 86_567_656),
    )
}
"""By name."""


def published(name: str) -> Published:
    """The network of that name.

    Raises:
        OptionError: with the nearest name that there is.
    """
    one_of("network", name, PUBLISHED)
    return PUBLISHED[name]
