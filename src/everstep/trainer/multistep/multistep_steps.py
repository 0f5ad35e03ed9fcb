"""How long steps are, and what of them the state stays as it is for (GoCkpt 4.2.3).

Where training computes on a device, the training thread runs ahead of it: by the host's clock
forward and backward are as long as it takes to ask for them. There the device's own clock counts,
of steps in which nothing was captured: it waits for copies in the others.

In host memory forward and backward are longer beside copies, by hooks and by memory that is shared
with whoever copies. The link uses that time, so windows are as long as they are then.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from everstep.capture.lanes.cuda import moment_on
from everstep.seams import Clock
from everstep.state.training_state import State

__all__ = ["Lengths", "StepLengths", "moment_of"]

_STEPS = 32  # that are remembered
_EVERY = 7  # of a device's, once so many are: no multiple of what loops do every 10 or 16 steps
_BESIDE_MIN = 4  # that say how much longer they are beside copies


class Lengths(NamedTuple):
    """In the middle of those that are remembered, in seconds, without what training was held up.

    Attributes:
        immutable_s: of forward and backward of a step in which nothing is copied.
        beside_s: the same beside copies; as long as few were, that of the others.
        update_s: from the beginning of the update to the end of the step.
    """

    immutable_s: float
    beside_s: float
    update_s: float


class StepLengths:
    """Of the last steps.

    Args:
        moment: a point in what the device has been given to do, an event of CUDA that tells the
            time; None where there is no device.
    """

    def __init__(self, clock: Clock, moment: Callable[[], Any] = lambda: None) -> None:
        self._clock = clock
        self._moment = moment
        self._immutable: deque[float] = deque(maxlen=_STEPS)  # forward and backward
        self._longer: deque[float] = deque(maxlen=_STEPS)  # than these were, beside copies
        self._updates: deque[float] = deque(maxlen=_STEPS)
        self._mark: tuple[float, float] | None = None  # when, and stall until then
        self._gate: tuple[float, float] | None = None  # the same of the update behind it
        self._beside = 0  # steps in a row in which something was copied
        self._on_device = False  # what is remembered is by its clock
        self._points: list[Any] = []  # the last mark, and the update behind it
        self._passed: deque[list[Any]] = deque(maxlen=_STEPS)  # perhaps not by the device yet
        self._left_out = 0  # marks that the device is not to be asked at

    def marked(self, stall_s: float) -> None:
        """A step is over.

        Args:
            stall_s: that training has lost so far.
        """
        now = self._clock.monotonic_s(), stall_s
        gate = self._gate
        self._mark = now
        self._gate = None
        if self._left_out:  # to ask takes a tenth of a millisecond
            self._left_out -= 1
            return
        point = self._moment()
        if point is None and self._on_device:  # the model was moved
            self._by(device=False)
        elif gate is not None and not self._on_device:
            self._updates.append(_between(gate, now))
        if point is not None:
            whole = len(self._points) == 2
            if whole:
                self._passed.append([*self._points, point])
            self._look()
            if whole and self._on_device and len(self._updates) == _STEPS:
                self._left_out = _EVERY - 2  # one begins a step, one ends it
                self._points = []
            else:
                self._points = [point]

    def gated(self, stall_s: float, *, quiet: bool) -> None:
        """An update is about to begin.

        Args:
            quiet: nothing is captured in this step.
        """
        if self._gate is not None or self._mark is None:
            return
        self._gate = now = self._clock.monotonic_s(), stall_s
        if not self._on_device:
            self._took(_between(self._mark, now), quiet=quiet)
        if not quiet:
            self._points = []
        elif self._points and (point := self._moment()) is not None:
            self._points.append(point)

    def known(self) -> Lengths | None:
        """None: not known yet."""
        if not self._immutable or not self._updates:
            return None
        immutable_s = beside_s = statistics.median(self._immutable)
        if len(self._longer) >= _BESIDE_MIN:
            beside_s += max(0.0, statistics.median(self._longer))
        return Lengths(immutable_s, beside_s, statistics.median(self._updates))

    def _took(self, seconds: float, *, quiet: bool) -> None:
        """Forward and backward did. How much longer they are beside copies is remembered, and not
        how long: steps may have become others by the time of the next base."""
        self._beside = 0 if quiet else self._beside + 1
        if self._beside > _STEPS:  # there may be no step without copies, any more
            self._longer.clear()
            self._immutable.append(seconds)
        elif quiet or not self._immutable:
            self._immutable.append(seconds)
        else:
            self._longer.append(seconds - statistics.median(self._immutable))

    def _by(self, *, device: bool) -> None:
        """Another clock counts from now on."""
        self._on_device = device
        for lengths in (self._immutable, self._longer, self._updates):
            lengths.clear()

    def _look(self) -> None:
        """At steps that the device has passed meanwhile; does not wait for it."""
        while self._passed and all(point.query() for point in self._passed[0]):
            mark, update, end = self._passed.popleft()
            if not self._on_device:
                self._by(device=True)
            self._immutable.append(mark.elapsed_time(update) / 1e3)
            self._updates.append(update.elapsed_time(end) / 1e3)


def _between(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Seconds between two moments, without what training has lost meanwhile."""
    return max(0.0, other[0] - one[0] - (other[1] - one[1]))


def moment_of(state: State) -> Any:
    """A point of the device that the optimizers update on; None: they do so in host memory."""
    for optimizer in state.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                return moment_on(parameter)
    return None
