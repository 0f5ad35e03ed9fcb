"""Hyperparameters that are tensors, as a base has them: what a mark holds of them for replay.

Replay puts those of the last update in their place, which a scheduler may have changed since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.format.plan import BasePlan
from everstep.link.capture import shard_offsets
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_PREFIX
from everstep.state.layout.shards import Placed, ShardLayout, plan_shards
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.values.objects import decode
from everstep.state.values.tree import references

__all__ = ["laid_out", "options_of_groups"]

Tensors = Mapping[str, tuple[Entry, memoryview]]
"""Entries and their bytes, by name."""


def options_of_groups(
    plan: BasePlan, memory: memoryview, objects: Mapping[str, bytes]
) -> dict[str, tuple[Entry, memoryview]]:
    """Those of all optimizers.

    Args:
        memory: a base's block.
        objects: encoded objects of the same step.
    """
    aliases: dict[str, str] = {}
    places: dict[str, tuple[Placed, int]] = {}
    for shard, offset in zip(plan.shards, shard_offsets(plan)[0], strict=True):
        aliases.update(shard.aliases)
        places |= {place.entry.name: (place, offset) for place in shard.layout.placed}
    found: dict[str, tuple[Entry, memoryview]] = {}
    for name, encoded in objects.items():
        tree: Any = decode(encoded) if name.startswith(OBJECT_PREFIX) else None
        if OptimizerProvider.groups_of(tree) is None:
            continue
        for reference in references(tree["param_groups"]):
            place, offset = places[aliases.get(reference, reference)]
            data = memory[offset + place.begin : offset + place.end]
            found[place.entry.name] = place.entry, data
    return found


def laid_out(tensors: Tensors) -> tuple[ShardLayout, bytes]:
    """Tensors as the data of a record: all of a dtype side by side, without holes."""
    entries = sorted((entry for entry, _ in tensors.values()), key=lambda entry: entry.dtype)
    (layout,) = plan_shards(entries, header_bytes_max=1 << 62)
    return layout, b"".join(tensors[place.entry.name][1] for place in layout.placed)
