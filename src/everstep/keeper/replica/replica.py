"""The keeper's replica: a copy of the state to which each step of the log is applied, and from
which bases are persisted (LowDiff section VI; see ``docs/design/log.md``).

It begins with a base that the training process has captured, in memory of its own. One thread
applies whole steps (I3) as they arrive; while a base is being written from that memory, steps
wait in the log. Nothing here needs torch, which the thread imports when it begins.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from everstep.arena.memory import Arena
from everstep.errors import AuditError, DamageError, EverstepError, OutOfSpaceError, StateError
from everstep.format.plan import BasePlan
from everstep.format.records import TimelineRecord
from everstep.keeper.log.log_store import LoggedStep, LogStore
from everstep.keeper.persist.local_keeper import LocalKeeper
from everstep.link.capture import Capture, Incoming, shard_offsets
from everstep.link.samples import Samples, check_samples
from everstep.link.save import Save, complete
from everstep.seams.failpoints import failpoint
from everstep.seams.memory import copy_view
from everstep.seams.processes.conditions import Condition
from everstep.state.layout.shards import pieces

__all__ = ["Ask", "Replica", "ReplicaEvents", "ReplicaLimits"]

_AT_ONCE = 4
"""Steps that are applied in one go when there are more: the state is read once for all of them,
and whoever wants the replica waits no longer than that."""


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """What a replica may take.

    Attributes:
        size_bytes: of memory.
        threads: that apply.
    """

    size_bytes: int
    threads: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A base that the training process asks for.

    Attributes:
        number: names it between the two.
        step: that has just ended there.
        exact: of this very step; otherwise a later one will do.
        samples: of the state as it is there.
    """

    number: int
    step: int
    exact: bool
    samples: tuple[Samples, ...] = ()


class ReplicaEvents(Protocol):
    """Hears what becomes of a replica; in any thread."""

    def persisted(self, asks: Sequence[Ask], base: Capture) -> None:
        """A base has become durable, or has failed, and is what was asked for."""
        ...

    def refused(self, asks: Sequence[Ask], error: EverstepError) -> None:
        """There will be no such bases."""
        ...

    def stopped(self, error: EverstepError, *, for_good: bool) -> None:
        """It follows no more; until the next base, unless it is ``for_good``."""
        ...


@dataclass(slots=True)
class _Wanted:
    """Bases that were asked for, and the step at which the next one is due."""

    asks: list[Ask] = field(default_factory=list)
    target: int | None = None

    def take(self, step: int) -> list[Ask]:
        """Those that a base of ``step`` answers."""
        found = [ask for ask in self.asks if ask.step <= step]
        self.asks = [ask for ask in self.asks if ask.step > step]
        return found

    def aim(self, newest: int) -> None:
        """Of bases that any later step answers, one of the newest step answers all: what is due
        while one is written is taken behind it, and only once (CheckFreq's rule)."""
        exact = [ask.step for ask in self.asks if ask.exact]
        due = max(newest, self.asks[-1].step) if self.asks else None
        self.target = min(exact) if exact else due


