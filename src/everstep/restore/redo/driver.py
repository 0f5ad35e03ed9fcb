"""Replay of log records onto a state in memory, in order.

A driver queues the updates of verified steps, applies several steps in one pass over the state,
compares the result with the samples in step marks, and finishes from the last mark. The state
itself is a :class:`Memory`: the live objects of the training process
(:class:`~everstep.restore.redo.live.LiveMemory`), or tensors in host memory
(:class:`~everstep.restore.offline.memory.HostMemory`). Under which conditions replay gives the bits
of training (I9) is decided here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from everstep.capture import MarkComparison
from everstep.errors import AuditError, DamageError, EverstepError
from everstep.format import TimelineRecord
from everstep.format.log import LogRecord
from everstep.replay import Exactness, Update
from everstep.replay.optimizer_step import default_dtype
from everstep.restore.redo.updates import DeclaredRedo, update_from_record
from everstep.run.tensors import tensor_of
from everstep.seams.fingerprint import (
    describe_threads,
    fingerprint,
    thread_count_fixed,
    threads_disagree,
)
from everstep.seams.machine import memory_available_bytes
from everstep.state.layout import SAMPLE, Placed
from everstep.state.layout.entries import SPOT

STEPS_AT_ONCE = 5
"""Largest number of steps replayed in one pass over the state; more gain nothing."""

_SHARE_OF_MEMORY = 8  # of available memory, for gradients that were read and wait for replay
_READ_BYTES_MAX = 256 << 20
"""Upper limit of the same. Reading further ahead than the next step gains nothing: replay and
reading are about as fast. Fresh memory is slow to get, above all on virtual machines: reading five
steps of 370 MB each into fresh memory took longer than everything else together."""


_KEYS_ON_CPU = ("torch", "machine", "processor", "system", "denormals")
_KEYS_WITHOUT_INFLUENCE = {"process", "python", "session"}
"""Keys of fingerprints that identify a process or a start, or do not change the bits of torch."""

MarkEntries = Sequence[tuple[LogRecord, Placed]]
"""Entries of a state, each with the mark that holds it, all marks of one step."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One verified step of the log.

    Attributes:
        updates: records in order, each with its decoded update; None if a registered function
            computes it.
        mark: step mark that ends the step.
        marks: by rank, the marks of other ranks' logs that the step was assembled from.
        held: entries of the state that the marks of several ranks hold; None: those of ``mark``.
    """

    updates: Sequence[tuple[LogRecord, Update | None]]
    mark: LogRecord
    marks: Mapping[int, LogRecord] = field(default_factory=dict)
    held: MarkEntries | None = None

    @classmethod
    def of(cls, updates: Iterable[LogRecord], mark: LogRecord, *, own: bool = False) -> Step:
        """Decode verified records.

        Args:
            updates: records in order.
            mark: step mark.
            own: leave out the gradients that other ranks recorded.

        Raises:
            FormatError: a record is not a valid update.
        """
        found = [(r, None if r.head.declared else update_from_record(r, own=own)) for r in updates]
        return cls(found, mark)

    @property
    def entries(self) -> MarkEntries:
        """Entries of the state that the marks hold in full, without samples."""
        if self.held is not None:
            return self.held
        places = self.mark.layout.placed
        return [(self.mark, p) for p in places if not p.entry.name.startswith(SAMPLE)]

    @property
    def read_bytes(self) -> int:
        """Bytes of memory that the step takes until it is applied; 0 for records that lie in a
        keeper's memory."""
        if self.marks:  # gradients were assembled in memory of their own
            gradients = [g for _, one in self.updates if one for g in one.gradients.values()]
            return sum(one.numel() * one.dtype.itemsize for one in gradients)
        records = (self.mark, *(record for record, _ in self.updates))
        return sum(record.size_bytes for record in records if record.path is not None)


