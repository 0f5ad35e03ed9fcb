"""An update of which each rank has recorded a part (``adr/029``): what goes with a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from everstep.format.log import LogRecord
from everstep.recover.tensors import tensor_of
from everstep.state.log import GRADIENT, PART_OBJECT
from everstep.state.log_parts import digest_of_names
from everstep.state.objects import decode

__all__ = ["gradients_of_others"]


def gradients_of_others(record: LogRecord, about: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients of an update that other ranks have recorded, by name of the parameter: with
    this rank's all that it consumed, and each once.

    Args:
        about: what the record says of the update.

    Raises:
        LookupError, TypeError, ValueError: it is no such record, or parts of it are missing, or
            are of another update.
    """
    found: dict[str, torch.Tensor] = {}
    for ranks, wanted, own in about["shared"]:
        names = list(own)
        for rank in ranks:
            part = record.parts.get(rank)
            if part is not None:
                tensors = _gradients(record, part, rank, about["optimizer"], ranks, wanted)
                names += tensors
                found |= tensors
        if len(names) != len(set(names)) or digest_of_names(names) != wanted:
            raise ValueError(f"gradients that rank(s) {ranks} consumed alike are missing")
    return found


def _gradients(
    record: LogRecord, part: LogRecord, rank: int, optimizer: str, ranks: Any, wanted: str
) -> dict[str, torch.Tensor]:
    """Of one rank's part."""
    head, other = record.head, part.head
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
    return {name: tensors[GRADIENT + name] for name in said[0][1]}
