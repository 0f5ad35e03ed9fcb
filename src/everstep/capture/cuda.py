"""The lane of CUDA devices: copies run on a side stream, and updates wait for them there.

The trainer's thread only enqueues. The side stream waits for what the current stream has
been given so far (the update that made the state); the current stream waits, at the gate,
for the copies that it is about to overtake. Nobody waits on the CPU but the lane's thread,
which sees how far the copies have come (DataStates-LLM section V; DESIGN: I1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from everstep.capture.batches import Batch, run_batch
from everstep.capture.lane import CpuTransfer, Progress, Transfer
from everstep.errors import UnavailableError
from everstep.seams.threads import IoThreads
from everstep.state.tensors import byte_view

__all__ = ["CudaLane", "CudaTransfer"]

_cuda: Any = torch.cuda  # its constructors have no annotations


class CudaLane:
    """One side stream per device; tensors in host memory are copied by the caller."""

    def __init__(self) -> None:
        self._threads = IoThreads(1, "everstep-capture")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._marks: list[torch.cuda.Event] = []
        self._pinned: dict[int, torch.Tensor] = {}  # held: or another mapping could come there

    def mark(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        self._pin(block)
        for batch in batches:
            device = _device(batch)
            if device.type != "cuda":
                run_batch(batch, block)
                continue
            # A duplicate, made in the order of the current stream: the source may change.
            whole = Batch(batch.begin, batch.end, (_duplicate(batch),))
            self._marks.append(self._copy(whole, block, device))

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        self._pin(block)
        transfer = CudaTransfer()
        marks, self._marks = self._marks, []
        for batch in batches:
            device = _device(batch)
            if device.type != "cuda":
                run_batch(batch, block)
            else:
                transfer.events.append((batch.end, self._copy(batch, block, device), device))

        def watch() -> None:
            try:
                for mark in marks:  # of any device, and anywhere in the block
                    mark.synchronize()
                for end, event, _ in transfer.events:
                    event.synchronize()
                    progress(end)
                    transfer.advance(end)
            except BaseException as error:
                transfer.end(error)
                raise
            transfer.end()

        self._threads.submit(watch)
        return transfer

    def in_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().cpu()

    def run(self, job: Callable[[], None]) -> Future[None]:
        return self._threads.submit(job)

    def close(self) -> None:
        self._threads.close()
        for address in list(self._pinned):
            _cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def _copy(self, batch: Batch, block: torch.Tensor, device: torch.device) -> torch.cuda.Event:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = _cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for source in batch.sources or (batch.rearranged,):
                assert source is not None
                source.record_stream(stream)  # not to be reused before the copy is over
            if len(batch.sources) != 1:  # packed on the device, then one copy across the bus
                batch = Batch(batch.begin, batch.end, (_duplicate(batch),))
            run_batch(batch, block, non_blocking=True)
            event: torch.cuda.Event = _cuda.Event()
            event.record(stream)
        return event

    def _pin(self, block: torch.Tensor) -> None:
        """Pins a block the first time it is used; copies into pageable memory would block.

        Pinned memory stays mapped as long as it is pinned: if another arena came to lie at
        its address, copies would go on into pages that nobody sees any more.
        """
        begin, size = block.data_ptr(), block.numel()
        known = self._pinned.get(begin)
        if not size or (known is not None and known.numel() == size):
            return
        cudart = _cuda.cudart()
        arena = block.untyped_storage().data_ptr()
        for address, other in list(self._pinned.items()):
            overlaps = address < begin + size and begin < address + other.numel()
            if overlaps or other.untyped_storage().data_ptr() != arena:
                for stream in self._streams.values():
                    stream.synchronize()
                cudart.cudaHostUnregister(address)
                del self._pinned[address]
        status = cudart.cudaHostRegister(begin, size, 0)
        if int(status) != 0:
            raise UnavailableError(
                f"{size} bytes of host memory cannot be pinned (CUDA error {int(status)})",
                hint='a larger limit for locked memory (ulimit -l), or method="sync"',
            )
        self._pinned[begin] = block


class CudaTransfer(CpuTransfer):
    """Copies on a side stream; ``events`` are complete when bytes up to their end are there."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, torch.cuda.Event, torch.device]] = []

    def gate(self, end: int, timeout_s: float) -> bool:
        """The current stream of each device waits; the CPU does not."""
        last: dict[torch.device, torch.cuda.Event] = {}
        for reached, event, device in self.events if end > 0 else ():
            last[device] = event
            if reached >= end:
                break
        for device, event in last.items():
            event.wait(torch.cuda.current_stream(device))
        return True


def _duplicate(batch: Batch) -> torch.Tensor:
    """The bytes of a batch in memory of their own, on its device."""
    if batch.rearranged is None:
        return torch.cat(batch.sources)
    # Resolved here: a copy to the host that is not waited for would do it too early.
    return byte_view(batch.rearranged.resolve_conj().resolve_neg().contiguous())


def _device(batch: Batch) -> torch.device:
    source = batch.rearranged if batch.rearranged is not None else batch.sources[0]
    return source.device
