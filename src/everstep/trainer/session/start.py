"""How a process takes its run over: alone, or together with the other ranks of its job."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from torch import nn

from everstep.errors import RecoveryError, StateError
from everstep.format.writer import ChunkRing
from everstep.link.seat import Seat
from everstep.restore.fetch.held import Recalled
from everstep.restore.start.folder import refuse_unresumed
from everstep.restore.start.resume import OfSeveralError, Resumed, open_timeline, resume
from everstep.run.scan import KnownTimelines
from everstep.seams import Seams
from everstep.seams.fingerprint import computed_on, device_types
from everstep.state.image import State
from everstep.tiers.disk import storage_errors
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.job.copies import with_source
from everstep.trainer.job.job import Job
from everstep.trainer.job.one_rank import resume_from_several_ranks
from everstep.trainer.log.residuals import tell_of_lost_residuals

__all__ = [
    "FrozenParameters",
    "LiveStateGuard",
    "RunStarter",
]

_NAMED_MAX = 3


class FrozenParameters:
    """The parameters that are frozen when a process begins, and when it goes back.

    Args:
        values: of the state, by key.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._at_begin: frozenset[str] | None = None
        self._step = 0

    def began(self, step: int) -> None:
        """Training goes on from ``step``."""
        self._at_begin = self._now()
        self._step = step

    def changed(self) -> str | None:
        """What has changed since training began here, in words for who goes back."""
        if self._at_begin is None or not (changed := self._at_begin ^ self._now()):
            return None
        names = sorted(changed)
        more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
        return (
            f"requires_grad of {', '.join(names[:_NAMED_MAX])}{more} was changed since step "
            f"{self._step}: it is no part of the state; set it as it was at the step you go back to"
        )

    def _now(self) -> frozenset[str]:
        return frozenset(
            f"{key}.{name}"
            for key, value in self._values.items()
            if isinstance(value, nn.Module)
            for name, parameter in value.named_parameters()
            if not parameter.requires_grad
        )


class LiveStateGuard:
    """Follows what resumes do to the live state (adr/006).

    Attributes:
        partly: it was overwritten in part, and is that of no step.
    """

    def __init__(self) -> None:
        self.partly = False
        self._before = False
        self._touches = 0

    @contextlib.contextmanager
    def resuming(self) -> Iterator[None]:
        """Around a resume, which calls :meth:`touch`; :meth:`restored` comes behind it."""
        self._before = self.partly
        self.partly = False
        self._touches = 0
        try:
            yield
        except BaseException:
            self.partly = self.partly or self._before
            raise

    def touch(self) -> None:
        """The live state is going to be overwritten."""
        self.partly = True  # until everything is restored
        self._touches += 1

    def restored(self, resumed: Resumed, run: PurePath) -> None:
        """A resume has ended well.

        Raises:
            RecoveryError: the base that it took does not cover what a damaged one has left.
        """
        loaded = resumed.loaded
        if self.partly and loaded is not None and loaded.mismatches and self._touches > 1:
            raise RecoveryError(
                "a damaged base was read half-way into the live state, and the older one that "
                f"was used instead leaves {len(loaded.mismatches)} part(s) of it out",
                step=loaded.marker.step,
                path=run,
                hint="build the model and optimizer again, then resume",
            )
        self.partly = self._before and loaded is None

    def check(self) -> None:
        """Raises:
        StateError: the state in memory is that of no step.
        """
        if self.partly:
            raise StateError(
                "the state in memory was partly overwritten by a resume that failed; it is not "
                "that of any step",
                hint="resume() another base, or build the model again",
            )


_log = logging.getLogger("everstep")
_TRIES = 8  # to ask a keeper that others ask, too


class RunStarter:
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
        overwritten: LiveStateGuard,
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
        self._live_state = overwritten
        self._timeout_s = timeout_s
        self._frozen = FrozenParameters(state.values)
        self._timelines = KnownTimelines()

    @property
    def seat(self) -> Seat | None:
        """This rank's place in the last start; None: it is alone."""
        return None if self._job is None else self._job.seat

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
            recalled = self._recall(own=own)
        changed = self._frozen.changed()
        tell_of_lost_residuals(self._state)  # a hook may have been registered meanwhile
        with self._live_state.resuming(), self._computed():
            resumed, in_memory = self._resume(recalled, step, strict=strict, trained=trained)
        resumed = _told_of_the_rest(resumed, self._run)
        self._live_state.restored(resumed, self._run)
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
                on_touch=self._live_state.touch,
                trained=trained,
            )
            return resumed, not self._job.resumed_durable
        held = recalled.newest
        about = self._seams, self._run, self._state, self._ring, replace(recalled, base=held)
        given: dict[str, Any] = {
            "step": step,
            "strict": strict,
            "timeout_s": self._timeout_s,
            "on_touch": self._live_state.touch,
            "trained": trained,
        }
        try:
            resumed = resume(*about, **given, known=self._timelines)
        except OfSeveralError:
            of_rank = self._seams, self._run, self._run_id, self._state, self._ring, recalled
            return resume_from_several_ranks(*of_rank, ready=self._keepers.ready, **given)
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
                recalled = self._keepers.recall_leftovers()
            about = self._seams, self._run, self._state, recalled, self._keepers
            return self._job.start_fresh(*about).timeline
        with storage_errors("open the run", self._run):
            refuse_unresumed(self._seams.filesystem, self._run, None)
            self._keepers.open()  # it may be writing what an earlier process took
            held = self._recall().newest
            inventory = refuse_unresumed(self._seams.filesystem, self._run, held)
            return open_timeline(self._seams, self._run, inventory, parent=None, exact=True)

    def _recall(self, *, own: bool = False) -> Recalled:
        """What the keeper has in memory. Another process that resumes the run at the same instant
        may get it first: it is asked again, or that memory would be in nobody's history. (One
        that it served before takes it back at its next step, each time.)"""
        recalled = self._keepers.recall_leftovers(own=own)
        for _ in range(0 if own or self._job is not None else _TRIES):
            if not recalled.missed:
                break
            self._keepers.open()
            recalled = self._keepers.recall_leftovers()
        return recalled

    def _telling(self) -> AbstractContextManager[None]:
        return nullcontext() if self._job is None else self._job.reporting_failure()


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
