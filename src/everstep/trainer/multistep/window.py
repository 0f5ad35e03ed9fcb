"""Window of a multi-step base, its end, and its handover to the keeper.

If the base is rebuilt by the keeper, it receives the gradients of the window. If it is rebuilt when
it is restored (``rebuild="recovery"``), they are written with the base, together with the last
update seen by each part and with samples of the parts at the last step mark, so that a change
outside the optimizer is found then (I8).

A process that trains alone (:class:`EndAlone`) ends a window after its last part. A window whose
parts cannot be brought to one step is void; another one begins at the next mark.

A base of several ranks (:class:`EndTogether`) is complete only if every rank has its shard of the
very same step. Each rank cuts its state into as many parts as its own measurements suggest. So when
a base is due, each proposes a number of parts, and the largest one decides at which mark all
windows end. Nothing else is agreed on: a rank with fewer parts begins later, and one whose window
is void captures its shard in one step, at that mark. So no rank waits for a base that another one
cannot finish, and no messages are exchanged in between (``docs/design/multistep.md``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from everstep.capture.mark_samples import MarkSampler, mark_entries, sampled_bits
from everstep.errors import EverstepError, StateError
from everstep.format import BasePlan, ShardIdentity
from everstep.format.log import RecordHead
from everstep.link.assembly import Assembly, FuzzyParts, PartialUpdate
from everstep.link.capture import Capture
from everstep.link.pool import Block, CapturePool
from everstep.link.recordable import pack_tensors, tensor_hyperparameters
from everstep.link.save import Save, copy_outcome, fail
from everstep.seams import failpoint
from everstep.state.layout import ShardLayout
from everstep.state.survey import Shape, Survey
from everstep.state.values.tensors import host_bytes, tensor_entry
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base import MarkSnapshot
from everstep.trainer.job import Job
from everstep.trainer.log import HeldRecords, WatchedTensors
from everstep.trainer.multistep.measurements import WindowCosts
from everstep.trainer.multistep.partition import TimedCopy
from everstep.trainer.multistep.plan import Part, WindowPlan

_NOTHING = ShardLayout(())


class WindowVoid(Exception):  # noqa: N818 - a state of the window, no error of the program
    """Reason why the parts of a window cannot be brought to one step."""


@dataclass(eq=False, slots=True)
class CopiedUpdate:
    """Update whose gradients are copied.

    Attributes:
        head: header of its record.
        layout: layout of the gradients in ``room``.
        room: their memory.
        objects: encoded objects, set in the lane's thread.
    """

    head: RecordHead
    layout: ShardLayout
    room: Block
    objects: Mapping[str, bytes] = field(default_factory=dict)


class CapturedParts:
    """Detect writes to captured parts outside updates, while training goes on (I8).

    Such a change is in no gradient. The rebuild compares a few elements of each tensor and could
    miss it; version counters show it, at least where torch made the write. If the base is rebuilt
    only when it is restored, a wrong base would stay committed and better ones be deleted
    meanwhile, so elements are compared here, too."""

    def __init__(self) -> None:
        self._owned: dict[str, list[WatchedTensors]] = {}
        self._looks = False

    def add(self, owned: Mapping[str, WatchedTensors], step: int, *, looks: bool) -> None:
        """Watch a part that is being captured at this step mark.

        Args:
            owned: watched tensors, by the key of their optimizer.
            step: step of the mark.
            looks: compare elements, too.
        """
        self._looks = looks
        for key, mine in owned.items():
            mine.settle(step if looks else None)
            self._owned.setdefault(key, []).append(mine)

    def applied(self, key: str, step: int) -> None:
        """Accept the writes of an update, which has ended."""
        for owned in self._owned.get(key, ()):
            owned.settle(step if self._looks else None)

    def check(self, key: str | None = None) -> None:
        """Check that no tensor was written to since its last update.

        Args:
            key: key of an optimizer, to consider only its tensors.

        Raises:
            WindowVoid: one was.
        """
        watched = self._owned.values() if key is None else [self._owned.get(key, [])]
        for owned in (one for many in watched for one in many):
            if name := owned.written():
                raise WindowVoid(f"{name!r} was changed outside its optimizer")


@dataclass(eq=False, slots=True)
class Window:
    """Multi-step base in progress.

    Attributes:
        save: save it fulfils.
        identity: identity of the last step mark.
        plan: plan of the parts.
        shape: shape of the state.
        digest: digest of ``shape``, as in its records.
        tensors: live tensors at the last mark, by entry name.
        keeper: keeper that receives the base.
        pool: memory shared with the keeper.
        room: block of the base.
        lsn: number of the newest update accounted for.
        costs: costs so far.
        next: number of the part that was begun last; -1 before the first.
        captured: names of captured parameters, by the key of their optimizer.
        updates: updates whose gradients are copied.
        others: updates that consumed no captured parameter's gradient.
        logged: records of the log, which has all gradients; None without a log.
        seen: of each captured part, the last update it has seen, and the part.
        rooms: memory of the gradients.
        failed: first error in the lane's thread.
        notified: True when the keeper was notified that the window is complete.
        whole: True when the keeper has rebuilt the base.
        parts: detects writes to captured parts.
    """

    save: Save
    identity: ShardIdentity
    plan: WindowPlan
    shape: Shape
    digest: str
    tensors: Mapping[str, torch.Tensor]
    keeper: RemoteKeeper
    pool: CapturePool
    room: Block
    lsn: int
    costs: WindowCosts
    logged: HeldRecords | None = None
    next: int = -1
    captured: dict[str, frozenset[str]] = field(default_factory=dict)
    updates: list[CopiedUpdate] = field(default_factory=list)
    others: list[RecordHead] = field(default_factory=list)
    seen: list[tuple[int, Part]] = field(default_factory=list)
    rooms: list[Block] = field(default_factory=list)
    failed: EverstepError | None = None
    notified: bool = False
    whole: bool = False
    parts: CapturedParts = field(default_factory=CapturedParts)

    @property
    def block(self) -> torch.Tensor:
        """Return the memory of the base (flat ``uint8``)."""
        return self.pool.block(self.room)

    def memory_of(self, room: Block) -> torch.Tensor:
        """Return the memory of an update's gradients (flat ``uint8``)."""
        return self.pool.whole[room.offset : room.offset + room.size_bytes]

    @property
    def is_void(self) -> bool:
        """Return True if it was lost before it was rebuilt, and not with its keeper."""
        return self.save.is_lost and not self.whole and self.keeper.lost is None

    def account(self, lsn: int, update: CopiedUpdate | None = None) -> None:
        """Account for an update.

        Args:
            lsn: number of the update.
            update: the update, if captured parameters have consumed gradients.

        Raises:
            WindowVoid: one before it is missing.
        """
        # All updates are numbered without gaps, so a gap is an update whose gradients were not
        # copied.
        if lsn != self.lsn + 1:
            raise WindowVoid("an update was missed by the hooks")
        self.lsn = lsn
        if update is None:
            self.others.append(self.head(self.identity.step + 1, lsn))
        else:
            self.updates.append(update)

    def fail(self, error: EverstepError) -> None:
        """Note an error of a copy, in any thread; the first one counts."""
        # Without a lock: if two threads fail at once, either error makes the window void.
        self.failed = self.failed or error

    def check(self, identity: ShardIdentity, survey: Survey) -> None:
        """Check that the captured parts can be brought to a step mark.

        Args:
            identity: identity of the mark.
            survey: survey of the state at the mark.

        Raises:
            WindowVoid: they cannot.
            EverstepError: a copy has failed.
        """
        if self.failed is not None:
            raise self.failed
        if self.logged is not None and self.logged.hole is not None:
            raise WindowVoid(f"the log does not lead to its end: {self.logged.hole}")
        if self.lsn != identity.lsn:
            raise WindowVoid("an update was missed by the hooks")
        shape = survey.shape
        before = self.shape
        same = (shape.entries, shape.aliases, shape.owners)
        if same != (before.entries, before.aliases, before.owners):
            raise WindowVoid("the set of entries has changed")
        now = survey.tensors
        then = self.tensors
        if now is not then:
            for name in self.plan.captured(self.next + 1):
                if now[name] is not then[name]:
                    raise WindowVoid(f"{name!r} was replaced by another tensor")
        self.parts.check()

    def head(self, step: int, lsn: int) -> RecordHead:
        """Return the header of an update's record."""
        timeline = self.identity.timeline
        exact = self.identity.exact
        return RecordHead("update", timeline, step, lsn, self.digest, exact)

    def release_updates(self) -> None:
        """Release the memory of the gradients; in any thread, any number of times."""
        if self.logged is not None:
            self.logged.release()
        with contextlib.suppress(IndexError):
            while True:  # pop() is atomic: two threads never release the same memory
                self.pool.release(self.rooms.pop())

    @property
    def parameters_seen(self) -> list[tuple[int, Mapping[str, frozenset[str]]]]:
        """Return of each part the last update it has seen, and its parameters."""
        return [(lsn, part.parameters) for lsn, part in self.seen]

    def release(self) -> None:
        """Release all memory of an abandoned window."""
        self.release_updates()
        self.pool.release(self.room)

    def tie_updates(self) -> None:
        """Release the memory of the gradients together with the base, which needs them until
        it is durable."""
        self.room.others = tuple(self.rooms)
        # Emptied, so that release_updates() does not free them while the base still needs them.
        self.rooms = []

    def partial_updates(self, *, all_of_them: bool) -> list[PartialUpdate]:
        """Return the updates in the form sent to the keeper, by LSN.

        Args:
            all_of_them: include those that consumed no captured parameter's gradient.

        Raises:
            StateError: the log lacks one.
        """
        if self.logged is not None:
            return logged_updates(self.logged, self.seen[0][0], self.identity.lsn)
        found = [
            PartialUpdate(update.head, update.layout, update.objects, update.room.offset)
            for update in self.updates
        ]
        if all_of_them:
            found += [PartialUpdate(head, _NOTHING, {}, 0) for head in self.others]
        return sorted(found, key=lambda update: update.head.lsn)


