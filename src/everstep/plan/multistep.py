"""Predicted delay of training by a base that is captured over several steps.

GoCkpt (section 4.2) cuts the state into ``k`` parts and copies one in each of ``k`` steps, while
forward and backward leave it alone; from then on the gradients of what was copied are copied,
too, so that host memory can bring the part to the step of the last one. This module is that
pipeline as a fluid model: one link, served in the order of deadlines, and training that waits at
each deadline for what is not there.

=============  ==============================================  ==================================
what           may be copied                                   training waits for it
=============  ==============================================  ==================================
part ``i``     behind forward and backward of step ``i``       before the update of step ``i``
gradients of   from the end of that backward on                ``gockpt``: before that update
step ``i``                                                     ``gockpt_o``: before the next
                                                               backward, which overwrites them
                                                               held for ``h`` steps: at the end of
                                                               the ``h``-th backward after it
=============  ==============================================  ==================================

One part is a lazy base (DataStates-LLM; Async-O of the paper): a copy of ``T`` steps holds training
up for ``T - 1`` of them. With updates that take no time and parts of one step each ``gockpt``
gives the paper's ``N (N - 1) / 2 * r T / N``, of which it prints the *saving* with its sign
flipped (4.2.3): with gradients of 1/7 of the state the most that can be saved is 3 steps, at 7 and
8 parts, and not 4.

Copies are all that the paper counts. Each part takes the training thread some work of its own, too
(``part_s``; docs/design/multistep.md), about half of it at the step mark and half at the update,
while the link
copies. It is 0 unless somebody has measured it.

Number and sizes of the parts of a multi-step base: each part fills its window.

Equal parts (GoCkpt section 4.2) leave the link idle in the first windows, which have few gradients
to copy, and make training wait in the last. Here a part is as large as its window leaves time for,
next to the gradients that are due in it. With gradients of ``r`` of the state, held for one step,
of which a full copy takes ``T``, the captured share ``C`` of the state grows by

    ``C_i = C_(i-1) (1 - r) + 1 / T``

per step while nothing waits, towards ``1 / (r T)``; the rest is in the last part. No other cut
waits less: a part that takes the link ``d`` longer than its window makes training wait for ``d``,
and shortens the last part by at most ``d (1 - r)``. So training waits for at least ``T - 1 / r``
steps, if that is positive, with any number of parts. The bound for equal parts ignores for how long
gradients are held; it may be less, or more.

If updates wait for gradients (``gockpt``), each captured share is waited for in each later step:
parts fill the last windows, and no part is captured earlier than ``1 / r`` steps before the last,
from where it is cheaper to wait for it. That is optimal, too, if copies end before the update
begins. If copies overlap their update, if the next backward waits, or if gradients are held for
more than a step, the result is no worse than equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum

from everstep.errors import OptionError

PAPER_PARTS = 7
"""The paper's recommendation (4.2.3): optimal for gradients of 1/7 of the state."""

PARTS_MAX = 24

_DONE = 1e-12  # of a copy that is left over by rounding


