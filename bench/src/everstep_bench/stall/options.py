"""Options of the benchmark, and parsers of their values."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from everstep.config.given import nearest
from everstep.errors import OptionError

__all__ = [
    "ABLATIONS",
    "ARMS",
    "IDEAL",
    "NEIGHBOUR",
    "Ablation",
    "StallOptions",
    "check_arm",
    "check_training",
    "parse_arms",
    "parse_every",
    "parse_params",
]

IDEAL = "ideal"
"""The arm that saves nothing."""

NEIGHBOUR = "neighbour"
"""The arm that saves nothing either, and has another process copy and digest as much."""

ARMS = (
    IDEAL,
    NEIGHBOUR,
    "torch.save",
    "dcp",
    "dcp-warm",
    "dcp-overlap",
    "dcp-process",
    "torchsnapshot",
    "torch_checkpointing",
    "sync",
    "async",
    "checkfreq",
    "lazy",
    "gockpt",
    "gockpt_o",
)
"""All arms that a plain run has, in the order in which they are shown."""


_NAMED = ("gockpt_o-held",)  # takes a device's memory


@dataclass(frozen=True, slots=True)
class Ablation:
    """A mechanism, and two arms that differ in nothing else."""

    mechanism: str
    without: str
    with_it: str


ABLATIONS = (
    Ablation("lazy copy and gate", "async", "lazy"),
    Ablation("writing while the copy runs", "checkfreq", "lazy"),
    Ablation("packing of small tensors", "lazy-unpacked", "lazy"),
    Ablation("a keeper process of its own", "lazy-thread", "lazy"),
    Ablation("O_DIRECT", "lazy-buffered", "lazy-thread"),
    Ablation("a core beside training", "lazy-one-core", "lazy"),
)
"""``lazy-buffered`` has no keeper process, since its file system is a replaced seam: it is
compared with the arm that has none either."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ONE_CORE = "lazy-one-core"
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_PARAMS_MIN = 100_000
_PARAMS_MAX = 10_000_000_000
_WRITERS_MAX = 64


@dataclass(frozen=True, slots=True)
class StallOptions:
    """Options of the benchmark.

    Attributes:
        params: of the model, about.
        every: steps of a block, each with one save; one set of rounds for each number.
        repeats: rounds that count.
        within_s: begin no round but the first that would not be over so long after the beginning.
        seed: of the weights and of the order of arms.
        device: where the model is, ``"cpu"`` or ``"cuda"``.
        link_bytes_per_s: everstep's copies go through an emulated link of this bandwidth.
        writers: other processes that flush as much at the same time.
        free_core: keep training on one core and everything else on the others; otherwise
            everything is on one.
        python_heavy: add a part of pure Python to each step.
        ablate: add arms that lack one mechanism each.
        arms: names of arms; None for all. The ideal is always among them.
        batch: sequences of a step; None: so few that a save fills some steps.
        dtype: of the parameters, and so of gradients and moments: ``"float32"`` or ``"bfloat16"``.
        layers: of the model; None: as many as its size wants. Few make a step of a large model
            short on a device, which otherwise waits for whoever asks for it.
        curves: also record, for each of our arms, what keeper and link do over some saves.
        folder: a folder is made in it, and removed at the end.

    Raises:
        OptionError: for what makes no measurement.
    """

    params: int = 10_000_000
    every: tuple[int, ...] = (8,)
    repeats: int = 5
    within_s: float | None = None
    seed: int = 1234
    device: str = "cpu"
    link_bytes_per_s: float | None = None
    writers: int = 0
    free_core: bool = True
    python_heavy: bool = False
    ablate: bool = False
    arms: tuple[str, ...] | None = None
    batch: int | None = None
    dtype: str = "float32"
    layers: int | None = None
    curves: bool = False
    folder: Path | None = None

    def __post_init__(self) -> None:
        check_training(self.params, self.repeats, self.seed)
        if self.within_s is not None and not self.within_s > 0:
            raise OptionError(
                f"within_s={self.within_s}: it takes longer than that", hint="like 240"
            )
        if self.batch is not None and self.batch < 1:
            raise OptionError(f"batch={self.batch}: a step has at least one sequence")
        if self.layers is not None and self.layers < 1:
            raise OptionError(f"layers={self.layers}: a model has at least one")
        if not self.every or min(self.every) < 1:
            raise OptionError(f"every={self.every!r}: blocks have at least one step")
        if self.device not in ("cpu", "cuda"):
            raise OptionError(f"no device {self.device!r}; there are: cpu, cuda")
        if self.dtype not in _DTYPES:
            raise OptionError(f"no dtype {self.dtype!r}; there are: {', '.join(_DTYPES)}")
        if not 0 <= self.writers <= _WRITERS_MAX:
            raise OptionError(f"writers={self.writers}: between 0 and {_WRITERS_MAX}")
        if self.link_bytes_per_s is not None:
            if self.link_bytes_per_s <= 0:
                raise OptionError("a link carries more than nothing", hint="like 2GB/s")
            if self.device != "cpu":
                raise OptionError(
                    "an emulated link is for machines without a device; this one has its own",
                    hint="leave out --link, or --device",
                )
        for name in self.arms or ():
            check_arm(name, _known())
        if self.arms is not None and not set(self.arms) - {IDEAL, NEIGHBOUR}:
            raise OptionError("no arm that saves was chosen", hint="like --arms lazy,torch.save")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same as torch's."""
        return _DTYPES[self.dtype]

    def names(self) -> tuple[str, ...]:
        """The arms to measure, the ideal first, each once, in the order of :data:`ARMS`."""
        known = _known()
        chosen = set(ARMS if self.arms is None else self.arms) | {IDEAL}
        if self.ablate:
            chosen |= {name for a in ABLATIONS for name in (a.without, a.with_it)}
            if not self.free_core:
                chosen.discard(_ONE_CORE)  # all of them are
        return tuple(name for name in known if name in chosen)