def logged_updates(records: HeldRecords, begin_lsn: int, end_lsn: int) -> list[PartialUpdate]:
    """Return the updates of a window from the records of the log, without copying gradients.

    Args:
        records: records from the first part on.
        begin_lsn: LSN of the first part.
        end_lsn: LSN of the last step mark.

    Raises:
        StateError: an update is missing.
    """
    found = [update for update in records.updates if update.head.lsn <= end_lsn]
    if [update.head.lsn for update in found] != list(range(begin_lsn + 1, end_lsn + 1)):
        raise StateError(
            f"a base over several steps cannot be completed: {records.hole or 'the log has a hole'}"
        )
    # What a declared update changes is captured at the last mark.
    return [update for update in found if not update.head.declared]


def samples_at_mark(
    names: Collection[str], tensors: Mapping[str, torch.Tensor], step: int
) -> dict[str, torch.Tensor]:
    """Return a few elements of some entries as they are now, as marks of the log hold them.

    Args:
        names: names of the entries; those on a device are left out.
        tensors: all tensors of the state, by entry name.
        step: step of the mark, which selects the elements.
    """
    spots = MarkSampler({name: tensors[name] for name in names})
    return mark_entries(spots, sampled_bits(spots, sorted(tensors)), step)


def fuzzy_parts(
    plan: BasePlan,
    memory: memoryview,
    objects: Mapping[str, bytes],
    seen: Sequence[tuple[int, Part]],
    spots: Mapping[str, torch.Tensor],
) -> FuzzyParts:
    """Return the description of a base that is written as it was captured, for the keeper.

    Args:
        plan: files of the base.
        memory: block of the base: parts, and everything else as of the last step mark.
        objects: encoded objects of that mark.
        seen: of each part but the last, the last update it has seen, and the part.
        spots: samples; see :func:`samples_at_mark`.
    """
    held = tensor_hyperparameters(plan, memory, objects)
    for name, tensor in spots.items():
        held[name] = tensor_entry(name, tensor), host_bytes(tensor)
    return FuzzyParts([(lsn, part.entries) for lsn, part in seen], *pack_tensors(held))


