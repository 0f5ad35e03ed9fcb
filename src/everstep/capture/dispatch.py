"""Copies issued in planned order, at planned events of the step (Checkflow, section III).

A capture is cut into *units*. Each is issued at its event, so that the lane's queue never holds
more than the plan wants there. An update waits for the units that hold the entries it is going to
change (I1), and for no others: an optimizer of all parameters waits for all of them, because torch
calls no hook between the parameters of one ``step()``; an optimizer of a single parameter, which
updates during backward, waits for its own. A unit planned for later than its update is duplicated
first, into memory taken when the plan was made, and the update does not wait for it.

No order of events can tear a tensor: a unit not yet issued at its update is issued then, and the
update waits for it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from everstep.capture.lanes.batches import Batch, run_batch
from everstep.capture.lanes.lane import Lane, Transfer
from everstep.errors import StateError


@dataclass(frozen=True, slots=True)
class Unit:
    """Copies that are issued together.

    Attributes:
        event: event of the step at which they are issued.
        owner: key of the optimizer that updates their sources; ``""`` if none does.
        batches: the copies, in file order.
        slots: for each batch, offset in the memory for duplicates where it is duplicated before its
            update; empty if it is copied in place.
        planned_s: for each batch, planned start and end in seconds after the step mark; empty
            without a plan.
    """

    event: int
    owner: str
    batches: tuple[Batch, ...]
    slots: tuple[int, ...] = ()
    planned_s: tuple[tuple[float, float], ...] = ()


@dataclass(slots=True)
class Duplicates:
    """Memory for duplicates on each device, and the transfers that still read it.

    Attributes:
        readers: transfer that reads the slots of a unit, by the number of the unit.
    """

    memory: Mapping[torch.device, torch.Tensor]
    readers: dict[int, Transfer] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Size on all devices."""
        return sum(memory.numel() for memory in self.memory.values())


class Dispatch:
    """A capture in progress: a transfer whose copies are issued one after the other.

    Args:
        block: memory that the copies fill, flat ``uint8``.
        units: units in the order of the link.
        duplicates: memory for units with slots.
        over: called once, in any thread, when nothing is left to issue.

    Attributes:
        issued_s: issue time of each unit, on the clock ``now_s``; None until then.
        arrived_s: for each unit, arrival times of its batches.
        duplicated_bytes: number of duplicated bytes.
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
        self.units = units
        self._lane = lane
        self._block = block
        self._duplicates = duplicates
        self._over = over
        self._now_s = now_s
        # Hooks also run in autograd's threads. Reentrant, because a signal handler may flush.
        self._lock = threading.RLock()
        self._next = 0  # all units before it were issued
        self._issuing = 0  # units being issued by the thread that holds the lock
        self._of: dict[str | None, list[int]] = {None: list(range(len(units)))}
        for number, unit in enumerate(units):
            self._of.setdefault(unit.owner, []).append(number)
        self._transfers: list[Transfer | None] = [None] * len(units)
        self._copies: dict[int, tuple[Batch, ...]] = {}  # batches of duplicated units
        self._ended = False
        self._error: BaseException | None = None
        self.complete = False
        self.begun_s = now_s()
        self.issued_s: list[float | None] = [None] * len(units)
        self.arrived_s: list[list[float]] = [[] for _ in units]
        self.duplicated_bytes = 0

    @property
    def all_issued(self) -> bool:
        """Return True if nothing is left to issue."""
        return self._next == len(self.units)

    def reach(self, event: int) -> None:
        """Issue all units planned for this event of the step, or for an earlier one."""
        with self._lock:
            while not self._ended and self._next < len(self.units):
                if self.units[self._next].event > event:
                    return
                self._issue(self._next)
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
            for number in self._of.get(owner, ()):
                unit = self.units[number]
                if self.issued_s[number] is None and number not in self._copies:
                    if unit.slots:
                        self._duplicate(number, timeout_s)
                    else:
                        self._issue(number)
                transfer = self._transfers[number]
                if transfer is not None and number not in self._copies:
                    awaited.append((transfer, unit.batches[-1].end))
        # Without the lock: hooks in autograd's threads must be able to issue copies meanwhile.
        return all(transfer.gate(end, timeout_s) for transfer, end in awaited)

    def flush(self) -> None:
        """Issue everything in planned order: the step deviates from the plan, or is over."""
        if self.units:
            self.reach(max(unit.event for unit in self.units))
        else:
            self.reach(0)

    def fail(self, error: BaseException) -> None:
        """Issue nothing more: the capture has failed with this error."""
        with self._lock:
            self._error = self._error or error
            # Without a transfer no copy writes to the block.
            self.complete = self.complete or not any(self._transfers)
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
        for transfer in self._transfers:
            try:
                if transfer is not None and not transfer.wait(timeout_s):
                    return False
            except Exception as error:  # go on: other transfers may still be in progress
                self.fail(error)
        self.complete = True
        if self._error is not None:
            raise self._error
        return True

    def _issue(self, number: int) -> None:
        if self._ended or self.issued_s[number] is not None:
            self._advance()
            return
        self._issuing += 1  # a signal handler may flush meanwhile, and must not end the capture
        try:
            # Before the submission: a signal handler that flushes now must not issue the unit
            # again.
            self.issued_s[number] = self._now_s()
            batches = self._copies.get(number, self.units[number].batches)
            arrived = functools.partial(self._arrived, number)
            self._transfers[number] = transfer = self._lane.submit(batches, self._block, arrived)
            if number in self._copies:
                self._duplicates.readers[number] = transfer
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
        while self._next < len(self.units) and self.issued_s[self._next] is not None:
            self._next += 1
        if self.all_issued and not self._issuing:
            self._end()

    def _duplicate(self, number: int, timeout_s: float) -> None:
        """Copy a unit within its device, in the order of the current stream."""
        unit = self.units[number]
        reader = self._duplicates.readers.get(number)
        try:
            if reader is not None and not reader.gate(unit.batches[-1].end, timeout_s):
                self._issue(number)  # the copies of the step before still read this slot
                return
            copies = []
            for batch, slot in zip(unit.batches, unit.slots, strict=True):
                memory = self._duplicates.memory[_device_of(batch)]
                size = batch.end - batch.begin
                run_batch(Batch(slot, slot + size, batch.sources, batch.rearranged), memory)
                copies.append(Batch(batch.begin, batch.end, (memory[slot : slot + size],)))
                self.duplicated_bytes += size
        except Exception as error:
            self.fail(error)
            return
        self._copies[number] = tuple(copies)

    def _arrived(self, number: int, end: int) -> None:
        self.arrived_s[number].append(self._now_s())

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._over()


def _device_of(batch: Batch) -> torch.device:
    return (batch.sources[0] if batch.rearranged is None else batch.rearranged).device
