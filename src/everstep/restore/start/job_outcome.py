"""Result of one rank in a resume of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from everstep.commit import BaseId
from everstep.commit.job import Choice, Source
from everstep.commit.job.agreement import Go, Refuse, Restored
from everstep.errors import MismatchError, RecoveryError
from everstep.format import Manifest, TimelineRecord
from everstep.format.records import AuditRecord
from everstep.restore.fetch import Meeting
from everstep.restore.fetch.sources import Place, RankBack, RankRead, source_name
from everstep.restore.load import LoadedBase, nonfinite_notice
from everstep.restore.start.rank_log import Redone
from everstep.restore.start.report import Resumed, why_inexact
from everstep.run import Inventory, Skipped
from everstep.run.verify import audit_of
from everstep.seams.fingerprint import fingerprint, merge_fingerprints, process_name
from everstep.state.training_state import State

_HINT_UNLIKE = (
    "build the state that these ranks share as it was saved, the same on all of them; parameters "
    "that are new on one rank (a head, say) can be added to the optimizer after "
    "resume(strict=False), with add_param_group()"
)
_ELSEWHERE = "the state that another rank restored is not exact"


@dataclass(slots=True)
class Outcome:
    """Live state of this rank during the resume.

    Attributes:
        loaded: result of loading the base; None on a fresh start.
        source: source of the base.
        exact: True if the state is bit for bit that of training.
        load_s: seconds spent loading.
        reads: bytes read, by tier.
        redone: result of replay.
        audit: audit that the state rests on (see :func:`.verify.audit_of`).
    """

    loaded: LoadedBase | None = None
    source: str = "fresh"
    exact: bool = True
    load_s: float = 0.0
    reads: tuple[RankRead, ...] = ()
    redone: Redone = field(default_factory=Redone)
    audit: AuditRecord | None = None

    @classmethod
    def of(
        cls,
        loaded: LoadedBase,
        manifest: Manifest,
        picked: Mapping[int, Place],
        rank: int,
        *,
        load_s: float,
    ) -> Outcome:
        """Return the outcome of loading a base.

        Args:
            picked: location where the files of each rank were read.
            rank: rank that read them.
        """
        read_bytes: dict[Source, int] = {}
        for writer, size_bytes in loaded.rank_bytes.items():
            source = picked[writer].source
            read_bytes[source] = read_bytes.get(source, 0) + size_bytes
        return cls(
            loaded,
            source_name({place.source.tier for place in picked.values()}),
            manifest.exact and not loaded.mismatches and not loaded.notes,
            load_s,
            tuple(
                RankRead(rank, source.tier, size_bytes)
                for source, size_bytes in sorted(read_bytes.items())
            ),
        )

    def audited(self, restored: Restored, inventory: Inventory, end: BaseId | None) -> Restored:
        """Apply audits to the result: a state that rests on a base which audits found different is
        not exact (I9).

        Args:
            end: timeline and step of the state.
        """
        if end is not None:
            self.audit = audit_of(inventory, end)
            if self.audit is not None and self.audit.verdict == "different":
                self.exact = False
        return replace(restored, exact=restored.exact and self.exact)

    def doubt(self, notes: tuple[str, ...]) -> None:
        """Note why the next step may differ from that of an uninterrupted training."""
        if notes and self.loaded is not None:
            self.loaded = replace(self.loaded, notes=(*self.loaded.notes, *notes))
            self.exact = False


def record_of(
    choice: Choice, number: int, meeting: Meeting, *, exact: bool, unix_s: float
) -> TimelineRecord:
    """Return the record of the timeline that all ranks open.

    Args:
        exact: True if the restored state is exact.
        unix_s: current time.
    """
    assert choice.run is not None, "every disk has the record of the run by now"
    # Only a replayed step needs its base named: there is no base of that step to fork from.
    base = None if choice.reach is None else choice.base
    # Of all ranks: where they differ, no replay of this timeline is claimed to be exact (I9).
    known = merge_fingerprints(meeting.fingerprints or (fingerprint(),))
    # Session and process make the bytes unique to this start: of two starts that open the same
    # number, exactly one finds its own record.
    return TimelineRecord(
        run=choice.run,
        timeline=number,
        parent=None if choice.end is None else choice.end.timeline,
        fork_step=0 if choice.end is None else choice.end.step,
        exact=exact,
        world=meeting.world,
        fingerprint={**known, "session": meeting.session, "process": process_name()},
        created_unix_s=unix_s,
        base=None if base is None else (base.timeline, base.step),
    )


def refusal_error(
    refuse: Refuse,
    details: Iterable[str],
    left_out: tuple[tuple[str, str], ...],
    *,
    rank: int,
    run: PurePath,
) -> RecoveryError | MismatchError:
    """Return the error to raise after all ranks agreed to restore nothing.

    Args:
        details: files that could not be used here.
        left_out: differences on this rank.
    """
    if refuse.unlike:
        return MismatchError(
            refuse.reason, mismatches=left_out, rank=rank, path=run, hint=_HINT_UNLIKE
        )
    text = "\n".join([refuse.reason, *(f"  {one}" for one in details)])
    return RecoveryError(text, rank=rank, path=run)


def resumed_of(
    go: Go,
    outcome: Outcome,
    inventory: Inventory,
    state: State,
    skipped: tuple[Skipped, ...],
    damage: tuple[str, ...],
) -> Resumed:
    """Return the result of one rank, after all ranks agreed to go on.

    Args:
        inventory: last scan of the run folder.
        skipped: bases and steps skipped, besides those known to all ranks.
        damage: problems, in words.
    """
    choice = go.choice
    loaded = outcome.loaded
    redone = outcome.redone
    end = choice.end
    reach = choice.reach
    lsn = 0 if loaded is None else loaded.marker.lsn
    if loaded is not None and redone.notes:
        loaded = replace(loaded, notes=(*loaded.notes, *redone.notes))
    problems = tuple(f"{path}: {problem}" for path, problem in inventory.problems) + damage
    problems += (choice.note,) if choice.note else ()
    if loaded is not None:
        problems += nonfinite_notice(state, end)
    return Resumed(
        go.timeline,
        choice.base,
        loaded,
        outcome.source,
        outcome.exact and go.exact,
        (
            *(Skipped(base.timeline, base.step, why) for base, why in choice.skipped),
            *skipped,
        ),
        problems,
        step=0 if end is None else end.step,
        lsn=lsn if reach is None else reach.lsn,
        replayed=0 if reach is None else reach.count,
        inexact=_why_inexact(go, outcome, loaded),
        audit=outcome.audit,
        load_s=outcome.load_s,
        replay_s=redone.replay_s,
        forks=tuple(r.fork_step for r in choice.timelines if r.parent is not None),
        reads=outcome.reads,
        own_exact=outcome.exact,
        by_offsets=bool(choice.readers),
    )


def _why_inexact(go: Go, outcome: Outcome, loaded: LoadedBase | None) -> str:
    """Return why the state is not exact, on this rank or on another one; "" if it is."""
    if outcome.exact and not go.exact:
        return _ELSEWHERE
    choice = go.choice
    markers = () if choice.manifest is None else choice.manifest.markers
    replay = outcome.redone.inexact
    return why_inexact(replay, outcome.audit, loaded, choice.base, markers, choice.timelines)


def doubted(resumed: Resumed, notes: Sequence[str]) -> Resumed:
    """Add notes found after the agreement to a result; it is then not exact."""
    if not notes:
        return resumed
    why = "; ".join(filter(None, (resumed.inexact, *notes)))
    problems = (*resumed.problems, *notes)
    return replace(resumed, exact=False, own_exact=False, inexact=why, problems=problems)


def recovery_report(resumed: Resumed) -> dict[str, Any]:
    """Return a rank's report about its resume, for the other ranks."""
    return {
        "reads": [[one.source, one.size_bytes] for one in resumed.reads],
        "back": [
            resumed.source,
            sum(one.size_bytes for one in resumed.reads),
            resumed.load_s,
            resumed.replay_s,
            resumed.replayed,
            resumed.own_exact,
        ],
    }


def with_ranks(resumed: Resumed, reports: Sequence[Mapping[str, Any]]) -> Resumed:
    """Add the reports of all ranks (:func:`recovery_report`), in order of rank."""
    backs = tuple(RankBack(rank, *one["back"]) for rank, one in enumerate(reports))
    causes = ", ".join(str(one.rank) for one in backs if not one.exact)
    if resumed.inexact == _ELSEWHERE and causes:
        why = f"the state that rank(s) {causes} restored is not exact: see their evidence"
        resumed = replace(resumed, inexact=why)
    return replace(
        resumed,
        reads=tuple(
            RankRead(rank, str(source), int(size_bytes))
            for rank, one in enumerate(reports)
            for source, size_bytes in one["reads"]
        ),
        ranks=backs,
    )
