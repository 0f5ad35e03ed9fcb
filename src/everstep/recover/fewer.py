"""Bases that were saved from a part of the state. No full state can be restored from one, so they
come after those that have all of it, however new they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError
from everstep.recover.load import parts_of
from everstep.recover.scan import BaseFound
from everstep.seams.filesystem import FileSystem
from everstep.state.survey import is_reserved

__all__ = ["lacking_parts"]


def lacking_parts(
    filesystem: FileSystem, bases: Sequence[BaseFound], wanted: Collection[str] | None = None
) -> dict[BaseId, str]:
    """Return which of some bases have fewer parts than another that comes after them, and which
    parts these are, in words.

    The parts of a state are told once, when its Checkpointer is made, so all bases of a timeline
    have the same: one of each timeline is looked at, and none where there is one timeline.

    Args:
        bases: in the order in which they would be tried.
        wanted: parts of the state that is to be restored; only these count. None: all parts.
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
                    f"the base of {base.id} has no {listed}, and that of {other.id} has: it was "
                    "saved from a part of the state, and is passed over"
                )
                break
    return found


def _parts(filesystem: FileSystem, base: BaseFound) -> frozenset[str] | None:
    try:
        return frozenset(part for part in parts_of(filesystem, base) if not is_reserved(part))
    except (EverstepError, OSError):  # whoever restores it says so
        return None
