"""Result of a resume: as the training process needs it, and as the user gets it.

Bases that lack sections of the state, saved by a process that resumed with fewer of them.

No complete state can be restored from such a base, so complete bases are preferred, even older
ones. A log that would be dropped is protected as well.

Request of a process to restore a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.commit import BaseId
from everstep.errors import EverstepError, RecoveryError
from everstep.format import Marker
from everstep.format.records import AuditRecord
from everstep.format.writer import ChunkRing
from everstep.restore.fetch import KeeperContents
from everstep.restore.load import LoadedBase
from everstep.restore.load.load import sections_of_base
from everstep.run import BaseFound, Skipped
from everstep.run.verify import describe_audit
from everstep.seams import FileSystem, Seams
from everstep.state.layout.entries import is_reserved
from everstep.state.training_state import State

NO_DATA = "not in the state"
ELSEWHERE = "the state that another rank restored is not exact"


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
        audit: audit that the state rests on (see :func:`.verify.audit_of`).
        load_s, replay_s: seconds spent loading the base and replaying the log.
        forks: steps at which earlier processes took the run over.
        own_exact: of several ranks: this one's share is exact.
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
    own_exact: bool = True
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


@dataclass(frozen=True, slots=True)
class Recovery:
    """Result of :meth:`everstep.Checkpointer.resume`.

    Attributes:
        step: number of completed steps, from which training continues; 0 on a fresh run.
        exact: True if the entire state is bit for bit that of an uninterrupted run (I9). This
            depends on the base and on everything it descends from. It does not cover data outside
            the state: gradients being accumulated, ``requires_grad``.
        evidence: basis of that, in words.
        source: ``"memory"`` (of the keeper), ``"peer"`` (another node: memory of its keeper, or its
            disk), ``"disk"``, ``"object"`` (a copy in an object store), ``"copy"`` (a copy in
            another directory), or ``"fresh"`` if there was nothing to restore.
        base_step: step of the base that was read.
        replayed: number of steps replayed from the log.
        seconds: total duration.
        load_s: seconds of these spent reading and restoring the base.
        replay_s: seconds of these spent reading and replaying the log.
        size_bytes: bytes read and verified.
        timeline: timeline that was opened; later bases belong to it.
        skipped: bases that were skipped, with the reason.
        mismatched: ``(name, difference)`` left out because of ``strict=False``, or restored
            although it may be meant for other ranks (parameters of which ranks had different
            versions, see ``docs/design/ranks.md``).
        notes: state that could not be restored on this machine; damaged records that did no harm;
            that the step belongs to an abandoned branch, or that newer steps of the history are
            lost.
        data: ``"restored"``: the state contains a loader, a sampler or a stream (an iterable with
            ``state_dict()``), or its position, and it was restored; on a fresh run it starts from
            the beginning. ``"not in the state"``: it contains none, so the order of batches is up
            to the program.
    """

    step: int
    exact: bool
    evidence: str
    source: str
    base_step: int | None
    replayed: int
    seconds: float
    size_bytes: int
    timeline: int
    skipped: tuple[Skipped, ...] = ()
    mismatched: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    load_s: float = 0.0
    replay_s: float = 0.0
    data: str = NO_DATA


def evidence(
    entries: int,
    size_bytes: int,
    *,
    redone: int = 0,
    replayed: int = 0,
    audit: str = "",
    inexact: str = "",
) -> str:
    """Return in words the basis of a restored state.

    Args:
        entries, size_bytes: entries and bytes read and verified.
        redone: number of updates replayed to complete a multi-step base.
        replayed: number of log steps replayed.
        audit: result of audits.
        inexact: why the state is not exact; "" if it is.
    """
    text = f"xxh3-128 of {entries} entries, {size_bytes} bytes"
    if redone:
        text += f"; its parts completed by replaying {redone} update(s)"
    if replayed:
        text += f"; {replayed} step(s) replayed from the log"
    if audit and audit != inexact:
        text += f"; {audit}"
    if inexact:
        text += f"; not exact: {inexact}"
    return text


def describe(resumed: Resumed, seconds: float, *, has_data: bool) -> Recovery:
    """Return the result of a resume as the user gets it.

    Args:
        resumed: result of the restore.
        seconds: total duration.
        has_data: the state contains a position in the data.
    """
    base = resumed.base
    loaded = resumed.loaded
    audit = "" if resumed.audit is None else describe_audit(resumed.audit)
    text = "nothing to restore"
    if loaded is not None:
        text = evidence(
            loaded.entries,
            loaded.size_bytes,
            redone=loaded.redone,
            replayed=resumed.replayed,
            audit=audit,
            inexact=resumed.inexact,
        )
    return Recovery(
        step=resumed.step,
        exact=resumed.exact,
        evidence=text,
        source=resumed.source,
        base_step=None if base is None else base.step,
        replayed=resumed.replayed,
        seconds=seconds,
        size_bytes=0 if loaded is None else loaded.size_bytes,
        timeline=resumed.timeline,
        skipped=resumed.skipped,
        mismatched=() if loaded is None else loaded.mismatches,
        notes=tuple(dict.fromkeys((*resumed.problems, *(() if loaded is None else loaded.notes)))),
        load_s=resumed.load_s,
        replay_s=resumed.replay_s,
        data="restored" if has_data else NO_DATA,
    )


def why_inexact(
    replay: str,
    audit: AuditRecord | None,
    loaded: LoadedBase | None,
    base: BaseId | None,
    markers: Iterable[Marker],
) -> str:
    """Return in words why a state is not exact; "" if it is.

    Args:
        replay: why the replay of the log was not exact; "" if it was.
        audit: audit that the state rests on.
        loaded: result of loading the base; None on a fresh start, like ``base``.
        base: base that was loaded.
        markers: markers of the ranks that wrote it.
    """
    if replay:
        return replay
    if audit is not None and audit.verdict == "different":
        return describe_audit(audit)
    if loaded is None or base is None:
        return ""
    found = []
    if of := {marker.rank: marker.inexact for marker in markers if not marker.exact}:
        ranks = f" (rank(s) {', '.join(map(str, sorted(of)))})" if loaded.marker.world > 1 else ""
        reasons = "; ".join(dict.fromkeys(filter(None, of.values())))
        found.append(
            f"the base of {base}{ranks} is marked as not exact: it was not saved from the "
            "complete, exact state of training" + (f": {reasons}" if reasons else "")
        )
    if loaded.mismatches:
        name, problem = loaded.mismatches[0]
        more = _more(len(loaded.mismatches), "mismatched")
        found.append(f"{name!r} was left out, or may differ: {problem}{more}")
    if loaded.notes:
        found.append(f"{loaded.notes[0]}{_more(len(loaded.notes), 'notes')}")
    return "; ".join(found)


def _more(count: int, where: str) -> str:
    return f" (and {count - 1} more, see Recovery.{where})" if count > 1 else ""


def missing_sections(
    filesystem: FileSystem, bases: Sequence[BaseFound], wanted: Collection[str] | None = None
) -> dict[BaseId, str]:
    """Return those of ``bases`` that lack a section which a later one in the list has, with a
    message.

    The sections of a state are fixed when its Checkpointer is created, so all bases of a timeline
    have the same. One base of each timeline is read, and none if there is only one timeline.

    Args:
        bases: in the order in which they would be tried.
        wanted: names of the sections to restore; only these count. None: all.
    """
    # Bases of one timeline have the same sections, so no header need be read.
    if len({base.id.timeline for base in bases}) < 2:
        return {}
    sections: dict[int, frozenset[str] | None] = {}
    for base in bases:
        if base.id.timeline not in sections:
            sections[base.id.timeline] = _sections(filesystem, base)
    found: dict[BaseId, str] = {}
    for place, base in enumerate(bases):
        own = sections[base.id.timeline]
        for other in bases[place + 1 :]:
            of_other = sections[other.id.timeline]
            # Only a proper subset lacks something. Bases of different states are left to the
            # comparison with the live state.
            if own is None or of_other is None or not own < of_other:
                continue
            lost = of_other - own if wanted is None else (of_other - own).intersection(wanted)
            if lost:
                listed = ", ".join(map(repr, sorted(lost)))
                found[base.id] = (
                    f"the base of {base.id} has no {listed}, but the base of {other.id} has: it "
                    "was saved by a process with fewer sections in its state, and is passed over"
                )
                break
    return found


def refuse_log_loss(sections: Sequence[str], step: int, last: int, run: PurePath) -> None:
    """Refuse to take a run over with fewer sections if that would drop steps of its log, which can
    only be replayed on the complete state.

    Args:
        sections: names of the sections of the base that the live state does not have.
        step: step of the base, from which training would continue.
        last: last step of the log after it.

    Raises:
        RecoveryError: there are such sections.
    """
    if not sections:
        return
    raise RecoveryError(
        f"the log of this run reaches step {last}, but without {', '.join(map(repr, sections))} in "
        f"the state it cannot be replayed: resume(strict=False) would go back to the base of step "
        f"{step} and drop the steps after it",
        step=last,
        path=run,
        hint="everstep.load(path) reads the state of a run without taking it over; resume(step="
        f"{step}, strict=False) takes the run over at step {step} and drops the later ones",
    )


def _sections(filesystem: FileSystem, base: BaseFound) -> frozenset[str] | None:
    try:
        return frozenset(
            section for section in sections_of_base(filesystem, base) if not is_reserved(section)
        )
    except (EverstepError, OSError):  # reported when it is restored
        return None


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """State to restore, the sources of one rank, and what is accepted.

    Attributes:
        seams: file system, clock and other services.
        run: run folder.
        state: live state, which is overwritten.
        ring: memory through which files are read.
        recalled: base and log records in the memory of this rank's keeper.
        step: step to restore; None: the newest; 0 without such a base: start afresh.
        strict: refuse bases that do not match the live state completely.
        timeout_s: seconds without progress after which an operation, or another rank, is reported.
        on_touch: called before live state is overwritten.
        trained: this process has trained, so its state is not that of a fresh start.
        restores: False if ``resume()`` was not called: a base is then an error.
    """

    seams: Seams
    run: PurePath
    state: State
    ring: ChunkRing
    recalled: KeeperContents
    step: int | None
    strict: bool
    timeout_s: float
    on_touch: Callable[[], None] = lambda: None
    trained: bool = False
    restores: bool = True


def doubted(resumed: Resumed, notes: Sequence[str]) -> Resumed:
    """Add notes found after the agreement to a result; it is then not exact."""
    if not notes:
        return resumed
    why = "; ".join(filter(None, (resumed.inexact, *notes)))
    problems = (*resumed.problems, *notes)
    return replace(resumed, exact=False, own_exact=False, inexact=why, problems=problems)


def with_causes(resumed: Resumed, exact: Sequence[bool]) -> Resumed:
    """Name the ranks whose state is not exact, if that is why the job's state is not.

    Args:
        exact: ``own_exact`` of each rank.
    """
    causes = ", ".join(str(rank) for rank, own in enumerate(exact) if not own)
    if resumed.inexact != ELSEWHERE or not causes:
        return resumed
    why = f"the state that rank(s) {causes} restored is not exact: see their evidence"
    return replace(resumed, inexact=why)
