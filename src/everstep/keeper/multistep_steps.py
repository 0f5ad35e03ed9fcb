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

from everstep.capture.cuda import moment_on
from everstep.seams import Clock
from everstep.state.image import State

__all__ = ["Lengths", "StepLengths", "moment_of"]

_STEPS = 32  # that are remembered
_EVERY = 7  # of a device's, once so many are: no multiple of what loops do every 10 or 16 steps
_BESIDE_MIN = 4  # that say how long they are beside copies


class Lengths(NamedTuple):
    """In the middle of those that are remembered, in seconds, without what training was held up.

    Attributes:
        step_s: of a step in which nothing is copied.
        immutable_s: of forward and backward of such a step.
        beside_s: of forward and backward beside copies; of the others, as long as few were.
    """

    step_s: float
    immutable_s: float
    beside_s: float


class StepLengths:
    """Of the last steps.

    Args:
        moment: a point in what the device has been given to do, an event of CUDA that tells the
            time; None where there is no device.
    """

    def __init__(self, clock: Clock, moment: Callable[[], Any] = lambda: None) -> None:
        self._clock = clock
        self._moment = moment
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._immutable: deque[float] = deque(maxlen=_STEPS)  # forward and backward
        self._beside: deque[float] = deque(maxlen=_STEPS)  # the same, beside copies
        self._mark: tuple[float, float] | None = None  # when, and stall until then
        self._gated = True
        self._on_device = False  # what is remembered is by its clock
        self._points: list[Any] = []  # the last mark, and the update behind it
        self._passed: deque[list[Any]] = deque(maxlen=_STEPS)  # perhaps not by the device yet
        self._left_out = 0  # marks that the device is not to be asked at

    def marked(self, stall_s: float) -> None:
        """A step is over.

        Args:
            stall_s: that training has lost so far.
        """
        now_s = self._clock.monotonic_s()
        if self._left_out:  # to ask takes a tenth of a millisecond
            self._left_out -= 1
            self._mark, self._gated = (now_s, stall_s), False
            return
        point = self._moment()
        if point is None and self._on_device:  # the model was moved
            self._by(device=False)
        if self._mark is not None and not self._on_device:
            self._steps.append(max(0.0, now_s - self._mark[0] - (stall_s - self._mark[1])))
        self._mark, self._gated = (now_s, stall_s), False
        if point is not None:
            whole = len(self._points) == 2
            if whole:
                self._passed.append([*self._points, point])
            self._look()
            if whole and self._on_device and len(self._steps) == _STEPS:
                self._left_out, self._points = _EVERY - 2, []  # one begins a step, one ends it
            else:
                self._points = [point]

    def gated(self, stall_s: float, *, quiet: bool) -> None:
        """An update is about to begin.

        Args:
            quiet: nothing is captured in this step.
        """
        if self._gated or self._mark is None:
            return
        self._gated = True
        if not self._on_device:
            took_s = self._clock.monotonic_s() - self._mark[0] - (stall_s - self._mark[1])
            (self._immutable if quiet else self._beside).append(max(0.0, took_s))
        if not quiet:
            self._points = []
        elif self._points and (point := self._moment()) is not None:
            self._points.append(point)

    def known(self) -> Lengths | None:
        """None: not known yet."""
        immutable = self._immutable or self._beside  # there may be no step without copies
        if not self._steps or not immutable:
            return None
        step_s = statistics.median(self._steps)
        immutable_s = beside_s = min(step_s, statistics.median(immutable))
        if len(self._beside) >= _BESIDE_MIN:
            beside_s = max(immutable_s, statistics.median(self._beside))
        return Lengths(step_s, immutable_s, beside_s)

    def _by(self, *, device: bool) -> None:
        """Another clock counts from now on."""
        self._on_device = device
        for lengths in (self._steps, self._immutable, self._beside):
            lengths.clear()

    def _look(self) -> None:
        """At steps that the device has passed meanwhile; does not wait for it."""
        while self._passed and all(point.query() for point in self._passed[0]):
            mark, update, end = self._passed.popleft()
            if not self._on_device:
                self._by(device=True)
            self._immutable.append(mark.elapsed_time(update) / 1e3)
            self._steps.append(mark.elapsed_time(end) / 1e3)


def moment_of(state: State) -> Any:
    """A point of the device that the optimizers update on; None: they do so in host memory."""
    for optimizer in state.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                return moment_on(parameter)
    return None
