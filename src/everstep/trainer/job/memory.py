"""Bases that only the memory of keepers has, when several ranks resume.

A base that is no longer, or not yet, on disk can be restored if the keepers of all ranks hold it.
Replicas (LowDiff VI-C) stand at different steps: the ranks agree on the newest step that all of
them can reach, and each keeper freezes its replica there. Where every step is captured (Checkflow)
keepers hold several captures, and the ranks agree on the newest that all have. Ranks that share
tensors write a part of them each, and read all parts: those of the other ranks from the keepers of
their machine.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from everstep.commit import BaseId
from everstep.errors import EverstepError
from everstep.look.keeper_memory import read_keeper_memory
from everstep.restore.fetch import HeldBase, ReplicaReach, common_step
from everstep.restore.start import ResumeRequest
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.job.run_folder import Exchange

_log = logging.getLogger("everstep")


def memory_of(request: ResumeRequest) -> dict[str, Any]:
    """Return what this rank tells the others about the memory of its keeper, as message fields."""
    replica = request.recalled.replica if request.step is None else None
    base = request.recalled.base
    only_here = None if base is None or base.durable else base
    if not request.restores:
        return {"replica": None, "captures": [], "held": None}
    captures = request.recalled.captures if request.step is None else ()
    return {
        "replica": None if replica is None else dataclasses.astuple(replica),
        "captures": [[one.timeline, one.step] for one in captures],
        "held": _id_to_wire(only_here),
    }


def with_memory(
    request: ResumeRequest,
    keeper: Keepers,
    exchange: Exchange,
    found: Sequence[Mapping[str, Any]],
    run_id: str,
    rank: int,
    near: Collection[int],
) -> ResumeRequest:
    """Add the states of the replicas, frozen at the newest step that all ranks reach, or the newest
    captures that all ranks have, and the shares that other ranks of this machine have of the base
    in this rank's memory.

    Then nothing is replayed. If not all ranks reach such a step, bases and logs are restored.

    Args:
        exchange: sends a message to all ranks, and returns theirs.
        found: message of each rank, with the fields of :func:`memory_of`.
        near: ranks of this machine.
    """
    held = [message["held"] for message in found]
    if (base := _state_of_one_step(keeper, exchange, found)) is not None:
        held = [_id_to_wire(base)] * len(found)
        request = replace(request, recalled=replace(request.recalled, base=base))
    is_shared = any(message["shared"] for message in found)
    if is_shared and held[0] is not None and held.count(held[0]) == len(held):
        nearby = _shares_nearby(request, BaseId(*held[0]), run_id, [r for r in near if r != rank])
        request = replace(request, recalled=replace(request.recalled, nearby=nearby))
    return request


def _state_of_one_step(
    keeper: Keepers, exchange: Exchange, found: Sequence[Mapping[str, Any]]
) -> HeldBase | None:
    """Return this rank's state of the step on which all ranks agree; None if not all have it.

    Arguments as for :func:`with_memory`.
    """
    replicated = _agreed(found)
    agreed = replicated or _common_capture(found)
    if agreed is None:
        return None
    base = keeper.hold_at(agreed)
    if replicated is not None and base is not None and not base.marker.exact:
        base = None  # the replica does not have the bits of training
    frozen = exchange("hold the state of one step", {"held": _id_to_wire(base)})
    there = all(message["held"] == [agreed.timeline, agreed.step] for message in frozen)
    return base if there else None


def _agreed(found: Sequence[Mapping[str, Any]]) -> BaseId | None:
    """Return the step at which all ranks freeze their replicas; the same on every rank."""
    replicas = [message["replica"] for message in found]
    step = common_step([None if one is None else ReplicaReach(*one) for one in replicas])
    if step is None:
        return None
    agreed = BaseId(replicas[0][0], step)
    # The frozen state would take the place of a base that may be the only copy of a later step.
    held = (message["held"] for message in found)
    return None if any(one is not None and BaseId(*one) >= agreed for one in held) else agreed


def _common_capture(found: Sequence[Mapping[str, Any]]) -> BaseId | None:
    """Return the newest capture that all ranks have, unless all have it as their newest; the same
    on every rank."""
    captures = [{BaseId(*one) for one in message["captures"]} for message in found]
    common = max(set.intersection(*captures), default=None)
    if common is None or all(max(mine) == common for mine in captures):
        return None
    return common


def _shares_nearby(
    request: ResumeRequest, base: BaseId, run_id: str, ranks: Collection[int]
) -> tuple[HeldBase, ...]:
    try:
        memory, _ = read_keeper_memory(request.seams.filesystem, request.run, run_id, ranks=ranks)
    # Without them, the base is read from elsewhere, or another one is chosen.
    except (EverstepError, OSError) as error:
        _log.warning("the memory of other ranks' keepers is not read: %s", error)
        return ()
    held = [one.recalled.base for one in memory.values()]
    return tuple(one for one in held if one is not None and one.id == base)


def _id_to_wire(base: HeldBase | None) -> list[int] | None:
    return None if base is None else [base.id.timeline, base.id.step]
