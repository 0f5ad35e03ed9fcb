"""The keeper's replica, seen from the training process: asked for bases instead of taking them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from everstep.capture.audit import SpotCheck
from everstep.errors import EverstepError, StateError
from everstep.format.header import ShardIdentity
from everstep.link.channel import BackgroundChannel
from everstep.link.samples import Samples
from everstep.link.save import Save, done
from everstep.seams import Clock
from everstep.seams.processes.conditions import all_over, is_over
from everstep.state.survey.survey import Survey
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base.prepared import Prepared
from everstep.trainer.base.saver import Saver

__all__ = [
    "ReplicaBases",
]


class ReplicaBases:
    """Knows whether the keeper has, or soon will have, a replica of the state.

    It does from the moment at which a base has been taken for it; where the replica stops, the
    keeper says so, and the next base is taken here again.

    Args:
        several: other ranks have their parts of each base: it is of that very step, wherever each
            rank's part comes from, and the log stays until one is durable on all of them.
        timeout_s: so long training waits for a base that comes too late.
    """

    def __init__(
        self,
        saver: Saver,
        channel: BackgroundChannel,
        clock: Clock,
        *,
        several: bool,
        timeout_s: float,
    ) -> None:
        self._saver = saver
        self._channel = channel
        self._clock = clock
        self._several = several
        self._timeout_s = timeout_s
        self._keeper: RemoteKeeper | None = None
        self._expected = False
        self._off = False
        self._last: Save | None = None  # that was asked for
        self._taken: Save | None = None  # that was captured here
        self._exact: list[Save] = []  # asked for, of no later step
        self._prepared: Prepared | None = None
        self._live: tuple[torch.Tensor, ...] = ()
        self._check: SpotCheck | None = None
        self.lost: str | None = None
        """Why the replica has stopped, until the next base: one is due."""

    @property
    def follows(self) -> bool:
        """Whether bases are asked for, and not taken."""
        return self._expected and not self._off

    def gives(self, *, exact: bool) -> bool:
        """Return whether the base that is due is asked for.

        Until the replica of a new keeper has applied its first step, which takes the keeper as long
        as loading torch, it answers nothing. A base that is due while another one is waited for is
        taken here then, one at a time: what is lost with the keeper stays bounded in steps.

        Args:
            exact: the user wants one of this very step; those are asked for in any case.
        """
        if not self.follows or exact or self._several:
            return self.follows
        keeper = self._keeper
        last = self._last
        taken = self._taken
        started = keeper is not None and keeper.replica_applied > 0
        waits = last is not None and not last.durable.done()
        busy = taken is not None and not taken.durable.done()
        return started or busy or not waits

    @property
    def step(self) -> int | None:
        """Of the state that the replica had, as the keeper last said."""
        keeper = self._keeper
        return None if keeper is None or self._off else keeper.replica_step

    def start(self, keeper: object) -> None:
        """A keeper has come into service, or a new timeline: no replica yet."""
        self._keeper = keeper if isinstance(keeper, RemoteKeeper) else None
        self._expected = False
        self._off = False
        self._last = None
        self.lost = None
        self._taken = None
        if self._keeper is not None:
            self._keeper.on_replica_stopped = self._stopped

    def base_taken(self, save: Save) -> None:
        """A base was taken here; the replica begins with it when it is durable."""
        self._expected = True
        self.lost = None
        self._taken = save

        def ended(_: object) -> None:
            if _failed(save):
                self._expected = False

        save.durable.add_done_callback(ended)

    def ask(self, identity: ShardIdentity, survey: Survey, *, exact: bool) -> Save:
        """Asks for a base of the step that has just ended.

        Args:
            exact: of no later step.
        """
        keeper = self._keeper
        last = self._last
        exact = exact or self._several
        assert keeper is not None
        if self._taken is not None and _is_of(self._taken, identity):
            return self._taken  # which the replica is only about to begin with
        if last is not None and _is_of(last, identity) and (last in self._exact or not exact):
            return last
        if self._several:
            self._hold_up()
        save = Save(identity.step, identity.timeline)
        save.durable.add_done_callback(self._ended)
        done(save.staged, None)  # the keeper has all of it
        samples = self._samples(self._saver.asked(survey, identity), survey)
        keeper.ask(save, samples, exact=exact)
        self._last = save  # only now: who is interrupted before has asked for none
        if exact:
            self._exact = [one for one in self._exact if not one.durable.done()] + [save]
        return save

    def settle(self, timeout_s: float) -> None:
        """Waits for bases of no later step that were asked for: a base of the training process's
        own takes the place of the replica that they are to be made of."""
        all_over([save.durable for save in self._exact], timeout_s)

    def has_failed(self) -> bool:
        """Whether the newest base that was asked for is none: nothing was there that it could be
        made of, say. Then the next one is taken here, and this is not said again. (Of several
        ranks, all would have to take it.)"""
        last = self._last
        if self._several or last is None or not _failed(last):
            return False
        self._expected = False
        self._last = None
        return True

    def relieved_to(self) -> int | None:
        """Number up to which records have gone into the replica; None: none follows, or other
        ranks may have to go back to before what it has."""
        keeper = None if self._several else self._keeper
        there = keeper is not None and keeper.lost is None and self.follows
        return keeper.replica_applied if keeper is not None and there else None

    def overrun(self) -> None:
        """The memory for steps that the replica has still to apply is full: without it, the log
        is kept for recovery only."""
        keeper = self._keeper
        if keeper is None or not self.follows or keeper.replica_step is None:
            return
        self._off = True
        keeper.drop_replica()
        self._channel.post(
            EverstepError(
                "the replica does not keep up with training: the steps that it has still to apply "
                "fill the memory of the log; from now on the log is applied at recovery only",
                step=keeper.replica_step,
                hint="more memory (Budget.host_bytes), more cores (KeeperOptions.cores), a faster "
                "disk, or apply='recovery'",
            )
        )

    def _ended(self, durable: Future[int]) -> None:
        """A base that was asked for has ended. What has no replica to be made of is no failure of
        writing: one of several ranks takes the next base here."""
        if self._several and isinstance(durable.exception(), StateError):
            self._expected = False

    def _hold_up(self) -> None:
        """Waits until no more than one of the bases that were asked for is not over: the log stays
        as long."""
        waiting = [save.durable for save in self._exact if not save.durable.done()]
        if len(waiting) > 1:
            start_s = self._clock.monotonic_s()
            is_over(waiting[-2], self._timeout_s)
            self._saver.stall_s["back_pressure"] += self._clock.monotonic_s() - start_s

    def _stopped(self, why: str, for_good: bool) -> None:
        """In the thread that reads what the keeper says."""
        self._off = self._off or for_good
        self._expected = False
        self.lost = why

    def _samples(self, prepared: Prepared, survey: Survey) -> Sequence[Samples]:
        """Of what the marks of the log do not hold, as it is now; on the CPU, where the replica
        has the same bits. Of rows only: it keeps other tensors as they lie in memory here."""
        kinds = prepared.kinds.items()
        tensors = survey.tensors
        names = [name for name, kind in kinds if kind in ("replayed", "static")]
        names = [n for n in names if tensors[n].is_cpu and tensors[n].is_contiguous()]
        live = tuple(survey.tensors[name] for name in names)
        same = len(live) == len(self._live) and all(map(operator.is_, live, self._live))
        if self._check is None or prepared is not self._prepared or not same:
            layouts = [
                (shard.layout, offset)
                for shard, offset in zip(prepared.shards, prepared.offsets, strict=True)
            ]
            self._prepared = prepared
            self._live = live
            self._check = SpotCheck(layouts, survey.tensors, frozenset(names))
        packed = self._check.packed(self._check.take())
        return [Samples(width, where, values) for width, where, values in packed]


def _is_of(save: Save, identity: ShardIdentity) -> bool:
    """Whether it is a base of that very step, and has not failed."""
    same = (save.timeline, save.step) == (identity.timeline, identity.step)
    return same and not _failed(save)


def _failed(save: Save) -> bool:
    future = save.durable
    return future.done() and (future.cancelled() or future.exception() is not None)
