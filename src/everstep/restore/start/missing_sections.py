"""Bases that lack sections of the state, saved by a process that resumed with fewer of them.

No complete state can be restored from such a base, so complete bases are preferred, even older
ones. A log that would be dropped is protected as well.
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
