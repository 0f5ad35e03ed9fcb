"""Shape digest of a base, which the gradient log is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from everstep.state.layout.entries import shape_digest
from everstep.state.layout.names import OBJECT_PREFIX
from everstep.state.layout.shards import Placed
from everstep.state.providers.optimizers import OptimizerProvider


def shape_of_base(
    placed: Iterable[Placed], aliases: Mapping[str, str], trees: Mapping[str, Any]
) -> str:
    """Return the shape digest of a base (see :mod:`everstep.state.layout.entries`).

    Args:
        placed: entries of the base; objects are ignored.
        aliases: other names of tensors, and the names of their entries.
        trees: decoded objects by section.
    """
    entries = [p.entry for p in placed if not p.entry.name.startswith(OBJECT_PREFIX)]
    groups = {}
    for section, tree in trees.items():
        names = OptimizerProvider.groups_of(tree)
        if names is not None:
            groups[section] = names
    return shape_digest(entries, aliases, groups)
