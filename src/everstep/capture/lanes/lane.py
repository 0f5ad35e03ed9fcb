"""Lanes: ordered copies from a device into host memory.

A lane is one queue: copies start in the order of their submission. A device with a copy
engine has a lane of its own (a side stream, :mod:`.cuda`); for tensors in host memory a
thread plays the copy engine, with the same rules of ordering.

Copies that were submitted as yielding are the exception: whatever is submitted later, and is not
yielding, goes first, between two of their batches.

The rules (I1): what :meth:`Lane.copy_now` was given may change as soon as it returns. What
:meth:`Lane.submit` was given may not change until :meth:`Transfer.gate` has let its bytes
through; whoever updates asks the gate first.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from everstep.capture.lanes.batches import Batch, Runs, run_batch
from everstep.seams.memory import copy_memory
from everstep.seams.processes.conditions import Condition
from everstep.seams.processes.threads import IoThreads

__all__ = ["CpuLane", "CpuTransfer", "Lane", "Progress", "Take", "Transfer"]

_FEW_BYTES = 32 << 10  # for which torch would not use several threads either

Progress = Callable[[int], None]
"""Told that all bytes of a block up to this one are there."""

Take = Callable[[int], None]
"""Takes the pages of so many bytes of a block, from its beginning."""


class Transfer(Protocol):
    """Copies under way into one block."""

    @property
    def complete(self) -> bool:
        """Nothing is copied any more."""
        ...

    @property
    def copied_s(self) -> float | None:
        """How long the copies took, by a device's clock, once they are complete; None: as long as
        from when they were submitted, or the ones before were complete."""
        ...

    def gate(self, end: int, timeout_s: float) -> bool:
        """Holds back what the caller does next until bytes ``[0, end)`` are copied: in host
        memory by waiting, on a device by making the current stream wait.

        Returns:
            False when they are not after ``timeout_s``.
        """
        ...

    def wait(self, timeout_s: float) -> bool:
        """Waits until all copies are complete; False if they are not after ``timeout_s``.

        Raises:
            Exception: what a copy failed with.
        """
        ...


class Lane(Protocol):
    """One queue of copies off one device."""

    def warm(
        self, tensors: Iterable[torch.Tensor], block: torch.Tensor, take: Take | None = None
    ) -> None:
        """Does in the lane's thread what would hold up the first copies of ``tensors`` into
        ``block``.

        Args:
            take: called there first: its pages are to be taken.
        """
        ...

    def ready_bytes(self, tensors: Iterable[torch.Tensor], block: torch.Tensor) -> int:
        """So much of ``block``, from its beginning, is for copies of ``tensors`` what :meth:`warm`
        makes of it."""
        ...

    def leave(self) -> None:
        """From now on other memory is copied into: lets go of the one so far, behind copies that
        are under way."""
        ...

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        """Copies what may change as soon as this returns."""
        ...

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        """Queues copies into ``block`` (flat ``uint8``, in host memory), in order."""
        ...

    def submit_yielding(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress
    ) -> Transfer:
        """As :meth:`submit`; but what is submitted by that from now on goes first."""
        ...

    def in_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it lies in host memory, or a copy of it there."""
        ...

    def run(self, job: Callable[[], None]) -> Future[None]:
        """Runs ``job`` in the lane's thread, behind the copies that thread was given, whether or
        not they yield."""
        ...

    def close(self) -> None:
        """Ends the thread, after what is queued."""
        ...


