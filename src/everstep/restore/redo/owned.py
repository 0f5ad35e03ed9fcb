"""Entries of a base that belong to optimizers, found from its object trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.values.objects import TensorRef
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
