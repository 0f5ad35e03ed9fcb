"""Captures bases over several steps (GoCkpt section 4): the training process's side.

A *window* begins at a step mark, when a base is due. In each of its steps one part of the state is
copied behind forward and backward, and the update waits for it (I1). From then on the gradients
that this part consumes are copied, too, into memory that the keeper replays them from (I2). At the
last step mark comes everything that no optimizer replays. From there on it is a capture like any
other, but that the keeper brings all parts to that step before it writes them (I3).

Copies are made in the order in which they are due: the gradients of a step before the part of the
next. What cannot be brought to the last step makes the window void, and a new one begins.

What several ranks do so, all to the same step: :mod:`.multistep_ranks`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import PurePath

from everstep.capture.lanes.lane import Lane
from everstep.config.options import Options
from everstep.errors import EverstepError, StateError
from everstep.format.header import ShardIdentity
from everstep.link.channel import BackgroundChannel
from everstep.link.pool import Block, CapturePool
from everstep.link.recordable import state_digest
from everstep.link.save import Save, as_everstep_error, fail, failing_save
from everstep.seams import Clock
from everstep.seams.failpoints import failpoint
from everstep.seams.fingerprint import Opened
from everstep.state.survey.survey import Shape, Survey
from everstep.state.training_state import State
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base.saver import Saver
from everstep.trainer.budget.disk import check_disk_budget
from everstep.trainer.multistep.multistep_choice import Choice
from everstep.trainer.multistep.multistep_fuzzy import redo_bytes
from everstep.trainer.multistep.multistep_last import Last
from everstep.trainer.multistep.multistep_mark import AtMark
from everstep.trainer.multistep.multistep_parts import PartCopies
from everstep.trainer.multistep.multistep_plan import PartsPlan
from everstep.trainer.multistep.multistep_planner import Planner
from everstep.trainer.multistep.multistep_stats import MultistepStats, Watch
from everstep.trainer.multistep.multistep_steps import moment_of
from everstep.trainer.multistep.multistep_updates import UpdateCopies
from everstep.trainer.multistep.multistep_window import Window, written

__all__ = ["VOID_MAX", "Multistep"]

_log = logging.getLogger("everstep")
VOID_MAX = 2
"""Windows that become void in a row; then a base of one step is taken."""


class Multistep:
    """Takes bases over several steps, one at a time.

    Args:
        saver: takes those of one step, and what is left at the last mark of the others.

    Attributes:
        again: why the base that was under way has become void; one is due. None: it has not.
        stats: what it has done.
    """

    def __init__(
        self,
        options: Options,
        run: PurePath,
        state: State,
        saver: Saver,
        lane: Lane,
        channel: BackgroundChannel,
        clock: Clock,
    ) -> None:
        self._options = options
        self._run = run
        self._state = state
        self._saver = saver
        self._lane = lane
        self._channel = channel
        self._clock = clock
        self._pid = os.getpid()
        self._keeper: RemoteKeeper | None = None
        self._pool: CapturePool | None = None
        self._window: Window | None = None
        self._ended: Window | None = None  # nothing has been updated since
        self._last: Save | None = None
        self._sharp: Save | None = None  # the last one of a single step
        self._timed: Future[None] | None = None  # it has said how fast the link is
        self._digest: tuple[object, str] = (None, "")
        self._void = 0  # windows in a row
        self._opened = Opened(state.optimizers)
        self.stats = MultistepStats()
        self._choice = Choice(options, clock, self.stats, partial(moment_of, state))
        about = lane, clock, self._choice, saver.stall_s
        self._parts = PartCopies(options, *about, self._overtaken)
        self._updates = UpdateCopies(options, state, *about, self._give_up, channel.post_notice)
        explicit = isinstance(options.method.parts, int)
        consumption = self._updates.consumption
        self._planner = Planner(state, lane, self._choice, consumption, explicit=explicit)
        self.again: str | None = None
        saver.also_gate = self.gate
        saver.finish_first = self.finish
        saver.make_good = self.make_good
        saver.on_torn = lambda error: error is self._updates.told

    @property
    def open(self) -> bool:
        """Whether a base is under way that is not all there."""
        return self._window is not None

    def start(self, keeper: object, pool: CapturePool | None, timeline: int) -> None:
        """From now on bases go to ``keeper``, through the memory of ``pool``."""
        self._opened.began(timeline)
        Multistep.drop(self, "its keeper is no longer in service")  # other ranks go on
        self._keeper = keeper if isinstance(keeper, RemoteKeeper) else None
        self._pool = pool
        self._last = None
        self._planner.start()

    # --- At step marks ------------------------------------------------------------------

    def take(self, identity: ShardIdentity, survey: Survey | None, *, sharp: bool) -> Save:
        """Takes a base: over the next steps, or (``sharp``) of the step that has just ended.

        Raises:
            EverstepError: what failed, now or in the background, by the policy.
        """
        window = self._window
        self.again = None
        if window is not None:
            if not sharp:
                return window.save
            with self._counted():
                self._end_at(window, identity)
            self.again = None  # what is not in that one is in the one that is taken now
        last = self._last
        base = (identity.timeline, identity.step)
        if last is not None and (last.timeline, last.step) == base and not last.is_lost:
            return last
        self._ended = None
        begins = not sharp and self._void < VOID_MAX and self._opened.holds
        with contextlib.suppress(EverstepError):  # a base of this step has it, too, and tells it
            survey = self._state.survey() if begins and survey is None else survey
        if begins and survey is not None:
            return self._begin(identity, survey)
        self._void = 0
        self._sharp = taken = self._saver.take(identity, show=sharp, survey=survey)
        return taken

    def marked(self, identity: ShardIdentity) -> bool:
        """A step is over: goes on with the base that is under way, if there is one.

        Returns:
            Whether one still is: no other can begin.
        """
        self._moved()
        self._choice.steps.marked(sum(self._saver.stall_s.values()))
        closing = self.stats.closing is not None
        self.stats.close(self._saver.stall_s)
        self._parts.prune()
        if self._window is None:
            self._updates.held.settle()
        self._mark(identity, closing=closing)
        return self.open

    def _mark(self, identity: ShardIdentity, *, closing: bool) -> None:
        """What is to be done at a step mark; ``closing``: the one before was the last of a base."""
        with self._counted():
            if self._window is not None:
                self._go_on(self._window, identity)
            elif not (self._planner.is_ahead or closing or self._is_timing):
                self._plan_ahead(identity)

    def _go_on(self, window: Window, identity: ShardIdentity) -> None:
        try:
            survey = self._state.survey()
            if (why := self._why_void(window, identity, survey)) is not None:
                self._give_up(why, window.failed)
            elif window.next + 2 >= len(window.plan.parts):
                self._finish(window, identity, survey)
            else:
                window.identity = identity
                window.tensors = survey.tensors
                self._take_part(window, survey)
        except Exception as error:
            ours = as_everstep_error(error, identity.step)
            self._give_up(ours.message, ours)
        except BaseException:  # an interrupt, perhaps half-way
            self._give_up("it was interrupted")
            raise

    def finish(self) -> None:
        """No step will follow: what is left is taken at the last step mark, if the state is still
        that of then. Nothing is left in the way of training."""
        if os.getpid() != self._pid:
            return
        if self._window is not None:
            self._finish_at_mark(self._window)
        self._updates.held.release()

    def _finish_at_mark(self, window: Window) -> None:
        if window.lsn != window.identity.lsn or self._updates.under_way:
            self._give_up("training has ended within a step", window.failed)
        elif window.at_mark is None or not window.at_mark.holds(self._state.survey()):
            self._give_up("the state is no longer that of the last step mark", window.failed)
        else:
            self._end_at(window, window.identity)
            self._ended = window  # void, perhaps

    def make_good(self) -> bool:
        """All bases have ended, and perhaps no step follows. The last may have been lost: torn, or
        not what its step had, which shows when the keeper makes it whole. If the state still is
        that of its step, one of that step alone is taken in its place.

        Returns:
            Whether it was.
        """
        window = self._ended
        self._ended = None
        if window is None or not window.is_void or window.at_mark is None:
            return False
        if not window.at_mark.holds(self._state.survey()):
            return False
        self.again = None
        self._saver.take(window.identity, show=False)
        return True

    def drop(self, why: str) -> None:
        """The base that is under way is of no use any more; that is no reason for another."""
        self._moved()
        if self._window is not None:
            self._give_up(why)
            self._void = 0
            self.again = None

    # --- At updates ---------------------------------------------------------------------

    def gate(self, optimizer: str | None) -> None:
        """Holds an update back until what it is going to change has been copied (I1).

        Args:
            optimizer: key of the optimizer that updates; None: anything may be updated.
        """
        if optimizer is not None:
            self._moved()
        sharp = self._sharp is not None and not self._sharp.staged.done()
        copies = sharp or self._window is not None or self._parts.open or self._updates.held.open
        self._choice.steps.gated(sum(self._saver.stall_s.values()), quiet=not copies)
        self._parts.gate(optimizer)
        kept = 0 if optimizer is None else self._options.method.held_steps - 1
        self._updates.held.gate(optimizer, keep=kept)

    def consumed(self, key: str, lsn: int, step: int, *, over: bool = False) -> None:
        """The gradients of an optimizer are what it is going to consume; see
        :meth:`.multistep_updates.UpdateCopies.consumed`."""
        window = self._window
        if window is None:
            return
        with self._counted():
            # Where a hook of somebody else came last it is too late to tell.
            if not over and (name := window.parts.written(key)) is not None:
                self._give_up(written(name))
            elif not self._opened.holds:  # whoever makes it whole goes by the timeline's record
                self._give_up("updates are computed otherwise than when the timeline was opened")
            else:
                self._updates.consumed(window, key, lsn, step, over=over)

    def applied(self, key: str) -> None:
        """The update is over."""
        window = self._window
        if window is None or os.getpid() != self._pid:
            return
        with self._counted():
            try:
                if not self._updates.applied(window, key):
                    self._give_up("an update was not seen")
                window.parts.applied(key, window.identity.step)
            except Exception as error:  # which is no reason for training to fail
                ours = as_everstep_error(error, window.identity.step + 1)
                self._give_up(ours.message, ours)

    def declared(self, pattern: str, lsn: int, step: int) -> None:
        """A registered function has run: what it updates is captured at the last mark only."""
        self._moved()
        if self._window is not None and not self._window.account(lsn):
            self._give_up("an update was not seen")

    def skipped(self, why: str) -> None:
        """Something has changed what optimizers own that replay cannot repeat."""
        self._moved()
        if self._window is not None and os.getpid() == self._pid:
            self._give_up(why)

    def _plan_ahead(self, identity: ShardIdentity) -> None:
        """Behind a step in which nothing is captured: plans the base that is due next."""
        pool = self._pool
        if pool is None:
            return
        self._planner.is_ahead = True  # tried once, whatever comes of it
        try:
            survey = self._state.survey()
            prepared = self._saver.prepare(survey, identity)
            self._digest_of(survey.shape)
            self._planner.ahead(prepared, survey.tensors, pool, waits=self._updates.waits)
        except EverstepError as error:  # of which the base will say more
            _log.debug("the next base was not planned ahead: %s", error)

    @property
    def _is_timing(self) -> bool:
        """The first base has not said yet how fast the link is: plans would be for none."""
        waits = self._timed is not None and not self._timed.done()
        return waits and self.stats.link_bytes_per_s is None

    def _moved(self) -> None:
        """The state is no longer that of the last step mark."""
        self._ended = None

    # --- A window -----------------------------------------------------------------------

    def _begin(
        self,
        identity: ShardIdentity,
        survey: Survey,
        plan: PartsPlan | None = None,
        save: Save | None = None,
    ) -> Save:
        """Begins a window here; ``plan`` of its parts, and ``save``, which it becomes, if they are
        known already."""
        keeper = self._keeper
        pool = self._pool
        assert keeper is not None
        assert pool is not None
        prepared = self._saver.asked(survey, identity)
        plan = plan or self._planner.next(prepared, survey.tensors, pool, waits=self._updates.waits)
        if len(plan.parts) <= 1:
            self._saver.saves -= 1
            ready_bytes = self._lane.ready_bytes(survey.tensors.values(), pool.whole)
            timed = self._choice.timed("base", prepared.size_bytes)
            save = self._sharp = self._saver.take(identity, show=False, survey=survey)
            if ready_bytes >= prepared.size_bytes:  # or it says how fast memory is made ready
                self._timed = self._lane.run(timed.ended)
            self.stats.parts = 1
            return save
        save = save or Save(identity.step + len(plan.parts) - 1, identity.timeline)
        self._last = save
        watch = Watch(len(plan.parts), dict(self._saver.stall_s), self._clock.monotonic_s())
        room: Block | None = None
        with failing_save(save, self._saver.post):
            size_bytes = prepared.plan(identity).size_bytes
            if self._options.leaves_bases_fuzzy:
                size_bytes += redo_bytes(plan.cut)
            check_disk_budget(self._options, self._run, size_bytes)
            room = self._saver.acquire(prepared, survey)
        if room is None:
            self._channel.check()
            return save
        self._window = window = Window(
            save,
            identity,
            plan,
            survey.shape,
            self._digest_of(survey.shape),
            survey.tensors,
            keeper,
            pool,
            room,
            identity.lsn,
            watch,
            next=-1,
        )
        self.stats.windows += 1
        self.stats.parts = len(plan.parts)
        with self._counted():
            try:
                self._take_part(window, survey)
            except Exception as error:
                ours = as_everstep_error(error, identity.step)
                self._give_up(ours.message, ours)
            except BaseException:
                self._give_up("it was interrupted")
                raise
        self._channel.check()
        return save

    def _take_part(self, window: Window, survey: Survey) -> None:
        """Begins to copy the next part."""
        window.next += 1
        part = window.plan.parts[window.next]
        copies = window.plan.copies(part.entries, survey.tensors)
        self._parts.submit(window, copies, part.size_bytes)
        window.seen.append((window.identity.lsn, part.entries))
        for key, names in part.parameters.items():
            window.captured[key] = window.captured.get(key, frozenset()) | names
        owned = window.plan.owned(part.entries, survey.tensors)
        looks = self._options.leaves_bases_fuzzy
        window.parts.add(owned, window.identity.step, looks=looks)
        window.at_mark = AtMark.of(survey, window.plan.prepared.marked)
        failpoint("window.after_part")

    def _finish(self, window: Window, identity: ShardIdentity, survey: Survey) -> None:
        """Captures what is left, at this very step mark: the base is of this step."""
        save = window.save
        prepared = window.plan.prepared
        window.identity = identity
        save.step = identity.step
        self._last = save
        begin = window.next + 1
        last = window.plan.last(begin)
        copies = window.plan.copies(last.entries, survey.tensors)
        self.stats.finishing(window.watch, identity.step, self._clock.monotonic_s())
        mark = Last(window, begin, survey, fuzzy=self._options.leaves_bases_fuzzy)

        def ended(_: object) -> None:
            mark.ended()
            if not save.is_lost:
                self._void = 0
            else:  # it is not what its step has, or could not be made whole, or not durable
                self._void += 1
                self._take_again("the last one has failed")

        save.durable.add_done_callback(ended)
        window.watch.state_bytes = prepared.size_bytes
        window.at_mark = AtMark.of(survey, prepared.marked)
        plan = prepared.plan(identity)
        tell = partial(mark.tell, self._choice.timed("part", last.size_bytes))
        self._window = None
        self._ended = window
        try:
            with failing_save(save, self._saver.post):  # the keeper is gone, or an interrupt
                self._saver.fill(prepared, plan, survey, save, window.room, copies, tell)
        finally:
            self._lane.run(mark.left)

    def _give_up(self, why: str, error: EverstepError | None = None) -> None:
        """The base under way is void; nothing of it is kept."""
        window = self._window
        self._window = None
        self._updates.forget()
        if window is None:
            if error is not None:
                self._channel.post(error)
            return
        self.stats.abandoned += 1
        self._void += 1
        self._take_again(why)
        ours = error or StateError(f"a base over several steps was given up: {why}")
        fail(window.save.staged, ours)
        fail(window.save.durable, ours)
        if error is not None and error is not self._updates.told:
            self._channel.post(error)
        else:
            _log.warning("%s", ours)

        self._parts.forget(window)

        def left() -> None:  # behind copies that were begun: until then they write there
            window.release_updates()
            window.pool.release(window.room)

        self._lane.run(left)

    def _take_again(self, why: str) -> None:
        """Another one is due, since one has become void."""
        self.again = why

    def _end_at(self, window: Window, identity: ShardIdentity) -> None:
        """No step will follow: ends the base at the last step mark, which is this one."""
        try:
            survey = self._state.survey()
            why = self._why_void(window, identity, survey)
            if why is None:
                self._finish(window, identity, survey)
            else:
                self._give_up(why, window.failed)
        except Exception as error:
            ours = as_everstep_error(error, identity.step)
            self._give_up(ours.message, ours)

    def _overtaken(self, window: Window, error: EverstepError) -> None:
        """A copy took too long, and an update goes on."""
        if window is self._window:
            self._give_up(error.message, error)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts what is not counted as anything else."""
        stall_s = self._saver.stall_s
        start_s = self._clock.monotonic_s()
        before_s = sum(stall_s.values())
        try:
            yield
        finally:
            counted_s = sum(stall_s.values()) - before_s
            stall_s["capture"] += max(0.0, self._clock.monotonic_s() - start_s - counted_s)

    def _why_void(self, window: Window, identity: ShardIdentity, survey: Survey) -> str | None:
        """Why the base under way cannot be brought to this step mark; None if it can."""
        if (why := window.why_void(identity, survey)) is not None:
            return why
        if not self._updates.consumption.grouped_as_before():
            return "parameters are in other groups than before"
        return None

    def _digest_of(self, shape: Shape) -> str:
        """Of what the state consists of, and how it is grouped now."""
        consumption = self._updates.consumption
        if self._digest[0] is not shape.entries or not consumption.grouped_as_before():
            self._digest = (shape.entries, state_digest(shape, consumption.regroup()))
        return self._digest[1]
