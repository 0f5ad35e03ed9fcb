"""Updates of the log as replay takes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.errors import FormatError, MismatchError, ReplayError
from everstep.format.log import LogRecord
from everstep.replay.exactness import kind_name, replay_kind
from everstep.replay.packed import Gradient
from everstep.replay.updates import Update
from everstep.restore.redo.gradients import gradient_of, gradients_of
from everstep.run.tensors import tensor_of
from everstep.state.layout.names import HYPER, PART_OBJECT, UPDATE_OBJECT
from everstep.state.ranks.log_shares import names_digest
from everstep.state.values.objects import decode
from everstep.state.values.tensors import torch_dtype
from everstep.state.values.tree import join

__all__ = [
    "SharedGradients",
    "UnknownClassError",
    "gradients_from_other_ranks",
    "own_share",
    "replay_class",
    "update_from_record",
]

_DEFAULT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # torch's choice


def update_from_record(record: LogRecord, *, own: bool = False) -> Update:
    """An update as replay takes it, put together from all ranks' parts where there are such.

    Args:
        own: without what other ranks have recorded.

    Raises:
        FormatError: it is none, or a part is missing.
    """
    try:
        in_parts = PART_OBJECT in record.objects
        about: Any = decode(record.objects[PART_OBJECT if in_parts else UPDATE_OBJECT])
        tensors = {place.entry.name: tensor_of(record, place) for place in record.layout.placed}
        hyper: dict[str, Any] = {
            name: t for name, t in tensors.items() if name.startswith(HYPER + "/")
        }
        gradients = gradients_of(about, tensors)
        lossy = bool(about.get("lossy", False))
        # What each rank updates by itself takes nothing else; in other parts it does
        # (docs/design/ranks.md).
        own = own or (bool(about.get("spread", False)) and not record.parts)
        if in_parts and not own:
            others = gradients_from_other_ranks(record, about)
            gradients |= others.gradients
            lossy = lossy or others.lossy
        return Update(
            lsn=record.head.lsn,
            optimizer=str(about["optimizer"]),
            groups=tuple(_mapping(join(group, hyper)) for group in about["groups"]),
            gradients=gradients,
            grad_scale=tensors.get("grad_scale"),
            found_inf=tensors.get("found_inf"),
            lossy=lossy,
            kind=str(about.get("kind") or ""),
            default_dtype=_floating(about.get("default_dtype")),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"{record.head} is no record of an update: {error!r}") from error


def replay_class(update: Update, mine: type[Optimizer]) -> tuple[type[Optimizer] | None, str]:
    """The class whose ``step()`` redoes an update, and why it need not do what the one did that
    made it; "" if it is that one, or the record does not say which it was.

    None: nobody here knows that one. Where one of the two is torch's, the other one is another for
    certain. Classes of users' own may have been renamed, or moved to another module, since.

    Args:
        mine: of the optimizer that is here.
    """
    theirs = update.kind
    name = kind_name(mine)
    found = replay_kind(theirs)
    if not theirs or theirs == name or found is mine:
        return mine, ""
    why = f"{update.optimizer!r} was a {theirs} in training, and is a {name} here"
    if not any(one.startswith("torch.optim.") for one in (theirs, name)):
        return mine, why
    return (None, why) if found is None else (found, "")


def _floating(code: Any) -> torch.dtype | None:
    if code is None:
        return None
    dtype = torch_dtype(code)
    if dtype not in _DEFAULT_DTYPES:
        raise ValueError(f"{dtype} is no default dtype")
    return dtype


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"options of a group are no {type(value).__name__}")
    return value


@dataclass(slots=True)
class SharedGradients:
    """What other ranks have recorded of an update.

    Attributes:
        gradients: by name of the parameter.
        lossy: one of the records says that its gradients are not what training consumed.
    """

    gradients: dict[str, Gradient] = field(default_factory=dict)
    lossy: bool = False


def gradients_from_other_ranks(record: LogRecord, about: Mapping[str, Any]) -> SharedGradients:
    """The gradients of an update that other ranks have recorded: with this rank's all that it
    consumed, and each once.

    Args:
        about: what the record says of the update.

    Raises:
        AttributeError, LookupError, TypeError, ValueError: it is no such record, or parts of it are
            missing, or are of another update.
        FormatError: a compressed gradient is none.
    """
    found = SharedGradients()
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


def own_share(update: Update, record: LogRecord, names: Collection[str]) -> Update:
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
) -> SharedGradients:
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
    return SharedGradients(gradients, bool(about.get("lossy", False)))


class UnknownClassError(ReplayError):
    """What an update has done nobody here can know: the log names another class for it than the
    optimizer has, and that is not at hand.

    Attributes:
        optimizer: its key in the state.
    """

    def __init__(self, message: str, *, step: int, optimizer: str) -> None:
        super().__init__(message, step=step)
        self.optimizer = optimizer

    def refused(self, before: int, path: PurePath) -> MismatchError:
        """The error where no step may be left out.

        Args:
            before: the step that can be gone on from all the same.
            path: of the base.
        """
        return MismatchError(
            f"from step {self.step} on the log cannot be replayed: {self.message}",
            mismatches=((self.optimizer, "updates of a class that is not known here"),),
            step=self.step,
            path=path,
            hint="declare that class here, too (everstep.replay.exactness.declare): it replays its "
            "log then; or resume() once with an optimizer of that class, and save(); or "
            f"resume(strict=False) to continue from step {before}",
        )
