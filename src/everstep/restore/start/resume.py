"""Resume of a run of one rank: choose a base and a step, restore them, and open a timeline.

A job of several ranks resumes in :mod:`.resume_job`, by an agreement. A run of one rank does not,
though one rank can be a job of one. Before its timeline opens, each disk of a job gets the records
and manifests that it may lack, and each is made durable, since ranks may start on other disks than
before; the disk of one rank has them. With three timelines of four bases each, a resume here takes
79 operations of the file system; as a job of one it would take 224, and more with each base. The
choice here is also that of ``everstep.load()`` and ``peek()``, which read a run beside its trainer.

After a job of several ranks, one process continues as a job of one rank: :func:`resume` returns
None.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

from everstep.commit import BaseId, describe_abandoned
from everstep.commit.job.agreement import NO_WAY_BACK, NO_WAY_BACK_HINT
from everstep.commit.lineage import describe_lost_steps, describe_unused
from everstep.errors import RecoveryError
from everstep.format import Manifest, base_dir
from everstep.restore.fetch.copies import parallel_reads
from everstep.restore.load import Restored, nonfinite_notice
from everstep.restore.log import LogFound, base_is_there
from everstep.restore.start.report import Resumed, ResumeRequest, refuse_log_loss, why_inexact
from everstep.restore.start.roll_forward import ChoiceGoneError, OneRankChoice
from everstep.run import BaseFound, Inventory, TimelineCache, scan_run
from everstep.run.folder import open_timeline
from everstep.run.scan import candidates, starts_with_job_base
from everstep.run.uncondemn import uncondemn
from everstep.run.verify import audit_of
from everstep.seams import failpoint
from everstep.tiers import storage_errors

_log = logging.getLogger("everstep")
_ATTEMPTS = 8


def resume(request: ResumeRequest, known: TimelineCache | None = None) -> Resumed | None:
    """Restore the newest base that verifies, replay the log on it, and open a new timeline.

    Args:
        known: timeline records read before, for processes that resume often.

    Returns:
        The result; None if several ranks saved the base to start from: then nothing was changed.

    Raises:
        RecoveryError: there are, or were, bases, and none can be used, or none of the requested
            step.
        MismatchError: the newest base belongs to another model.
    """
    start = _Start(request, known or TimelineCache())
    with storage_errors("resume", request.run):
        # An older process may delete the chosen base until the new timeline fences it off. Start
        # over in that case, a limited number of times.
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(ChoiceGoneError):
                return start.attempt()
    raise RecoveryError(
        "another process keeps deleting the bases chosen here",
        path=request.run,
        hint="stop the other process that works on this run",
    )


class _Start:
    """Attempts of one process to take a run over."""

    def __init__(self, request: ResumeRequest, known: TimelineCache) -> None:
        self._request = request
        self._run = request.run
        self._step = request.step
        self._filesystem = request.seams.filesystem
        self._held = request.recalled.newest
        self._known = known
        self._opened: set[int] = set()  # timelines of attempts that failed after the fence

    def attempt(self) -> Resumed | None:
        """Choose, restore, and open a timeline; None if several ranks saved the chosen base.

        Raises:
            ChoiceGoneError
        """
        request = self._request
        inventory = self._inventory()
        fresh = self._step == 0 and not any(base.id.step == 0 for base in inventory.bases)
        if fresh and request.trained:
            raise self._no_way_back()
        if starts_with_job_base(inventory, step=self._step):
            return None
        log = LogFound.of(
            self._filesystem,
            inventory,
            request.recalled.records,
            world=1,
            threads=parallel_reads(self._filesystem),
        )
        restored = Restored()
        source = "fresh"
        if not fresh:
            choice = OneRankChoice(request, inventory, log)
            found = choice.restore()
            if found is None:
                return None
            restored = found
            source = choice.source
        if restored.base is None and request.trained:  # no state was modified
            raise self._no_way_back()
        # Refused before the timeline exists: until then nothing on disk has changed but a manifest
        # that follows from its markers.
        self._refuse_log_loss(restored)
        result = self._result(restored, inventory, source)
        failpoint("resume.before_timeline")
        timeline = open_timeline(
            request.seams,
            self._run,
            inventory,
            parent=restored.end,
            base=result.base if restored.replayed else None,
            exact=result.exact,
        )
        # Before the second scan: if that fails, the next attempt must not take this timeline for
        # history.
        self._opened.add(timeline)
        # Look once more after the timeline exists: only now older processes can no longer commit or
        # delete.
        if not fresh and not self._still_holds(inventory, restored.base):
            raise ChoiceGoneError
        return self._noted(result, timeline, restored, inventory, log)

    def _inventory(self) -> Inventory:
        """Scan the run folder, and add the base in memory.

        Timelines that this very resume has opened do not count as history.
        """
        inventory = scan_run(self._filesystem, self._run, self._known)
        held = self._held
        if held is not None and not held.durable and held.id.timeline in inventory.timelines:
            directory = base_dir(self._run, held.id.timeline, held.id.step)
            manifest = Manifest((held.marker,))
            # Files of that base on the disk are what the keeper has written of it so far.
            inventory.bases = [base for base in inventory.bases if base.id != held.id]
            inventory.bases.append(BaseFound(held.id, directory, "committed", manifest, None, ()))
        # Without this, a timeline of a failed attempt would be the newest history, and empty.
        for number in self._opened:
            if inventory.timelines.pop(number, None) is not None:
                inventory.abandoned.append(number)
        return inventory

    def _refuse_log_loss(self, restored: Restored) -> None:
        if self._step is None and restored.loaded is not None and restored.unreplayed is not None:
            assert restored.end is not None
            last, _ = restored.unreplayed
            refuse_log_loss(restored.loaded.left_out, restored.end.step, last.step, self._run)

    def _result(self, restored: Restored, inventory: Inventory, source: str) -> Resumed:
        """Return the result as of before the timeline exists."""
        found = restored.base
        loaded = restored.loaded
        audit = None if restored.end is None else audit_of(inventory, restored.end)
        markers = () if loaded is None else (loaded.marker,)
        base = None if found is None else found.id
        inexact = why_inexact(restored.inexact, audit, loaded, base, markers)
        exact = loaded is None or (
            loaded.marker.exact and not loaded.mismatches and not loaded.notes and not inexact
        )
        return Resumed(
            timeline=0,
            base=base,
            loaded=loaded,
            source="fresh" if loaded is None else source,
            exact=exact,
            skipped=tuple(restored.skipped),
            problems=(),
            step=0 if restored.end is None else restored.end.step,
            lsn=restored.lsn,
            replayed=restored.replayed,
            inexact=inexact,
            audit=audit,
            load_s=restored.load_s,
            replay_s=restored.replay_s,
            forks=tuple(
                record.fork_step
                for record in inventory.timelines.values()
                if record is not None and record.parent is not None
            ),
        )

    def _noted(
        self,
        result: Resumed,
        timeline: int,
        restored: Restored,
        inventory: Inventory,
        log: LogFound,
    ) -> Resumed:
        """Add the timeline, and everything that the user should know of the state."""
        problems = tuple(f"{path}: {problem}" for path, problem in inventory.problems)
        if restored.loaded is not None:
            problems += nonfinite_notice(self._request.state, restored.end)
        for note in (restored.passed_over, self._history_note(restored, inventory, log)):
            if note:
                _log.warning("%s", note)
                problems += (note,)
        return replace(result, timeline=timeline, problems=problems)

    def _history_note(self, restored: Restored, inventory: Inventory, log: LogFound) -> str | None:
        """Return a remark on the position of the state in the history."""
        if restored.end is None:
            remaining = [base.id for base in inventory.bases]
            remaining += [BaseId(*key) for key in log.index.marks]
            requested = self._step is not None
            return None if requested else describe_unused(remaining, inventory.branches)
        if self._step is not None:
            return describe_abandoned(restored.end, inventory.branches)
        return describe_lost_steps(restored.end, inventory.branches, restored.unreplayed)

    def _still_holds(self, before: Inventory, found: BaseFound | None) -> bool:
        """Return True if the choice still holds, now that no other process can commit or delete.

        Nothing of the base was deleted before its deleter was fenced off, and no newer base
        appeared. If the base is condemned, its deletion is withdrawn: a timeline now rests on it.
        """
        now = self._inventory()
        chosen = [base for base in now.bases if found is not None and base.id == found.id]
        if found is not None and not any(base.is_usable for base in chosen):
            return False
        earlier = {base.id for base in candidates(before).ordered}
        # An older process may have committed a newer base between the first scan and the fence.
        if self._step is None and any(base.id not in earlier for base in candidates(now).ordered):
            return False
        for base in chosen:
            # The rename fails if a deleter has begun, or if another process has withdrawn the
            # deletion: only a look at the base tells which.
            if base.status == "condemned" and not uncondemn(self._filesystem, base.path):
                return base_is_there(self._filesystem, self._run, base.id)
        return True

    def _no_way_back(self) -> RecoveryError:
        return RecoveryError(NO_WAY_BACK, step=0, path=self._run, hint=NO_WAY_BACK_HINT)
