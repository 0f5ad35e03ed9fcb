"""Copies issued in planned order, at planned events of the step (Checkflow, section III).

A capture is cut into *units*. Each is issued at its event, so that the lane's queue never holds
more than the plan wants there. An update waits for the units that hold the entries it is going to
change (I1), and for no others: an optimizer of all parameters waits for all of them, because torch
calls no hook between the parameters of one ``step()``; an optimizer of a single parameter, which
updates during backward, waits for its own. A unit planned for later than its update is duplicated
first, into memory that is taken then and freed once the unit is copied, and the update does not
wait for it. If the device has no memory for that, the update waits.

No order of events can tear a tensor: a unit not yet issued at its update is issued then, and the
update waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from everstep.capture.batches import Batch, run_batch
from everstep.capture.lane import Lane, Transfer
from everstep.errors import StateError


@dataclass(frozen=True, slots=True)
class Unit:
    """Copies that are issued together.

    Attributes:
        event: event of the step at which they are issued.
        owner: key of the optimizer that updates their sources; ``""`` if none does.
        batches: the copies, in file order.
        late: it is duplicated before its update and copied from the duplicate.
        planned_s: for each batch, planned start and end in seconds after the step mark; empty
            without a plan.
    """

    event: int
    owner: str
    batches: tuple[Batch, ...]
    late: bool = False
    planned_s: tuple[tuple[float, float], ...] = ()


@dataclass(slots=True)
class Duplicates:
    """Duplicates made under one plan.

    Attributes:
        latest: latest copy of a unit from a duplicate, by the number of the unit.
        short: True once a device had no memory for a duplicate.
    """

    latest: dict[int, UnitCopy] = field(default_factory=dict)
    short: bool = False


_ALIGNED_BYTES = 512  # of each batch in a duplicate


@dataclass(slots=True, eq=False)
class UnitCopy:
    """Progress of one unit of a capture.

    Attributes:
        number: number of the unit, in the order of the link.
        duplicate: copies out of its duplicate; None without one.
        transfer: its copies, once they are issued.
        issued_s: time of issue, on the capture's clock; None until then.
        arrived_s: arrival times of its batches.
    """

    number: int
    unit: Unit
    duplicate: tuple[Batch, ...] | None = None
    transfer: Transfer | None = None
    issued_s: float | None = None
    arrived_s: list[float] = field(default_factory=list)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Copies to issue: out of the duplicate, if there is one."""
        return self.unit.batches if self.duplicate is None else self.duplicate

    def make_duplicate(self) -> bool:
        """Copy the unit within its device, in the order of the current stream.

        Returns:
            False if the device has no memory for it.
        """
        begins = [0]
        for batch in self.unit.batches:
            begins.append(begins[-1] + -(-batch.size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES)
        device = self.unit.batches[0].first.device
        try:
            memory = torch.empty(begins[-1], dtype=torch.uint8, device=device)
        # Host memory that is short raises a plain RuntimeError.
        except (torch.OutOfMemoryError, RuntimeError):
            return False
        copies = []
        for batch, begin in zip(self.unit.batches, begins, strict=False):
            end = begin + batch.size_bytes
            run_batch(Batch(begin, end, batch.sources, batch.rearranged), memory)
            copies.append(Batch(batch.begin, batch.end, (memory[begin:end],)))
        self.duplicate = tuple(copies)
        return True

    def arrived(self, end: int, now_s: float) -> None:
        """Note that the unit was copied up to a position; at its end, free the duplicate."""
        self.arrived_s.append(now_s)
        if self.duplicate and end >= self.unit.batches[-1].end:
            self.duplicate = ()


class Dispatch:
    """A capture in progress: a transfer whose copies are issued one after the other.

    Args:
        block: memory that the copies fill, flat ``uint8``.
        units: units in the order of the link.
        duplicates: duplicates of late units.
        over: called once, in any thread, when nothing is left to issue.

    Attributes:
        copies: progress of each unit.
        begun_s: time of the beginning, on the clock ``now_s``.
        complete: all copies are complete.
        copied_s: not known; None.
    """

    copied_s: float | None = None

    def __init__(
        self,
        lane: Lane,
        block: torch.Tensor,
        units: Sequence[Unit],
        duplicates: Duplicates,
        over: Callable[[], None],
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.copies = [UnitCopy(number, unit) for number, unit in enumerate(units)]
        self._lane = lane
        self._block = block
        self._duplicates = duplicates
        self._over = over
        self._now_s = now_s
        # Hooks also run in autograd's threads. Reentrant, because a signal handler may flush.
        self._lock = threading.RLock()
        self._next = 0  # all units before it were issued
        self._issuing = 0  # units being issued by the thread that holds the lock
        self._of: dict[str | None, list[UnitCopy]] = {None: self.copies}
        for copy in self.copies:
            self._of.setdefault(copy.unit.owner, []).append(copy)
        self._ended = False
        self._error: BaseException | None = None
        self.complete = False
        self.begun_s = now_s()

    @property
    def all_issued(self) -> bool:
        """Return True if nothing is left to issue."""
        return self._next == len(self.copies)

    def reach(self, event: int) -> None:
        """Issue all units planned for this event of the step, or for an earlier one."""
        with self._lock:
            while not self._ended and self._next < len(self.copies):
                copy = self.copies[self._next]
                if copy.unit.event > event:
                    return
                self._issue(copy)
            # Otherwise a signal handler has interrupted _issue(), which ends the capture itself.
            if not self._issuing:
                self._end()

    def admit(self, owner: str | None, timeout_s: float) -> bool:
        """Hold an update back until it cannot tear any copy.

        Args:
            owner: key of the optimizer; None if anything may change.

        Returns:
            False if one of its copies has taken ``timeout_s`` after the one before it.
        """
        awaited: list[tuple[Transfer, int]] = []
        if owner is None:
            self.flush()
        with self._lock:
            for copy in self._of.get(owner, ()):
                if copy.issued_s is None and copy.duplicate is None:
                    if copy.unit.late:
                        self._duplicate(copy, timeout_s)
                    else:
                        self._issue(copy)
                if copy.transfer is not None and copy.duplicate is None:
                    awaited.append((copy.transfer, copy.unit.batches[-1].end))
        # Without the lock: hooks in autograd's threads must be able to issue copies meanwhile.
        return all(transfer.gate(end, timeout_s) for transfer, end in awaited)

    def flush(self) -> None:
        """Issue everything in planned order: the step deviates from the plan, or is over."""
        self.reach(max((copy.unit.event for copy in self.copies), default=0))

    def fail(self, error: BaseException) -> None:
        """Issue nothing more: the capture has failed with this error."""
        with self._lock:
            self._error = self._error or error
            # Without a transfer no copy writes to the block.
            self.complete = self.complete or not any(copy.transfer for copy in self.copies)
            self._end()

    def gate(self, end: int, timeout_s: float) -> bool:
        """Wait as for any transfer. Units do not arrive in file order, so any part means
        everything."""
        return end <= 0 or self.admit(None, timeout_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all copies are complete; everything has been issued.

        Raises:
            Exception: error of a copy, or of issuing one.
        """
        for copy in self.copies:
            try:
                if copy.transfer is not None and not copy.transfer.wait(timeout_s):
                    return False
            except Exception as error:  # go on: other transfers may still be in progress
                self.fail(error)
        self.complete = True
        if self._error is not None:
            raise self._error
        return True

    def _issue(self, copy: UnitCopy) -> None:
        if self._ended or copy.issued_s is not None:
            self._advance()
            return
        self._issuing += 1  # a signal handler may flush meanwhile, and must not end the capture
        try:
            # Before the submission: a signal handler that flushes now must not issue the unit
            # again.
            copy.issued_s = self._now_s()
            batches: Sequence[Batch] = copy.batches
            if copy.duplicate is not None:
                self._duplicates.latest[copy.number] = copy
                batches = [*batches]  # lanes remember the tuples of batches that come again
            copy.transfer = self._lane.submit(
                batches, self._block, lambda end: copy.arrived(end, self._now_s())
            )
        except Exception as error:  # runs in a hook of training, which must not fail
            self.fail(error)
            return
        except BaseException:  # interrupted: no caller could wait for the copies begun
            self.fail(StateError("a capture was interrupted"))
            raise
        finally:
            self._issuing -= 1
        self._advance()

    def _advance(self) -> None:
        while not self.all_issued and self.copies[self._next].issued_s is not None:
            self._next += 1
        if self.all_issued and not self._issuing:
            self._end()

    def _duplicate(self, copy: UnitCopy, timeout_s: float) -> None:
        before = self._duplicates.latest.get(copy.number)
        try:
            if before is not None and before.duplicate and before.transfer is not None:
                # In host memory this waits until it is copied, and its memory free.
                before.transfer.gate(copy.unit.batches[-1].end, timeout_s)
            if before is not None and before.duplicate:
                self._issue(copy)  # on a device it is still to be copied: this update waits
            elif not copy.make_duplicate():
                self._duplicates.short = True
                self._issue(copy)
        except Exception as error:
            self.fail(error)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._over()
