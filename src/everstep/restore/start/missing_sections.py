"""Processes that resume a run with fewer parts than it was trained with: the bases that they save,
and the log that they would drop.

No full state can be restored from a base of a part of the state, so bases that have all parts are
preferred to it, even where they are older.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import PurePath

from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError, RecoveryError
from everstep.restore.load.load import sections_of_base
from everstep.run.scan import BaseFound
from everstep.seams.files.filesystem import FileSystem
from everstep.state.layout.names import is_reserved

__all__ = ["missing_sections", "refuse_log_loss"]


def missing_sections(
    filesystem: FileSystem, bases: Sequence[BaseFound], wanted: Collection[str] | None = None
) -> dict[BaseId, str]:
    """Return those of ``bases`` that lack a part which a later one in the list has, each with the
    names of these parts, in words.

    The parts of a state are fixed when its Checkpointer is made, so all bases of a timeline have
    the same parts: one base of each timeline is read, and none where there is only one timeline.

    Args:
        bases: in the order in which they would be tried.
        wanted: names of the parts that are to be restored; only these count. None: all parts.
    """
    if len({base.id.timeline for base in bases}) < 2:
        return {}
    parts: dict[int, frozenset[str] | None] = {}
    for base in bases:
        if base.id.timeline not in parts:
            parts[base.id.timeline] = _parts(filesystem, base)
    found: dict[BaseId, str] = {}
    for place, base in enumerate(bases):
        mine = parts[base.id.timeline]
        for other in bases[place + 1 :]:
            theirs = parts[other.id.timeline]
            if mine is None or theirs is None or not mine < theirs:
                continue
            lost = theirs - mine if wanted is None else (theirs - mine).intersection(wanted)
            if lost:
                listed = ", ".join(map(repr, sorted(lost)))
                found[base.id] = (
                    f"the base of {base.id} has no {listed}, but the base of {other.id} has: it "
                    "was saved by a process with fewer parts in its state, and is passed over"
                )
                break
    return found


def refuse_log_loss(parts: Sequence[str], step: int, last: int, run: PurePath) -> None:
    """Refuse to take a run over with fewer parts than it has where that would drop steps of its
    log: a log can only be replayed on the whole state.

    Args:
        parts: names of the parts of the base that the live state does not have.
        step: step of the base, where training would go on.
        last: last step of the log on it.

    Raises:
        RecoveryError: there are such parts.
    """
    if not parts:
        return
    raise RecoveryError(
        f"the log of this run reaches step {last}, but without {', '.join(map(repr, parts))} in "
        f"the state it cannot be replayed: resume(strict=False) would go back to the base of step "
        f"{step} and drop the steps after it",
        step=last,
        path=run,
        hint="everstep.load(path) reads the state of a run without taking it over; resume(step="
        f"{step}, strict=False) takes the run over at step {step} and drops the later ones",
    )


def _parts(filesystem: FileSystem, base: BaseFound) -> frozenset[str] | None:
    try:
        return frozenset(
            part for part in sections_of_base(filesystem, base) if not is_reserved(part)
        )
    except (EverstepError, OSError):  # whoever restores it says so
        return None
