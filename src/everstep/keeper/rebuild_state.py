"""Brings the parts of a base to one step, in the memory that they were captured into.

The only part of a keeper process, beside a replica, that needs torch; imported when a base is
captured over several steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.arena.memory import Arena
from everstep.format.header import ShardIdentity
from everstep.format.log import LogRecord, RecordHead, record_digest
from everstep.format.plan import BasePlan
from everstep.format.records import TimelineRecord
from everstep.keeper.assembly import Assembly
from everstep.keeper.capture import Capture, shard_offsets
from everstep.keeper.log import LoggedStep
from everstep.keeper.replica_state import ReplicaState
from everstep.keeper.samples import check_samples
from everstep.state.image import OBJECT_PREFIX
from everstep.state.layout import Placed, ShardLayout
from everstep.state.objects import decode
from everstep.state.optimizers import OptimizerProvider
from everstep.state.tree import references

__all__ = ["rebuild"]


def rebuild(
    capture: Capture,
    arena: Arena,
    objects: Mapping[str, bytes],
    assembly: Assembly,
    trained: TimelineRecord | None,
    *,
    threads: int,
) -> tuple[ShardIdentity, Mapping[str, bytes]]:
    """Makes the block of a base the state of its step; the block is updated in place.

    It is a replica to which its log is applied once: an update that an entry had seen before it was
    captured has no gradient for it, and so leaves it as it is (GoCkpt 4.3.1).

    Args:
        capture: with the identity of the last step.
        arena: that block and updates are in.
        objects: encoded objects of the last step mark.
        trained: the record of the timeline: where updates were computed.
        threads: Python threads that share the work.

    Returns:
        What identifies the base, and its objects.

    Raises:
        AuditError: what replay gives is not what the live state was.
        EverstepError: an update does not fit; the block is of no use then.
    """
    plan, identity = capture.plan, capture.plan.identity
    _, size_bytes = shard_offsets(plan)
    memory = arena.view[capture.offset : capture.offset + size_bytes]
    state = ReplicaState(plan, memory, objects, trained, threads=threads)
    layout, data = _options_of_groups(plan, memory, objects)
    head = RecordHead(
        "mark", identity.timeline, identity.step, identity.lsn, assembly.shape, identity.exact
    )
    mark = LogRecord(head, layout, objects, data, record_digest(data, objects))
    updates = []
    for update in assembly.updates:
        body = arena.view[update.offset : update.offset + update.layout.size_bytes]
        found = record_digest(body, update.objects)
        updates.append(LogRecord(update.head, update.layout, update.objects, body, found))
    state.advance([LoggedStep(tuple(updates), mark, 0)])
    made, objects = state.settle()
    if not state.why:
        check_samples(assembly.samples, plan, memory, identity.step)
    return made, objects


def _options_of_groups(
    plan: BasePlan, memory: memoryview, objects: Mapping[str, bytes]
) -> tuple[ShardLayout, memoryview]:
    """Hyperparameters that are tensors, as they are at the last step mark: replay puts those of the
    last update in their place, which a scheduler may have changed since."""
    aliases: dict[str, str] = {}
    places: dict[str, tuple[Placed, int]] = {}
    for shard, offset in zip(plan.shards, shard_offsets(plan)[0], strict=True):
        aliases.update(shard.aliases)
        places |= {place.entry.name: (place, offset) for place in shard.layout.placed}
    names: dict[str, None] = {}
    for name, encoded in objects.items():
        tree: Any = decode(encoded) if name.startswith(OBJECT_PREFIX) else None
        if OptimizerProvider.groups_of(tree) is not None:
            found = references(tree["param_groups"])
            names |= dict.fromkeys(aliases.get(reference, reference) for reference in found)
    placed, data = [], bytearray()
    for name in names:
        place, offset = places[name]
        begin = len(data)
        data += memory[offset + place.begin : offset + place.end]
        placed.append(Placed(place.entry, begin, len(data)))
        data += bytes(-len(data) % 16)  # each where it can be read as a tensor
    return ShardLayout(tuple(placed)), memoryview(data)
