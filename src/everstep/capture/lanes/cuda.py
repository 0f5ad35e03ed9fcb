"""The lane of CUDA devices: copies run on a side stream, and updates wait for them there.

The trainer's thread only says from where on: the side stream waits for what the current stream
has been given so far (the update that made the state); the current stream waits, at the gate,
for the copies that it is about to overtake. A thread of its own enqueues the copies, some
microseconds for each of hundreds, in which the device would have nothing to do between two steps;
the gate waits for that thread, which mostly is long done. Nobody else waits on the CPU but the
lane's thread, which sees how far the copies have come (DataStates-LLM section V; DESIGN: I1).

Why a thread, and no progress word that the device writes behind its copies. With torch alone
that would be one more asynchronous copy, of 8 bytes, on the same stream. Streams promise that
it starts after the copies before it have ended, and CUDA promises that what was copied can be
seen from the host *once an event or stream was waited for*; it promises nothing to a process
that polls. Devices may be told to let their writes to host memory overtake each other (PCIe
relaxed ordering), and a word that arrives before its bytes would make the keeper write, and
sign, bytes that are not there. ``cuStreamWriteValue64`` does promise it: it puts a fence of
system scope before the word. torch does not offer it. So the thread waits for an event, which
makes the bytes visible here, and then sets the word by a store, whose order the arena keeps.
It sleeps while it waits (``blocking=True``) instead of spinning on a core, and wakes once per
64 MiB.

What has not been ordered before the current stream is not ordered before the copies either:
who trains on another stream than the one that is current at ``step()`` and ``save()`` makes
that one wait first, as for any other use of the parameters.

The threads here ask to be left out of CUDA graphs that are captured meanwhile
(:mod:`everstep.capture.cuda_graphs`). What captures an update is refused here.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from everstep.capture.cuda_graphs import ignore_graph_captures, refuse_graph_capture
from everstep.capture.lanes.batches import Batch, Runs
from everstep.capture.lanes.lane import CpuLane, CpuTransfer, Progress, Take, Transfer
from everstep.capture.lanes.pinned import PinnedAhead, PinnedMemory
from everstep.errors import OutOfSpaceError
from everstep.seams.processes.conditions import Outcome, wait_done
from everstep.seams.processes.threads import IoThreads
from everstep.state.values.tensors import byte_view

__all__ = [
    "CudaLane",
    "CudaTransfer",
    "Enqueued",
    "Issued",
    "Issuer",
    "Reached",
    "moment_on",
    "on_cuda",
]

Reached = tuple[int, Any, torch.device]
"""The end of some batches, the event behind their copies, and where they come from."""


class Enqueued(NamedTuple):
    """Copies that run by themselves: events in front of them, by device, and behind them. Or why it
    is not all of them, and events behind what was begun."""

    reached: Sequence[Reached] = ()
    first: Mapping[torch.device, Any] = MappingProxyType({})
    begun: Sequence[Any] = ()
    error: BaseException | None = None

    def events(self) -> Iterable[Any]:
        """Behind all of them."""
        return [*(event for _, event, _ in self.reached), *self.begun]

    def copied_s(self) -> float | None:
        """Of the device that took longest; all are over."""
        last = {device: event for _, event, device in self.reached}
        taken_ms = [self.first[device].elapsed_time(event) for device, event in last.items()]
        return max(taken_ms) / 1e3 if taken_ms else None

    def failed(self, error: BaseException, begun: Sequence[Any] = ()) -> Enqueued:
        """The same, with an error: without what its frames hold, which may be much of the memory
        that there was too little of."""
        found: BaseException | None = error
        while found is not None:
            found.__traceback__ = None
            found = found.__cause__ or found.__context__
        return self._replace(begun=begun, error=error)


Issued = Future[Enqueued]
"""What was enqueued, once it is; cancelled, if the call was interrupted before it began."""


class Issuer:
    """Enqueues in a thread, one after the other.

    Args:
        thread: of one thread; closed with this.
    """

    def __init__(self, thread: IoThreads) -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._issued: list[Issued] = []  # perhaps not yet

    def issue(self, enqueue: Callable[[], Enqueued]) -> Issued:
        """Has copies enqueued; ``enqueue`` says what it fails with, and behind which events."""
        issued: Issued = Outcome()

        def work() -> None:
            if not issued.set_running_or_notify_cancel():
                return
            try:
                found = enqueue()
            except BaseException as error:  # whoever waits for it would do so for ever
                found = Enqueued().failed(error)
            issued.set_result(found)

        # Known before it begins: whoever gives memory back waits for it, even if this call is
        # interrupted on its way out.
        with self._lock:
            self._issued = [*(one for one in self._issued if not one.done()), issued]
        try:
            self._thread.submit(work)
        except BaseException:
            issued.cancel()
            raise
        return issued

    def under_way(self) -> list[Issued]:
        """What may not be enqueued yet."""
        with self._lock:
            return [one for one in self._issued if not one.done()]

    def close(self) -> None:
        """Ends the thread, after what was issued."""
        self._thread.close()


_cuda: Any = torch.cuda  # its constructors have no annotations

_EVENT_BYTES = 64 << 20  # between two of them: a millisecond of a fast link
_DUPLICATES_BYTES_MAX = 256 << 20  # on the devices, while one capture's marks are copied
_AT_ONCE_BYTES = 256 << 10  # of host memory: copied sooner than another thread would wake up

_Behind = dict[torch.device, tuple[Any, Any]]
"""A stream of each device, and the event that it waits for first."""


class _Split(NamedTuple):
    """Batches on CUDA devices, and which these are; and those in host memory, which are copied at
    once, and by the lane's thread."""

    ours: Sequence[Batch]
    devices: Sequence[torch.device]
    small: Sequence[Batch]
    large: Sequence[Batch]


