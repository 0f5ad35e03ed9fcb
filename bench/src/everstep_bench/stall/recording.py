"""When a lane copied what, and how busy keeper and link were over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from everstep.capture.lanes.batches import Batch
from everstep.capture.lanes.lane import CpuLane, CpuTransfer, Progress
from everstep_bench.stall.gauges import cpu_s
from everstep_bench.stall.loop import Step

__all__ = ["Copied", "Copies", "CpuSample", "Curve", "Sampler", "recorded"]

_SAMPLE_EVERY_S = 0.01


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


class CpuSample(NamedTuple):
    """Processor time of some processes so far, at a moment of the monotonic clock."""

    at_s: float
    cpu_s: float


class Sampler:
    """Looks at the processor time of processes, again and again, in a thread; a context manager.

    Attributes:
        samples: what it saw.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="bench-sampler", daemon=True)
        self.samples: list[CpuSample] = []

    def __enter__(self) -> Sampler:
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._take()

    def _look(self) -> None:
        while not self._over.wait(_SAMPLE_EVERY_S):
            self._take()

    def _take(self) -> None:
        self.samples.append(CpuSample(time.monotonic(), sum(map(cpu_s, self._pids))))


@dataclass(frozen=True, slots=True)
class Curve:
    """Consecutive saves of one arm, and the activity during them (GoCkpt Fig. 8
    and 9); times in seconds of the monotonic clock.

    Attributes:
        begin_s, end_s: of the recording.
        saves_s: when saves were asked for.
        copies: through the link.
        samples: processor time of the arm's processes.
    """

    name: str
    begin_s: float
    end_s: float
    saves_s: tuple[float, ...]
    steps: tuple[Step, ...]
    copies: tuple[Copied, ...]
    samples: tuple[CpuSample, ...]

    def link_bytes_per_s(self, bin_s: float) -> list[tuple[float, float]]:
        """Bytes a second through the link, by beginnings of bins; a copy counts evenly."""
        bins = [0.0] * max(1, -int(-(self.end_s - self.begin_s) // bin_s))
        for copy in self.copies:
            length_s = max(copy.end_s - copy.begin_s, 1e-9)
            for number in range(
                max(0, int((copy.begin_s - self.begin_s) // bin_s)),
                min(len(bins), int((copy.end_s - self.begin_s) // bin_s) + 1),
            ):
                at_s = self.begin_s + number * bin_s
                within_s = min(copy.end_s, at_s + bin_s) - max(copy.begin_s, at_s)
                bins[number] += copy.size_bytes * max(0.0, within_s) / length_s
        return [(self.begin_s + n * bin_s, count / bin_s) for n, count in enumerate(bins)]

    def cores(self, bin_s: float) -> list[tuple[float, float]]:
        """Cores that the arm's processes kept busy, by beginnings of bins."""
        found: list[tuple[float, float]] = []
        before = self.samples[0]
        for sample in self.samples[1:]:
            length_s = sample.at_s - before.at_s
            if length_s < bin_s and sample is not self.samples[-1]:
                continue
            if length_s > 0:
                found.append((before.at_s, (sample.cpu_s - before.cpu_s) / length_s))
            before = sample
        return found

    def as_json(self, start_s: float) -> dict[str, Any]:
        """Everything, in seconds from ``start_s``."""
        return {
            "name": self.name,
            "begin_s": self.begin_s - start_s,
            "end_s": self.end_s - start_s,
            "saves_s": [at_s - start_s for at_s in self.saves_s],
            "steps": [[step.begin_s - start_s, step.end_s - start_s] for step in self.steps],
            "copies": [
                {
                    "begin_s": copy.begin_s - start_s,
                    "end_s": copy.end_s - start_s,
                    "size_bytes": copy.size_bytes,
                    "gradients": copy.gradients,
                }
                for copy in self.copies
            ],
            "keeper_cpu": [[sample.at_s - start_s, sample.cpu_s] for sample in self.samples],
        }