class Handover:
    """Handover of a window to the keeper, when its last part is copied.

    Args:
        window: the window.
        begin: number of the first part not captured before the last mark.
        survey: survey of the state at the last mark.
        fuzzy: the base is rebuilt when it is restored.
    """

    def __init__(self, window: Window, begin: int, survey: Survey, *, fuzzy: bool) -> None:
        self._window = window
        self._fuzzy = fuzzy
        plan = window.plan
        step = window.identity.step
        if fuzzy:
            self._spots = samples_at_mark(plan.captured(begin), survey.tensors, step)
        else:
            self._samples = plan.samples(begin, survey.tensors)

    def notify(self, timed: TimedCopy, capture: Capture, objects: Mapping[str, bytes]) -> None:
        """Notify the keeper that the window is complete; in the lane's thread.

        Args:
            timed: measurement of the copy of the last part.
            capture: the capture.
            objects: encoded objects of the last mark.

        Raises:
            EverstepError: a copy or check of the window has failed.
        """
        window = self._window
        fuzzy = self._fuzzy
        timed.ended()
        # All checks of earlier parts have ended: the lane runs its jobs in order.
        if window.failed is not None:
            raise window.failed
        failpoint("window.before_assemble")
        # Before the message: the keeper may read the gradients from then on, even if sending fails
        # half-way. Only the end of the base releases them.
        window.notified = True
        copies_ended = None
        if fuzzy:
            memory = window.pool.arena.view[window.room.offset :]
            copies_ended = fuzzy_parts(capture.plan, memory, objects, window.seen, self._spots)
            window.tie_updates()
        updates = window.partial_updates(all_of_them=fuzzy)
        samples = () if fuzzy else self._samples
        captured = None if window.logged is None else window.parameters_seen
        assembly = Assembly(window.digest, updates, samples, copies_ended, captured)
        window.keeper.assemble(capture, objects, assembly, self._on_rebuilt)
        failpoint("window.after_assemble")

    def copies_ended(self) -> None:
        """Release the gradients if the keeper will not read them; in the lane's thread, after all
        copies."""
        # The base may have failed with its keeper before the keeper was notified: ended() has run.
        if not self._window.notified or self._window.save.durable.done():
            self._window.release_updates()

    def ended(self) -> None:
        """Release the gradients when the base is durable or has failed."""
        if self._window.notified:
            self._window.release_updates()

    def _on_rebuilt(self, whole: bool) -> None:
        window = self._window
        window.whole = whole
        window.release_updates()
        if whole:
            # Older bases kept in the arena are superseded: this one also survives a crash.
            window.pool.drop_kept()


