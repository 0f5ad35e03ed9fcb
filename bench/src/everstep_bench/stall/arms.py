"""Protocol of an arm: one way to save during training; a pending save; when a lane copied what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from everstep.capture.batches import Batch
from everstep.capture.lane import CpuLane, CpuTransfer, Progress
from everstep.errors import DeadlineError
from everstep_bench.harness.children import TIMEOUT_S
from everstep_bench.harness.figures import Role


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

    def copy_batch(self, batch: Batch, block: torch.Tensor) -> None:
        begin_s = time.monotonic()
        super().copy_batch(batch, block)
        self.copies.add(batch, begin_s, at_mark=False)

    def copy_run(
        self, run: Sequence[Batch], block: torch.Tensor, transfer: CpuTransfer, tell: Progress
    ) -> None:
        begin_s = time.monotonic()
        super().copy_run(run, block, transfer, tell)
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


Cause = Literal["capture", "gate", "gradients", "back_pressure", "persist"]

CAUSES: tuple[Cause, ...] = ("capture", "gate", "gradients", "back_pressure", "persist")
"""What holds the training thread up: copying the state or beginning to; an update that waits
for a copy of the state; copies of gradients that are waited for; no memory, or the save before
it; writing."""


class Pending:
    """A save under way, and when what of it was over, in monotonic seconds.

    Attributes:
        staged_s: when the state was copied; None if that cannot be known, or not yet.
        done_s: when the library said that it was done; None while it has not.
    """

    def __init__(self) -> None:
        self.staged_s: float | None = None
        self.done_s: float | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()

    @classmethod
    def finished(cls) -> Pending:
        """A save that was over when the call came back."""
        pending = cls()
        pending.finish()
        return pending

    @property
    def over(self) -> bool:
        """True if it is done or has failed."""
        return self._over.is_set()

    def on_staged(self, future: Future[Any] | None = None) -> None:
        """The copy is made."""
        self.staged_s = time.monotonic()

    def on_done(self, future: Future[Any]) -> None:
        """A future is done."""
        failed = None if future.cancelled() else future.exception()
        self.finish(DeadlineError("the save was cancelled") if future.cancelled() else failed)

    def finish(self, error: BaseException | None = None) -> None:
        """It is done, or has failed."""
        self.done_s = time.monotonic()
        self._error = error
        self._over.set()

    def finish_after(self, call: Callable[[], object], name: str) -> None:
        """Let a thread wait for the end; ``call`` returns when it is done, or raises."""

        def wait() -> None:
            try:
                call()
            except BaseException as error:
                self.finish(error)
            else:
                self.finish()

        threading.Thread(target=wait, name=name, daemon=True).start()

    def wait(self, timeout_s: float = TIMEOUT_S) -> None:
        """Returns when it is done.

        Raises:
            BaseException: what it failed with.
            DeadlineError: it is not, after ``timeout_s``.
        """
        if not self._over.wait(timeout_s):
            raise DeadlineError(f"a save is not done after {timeout_s:g} s")
        if self._error is not None:
            raise self._error


class Arm:
    """One way to save. What is not overridden does nothing.

    Attributes:
        name: as on the command line.
        detail: what exactly it does, in a few words.
        captures_in_steps: :meth:`stalls` also counts, besides waiting at the gate, what it does
            within steps.
    """

    role: Role = "peer"
    captures_in_steps = False

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        self.detail = detail
        self._stalls: dict[str, float] = dict.fromkeys(CAUSES, 0.0)

    def open(self) -> None:
        """Before the first block; not timed."""

    def prepare(self) -> None:
        """Before each block; not timed."""

    def save(self) -> Pending | None:
        """Begins a save; all of this call is paid for by training."""
        return None

    def after_step(self) -> None:
        """After each step of a block; paid for by training."""

    def settle(self, pending: Pending) -> float:
        """After a block: waits until nothing of the save is under way.

        Returns:
            Seconds spent on making durable what the library has left unsynced.

        Raises:
            BaseException: what the save failed with.
        """
        pending.wait()
        return 0.0

    def stalls(self) -> dict[str, float]:
        """Seconds that training was held up so far, by cause."""
        return dict(self._stalls)

    def persist_s(self) -> float | None:
        """Seconds of writing so far, in whichever thread; None if that cannot be known."""
        return None

    def copies(self) -> tuple[Copied, ...]:
        """Return the copies since :meth:`prepare`, piece by piece; empty if unknown."""
        return ()

    def processes(self) -> list[int]:
        """Processes of its own that are nobody's children."""
        return []

    def clean(self) -> None:
        """After each block, even one that failed; not timed."""

    def close(self) -> None:
        """After the last block, and after an ``open`` that failed."""


class Ideal(Arm):
    """Training that saves nothing."""

    role: Role = "ideal"

    def __init__(self, name: str = "ideal", detail: str = "no checkpoint") -> None:
        super().__init__(name, detail)
