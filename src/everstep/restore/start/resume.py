"""Resume of one rank: find the newest intact base, restore it, and open a new timeline."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from everstep.commit.job.agreement import NO_WAY_BACK, NO_WAY_BACK_HINT
from everstep.commit.lineage import BaseId, describe_abandoned, describe_lost_steps, describe_unused
from everstep.errors import (
    DamageError,
    FormatError,
    MismatchError,
    NewerFormatError,
    RecoveryError,
    ReplayError,
    StorageError,
)
from everstep.format.names import (
    MANIFEST,
    TIMELINE_RECORD,
    base_dir,
    parse_timeline,
    timeline_dir,
)
from everstep.format.records import AuditRecord, Manifest, TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.restore.fetch.copies import parallel_reads, switch_to_copy
from everstep.restore.fetch.held import HeldBase, KeeperContents
from everstep.restore.fetch.sources import RankBack, RankRead
from everstep.restore.load.inexact import why_not_exact
from everstep.restore.load.load import LoadedBase
from everstep.restore.load.nonfinite import nonfinite_parameter
from everstep.restore.load.restored import Restored
from everstep.restore.log.log_found import LogFound
from everstep.restore.log.reach import nothing_restorable, reachable
from everstep.restore.start.missing_sections import missing_sections, refuse_log_loss
from everstep.restore.start.roll_forward import Loader, replayable, roll_forward
from everstep.run.audits import audit_of, describe_audit
from everstep.run.candidates import Skipped, candidates, starts_with_job_base
from everstep.run.scan import BaseFound, Inventory, TimelineCache, scan_base, scan_run
from everstep.run.uncondemn import uncondemn
from everstep.seams import Seams
from everstep.seams.failpoints import failpoint
from everstep.seams.fingerprint import fingerprint, process_name
from everstep.state.training_state import State
from everstep.tiers.durable_files import create_exclusive, ensure_dir, storage_errors, write_durably

__all__ = ["Resumed", "SeveralRanksError", "not_finite", "open_timeline", "resume"]

_log = logging.getLogger("everstep")
_ATTEMPTS = 8


class _BaseDeletedError(Exception):
    """The base was deleted while it was read: whoever deleted it has committed a newer one."""


class SeveralRanksError(Exception):
    """The base to start from was saved by several ranks, so the logs of all of them are needed."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A restored (or fresh) state, and the timeline opened for it.

    Attributes:
        timeline: number of the timeline.
        base: base that was restored; None on a fresh start.
        loaded: result of loading it.
        source: ``"memory"``, ``"disk"``, or ``"fresh"``.
        exact: True if the base is exact by lineage, and nothing was left out.
        skipped: bases and steps that were skipped.
        problems: in words, damaged records and other remarks.
        step, lsn: step and LSN of the state.
        replayed: number of steps replayed.
        inexact: why the state is not exact; "" if it is.
        audit: audit that the state rests on (see :func:`.audits.audit_of`).
        load_s, replay_s: seconds spent loading the base and replaying the log.
        forks: steps at which earlier processes took the run over.
        reads: of several ranks: bytes that each has read, and their source.
        ranks: of several ranks: result of each.
        own_exact: of several ranks: this one's share is exact.
        lent: number of replayed steps from the memory of other nodes.
        by_offsets: the log of another layout was replayed.
    """

    timeline: int
    base: BaseId | None
    loaded: LoadedBase | None
    source: str
    exact: bool
    skipped: tuple[Skipped, ...]
    problems: tuple[str, ...]
    step: int = 0
    lsn: int = 0
    replayed: int = 0
    inexact: str = ""
    audit: AuditRecord | None = None
    load_s: float = 0.0
    replay_s: float = 0.0
    forks: tuple[int, ...] = ()
    reads: tuple[RankRead, ...] = ()
    ranks: tuple[RankBack, ...] = ()
    own_exact: bool = True
    lent: int = 0
    by_offsets: bool = False

    @property
    def descends_from(self) -> str:
        """Why bases that descend from this state are not exact; "" if they are."""
        if self.exact:
            return ""
        return (self.loaded is not None and self.loaded.marker.inexact) or self.inexact

    def led_from(self, world: int) -> int | None:
        """Return the step of the base that the log of ``world`` ranks continues; None if there is
        none.

        A log continues no base of another number of ranks, nor the log of another layout
        (``docs/design/ranks.md``).
        """
        if self.base is None or self.loaded is None or self.by_offsets:
            return None
        if self.loaded.marker.world != world:
            return None
        return self.base.step


def resume(
    seams: Seams,
    run: PurePath,
    state: State,
    ring: ChunkRing,
    recalled: KeeperContents | None = None,
    *,
    step: int | None,
    strict: bool,
    timeout_s: float,
    on_touch: Callable[[], None],
    trained: bool = False,
    known: TimelineCache | None = None,
) -> Resumed:
    """Restore the newest base that verifies, replay the log on it, and open a new timeline.

    Args:
        recalled: bases and log in the memory of a keeper.
        step: restore this step; 0 without such a base: start afresh.
        strict: refuse bases that do not match the live state completely.
        on_touch: called before live state is overwritten.
        trained: this process has trained already, so its state is not that of a fresh start.
        known: timeline records read before, for processes that resume often.

    Raises:
        SeveralRanksError: use :func:`everstep.trainer.job.one_rank.resume_from_several_ranks`.
        RecoveryError: there are, or were, bases, and none can be used, or none of ``step``.
        MismatchError: the newest base belongs to another model.
    """
    recalled = recalled or KeeperContents()
    held = recalled.base
    with storage_errors("resume", run):
        opened: set[int] = set()
        known = known or TimelineCache()
        # An older process may delete the chosen base until the new timeline fences it off. Start
        # over in that case, a limited number of times.
        for _ in range(_ATTEMPTS):
            inventory = _inventory(seams, run, opened, held, known)
            fresh = step == 0 and not any(base.id.step == 0 for base in inventory.bases)
            if fresh and trained:
                raise _no_way_back(run)
            if starts_with_job_base(inventory, step=step):
                raise SeveralRanksError
            try:
                loader = Loader(seams, state, ring, held, strict, timeout_s, on_touch)
                files = seams.filesystem
                records = recalled.records
                threads = parallel_reads(files)
                log = LogFound.of(files, inventory, records, world=1, threads=threads)
                restored = Restored() if fresh else _restore(inventory, loader, log, step)
                if restored.base is None and trained:  # no state was modified
                    raise _no_way_back(run)
            except _BaseDeletedError:
                continue
            found = restored.base
            loaded = restored.loaded
            audit = None if restored.end is None else audit_of(inventory, restored.end)
            if audit is not None and audit.verdict == "different":
                restored.inexact = restored.inexact or describe_audit(audit)
            if found is not None and loaded is not None and not restored.inexact:
                timelines = inventory.timelines.values()
                restored.inexact = why_not_exact(loaded, found.id, (loaded.marker,), timelines)
            exact = loaded is None or (
                loaded.marker.exact
                and not loaded.mismatches
                and not loaded.notes
                and not restored.inexact
            )
            if step is None and loaded is not None and restored.unreplayed is not None:
                assert restored.end is not None
                refuse_log_loss(
                    loaded.left_out, restored.end.step, restored.unreplayed[0].step, run
                )
            failpoint("resume.before_timeline")
            timeline = open_timeline(
                seams,
                run,
                inventory,
                parent=restored.end,
                base=found.id if found is not None and restored.replayed else None,
                exact=exact,
            )
            opened.add(timeline)
            # Looked at once more after the timeline exists: only now older processes can no
            # longer commit or delete.
            if fresh or _unchanged(seams, inventory, found, step, opened, held, known):
                problems = tuple(f"{path}: {problem}" for path, problem in inventory.problems)
                if loaded is not None:
                    seen = () if restored.replayed else loaded.finite
                    if bad := nonfinite_parameter(state, but=seen):
                        problems += (not_finite(bad, restored.end),)
                for note in filter(
                    None, (restored.passed_over, _history_note(restored, inventory, log, step))
                ):
                    _log.warning("%s", note)
                    problems += (note,)
                base = found.id if found else None
                source = "fresh" if loaded is None else loader.source
                return Resumed(
                    timeline,
                    base,
                    loaded,
                    source,
                    exact,
                    tuple(restored.skipped),
                    problems,
                    step=0 if restored.end is None else restored.end.step,
                    lsn=restored.lsn,
                    replayed=restored.replayed,
                    inexact=restored.inexact,
                    audit=audit,
                    load_s=restored.load_s,
                    replay_s=restored.replay_s,
                    forks=tuple(
                        record.fork_step
                        for record in inventory.timelines.values()
                        if record is not None and record.parent is not None
                    ),
                )
        raise RecoveryError(
            "another process keeps deleting the bases chosen here",
            path=run,
            hint="stop the other process that works on this run",
        )


def open_timeline(
    seams: Seams,
    run: PurePath,
    inventory: Inventory,
    *,
    parent: BaseId | None,
    exact: bool,
    base: BaseId | None = None,
    world: int = 1,
) -> int:
    """Take the run over: from now on every process of an older timeline is fenced off.

    Args:
        parent: timeline and step where the new timeline forks.
        base: base that was restored, if ``parent`` was reached by replay.
    """
    filesystem = seams.filesystem
    assert inventory.run is not None
    number = inventory.next_timeline
    # process ids are not unique among containers that share storage
    unique = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    while True:
        record = TimelineRecord(
            run=inventory.run,
            timeline=number,
            parent=None if parent is None else parent.timeline,
            fork_step=0 if parent is None else parent.step,
            exact=exact,
            world=world,
            base=None if base is None else (base.timeline, base.step),
            fingerprint={**fingerprint(), "process": process_name()},
            created_unix_s=seams.clock.unix_s(),
        )
        directory = timeline_dir(run, number)
        if parse_timeline(directory.name) != number:
            raise StorageError(
                f"{timeline_dir(run, number - 1)} has the largest possible number",
                path=run,
                hint="remove it: everstep did not create it",
            )
        ensure_dir(filesystem, directory)
        path = directory / TIMELINE_RECORD
        if create_exclusive(filesystem, path, record.encode(), unique=unique):
            return number
        number += 1  # another process resumed at the same moment: the later one wins


def _no_way_back(run: PurePath) -> RecoveryError:
    return RecoveryError(NO_WAY_BACK, step=0, path=run, hint=NO_WAY_BACK_HINT)


def _restore(inventory: Inventory, loader: Loader, log: LogFound, step: int | None) -> Restored:
    filesystem = loader.seams.filesystem
    chosen = reachable(inventory, log.index, step=step)
    skipped = [*chosen.candidates.skipped, *log.skipped]
    remaining = list(reversed(chosen.ordered))
    apart = False
    fewer = dict[BaseId, str]()  # incomplete bases, tried last
    if not loader.strict:
        tried = [base for base, _ in chosen.ordered]
        fewer = missing_sections(filesystem, tried, loader.state.providers)
        remaining.sort(key=lambda way: way[0].id not in fewer)
    while remaining:
        base, whole = remaining.pop()
        if base.manifest is not None and base.manifest.markers[0].world > 1:
            raise SeveralRanksError  # newer bases of one rank are damaged
        chain = replayable(base, whole, loader, log, skipped)
        if step is not None and chain.end[1] != step:
            continue
        try:
            restored = roll_forward(inventory, base, chain, loader, log, whole=step is not None)
        except NewerFormatError:
            raise
        except MismatchError:
            tried = [base, *(other for other, _ in reversed(remaining))]
            found = missing_sections(filesystem, tried, loader.state.providers)
            if base.id not in found:
                raise
            fewer[base.id] = found[base.id]
            continue
        except (DamageError, FormatError, ReplayError) as error:
            skipped.append(Skipped(base.id.timeline, base.id.step, error.message))
            apart = apart or isinstance(error.__cause__, MismatchError)
            if not isinstance(error, ReplayError) and switch_to_copy(filesystem, base.path):
                remaining.append((base, whole))
            continue
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            if gone and not _still_there(loader.seams, inventory.path, base.id):
                raise _BaseDeletedError from error
            reason = f"{error.filename or base.path}: {error.strerror or error}"
            skipped.append(Skipped(base.id.timeline, base.id.step, reason))
            if switch_to_copy(filesystem, base.path):
                remaining.append((base, whole))
            continue
        # All markers are durable, so the base exists: write the manifest that its writer could not.
        if base.status == "complete":  # the writer died between the last marker and the manifest
            assert base.manifest is not None
            with contextlib.suppress(IsADirectoryError):  # a directory of that name is left alone
                write_durably(filesystem, base.path / MANIFEST, base.manifest.encode())
        skipped += restored.skipped
        if step is not None and restored.end is not None and restored.end.step != step:
            continue  # the log is damaged; another base may need less of it
        if restored.end is not None and whole.end[1] > restored.end.step:
            at = restored.end.step + 1
            reasons = [one.reason for one in skipped if one.step == at]
            why = reasons[-1] if reasons else f"step {at} could not be replayed"
            restored.unreplayed = BaseId(*whole.end), why
        if chain.lost is not None:
            timeline, end = chain.end
            why = f"log: {chain.stopped}; its records up to step {chain.lost} are unusable"
            skipped.append(Skipped(timeline, end + 1, why))
        restored.skipped = [*skipped, *_skipped(fewer)]
        restored.passed_over = fewer.get(max(fewer), "") if fewer and base.id not in fewer else ""
        return restored
    skipped += _skipped(fewer)
    refused = nothing_restorable(inventory, chosen, skipped, step=step, apart=apart)
    if refused is not None:
        nobody = not chosen.ordered and not chosen.candidates.damaged
        # The scan may have fallen between a commit and a deletion of an older process: scan again.
        if nobody and candidates(scan_run(filesystem, inventory.path)).ordered:
            raise _BaseDeletedError
        raise refused
    return Restored(skipped=skipped)


def _skipped(bases: Mapping[BaseId, str]) -> list[Skipped]:
    return [Skipped(base.timeline, base.step, why) for base, why in bases.items()]


def _history_note(
    restored: Restored, inventory: Inventory, log: LogFound, step: int | None
) -> str | None:
    """Return a remark on the position of the state in the history."""
    if restored.end is None:
        remaining = [base.id for base in inventory.bases]
        remaining += [BaseId(*key) for key in log.index.marks]
        return None if step is not None else describe_unused(remaining, inventory.branches)
    if step is not None:
        return describe_abandoned(restored.end, inventory.branches)
    return describe_lost_steps(restored.end, inventory.branches, restored.unreplayed)


def _inventory(
    seams: Seams,
    run: PurePath,
    opened: Collection[int],
    held: HeldBase | None,
    known: TimelineCache,
) -> Inventory:
    """Scan the run folder, and add the base in memory.

    Timelines that this very resume has ``opened`` do not count as history.
    """
    inventory = scan_run(seams.filesystem, run, known)
    if held is not None and not held.durable and held.id.timeline in inventory.timelines:
        directory = base_dir(run, held.id.timeline, held.id.step)
        manifest = Manifest((held.marker,))
        inventory.bases = [base for base in inventory.bases if base.id != held.id]
        inventory.bases.append(BaseFound(held.id, directory, "committed", manifest, None, ()))
    for number in opened:
        if inventory.timelines.pop(number, None) is not None:
            inventory.abandoned.append(number)
    return inventory


def _unchanged(
    seams: Seams,
    before: Inventory,
    found: BaseFound | None,
    step: int | None,
    opened: Collection[int],
    held: HeldBase | None,
    known: TimelineCache,
) -> bool:
    """Return True if the choice still holds, now that no other process can commit or delete.

    Nothing of the base was deleted before its deleter was fenced off, and no newer base appeared.
    If the base is condemned, its deletion is withdrawn: a timeline now rests on it.
    """
    now = _inventory(seams, before.path, opened, held, known)
    chosen = [base for base in now.bases if found is not None and base.id == found.id]
    if found is not None and not any(base.is_usable for base in chosen):
        return False
    earlier = {base.id for base in candidates(before).ordered}
    if step is None and any(base.id not in earlier for base in candidates(now).ordered):
        return False
    for base in chosen:
        if base.status == "condemned" and not uncondemn(seams.filesystem, base.path):
            return _still_there(seams, before.path, base.id)
    return True


def not_finite(name: str, end: BaseId | None) -> str:
    """Return the warning about a parameter ``name`` that is not finite."""
    step = "" if end is None else f" of step {end.step}"
    return (
        f"the state{step} is not finite: {name!r} holds NaN or infinity. Training had this state; "
        "resume(step=...) restores an earlier step (everstep ls lists them)"
    )


def _still_there(seams: Seams, run: PurePath, base: BaseId) -> bool:
    try:
        return scan_base(seams.filesystem, run, base).is_usable
    except FileNotFoundError:
        return False