class CpuTransfer:
    """Copies made by a thread.

    Attributes:
        awaited: somebody has come to the gate too early: whoever copies tells at once how far
            it is.
    """

    def __init__(self) -> None:
        self.awaited = False
        self.copied_s: float | None = None
        self._changed = Condition()
        self._copied = 0
        self._over = False
        self._error: BaseException | None = None

    @property
    def complete(self) -> bool:
        return self._over

    def gate(self, end: int, timeout_s: float) -> bool:
        if self._copied >= end or self._over:  # mostly: seen without the lock
            return True
        with self._changed:
            self.awaited = True
            return self._changed.wait_for(lambda: self._copied >= end or self._over, timeout_s)

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            over = self._changed.wait_for(lambda: self._over, timeout_s)
        if self._error is not None:
            raise self._error
        return over

    def advance(self, end: int) -> None:
        """Told by the thread: bytes up to ``end`` are copied."""
        with self._changed:
            self._copied = end
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Told by the thread: nothing more will be copied."""
        with self._changed:
            self._error = error
            self._over = True
            self._changed.notify_all()


class CpuLane:
    """A thread that copies. Tensors on a device without a lane of its own (MPS, XPU) are fetched by
    it, too, from the stream of that device that every thread begins with: who trains on another one
    makes it wait. Marks are copied by the caller."""

    _in_runs = True  # a kind of lane that does something at each copy says no

    def __init__(self) -> None:
        self._threads = IoThreads(1, "everstep-capture")
        self._ready: deque[Callable[[], None]] = deque()  # copies that do not yield, in order
        self._issued_s = 0.0  # when what the thread copies was submitted

    def warm(
        self, tensors: Iterable[torch.Tensor], block: torch.Tensor, take: Take | None = None
    ) -> None:
        if take is not None:
            self.run(lambda: take(block.numel()))

    def ready_bytes(self, tensors: Iterable[torch.Tensor], block: torch.Tensor) -> int:
        return block.numel()

    def leave(self) -> None:
        """Nothing: nor is it kept here."""

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        for batch in batches:
            if batch.end - batch.begin <= _FEW_BYTES:
                _copy_alone(batch, block)
            else:
                run_batch(batch, block)

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        transfer = CpuTransfer()
        issued_s = self._now()

        def copy(tell: Progress) -> None:
            self._issued_s = issued_s
            if self._in_runs and isinstance(batches, Runs):
                for run in batches.runs:
                    self._copy_run(run, block, transfer, tell)
                    tell(run[-1].end)
            else:
                for batch in batches:
                    self._copy(batch, block)
                    tell(batch.end)

        work = _made(transfer, progress, copy)
        self._ready.append(work)
        try:
            self._threads.submit(lambda: self._in_turn(work))
        except BaseException:  # an interrupt: nobody waits for it, nor owns the memory any more
            with contextlib.suppress(ValueError):
                self._ready.remove(work)
            raise
        return transfer

    def submit_yielding(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress
    ) -> Transfer:
        transfer = CpuTransfer()
        issued_s = self._now()

        def copy(tell: Progress) -> None:
            for batch in batches:
                self._let_pass()
                self._issued_s = issued_s
                self._copy(batch, block)
                tell(batch.end)

        self._threads.submit(_made(transfer, progress, copy))
        return transfer

    def _in_turn(self, work: Callable[[], None]) -> None:
        """Copies whose turn has come, unless they went before others that yield, or were called
        off; what was submitted before them is made, or was called off half-way."""
        if work in self._ready:
            while self._ready.popleft() is not work:
                pass
            work()

    def _let_pass(self) -> None:
        """Copies that yield are under way: those that do not, and wait, go first."""
        while self._ready:
            self._ready.popleft()()

    def in_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().cpu()

    def run(self, job: Callable[[], None]) -> Future[None]:
        return self._threads.submit(job)

    def thread(self, name: str) -> IoThreads:
        """One beside its own, for a lane that is made of this one."""
        return IoThreads(1, name)

    def close(self) -> None:
        self._threads.close()

    def _now(self) -> float:
        """When copies are submitted, for a kind of lane that asks."""
        return 0.0

    def _copy(self, batch: Batch, block: torch.Tensor) -> None:
        _copy_alone(batch, block)

    def _copy_run(
        self, run: Sequence[Batch], block: torch.Tensor, transfer: CpuTransfer, tell: Progress
    ) -> None:
        """Copies a run, and tells nobody of its parts unless somebody waits."""
        target = block.data_ptr()
        # SampledLine up before the first: in between, each microsecond is one of training's.
        moves = [
            (batch, target + batch.begin, _address(batch), batch.end - batch.begin) for batch in run
        ]
        for batch, to, source, size_bytes in moves:
            if source is None:
                run_batch(batch, block)
            else:
                copy_memory(to, source, size_bytes)
            if transfer.awaited:
                tell(batch.end)


def _made(
    transfer: CpuTransfer, progress: Progress, copy: Callable[[Progress], None]
) -> Callable[[], None]:
    """Makes copies, and ends their transfer: with what they have failed with, if they have."""

    def tell(end: int) -> None:
        progress(end)
        transfer.advance(end)

    def work() -> None:
        try:
            copy(tell)
        except BaseException as error:  # handed to whoever waits for it
            transfer.end(error)
        else:
            transfer.end()

    return work


def _copy_alone(batch: Batch, block: torch.Tensor) -> None:
    """Copies a batch in this thread: not by ``Tensor.copy_``, if it is one tensor, which would use
    as many threads as torch has for training."""
    source = _address(batch)
    if source is None:
        run_batch(batch, block)
        return
    copy_memory(block.data_ptr() + batch.begin, source, batch.end - batch.begin)


def _address(batch: Batch) -> int | None:
    """Where a batch lies that is one tensor in host memory."""
    if len(batch.sources) != 1 or not batch.sources[0].is_cpu:
        return None
    return batch.sources[0].data_ptr()
