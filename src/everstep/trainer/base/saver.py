"""Takes bases: captures the state in the training thread and hands it to the keeper."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath

import torch

from everstep.capture.base import LiveBody
from everstep.capture.graphs import refuse_graph_capture
from everstep.capture.lanes.lane import Lane
from everstep.config.options import Options
from everstep.errors import (
    AuditError,
    DeadlineError,
    EverstepError,
    KeeperError,
    OutOfSpaceError,
)
from everstep.format.header import ShardIdentity
from everstep.format.plan import BasePlan
from everstep.keeper.persist.local_keeper import LocalKeeper
from everstep.link.capture import Capture, Incoming
from everstep.link.channel import BackgroundChannel
from everstep.link.pool import Block, CapturePool
from everstep.link.save import (
    Save,
    as_everstep_error,
    changed_during_copy_error,
    complete,
    fail,
    failing_save,
)
from everstep.seams import Clock
from everstep.seams.failpoints import failpoint
from everstep.seams.processes.conditions import is_over
from everstep.state.survey.survey import Survey
from everstep.state.training_state import State
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base.flight import Flight
from everstep.trainer.base.prepared import Copies, Prepared, prepare
from everstep.trainer.budget.disk import check_disk_budget
from everstep.trainer.budget.host_memory import bases_in_flight_max

__all__ = ["Saver", "Tell"]

Tell = Callable[[Capture, Mapping[str, bytes]], None]
"""Tells the keeper that all of a capture has arrived, with its objects; in the lane's thread."""