# --- The end of a window ------------------------------------------------------------------

VOID_MAX = 2
"""Number of consecutive void windows after which a base is captured in one step."""


@dataclass(frozen=True, slots=True)
class StepMark:
    """A step mark, and the state at it without the tensors that optimizers own."""

    identity: ShardIdentity
    snapshot: MarkSnapshot


@dataclass(slots=True)
class BaseInProgress:
    """Base from the step at which it is due to the step mark that it is of.

    Attributes:
        due: step at whose mark it became due.
        begin: step at whose mark this rank's window begins.
        end: step at whose mark the windows of all ranks end.
        plan: plan of this rank's window; None if it captures its shard in one step.
        begun: True if this rank's window has begun, and will complete the save.
        over: True if it has ended, or was abandoned.
    """

    due: int
    begin: int
    end: int
    plan: WindowPlan | None
    begun: bool = False
    over: bool = False
    _save: Save | None = None

    def save(self, timeline: int) -> Save:
        """Return the save that this base fulfils."""
        self._save = self._save or Save(self.end, timeline)
        return self._save

    def finish(self, taken: Save | None = None) -> None:
        """Note that it has ended; complete a save that no window will complete.

        Args:
            taken: base of one step taken in its place, whose outcome the save takes over; None to
                fail the save.
        """
        self.over = True
        self.plan = None
        save = self._save
        if save is None or self.begun:
            return
        if taken is not None:
            copy_outcome(save, taken)
            return
        why = StateError("no rank has begun to capture this base", step=save.step)
        fail(save.staged, why)
        fail(save.durable, why)


