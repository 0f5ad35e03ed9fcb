"""Contract of lanes, and the lane for tensors in host memory.

A lane is one queue: copies start in the order of their submission. A device with a copy engine has
a lane of its own (a side stream, :mod:`.cuda`). For tensors in host memory a thread replaces the
copy engine, with the same rules of ordering.

Yielding copies are the exception: copies submitted later that do not yield go first, between two of
their batches.

The rules (I1): tensors passed to :meth:`Lane.copy_now` may change when it returns. Tensors passed
to :meth:`Lane.submit` must not change until :meth:`Transfer.gate` has let their bytes through; each
update calls the gate first.

Body of a base taken straight from live tensors (``sync``).

Each chunk of the file is copied when it is needed. Training stands still until the last one is
taken, and the host memory needed is a few chunks.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from everstep.capture.batches import Batch, Runs, run_batch
from everstep.seams.memory import copy_memory, copy_view
from everstep.seams.processes import Condition, IoThreads
from everstep.state.layout import Placed, ShardLayout
from everstep.state.layout.shards import Seen, append_objects, overlaps, pieces
from everstep.state.values.tensors import host_bytes

_FEW_BYTES = 32 << 10  # torch would copy these in one thread as well

Progress = Callable[[int], None]
"""Called when all bytes of a block up to this position are copied."""

Take = Callable[[int], None]
"""Touches the pages of this number of bytes of a block, from its beginning."""


class Transfer(Protocol):
    """Copies in progress into one block."""

    @property
    def complete(self) -> bool:
        """True if all copies are complete."""
        ...

    @property
    def copied_s(self) -> float | None:
        """Duration of the copies by the device's clock, once they are complete.

        None if it is the time since their submission, or since the previous copies completed.
        """
        ...

    def gate(self, end: int, timeout_s: float) -> bool:
        """Hold back the caller's next operations until bytes ``[0, end)`` are copied.

        In host memory the call waits; on a device the current stream waits.

        Returns:
            False if they are not copied after ``timeout_s``.
        """
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until all copies are complete; return False after ``timeout_s``.

        Raises:
            Exception: error of a copy.
        """
        ...