class _Phase(IntEnum):
    """Points of a step at which training waits, in order."""

    BACKWARD = 0
    UPDATE = 1
    END = 2


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Durations of a step and of copies.

    Attributes:
        state_s: seconds to copy the whole state, nothing else being copied.
        gradients_s: seconds to copy the gradients of the whole state, nothing else being copied.
        forward_s: seconds of forward; captured memory does not change.
        backward_s: seconds of backward; it overwrites the gradients of the previous step.
        update_s: seconds of the update; the state changes.
        part_s: seconds of the training thread's own work per part.
        behind_update: True: copies of gradients overlap the update that consumes them, which ends
            after the copies, as in everstep. False: the update waits for the copies, as in the
            paper.

    Raises:
        OptionError: a value is not a number of seconds, or the step takes no time.
    """

    state_s: float
    gradients_s: float
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    part_s: float = 0.0
    behind_update: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0 <= value < float("inf"):
                raise OptionError(f"Pipeline.{item.name} must be seconds, not {value!r}")
        if self.step_s <= 0:
            raise OptionError("a step must take some time")

    @property
    def step_s(self) -> float:
        """Seconds of a step without a capture."""
        return self.forward_s + self.backward_s + self.update_s


@dataclass(frozen=True, slots=True)
class Overlap:
    """Cost of a base in a number of parts.

    Attributes:
        parts: number of parts; 1 is a lazy base.
        state_wait_s: seconds that training waits for parts of the state.
        gradients_wait_s: seconds that it waits for gradients.
        whole_s: seconds from the start until all of it is in host memory.
        held_s: maximum seconds of gradient copies that wait for the link, where no later backward
            overwrites them; the device holds that much memory.
        gradients_s: seconds of copies of all copied gradients; the host holds that much memory.
        work_s: seconds of the training thread's own work.
    """

    parts: int
    state_wait_s: float
    gradients_wait_s: float
    whole_s: float
    held_s: float
    gradients_s: float
    work_s: float = 0.0

    @property
    def stall_s(self) -> float:
        """Seconds that training waits for copies: all that the paper counts."""
        return self.state_wait_s + self.gradients_wait_s

    @property
    def lost_s(self) -> float:
        """Seconds that training loses: waits and its own work."""
        return self.stall_s + self.work_s


@dataclass(slots=True)
class _Copy:
    left_s: float
    deadline: tuple[int, _Phase]
    gradients: bool


@dataclass(slots=True)
class _Link:
    """A link that carries one copy at a time, the earliest deadline first."""

    copies: list[_Copy] = field(default_factory=list)
    now_s: float = 0.0
    held_s: float = 0.0

    def add(self, copy: _Copy) -> None:
        if copy.left_s <= _DONE:
            return
        self.copies.append(copy)
        self.copies.sort(key=lambda item: item.deadline)
        waiting_s = sum(item.left_s for item in self.copies if item.gradients)
        self.held_s = max(self.held_s, waiting_s)

    def run(self, seconds: float) -> None:
        """Let training run for some seconds."""
        self.now_s += seconds
        while self.copies and seconds > 0:
            served_s = min(seconds, self.copies[0].left_s)
            self.copies[0].left_s -= served_s
            seconds -= served_s
            if self.copies[0].left_s <= _DONE:
                del self.copies[0]

    def wait(self, deadline: tuple[int, _Phase]) -> Iterator[tuple[bool, float]]:
        """Yield the waits for copies that are due: True for gradients, and seconds."""
        while self.copies and self.copies[0].deadline <= deadline:
            due = self.copies[0]
            yield due.gradients, due.left_s
            self.run(due.left_s)


def overlap(
    pipeline: Pipeline,
    parts: int,
    held_steps: int | None,
    shares: Sequence[float] | None = None,
) -> Overlap:
    """Return the cost of a base in parts.

    Args:
        parts: number of parts, from 1.
        held_steps: None: the update waits for the gradients (``gockpt``; see
            :attr:`Pipeline.behind_update`). 0: the next backward waits (``gockpt_o``; gradients are
            overwritten in place). From 1: gradients are kept in device memory for this many more
            steps.
        shares: share of the state, and of its gradients, in each part; None: equal.

    Raises:
        OptionError: an argument is out of range, or the shares do not fit.
    """
    shares = [1 / parts] * parts if shares is None and parts > 0 else list(shares or ())
    if parts > 0 and (len(shares) != parts or abs(sum(shares) - 1) > 1e-6):
        raise OptionError(f"shares={shares!r} are not the shares of {parts} parts")
    if parts < 1 or (held_steps is not None and held_steps < 0):
        raise OptionError(f"parts={parts} must be at least 1, held_steps={held_steps} at least 0")
    link = _Link()
    waits_s = {False: 0.0, True: 0.0}
    copied_s = 0.0

    def wait(step: int, phase: _Phase) -> None:
        for gradients, seconds in link.wait((step, phase)):
            waits_s[gradients] += seconds

    for step in range(1, parts + 1):
        link.run(pipeline.part_s / 2)
        state_s = pipeline.state_s * shares[step - 1]
        link.add(_Copy(state_s, (step, _Phase.UPDATE), gradients=False))
        link.run(pipeline.forward_s)
        wait(step, _Phase.BACKWARD)
        link.run(pipeline.backward_s)
        wait(step, _Phase.UPDATE)
        link.run(pipeline.part_s / 2)
        # The base is of the mark at which the last part begins: later gradients are not needed.
        if step < parts:
            seconds = pipeline.gradients_s * sum(shares[:step])
            copied_s += seconds
            link.add(_Copy(seconds, _due(pipeline, step, held_steps), gradients=True))
            wait(step, _Phase.UPDATE)
        link.run(pipeline.update_s if step < parts else 0.0)
        wait(step, _Phase.END)
    whole_s = link.now_s + sum(copy.left_s for copy in link.copies)
    work_s = pipeline.part_s * parts
    return Overlap(parts, waits_s[False], waits_s[True], whole_s, link.held_s, copied_s, work_s)


def lower_bound_s(pipeline: Pipeline, parts: int) -> float:
    """Return a lower bound of the stall of a base in equal parts, for any schedule.

    The work of the link minus the time available: ``max(0, T (1 + r (k - 1) / 2) - k)`` in units of
    one step, for a copy of ``T`` steps and gradients of ``r`` of the state. Other parts have other
    work (:mod:`.multistep`). The training thread's own work is not included.
    """
    work_s = pipeline.state_s + pipeline.gradients_s * (parts - 1) / 2
    return max(0.0, work_s - parts * pipeline.step_s)


def _due(pipeline: Pipeline, step: int, held_steps: int | None) -> tuple[int, _Phase]:
    if held_steps is None:
        return step, _Phase.END if pipeline.behind_update else _Phase.UPDATE
    if held_steps == 0:
        return step + 1, _Phase.BACKWARD
    return step + held_steps, _Phase.UPDATE


_HALVINGS = 24  # of how full windows are
_NEAR = 0.02
_NEAR_S = 1e-6


@dataclass(frozen=True, slots=True)
class Cut:
    """Parts of certain sizes, and the cost of a base in them.

    Attributes:
        shares: share of the state in each part.
    """

    shares: Sequence[float]
    overlap: Overlap


def best_cut(pipeline: Pipeline, parts: int, held_steps: int | None) -> Cut:
    """Return the best sizes for this number of parts; equal ones if no others wait less.

    Args:
        parts: number of parts, from 1.
        held_steps: see :func:`.multistep.overlap`.

    Raises:
        OptionError: an argument is out of range.
    """
    even = overlap(pipeline, parts, held_steps)
    equal = Cut((1 / parts,) * parts, even)
    if parts == 1:
        return equal
    found = [
        Cut(shares, overlap(pipeline, parts, held_steps, shares))
        for shares in filling_shares(pipeline, parts, held_steps)
    ]
    # Rounded to nanoseconds: differences by rounding of floats decide nothing.
    return min([*found, equal], key=lambda cut: round(cut.overlap.stall_s, 9))


def fewest(losses_s: Sequence[float]) -> int:
    """Return the fewest parts that cost training at most 2 % (and a microsecond) more than the
    least.

    Each additional part takes memory for gradients, and a step of time.

    Args:
        losses_s: cost of a base in 1, 2, ... parts.
    """
    enough_s = (1 + _NEAR) * min(losses_s) + _NEAR_S
    return 1 + next(number for number, loss_s in enumerate(losses_s) if loss_s <= enough_s)


def fewest_of(lost_s: Callable[[int], float], parts_max: int, part_s: float) -> int:
    """Return :func:`fewest` for up to ``parts_max`` parts, computing no more costs than necessary.

    Each computation takes training a tenth of a millisecond.

    Args:
        lost_s: returns the cost of a base in a number of parts.
        part_s: training's own work per part, which is included in that.
    """
    losses_s: list[float] = []
    enough_s = math.inf
    for parts in range(1, parts_max + 1):
        if part_s * parts > enough_s or enough_s <= 2 * _NEAR_S:
            break  # nor is it worth while with more
        losses_s.append(lost_s(parts))
        enough_s = (1 + _NEAR) * min(losses_s) + _NEAR_S
    return fewest(losses_s)


def filling_shares(
    pipeline: Pipeline, parts: int, held_steps: int | None
) -> list[tuple[float, ...]]:
    """Return candidate shares for parts that fill their windows; the caller takes the best."""
    state_s = pipeline.state_s
    gradients_s = pipeline.gradients_s
    if not state_s:
        return []
    worth = parts if not gradients_s else min(parts, 1 + int(state_s / gradients_s))
    if held_steps is None:
        return [_late(pipeline, parts, worth)]
    if held_steps or not gradients_s:
        return [_early(pipeline, parts, parts, 1.0)]
    # The next backward waits: what the link does not manage until then is better not captured
    # before it pays to wait for it.
    most = (pipeline.update_s + pipeline.part_s / 2 + pipeline.forward_s) / gradients_s
    return [_early(pipeline, parts, full, most) for full in sorted({0, 1, worth, parts})]


def _late(pipeline: Pipeline, parts: int, worth: int) -> tuple[float, ...]:
    """Return shares that fill the last windows."""
    window = (pipeline.forward_s + pipeline.backward_s) / pipeline.state_s
    shares = [0.0] * parts
    left = 1.0
    for step in range(parts - 1, parts - 1 - worth, -1):
        shares[step] = min(left, window)
        left -= shares[step]
    shares[-1] += left
    return tuple(shares)


def _early(pipeline: Pipeline, parts: int, full: int, most: float) -> tuple[float, ...]:
    """Return shares that fill all windows equally, and only as much as necessary.

    Args:
        full: number of last steps that may be waited for; before them at most ``most`` of the state
            is captured.
    """
    shares = _filled(pipeline, parts, full, most, 1.0)
    least = 0.0
    fullness = 1.0
    if sum(shares) >= 1:
        for _ in range(_HALVINGS):
            middle = (least + fullness) / 2
            tried = _filled(pipeline, parts, full, most, middle)
            if sum(tried) >= 1:
                fullness = middle
                shares = tried
            else:
                least = middle
    # All of the state is copied: the last part takes the rest, however long training waits.
    shares[-1] += 1 - sum(shares)
    return tuple(shares)


def _filled(pipeline: Pipeline, parts: int, full: int, most: float, fullness: float) -> list[float]:
    """Return shares with which the link is busy for this share of each window, up to the whole
    state.
    """
    window_s = fullness * (pipeline.forward_s + pipeline.backward_s)
    captured = 0.0
    shares = []
    for step in range(parts):
        between_s = pipeline.update_s + pipeline.part_s / 2
        gradients_s = max(0.0, pipeline.gradients_s * captured - between_s)
        limit = min(most, 1.0) if step < parts - full else 1.0
        share = max(0.0, window_s - gradients_s) / pipeline.state_s
        share = max(0.0, min(share, limit - captured))
        shares.append(share)
        captured += share
    return shares
