"""Captures that are issued at events, on a lane that is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch

from everstep.capture.batches import Batch, run_batch
from everstep.capture.dispatch import Dispatch, Duplicates, Unit
from everstep.capture.lane import CpuTransfer, Progress, Transfer

SIZE = 8


class SlowLane:
    """Copies when the test says so, or somebody waits: as late as a lane may."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.submitted: list[tuple[Batch, ...]] = []
        self.transfers: list[CpuTransfer] = []
        self.fail: BaseException | None = None

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        if self.fail is not None:
            raise self.fail
        self.submitted.append(tuple(batches))
        lane = self

        class Waiting(CpuTransfer):
            def gate(self, end: int, timeout_s: float) -> bool:
                lane.drain(upto=self)
                return super().gate(end, timeout_s)

            def wait(self, timeout_s: float) -> bool:
                lane.drain()
                return super().wait(timeout_s)

        transfer = Waiting()
        self.transfers.append(transfer)

        def work() -> None:
            for batch in batches:
                run_batch(batch, block)
                progress(batch.end)
                transfer.advance(batch.end)
            transfer.end()

        self.queue.append(work)
        return transfer

    def drain(self, upto: CpuTransfer | None = None) -> None:
        while self.queue and not (upto is not None and upto.complete):
            self.queue.pop(0)()

    def warm(self, tensors: Iterable[torch.Tensor], block: torch.Tensor) -> None:
        pass

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        pass

    def run(self, job: Callable[[], None]) -> Future[None]:
        raise AssertionError

    def close(self) -> None:
        pass


class Capture:
    """Tensors of ``SIZE`` bytes, one unit each, owned by optimizers ``a``, ``b``, ...

    Args:
        events: at which they are issued.
        late: those that are duplicated.
    """

    def __init__(self, events: Sequence[int], late: Sequence[int] = ()) -> None:
        self.lane, self.over = SlowLane(), 0
        self.block = torch.zeros(SIZE * len(events), dtype=torch.uint8)
        self.tensors = [
            torch.full((SIZE,), number + 1, dtype=torch.uint8) for number in range(len(events))
        ]
        self.units = [
            Unit(
                event,
                chr(ord("a") + number),
                (Batch(number * SIZE, (number + 1) * SIZE, (self.tensors[number],)),),
                number in late,
            )
            for number, event in enumerate(events)
        ]
        self.duplicates = Duplicates()
        self.dispatch = self.next()

    def next(self) -> Dispatch:
        return Dispatch(self.lane, self.block, self.units, self.duplicates, self._over)

    def _over(self) -> None:
        self.over += 1

    def update(self, number: int) -> None:
        assert self.dispatch.admit(chr(ord("a") + number), 1.0)
        self.tensors[number].fill_(99)

    @property
    def right(self) -> bool:
        assert self.dispatch.wait(1.0)
        wanted = [number + 1 for number in range(len(self.tensors)) for _ in range(SIZE)]
        return self.block.tolist() == wanted
