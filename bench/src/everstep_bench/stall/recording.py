"""When a lane copied what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from everstep.capture.batches import Batch
from everstep.capture.lane import CpuLane, CpuTransfer, Progress


class Copied(NamedTuple):
    """Some bytes that a lane has copied, in seconds of the monotonic clock.

    Attributes:
        gradients: they are of gradients, not of the state.
    """

    begin_s: float
    end_s: float
    size_bytes: int
    gradients: bool


class Copies:
    """Record of the copies of lanes; threads may share it."""

    def __init__(self) -> None:
        self._found: list[Copied] = []
        self._runs: list[tuple[Sequence[Batch], float, float]] = []
        self._state: frozenset[int] = frozenset()

    def begin(self, state: Iterable[torch.Tensor]) -> None:
        """Forgets what there was.

        Args:
            state: tensors of the state; other copies during training are gradients.
        """
        self._state = frozenset(tensor.untyped_storage().data_ptr() for tensor in state)
        self._found = []
        self._runs = []

    def found(self) -> tuple[Copied, ...]:
        """In the order in which they began; of a run, each batch at its share of the time."""
        found = list(self._found)
        for run, begin_s, end_s in self._runs:
            size_bytes = sum(batch.end - batch.begin for batch in run)
            for batch in run:
                next_s = begin_s + (end_s - begin_s) * (batch.end - batch.begin) / size_bytes
                size_bytes -= batch.end - batch.begin
                found.append(self._copied(batch, begin_s, next_s, at_mark=False))
                begin_s = next_s
        return tuple(sorted(found))

    def add(self, batch: Batch, begin_s: float, *, at_mark: bool) -> None:
        """A batch is copied."""
        self._found.append(self._copied(batch, begin_s, time.monotonic(), at_mark=at_mark))

    def add_run(self, run: Sequence[Batch], begin_s: float) -> None:
        """A run is copied. It is looked at later: the thread that copies is not held up."""
        self._runs.append((run, begin_s, time.monotonic()))

    def _copied(self, batch: Batch, begin_s: float, end_s: float, *, at_mark: bool) -> Copied:
        sources = batch.sources or (() if batch.rearranged is None else (batch.rearranged,))
        state = at_mark or any(
            source.untyped_storage().data_ptr() in self._state for source in sources
        )
        return Copied(begin_s, end_s, batch.end - batch.begin, not state)


if TYPE_CHECKING:
    _Base = CpuLane
else:
    _Base = object


class _Recording(_Base):
    """Writes down when it copied what."""

    copies: Copies

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        for batch in batches:
            begin_s = time.monotonic()
            super().copy_now([batch], block)
            self.copies.add(batch, begin_s, at_mark=True)

    def _copy(self, batch: Batch, block: torch.Tensor) -> None:
        begin_s = time.monotonic()
        super()._copy(batch, block)
        self.copies.add(batch, begin_s, at_mark=False)

    def _copy_run(
        self, run: Sequence[Batch], block: torch.Tensor, transfer: CpuTransfer, tell: Progress
    ) -> None:
        begin_s = time.monotonic()
        super()._copy_run(run, block, transfer, tell)
        self.copies.add_run(run, begin_s)


def recorded(make: type[CpuLane], copies: Copies, *arguments: Any) -> Callable[[], CpuLane]:
    """Makes lanes of a kind, whose copies are written down.

    Args:
        arguments: of the lane.
    """

    class Recorded(_Recording, make):  # type: ignore[misc,valid-type]
        pass

    def made() -> CpuLane:
        lane = Recorded(*arguments)
        lane.copies = copies
        return lane

    return made