class Lane(Protocol):
    """One queue of copies off one device."""

    def warm(
        self, tensors: Iterable[torch.Tensor], block: torch.Tensor, take: Take | None = None
    ) -> None:
        """Prepare the first copies of ``tensors`` into ``block``, in the lane's thread.

        Args:
            take: called there first, to touch the pages of the block.
        """
        ...

    def ready_bytes(self, tensors: Iterable[torch.Tensor], block: torch.Tensor) -> int:
        """Return the number of bytes of ``block``, from its beginning, that :meth:`warm` has
        prepared."""
        ...

    def leave(self) -> None:
        """Release the memory copied into so far, after the copies in progress."""
        ...

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        """Copy tensors that may change as soon as this returns."""
        ...

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        """Queue copies into ``block`` (flat ``uint8``, in host memory), in order."""
        ...

    def submit_yielding(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress
    ) -> Transfer:
        """Queue copies as :meth:`submit` does, but let its later copies go first."""
        ...

    def run(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` in the lane's thread after all copies queued there, yielding ones
        included."""
        ...

    def close(self) -> None:
        """End the thread, after all queued work."""
        ...


class CpuTransfer:
    """Copies made by a thread.

    Attributes:
        awaited: a caller waits at the gate, so the thread reports its progress after each batch.
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
        # Both are set after the bytes were copied and never go back, so a stale value only leads to
        # the wait below.
        if self._copied >= end or self._over:  # the usual case, without the lock
            return True
        with self._changed:
            # The copying thread reads it without the lock: if it sees it late, it reports at the
            # end of its run.
            self.awaited = True
            return self._changed.wait_for(lambda: self._copied >= end or self._over, timeout_s)

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            over = self._changed.wait_for(lambda: self._over, timeout_s)
        if self._error is not None:
            raise self._error
        return over

    def advance(self, end: int) -> None:
        """Report from the thread that bytes up to ``end`` are copied."""
        with self._changed:
            self._copied = end
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Report from the thread that nothing more will be copied."""
        with self._changed:
            self._error = error
            self._over = True
            self._changed.notify_all()


class CpuLane:
    """Lane that copies in a thread; :meth:`copy_now` copies in the caller's thread.

    It also fetches tensors from devices without a lane of their own (MPS, XPU), on the default
    stream of the device. Training on another stream must make that stream wait.
    """

    in_runs = True  # False in subclasses that do something at each copy

    def __init__(self) -> None:
        self._threads = IoThreads(1, "everstep-capture")
        self._ready: deque[Callable[[], None]] = deque()  # copies that do not yield, in order
        self._issued_s = 0.0  # submission time of the copies in progress

    def warm(
        self, tensors: Iterable[torch.Tensor], block: torch.Tensor, take: Take | None = None
    ) -> None:
        if take is not None:
            self.run(lambda: take(block.numel()))

    def ready_bytes(self, tensors: Iterable[torch.Tensor], block: torch.Tensor) -> int:
        return block.numel()

    def leave(self) -> None:
        """Do nothing: this lane keeps no reference to memory."""

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        for batch in batches:
            if batch.end - batch.begin <= _FEW_BYTES:
                _copy_alone(batch, block)
            else:
                run_batch(batch, block)

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        transfer = CpuTransfer()
        issued_s = self.now_s()

        def copy(tell: Progress) -> None:
            self._issued_s = issued_s
            if self.in_runs and isinstance(batches, Runs):
                for run in batches.runs:
                    self.copy_run(run, block, transfer, tell)
                    tell(run[-1].end)
            else:
                for batch in batches:
                    self.copy_batch(batch, block)
                    tell(batch.end)

        work = _made(transfer, progress, copy)
        # Listed before it is queued: yielding copies that are running now may take it before its
        # turn.
        self._ready.append(work)
        try:
            self._threads.submit(lambda: self._in_turn(work))
        except BaseException:  # interrupted: no caller waits for the copies or owns their memory
            # It may have been taken already. Then it ends before any job queued from now on, so
            # before the release of its memory.
            with contextlib.suppress(ValueError):
                self._ready.remove(work)
            raise
        return transfer

    def submit_yielding(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress
    ) -> Transfer:
        transfer = CpuTransfer()
        issued_s = self.now_s()

        def copy(tell: Progress) -> None:
            for batch in batches:
                self._let_pass()
                self._issued_s = issued_s
                self.copy_batch(batch, block)
                tell(batch.end)

        self._threads.submit(_made(transfer, progress, copy))
        return transfer

    def _in_turn(self, work: Callable[[], None]) -> None:
        """Run copies in their turn.

        They may have run already, before yielding copies, or may have been cancelled. All copies
        submitted before them have run, or were cancelled half-way.
        """
        if work in self._ready:
            while self._ready.popleft() is not work:
                pass
            work()

    def _let_pass(self) -> None:
        """Run waiting copies that do not yield, from within copies that do."""
        while self._ready:
            self._ready.popleft()()

    def run(self, job: Callable[[], None]) -> Future[None]:
        return self._threads.submit(job)

    def thread(self, name: str) -> IoThreads:
        """Return another thread, for a lane built on this one."""
        return IoThreads(1, name)

    def close(self) -> None:
        self._threads.close()

    def now_s(self) -> float:
        """Return the time of submission, for subclasses that use it."""
        return 0.0

    def copy_batch(self, batch: Batch, block: torch.Tensor) -> None:
        """Copy a batch, in the lane's thread."""
        _copy_alone(batch, block)

    def copy_run(
        self, run: Sequence[Batch], block: torch.Tensor, transfer: CpuTransfer, tell: Progress
    ) -> None:
        """Copy a run; report progress within it only if a caller waits."""
        target = block.data_ptr()
        # Addresses are computed before the first copy: between copies the thread holds the
        # interpreter lock, and training waits.
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
    """Return a function that makes copies and ends their transfer, with the error if there is
    one."""

    def tell(end: int) -> None:
        progress(end)
        transfer.advance(end)

    def work() -> None:
        try:
            copy(tell)
        except BaseException as error:  # raised in the thread that waits for the transfer
            transfer.end(error)
        else:
            transfer.end()

    return work


def _copy_alone(batch: Batch, block: torch.Tensor) -> None:
    """Copy a batch in this thread.

    A batch of one tensor is not copied by ``Tensor.copy_``, which would use all of torch's threads.
    """
    source = _address(batch)
    if source is None:
        run_batch(batch, block)
        return
    copy_memory(block.data_ptr() + batch.begin, source, batch.end - batch.begin)


def _address(batch: Batch) -> int | None:
    """Return the address of a batch of one tensor in host memory; None for other batches."""
    if len(batch.sources) != 1 or not batch.sources[0].is_cpu:
        return None
    return batch.sources[0].data_ptr()


class LiveBody:
    """Body read from live tensors, which must not change meanwhile.

    Args:
        layout: the tensors in file order.
        tensors: live tensors by entry name.
        objects: encoded objects after the tensors, by entry name.
    """

    def __init__(
        self, layout: ShardLayout, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, bytes]
    ) -> None:
        self._sizes = {name: len(data) for name, data in objects.items()}
        placed = append_objects(layout, self._sizes).placed
        self._placed = [place for place in placed if place.end > place.begin]
        self._ends = [place.end for place in self._placed]
        self._tensors = tensors
        self._objects = objects
        self._flat: tuple[str, torch.Tensor] | None = None

    def fill(self, begin: int, chunk: memoryview, seen: Seen) -> None:
        for place, start, stop in overlaps(self._placed, self._ends, begin, chunk.nbytes):
            live = self._bytes(place)[start - place.begin : stop - place.begin]
            copied = chunk[start - begin : stop - begin]
            for source, target in zip(pieces(live), pieces(copied), strict=True):
                copy_view(target, source)
                seen(target)

    def held(self, begin: int, end: int) -> memoryview | None:
        return None

    def objects_bytes(self) -> Mapping[str, int]:
        return self._sizes

    def _bytes(self, place: Placed) -> memoryview:
        """Return an entry's row-major bytes; the last converted tensor is kept for the next
        chunk."""
        name = place.entry.name
        if name in self._objects:
            return memoryview(self._objects[name])
        if self._flat is not None and self._flat[0] == name:
            return host_bytes(self._flat[1])
        flat = self._tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        self._flat = (name, flat)
        return host_bytes(flat)
