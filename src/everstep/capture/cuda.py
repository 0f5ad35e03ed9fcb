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

__all__ = ["CudaLane", "CudaTransfer"]

_cuda: Any = torch.cuda  # its constructors have no annotations


class CudaLane:
    """One side stream per device; tensors in host memory are copied by the caller."""

    def __init__(self) -> None:
        self._threads = IoThreads(1, "everstep-capture")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: dict[int, int] = {}

    def mark(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        self._pin(block)
        for batch in batches:
            device = _device(batch)
            if device.type != "cuda":
                run_batch(batch, block)
                continue
            # A duplicate, made in the order of the current stream: the source may change.
            if batch.rearranged is not None:
                duplicate = batch.rearranged.contiguous().view(-1).view(torch.uint8).clone()
            else:
                duplicate = torch.cat(batch.sources)
            self._copy(Batch(batch.begin, batch.end, (duplicate,)), block, device)

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        self._pin(block)
        transfer = CudaTransfer()
        for batch in batches:
            device = _device(batch)
            if device.type != "cuda":
                run_batch(batch, block)
            else:
                transfer.events.append((batch.end, self._copy(batch, block, device)))

        def watch() -> None:
            try:
                for end, event in transfer.events:
                    event.synchronize()
                    progress(end)
                    transfer.advance(end)
                for stream in self._streams.values():
                    stream.synchronize()  # marks, too
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
            if len(batch.sources) > 1:  # packed on the device, then one copy across the bus
                packed = torch.cat(batch.sources)
                batch = Batch(batch.begin, batch.end, (packed,))
            for source in batch.sources or (batch.rearranged,):
                assert source is not None
                source.record_stream(stream)  # not to be reused before the copy is over
            run_batch(batch, block, non_blocking=True)
            event: torch.cuda.Event = _cuda.Event()
            event.record(stream)
        return event

    def _pin(self, block: torch.Tensor) -> None:
        """Pins a block the first time it is used; copies into pageable memory would block."""
        begin, size = block.data_ptr(), block.numel()
        if self._pinned.get(begin) == size or not size:
            return
        cudart = _cuda.cudart()
        for address, length in list(self._pinned.items()):
            if address < begin + size and begin < address + length:
                torch.cuda.synchronize()
                cudart.cudaHostUnregister(address)
                del self._pinned[address]
        status = cudart.cudaHostRegister(begin, size, 0)
        if int(status) != 0:
            raise UnavailableError(
                f"{size} bytes of host memory cannot be pinned (CUDA error {int(status)})",
                hint='a larger limit for locked memory (ulimit -l), or method="sync"',
            )
        self._pinned[begin] = size


class CudaTransfer(CpuTransfer):
    """Copies on a side stream; ``events`` are complete when bytes up to their end are there."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, torch.cuda.Event]] = []

    def gate(self, end: int, timeout_s: float) -> bool:
        """The current stream waits; the CPU does not."""
        for reached, event in self.events:
            if reached >= end:
                event.wait()
                return True
        if self.events:
            self.events[-1][1].wait()
        return True


def _device(batch: Batch) -> torch.device:
    source = batch.rearranged if batch.rearranged is not None else batch.sources[0]
    return source.device