class Replica:
    """Of one timeline, from its first base on.

    Args:
        log: of that timeline.
        keeper: writes its bases.
        read_record: reads the timeline's record.
        timeout_s: as for captures.

    Attributes:
        applied: number up to which records of the log are read no more.
    """

    def __init__(
        self,
        log: LogStore,
        keeper: LocalKeeper,
        read_record: Callable[[], TimelineRecord | None],
        limits: ReplicaLimits,
        events: ReplicaEvents,
        *,
        timeout_s: float,
    ) -> None:
        self._log = log
        self._keeper = keeper
        self._read_record = read_record
        self._limits = limits
        self._events = events
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._busy = False  # somebody works on the state
        self._callers = 0  # who wait for that to end
        self._stirred = False
        self._closed = self._off = self._finishing = False
        self._arena: Arena | None = None
        self._base: Capture | None = None  # that it began with
        self._state: Any = None  # a ReplicaState, made by the thread
        self._stalled = False  # the log does not go on from here
        self._is_behind = False  # a base that it needed has failed
        self._frozen: Capture | None = None  # of which somebody reads the memory
        self._objects: Mapping[str, bytes] = {}
        self._wanted = _Wanted()
        self._unchecked: list[Ask] = []
        self._durable_step = -1
        self.applied = 0
        log.listeners.append(self._stir)
        self._thread = threading.Thread(target=self._work, name="everstep-replica", daemon=True)
        self._thread.start()

    @property
    def step(self) -> int | None:
        """Of the state that it holds; None: it holds none."""
        state = self._state
        base = self._base
        if state is not None:
            return int(state.step)
        return None if base is None else base.step

    @property
    def arena(self) -> Arena | None:
        """Its memory; None before there is any, and where there will be none any more."""
        return self._arena

    def begin(self, base: Capture, arena: Arena) -> None:
        """Begins anew with a durable base, of which nothing changes until this returns; what goes
        wrong is told. In the writing thread."""
        with self._held():
            if self._off or self._closed:
                return
            if self._frozen is not None and self._frozen.step > base.step:
                self._is_behind = False  # the log has led it past that step
                return
            if self._frozen is not None:
                self._frozen.withdrawn = True  # an older one, not written yet
            self._forget()
            _, size_bytes = shard_offsets(base.plan)
            try:
                memory = self._memory(max(1, size_bytes))
            except EverstepError as error:
                self._stop(error, for_good=True)
                return
            source = arena.view[base.offset : base.offset + size_bytes]
            for part, copy in zip(pieces(source), pieces(memory[:size_bytes]), strict=True):
                copy_view(copy, part)
            self._base = base
            self._objects = dict(base.incoming.objects())
            self._durable_step = base.step
            self._unchecked = [ask for ask in self._unchecked if ask.step > base.step]
            with self._changed:
                answered = self._wanted.take(base.step)
                self._wanted.aim(0)
        self._events.persisted(answered, base)

    def ask(self, ask: Ask) -> None:
        """A base is due; its step has arrived."""
        with self._changed:
            refused = self._off or self._stalled or self._leads_nowhere(ask)
            if not refused:
                self._wanted.asks.append(ask)
                self._unchecked.append(ask)
                if self._frozen is None and self._wanted.target is None:
                    self._wanted.aim(0)
        if refused:
            self._events.refused([ask], StateError("no replica follows", step=ask.step))
        self._stir()

    def freeze(self) -> Capture | None:
        """The state as it is now, as a base in memory, which stays as it is until :meth:`thaw`;
        None if there is none. Steps that have arrived and are not in it are in the log."""
        with self._held():
            if self._frozen is not None or self._base is None:
                return self._frozen
            try:
                frozen = self._image()
            except EverstepError as error:
                self._stop(error, for_good=True)
                return None
            frozen.incoming.arrived(self._objects)
            if frozen.step == self._durable_step:
                complete(frozen.save.durable, frozen.plan.size_bytes)
            self._frozen = frozen
            return frozen

    def thaw(self) -> None:
        """Whoever wanted the state to stay as it was wants it no more."""
        with self._held():
            self._frozen = None

    def _leads_nowhere(self, ask: Ask) -> bool:
        """Whether there is nothing that a base could be made of, and nothing is coming: who closes
        takes no other base, and would wait for ever."""
        leads = self._base is not None and not self._is_behind
        captures = (c for c in self._keeper.waiting if c.arena is None and c.step < ask.step)
        ends = (capture.save.durable for capture in captures)
        return not leads and all(end.done() and end.exception() is not None for end in ends)

    def failed(self, base: Capture, error: EverstepError) -> None:
        """A base that the training process has captured for it is none: who has asked behind it
        would wait for the next one, and other ranks for theirs."""
        with self._changed:
            self._is_behind = True
            several = self._keeper.is_one_of_several  # of one, a base of a later step answers, too
            behind = [ask for ask in self._wanted.asks if ask.step > base.step]
            asks = [ask for ask in behind if several or self._leads_nowhere(ask)]
            gone = {ask.number for ask in asks}
            self._wanted.asks = [ask for ask in self._wanted.asks if ask.number not in gone]
            if self._frozen is None:
                self._wanted.aim(0)
        self._events.refused(asks, error)

    def forget_asks(self) -> None:
        """Nobody waits any more for what was asked for and is not being written. What is to be
        durable at the end is found anew: that may have begun before who asked was gone."""
        with self._changed:
            self._wanted = _Wanted()
            self._unchecked = []
            self._finishing = False

    def finish(self) -> bool:
        """Has the newest step that has arrived made durable where nobody is there to ask for it;
        whether that is still to be waited for."""
        with self._changed:
            step = self.step
            newest = self._log.steps
            if self._off or step is None:
                return False
            if self._frozen is not None:
                return True
            if not self._finishing:  # once; what fails then is in the log
                self._finishing = True
                goal = step if newest is None else max(step, newest[1])
                if goal > self._durable_step:
                    self._wanted = _Wanted(target=goal)
                    self._stir()
            elif self._wanted.target is not None and not self._is_under_way():
                # The log does not lead there: a hole, or another shape.
                self._wanted.target = step if step > self._durable_step else None
                self._stir()
            return self._wanted.target is not None

    def _is_under_way(self) -> bool:
        """Whether the thread has something to do, or is going to."""
        if self._busy or self._stirred or self._log.arriving:
            return True
        return self._state is not None and not self._stalled and bool(self._next())

    def close(self, *, timeout_s: float = 0.0) -> None:
        """Ends the thread, behind the steps under way; waits no longer than that for it."""
        if self._stir in self._log.listeners:
            self._log.listeners.remove(self._stir)
        self._closed = True
        self._stir()
        self._thread.join(timeout_s)

    # --- Whose turn it is -----------------------------------------------------------------

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Keeps the thread away from the state; it lets callers in between any two goes."""
        with self._changed:
            self._callers += 1
            self._changed.wait_for(lambda: not self._busy)
            self._callers -= 1
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._stirred = True
                self._changed.notify_all()

    def _stir(self) -> None:
        with self._changed:
            self._stirred = True
            self._changed.notify_all()

    def _wait(self) -> bool:
        """Until it is the thread's turn; False: it is to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (self._stirred and not self._busy and not self._callers)
            )
            if self._closed:
                return False
            self._stirred = False
            self._busy = True
        return True

    def _done(self, *, more: bool) -> None:
        with self._changed:
            self._busy = False
            self._stirred = self._stirred or more
            self._changed.notify_all()

    # --- The thread -----------------------------------------------------------------------

    def _work(self) -> None:
        loaded = False
        while self._wait():
            if self._base is not None and not loaded:
                # Takes seconds the first time. The state is left alone meanwhile: a newer base may
                # begin it anew, or whoever takes over may want it.
                self._done(more=True)
                _load()
                loaded = True
                continue
            more = False
            try:
                more = self._turn()
            except DamageError as error:  # what it holds is good
                self._stop(error, stalled=True)
            except AuditError as error:
                self._stop(error)
            except EverstepError as error:
                self._stop(error, for_good=True)
            except Exception as error:
                ours = EverstepError(f"internal error in the replica: {error!r}", step=self.step)
                self._stop(ours, for_good=True)
            finally:
                self._done(more=more)

    def _turn(self) -> bool:
        """One go; whether there may be more to do."""
        if self._base is None or self._frozen is not None or self._off or self._closed:
            return False
        if self._state is None:
            self._state = self._made(self._base)
        self._check()
        if self._due() and self._persist():
            return False
        steps = [] if self._stalled else self._next()
        if not steps:
            return False
        failpoint("replica.before_apply")
        self._state.advance(steps)
        failpoint("replica.after_apply")
        self.applied = steps[-1].first - 1  # the newest step is read once more
        return True

    def _made(self, base: Capture) -> Any:
        from everstep.keeper.replica.replica_state import ReplicaState

        assert self._arena is not None
        return ReplicaState(
            base.plan,
            self._arena.view,
            self._objects,
            self._read_record(),
            threads=self._limits.threads,
        )

    def _due(self) -> bool:
        target = self._wanted.target
        return target is not None and int(self._state.step) >= target

    def _next(self) -> list[LoggedStep]:
        """Steps to apply now: not past one at which a base is due, or samples were taken."""
        state = self._state
        steps = self._log.steps_behind(state.step, state.lsn, _AT_ONCE)
        with self._changed:  # behind the steps: whoever has asked came before them
            ends = [ask.step for ask in self._unchecked if ask.step > state.step]
            ends += [self._wanted.target] if self._wanted.target is not None else []
        found = []
        for step in steps:
            if step.mark.head.shape != state.shape:
                break  # a new base is on its way
            found.append(step)
            if step.mark.head.step in ends:
                break
        return found

    def _check(self) -> None:
        """Compares with samples of this very step, where replay gives the bits of training."""
        step = int(self._state.step)
        base = self._base
        arena = self._arena
        assert base is not None
        assert arena is not None
        with self._changed:
            asks = [ask for ask in self._unchecked if ask.step == step]
            self._unchecked = [ask for ask in self._unchecked if ask.step > step]
        if not self._state.why:
            for ask in asks:
                check_samples(ask.samples, base.plan, arena.view, step)

    def _persist(self) -> bool:
        """Has the state written as it is; steps wait until it is. False: nobody wants it now."""
        frozen = self._image()
        failpoint("replica.before_persist")
        with self._changed:  # at once: who takes over settles what has begun, and nothing else may
            if not self._due():
                return False
            self._wanted.target = None
            self._frozen = frozen
            self._keeper.begin(frozen)
        self._keeper.captured(frozen, self._objects)
        return True

    def _image(self) -> Capture:
        """A base of the state as it is, over its memory."""
        base = self._base
        assert base is not None
        identity = base.plan.identity
        if self._state is not None:
            identity, self._objects = self._state.settle()
        plan = BasePlan(identity, base.plan.shards, base.plan.kinds)
        _, size_bytes = shard_offsets(plan)
        return Capture(
            number=0,
            layout=base.layout,
            plan=plan,
            save=Save(identity.step, identity.timeline),
            offset=0,
            word=0,
            stream=False,
            incoming=Incoming(lambda: size_bytes, timeout_s=self._timeout_s),
            on_end=self._on_end,
            arena=self._arena,
        )

    def _on_end(self, base: Capture) -> None:
        """In the writing thread: a base of ours is durable or has failed."""
        newest = self._log.steps
        with self._changed:
            answered = self._wanted.take(base.step)
            if base.durable:
                self._durable_step = max(self._durable_step, base.step)
            if self._frozen is base:
                self._frozen = None
                self._wanted.aim(0 if newest is None else newest[1])
        self._events.persisted(answered, base)
        self._stir()

    # --- Its end --------------------------------------------------------------------------

    def _memory(self, size_bytes: int) -> memoryview:
        """Of the block; no more than there may be."""
        if self._arena is not None and self._arena.size_bytes >= size_bytes:
            return self._arena.view
        if size_bytes > self._limits.size_bytes:
            raise OutOfSpaceError(
                f"a replica of the state takes {size_bytes} bytes of host memory; the budget "
                f"leaves {self._limits.size_bytes}",
                hint="a larger Budget(host_bytes=...), or apply='recovery'",
            )
        self._arena = Arena.create(size_bytes)
        self._arena.populate(0, size_bytes)
        return self._arena.view

    def _forget(self) -> None:
        self._base = self._state = self._frozen = None
        self._stalled = self._is_behind = False

    def _stop(self, error: EverstepError, *, for_good: bool = False, stalled: bool = False) -> None:
        """It does not follow any more.

        Args:
            stalled: what it holds is good all the same.
        """
        with self._changed:
            asks = self._wanted.asks
            self._wanted = _Wanted()
            self._unchecked = []
            self._off = self._off or for_good
            if stalled:
                self._stalled = True
            else:
                self._forget()
            if for_good:
                self._arena = None
        self._events.stopped(error, for_good=for_good)
        self._events.refused(asks, error)


def _load() -> None:
    """Load torch, and what needs it."""
    import everstep.keeper.replica.replica_state  # noqa: F401
