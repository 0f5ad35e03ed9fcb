"""Hyperparameters that are tensors, read from a base: a step mark carries them for replay.

A scheduler may have changed them since the last update; replay sets them to the values of the mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.format import BasePlan
from everstep.link.capture import shard_offsets
from everstep.state.layout import OBJECT_PREFIX, Entry, Placed, ShardLayout
from everstep.state.layout.shards import plan_shards
from everstep.state.providers import OptimizerProvider
from everstep.state.values.objects import decode
from everstep.state.values.tree import references

Tensors = Mapping[str, tuple[Entry, memoryview]]
"""Entries and their bytes, by name."""


def tensor_hyperparameters(
    plan: BasePlan, memory: memoryview, objects: Mapping[str, bytes]
) -> dict[str, tuple[Entry, memoryview]]:
    """Return the tensor hyperparameters of all optimizers, by entry name.

    Args:
        memory: memory block of a base.
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


def pack_tensors(tensors: Tensors) -> tuple[ShardLayout, bytes]:
    """Lay tensors out as the data of a record: all of one dtype together, without gaps."""
    entries = sorted((entry for entry, _ in tensors.values()), key=lambda entry: entry.dtype)
    # Without a limit of the header, so that there is one layout.
    (layout,) = plan_shards(entries, header_bytes_max=1 << 62)
    return layout, b"".join(tensors[place.entry.name][1] for place in layout.placed)
