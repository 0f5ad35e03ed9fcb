"""Takes over a run: restores the state and opens a timeline, alone or with all ranks of a job."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import PurePath

from everstep.errors import RecoveryError, StateError
from everstep.link.messages import JobSession
from everstep.restore.fetch import KeeperContents
from everstep.restore.start import Resumed, ResumeRequest
from everstep.restore.start.resume import resume
from everstep.run import TimelineCache
from everstep.run.folder import open_timeline, refuse_unresumed
from everstep.seams.fingerprint import computed_on, device_types
from everstep.tiers import storage_errors
from everstep.trainer.checks import warn_of_unsaved_residuals
from everstep.trainer.job import RunPlace, resume_as_job_of_one, with_source
from everstep.trainer.session.components import Components


class LiveStateGuard:
    """Track whether a resume that failed half-way has left a mixture of two states (adr/006).

    Attributes:
        is_mixed: True if the live state was overwritten in part and belongs to no step.
    """

    def __init__(self) -> None:
        self.is_mixed = False
        self._was_mixed = False
        self._touches = 0

    @contextlib.contextmanager
    def resuming(self) -> Iterator[None]:
        """Surround a resume, which calls :meth:`touch`. Call :meth:`restored` after it."""
        self._was_mixed = self.is_mixed
        self.is_mixed = False
        self._touches = 0
        try:
            yield
        except BaseException:
            # A resume that fails before it overwrites anything leaves the state as mixed as it was.
            self.is_mixed = self.is_mixed or self._was_mixed
            raise

    def touch(self) -> None:
        """Note that the resume is about to overwrite the live state."""
        self.is_mixed = True  # until everything is restored
        self._touches += 1

    def restored(self, resumed: Resumed, run: PurePath) -> None:
        """Note that a resume has succeeded.

        Raises:
            RecoveryError: The base that was loaded does not cover all entries that were overwritten
                from a damaged one before.
        """
        loaded = resumed.loaded
        # A second touch means that the first base was given up half-way, and another one was read.
        if self.is_mixed and loaded is not None and loaded.mismatches and self._touches > 1:
            raise RecoveryError(
                "a damaged base was read half-way into the live state, and the older base that "
                f"was used instead lacks {len(loaded.mismatches)} of its entries",
                step=loaded.marker.step,
                path=run,
                hint="build the model and optimizer again, then resume",
            )
        # A start without a base overwrites nothing, so an earlier mixture stays.
        self.is_mixed = self._was_mixed and loaded is None

    def check(self) -> None:
        """Check that the live state is that of a step.

        Raises:
            StateError: It is a mixture of two states.
        """
        if self.is_mixed:
            raise StateError(
                "the state in memory was partly overwritten by a resume that failed: it is that of "
                "no step",
                hint="resume() another base, or build the model again",
            )


_log = logging.getLogger("everstep")
_TRIES = 8  # to get the memory of a keeper that another process requests, too


class RunStarter:
    """Restore a state and open a timeline for it.

    Args:
        place: run folder and ranks; the file system that reads also finds copies in other tiers.

    Attributes:
        live_state: guard of the state, which is notified before it is overwritten.
        timeout_s: seconds without progress after which a restore fails.
        job: ranks that start together; None if this process trains alone.
    """

    def __init__(self, place: RunPlace, parts: Components) -> None:
        self.job = place.job
        self._keepers = parts.keepers
        self._seams = place.reading
        self._run = place.run
        self._run_id = parts.run_id
        self._state = parts.state
        self._ring = parts.ring
        self.live_state = LiveStateGuard()
        self.timeout_s = parts.options.progress_timeout_s
        self._timelines = TimelineCache()

    @property
    def job_session(self) -> JobSession | None:
        """Place of this rank in the last start of the job; None for a single rank."""
        return None if self.job is None else self.job.job_session

    def resume(
        self, step: int | None, *, strict: bool, own: bool, trained: bool = False
    ) -> tuple[Resumed, bool]:
        """Restore the newest base (or that of ``step``) and open a new timeline.

        Args:
            own: True if the keeper's memory also holds captures of this very process.
            trained: True if the state is not that of a fresh start.

        Returns:
            The restored state, and True if its base is on no disk yet.

        Raises:
            RecoveryError, MismatchError, StateError, KeeperError, DeadlineError
        """
        with self._reporting_failure():
            self._keepers.open(while_ranks_meet=self.job is not None)
            recalled = self._recall(own=own)
        warn_of_unsaved_residuals(
            self._state
        )  # a hook may have been registered since the last start
        request = self._request(recalled, step=step, strict=strict, trained=trained)
        with self.live_state.resuming(), self._record_devices():
            resumed, in_memory = self._resume(request)
        resumed = _warn_of_left_out(resumed, self._run)
        self.live_state.restored(resumed, self._run)
        return resumed, in_memory

    def _resume(self, request: ResumeRequest) -> tuple[Resumed, bool]:
        if self.job is not None:
            resumed = self.job.resume(request, self._keepers)
            return resumed, not self.job.resumed_durable
        # Not as a job of one: that takes more operations of the file system (see ``resume``).
        alone = resume(request, self._timelines)
        if alone is None:  # several ranks have trained the run last
            return resume_as_job_of_one(request, self._run_id)
        held = request.recalled.newest
        in_memory = alone.source == "memory" and held is not None and not held.durable
        return with_source(alone, self._seams, self._run), in_memory

    def start_fresh(self) -> int:
        """Begin without a resume; return the number of the timeline.

        Raises:
            StateError: The run has something to resume.
        """
        warn_of_unsaved_residuals(self._state)
        with self._record_devices():
            return self._open_first_timeline()

    def _request(
        self,
        recalled: KeeperContents,
        *,
        step: int | None = None,
        strict: bool = True,
        trained: bool = False,
        restores: bool = True,
    ) -> ResumeRequest:
        return ResumeRequest(
            self._seams,
            self._run,
            self._state,
            self._ring,
            recalled,
            step=step,
            strict=strict,
            timeout_s=self.timeout_s,
            on_touch=self.live_state.touch,
            trained=trained,
            restores=restores,
        )

    def _record_devices(self) -> AbstractContextManager[None]:
        """Record the device types of the updates in the timeline, for later comparisons."""
        return computed_on(device_types(self._state.optimizers.values()))

    def _open_first_timeline(self) -> int:
        if self.job is not None:
            with self._reporting_failure():
                self._keepers.open(while_ranks_meet=True)
                recalled = self._keepers.recall_leftovers()
            request = self._request(recalled, restores=False)
            return self.job.start_fresh(request, self._keepers).timeline
        with storage_errors("open the run", self._run):
            refuse_unresumed(self._seams.filesystem, self._run, None)
            # The keeper of an earlier process may still be writing a base: look again after that.
            self._keepers.open()
            held = self._recall().newest
            held_id = None if held is None else held.id
            inventory = refuse_unresumed(self._seams.filesystem, self._run, held_id)
            return open_timeline(self._seams, self._run, inventory, parent=None, exact=True)

    def _recall(self, *, own: bool = False) -> KeeperContents:
        """Return the contents of the keeper's memory.

        Another process that resumes the run at the same time may attach to the keeper first.
        Retry then, or the steps in its memory would be in no history. (A process that the keeper
        served before attaches again at each of its steps, so retries are limited.)
        """
        recalled = self._keepers.recall_leftovers(own=own)
        for _ in range(0 if own or self.job is not None else _TRIES):
            if not recalled.missed:
                break
            self._keepers.open()
            recalled = self._keepers.recall_leftovers()
        return recalled

    def _reporting_failure(self) -> AbstractContextManager[None]:
        return nullcontext() if self.job is None else self.job.reporting_failure()


def _warn_of_left_out(resumed: Resumed, run: PurePath) -> Resumed:
    """Warn if the base has entries that the state lacks.

    Often the program only wants to read the run.
    """
    keys = [] if resumed.loaded is None else resumed.loaded.left_out
    if not keys:
        return resumed
    note = (
        f"this process has taken the run over without {', '.join(map(repr, keys))}: the base has "
        "them, but the state of this process does not, and the bases that it saves will not have "
        "them. A process that was training this run can no longer save to it. To read a run "
        "without taking it over, use everstep.load(path)"
    )
    _log.warning("%s: %s", run, note)
    return replace(resumed, problems=(*resumed.problems, note))
