"""Entries of a base that belong to optimizers, found from its object trees.

Optimizer objects that ZeRO distributes over ranks, merged from all of them.

Each rank of a ZeroRedundancyOptimizer has the state of its own parameters only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from everstep.errors import FormatError
from everstep.format.log import LogRecord
from everstep.state.layout import OBJECT_PREFIX, Placement
from everstep.state.providers import PARTITIONED, OptimizerProvider
from everstep.state.values.objects import TensorRef, decode, encode
from everstep.state.values.tree import references


def owned_entries(trees: Mapping[str, Any], canonical: Callable[[str], str]) -> set[str]:
    """Return the entries that are a parameter or a state tensor of any optimizer. Arguments as for
    :func:`parameter_names`."""
    parameters = parameter_names(trees, canonical)
    found = set[str]()
    for tree in trees.values():
        groups = OptimizerProvider.groups_of(tree)
        if groups is not None:
            for group in groups:
                for name in group:
                    found |= parameters.get(name, set())
            found |= {canonical(name) for name in references(tree["state"])}
    return found


def parameter_names(
    trees: Mapping[str, Any], canonical: Callable[[str], str]
) -> dict[str, set[str]]:
    """Map the names under which optimizers refer to parameters (``"section.key"``) to entries.

    Args:
        trees: object trees of modules and optimizers, by section.
        canonical: function from any name of a tensor to its entry name.
    """
    found: dict[str, set[str]] = {}
    for section, tree in trees.items():
        if not isinstance(tree, dict) or OptimizerProvider.groups_of(tree) is not None:
            continue
        for key, value in tree.items():
            if isinstance(key, str) and isinstance(value, TensorRef):
                found.setdefault(f"{section}.{key}", set()).add(canonical(value.name))
    return found


RankObjects = Mapping[int, Mapping[str, bytes]]
"""Encoded objects by rank and entry name."""


def is_partitioned(tree: object) -> bool:
    """Return True if a section's objects hold the state of one rank's parameters only."""
    return isinstance(tree, dict) and PARTITIONED in tree


def merged_object(tree: Mapping[str, Any], state: Mapping[str, Any], section: str) -> bytes:
    """Encode a section's objects with the state of all parameters. Ranks with equal groups get
    equal bytes.

    Args:
        tree: object tree of one rank.
        state: state of all parameters, by parameter name.
        section: name of the section.
    """
    rest = {key: value for key, value in tree.items() if key != PARTITIONED}
    return encode({**rest, "state": dict(sorted(state.items()))}, section)


def merge_zero_objects(marks: Mapping[int, LogRecord]) -> tuple[RankObjects, RankObjects]:
    """Merge the distributed objects in the marks of all ranks.

    Args:
        marks: marks of one step, by rank.

    Returns:
        The distributed objects merged, and as each rank has them; both by rank and entry name.

    Raises:
        FormatError: a rank's objects are missing, or two ranks have the state of one parameter.
    """
    merged: dict[int, dict[str, bytes]] = {rank: {} for rank in marks}
    own: dict[int, dict[str, bytes]] = {rank: {} for rank in marks}
    trees: dict[int, dict[str, Any]] = {rank: {} for rank in marks}
    for rank, mark in marks.items():
        for name, data in mark.objects.items():
            # The cheap test on the bytes spares decoding all other objects.
            if PARTITIONED.encode() in data and is_partitioned(tree := decode(data)):
                trees[rank][name] = tree
                own[rank][name] = data
    states: dict[tuple[str, str], dict[str, Any]] = {}
    for rank, mine in trees.items():
        for name, tree in mine.items():
            group = (name, tree[PARTITIONED])
            if group not in states:
                ranks = Placement.parse(tree[PARTITIONED]).ranks
                states[group] = _state(name, tuple(marks) if ranks is None else ranks, trees, marks)
            section = name.removeprefix(OBJECT_PREFIX)
            merged[rank][name] = merged_object(tree, states[group], section)
    return merged, own


def _state(
    name: str,
    ranks: tuple[int, ...],
    trees: Mapping[int, Mapping[str, Any]],
    marks: Mapping[int, LogRecord],
) -> dict[str, Any]:
    """Collect the state of all parameters, by name."""
    found: dict[str, Any] = {}
    for rank in ranks:
        tree = trees.get(rank, {}).get(name)
        if not isinstance(tree, dict) or not isinstance(tree.get("state"), dict):
            raise FormatError(f"the mark of rank {rank} has no state of {name!r}")
        if twice := found.keys() & tree["state"].keys():
            where = marks[rank].head
            raise FormatError(f"rank {rank}, {where}: two ranks have the state of {min(twice)!r}")
        found |= tree["state"]
    return found
