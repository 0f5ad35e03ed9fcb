"""Bases over several steps that whoever restores them makes whole: their redo file. Without torch.

Parts stay as they were captured, each with the number of the last update that it has seen; the
gradients since go into one more file of the same base, in the form of a segment of the log. So the
base is committed when all of it is durable, is verified, copied and deleted with it, and needs
nothing from outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from everstep.arena.memory import Arena
from everstep.errors import KeeperError
from everstep.format.log import LogRecord, RecordHead, plan_segment, record_digest
from everstep.format.names import shard_name
from everstep.format.plan import BasePlan
from everstep.link.assembly import Assembly, FuzzyParts
from everstep.link.capture import Capture, RedoFile

__all__ = ["leave_fuzzy"]


def leave_fuzzy(
    capture: Capture,
    arena: Arena,
    objects: Mapping[str, bytes],
    assembly: Assembly,
    fuzzy: FuzzyParts,
) -> None:
    """Gives a base its redo file, and its parts the updates that they have seen.

    Args:
        capture: with the identity of the last step.
        arena: that block and updates are in; they stay there until the base is needed no more.
        objects: encoded objects of the last step mark.

    Raises:
        KeeperError: updates are missing that would bring the parts to that step (I3, I4).
    """
    identity = capture.plan.identity
    lsns = {name: lsn for lsn, names in fuzzy.seen for name in names if lsn < identity.lsn}
    _check_complete(assembly, min(lsns.values(), default=identity.lsn), identity.lsn)
    records: list[LogRecord] = []
    places: dict[str, int] = {}
    for number, update in enumerate(assembly.updates):
        data = arena.view[update.offset : update.offset + update.layout.size_bytes]
        digest = record_digest(data, update.objects)
        records.append(LogRecord(update.head, update.layout, update.objects, data, digest))
        for place in update.layout.placed:
            name = f"{number:06d}/{place.entry.dtype}"
            places.setdefault(name, update.offset + place.begin)
    head = RecordHead(
        "mark", identity.timeline, identity.step, identity.lsn, assembly.shape, identity.exact
    )
    data = memoryview(fuzzy.data)
    records.append(LogRecord(head, fuzzy.layout, objects, data, record_digest(data, objects)))
    plan, body = plan_segment(identity, records)
    plan = dataclasses.replace(plan, name=shard_name(identity.rank, len(capture.plan.shards)))
    parts: list[tuple[int, int] | bytes] = []
    for place in plan.layout.placed:
        begin = places.get(place.entry.name)
        size = place.end - place.begin
        parts.append(body.source(place.entry.name) if begin is None else (begin, size))
    capture.redo = RedoFile(plan, body, tuple(parts))
    capture.plan = _of_several_updates(capture.plan, lsns)


def _check_complete(assembly: Assembly, first: int, last: int) -> None:
    found = [update.head.lsn for update in assembly.updates]
    if found != list(range(first + 1, last + 1)):
        raise KeeperError(
            f"a base of update {last}, with parts of update {first} on, came with the updates "
            f"{found}: it cannot be made whole"
        )


def _of_several_updates(plan: BasePlan, lsns: Mapping[str, int]) -> BasePlan:
    """The plan of a base whose entries ``lsns`` are of these updates. What they hold is compared
    with no other base, but for what never changes."""
    shards = []
    for shard in plan.shards:
        names = [place.entry.name for place in shard.layout.placed]
        mine = {name: lsns[name] for name in names if name in lsns}
        shards.append(dataclasses.replace(shard, lsns=mine))
    kinds = {name: k for name, k in plan.kinds.items() if name not in lsns or k == "static"}
    return BasePlan(plan.identity, tuple(shards), kinds)