class EndAlone:
    """End of the windows of a process that trains alone.

    Attributes:
        shared: True if other ranks rely on the step at which the base ends. Its window is then
            complete only after all checks, and no rank begins another window by itself.
        base: newest base, in progress or over; None before the first.
        mark: last step mark, until something is updated; None if no base is in progress.
        again: reason why another base is due after one became void; None if none is.
        voids_in_row: number of consecutive void windows.
        replaced: base of one step that was taken at the last mark in place of a void window.
    """

    shared = False

    def __init__(self) -> None:
        self.base: BaseInProgress | None = None
        self.mark: StepMark | None = None
        self.again: str | None = None
        self.voids_in_row = 0
        self.replaced: Save | None = None

    @property
    def in_progress(self) -> BaseInProgress | None:
        """Return the base in progress; None if there is none."""
        return None if self.base is None or self.base.over else self.base

    def can_begin(self, step: int) -> bool:
        """Return True if a base that is due at the end of ``step`` begins there."""
        return self.in_progress is None

    def begin(self, step: int, plan: WindowPlan | None) -> None:
        """Begin a base that is due at the end of ``step``; agree with all ranks where it ends.

        Args:
            step: step that has just ended.
            plan: plan of this rank's window; None to capture its shard in one step.

        Raises:
            DeadlineError: another rank does not take this step.
        """
        self.finish()
        parts = 1 if plan is None else max(1, len(plan.parts))
        # Noted before it is agreed on: a rank that asks twice would be one message ahead.
        self.base = BaseInProgress(due=step, begin=step, end=step, plan=plan, over=True)
        end = self.agree(step, parts)
        self.base = BaseInProgress(due=step, begin=end - parts + 1, end=end, plan=plan)

    def finish(self, step: int | None = None, taken: Save | None = None) -> None:
        """Note that no base is in progress any more.

        Args:
            step: step that it is of; None if it was abandoned.
            taken: base of one step taken in its place.
        """
        base = self.in_progress
        if base is not None:
            base.finish(taken)
            # Several ranks compare with it in can_begin(): an abandoned base must not block later
            # steps.
            base.end = base.due if step is None else step

    def restart(self) -> None:
        """Forget everything: training continues from another step."""
        self.finish()
        self.base = None

    def voided(self, why: str) -> None:
        """Count a void window; make another base due, unless all ranks go on to the agreed step."""
        self.voids_in_row += 1
        if not self.shared:
            self.again = why

    def agree(self, step: int, parts: int) -> int:
        """Return the step at whose mark a base that is due at ``step`` ends."""
        return step + parts - 1

    def can_end(self, step: int | None) -> bool:
        """Return True if the base in progress can end before its last step, as none follows.

        Args:
            step: step of the last mark, if the state still is that of it.
        """
        return step is not None


class EndTogether(EndAlone):
    """End of this rank's windows, agreed on with all ranks of a job.

    Args:
        job: all ranks.
    """

    shared = True

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def can_begin(self, step: int) -> bool:
        """Return True if a base that is due at the end of ``step`` begins there, on all ranks.

        It does not if one is in progress or ends there. Nor if one was agreed on there before: an
        error at the end of a step makes each rank ask a second time.
        """
        base = self.base
        if base is None:
            return True
        return (base.over or base.end < step) and step not in (base.due, base.end)

    def agree(self, step: int, parts: int) -> int:
        replies = self._job.exchange(f"end step {step}", {"parts": parts})
        return step + int(max(reply["parts"] for reply in replies)) - 1

    def can_end(self, step: int | None) -> bool:
        # Even if this rank cannot end there: the other ranks wait for its message.
        replies = self._job.exchange("call wait() or close()", {"step": step})
        return step is not None and all(reply["step"] == step for reply in replies)


def window_end(job: Job | None) -> EndAlone:
    """Return how the windows of this process end."""
    return EndAlone() if job is None else EndTogether(job)
