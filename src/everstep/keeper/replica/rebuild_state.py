"""Brings the parts of a base to one step, in the memory that they were captured into.

The only part of a keeper process, beside a replica, that needs torch; imported when a base is
captured over several steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.arena.memory import Arena
from everstep.format.header import ShardIdentity
from everstep.format.log import LogRecord, RecordHead, record_digest
from everstep.format.records import TimelineRecord
from everstep.keeper.log.log import LoggedStep
from everstep.keeper.replica.group_options import laid_out, options_of_groups
from everstep.keeper.replica.replica_state import ReplicaState
from everstep.link.assembly import Assembly
from everstep.link.capture import Capture, shard_offsets
from everstep.link.samples import check_samples

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
    plan = capture.plan
    identity = capture.plan.identity
    _, size_bytes = shard_offsets(plan)
    memory = arena.view[capture.offset : capture.offset + size_bytes]
    state = ReplicaState(plan, memory, objects, trained, threads=threads)
    layout, options = laid_out(options_of_groups(plan, memory, objects))
    data = memoryview(options)
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
