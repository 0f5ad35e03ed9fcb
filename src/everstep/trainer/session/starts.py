"""How a process takes its run over: alone, or together with the other ranks of its job."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from everstep.format.writer import ChunkRing
from everstep.link.job_session import JobSession
from everstep.restore.fetch.held import Recalled
from everstep.restore.start.resume import Resumed, SeveralRanksError, open_timeline, resume
from everstep.run.folder import refuse_unresumed
from everstep.run.scan import TimelineCache
from everstep.seams import Seams
from everstep.seams.fingerprint import computed_on, device_types
from everstep.state.training_state import State
from everstep.tiers.disk import storage_errors
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.job.alone import resume_behind_several
from everstep.trainer.job.copies import with_source
from everstep.trainer.job.job import Job
from everstep.trainer.log.residuals import tell_of_lost_residuals
from everstep.trainer.session.frozen import Frozen
from everstep.trainer.session.overwritten import Overwritten

__all__ = ["Starts"]

_log = logging.getLogger("everstep")
_TRIES = 8  # to ask a keeper that others ask, too


class Starts:
    """Restores a state and opens a timeline for it.

    Args:
        job: the ranks that do so together; None: this process trains alone.
        seams: that read copies in other tiers, too.
        timeout_s: whatever gets nowhere for so long is reported.
    """

    def __init__(
        self,
        job: Job | None,
        keepers: Keepers,
        seams: Seams,
        run: PurePath,
        run_id: str,
        state: State,
        ring: ChunkRing,
        overwritten: Overwritten,
        *,
        timeout_s: float,
    ) -> None:
        self._job = job
        self._keepers = keepers
        self._seams = seams
        self._run = run
        self._run_id = run_id
        self._state = state
        self._ring = ring
        self._overwritten = overwritten
        self._timeout_s = timeout_s
        self._frozen = Frozen(state.values)
        self._timelines = TimelineCache()

    @property
    def job_session(self) -> JobSession | None:
        """This rank's place in the last start; None: it is alone."""
        return None if self._job is None else self._job.job_session

    def resume(
        self, step: int | None, *, strict: bool, own: bool, trained: bool = False
    ) -> tuple[Resumed, bool]:
        """Restores the newest base (or that of ``step``) and opens a new timeline.

        Args:
            own: what this very process has captured is in the keeper, too.
            trained: its state is not that of a fresh start.

        Returns:
            What was restored, and whether it is on no disk yet.

        Raises:
            RecoveryError, MismatchError, StateError, KeeperError, DeadlineError
        """
        with self._telling():
            self._keepers.open(beside=self._job is not None)
            recalled = self._left_behind(own=own)
        changed = self._frozen.changed()
        tell_of_lost_residuals(self._state)  # a hook may have been registered meanwhile
        with self._overwritten.resuming(), self._computed():
            resumed, in_memory = self._resume(recalled, step, strict=strict, trained=trained)
        resumed = _told_of_the_rest(resumed, self._run)
        self._overwritten.restored(resumed, self._run)
        self._frozen.began(resumed.step)
        if changed:
            resumed = replace(resumed, problems=(*resumed.problems, changed))
        return resumed, in_memory

    def _resume(
        self, recalled: Recalled, step: int | None, *, strict: bool, trained: bool
    ) -> tuple[Resumed, bool]:
        if self._job is not None:
            resumed = self._job.resume(
                self._seams,
                self._run,
                self._state,
                self._ring,
                recalled,
                self._keepers,
                step=step,
                strict=strict,
                timeout_s=self._timeout_s,
                on_touch=self._overwritten.touch,
                trained=trained,
            )
            return resumed, not self._job.resumed_durable
        held = recalled.newest
        about = self._seams, self._run, self._state, self._ring, replace(recalled, base=held)
        given: dict[str, Any] = {
            "step": step,
            "strict": strict,
            "timeout_s": self._timeout_s,
            "on_touch": self._overwritten.touch,
            "trained": trained,
        }
        try:
            resumed = resume(*about, **given, known=self._timelines)
        except SeveralRanksError:
            of_rank = self._seams, self._run, self._run_id, self._state, self._ring, recalled
            return resume_behind_several(*of_rank, ready=self._keepers.ready, **given)
        in_memory = resumed.source == "memory" and held is not None and not held.durable
        return with_source(resumed, self._seams, self._run), in_memory

    def fresh(self) -> int:
        """Begins without a resume; returns the number of the timeline.

        Raises:
            StateError: there is something to resume.
        """
        self._frozen.began(0)
        tell_of_lost_residuals(self._state)
        with self._computed():
            return self._fresh()

    def _computed(self) -> AbstractContextManager[None]:
        """Where this training updates, for the record of its timeline and what is compared."""
        return computed_on(device_types(self._state.optimizers.values()))

    def _fresh(self) -> int:
        if self._job is not None:
            with self._telling():
                self._keepers.open(beside=True)
                recalled = self._keepers.left_behind()
            about = self._seams, self._run, self._state, recalled, self._keepers
            return self._job.start_fresh(*about).timeline
        with storage_errors("open the run", self._run):
            refuse_unresumed(self._seams.filesystem, self._run, None)
            self._keepers.open()  # it may be writing what an earlier process took
            held = self._left_behind().newest
            held_id = None if held is None else held.id
            inventory = refuse_unresumed(self._seams.filesystem, self._run, held_id)
            return open_timeline(self._seams, self._run, inventory, parent=None, exact=True)

    def _left_behind(self, *, own: bool = False) -> Recalled:
        """What the keeper has in memory. Another process that resumes the run at the same instant
        may get it first: it is asked again, or that memory would be in nobody's history. (One
        that it served before takes it back at its next step, each time.)"""
        recalled = self._keepers.left_behind(own=own)
        for _ in range(0 if own or self._job is not None else _TRIES):
            if not recalled.missed:
                break
            self._keepers.open()
            recalled = self._keepers.left_behind()
        return recalled

    def _telling(self) -> AbstractContextManager[None]:
        return nullcontext() if self._job is None else self._job.telling()


def _told_of_the_rest(resumed: Resumed, run: PurePath) -> Resumed:
    """Warn where a run was taken over with fewer parts in the state than its base has: often by a
    program that only wants to read it."""
    parts = [] if resumed.loaded is None else resumed.loaded.left_out
    if not parts:
        return resumed
    note = (
        f"this process has taken the run over without {', '.join(map(repr, parts))}: the base has "
        "them, but the state of this process does not, and the bases that it saves will not have "
        "them. A process that was training this run can no longer save to it. To read a run "
        "without taking it over, use everstep.load(path)"
    )
    _log.warning("%s: %s", run, note)
    return replace(resumed, problems=(*resumed.problems, note))
