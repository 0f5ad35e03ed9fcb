"""Lane of CUDA devices: copies run on a side stream, and updates wait for them there.

The training thread only sets the starting point: the side stream waits for the work enqueued on the
current stream so far (the update that made the state); at the gate, the current stream waits for
the copies of what it is about to overwrite. A separate thread enqueues the copies, which takes some
microseconds for each of hundreds, during which the device would be idle between two steps. The gate
waits for that thread, which has usually finished long before. Only the lane's thread waits on the
CPU; it follows the progress of the copies (DataStates-LLM, section V; I1; docs/design/capture.md).

Why a thread, and not a progress word that the device writes after its copies: with torch alone,
that would be one more asynchronous copy, of 8 bytes, on the same stream. Streams promise that it
starts after the copies before it have ended, and CUDA promises that copied bytes are visible to the
host *after waiting for an event or stream*; it promises nothing to a process that polls. Devices
may be configured to let writes to host memory overtake each other (PCIe relaxed ordering), and a
word that arrives before its bytes would make the keeper write, and sign, bytes that are not there.
``cuStreamWriteValue64`` does promise the order, by a fence of system scope before the word, but
torch does not offer it. So the thread waits for an event, which makes the bytes visible here, and
then sets the word by a store, whose order the arena keeps. It sleeps while it waits
(``blocking=True``) instead of spinning on a core, and wakes once per 64 MiB.

Work not ordered before the current stream is not ordered before the copies either: training on
another stream than the current one at ``step()`` and ``save()`` must make that one wait first, as
for any other use of the parameters.

The threads here exclude themselves from CUDA graphs that are captured meanwhile. The capture of an
update is refused here.

Coexistence with CUDA graphs that the user captures; none of them may contain an update.

While a graph is captured in torch's default mode, CUDA refuses potentially unsafe calls of any
other thread (pinning memory, waiting for an event), and the capture fails. everstep's calls are
safe: they use only streams of their own. A thread can declare this for itself
(``cuThreadExchangeStreamCaptureMode``), as torch does in its threads that wait for NCCL.

The lane is chosen by the devices of the tensors, at each copy and not at construction, because a
model may be moved to a device after its Checkpointer was created.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from everstep.capture.batches import Batch, Chunks, Runs
from everstep.capture.issuer import Enqueued, Issued, Issuer, Reached
from everstep.capture.lane import CpuLane, CpuTransfer, Lane, Progress, Take, Transfer
from everstep.capture.pinned import PinnedAhead, PinnedMemory
from everstep.capture.stage import DeviceStage, StagedCopy, StagePlan
from everstep.errors import OutOfSpaceError, StateError
from everstep.seams.machine import use_thread_local_captures
from everstep.seams.processes import wait_done
from everstep.state.values.tensors import byte_view

_log = logging.getLogger("everstep")
_cuda: Any = torch.cuda
_said = threading.local()


def ignore_graph_captures() -> None:
    """Exclude the calling thread from graph captures of other threads.

    Call it in a thread of a lane before it waits for events or pins memory; it acts once per
    thread. If the driver has no such call, captures fail while copies are made.
    """
    if getattr(_said, "it", False) or not _cuda.is_initialized():
        return
    _said.it = True
    use_thread_local_captures()


def refuse_graph_capture() -> None:
    """Refuse an update or a save inside the capture of a graph; call it on any machine.

    Raises:
        StateError: the current stream is being captured into a CUDA graph.
    """
    # Only once CUDA is in use: without tensors on CUDA devices everstep calls no CUDA function.
    if _cuda.is_initialized() and _cuda.is_current_stream_capturing():
        raise StateError(
            "optimizer.step(), save() or ckpt.step() is being captured into a CUDA graph: its "
            "replays would change the state unnoticed",
            hint="capture forward and backward only, and call optimizer.step() and ckpt.step() "
            "outside of the graph",
        )


_EVENT_BYTES = 64 << 20  # bytes between two events: a millisecond of a fast link
_DUPLICATES_BYTES_MAX = 256 << 20  # on the devices, in one call of copy_now()
_LEFT_SHARE = 10  # of a device's memory
_AT_ONCE_BYTES = 256 << 10  # of host memory: faster to copy than to wake another thread

_Behind = dict[torch.device, tuple[Any, Any]]
"""Side stream of each device, and the event that it waits for first."""


class _Split(NamedTuple):
    """Batches on CUDA devices, and batches in host memory.

    Small batches in host memory are copied at once, large ones by the lane's thread.
    """

    ours: Sequence[Batch]
    devices: Sequence[torch.device]
    small: Sequence[Batch]
    large: Sequence[Batch]


def moment_on(tensor: torch.Tensor) -> Any:
    """Return a timing event after all work enqueued so far on the tensor's device.

    It has ``query()``, and ``elapsed_time(other)`` in milliseconds. None if the tensor is not on a
    CUDA device.
    """
    device = _device(tensor)
    return _event(_cuda.current_stream(device)) if device.type == "cuda" else None


def moment_of(optimizers: Iterable[Optimizer]) -> Any:
    """Return :func:`moment_on` the device that the optimizers update on; None in host memory, and
    while a graph is captured there."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if on_cuda(parameter) and _cuda.is_current_stream_capturing():
                    return None
                return moment_on(parameter)
    return None


