"""Records the gradient log: what each optimizer consumed, and what each step left behind.

In the training thread as little as possible: a list of references before an update, a wait for
their copies behind it (they run beside the update, on the lane), and at the step mark a copy of
the little that no optimizer replays. Everything else is done by the lane's thread and by the
keeper (LowDiff sections IV and V; I2, I8).

Whatever goes wrong, an exception in the training thread or in the lane's: the memory that was taken
is given back, and what is not recorded makes a new base due.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import torch

from everstep.capture.lanes.lane import Lane
from everstep.config.options import Options
from everstep.errors import DeadlineError, EverstepError
from everstep.format.log import RecordHead
from everstep.link.channel import BackgroundChannel
from everstep.link.pool import CapturePool
from everstep.link.recordable import Layouts, LogKeeper, ReplacedTensors, state_digest
from everstep.link.save import Save, as_everstep_error
from everstep.seams import Clock
from everstep.seams.failpoints import failpoint
from everstep.seams.fingerprint import Opened
from everstep.seams.processes.conditions import is_over
from everstep.state.layout.shards import ShardLayout
from everstep.state.survey.survey import Survey
from everstep.state.training_state import State
from everstep.state.values.objects import encode
from everstep.trainer.budget.log_limits import log_dropped, log_dropped_early, too_large
from everstep.trainer.log.consumed import Consumption
from everstep.trainer.log.declared import DeclaredLog
from everstep.trainer.log.disklog import DiskLog
from everstep.trainer.log.log_marks import Objects, copy_now
from everstep.trainer.log.log_part import LogPart
from everstep.trainer.log.nonfinite import NonFinite
from everstep.trainer.log.recorder_stats import RecorderStats
from everstep.trainer.log.retry import Retry
from everstep.trainer.log.rooms import Into, Loan, LogRooms
from everstep.trainer.log.under_way import UnderWay
from everstep.trainer.log.untold import Untold

__all__ = ["Recorder"]

_FULL = "the log has half filled its memory, or has what it may have on disk between bases"


class Recorder:
    """Records the updates of all optimizers of a state, and its step marks.

    Args:
        lane: copies.
        log_bytes_max: of records in memory; with more a new base is due.

    Attributes:
        base_due: why the log cannot go on without a new base; None if it can.
        base_step: of the newest base that was asked for, and has not failed.
        disk: which records go to disk.
        led_step: the newest step that a base and the records since lead to, all of which the keeper
            in service has; None: it has none.
        rooms: the memory of records.
        overrun: called when there is no memory for a record, though there is a replica.
        unseen: called when a mark shows a change that no optimizer made, and nobody told of.
        nonfinite: notices gradients that are not finite, if they are watched.
        untold: notices what something else writes to what optimizers own.
    """

    def __init__(
        self,
        options: Options,
        state: State,
        lane: Lane,
        channel: BackgroundChannel,
        clock: Clock,
        *,
        log_bytes_max: int,
    ) -> None:
        self._options = options
        self._state = state
        self._lane = lane
        self._channel = channel
        self._clock = clock
        self._timeline = 0
        self._exact = True
        self._opened = Opened(state.optimizers)
        self._step_bytes = 0  # of the step under way
        self._followed: int | None = None  # the step whose mark was the last
        self._last_lsn = -1  # of which consumption was told
        self.base_step = 0
        self.disk = DiskLog(options, channel)
        self.rooms = LogRooms(self.disk, log_bytes_max)
        self.overrun: Callable[[], None] = lambda: None
        self.unseen: Callable[[], None] = lambda: None
        self._under: UnderWay | None = None
        self._layouts = Layouts()
        self._declared = DeclaredLog(state)
        log = options.method.log
        ratio = options.log.ratio if log == "adaptive" else None
        self._consumption = Consumption(state, lossy_ratio=ratio, sparse=log == "topk")
        self._part = LogPart(state)
        self._replaced = ReplacedTensors(state)
        self.untold = Untold(channel, state)
        self.nonfinite = NonFinite(channel, watched=options.log.watch)
        self._retry = Retry()
        self._entries: Any = None
        self._in_marks: list[str] = []  # of these, what each mark holds in full
        self._digest = ""
        self.base_due: str | None = "no base yet"
        self._leads_here = False  # a base that is whole, and what was recorded since
        self.led_step: int | None = None
        self._told = False  # that a record is too large
        self.stats = RecorderStats()

    @property
    def needs_capture(self) -> bool:
        """Whether a base is due that has to be captured here: the log does not lead to this step,
        or it is not only that its memory is half full."""
        return self.base_due is not None and not (self.base_due == _FULL and self._leads_here)

    def start(
        self,
        keeper: LogKeeper | None,
        pool: CapturePool | None,
        timeline: int,
        exact: bool,
        step: int = 0,
        seen: Survey | None = None,
    ) -> None:
        """From now on records go to ``keeper``, as those of ``timeline``.

        Args:
            step: that the state is of.
            seen: the state, if it has been surveyed.
        """
        self._drop()
        if pool is not None:
            pool.give_way = self._give_way
        self._timeline = timeline
        self._exact = exact
        self._opened.began(timeline)
        self.nonfinite.begin()
        self.rooms.start(Into(keeper, pool, timeline) if keeper and pool else None)
        self.disk.start(keeper)
        self._declared.start()
        survey = (seen or self._state.survey()) if self.rooms.into is not None else None
        self._replaced.start(survey)
        self.untold.start(survey, step)
        self._followed = None
        self._last_lsn = -1
        self._entries = None
        if survey is not None:  # save() may take a base before there is a mark
            self._learn(survey)
        self.base_due = self.base_due or "a new timeline"
        self._leads_here = False
        self.led_step = None

    def consumed(self, key: str, lsn: int, step: int, *, over: bool = False) -> None:
        """The gradients of an optimizer are what it is going to consume: begins to copy them.

        Args:
            lsn: of the update.
            step: that is under way.
            over: it has consumed them already: a hook that was registered later came last.
        """
        if self.rooms.into is None:
            return
        if lsn == self._last_lsn:
            if self._under is not None:
                self._under.calls += 1  # a closure that is called again: not recorded
            return
        with self._recording(step):
            self._drop()
            self._last_lsn = lsn
            # Where a hook of somebody else came last it is too late to tell.
            if not over and (written := self.untold.before(key, step)):
                self._hole(written)
                return
            self._under = self._copy(self.rooms.into, key, lsn, step, over)

    def applied(self, key: str) -> None:
        """The update is over: gradients may change from now on, so their copies must be made."""
        under = self._under
        if under is None:
            self.untold.applied(key)
            return
        with self._recording(None):
            self.untold.applied(key)
            try:
                there = under.transfer.gate(under.end, self._options.progress_timeout_s)
                if not there:
                    self._hole("copying gradients hangs")
                    self._channel.post(DeadlineError("copying gradients hangs"))
                elif under.calls > 1:
                    self._hole(f"{key} calls its closure more than once")
                else:
                    self._lane.run(under.job)
                    self._under = None
            finally:
                self._drop()

    def skipped(self, why: str) -> None:
        """Something has changed what optimizers own that replay cannot repeat."""
        self._drop()
        self._declared.start()
        self.untold.accept()
        self._hole(why)

    def declared(self, pattern: str, lsn: int, step: int) -> None:
        """The function registered for ``pattern`` has run: replay runs it at this place (I8).

        Args:
            lsn: of the update.
            step: that is under way.
        """
        if self.rooms.into is None:
            return
        with self._recording(step):
            self.untold.declared(pattern)
            named = self._declared.ran(pattern)
            head = self._head("update", step, lsn, pattern)
            self._copy_now(head, named, dict)

    def mark(self, survey: Survey, lsn: int, step: int) -> None:
        """The step is over: records what no optimizer replays (I8)."""
        into = self.rooms.into
        if into is None:
            return
        if why := self._retry.due(step):
            self.base_due = self.base_due or why
        followed = self._followed
        self._followed = step
        if followed is not None and step != followed + 1:
            self._hole(f"step {followed + 1} ended in an error")
        with self._recording(step):
            self._mark(into, survey, lsn, step)
            self.disk.over(step)

    def base_taken(self, save: Save) -> None:
        """A base of this very step is being captured.

        Where the log does not lead to this step, nothing but the base does: then this waits until
        the keeper has all of it, or more than the step in flight could be lost.
        """
        why = self.base_due
        self.base_due = None
        staged = save.staged
        led = self._leads_here
        if not led and self.rooms.into is not None:
            with self._timed():  # whatever fails, or hangs, is told by whoever copies
                is_over(staged, self._options.progress_timeout_s)
            there = staged.done() and not staged.cancelled() and staged.exception() is None
            self._leads_here = there
            self.led_step = save.step if there else self.led_step
        self.untold.follows_base = True
        before = self.base_step
        self.base_step = save.step
        into = self.rooms.into
        self.rooms.base_taken()
        self.disk.base_taken(save, self.rooms.number, leads=led)

        def durable(_: Any) -> None:
            fine = not save.durable.cancelled() and save.durable.exception() is None
            if self.rooms.into is not into:  # steps of a timeline before are others
                return
            if fine:
                self.rooms.base_durable(save.step)
            else:  # the keeper has nothing of it any more
                self._leads_here = False
                self.led_step = None
                if self.base_step == save.step:
                    self.base_step = before
                    self.rooms.base_failed()
            self._retry.ended(save.step, why, fine=fine)

        save.durable.add_done_callback(durable)
        with self._timed():
            self.disk.over(save.step)

    def restored(
        self, base_step: int | None, survey: Survey | None, step: int, *, on_disk: bool
    ) -> None:
        """The state was restored, from a base of ``base_step`` (None: there was nothing), which is
        on disk or not, to ``step``, and surveyed then."""
        self.base_step = base_step or 0
        self.untold.follows_base = there = base_step is not None
        self._leads_here = there and self._exact and None not in (survey, self.rooms.into)
        self.led_step = step if self._leads_here else None
        self.disk.restored(on_disk=on_disk)

    def on_disk(self, number: int) -> None:
        """Records up to ``number`` are on disk, or (0) the keeper is gone; in any thread."""
        self.disk.reached(number)
        self.rooms.release()

    def _learn(self, survey: Survey) -> None:
        """What the state consists of from now on."""
        shape = survey.shape
        self._entries, self._digest = (
            shape.entries,
            state_digest(shape, self._consumption.regroup()),
        )
        self._in_marks = [e.name for e in shape.entries if shape.owners[e.name].in_marks]

    def _mark(self, into: Into, survey: Survey, lsn: int, step: int) -> None:
        written = self.untold.at_mark(survey, step)
        regrouped = not self._consumption.grouped_as_before()
        if survey.shape.entries is not self._entries or regrouped:
            changed = self._entries is not None
            before = self._digest
            self._learn(survey)
            self._leads_here = self._leads_here and self._digest == before
            if changed:
                self.base_due = "what the state consists of has changed"
        why = "parameters are in other groups than before" if regrouped else written
        if not regrouped and (replaced := self._replaced.since(survey)):
            why = f"{replaced!r} was replaced, and not by its optimizer"
        if why is not None:  # and an update of this step may have been recorded before that
            self.unseen()
            self._hole(why)
            return
        named = {name: survey.tensors[name] for name in self._in_marks}
        samples, ran = self._declared.samples(survey)
        named |= samples | self.untold.samples(step)
        head = self._head("mark", step, lsn)
        about_bytes = sum(survey.shape.objects_bytes.values())
        told = self._copy_now(head, named, survey.objects, ran, about_bytes)
        if told is None:
            self._lane.run(survey.measure)  # plain data may be less by now
            return
        # Or more than the step in flight could be lost. Behind it on the lane is nothing but the
        # updates of this step: no update begins while a base is being copied.
        if is_over(told, self._options.progress_timeout_s):
            told.result()
        else:
            self._hole("the keeper takes no records")
            self._channel.post(DeadlineError("recording a step hangs", step=step))
        step_bytes = self._step_bytes
        self._step_bytes = 0
        self._lane.run(lambda: into.pool.warm_ahead(2 * step_bytes))  # behind the next backward
        self.stats.marks += 1
        self.led_step = step if self._leads_here else self.led_step
        self.disk.marked(self.rooms.number, step)

    def _copy(self, into: Into, key: str, lsn: int, step: int, over: bool) -> UnderWay | None:
        if not self._consumption.grouped_as_before(key):
            self._hole(f"the parameters of {key} are in other groups than before")
            return None
        consumed, name, about = self._part.look(self._consumption, key)
        if consumed.written and over:
            self._hole(f"gradients of {key} were changed before they could be copied")
            return None
        head = self._head("update", step, lsn)
        layout = consumed.layout
        timeout_s = self._options.progress_timeout_s
        with self._lent(layout.size_bytes) as loan:
            if loan is None:
                return None
            room = loan.room
            if consumed.in_host_memory:  # pinning takes the pages
                self._lane.run(lambda: into.pool.populate(room))
            transfer = self._lane.submit(consumed.batches, into.part(room), lambda end: None)
            # It must not begin before the copy ends.
            if consumed.written and not transfer.gate(layout.size_bytes, timeout_s):
                raise DeadlineError("copying gradients hangs", step=step)

            def objects() -> dict[str, bytes]:
                if not transfer.wait(timeout_s):
                    raise DeadlineError("copying gradients hangs", step=step)
                return {name: encode(about, checked=True)}

            def job() -> None:
                self._tell(loan, head, layout, objects)

            return UnderWay(transfer, layout.size_bytes, job, loan)

    def _copy_now(
        self,
        head: RecordHead,
        named: Mapping[str, torch.Tensor],
        objects: Objects,
        ran: frozenset[str] = frozenset(),
        objects_bytes: int = 0,
    ) -> Future[None] | None:
        """Copies what may change at once, and lets the keeper be told; None: there is no memory.

        Args:
            ran: declared updates since the last mark.
            objects_bytes: of the objects, about.
        """
        into = self.rooms.into
        assert into is not None
        layout = self._layouts.of(named)
        with self._lent(layout.size_bytes, objects_bytes) as loan:
            if loan is None:
                return None
            into.pool.populate(loan.room)
            of_mark = layout, named, into.part(loan.room), objects, self._options.progress_timeout_s
            objects = copy_now(self._lane, *of_mark)
            return self._lane.run(lambda: self._tell(loan, head, layout, objects, ran))

    def _tell(
        self,
        loan: Loan,
        head: RecordHead,
        layout: ShardLayout,
        objects: Objects,
        ran: frozenset[str] = frozenset(),
    ) -> None:
        """In the lane's thread, behind the copies: the record is whole."""
        if not loan.end():
            return  # training was interrupted as it handed it over
        into = loan.into
        room = loan.room
        number = None
        try:
            encoded = objects()
            objects_bytes = sum(map(len, encoded.values()))
            failpoint("log.before_record")
            if not self.rooms.fits(into, room, objects_bytes):
                self._no_room()
                return
            number = self.rooms.keep(into, head, room, objects_bytes)
            if number is None:
                return
            if head.kind == "mark":
                self._declared.check(head, layout, into.part(room), ran)
            into.keeper.log(number, head, layout, encoded, room.offset)
            failpoint("log.after_record")
            self.stats.records += 1
            self.stats.record_bytes += layout.size_bytes + objects_bytes
            self.nonfinite.look(head, layout, into.part(room))
        except EverstepError as error:
            self._lost(error)
        except Exception as error:
            self._lost(EverstepError(f"internal error in the log: {error!r}", step=head.step))
        finally:
            if number is None:
                into.release(room)

    @contextlib.contextmanager
    def _lent(self, size_bytes: int, objects_bytes: int = 0) -> Iterator[Loan | None]:
        """Memory for a record; None, and a new base is due, if there is none. In an error it is
        given back."""
        into = self.rooms.into
        room = self.rooms.take(size_bytes, objects_bytes)
        assert into is not None
        self._step_bytes += size_bytes
        if self.rooms.half_full:
            self.base_due = self.base_due or _FULL
        if self.rooms.cut_short >= 0:
            step = self.rooms.cut_short
            self.rooms.cut_short = -1
            self._channel.post_notice(log_dropped_early(step))
        if room is None:
            self._no_room()
            if self.rooms.relieved_to() is not None:
                self.overrun()
        loan = None if room is None else Loan(into, room)
        try:
            yield loan
        except BaseException:
            if loan is not None:
                self._lane.run(loan.give_back)  # behind the copies into it
            raise

    def _no_room(self) -> None:
        self._hole("there is no host memory for the log")
        if self.rooms.too_large and not self._told:
            self._told = True
            self._channel.post_notice(too_large(self.rooms.too_large, self.rooms.bytes_max))

    def _give_way(self) -> bool:
        """A base has no room beside the log: it goes first, or neither would ever go on."""
        if self.rooms.relieved_to() is not None or not self.rooms.give_way():
            return False
        self._hole("a base needs its memory")
        self.led_step = None
        self._channel.post_notice(log_dropped(self._followed))
        return True

    def _drop(self) -> None:
        """The update that is being copied will not be recorded, if there is one."""
        under = self._under
        self._under = None
        if under is not None:
            self._lane.run(under.loan.give_back)

    def _head(
        self, kind: Literal["update", "mark"], step: int, lsn: int, declared: str = ""
    ) -> RecordHead:
        exact = self._exact and self._opened.holds  # all that replay asks for
        if kind == "mark":  # of updates nobody asks
            exact = exact and self._state.exact
        return RecordHead(kind, self._timeline, step, lsn, self._digest, exact, declared)

    def _lost(self, error: EverstepError) -> None:
        self._channel.post(error)
        self._hole(error.message)

    def _hole(self, why: str) -> None:
        self.stats.holes += 1
        self.base_due = self.base_due or why
        self._leads_here = False

    @contextlib.contextmanager
    def _recording(self, step: int | None) -> Iterator[None]:
        """What fails is no reason for training to, but for a hole; the policy says what becomes of
        it. An interrupt goes on, and leaves one, too."""
        try:
            with self._timed():
                yield
        except Exception as error:
            self._lost(as_everstep_error(error, step))
        except BaseException:
            self._hole("recording was interrupted")
            raise

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            self.stats.stall_s += self._clock.monotonic_s() - start_s
