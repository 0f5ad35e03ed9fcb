"""Durations of steps, and costs of multi-step bases (GoCkpt, section 4.2.3).

If training computes on a device, the training thread runs ahead of it, and the host's clock shows
only how long forward and backward take to enqueue. Then the device's clock counts, in steps without
copies: in others it waits for them. In host memory, forward and backward are longer beside copies,
because of hooks and shared memory bandwidth. The link can use that time, so parts are cut for it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from everstep.seams import Clock

_BASES_MAX = 64
_COSTS = 8  # bases whose median is the cost of a part


@dataclass(frozen=True, slots=True)
class MultistepBase:
    """Costs of one base.

    Attributes:
        step: step of the base.
        parts: number of parts.
        begin_s: time of the training thread to begin copies, in seconds.
        state_wait_s: time updates waited for parts of the state.
        gradients_wait_s: time training waited for copies of gradients.
        state_bytes, gradient_bytes: bytes copied.
        whole_s: time from the first to the last step mark.
    """

    step: int
    parts: int
    begin_s: float
    state_wait_s: float
    gradients_wait_s: float
    state_bytes: int
    gradient_bytes: int
    whole_s: float

    @property
    def stall_s(self) -> float:
        """Return the time training lost, in seconds."""
        return self.begin_s + self.state_wait_s + self.gradients_wait_s


@dataclass(frozen=True, slots=True)
class MultistepReport:
    """Statistics of all bases so far.

    Attributes:
        windows: number of windows begun.
        abandoned: number of windows abandoned; each was followed by a new base.
        deferred: number of bases due while another was in progress, and begun after it.
        parts: number of parts of the last base.
        link_bytes_per_s: measured bandwidth; None before the first copy.
        part_s: time of the training thread for each part, without copies, in seconds; None before
            the second base in as many parts (``--part-ms`` of ``everstep plan multistep``).
        bases: the latest bases.
    """

    windows: int
    abandoned: int
    deferred: int
    parts: int | None
    link_bytes_per_s: float | None
    part_s: float | None
    bases: tuple[MultistepBase, ...]


@dataclass(slots=True, eq=False)
class WindowCosts:
    """Costs of a base in progress.

    Attributes:
        parts: number of parts.
        stall_s: stall times when it began, by cause.
        begin_s: when it began, on the monotonic clock.
        state_bytes, gradient_bytes: bytes copied.
        step: step of the base.
        whole_s: time from the first to the last step mark, in seconds.
    """

    parts: int
    stall_s: Mapping[str, float]
    begin_s: float
    state_bytes: int = 0
    gradient_bytes: int = 0
    step: int = 0
    whole_s: float = 0.0


class MultistepStats:
    """Counters of multi-step bases.

    Args:
        clock: measures time.
        stall_s: stall times by cause, in seconds; counted elsewhere.

    Attributes:
        closing: base whose last copies may still hold the next update up.
        bases: the latest bases; other attributes as of :class:`MultistepReport`.
    """

    def __init__(self, clock: Clock, stall_s: Mapping[str, float]) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self.windows = 0
        self.abandoned = 0
        self.deferred = 0
        self.parts: int | None = None
        self.link_bytes_per_s: float | None = None
        self.bases: deque[MultistepBase] = deque(maxlen=_BASES_MAX)
        self.closing: WindowCosts | None = None

    @property
    def stalled_s(self) -> float:
        """Return the time training has lost so far, in seconds."""
        return sum(self._stall_s.values())

    @property
    def part_s(self) -> float | None:
        """Return the time of the training thread for each part, in seconds; None if unknown.

        The median of the latest bases, so that a busy machine counts no more than its share;
        without the first base of each number of parts, whose partition was planned for the first
        time."""
        seen: set[int] = set()
        costs = []
        for base in self.bases:
            if base.parts in seen:
                costs.append(base.begin_s / base.parts)
            seen.add(base.parts)
        return statistics.median_low(costs[-_COSTS:]) if costs else None

    def begin(self, parts: int) -> WindowCosts:
        """Begin to measure the costs of a base."""
        return WindowCosts(parts, dict(self._stall_s), self._clock.monotonic_s())

    def finishing(self, costs: WindowCosts, step: int) -> None:
        """Note that the last part of a base of ``step`` is being copied."""
        costs.step = step
        costs.whole_s = self._clock.monotonic_s() - costs.begin_s
        self.closing = costs

    def close(self) -> None:
        """Record the costs of the last base: the step after it has ended, so nothing waits
        for it any more."""
        costs = self.closing
        self.closing = None
        if costs is None:
            return
        lost = {cause: lost_s - costs.stall_s[cause] for cause, lost_s in self._stall_s.items()}
        self.bases.append(
            MultistepBase(
                costs.step,
                costs.parts,
                lost["capture"],
                lost["gate"],
                lost["gradients"],
                costs.state_bytes,
                costs.gradient_bytes,
                costs.whole_s,
            )
        )

    def report(self) -> MultistepReport:
        """Return the current statistics."""
        return MultistepReport(
            self.windows,
            self.abandoned,
            self.deferred,
            self.parts,
            self.link_bytes_per_s,
            self.part_s,
            tuple(self.bases),
        )


_STEPS = 32  # steps remembered
_EVERY = 7  # device steps measured once enough are known; prime, as loops act every 10 or 16 steps
_BESIDE_MIN = 4  # steps needed to know the extra time beside copies


class StepDurations(NamedTuple):
    """Medians of the latest steps, in seconds, without time training was held up.

    Attributes:
        immutable_s: forward and backward of a step without copies.
        beside_s: the same beside copies; equal to ``immutable_s`` until enough such steps are
            known.
        update_s: from the beginning of the update to the end of the step.
    """

    immutable_s: float
    beside_s: float
    update_s: float


class StepTimes:
    """Durations of the latest steps.

    Args:
        clock: host's clock.
        moment: records a CUDA event in the current stream; returns None without a device.
    """

    def __init__(self, clock: Clock, moment: Callable[[], Any] = lambda: None) -> None:
        self._clock = clock
        self._moment = moment
        self._immutable: deque[float] = deque(maxlen=_STEPS)  # forward and backward
        self._longer: deque[float] = deque(
            maxlen=_STEPS
        )  # extra time of forward and backward beside copies
        self._updates: deque[float] = deque(maxlen=_STEPS)
        self._mark: tuple[float, float] | None = None  # time and stall at the last step mark
        self._gate: tuple[float, float] | None = None  # the same at the update after it
        self._steps_beside = 0  # consecutive steps with copies
        self._on_device = False  # durations are by the device's clock
        self._points: list[Any] = []  # events of the last mark and of the update after it
        self._passed: deque[list[Any]] = deque(
            maxlen=_STEPS
        )  # events the device may not have reached yet
        self._skipped_marks = 0  # marks without an event, to come

    def marked(self, stall_s: float) -> None:
        """Note a step mark.

        Args:
            stall_s: time training has lost so far, in seconds.
        """
        now = self._clock.monotonic_s(), stall_s
        gate = self._gate
        self._mark = now
        self._gate = None
        if self._skipped_marks:  # recording an event takes a tenth of a millisecond
            self._skipped_marks -= 1
            return
        point = self._moment()
        if point is None and self._on_device:  # the model was moved to host memory
            self._switch_clock(device=False)
        elif gate is not None and not self._on_device:
            self._updates.append(_between(gate, now))
        if point is not None:
            # Complete: the events of the previous mark and of the update after it.
            has_update = len(self._points) == 2
            if has_update:
                self._passed.append([*self._points, point])
            self._collect_passed()
            if has_update and self._on_device and len(self._updates) == _STEPS:
                self._skipped_marks = _EVERY - 2  # start begins a step, start ends it
                self._points = []
            else:
                self._points = [point]

    def gated(self, stall_s: float, *, quiet: bool) -> None:
        """Note that an update is about to begin.

        Args:
            stall_s: time training has lost so far, in seconds.
            quiet: nothing is captured in this step.
        """
        # Forward and backward end at the first update of a step.
        if self._gate is not None or self._mark is None:
            return
        self._gate = now = self._clock.monotonic_s(), stall_s
        if not self._on_device:
            self._add_forward_backward(_between(self._mark, now), quiet=quiet)
        if not quiet:
            # The device waits for copies in this step, so its times are not those of a step without
            # them.
            self._points = []
        elif self._points and (point := self._moment()) is not None:
            self._points.append(point)

    def known(self) -> StepDurations | None:
        """Return the durations; None if they are not known yet."""
        if not self._immutable or not self._updates:
            return None
        immutable_s = beside_s = statistics.median(self._immutable)
        if len(self._longer) >= _BESIDE_MIN:
            beside_s += max(0.0, statistics.median(self._longer))
        return StepDurations(immutable_s, beside_s, statistics.median(self._updates))

    def _add_forward_backward(self, seconds: float, *, quiet: bool) -> None:
        """Add the duration of forward and backward.

        Beside copies only the extra time is remembered: steps may have changed by the next base."""
        self._steps_beside = 0 if quiet else self._steps_beside + 1
        if self._steps_beside > _STEPS:  # there may be no steps without copies any more
            self._longer.clear()
            self._immutable.append(seconds)
        elif quiet or not self._immutable:
            self._immutable.append(seconds)
        else:
            self._longer.append(seconds - statistics.median(self._immutable))

    def _switch_clock(self, *, device: bool) -> None:
        """Use another clock from now on."""
        self._on_device = device
        # The host's clock does not show how long the device computes: the two must not be mixed.
        for lengths in (self._immutable, self._longer, self._updates):
            lengths.clear()

    def _collect_passed(self) -> None:
        """Collect the steps that the device has completed; does not wait for it."""
        # elapsed_time() raises an error if the device has not reached both events.
        while self._passed and all(point.query() for point in self._passed[0]):
            mark, update, end = self._passed.popleft()
            if not self._on_device:
                self._switch_clock(device=True)
            self._immutable.append(mark.elapsed_time(update) / 1e3)
            self._updates.append(update.elapsed_time(end) / 1e3)


def _between(start: tuple[float, float], end: tuple[float, float]) -> float:
    """Return the seconds between two moments, without the time training has lost in between."""
    return max(0.0, end[0] - start[0] - (end[1] - start[1]))