def on_cuda(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is in the memory of a CUDA device."""
    return _device(tensor).type == "cuda"


class CudaLane:
    """One side stream per device, and one more for yielding copies.

    Tensors in host memory, which most states contain as well (Adam's step counters), are copied by
    ``host``, whose thread is also this lane's thread.

    Args:
        host: lane of host memory; closed with this lane.
        stage_bytes: device memory for a stage (:mod:`.stage`); 0: none; "auto": what is free.

    Attributes:
        side_streams: streams of the copies that do not yield, by device.
        issuer: enqueues the copies.
    """

    def __init__(self, host: CpuLane, stage_bytes: int | str = 0) -> None:
        self._host = host
        self._stage: DeviceStage | None = None
        if stage_bytes:
            bytes_max = stage_bytes if isinstance(stage_bytes, int) else None
            self._stage = DeviceStage(bytes_max, _device, _allocate, _free_bytes)
        # The last division of batches that come again; of others it would keep gradients alive.
        self._kept_plan: tuple[Sequence[Batch], StagePlan] | None = None
        self.side_streams: dict[torch.device, Any] = {}
        self._yielding: dict[torch.device, Any] = {}
        self._pinned: PinnedMemory | None = None
        self._ahead = PinnedAhead(lambda slice_: host.run(partial(_beside_captures, slice_)))
        self.issuer = Issuer(host.thread("everstep-issue"))

    def warm(
        self, tensors: Iterable[torch.Tensor], block: torch.Tensor, take: Take | None = None
    ) -> None:
        """Pin ``block`` in the lane's thread, which does its other work between two slices."""
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
        """Unpin the arena, and no longer keep it mapped."""
        # First: a slice that is still queued must not pin memory again after the release.
        self._ahead.stop()
        pinned = self._pinned
        self._pinned = None
        if pinned is not None:
            # After all copies begun so far: until then a device may write to the pages.
            self.run(pinned.release)

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        """Copy via duplicates, made in the order of the current stream, so that the sources may
        change.

        Tensors beyond the limit for duplicates are copied themselves, and the current stream waits.
        """
        split = self._split(batches)
        # Small and large ones here: the sources may change as soon as this returns.
        self._host.copy_now(split.small, block)
        self._host.copy_now(split.large, block)
        if not split.ours:
            return
        refuse_graph_capture()
        pinned = self._pinned_of(block, split.devices[0])
        pinned.pin(block, at_once=True)
        duplicates = []
        others = []
        left_bytes = _DUPLICATES_BYTES_MAX
        for batch in split.ours:
            size = batch.size_bytes
            if size <= left_bytes:
                # A device without free memory is treated like the limit: no duplicate, and the
                # stream waits.
                with contextlib.suppress(OutOfSpaceError):
                    # Memory that was allocated on another stream could be reused there before this
                    # copy ends.
                    _use(batch, _cuda.current_stream(_device(batch.first)))
                    duplicates.append(Batch(batch.begin, batch.end, (packed(batch),)))
                    left_bytes -= size
                    continue
            others.append(batch)
        # The events are recorded after the duplicates were enqueued: side streams read those next.
        behind = self._behind_current(split.devices)
        # No stream has to wait for these: their sources are private. _begun() covers them.
        self._enqueue(duplicates, block, pinned, behind, Enqueued([], {}))
        found = Enqueued([], {})
        self._enqueue(others, block, pinned, behind, found)
        self._hold_back(found.reached)

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        return self._submit(batches, block, progress, yielding=False)

    def submit_yielding(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress
    ) -> Transfer:
        """Copy on another side stream.

        The device alternates between the two, so copies that do not yield get half of the link, not
        all of it.
        """
        return self._submit(batches, block, progress, yielding=True)

    def _submit(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress, *, yielding: bool
    ) -> Transfer:
        split = self._split(batches)
        # Waiting for an event of a stream that is being captured would draw the side stream into
        # the graph.
        if split.ours:
            refuse_graph_capture()
        # Earlier copies of this capture by copy_now(), on any device, lie anywhere in the block:
        # progress is reported only after them.
        marks = self._begun()
        issued: Issued | None = None
        staged: Issued | None = None
        if split.ours:
            pinned = self._pinned_of(block, split.devices[0])
            behind = self._behind_current(split.devices, yielding=yielding)
            planned: list[StagePlan] = []
            if not yielding:
                is_kept = isinstance(batches, Runs)
                staged = self._issue_stage(split.ours, behind, planned, is_kept=is_kept)
            issued = self._issue(split.ours, block, pinned, behind, staged, planned)
        self._host.copy_now(split.small, block)
        large = split.large
        submit = self._host.submit_yielding if yielding else self._host.submit
        hosted = submit(large, block, lambda end: None) if large else None
        transfer = CudaTransfer(issued, hosted, large, staged)
        end = batches[-1].end if batches else 0
        # Evaluated in this thread: it adds streams, while the function below runs in the lane's
        # thread.
        here = self._here()

        def watch() -> None:
            ignore_graph_captures()
            try:
                if hosted is not None:
                    hosted.wait(
                        0.0
                    )  # already over: it was queued earlier in this thread; may raise
                with here:
                    for mark in marks:
                        mark.synchronize()
                    if issued is not None:
                        # Without a timeout: the issuing thread sets a result in any case, an error
                        # included.
                        _done(issued, None)
                        for upto, event, _ in issued.result().reached:
                            event.synchronize()
                            progress(upto)
                        if (error := issued.result().error) is not None:
                            raise error
                        # The time of copies by the host is not on the device's clock.
                        if hosted is None:
                            transfer.copied_s = issued.result().copied_s()
                # Batches in host memory have reported no progress of their own.
                if end:
                    progress(end)
            except BaseException as error:
                transfer.end(error)
                raise
            transfer.end()

        self._host.run(watch)
        return transfer

    def run(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` after all copies begun so far, whether or not a caller waits for them.

        Fetches from a device within ``job`` use the side streams, so they do not wait for work that
        training has enqueued meanwhile.
        """
        streams = list(self.side_streams.values())
        here = self._here()
        # In this order: captures enqueued before this line are covered by the events of `begun`.
        issued = self.issuer.under_way()
        begun: list[Any] = []
        # A failed device makes no more copies, and its transfers raise the error. The job must run
        # all the same, because it may release memory.
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
        """End the threads, after all queued work, and unpin the arena."""
        self.leave()
        # Before the lane's thread, whose jobs wait for results of this one.
        self.issuer.close()
        self._host.close()
        self._kept_plan = None
        if self._stage is not None:
            self._stage.close()

    def _pinned_of(self, block: torch.Tensor, device: torch.device) -> PinnedMemory:
        if self._pinned is not None and not self._pinned.holds(block):  # arena of a new keeper
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
            if on_cuda(batch.first):
                ours.append(batch)
            else:
                (small if batch.size_bytes < _AT_ONCE_BYTES else large).append(batch)
        devices = list(dict.fromkeys(_device(batch.first) for batch in ours))
        split = _Split(ours, devices, small, large)
        if isinstance(batches, Runs):
            batches.split = split
        return split

    def _issue_stage(
        self,
        batches: Sequence[Batch],
        behind: _Behind,
        planned: list[StagePlan],
        *,
        is_kept: bool,
    ) -> Issued | None:
        """Enqueue the copies into the stage, in the issuing thread; None: there is no stage.

        Args:
            planned: gets the division of the batches.
            is_kept: the same batches come again.
        """
        stage = self._stage
        if stage is None:
            return None

        def enqueue(found: Enqueued) -> Enqueued:
            kept = self._kept_plan
            if kept is not None and kept[0] is batches and kept[1].generation == stage.generation:
                plan = kept[1]
            else:
                kept = self._kept_plan = None  # it holds the memory of the stage so far
                # The stage's memory belongs to the side stream, and is reused in its order.
                with contextlib.ExitStack() as stack:
                    for stream, _ in behind.values():
                        stack.enter_context(_cuda.stream(stream))
                    plan = stage.plan(batches)
                self._kept_plan = (batches, plan) if is_kept else None
            events: dict[torch.device, tuple[int, Any]] = {}
            for copy in plan.copies:
                stream, moment = behind[copy.device]
                moment.wait(stream)
                for batch in copy.batches:
                    _use(batch, stream)
                with _cuda.stream(stream):
                    _stage(copy)
                    events[copy.device] = copy.begin, _event(stream)
            planned.append(plan)
            return found._replace(staged=events, is_whole=plan.is_whole)

        return self._issue_work(behind, enqueue)

    def _issue(
        self,
        batches: Sequence[Batch],
        block: torch.Tensor,
        pinned: PinnedMemory,
        behind: _Behind,
        staged: Issued | None,
        planned: list[StagePlan],
    ) -> Issued:
        """Enqueue the copies to the host, in the issuing thread, after those into the stage."""

        def enqueue(found: Enqueued) -> Enqueued:
            pinned.pin(block)
            before = Enqueued() if staged is None else _enqueued(staged)
            if before.error is not None:
                _log.warning("everstep: a capture is not staged: %s", before.error)
            found = found._replace(staged=before.staged)
            carried = planned.pop().carried if planned else batches
            self._enqueue(carried, block, pinned, behind, found)
            return found

        return self._issue_work(behind, enqueue)

    def _issue_work(self, behind: _Behind, enqueue_in: Callable[[Enqueued], Enqueued]) -> Issued:
        """Run ``enqueue_in`` in the issuing thread; its error becomes part of the result."""

        def enqueue() -> Enqueued:
            found = Enqueued([], {})
            ignore_graph_captures()
            try:
                # A thread without a current device would switch to the first one on leaving a
                # device context, and create a context there.
                with _cuda.device(next(iter(behind))):
                    try:
                        return enqueue_in(found)
                    except Exception as error:
                        # Copies begun before the error still write to the block: run() waits for
                        # these events before memory is released.
                        begun: list[Any] = []
                        with contextlib.suppress(RuntimeError):
                            begun = [_event(stream) for stream, _ in behind.values()]
                        return found.failed(error, begun)
            except Exception as error:  # the device itself has failed
                return found.failed(error)

        return self.issuer.issue(enqueue)

    def _enqueue(
        self,
        batches: Sequence[Batch],
        block: torch.Tensor,
        pinned: PinnedMemory,
        behind: _Behind,
        found: Enqueued,
    ) -> None:
        """Enqueue copies to the host, and add their events to ``found``."""
        reached: Any = found.reached
        first: Any = found.first
        staged = found.staged

        def kind(batch: Batch) -> tuple[torch.device, bool]:
            # An event after staged batches says nothing about those before them.
            device = _device(batch.first)
            return device, device in staged and batch.begin >= staged[device][0]

        # Before the first copy: the update that made the state must have ended.
        for stream, moment in behind.values():
            moment.wait(stream)
        for (device, _), group in itertools.groupby(batches, key=kind):
            stream, _ = behind[device]
            # Recorded after the wait above, so that the end of the update does not count as
            # copying.
            if device not in first:
                first[device] = _event(stream)
            with _cuda.stream(stream):
                for end, parts, targets in _runs(group, stream, block, pinned):
                    _send(parts, targets)
                    reached.append((end, _event(stream), device))

    def _behind_current(
        self, devices: Iterable[torch.device], *, yielding: bool = False
    ) -> _Behind:
        """Return the side streams, with events after all work on the current streams."""
        streams = self._yielding if yielding else self.side_streams
        found: _Behind = {}
        for device in devices:
            if device not in streams:
                streams[device] = _cuda.Stream(device)
            # Recorded in the training thread, before it enqueues work that the copies must not wait
            # for.
            found[device] = streams[device], _event(_cuda.current_stream(device))
        return found

    def _here(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which one of this lane's devices is current, for the lane's thread.

        In a thread without a current device, CUDA creates a context on the first device, which
        takes some hundred MB there; that device may belong to another rank.
        """
        device = next(iter([*self.side_streams, *self._yielding]), None)
        return contextlib.nullcontext() if device is None else _cuda.device(device)

    def _begun(self) -> list[Any]:
        """Return events after all copies begun so far."""
        streams = [*self.side_streams.values(), *self._yielding.values()]
        return [_event(stream) for stream in streams]

    def _hold_back(self, reached: Sequence[Reached]) -> None:
        """Make the current streams wait for copies."""
        for device, event in {device: event for _, event, device in reached}.items():
            event.wait(_cuda.current_stream(device))


class CudaTransfer(CpuTransfer):
    """Copies on side streams, and copies of host memory in the lane's thread.

    Args:
        issued: copies on side streams, in the order of their ends; None if there are none.
        hosted: copies in the thread, of the batches ``large``, if there are any.
        staged: copies into the stage, enqueued before ``issued``; None: there is no stage.
    """

    def __init__(
        self,
        issued: Issued | None,
        hosted: Transfer | None,
        large: Sequence[Batch],
        staged: Issued | None = None,
    ) -> None:
        super().__init__()
        self._issued = issued
        self._staged = staged
        self._hosted = hosted
        self._large = large

    def gate(self, end: int, timeout_s: float) -> bool:
        """Make the current stream of each device wait.

        The CPU waits only until the copies are enqueued, and for copies of host memory. Staged
        batches need not have reached the host.
        """
        if end <= 0:
            return True
        # The events to wait for exist only after the copies were enqueued.
        if self._staged is not None and not _done(self._staged, timeout_s):
            return False
        staged = Enqueued() if self._staged is None else _enqueued(self._staged)
        issued = None if staged.is_whole else self._issued
        if issued is not None and not _done(issued, timeout_s):
            return False
        for device, event in _last_events(end, staged, issued).items():
            event.wait(_cuda.current_stream(device))
        if self._hosted is None:
            return True
        ends = [batch.end for batch in self._large if batch.begin < end]
        return not ends or self._hosted.gate(ends[-1], timeout_s)


def _last_events(end: int, staged: Enqueued, issued: Issued | None) -> Mapping[torch.device, Any]:
    """Return the events after which no copy reads bytes ``[0, end)`` of the state, by device."""
    last = {device: event for device, (begin, event) in staged.staged.items() if begin < end}
    for upto, event, device in () if issued is None else _enqueued(issued).reached:
        if device in staged.staged and upto > staged.staged[device][0]:
            continue  # read from the stage
        # The ends ascend, because copies are enqueued in file order, and on one stream a later
        # event covers all earlier ones, that after the copies into the stage included.
        last[device] = event
        if upto >= end:
            break
    return last


def _runs(
    batches: Iterable[Batch], stream: Any, block: torch.Tensor, pinned: PinnedMemory
) -> Iterator[tuple[int, Sequence[torch.Tensor], Sequence[torch.Tensor]]]:
    """Yield groups of copies, one for each event: their end, sources and targets.

    To be called with the side stream as current stream.
    """
    parts: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    since_bytes = end = 0
    for batch in batches:
        _use(batch, stream)
        # A packed tensor is allocated on the side stream, so its memory is reused only in the order
        # of that stream.
        flat = batch.sources[0] if len(batch.sources) == 1 else packed(batch)
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


def _beside_captures(job: Callable[[], None]) -> None:
    ignore_graph_captures()
    job()


def _first_device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the CUDA device of the first tensor that is on one."""
    devices = (device for tensor in tensors if (device := _device(tensor)).type == "cuda")
    return next(devices, None)


def _use(batch: Batch, stream: Any) -> None:
    for tensor in batch.sources or (batch.first,):
        _used_on(tensor, stream)


def _enqueued(issued: Issued) -> Enqueued:
    """Return the result; an empty one if the work was cancelled."""
    return Enqueued() if issued.cancelled() else issued.result()


# --- Replaced by tests that emulate a device --------------------------------------------


def _done(issued: Issued, timeout_s: float | None) -> bool:
    """Wait until the copies are enqueued, or have failed."""
    if timeout_s is None:
        return bool(wait([issued]).done)
    return issued.done() or wait_done(issued, timeout_s)


def _device(tensor: torch.Tensor) -> torch.device:
    return tensor.device


def _event(stream: Any) -> Any:
    """Return an event after all work enqueued on the stream."""
    event = _cuda.Event(enable_timing=True, blocking=True)  # a waiting thread sleeps
    event.record(stream)
    return event


def packed(batch: Batch) -> torch.Tensor:
    """Return the bytes of a batch in memory of their own, on its device.

    Raises:
        OutOfSpaceError: the device has no memory for them.
    """
    try:
        if batch.rearranged is None:
            return batch.sources[0].clone() if len(batch.sources) == 1 else torch.cat(batch.sources)
        # Resolved here: an asynchronous copy to the host would resolve before its data is ready.
        return byte_view(batch.rearranged.resolve_conj().resolve_neg().contiguous())
    except torch.OutOfMemoryError as error:
        raise OutOfSpaceError(
            f"the GPU has no {batch.size_bytes} bytes of free memory to rearrange tensors "
            "into the order of the file",
            hint="leave that much GPU memory free",
        ) from error


def _stage(copy: StagedCopy) -> None:
    """Copy within a device, in the order of the current stream."""
    for sources, targets in copy.groups:
        torch._foreach_copy_(list(targets), list(sources))
    for batch, target in copy.rearranged:
        target.copy_(packed(batch))


def _allocate(size_bytes: int, device: torch.device) -> torch.Tensor | None:
    """Return memory of a device, for the current stream; None if it has none left."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        _log.warning(
            "everstep: %s has no %d bytes free for Budget.device_bytes: updates wait for the link",
            device,
            size_bytes,
        )
        return None


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a device, less the tenth of it that is left to training."""
    free, total = _cuda.mem_get_info(device)
    return max(0, int(free) - int(total) // _LEFT_SHARE)


def _send(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy to pinned host memory, in the order of the current stream.

    One call for all: after each call, the interpreter lock would have to be taken back from
    training.
    """
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def _used_on(tensor: torch.Tensor, stream: Any) -> None:
    """Keep the tensor's memory from reuse until the stream is done with it, even if it is freed."""
    tensor.record_stream(stream)


class DeviceLane:
    """Lane of host memory until the first tensor on a CUDA device is seen, then a
    :class:`.cuda.CudaLane`.

    That lane copies host memory through this one's ``host``. Without tensors on CUDA devices no
    CUDA function is called.

    Args:
        host: lane of host memory; closed with this lane.
        stage_bytes: see :class:`CudaLane`.

    Attributes:
        current: lane in use.
    """

    def __init__(self, host: CpuLane, stage_bytes: int | str = 0) -> None:
        self._host = host
        self._stage_bytes = stage_bytes
        self.current: Lane = host
        self._in_host_memory: list[Sequence[Batch]] = []  # seen last

    def warm(
        self, tensors: Iterable[torch.Tensor], block: torch.Tensor, take: Take | None = None
    ) -> None:
        found = list(tensors)
        self._for(found).warm(found, block, take)

    def ready_bytes(self, tensors: Iterable[torch.Tensor], block: torch.Tensor) -> int:
        found = list(tensors)
        return self._for(found).ready_bytes(found, block)

    def leave(self) -> None:
        self.current.leave()

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        self._for_batches(batches).copy_now(batches, block)

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        return self._for_batches(batches).submit(batches, block, progress)

    def submit_yielding(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress
    ) -> Transfer:
        return self._for_batches(batches).submit_yielding(batches, block, progress)

    def run(self, job: Callable[[], None]) -> Future[None]:
        return self.current.run(job)

    def close(self) -> None:
        self.current.close()

    def _for_batches(self, batches: Sequence[Batch]) -> Lane:
        if isinstance(batches, Chunks):  # iterating over it would cut it
            batches = batches.whole
        if any(seen is batches for seen in self._in_host_memory):
            return self.current
        lane = self._for(batch.first for batch in batches)
        if lane is self._host and isinstance(batches, tuple):  # immutable: the result stays valid
            # Two are remembered: a base has copies at the mark and copies after it.
            self._in_host_memory = [*self._in_host_memory[-1:], batches]
        return lane

    def _for(self, tensors: Iterable[torch.Tensor]) -> Lane:
        if self.current is self._host and any(map(on_cuda, tensors)):
            # It uses the same thread for host memory, so copies queued before stay in order.
            self.current = CudaLane(self._host, self._stage_bytes)
        return self.current
