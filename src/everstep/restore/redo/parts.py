"""An update of which each rank has recorded a part (``docs/design/ranks.md``): what goes with a
record."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.errors import FormatError
from everstep.format.log import LogRecord
from everstep.replay.packed import Gradient
from everstep.replay.updates import Update
from everstep.restore.redo.gradients import gradient_of
from everstep.run.tensors import tensor_of
from everstep.state.layout.names import PART_OBJECT
from everstep.state.ranks.log_shares import names_digest
from everstep.state.values.objects import decode

__all__ = ["OfOthers", "gradients_of_others", "own_part"]


@dataclass(slots=True)
class OfOthers:
    """What other ranks have recorded of an update.

    Attributes:
        gradients: by name of the parameter.
        lossy: one of the records says that its gradients are not what training consumed.
    """

    gradients: dict[str, Gradient] = field(default_factory=dict)
    lossy: bool = False


def gradients_of_others(record: LogRecord, about: Mapping[str, Any]) -> OfOthers:
    """The gradients of an update that other ranks have recorded: with this rank's all that it
    consumed, and each once.

    Args:
        about: what the record says of the update.

    Raises:
        AttributeError, LookupError, TypeError, ValueError: it is no such record, or parts of it are
            missing, or are of another update.
        FormatError: a compressed gradient is none.
    """
    found = OfOthers()
    for ranks, wanted, own in about["shared"]:
        names = list(own)
        for rank in ranks:
            part = record.parts.get(rank)
            if part is not None:
                of_rank = _of_rank(record, part, rank, about["optimizer"], ranks, wanted)
                names += of_rank.gradients
                found.gradients |= of_rank.gradients
                found.lossy = found.lossy or of_rank.lossy
        if len(names) != len(set(names)) or names_digest(names) != wanted:
            raise ValueError(f"gradients that rank(s) {ranks} consumed alike are missing")
    return found


def own_part(update: Update, record: LogRecord, names: Collection[str]) -> Update:
    """The gradients of some parameters, out of what this rank alone has recorded of an update.

    Args:
        names: of the parameters.

    Raises:
        FormatError: one of them is in another rank's log.
    """
    if PART_OBJECT in record.objects:
        about: Any = decode(record.objects[PART_OBJECT])
        there = {*update.gradients, *about.get("resting", ())}
        if lost := sorted(set(names) - there):
            raise FormatError(f"{record.head}: another rank has the gradient of {lost[0]!r}")
    mine = {name: gradient for name, gradient in update.gradients.items() if name in names}
    return replace(update, gradients=mine)


def _of_rank(
    record: LogRecord, part: LogRecord, rank: int, optimizer: str, ranks: Any, wanted: str
) -> OfOthers:
    """Of one rank's part."""
    head = record.head
    other = part.head
    if (other.kind, other.timeline, other.step, other.lsn) != (
        head.kind,
        head.timeline,
        head.step,
        head.lsn,
    ):
        raise ValueError(f"rank {rank} has {other}")
    about: Any = decode(part.objects[PART_OBJECT])
    if about["optimizer"] != optimizer:
        raise ValueError(f"rank {rank} has an update of {about['optimizer']!r}")
    said = [(digest, names) for alike, digest, names in about["shared"] if alike == ranks]
    if len(said) != 1 or said[0][0] != wanted:
        raise ValueError(f"rank {rank} has consumed the gradients of other parameters")
    tensors = {place.entry.name: tensor_of(part, place) for place in part.layout.placed}
    gradients = {name: gradient_of(name, about, tensors) for name in said[0][1]}
    return OfOthers(gradients, bool(about.get("lossy", False)))