def parse_params(text: str) -> int:
    """A number of parameters: ``"25M"``, ``"1.5G"``, ``"300000"``.

    Raises:
        OptionError: for anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgb]?)\s*", text.lower())
    if match is None:
        raise OptionError(f"{text!r} is no number of parameters", hint="like 10M, 1.5G")
    return round(float(match[1]) * _SCALES[match[2]])


def parse_every(text: str) -> tuple[int, ...]:
    """Lengths of blocks: ``"8"``, ``"1,10,50"``.

    Raises:
        OptionError: for anything else.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise OptionError(f"{text!r} is no list of steps", hint="like 8, or 1,10,50")
    found = tuple(dict.fromkeys(map(int, words)))
    if min(found) < 1:
        raise OptionError(f"{text!r}: blocks have at least one step")
    return found


def parse_arms(text: str | None, known: Collection[str] | None = None) -> tuple[str, ...] | None:
    """Names of arms: ``"lazy,dcp-warm"``; None for all.

    Args:
        known: the arms that there are (default: of ``bench stall``).

    Raises:
        OptionError: naming the nearest arm.
    """
    if text is None:
        return None
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        check_arm(name, _known() if known is None else known)
    return names


def check_training(params: int, repeats: int, seed: int) -> None:
    """Refuses what cannot be trained and measured.

    Raises:
        OptionError: naming the bounds.
    """
    if not _PARAMS_MIN <= params <= _PARAMS_MAX:
        raise OptionError(
            f"params={params}: between {_PARAMS_MIN:,} and {_PARAMS_MAX:,}", hint="like 10M"
        )
    if repeats < 1:
        raise OptionError(f"repeats={repeats}: at least one round is needed")
    if not 0 <= seed < 2**32:
        raise OptionError(f"seed must be in [0, 2**32), not {seed}")


def check_arm(name: str, known: Collection[str]) -> None:
    """Refuses an arm that does not exist.

    Raises:
        OptionError: naming the nearest.
    """
    if name not in known:
        guess = nearest(name, known)
        raise OptionError(
            f"no arm {name!r}; there are: {', '.join(known)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )


def _known() -> tuple[str, ...]:
    """Those of a plain run, then those that are run only when they are named, or lack a
    mechanism."""
    ablated = (a.without for a in ABLATIONS if a.without not in ARMS)
    return (*ARMS, *_NAMED, *ablated)
