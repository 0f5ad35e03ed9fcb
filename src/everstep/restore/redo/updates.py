"""Updates of the log as replay takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from everstep.errors import FormatError
from everstep.format.log import LogRecord
from everstep.replay.exactness import kind_name, replay_kind
from everstep.replay.updates import Update
from everstep.restore.redo.gradients import gradients_of
from everstep.restore.redo.parts import gradients_of_others
from everstep.run.tensors import tensor_of
from everstep.state.layout.names import HYPER, PART_OBJECT, UPDATE_OBJECT
from everstep.state.values.objects import decode
from everstep.state.values.tensors import torch_dtype
from everstep.state.values.tree import join

__all__ = ["class_for", "update_of"]

_DEFAULT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # torch's choice


def update_of(record: LogRecord, *, own: bool = False) -> Update:
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
            others = gradients_of_others(record, about)
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


def class_for(update: Update, mine: type[Optimizer]) -> tuple[type[Optimizer] | None, str]:
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
