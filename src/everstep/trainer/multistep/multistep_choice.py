"""Into which parts a base is cut: by what copies, steps and memory are like (GoCkpt 4.2.3)."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.capture.multistep import Unit, cut_parts
from everstep.config.options import Options
from everstep.plan.multistep import PARTS_MAX, Overlap, Pipeline, overlap
from everstep.plan.multistep_cut import Cut, best_cut, fewest, fewest_of
from everstep.seams import Clock
from everstep.trainer.multistep.multistep_cut import cut_units, modelled
from everstep.trainer.multistep.multistep_stats import MultistepStats
from everstep.trainer.multistep.multistep_steps import StepLengths

__all__ = ["Choice", "OnCopy", "Timed"]

_COPIES = 32
_LEAST_BYTES = 1 << 16  # of a copy that tells something about the link
_CHUNK_S = 1e-3  # that something urgent may wait for a copy under way
_CHUNK_BYTES_MIN = 64 << 10  # at most those of GoCkpt (section 4.4.2)
_CHUNK_BYTES_MAX = 4 << 20
_FEWER = 1  # parts than if a state could be cut anywhere: parameters are captured whole
_MORE = 2
_KEPT = 0.02  # of a step: a cut is not changed for less
_ALIKE = 0.02  # copies that differ by less lead to no other choice
_ALIKE_STEPS = 0.005  # nor do steps: as many of them as a base takes differ by more

OnCopy = Callable[[str, float, float, int], None]
"""Told of each copy, in the lane's thread: what it was of (``"part"`` or ``"gradients"``), when it
began and ended on the monotonic clock, and its bytes."""


@dataclass(slots=True, eq=False)
class Timed:
    """A copy that is measured.

    Attributes:
        submitted_s: when it was, on the monotonic clock.
        ended: to be called in the lane's thread, behind it, with what it took by the clock of a
            device, if there is one.
        alone: it has had the link for itself, from when it began until it ended.
    """

    submitted_s: float
    ended: Callable[..., None]
    alone: bool = True


def _link(copies: Iterable[tuple[int, float]]) -> float:
    """Bytes per second that half of all bytes went at, or faster. Not their mean: small copies
    beside an update, whose thread is kept from its next chunk, say nothing about the link, and
    parts cut for a slower one than there is wait. Nor does one copy count for more than half of
    them have: the first base is a single one, of the whole state, beside a keeper that begins."""
    found = list(copies)
    most_bytes = statistics.median_low(size for size, _ in found)
    rates = sorted(((size / s, min(size, most_bytes)) for size, s in found), reverse=True)
    left_bytes = sum(counted for _, counted in rates) / 2
    for rate, counted in rates:
        left_bytes -= counted
        if left_bytes <= 0:
            return rate
    raise AssertionError("unreachable")


class Choice:
    """Measures copies, and chooses.

    Attributes:
        steps: measures those.
        on_copy: told of each copy; for pictures.
    """

    def __init__(
        self,
        options: Options,
        clock: Clock,
        stats: MultistepStats,
        moment: Callable[[], Any] = lambda: None,
    ) -> None:
        self.steps = StepLengths(clock, moment)
        self._options = options
        self._clock = clock
        self._stats = stats
        self._copies: deque[tuple[int, float]] = deque(maxlen=_COPIES)
        self._parts_max = PARTS_MAX
        self._told = False
        self._ended_s = 0.0  # the last copy
        self._yielding: list[Timed] = []  # under way
        self._known: Pipeline | None = None  # that choices were made for last
        self._cuts: dict[tuple[int, int | None], Cut] = {}  # best for it
        self._asked: object = None
        self._answer: Sequence[Sequence[Unit]] | None = None
        self.on_copy: OnCopy = lambda what, begin_s, end_s, size_bytes: None

    def timed(self, what: str, size_bytes: int, *, yielding: bool = False) -> Timed:
        """A copy that is about to be submitted, behind which the lane's thread says that it has
        ended. One at a time is made: it begins when it is submitted, or when the one before
        ends. One that goes before others that yield says nothing about the link, nor do these.
        A device begins only when it has come so far, of which its own clock tells."""

        def ended(copied_s: float | None = None) -> None:
            end_s = self._clock.monotonic_s()
            begin_s = max(timed.submitted_s, self._ended_s)
            self._ended_s = end_s
            if copied_s is not None:
                begin_s = end_s - copied_s
            self.over(timed)
            if timed.alone and size_bytes >= _LEAST_BYTES and end_s > begin_s:
                self._copies.append((size_bytes, end_s - begin_s))
                self._stats.link_bytes_per_s = _link(self._copies)
            self.on_copy(what, begin_s, end_s, size_bytes)

        timed = Timed(self._clock.monotonic_s(), ended)
        if yielding:
            self._yielding.append(timed)
        elif under_way := list(self._yielding):
            for one in [timed, *under_way]:
                one.alone = False
        return timed

    def over(self, timed: Timed) -> None:
        """A copy is not under way any more, whether or not it has said so."""
        if timed in self._yielding:
            self._yielding.remove(timed)

    def too_large(self) -> None:
        """There was no memory for the gradients of so many parts."""
        self._parts_max = max(1, (self._stats.parts or 1) // 2)
        self._told = True  # with the base that was given up

    @property
    def chunk_bytes(self) -> int:
        """That are copied in one go: what the link manages in a millisecond, as far as it is known,
        and a power of two, so that it seldom changes."""
        wanted = self._options.method.chunk_bytes
        if isinstance(wanted, int):
            return wanted
        link = self._stats.link_bytes_per_s
        if link is None:
            return _CHUNK_BYTES_MAX
        fits = 1 << max(0, int(link * _CHUNK_S).bit_length() - 1)
        return max(_CHUNK_BYTES_MIN, min(fits, _CHUNK_BYTES_MAX))

    def cut(
        self,
        units: Sequence[Unit],
        base_bytes: int,
        arena_bytes: int,
        *,
        waits: bool,
        now: Sequence[Sequence[Unit]] | None,
        tell: bool = True,
    ) -> Sequence[Sequence[Unit]]:
        """The parts of the next base; a single one: it is a lazy base.

        Args:
            units: that may be captured apart.
            base_bytes: of the base in memory.
            arena_bytes: of the memory for it and for gradients.
            waits: updates wait for the copies of their gradients.
            now: the parts of these units that are in use, which are kept unless others are worth
                the work of planning them.
            tell: warn if there is no memory for as many as were asked for.
        """
        count = self.parts(units, base_bytes, arena_bytes, waits=waits, tell=tell)
        pipeline = self._pipeline(units)
        if now is not None and pipeline is None and len(now) == count:
            return now
        if pipeline is None or count == 1:
            return cut_parts(units, count)
        room_s = self._room_s(pipeline, units, arena_bytes - base_bytes)
        held_steps = None if waits else self._options.method.held_steps
        explicit = isinstance(self._options.method.parts, int)
        most = count if explicit else self._most(units, base_bytes, arena_bytes)
        asked = pipeline, count, most, held_steps, room_s
        if now is None or now is not self._answer or asked != self._asked:
            now = self._cut_anew(units, *asked, now)
        self._asked = asked
        self._answer = now
        return now

    def _cut_anew(
        self,
        units: Sequence[Unit],
        pipeline: Pipeline,
        count: int,
        most: int,
        held_steps: int | None,
        room_s: float,
        now: Sequence[Sequence[Unit]] | None,
    ) -> Sequence[Sequence[Unit]]:
        explicit = isinstance(self._options.method.parts, int)
        near = range(max(2, count - _FEWER), min(count + _MORE, most) + 1)
        cuts = [
            cut_units(units, pipeline, n, held_steps, room_s, self._best(pipeline, n, held_steps))
            for n in ([min(count, len(units))] if explicit else near)
        ]
        costs = [modelled(one, pipeline, held_steps) for one in cuts]
        number = fewest([self._lost_s(cost) for cost in costs]) - 1
        found = cuts[number]
        new = costs[number]
        if now is None or not (count if explicit else 2) <= len(now) <= most:
            return found
        kept = modelled(now, pipeline, held_steps)
        gained_s = self._lost_s(kept) - self._lost_s(new)
        enough = kept.gradients_s <= room_s
        return now if enough and gained_s <= _KEPT * pipeline.step_s else found

    def parts(
        self,
        units: Sequence[Unit],
        base_bytes: int,
        arena_bytes: int,
        *,
        waits: bool,
        tell: bool = True,
    ) -> int:
        """How many parts the next base has if any number of bytes may be in each (whole parameters
        may be cut into one less, or two more); 1: it is a lazy one. Arguments as for
        :meth:`cut`."""
        wanted = self._options.method.parts
        most = self._most(units, base_bytes, arena_bytes)
        if isinstance(wanted, int):
            if most < wanted <= len(units) and tell and not self._told:
                self._told = True
                gradient_bytes = sum(unit.gradient_bytes for unit in units)
                need = base_bytes + gradient_bytes * (wanted - 1) // 2
                warnings.warn(
                    f"everstep: a base in {wanted} parts takes {need} bytes of host memory, which "
                    f"has {arena_bytes}: it is cut into {max(1, most)}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return max(1, min(wanted, most))
        pipeline = self._pipeline(units)
        if pipeline is None or most <= 1:
            return 1
        held_steps = None if waits else self._options.method.held_steps
        room_s = self._room_s(pipeline, units, arena_bytes - base_bytes)

        def lost_s(parts: int) -> float:
            found = self._best(pipeline, parts, held_steps).overlap
            if found.gradients_s > room_s:
                found = overlap(pipeline, parts, held_steps)
            return self._lost_s(found)

        return fewest_of(lost_s, most, self._stats.part_s or 0.0)

    def _most(self, units: Sequence[Unit], base_bytes: int, arena_bytes: int) -> int:
        """Equal parts that there is memory for, and that are copied before the next base is due."""
        gradient_bytes = sum(unit.gradient_bytes for unit in units)
        most = min(len(units), self._parts_max)
        if gradient_bytes:
            most = min(most, 1 + 2 * max(0, arena_bytes - base_bytes) // gradient_bytes)
        automatic = not isinstance(self._options.method.parts, int)
        if automatic and self._options.every.steps is not None:
            most = min(most, self._options.every.steps)
        return most

    def _lost_s(self, found: Overlap) -> float:
        """What a base costs training: it waits for copies, and its thread works for each part. (As
        measured by now; choices may have been made for a little more or less.) Where the gradients
        of one base are still being copied when the next is due, that one waits for as long."""
        lost_s = found.stall_s + (self._stats.part_s or 0.0) * found.parts
        every = self._options.every.steps
        pipeline = self._known
        if self._options.method.held_steps > 1 and every is not None and pipeline is not None:
            lost_s += max(0.0, found.whole_s - every * pipeline.step_s - lost_s)
        return lost_s

    def _pipeline(self, units: Sequence[Unit]) -> Pipeline | None:
        """Steps and copies, as far as they are known."""
        link = self._stats.link_bytes_per_s
        steps = self.steps.known()
        if link is None or steps is None or steps.immutable_s <= 0:
            return None
        state_bytes = sum(unit.size_bytes for unit in units)
        gradient_bytes = sum(unit.gradient_bytes for unit in units)
        now = Pipeline(
            state_bytes / link,
            gradient_bytes / link,
            steps.beside_s,
            0.0,
            steps.update_s,
            part_s=self._stats.part_s or 0.0,
            behind_update=True,
        )
        if self._known is None or not _are_alike(now, self._known):
            self._known = now
            self._cuts.clear()
        return self._known

    def _best(self, pipeline: Pipeline, parts: int, held_steps: int | None) -> Cut:
        """Found once, as long as steps and copies are what they were: it takes milliseconds."""
        found = self._cuts.get((parts, held_steps))
        if found is None:
            found = self._cuts[parts, held_steps] = best_cut(pipeline, parts, held_steps)
        return found

    def _room_s(self, pipeline: Pipeline, units: Sequence[Unit], room_bytes: int) -> float:
        """Copy seconds of gradients that there is memory for."""
        gradient_bytes = sum(unit.gradient_bytes for unit in units)
        if not gradient_bytes:
            return math.inf
        return pipeline.gradients_s * max(0, room_bytes) / gradient_bytes


def _are_alike(one: Pipeline, other: Pipeline) -> bool:
    """Whether they differ by no more than a fraction: of a copy, or of a step."""
    copies = (one.state_s, other.state_s), (one.gradients_s, other.gradients_s)
    steps = (
        (one.forward_s, other.forward_s),
        (one.update_s, other.update_s),
        (one.part_s, other.part_s),
    )
    return all(abs(a - b) <= _ALIKE * b for a, b in copies) and all(
        abs(a - b) <= _ALIKE_STEPS * other.step_s for a, b in steps
    )