def verified_steps(
    steps: Iterable[tuple[Sequence[LogRecord], LogRecord | EverstepError]],
    sound: Callable[[LogRecord], LogRecord],
) -> Generator[Step | EverstepError, None, None]:
    """Verify and decode steps of the log. Needs no live state, so any thread may run it.

    Args:
        steps: updates and mark of each step, in order; an error in place of a mark that cannot be
            read.
        sound: verifies a record, or returns a sound copy of it.

    Yields:
        Verified steps. Where a record is damaged, the error in place of the step, and nothing
        after it.

    Raises:
        FormatError: a record is intact but not a valid update.
    """
    for updates, mark in steps:
        if isinstance(mark, EverstepError):
            yield mark
            return
        try:
            updates = [sound(record) for record in updates]
            mark = sound(mark)
        except DamageError as error:
            yield error
            return
        step = Step.of(updates, mark)
        # Only the step may hold references: the memory of its records is then reused for the next.
        del updates, mark
        yield step
        del step


class Memory(Protocol):
    """State that updates are applied to, and marks are put into.

    Attributes:
        declared: runs the functions registered for declared updates; None where the program that
            trained the state is not there, and :meth:`check` refuses such updates.
    """

    declared: DeclaredRedo | None

    @property
    def exactness(self) -> Exactness:
        """Exactness of all optimizers together."""
        ...

    def check(self, step: Step) -> Sequence[Update | None]:
        """Return the updates to apply, after checking that the step fits. Changes no tensor.

        Raises:
            EverstepError: it does not fit.
        """
        ...

    def must_start_over(self, step: Step, last: LogRecord) -> bool:
        """Return True if everything must be restored from the last mark before this step."""
        ...

    def start_over(self) -> None:
        """Forget the replayers: everything is now as the last mark holds it."""
        ...

    def begin(self, step: Step) -> MarkEntries:
        """Prepare for a step; return the entries of its marks that an optimizer updates as well:
        tensors with two owners, or views of one memory. Replay cannot order their updates, so the
        next update must read the values of the marks."""
        ...

    def apply(self, key: str, updates: Sequence[Update]) -> None:
        """Apply updates of one optimizer."""
        ...

    def put(self, entries: MarkEntries) -> None:
        """Copy entries of marks into the state."""
        ...

    def first_difference(self, mark: LogRecord) -> str | None:
        """Return the name of an entry that differs from its sample in the mark, None if there is
        none."""
        ...

    def restore(self, mark: LogRecord) -> list[str]:
        """Restore everything that the mark holds; return notes on what could not be restored."""
        ...


