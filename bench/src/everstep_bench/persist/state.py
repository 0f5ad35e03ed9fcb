"""The state that is saved: a GPT and AdamW with its moments, as live tensors.

Made without training: the moments are what AdamW would have put there, in its own layout,
filled with random numbers. Sizes are those of a real model: one large embedding, matrices of
megabytes, norms of kilobytes, step counters of four bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from everstep.errors import EverstepError, OptionError
from everstep.workloads.gpt import GPT, GPTConfig
from everstep_bench.harness.loop import flatten, untied

SIZE_BYTES_MIN = 4 << 20
_BYTES_PER_PARAMETER = 12  # float32: the parameter and two moments
_VOCABULARIES = ((50_304, 1024, 40_000_000), (256, 128, 0))  # vocabulary, context, from params
_WIDTH_STEP = 64
_ASPECT = 64  # width per layer, as in the published GPT-2 sizes
_CLOSE_ENOUGH = 0.03


def shape_of(size_bytes: int) -> GPTConfig:
    """The GPT whose parameters and moments together take about ``size_bytes``.

    Raises:
        OptionError: for less than :data:`SIZE_BYTES_MIN`.
    """
    if size_bytes < SIZE_BYTES_MIN:
        raise OptionError(f"a state of {size_bytes} bytes is too small: {SIZE_BYTES_MIN} at least")
    params = size_bytes // _BYTES_PER_PARAMETER
    vocab, context, _ = next(item for item in _VOCABULARIES if params >= item[2])
    found: list[tuple[float, float, GPTConfig]] = []
    for width in range(_WIDTH_STEP, 1 << 16, _WIDTH_STEP):
        least = GPTConfig(1, width, width // _WIDTH_STEP, context, vocab=vocab)
        if found and least.params > params:
            break
        per_layer = 12 * width**2 + 2 * width
        layers = max(1, round((params - least.params) / per_layer) + 1)
        config = GPTConfig(layers, width, width // _WIDTH_STEP, context, vocab=vocab)
        off = abs(config.params - params) / params
        found.append((max(off, _CLOSE_ENOUGH), abs(math.log(width / layers / _ASPECT)), config))
    return min(found, key=lambda item: item[:2])[2]


class BenchState:
    """A model and its optimizer, ready to be saved.

    Args:
        size_bytes: about so many bytes of tensors.
        seed: of all numbers in them.

    Attributes:
        size_bytes: bytes of all tensors, each counted once.
        tensors: number of tensors.
    """

    def __init__(self, size_bytes: int, seed: int) -> None:
        config = shape_of(size_bytes)
        self.model = _unfilled(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=6e-4)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            with torch.no_grad():
                parameter.normal_(std=0.02, generator=generator)
            mean = torch.empty_like(parameter, requires_grad=False).normal_(generator=generator)
            self.optimizer.state[parameter] = {
                "step": torch.tensor(1000.0),
                "exp_avg": mean,
                "exp_avg_sq": mean.square(),
            }
        self._digests = {name: _digest(tensor) for name, tensor in self.flat().items()}
        self.tensors = len(self._digests)
        self.size_bytes = sum(t.numel() * t.element_size() for t in self.flat().values())
        self.description = (
            f"GPT of {config.params:,} parameters ({config.layers} layers, width {config.width}, "
            f"vocabulary {config.vocab}) with AdamW, float32"
        )

    def parts(self) -> dict[str, Any]:
        """Return the state for an :class:`everstep.Checkpointer`."""
        return {"model": self.model, "optimizer": self.optimizer}

    def nested(self) -> dict[str, Any]:
        """Return the state dicts of model and optimizer, live; the tied head is left out."""
        return {"model": untied(self.model), "optimizer": self.optimizer.state_dict()}

    def flat(self) -> dict[str, torch.Tensor]:
        """All tensors by dotted name, live."""
        return flatten(self.nested())

    def blank(self) -> None:
        """Overwrites all tensors with zeros: what is there afterwards was loaded."""
        with torch.no_grad():
            for tensor in self.flat().values():
                tensor.zero_()

    def check(self, found: Mapping[str, torch.Tensor], who: str) -> None:
        """Compares every tensor with what was saved.

        Raises:
            EverstepError: naming the first that differs.
        """
        for name, expected in self._digests.items():
            tensor = found.get(name)
            if tensor is None or _digest(tensor) != expected:
                problem = "is missing" if tensor is None else "differs"
                raise EverstepError(f"{who}: {name!r} {problem} after loading")


def _unfilled(config: GPTConfig) -> GPT:
    """The model without the seconds that initialising it would take."""
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    model.head.weight = model.tokens.weight  # to_empty() has made two of the one tensor
    return model


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(memoryview(data))  # type: ignore[arg-type]
