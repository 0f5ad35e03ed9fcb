"""Objects of optimizers of which each rank has the state of its own parameters (ZeRO), put together
from what all of these ranks have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.errors import FormatError
from everstep.format.log import LogRecord
from everstep.state.layout.names import OBJECT_PREFIX
from everstep.state.layout.placement import Placement
from everstep.state.providers.zero import PARTITIONED
from everstep.state.values.objects import decode, encode

__all__ = ["RankObjects", "is_partitioned", "merge_zero_objects", "merged_object"]

RankObjects = Mapping[int, Mapping[str, bytes]]
"""Encoded objects by rank and entry name."""


def is_partitioned(tree: object) -> bool:
    """Whether a section's objects are one rank's part."""
    return isinstance(tree, dict) and PARTITIONED in tree


def merged_object(tree: Mapping[str, Any], state: Mapping[str, Any], section: str) -> bytes:
    """A section's objects with the state of all parameters, encoded: the same on all ranks that
    have the same groups.

    Args:
        tree: of one rank.
        state: of all of them, by parameter.
    """
    rest = {key: value for key, value in tree.items() if key != PARTITIONED}
    return encode({**rest, "state": dict(sorted(state.items()))}, section)


def merge_zero_objects(marks: Mapping[int, LogRecord]) -> tuple[RankObjects, RankObjects]:
    """Of the marks of all ranks what is in parts: whole, and as each rank has it.

    Args:
        marks: of one step, by rank.

    Raises:
        FormatError: parts are missing, or two ranks have the state of one parameter.
    """
    whole: dict[int, dict[str, bytes]] = {rank: {} for rank in marks}
    parts: dict[int, dict[str, bytes]] = {rank: {} for rank in marks}
    trees: dict[int, dict[str, Any]] = {rank: {} for rank in marks}
    for rank, mark in marks.items():
        for name, data in mark.objects.items():
            if PARTITIONED.encode() in data and is_partitioned(tree := decode(data)):
                trees[rank][name] = tree
                parts[rank][name] = data
    states: dict[tuple[str, str], dict[str, Any]] = {}
    for rank, mine in trees.items():
        for name, tree in mine.items():
            of = name, tree[PARTITIONED]
            if of not in states:
                ranks = Placement.parse(tree[PARTITIONED]).ranks
                states[of] = _state(name, tuple(marks) if ranks is None else ranks, trees, marks)
            section = name.removeprefix(OBJECT_PREFIX)
            whole[rank][name] = merged_object(tree, states[of], section)
    return whole, parts


def _state(
    name: str,
    ranks: tuple[int, ...],
    trees: Mapping[int, Mapping[str, Any]],
    marks: Mapping[int, LogRecord],
) -> dict[str, Any]:
    """The state of all parameters, by name."""
    found: dict[str, Any] = {}
    for rank in ranks:
        tree = trees.get(rank, {}).get(name)
        if not isinstance(tree, dict) or not isinstance(tree.get("state"), dict):
            raise FormatError(f"rank {rank} has no part of {name!r} in its mark")
        if twice := found.keys() & tree["state"].keys():
            where = marks[rank].head
            raise FormatError(f"rank {rank}, {where}: another one has the state of {min(twice)!r}")
        found |= tree["state"]
    return found
