"""Options of the benchmark, and parsers of their values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from everstep.config.method import HELD_STEPS_MAX
from everstep.errors import OptionError
from everstep.plan.multistep import PARTS_MAX

__all__ = [
    "WAYS",
    "MultistepOptions",
    "Ratio",
    "parse_copies",
    "parse_parts",
    "parse_ratios",
]

WAYS = ("gockpt", "gockpt_o")
"""Updates wait for copies of gradients; they do not."""

_STATE_BYTES_MIN = 1_000_000
_STATE_BYTES_MAX = 10**12
_STEP_S_MIN = 0.005
_STEP_S_MAX = 60.0
_COPY_MIN = 0.1
_COPY_MAX = 64.0
_RATIO_MAX = 1 / 3
_LAYERS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """Bytes of gradients, and of the state that they belong to: ``2/14``."""

    gradients: int
    state: int

    @property
    def value(self) -> float:
        """As a number."""
        return self.gradients / self.state

    def __str__(self) -> str:
        return f"{self.gradients}/{self.state}"


@dataclass(frozen=True, slots=True)
class MultistepOptions:
    """Options of the benchmark.

    Attributes:
        copies: steps that a copy of the whole state takes through the link; a table for each.
        ratios: gradients to state; a table for each.
        parts: numbers of parts.
        repeats: saves of each that count; one more warms up.
        step_s: seconds of a step.
        state_bytes: of the state, about.
        layers: parameters that are trained; those of one part are captured together.
        held_steps: for which ``gockpt_o`` keeps gradients.
        seed: of the weights.
        free_core: keep training on one core and everything else on the others; otherwise
            everything is on one.
        folder: a folder is made in it, and removed at the end.

    Raises:
        OptionError: for what makes no measurement.
    """

    copies: tuple[float, ...] = (4.0, 8.0)
    ratios: tuple[Ratio, ...] = (Ratio(2, 14), Ratio(4, 12))
    parts: tuple[int, ...] = tuple(range(1, PARTS_MAX + 1))
    repeats: int = 3
    step_s: float = 0.1
    state_bytes: int = 48_000_000
    layers: int = 48
    held_steps: int = 1
    seed: int = 1234
    free_core: bool = True
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not self.copies or not all(_COPY_MIN <= copy <= _COPY_MAX for copy in self.copies):
            raise OptionError(
                f"copies={self.copies!r}: each takes between {_COPY_MIN:g} and {_COPY_MAX:g} steps"
            )
        if not self.ratios:
            raise OptionError("ratios=(): at least one is needed", hint="like 2/14,4/12")
        for ratio in self.ratios:
            if not 0 < ratio.value <= _RATIO_MAX:
                raise OptionError(
                    f"gradients of {ratio} of the state: AdamW with float32 has 4/12, and "
                    "parameters that are not trained make it less",
                    hint="like 4/12, or 2/14",
                )
        if not self.parts or not all(1 <= parts <= PARTS_MAX for parts in self.parts):
            raise OptionError(f"parts={self.parts!r}: each between 1 and {PARTS_MAX}")
        if self.repeats < 1:
            raise OptionError(f"repeats={self.repeats}: at least one save is needed")
        if not _STEP_S_MIN <= self.step_s <= _STEP_S_MAX:
            raise OptionError(
                f"step_s={self.step_s:g}: between {1e3 * _STEP_S_MIN:g} ms and {_STEP_S_MAX:g} s"
            )
        if not _STATE_BYTES_MIN <= self.state_bytes <= _STATE_BYTES_MAX:
            raise OptionError(
                f"state_bytes={self.state_bytes}: between {_STATE_BYTES_MIN:,} and "
                f"{_STATE_BYTES_MAX:,}"
            )
        if not PARTS_MAX <= self.layers <= _LAYERS_MAX:
            raise OptionError(f"layers={self.layers}: between {PARTS_MAX} and {_LAYERS_MAX}")
        if not 1 <= self.held_steps <= HELD_STEPS_MAX:
            raise OptionError(f"held_steps={self.held_steps}: between 1 and {HELD_STEPS_MAX}")
        if not 0 <= self.seed < 2**32:
            raise OptionError(f"seed must be in [0, 2**32), not {self.seed}")


def parse_copies(text: str) -> tuple[float, ...]:
    """Lengths of a copy in steps: ``"4"``, ``"4,8"``, ``"0.5"``.

    Raises:
        OptionError: for anything else.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", word) for word in words):
        raise OptionError(f"{text!r} is no number of steps", hint="like 4, or 4,8")
    return tuple(dict.fromkeys(map(float, words)))


def parse_ratios(text: str) -> tuple[Ratio, ...]:
    """Shares: ``"2/14"``, ``"2/14,4/12"``.

    Raises:
        OptionError: for anything else.
    """
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*/\s*([0-9]{1,6})\s*", word)
        if match is None or not int(match[2]):
            raise OptionError(f"{word!r} is no ratio of gradients to state", hint="like 2/14")
        found.append(Ratio(int(match[1]), int(match[2])))
    return tuple(dict.fromkeys(found))


def parse_parts(text: str) -> tuple[int, ...]:
    """Numbers and ranges of them: ``"1-24"``, ``"1,4,8-12"``.

    Raises:
        OptionError: for anything else.
    """
    found: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:\s*-\s*([0-9]{1,4}))?\s*", word)
        if match is None:
            raise OptionError(f"{word!r} is no number of parts", hint="like 1-24, or 1,4,8")
        first = int(match[1])
        found.update(range(first, int(match[2] or first) + 1))
    if not found:
        raise OptionError(f"{text!r} has no number of parts", hint="like 1-24")
    return tuple(sorted(found))
