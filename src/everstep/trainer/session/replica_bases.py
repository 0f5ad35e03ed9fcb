"""Requests bases from the keeper's replica instead of capturing them (``apply="replica"``).

The keeper applies each step of the log to its own copy of the state. When a base is due, training
requests it from the keeper, and sends samples of its own state for comparison. Where there is no
replica, or it has stopped, the training process captures the base itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from everstep.capture.spot_check import SpotCheck
from everstep.errors import EverstepError, StateError
from everstep.format import ShardIdentity
from everstep.link import Save, complete
from everstep.link.assembly import Samples
from everstep.seams.processes import wait_all, wait_done
from everstep.state.survey import Survey, same_objects
from everstep.trainer.attach.keeper import Service
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base import PreparedBase, Saver
from everstep.trainer.participant import BaseRequest, Participant, TrainingContext


class ReplicaBases(Participant):
    """Track whether the keeper has a replica, and request bases from it.

    The keeper has a replica once a base was taken for it. When the replica stops, the keeper
    reports it, and the next base is captured by the training process again.

    With several ranks each base is of exactly the step where it is requested, as every rank has a
    share of it, and the log stays until a base is durable on all ranks.

    Attributes:
        lost: reason why the replica has stopped, until the next base is taken; else None.
        taken: newest capture by this process; None before the first.
        expected: True if the keeper has a replica, or makes one of the newest capture.
    """

    def __init__(self, context: TrainingContext, saver: Saver) -> None:
        self._context = context
        self._saver = saver
        self._several = context.state.ranks.world > 1
        # Maximum time that training waits for an overdue base.
        self._timeout_s = context.options.progress_timeout_s
        self._keeper: RemoteKeeper | None = None
        self.expected = False
        self._off = False
        self._last: Save | None = None  # the newest request
        self.taken: Save | None = None
        self._exact: list[Save] = []  # requests that no later step may serve
        self._prepared: PreparedBase | None = None
        self._live: tuple[torch.Tensor, ...] = ()
        self._check: SpotCheck | None = None
        self.lost: str | None = None

    @property
    def follows(self) -> bool:
        """True if bases are requested from the replica."""
        return self.expected and not self._off

    def can_serve(self, *, exact: bool) -> bool:
        """Return True if the base that is due is to be requested from the replica.

        The replica of a new keeper responds only after it has applied its first step, which takes
        as long as loading torch. If another request is still pending by then, the training process
        captures the base, one at a time. This limits the number of steps that would be lost with
        the keeper.

        Args:
            exact: True if the base must be of this very step, as for ``save()``. Such a base is
                always requested.
        """
        if not self.follows or exact or self._several:
            return self.follows
        keeper = self._keeper
        last = self._last
        taken = self.taken
        started = keeper is not None and keeper.replica_applied > 0
        waits = last is not None and not last.durable.done()
        busy = taken is not None and not taken.durable.done()
        return started or busy or not waits

    def start(self, service: Service) -> None:
        """Begin with a new keeper or timeline, which has no replica yet."""
        self._keeper = service.process
        self.expected = False
        self._off = False
        self._last = None
        self.lost = None
        self.taken = None

    @property
    def needs_base(self) -> bool:
        """True if the replica has stopped, and no base was taken since."""
        return self.lost is not None

    def take(self, request: BaseRequest) -> Save:
        """Request a base from the replica, or capture it where the replica cannot serve it."""
        identity = request.identity
        if not request.captured and self.can_serve(exact=request.show):
            survey = request.survey or self._context.state.survey()
            return self.request(identity, survey, exact=request.show)
        # The new base replaces the replica that pending requests are to be served from.
        self.settle(self._timeout_s)
        save = self._saver.take(request)
        self._captured(save)
        return save

    def _captured(self, save: Save) -> None:
        """Note a base captured by this process. The replica begins with it once it is durable."""
        self.expected = True
        self.lost = None
        self.taken = save

        def ended(_: object) -> None:
            if save.is_lost:
                self.expected = False

        save.durable.add_done_callback(ended)

    def request(self, identity: ShardIdentity, survey: Survey, *, exact: bool) -> Save:
        """Request a base of the step that has just ended.

        Args:
            exact: True if no later step may serve the request.

        Returns:
            The pending base. A request for the same step is not repeated.
        """
        keeper = self._keeper
        last = self._last
        exact = exact or self._several
        assert keeper is not None
        taken = self.taken
        if taken is not None and taken.is_of(identity) and not taken.is_lost:
            return taken  # the replica begins with this very base
        serves = last is not None and last.is_of(identity) and not last.is_lost
        if last is not None and serves and (last in self._exact or not exact):
            return last
        if self._several:
            self._limit_pending()
        save = Save(identity.step, identity.timeline)
        save.durable.add_done_callback(self._ended)
        complete(save.staged, None)  # the keeper already has all data
        samples = self._samples(self._saver.request_base(survey, identity), survey)
        keeper.ask(save, samples, exact=exact)
        # Only now: an interrupt before this line leaves no request.
        self._last = save
        if exact:
            self._exact = [one for one in self._exact if not one.durable.done()] + [save]
        return save

    def settle(self, timeout_s: float) -> None:
        """Wait until all exact requests have ended.

        Call it before a base is captured by this process: the new base replaces the replica that
        the pending requests are to be served from.
        """
        wait_all([save.durable for save in self._exact], timeout_s)

    def forget_failed_base(self) -> bool:
        """Return True, once, if the newest request has failed; the next base is then captured.

        Always False with several ranks, as all of them would have to capture it.
        """
        last = self._last
        if self._several or last is None or not last.is_lost:
            return False
        self.expected = False
        self._last = None
        return True

    def relieved_to(self) -> int | None:
        """Return the number of the last record that the replica has applied.

        None if there is no replica, or if other ranks may have to return to an earlier step.
        """
        keeper = None if self._several else self._keeper
        there = keeper is not None and keeper.lost is None and self.follows
        return keeper.replica_applied if keeper is not None and there else None

    def overrun(self) -> None:
        """Give up the replica, because records that it has not applied yet fill the log's memory.

        Without it, the log is kept for recovery only.
        """
        keeper = self._keeper
        if keeper is None or not self.follows or keeper.replica_step is None:
            return
        # Before the keeper drops it: from now on no base may be requested from the replica.
        self._off = True
        keeper.drop_replica()
        self._context.channel.post(
            EverstepError(
                "the replica does not keep up with training: the steps that it has not applied yet "
                "fill the memory of the log; from now on the log is applied only at recovery",
                step=keeper.replica_step,
                hint="more memory (Budget.host_bytes), more cores (KeeperOptions.cores), a faster "
                "disk, or apply='recovery'",
            )
        )

    def _ended(self, durable: Future[int]) -> None:
        """Handle the end of a request.

        A StateError means that there was no replica to make the base from, not that a write has
        failed. With several ranks, the next base is then captured.
        """
        if self._several and isinstance(durable.exception(), StateError):
            self.expected = False

    def _limit_pending(self) -> None:
        """Wait until at most one earlier request is pending, as the log stays until then."""
        waiting = [save.durable for save in self._exact if not save.durable.done()]
        if len(waiting) > 1:
            with self._saver.stalled("back_pressure"):
                wait_done(waiting[-2], self._timeout_s)

    def replica_stopped(self, why: str, for_good: bool) -> None:
        """Note that the replica has stopped. Called in the thread that reads messages."""
        self._off = self._off or for_good
        self.expected = False
        self.lost = why

    def _samples(self, prepared: PreparedBase, survey: Survey) -> Sequence[Samples]:
        """Return samples of the entries that step marks do not contain.

        Only of tensors on the CPU, where the replica has the same bits, and only of contiguous
        ones: the keeper stores others in their memory order.
        """
        kinds = prepared.kinds.items()
        tensors = survey.tensors
        names = [name for name, kind in kinds if kind in ("replayed", "static")]
        names = [n for n in names if tensors[n].is_cpu and tensors[n].is_contiguous()]
        live = tuple(tensors[name] for name in names)
        same = prepared is self._prepared and same_objects(live, self._live)
        if self._check is None or not same:
            self._prepared = prepared
            self._live = live
            self._check = SpotCheck(prepared.layouts, tensors, frozenset(names))
        return [Samples(*some) for some in self._check.packed(self._check.take())]