class ReplayDriver:
    """Apply the steps of a log to a memory, in order.

    Args:
        memory: state, restored from a base.
        compares: replay must give the bits of training, as far as the conditions of training are
            known: results are compared with the samples in the marks.
        together: replay several steps in one pass; otherwise an error concerns the last step.

    Attributes:
        last: mark of the newest step that was applied.
        limit_bytes: limit of records that were read from disk and wait to be applied; one step
            always may wait.
        waiting_bytes: bytes of these records.
    """

    def __init__(self, memory: Memory, *, compares: bool = False, together: bool = True) -> None:
        self._memory = memory
        self._compares = compares
        self._pending: dict[str, list[Update]] = {}
        self._waiting_steps = 0
        self._compared: LogRecord | None = None
        self._notes: list[str] = []
        self.last: LogRecord | None = None
        self.waiting_bytes = 0
        limit_bytes = min(_READ_BYTES_MAX, memory_available_bytes() // _SHARE_OF_MEMORY)
        # With a limit of 0 no step waits for others, so an error concerns the last step.
        self.limit_bytes = limit_bytes if together else 0

    @property
    def exactness(self) -> Exactness:
        """Exactness of all optimizers and functions together."""
        found = self._memory.exactness
        declared = self._memory.declared
        return found if declared is None or not found.exact else declared.exactness

    def step(self, step: Step) -> None:
        """Replay one step: all of it, or nothing (I3).

        Raises:
            FormatError, ReplayError, UnsupportedStateError: a record does not fit the state.
            UnknownClassError: the class of an optimizer that made an update is not available.
            AuditError: this step, or one that was replayed together with it, gives other values
                than training had.
        """
        memory = self._memory
        mark = step.mark
        # Raises before anything changes: a step is applied completely or not at all (I3).
        updates = memory.check(step)
        # If another program made the step and logs less from here on, entries that only the
        # previous mark holds are restored from it, and with them everything else, as it was when
        # that program started.
        if self.last is not None and memory.must_start_over(step, self.last):
            self._notes = self.finish()
            memory.start_over()
        at_once = memory.begin(step)
        dtype = None
        for (record, _), update in zip(step.updates, updates, strict=True):
            if update is None:
                # The function may read entries that waiting updates change.
                self._apply()
                assert memory.declared is not None
                # Records of declared updates do not name the default dtype.
                with default_dtype(dtype):
                    memory.declared.run(record)
                continue
            dtype = update.default_dtype
            self._pending.setdefault(update.optimizer, []).append(update)
            # Several optimizers update the same memory: their order matters, so no update may wait.
            if at_once:
                self._apply()
        self.last = mark
        self._waiting_steps += 1
        self.waiting_bytes += step.read_bytes
        full = self._waiting_steps >= STEPS_AT_ONCE or self.waiting_bytes >= self.limit_bytes
        # Several steps are applied in one pass, as long as their records fit in memory.
        if at_once or full:
            self._apply()
        # After the updates: marks hold the values at the end of the step.
        memory.put(at_once)
        if memory.declared is not None:
            memory.declared.settle(mark)
        if not self._pending:
            self._compare_once()

    def idle(self) -> None:
        """Apply the waiting steps without collecting more of them, so that no record of the steps
        so far is read any more.

        Raises:
            ReplayError, AuditError: as :meth:`step`.
        """
        self._apply()
        self._compare_once()

    def finish(self) -> list[str]:
        """Apply the waiting steps and restore everything that the last mark holds; return notes on
        objects that could not be restored.

        Raises:
            MismatchError, FormatError, ReplayError: the mark does not fit the state.
            AuditError: replay gives other values than training had.
        """
        if self.last is None:
            return self._notes
        self.idle()
        return list(dict.fromkeys((*self._notes, *self._memory.restore(self.last))))

    def compare(self) -> None:
        """Compare the state with the last mark, everything up to which has been applied, if replay
        must give the bits of training. The caller decides if the conditions of training allow it.

        Raises:
            AuditError: an entry differs; the error names it.
            FormatError: the mark belongs to another state.
        """
        if self.last is None or not self.exactness.exact:
            return
        name = self._memory.first_difference(self.last)
        if name is not None:
            raise divergence_error(name, self.last.head.step)

    def _apply(self) -> None:
        """Apply several steps at once, so that the state is read once for all of them. Optimizers
        share nothing: tensors with two owners are logged."""
        pending = self._pending
        # Emptied first: finish() must not apply updates again if one of them fails here.
        self._pending = {}
        self._waiting_steps = 0
        self.waiting_bytes = 0
        for key, updates in pending.items():
            self._memory.apply(key, updates)

    def _compare_once(self) -> None:
        if self._compares and self.last is not self._compared:
            self.compare()
        self._compared = self.last


def sampled_difference(
    comparison: MarkComparison,
    mark: LogRecord,
    tensors: Mapping[str, torch.Tensor],
    names: Sequence[str] = (),
) -> str | None:
    """Return the name of a tensor that differs from its sample in the mark of that step
    (:mod:`everstep.capture.mark_samples`), None if there is none.

    Args:
        comparison: sampler, reused from step to step.
        mark: mark of the step.
        tensors: all tensors of the state, by entry name.
        names: as of :meth:`.MarkComparison.other`.

    Raises:
        FormatError: the mark belongs to another state.
    """
    logged = {
        place.entry.name: tensor_of(mark, place)
        for place in mark.layout.placed
        if place.entry.name.startswith(SPOT)
    }
    return comparison.other(logged, tensors, mark.head.step, names)


def divergence_error(name: str, step: int) -> AuditError:
    """Return the error for an entry whose replayed value differs from the sample in a mark."""
    return AuditError(
        f"replay up to step {step} gives another {name!r} than training had: it was "
        "written to outside the optimizer",
        step=step,
        hint="call ckpt.before_update() and ckpt.after_update() around such writes",
    )


def doubt_about(error: EverstepError) -> str:
    """Return why the steps before a failed one may be inexact, too; "" if they are not."""
    # Samples do not show at which earlier step it went wrong.
    if isinstance(error, AuditError):
        return f"step {error.step} differs from training, and perhaps steps before it"
    return ""


def replay_conditions(records: Iterable[TimelineRecord | None]) -> tuple[int | None, str]:
    """Compare the conditions that the bits of updates depend on, besides the optimizer (I9).

    Args:
        records: timeline records of the updates to replay; None for a damaged record.

    Returns:
        The number of torch's threads in training, None if unknown or not constant; and the reason
        why replay on this machine may be inexact, ``""`` if it must be exact.
    """
    mine = fingerprint()
    threads = set()
    for record in _distinct(records):
        if why := _difference(record, mine, _KEYS_ON_CPU):
            return None, why
        assert record is not None
        theirs = record.fingerprint
        if "cuda" in theirs or "device" in theirs:
            device = theirs.get("device", "a GPU")
            return None, f"trained on {device}, replayed on the CPU"
        if "parameters" in theirs:  # on a device that is not CUDA's
            return None, f"trained on {theirs['parameters']}, replayed on the CPU"
        threads.add(theirs.get("threads", ""))
    (only,) = threads if len(threads) == 1 else ("",)
    # torch may give fewer threads than it was asked for; only a number that is reproducible here is
    # used.
    known = only.isdigit() and int(only) > 0 and describe_threads(int(only)) == only
    return (int(only) if known else None), ""


def fingerprint_difference(records: Iterable[TimelineRecord | None]) -> str:
    """Return the first difference from the conditions of training that may change bits (I9); "" if
    there is none. Unlike :func:`replay_conditions`, it compares the devices as well: the updates
    are replayed where the live optimizers are.

    Args:
        records: timeline records of the updates to replay; None for a damaged record.
    """
    mine = fingerprint()
    for record in _distinct(records):
        if why := _difference(record, mine):
            return why
        assert record is not None
        if not thread_count_fixed(record.fingerprint):
            return f"trained with threads {record.fingerprint['threads']}"
    return ""


def _distinct(records: Iterable[TimelineRecord | None]) -> Iterable[TimelineRecord | None]:
    """Return each record once: thousands of steps share few, and they are not hashable."""
    return {id(record): record for record in records}.values()


def _difference(
    record: TimelineRecord | None, mine: Mapping[str, str], keys: Sequence[str] = ()
) -> str:
    """Return the first difference between the fingerprints of training and of this process; "" if
    there is none.

    Args:
        record: timeline record of training; None: it is damaged.
        mine: fingerprint of this process.
        keys: keys to compare; empty: all that have an influence on the bits of torch.
    """
    if record is None:
        return "the timeline record, which names the machine of training, is damaged"
    theirs = record.fingerprint
    # Denormals may differ although the fingerprints are equal.
    for activity, found in (("trained", theirs), ("replayed", mine)):
        if threads_disagree(found):
            return (
                f"{activity} with denormals flushed by some of torch's threads and kept by others: "
                "call torch.set_flush_denormal(True) at the start of the program"
            )
    for key in keys or sorted({*mine, *theirs} - _KEYS_WITHOUT_INFLUENCE):
        if theirs.get(key) != mine.get(key):
            absent = "kept" if key == "denormals" else "none"
            there = theirs.get(key, absent)
            return f"trained with {key} {there}, replayed with {mine.get(key, absent)}"
    return ""
