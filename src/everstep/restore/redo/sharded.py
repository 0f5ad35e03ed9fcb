"""Replay of an optimizer whose parameters are spread over ranks: of this rank's parts; and of one
that is of another class than the one whose updates they are.

What an optimizer that acts element by element does to a DTensor, it does to the part that each
rank holds, with the same kernels. So a rank replays over plain tensors: its parts of parameters and
state, and those of the gradients, as its log has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.replay.engine import Replayer
from everstep.state.layout.entries import Entry
from everstep.state.values.tensors import is_dtensor, local_tensor, tensor_entry

__all__ = ["as_live", "replayer_of"]


_NONE: Mapping[str, str] = MappingProxyType({})


def replayer_of(
    optimizer: Optimizer,
    names: Mapping[int, str],
    *,
    kind: type[Optimizer] | None = None,
    threads: int,
    fast: bool = False,
    relaid: Mapping[str, str] = _NONE,
) -> Replayer:
    """What replays updates of a live optimizer, in place.

    Args:
        names: of all of its parameters, by ``id(parameter)``.
        kind: whose updates these are; None: its own class's.
        threads, fast, relaid: as for :class:`~everstep.replay.engine.Replayer`.

    Raises:
        UnsupportedStateError: it cannot be replayed; says why.
        ReplayError: its parameters and state do not fit together.
    """
    members = [list(group["params"]) for group in optimizer.param_groups]
    parameters = [parameter for group in members for parameter in group]
    kind = kind or type(optimizer)
    if kind is type(optimizer) and not any(map(is_dtensor, parameters)):
        return Replayer.of(optimizer, names, threads=threads, fast=fast, relaid=relaid)
    state: dict[str, dict[str, Any]] = {}
    for parameter in parameters:
        values = optimizer.state.get(parameter, {})
        state[names[id(parameter)]] = {
            key: local_tensor(value) if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }
    return Replayer(
        kind,
        [[names[id(parameter)] for parameter in group] for group in members],
        {names[id(parameter)]: local_tensor(parameter) for parameter in parameters},
        state,
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        threads=threads,
        training_threads=torch.get_num_threads(),
        fast=fast,
        relaid=relaid,
    )


def as_live(logged: Entry, live: torch.Tensor | None) -> Entry:
    """The entry of a whole tensor of which a mark holds this rank's part."""
    if live is None or not is_dtensor(live):
        return logged
    part = tensor_entry(logged.name, local_tensor(live))
    fits = (part.shape, part.dtype) == (logged.shape, logged.dtype)
    return tensor_entry(logged.name, live) if fits else logged
