"""What a resume gives back: the state's step, where it came from, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.restore.fetch.sources import RankBack, RankRead
from everstep.restore.start.resume import Resumed
from everstep.run.audits import describe_audit
from everstep.run.candidates import Skipped

__all__ = ["Recovery", "describe", "evidence"]

NO_DATA = "not in the state"


@dataclass(frozen=True, slots=True)
class Recovery:
    """The outcome of :meth:`everstep.Checkpointer.resume`.

    Attributes:
        step: where to go on: number of completed steps; 0 on a fresh run.
        exact: whether all that the state has is bit for bit that of an uninterrupted run (I9);
            inherited from the base and all that it descends from. What the state does not have is
            not: gradients that were being accumulated, ``requires_grad``.
        evidence: what that rests on, in words.
        source: ``"memory"`` (of the keeper), ``"peer"`` (another node: its keeper's memory, or its
            disk), ``"disk"``, ``"object"`` (a copy in a store), ``"copy"`` (one in another
            directory), or ``"fresh"`` when there was nothing to restore.
        base_step: step of the base that was read.
        replayed: steps replayed from a log; 0 without one.
        seconds: how long it took.
        load_s: of these, reading the base and restoring it.
        replay_s: of these, reading the log and replaying it.
        size_bytes: bytes read and verified.
        timeline: the timeline that was opened; later bases are written to it.
        skipped: bases that were passed over, with the reason.
        mismatched: ``(name, what differs)`` that ``strict=False`` left out, or took as it may not
            be meant (parameters that ranks had different ones of, see ``docs/design/ranks.md``).
        notes: what this machine could not take back, and damage to records that did no harm; that
            the step is of a branch that was given up, or that newer ones of the history are lost,
            in a log that could not be replayed here, or in one that no base leads to.
        data: ``"restored"``: a part of the state is a loader, a sampler or a stream (anything with
            ``state_dict()`` that can be iterated), or has the position of one in it, and has it
            back; of a fresh run: it begins there. ``"not in the state"``: none is; which batches
            come next is what the program makes of its own counters.
        reads: of a job of several ranks: from which tier each of them has read how many bytes.
        ranks: of a job of several ranks: source, bytes, seconds, steps replayed and exactness of
            each of them, the same on all.
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
    reads: tuple[RankRead, ...] = ()
    ranks: tuple[RankBack, ...] = ()
    data: str = NO_DATA


def evidence(
    entries: int,
    size_bytes: int,
    *,
    redone: int = 0,
    replayed: int = 0,
    lent: int = 0,
    audit: str = "",
    inexact: str = "",
) -> str:
    """Return in words what a restored state rests on.

    Args:
        entries, size_bytes: that were read and verified.
        redone: updates that made the parts of a base over several steps whole.
        replayed: steps of the log.
        lent: of these, those from the memory of another node.
        audit: what audits have said of it.
        inexact: why it is not exact; "" if it is.
    """
    said = f"xxh3-128 of {entries} entries, {size_bytes} bytes"
    if redone:
        said += f"; its parts made whole by {redone} update(s)"
    if replayed:
        said += f"; {replayed} step(s) replayed from the log"
        if lent:
            said += f", {lent} of them from the memory of another node"
    if audit and audit != inexact:
        said += f"; {audit}"
    if inexact:
        said += f"; not exact: {inexact}"
    return said


def describe(resumed: Resumed, seconds: float, *, has_data: bool) -> Recovery:
    """Return the result of a resume as the user gets it.

    Args:
        has_data: a position in the data has come back, or begins.
    """
    base = resumed.base
    loaded = resumed.loaded
    audit = "" if resumed.audit is None else describe_audit(resumed.audit)
    said = "nothing to restore"
    if loaded is not None:
        said = evidence(
            loaded.entries,
            loaded.size_bytes,
            redone=loaded.redone,
            replayed=resumed.replayed,
            lent=resumed.lent,
            audit=audit,
            inexact=resumed.inexact,
        )
    return Recovery(
        step=resumed.step,
        exact=resumed.exact,
        evidence=said,
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
        reads=resumed.reads,
        ranks=resumed.ranks,
        data="restored" if has_data else NO_DATA,
    )