def moment_on(tensor: torch.Tensor) -> Any:
    """An event behind what the current stream of its device has been given so far, which tells the
    time: ``query()``, ``elapsed_time(other)`` in milliseconds. None: it is on no CUDA device."""
    device = _device(tensor)
    return _event(_cuda.current_stream(device)) if device.type == "cuda" else None


def on_cuda(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in the memory of a CUDA device."""
    return _device(tensor).type == "cuda"


class CudaLane:
    """One side stream per device, and one more for copies that yield. Tensors in host memory,
    which most states have, too (Adam's step counters), are copied by ``host``, whose thread also is
    the lane's own.

    Args:
        host: closed with this lane.
    """

    def __init__(self, host: CpuLane) -> None:
        self._host = host
        self._streams: dict[torch.device, Any] = {}
        self._yielding: dict[torch.device, Any] = {}
        self._pinned: PinnedMemory | None = None
        self._ahead = PinnedAhead(lambda slice_: host.run(partial(_beside_captures, slice_)))
        self._issuer = Issuer(host.thread("everstep-issue"))

    def warm(
        self, tensors: Iterable[torch.Tensor], block: torch.Tensor, take: Take | None = None
    ) -> None:
        """Pins ``block``, in the lane's thread, which does between two slices what else it has."""
        first = _first_device(tensors)
        if first is None:  # all of them have been moved back to host memory
            self._host.warm((), block, take)
            return
        self._ahead.make_ready(self._pinned_of(block, first), block, take)

    def ready_bytes(self, tensors: Iterable[torch.Tensor], block: torch.Tensor) -> int:
        pinned = self._pinned
        if _first_device(tensors) is None:
            return self._host.ready_bytes((), block)
        return pinned.ready_bytes(block) if pinned is not None and pinned.holds(block) else 0

    def leave(self) -> None:
        """Unpins it, and no longer keeps it mapped."""
        self._ahead.stop()
        pinned = self._pinned
        self._pinned = None
        if pinned is not None:
            self.run(pinned.release)

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        """Copies from duplicates, made in the order of the current stream: the sources may
        change. What is too much to be duplicated is copied itself, and the current stream
        waits until it is."""
        split = self._split(batches)
        self._host.copy_now(split.small, block)
        self._host.copy_now(split.large, block)
        if not split.ours:
            return
        refuse_graph_capture()
        pinned = self._pinned_of(block, split.devices[0])
        pinned.pin(block, at_once=True)
        duplicates = []
        others = []
        room = _DUPLICATES_BYTES_MAX
        for batch in split.ours:
            size = batch.end - batch.begin
            if size <= room:
                with contextlib.suppress(OutOfSpaceError):
                    _use(batch, _cuda.current_stream(_device_of(batch)))
                    duplicates.append(Batch(batch.begin, batch.end, (_packed(batch),)))
                    room -= size
                    continue
            others.append(batch)
        behind = self._behind_current(split.devices)
        self._enqueue(duplicates, block, pinned, behind, [], {})
        reached: list[Reached] = []
        self._enqueue(others, block, pinned, behind, reached, {})
        self._hold_back(reached)

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        return self._submit(batches, block, progress, yielding=False)

    def submit_yielding(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress
    ) -> Transfer:
        """On a side stream of its own: the device takes turns between the two, so what goes first
        gets half of the link, and not all of it."""
        return self._submit(batches, block, progress, yielding=True)

    def _submit(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress, *, yielding: bool
    ) -> Transfer:
        split = self._split(batches)
        if split.ours:
            refuse_graph_capture()
        # The marks of this capture, on any device, lie anywhere in the block.
        marks = self._begun()
        issued: Issued | None = None
        if split.ours:
            pinned = self._pinned_of(block, split.devices[0])
            behind = self._behind_current(split.devices, yielding=yielding)
            issued = self._issue(split.ours, block, pinned, behind)
        self._host.copy_now(split.small, block)
        large = split.large
        submit = self._host.submit_yielding if yielding else self._host.submit
        hosted = submit(large, block, lambda end: None) if large else None
        transfer = CudaTransfer(issued, hosted, large)
        end = batches[-1].end if batches else 0
        here = self._here()

        def watch() -> None:
            ignore_graph_captures()
            try:
                if hosted is not None:
                    hosted.wait(0.0)  # it was before us in this thread; raises what it failed with
                with here:
                    for mark in marks:
                        mark.synchronize()
                    if issued is not None:
                        _done(issued, None)
                        for upto, event, _ in issued.result().reached:
                            event.synchronize()
                            progress(upto)
                        if (error := issued.result().error) is not None:
                            raise error
                        if hosted is None:
                            transfer.copied_s = issued.result().copied_s()
                if end:
                    progress(end)
            except BaseException as error:
                transfer.end(error)
                raise
            transfer.end()

        self._host.run(watch)
        return transfer

    def in_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().cpu()

    def run(self, job: Callable[[], None]) -> Future[None]:
        """Behind all copies that were begun, whether or not anybody waits for them; what
        ``job`` itself fetches from a device comes on the side streams, not behind whatever
        training has enqueued meanwhile."""
        streams = list(self._streams.values())
        here = self._here()
        issued = self._issuer.under_way()  # asked first: what is over then is behind `begun`
        begun: list[Any] = []
        # A device that has failed copies no more, and its transfers say what happened; the job,
        # which may give memory back, is done all the same.
        with contextlib.suppress(RuntimeError):
            begun = self._begun()

        def behind() -> None:
            ignore_graph_captures()
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(RuntimeError):
                    stack.enter_context(here)
                    for event in begun:
                        event.synchronize()
                for one in issued:
                    _done(one, None)
                    with contextlib.suppress(RuntimeError):
                        for event in _enqueued(one).events():
                            event.synchronize()
                with contextlib.suppress(RuntimeError):
                    for stream in streams:
                        stack.enter_context(_cuda.stream(stream))
                job()

        return self._host.run(behind)

    def close(self) -> None:
        """Ends the thread, after what is queued; the arena is no longer pinned then."""
        self.leave()
        self._issuer.close()
        self._host.close()

    def _pinned_of(self, block: torch.Tensor, device: torch.device) -> PinnedMemory:
        if self._pinned is not None and not self._pinned.holds(block):  # another keeper's arena
            self.leave()
        if self._pinned is None:
            self._pinned = PinnedMemory(block, device)
        return self._pinned

    def _split(self, batches: Sequence[Batch]) -> _Split:
        if isinstance(batches, Runs) and isinstance(batches.split, _Split):
            return batches.split
        ours: list[Batch] = []
        small: list[Batch] = []
        large: list[Batch] = []
        for batch in batches:
            if _device_of(batch).type == "cuda":
                ours.append(batch)
            else:
                (small if _small(batch) else large).append(batch)
        devices = list(dict.fromkeys(map(_device_of, ours)))
        split = _Split(ours, devices, small, large)
        if isinstance(batches, Runs):
            batches.split = split
        return split

    def _issue(
        self, batches: Sequence[Batch], block: torch.Tensor, pinned: PinnedMemory, behind: _Behind
    ) -> Issued:
        """Has the copies enqueued."""

        def enqueue() -> Enqueued:
            reached: list[Reached] = []
            first: dict[torch.device, Any] = {}
            found = Enqueued(reached, first)
            ignore_graph_captures()
            try:
                # In a thread that has named no device, to leave one means to go to the first.
                with _cuda.device(next(iter(behind))):
                    try:
                        pinned.pin(block)
                        self._enqueue(batches, block, pinned, behind, reached, first)
                    except Exception as error:
                        begun: list[Any] = []
                        with contextlib.suppress(RuntimeError):
                            begun = [_event(stream) for stream, _ in behind.values()]
                        return found.failed(error, begun)
            except Exception as error:  # of a device that has failed
                return found.failed(error)
            return found

        return self._issuer.issue(enqueue)

    def _enqueue(
        self,
        batches: Sequence[Batch],
        block: torch.Tensor,
        pinned: PinnedMemory,
        behind: _Behind,
        reached: list[Reached],
        first: dict[torch.device, Any],
    ) -> None:
        for stream, moment in behind.values():
            moment.wait(stream)
        for device, group in itertools.groupby(batches, key=_device_of):
            stream, _ = behind[device]
            if device not in first:
                first[device] = _event(stream)
            with _cuda.stream(stream):
                for end, parts, targets in _runs(group, stream, block, pinned):
                    _send(parts, targets)
                    reached.append((end, _event(stream), device))

    def _behind_current(
        self, devices: Iterable[torch.device], *, yielding: bool = False
    ) -> _Behind:
        """Side streams, and what they wait for: all that was enqueued on the current ones."""
        streams = self._yielding if yielding else self._streams
        found: _Behind = {}
        for device in devices:
            if device not in streams:
                streams[device] = _cuda.Stream(device)
            found[device] = streams[device], _event(_cuda.current_stream(device))
        return found

    def _here(self) -> contextlib.AbstractContextManager[Any]:
        """For the lane's thread, whatever it does with events and streams: one of our devices is
        its current one. In a thread that has named none CUDA makes a context on the first device,
        which takes some hundred MB of it, and may be another rank's."""
        device = next(iter([*self._streams, *self._yielding]), None)
        return contextlib.nullcontext() if device is None else _cuda.device(device)

    def _begun(self) -> list[Any]:
        """Events behind all copies that were begun."""
        return [_event(stream) for stream in [*self._streams.values(), *self._yielding.values()]]

    def _hold_back(self, reached: Sequence[Reached]) -> None:
        """The current streams wait for copies."""
        for device, event in {device: event for _, event, device in reached}.items():
            event.wait(_cuda.current_stream(device))


class CudaTransfer(CpuTransfer):
    """Copies on side streams, and in the lane's thread what lies in host memory.

    Args:
        issued: the copies on side streams, in the order of their ends; None: there are none.
        hosted: the copies in the thread, of the batches ``large``, if there are any.
    """

    def __init__(
        self, issued: Issued | None, hosted: Transfer | None, large: Sequence[Batch]
    ) -> None:
        super().__init__()
        self._issued = issued
        self._hosted = hosted
        self._large = large

    def gate(self, end: int, timeout_s: float) -> bool:
        """The current stream of each device waits; the CPU does so only until the copies are
        enqueued, and for what lies in host memory."""
        if end <= 0:
            return True
        if self._issued is not None and not _done(self._issued, timeout_s):
            return False
        last: dict[torch.device, Any] = {}
        for upto, event, device in self._reached():
            last[device] = event
            if upto >= end:
                break
        for device, event in last.items():
            event.wait(_cuda.current_stream(device))
        if self._hosted is None:
            return True
        ends = [batch.end for batch in self._large if batch.begin < end]
        return not ends or self._hosted.gate(ends[-1], timeout_s)

    def _reached(self) -> Sequence[Reached]:
        return () if self._issued is None else _enqueued(self._issued).reached


def _runs(
    batches: Iterable[Batch], stream: Any, block: torch.Tensor, pinned: PinnedMemory
) -> Iterator[tuple[int, Sequence[torch.Tensor], Sequence[torch.Tensor]]]:
    """As many copies at a time as there is one event for: where they end, what is copied, and
    where to. For the side stream, which is the current one."""
    parts: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    since_bytes = end = 0
    for batch in batches:
        _use(batch, stream)
        flat = batch.sources[0] if len(batch.sources) == 1 else _packed(batch)
        for first, last in pinned.pieces(block, batch.begin, batch.end):
            parts.append(flat[first - batch.begin : last - batch.begin])
            targets.append(block[first:last])
        end = batch.end
        since_bytes += end - batch.begin
        if since_bytes >= _EVENT_BYTES:
            yield end, parts, targets
            parts = []
            targets = []
            since_bytes = 0
    if parts:
        yield end, parts, targets


def _small(batch: Batch) -> bool:
    return batch.end - batch.begin < _AT_ONCE_BYTES


def _beside_captures(job: Callable[[], None]) -> None:
    ignore_graph_captures()
    job()


def _first_device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """That of CUDA which the first of these that is on any is on."""
    devices = (device for tensor in tensors if (device := _device(tensor)).type == "cuda")
    return next(devices, None)


def _device_of(batch: Batch) -> torch.device:
    return _device(batch.rearranged if batch.rearranged is not None else batch.sources[0])


def _use(batch: Batch, stream: Any) -> None:
    for tensor in batch.sources:
        _used_on(tensor, stream)
    if batch.rearranged is not None:
        _used_on(batch.rearranged, stream)


def _enqueued(issued: Issued) -> Enqueued:
    """What has become of it; nothing, where it was called off."""
    return Enqueued() if issued.cancelled() else issued.result()


# --- What a test replaces to play a device ----------------------------------------------


def _done(issued: Issued, timeout_s: float | None) -> bool:
    """Waits until it is, or has failed."""
    if timeout_s is None:
        return bool(wait([issued]).done)
    return issued.done() or wait_done(issued, timeout_s)


def _device(tensor: torch.Tensor) -> torch.device:
    return tensor.device


def _event(stream: Any) -> Any:
    """An event behind everything that the stream has been given."""
    event = _cuda.Event(enable_timing=True, blocking=True)  # who waits for it sleeps
    event.record(stream)
    return event


def _packed(batch: Batch) -> torch.Tensor:
    """The bytes of a batch in memory of their own, on its device.

    Raises:
        OutOfSpaceError: the device has no room for them.
    """
    try:
        if batch.rearranged is None:
            return batch.sources[0].clone() if len(batch.sources) == 1 else torch.cat(batch.sources)
        # Resolved here: a copy to the host that is not waited for would do it too early.
        return byte_view(batch.rearranged.resolve_conj().resolve_neg().contiguous())
    except torch.OutOfMemoryError as error:
        raise OutOfSpaceError(
            f"the GPU has no {batch.end - batch.begin} bytes left to bring tensors into the order "
            "of the file",
            hint="leave that much of its memory free",
        ) from error


def _send(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copies to pinned host memory, in the order of the current stream. In one call: behind each
    the interpreter's lock would be wanted back, which training has."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def _used_on(tensor: torch.Tensor, stream: Any) -> None:
    """Its memory is not to be given to others before the stream is done with it, even if the
    tensor is freed meanwhile."""
    tensor.record_stream(stream)
