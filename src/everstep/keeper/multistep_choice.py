"""Into how many parts a base is cut: by what copies, steps and memory are like (GoCkpt 4.2.3)."""

from __future__ import annotations

import statistics
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everstep.capture.multistep import Unit
from everstep.keeper.multistep_stats import MultistepStats
from everstep.options import Options
from everstep.plan.multistep import PARTS_MAX, Pipeline, overlap
from everstep.seams import Clock

__all__ = ["Choice", "OnCopy", "Timed"]

_STEPS = 32  # that are remembered
_COPIES = 32
_LEAST_BYTES = 1 << 16  # of a copy that tells something about the link
_HELD_STEPS = 1  # gradients are copied by the next update of their optimizer

OnCopy = Callable[[str, float, float, int], None]
"""Told of each copy, in the lane's thread: what it was of (``"part"`` or ``"gradients"``), when it
began and ended on the monotonic clock, and its bytes."""


@dataclass(slots=True, eq=False)
class Timed:
    """A copy that is measured.

    Attributes:
        submitted_s: when it was, on the monotonic clock.
        ended: to be called in the lane's thread, behind it.
    """

    submitted_s: float
    ended: Callable[[], None]


class Choice:
    """Measures steps and copies, and chooses.

    Attributes:
        on_copy: told of each copy; for pictures.
    """

    def __init__(self, options: Options, clock: Clock, stats: MultistepStats) -> None:
        self._options = options
        self._clock = clock
        self._stats = stats
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._immutable: deque[float] = deque(maxlen=_STEPS)  # forward and backward
        self._copies: deque[tuple[int, float]] = deque(maxlen=_COPIES)
        self._mark: tuple[float, float] | None = None  # when, and stall until then
        self._gated = True
        self._parts_max = PARTS_MAX
        self._told = False
        self._ended_s = 0.0  # the last copy
        self.on_copy: OnCopy = lambda what, begin_s, end_s, size_bytes: None

    def marked(self, stall_s: float) -> None:
        """A step is over.

        Args:
            stall_s: that training has lost so far.
        """
        now_s = self._clock.monotonic_s()
        if self._mark is not None:
            self._steps.append(max(0.0, now_s - self._mark[0] - (stall_s - self._mark[1])))
        self._mark, self._gated = (now_s, stall_s), False

    def gated(self, stall_s: float) -> None:
        """An update is about to begin."""
        if self._gated or self._mark is None:
            return
        self._gated = True
        took_s = self._clock.monotonic_s() - self._mark[0] - (stall_s - self._mark[1])
        self._immutable.append(max(0.0, took_s))

    def timed(self, what: str, size_bytes: int) -> Timed:
        """A copy that is about to be submitted, behind which the lane's thread says that it has
        ended. One at a time is made: it begins when it is submitted, or when the one before
        ends."""

        def ended() -> None:
            end_s = self._clock.monotonic_s()
            begin_s, self._ended_s = max(timed.submitted_s, self._ended_s), end_s
            if size_bytes >= _LEAST_BYTES and end_s > begin_s:
                self._copies.append((size_bytes, end_s - begin_s))
                total_bytes = sum(size for size, _ in self._copies)
                self._stats.link_bytes_per_s = total_bytes / sum(s for _, s in self._copies)
            self.on_copy(what, begin_s, end_s, size_bytes)

        timed = Timed(self._clock.monotonic_s(), ended)
        return timed

    def too_large(self) -> None:
        """There was no memory for the gradients of so many parts."""
        self._parts_max = max(1, (self._stats.parts or 1) // 2)
        self._told = True  # with the base that was given up

    def parts(
        self, units: Sequence[Unit], base_bytes: int, arena_bytes: int, *, waits: bool
    ) -> int:
        """How many parts the next base has; 1: it is a lazy one.

        Args:
            units: that may be captured apart.
            base_bytes: of the base in memory.
            arena_bytes: of the memory for it and for gradients.
            waits: updates wait for the copies of their gradients.
        """
        wanted = self._options.method.parts
        state_bytes = sum(unit.size_bytes for unit in units)
        gradient_bytes = sum(unit.gradient_bytes for unit in units)
        most = min(len(units), self._parts_max)
        room_bytes = max(0, arena_bytes - base_bytes)
        if gradient_bytes:
            most = min(most, 1 + 2 * room_bytes // gradient_bytes)
        if isinstance(wanted, int):
            if wanted > most and wanted <= len(units) and not self._told:
                self._told = True
                need = base_bytes + gradient_bytes * (wanted - 1) // 2
                warnings.warn(
                    f"everstep: a base in {wanted} parts takes {need} bytes of host memory, which "
                    f"has {arena_bytes}: it is cut into {max(1, most)}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return max(1, min(wanted, most))
        if self._options.every.steps is not None:
            most = min(most, self._options.every.steps)
        link = self._stats.link_bytes_per_s
        if link is None or not self._steps or not self._immutable or most <= 1:
            return 1
        step_s = statistics.median(self._steps)
        immutable_s = min(step_s, statistics.median(self._immutable))
        if immutable_s <= 0:
            return 1
        pipeline = Pipeline(
            state_bytes / link, gradient_bytes / link, immutable_s, 0.0, step_s - immutable_s
        )
        held_steps = None if waits else _HELD_STEPS
        cost_s = self._stats.step_cost_s

        def lost_s(parts: int) -> float:
            return overlap(pipeline, parts, held_steps).stall_s + cost_s * (parts - 1)

        return min(range(1, most + 1), key=lambda parts: (round(lost_s(parts), 9), parts))