class Saver:
    """Takes bases, of whichever timeline is being written.

    Attributes:
        saves: bases asked for.
        stall_s: seconds the training thread was held up, by cause.
        last_save_s: when the last one was asked for, on the monotonic clock.
        also_gate: called at the gate, likewise, where something else copies the state, too.
        finish_first: called when no copy is to be left under way.
        make_good: called when all bases have ended: whether one that was lost is taken again.
        on_torn: told, in any thread, that a base is worth nothing because something has written to
            the state while it was copied; whether whoever hears it sees to all else.
    """

    copies_in_flight = 2

    def __init__(
        self,
        options: Options,
        run: PurePath,
        state: State,
        lane: Lane,
        channel: BackgroundChannel,
        clock: Clock,
    ) -> None:
        self._options = options
        self._run = run
        self._state = state
        self._lane = lane
        self._channel = channel
        self._clock = clock
        self._keeper: Keeper | None = None
        self._pool: CapturePool | None = None
        self._last: Save | None = None
        self._warm = self._at_once = self.restored_from_memory = False
        self._prepared: Prepared | None = None
        self._layouts = self._captures = 0
        self._flights: list[Flight] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._gates = options.method.base in ("lazy", "checkfreq", "multistep", "scheduled")
        self._streams = options.method.base in ("lazy", "multistep")
        self.also_gate: Callable[[str | None], None] | None = None
        self.finish_first: Callable[[], None] = lambda: None
        self.make_good: Callable[[], bool] = lambda: False
        self.on_torn: Callable[[AuditError], bool] = lambda error: False
        self.saves = 0
        causes = "capture", "gate", "back_pressure", "persist", "keeper"
        self.stall_s = dict.fromkeys(causes, 0.0)
        if options.is_multistep:
            self.stall_s["gradients"] = 0.0
        self.last_save_s = clock.monotonic_s()

    def start(self, keeper: Keeper, pool: CapturePool | None) -> None:
        """From now on bases go to ``keeper``, through the memory of ``pool``."""
        self._keeper = self._last = None  # of an interrupt, too: never a keeper with another's pool
        if pool is not self._pool:
            self._prepared = None  # the keeper of this pool knows no layout yet
            self._warm = False
            before = self._pool
            self._pool = pool
            if before is not None:  # its memory; behind copies into it that nobody needs now
                self._lane.leave()  # or pinned memory would stay until that of this one is taken
                self._lane.run(lambda: before.close(later=True))
        self._keeper = keeper

    def warm(self, survey: Survey | None = None) -> None:
        """Once, behind the first step, when the optimizer's state (surveyed, if it was) is there:
        takes the memory for the first captures, so that these do not have to."""
        if self._warm or self._pool is None:
            return
        self._warm = True
        pool = self._pool
        survey = survey or self._state.survey()
        size_bytes = pool.rounded_bytes(sum(entry.size_bytes for entry in survey.shape.entries))
        size_bytes *= self.copies_in_flight
        beside_bytes = self.copies_in_flight * sum(survey.shape.objects_bytes.values())
        size_bytes = min(size_bytes, max(0, pool.arena.size_bytes - beside_bytes))
        self._lane.warm(survey.tensors.values(), pool.whole[:size_bytes], pool.warm)

    @property
    def last_is_in_memory(self) -> bool:
        """Whether the last base is on no disk, and is not going there; that which was restored, if
        there has been none since."""
        return self.restored_from_memory if self._last is None else self._last.in_memory

    def take(
        self,
        identity: ShardIdentity,
        *,
        show: bool,
        survey: Survey | None = None,
        in_memory: bool = False,
    ) -> Save:
        """Takes a base of the state as it is now; the same step's base if there is one.

        Args:
            show: show the progress of a ``sync`` save.
            survey: of the state as it is now, if there is one already.
            in_memory: it is to live in the memory of keepers only.

        Raises:
            EverstepError: what failed, now or in the background, by the policy.
        """
        last = self._last
        base = (identity.timeline, identity.step)
        there = last is not None and (last.timeline, last.step) == base
        if last is not None and there and (in_memory or not last.in_memory) and not last.is_lost:
            return last
        save = Save(identity.step, identity.timeline, in_memory=in_memory)
        self.saves += 1
        self.last_save_s = self._clock.monotonic_s()
        with failing_save(save, self.post):
            self._take(identity, save, survey, show=show)
        self._last = save
        keeper = self._keeper
        if save.is_lost and isinstance(keeper, RemoteKeeper) and keeper.lost is not None:
            keeper.lost_steps.add(save.step)  # other ranks have their parts of it
        self._channel.check()
        return save

    @contextlib.contextmanager
    def stalled(self, cause: str) -> Iterator[None]:
        """Counts the time inside as time that training was held up."""
        start_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            self.stall_s[cause] += self._clock.monotonic_s() - start_s

    def post(self, error: EverstepError) -> None:
        """Reports what failed while a base was taken. Not that its keeper is gone: training goes
        on, and whoever puts another in its place tells of it, with or without a base under way."""
        if not self.is_loss(error):
            self._channel.post(error)

    def is_loss(self, error: EverstepError) -> bool:
        """Whether ``error`` is that the keeper is gone, and nothing else."""
        keeper = self._keeper
        gone = isinstance(keeper, RemoteKeeper) and error is keeper.lost
        return gone and isinstance(error, KeeperError)

    def asked(self, survey: Survey, identity: ShardIdentity) -> Prepared:
        """A base is not taken here, but asked for; returns what a base of this state is like."""
        self.saves += 1
        self.last_save_s = self._clock.monotonic_s()
        return self.prepare(survey, identity)

    def gate(self, optimizer: str | None) -> None:
        """Holds an update back until what it is going to change has been copied (I1).

        Args:
            optimizer: key of the optimizer that updates; None: anything may be updated.

        Raises:
            StateError: the update is being captured into a CUDA graph.
        """
        refuse_graph_capture()
        also = self.also_gate
        if (also is None and not self._flights) or os.getpid() != self._pid:
            return  # nothing is copied; in a forked child nobody copies
        if also is not None:
            also(optimizer)
        if not self._flights:
            return
        start_s = self._clock.monotonic_s()
        timeout_s = self._options.progress_timeout_s
        for flight in list(self._flights):
            # What it has got since from another one may be copied with that one's.
            known = flight.prepared is self._prepared and self._state.has_known_parameters(
                optimizer
            )
            key = optimizer if known else None
            end = flight.prepared.size_bytes if key is None else flight.copies.ends.get(key, 0)
            assert flight.transfer is not None
            self._look(flight, passes=flight.prepared.owned_by(key))
            if not flight.transfer.gate(end, timeout_s):
                # Training goes on; the copy that it overtakes is worth nothing.
                late = f"copying the state took longer than {timeout_s:g} s"
                self._lose(flight, DeadlineError(late, step=flight.capture.step))
        self.stall_s["gate"] += self._clock.monotonic_s() - start_s

    def copy_at_once(self) -> None:
        """From now on nothing is copied behind the step mark: something writes to the state that
        asks no gate (I1)."""
        self._at_once = True

    def finish_captures(self) -> None:
        """Waits until no copy is under way.

        Raises:
            DeadlineError: one hangs.
        """
        if not self._gates:
            return
        self.finish_first()
        self.gate(None)
        timeout_s = self._options.progress_timeout_s
        if not is_over(self._lane.run(lambda: None), timeout_s):
            raise DeadlineError(f"copying the state has hung for {timeout_s:g} s")

    def _take(
        self, identity: ShardIdentity, save: Save, survey: Survey | None, *, show: bool
    ) -> None:
        start_s = self._clock.monotonic_s()
        behind_mark = survey is None and self._options.logs
        survey = survey or self._state.survey()
        exact = identity.exact and self._state.exact  # seen now
        why = self._state.why_inexact
        identity = replace(identity, exact=exact, inexact=why)
        prepared = self.prepare(survey, identity)
        plan = prepared.plan(identity, behind_mark=behind_mark)
        if self._options.budget.disk_bytes is not None:
            check_disk_budget(self._options, self._run, plan.size_bytes)
        self._last = None  # an interrupted one is not what the next may be answered with
        if self._options.method.base == "sync":
            self._persist_now(plan, survey, save, show=show)
            return
        self.stall_s["capture"] += self._clock.monotonic_s() - start_s
        self._capture(prepared, plan, survey, save)

    def prepare(self, survey: Survey, identity: ShardIdentity) -> Prepared:
        """What a base of this state is like."""
        if self._prepared is None or self._prepared.shape is not survey.shape:
            self._layouts += 1
            self._prepared = prepare(
                survey,
                identity,
                number=self._layouts,
                gates=self._gates,
                # Bases over several steps copy and rebuild entries in an order of their own.
                static_apart=not self._options.is_multistep,
            )
        return self._prepared

    def _persist_now(self, plan: BasePlan, survey: Survey, save: Save, *, show: bool) -> None:
        start_s = self._clock.monotonic_s()
        try:
            keeper = self._keeper
            assert isinstance(keeper, LocalKeeper)
            objects = survey.objects()
            objects_in = plan.objects_in
            bodies = [
                LiveBody(
                    shard.layout,
                    survey.tensors,
                    objects if shard is objects_in else {},
                    self._lane,
                )
                for shard in plan.shards
            ]
            keeper.persist(plan, bodies, save, show=show)
            save.staged.set_result(None)
        finally:
            self.stall_s["persist"] += self._clock.monotonic_s() - start_s

    def _capture(self, prepared: Prepared, plan: BasePlan, survey: Survey, save: Save) -> None:
        """Begins to copy the state into the arena; what may change at once, is copied now."""
        room = self.acquire(prepared, survey)
        self.fill(prepared, plan, survey, save, room, prepared.copies(survey.tensors))

    def acquire(self, prepared: Prepared, survey: Survey) -> Block:
        """A block of the arena for a base of a state; training waits for it, and for what its plain
        data will take, as far as is known: if there is none, that is looked at again.

        Raises:
            OutOfSpaceError, DeadlineError: there is none.
        """
        assert self._keeper is not None
        assert self._pool is not None
        start_s = self._clock.monotonic_s()
        timeout_s = self._options.progress_timeout_s
        if self._options.method.base == "checkfreq":
            self._keeper.wait(None, show=False)  # one at a time: its second phase must be over
        size_bytes = prepared.size_bytes
        beside_bytes = prepared.objects_bytes
        try:
            room = self._pool.acquire(
                size_bytes,
                timeout_s=timeout_s,
                beside_bytes=beside_bytes,
                in_flight_max=bases_in_flight_max(self._options, size_bytes + beside_bytes),
            )
        except (OutOfSpaceError, DeadlineError):
            self._lane.run(survey.measure)
            raise
        self.stall_s["back_pressure"] += self._clock.monotonic_s() - start_s
        return room

    def fill(
        self,
        prepared: Prepared,
        plan: BasePlan,
        survey: Survey,
        save: Save,
        room: Block,
        copies: Copies,
        tell: Tell | None = None,
    ) -> None:
        """Copies what may change at once, and begins to copy the rest.

        Args:
            room: where all of it goes.
            copies: of what may be copied behind the step mark and is not there yet.
            tell: tells the keeper that all is there; None: that it is a whole base.
        """
        keeper = self._keeper
        pool = self._pool
        assert keeper is not None
        assert pool is not None
        timeout_s = self._options.progress_timeout_s
        begun_s = self._clock.monotonic_s()
        arena = pool.arena
        word = room.word
        self._captures += 1
        capture = Capture(
            number=self._captures,
            plan=plan,
            layout=prepared.number,
            save=save,
            offset=room.offset,
            word=word,
            stream=self._streams and tell is None,
            incoming=Incoming(lambda: arena.progress(word), timeout_s=timeout_s),
            on_end=lambda ended: self._let_go(ended, room, keeper, pool),
        )
        block = pool.block(room)
        flight = Flight(capture, keeper, pool, prepared, room, survey, copies, tell)
        try:
            if copies.versions is not None:  # first: the survey has just been there
                flight.versions, flight.seen = copies.versions, copies.versions.now()
            keeper.begin(capture)
            failpoint("capture.before_mark")
            self._lane.mark(prepared.marked_batches(survey.tensors), block)
            if copies.check is not None:
                flight.sample = copies.check.take()
            self._lane.run(lambda: self._announce(flight))
            flight.transfer = self._lane.submit(
                copies.batches, block, lambda end: arena.set_progress(word, end)
            )
            self._flights.append(flight)
            if self._at_once:
                self.gate(None)
            if self._gates:
                self._lane.run(lambda: self._finish(flight, block))
            else:  # everything was copied at the mark
                self._finish(flight, block)
        except BaseException as error:
            if not capture.begun:
                pool.release(room)
                raise
            self._lose(flight, error)
            # Behind copies that were begun: until then they write into its memory.
            self._lane.run(lambda: self._leave(flight))
            if not isinstance(error, Exception):
                raise
        self.stall_s["capture"] += self._clock.monotonic_s() - begun_s

    def _announce(self, flight: Flight) -> None:
        """In the lane's thread, before any progress: the keeper is told what is coming."""
        try:
            flight.keeper.announce(flight.capture)
        except BaseException as error:
            self._lose(flight, error)
            if not isinstance(error, Exception):
                raise

    def _finish(self, flight: Flight, block: torch.Tensor) -> None:
        """Behind the copies, in the lane's thread: the objects, and the word that all is there."""
        capture = flight.capture
        mine = told = False
        try:
            assert flight.transfer is not None
            if not flight.transfer.wait(self._options.progress_timeout_s):
                raise DeadlineError("copying the state hangs", step=capture.step)
            failpoint("capture.before_captured")
            objects = flight.objects()
            check = flight.copies.check
            if check is not None and flight.sample is not None:
                torn = self._look(flight) or check.differing(flight.sample, block)
                if torn is not None:
                    raise changed_during_copy_error(torn, capture.step)
            mine = self._decide(flight)
            if not mine:
                return  # lost at the gate meanwhile
            (flight.tell or flight.keeper.captured)(capture, objects)
            told = True
            if flight.tell is None:
                flight.pool.drop_kept()  # this one is newer, and survives as they did
            failpoint("capture.after_captured")
            complete(capture.save.staged, None)
        except BaseException as error:
            flight.decided = flight.decided and (told or not mine)
            self._lose(flight, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._leave(flight)

    def _look(self, flight: Flight, passes: frozenset[str] = frozenset()) -> str | None:
        """When all is copied, or entries (``passes``, by name) are about to be updated: the name of
        one that was written to until then, and not by an update that was let at it before."""
        with self._lock:
            if not flight.looked and flight.versions is not None and flight.written is None:
                flight.written = flight.versions.moved(flight.seen, flight.passed)
            flight.passed |= passes
            flight.looked = len(flight.passed) == len(flight.prepared.gated)
        return flight.written

    def _lose(self, flight: Flight, error: BaseException) -> None:
        """A capture that failed, or that the user has interrupted: nothing of it may become
        durable, unless the keeper has been told that it is whole."""
        if not self._decide(flight):
            return
        save = flight.capture.save
        if isinstance(error, Exception):
            ours = as_everstep_error(error, save.step)
            seen_to = isinstance(ours, AuditError) and self.on_torn(ours)
            flight.keeper.abandon(flight.capture, None if seen_to else ours)
            fail(save.staged, ours)
            fail(save.durable, ours)
        else:
            flight.keeper.abandon(flight.capture, None)
            save.staged.cancel()
            save.durable.cancel()
        self._retire(flight)

    def _decide(self, flight: Flight) -> bool:
        """Whether the caller is the first to say what becomes of a capture."""
        with self._lock:
            first = not flight.decided
            flight.decided = True
        return first

    def _retire(self, flight: Flight) -> None:
        with contextlib.suppress(ValueError):
            self._flights.remove(flight)

    def _leave(self, flight: Flight) -> None:
        """Nothing writes into the memory of a capture any more."""
        with self._lock:
            first = not flight.left
            flight.left = True
        if first:
            self._retire(flight)
            self._let_go(flight.capture, flight.room, flight.keeper, flight.pool)

    def _let_go(self, capture: Capture, room: Block, keeper: Keeper, pool: CapturePool) -> None:
        """Called twice for each capture: nothing writes into its memory any more, and nothing
        reads it any more."""
        with self._lock:
            capture.users -= 1
            if capture.users:
                return
        if isinstance(keeper, RemoteKeeper):
            if capture.durable:
                pool.keep(room, lambda: keeper.forget(capture))
                return
            # Whoever takes the block next writes into it before the keeper hears of that.
            keeper.forget(capture)
        pool.release(room)
