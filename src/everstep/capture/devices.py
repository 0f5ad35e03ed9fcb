"""Lane that chooses by the devices of the tensors.

The choice is made at each copy, not at construction, because a model may be moved to a device after
its Checkpointer was created.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch

from everstep.capture.batches import Batch, Chunks
from everstep.capture.cuda import CudaLane, on_cuda
from everstep.capture.lane import CpuLane, Lane, Progress, Take, Transfer


class DeviceLane:
    """Lane of host memory until the first tensor on a CUDA device is seen, then a
    :class:`.cuda.CudaLane`.

    That lane copies host memory through this one's ``host``. Without tensors on CUDA devices no
    CUDA function is called.

    Args:
        host: lane of host memory; closed with this lane.

    Attributes:
        current: lane in use.
    """

    def __init__(self, host: CpuLane) -> None:
        self._host = host
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

    def in_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.current.in_host_memory(tensor)

    def run(self, job: Callable[[], None]) -> Future[None]:
        return self.current.run(job)

    def close(self) -> None:
        self.current.close()

    def _for_batches(self, batches: Sequence[Batch]) -> Lane:
        if isinstance(batches, Chunks):  # iterating over it would cut it
            batches = batches.whole
        if any(seen is batches for seen in self._in_host_memory):
            return self.current
        lane = self._for(_one_of_each(batches))
        if lane is self._host and isinstance(batches, tuple):  # immutable: the result stays valid
            # Two are remembered: a base has copies at the mark and copies after it.
            self._in_host_memory = [*self._in_host_memory[-1:], batches]
        return lane

    def _for(self, tensors: Iterable[torch.Tensor]) -> Lane:
        if self.current is self._host and any(map(on_cuda, tensors)):
            # It uses the same thread for host memory, so copies queued before stay in order.
            self.current = CudaLane(self._host)
        return self.current


def _one_of_each(batches: Sequence[Batch]) -> Iterable[torch.Tensor]:
    """Yield a tensor of each batch; all tensors of a batch are on one device."""
    for batch in batches:
        yield batch.sources[0] if batch.rearranged is None else batch.rearranged
