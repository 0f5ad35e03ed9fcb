"""Redo file of a fuzzy multi-step base: the gradients that bring its parts to one step at restore.

The parts stay as they were captured, each with the number of the last update it has seen. The later
gradients go into one more file of the same base, in the format of a log segment. So the base
commits when all of it is durable; it is verified, copied and deleted with it, and depends on
nothing outside. Needs no torch.
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


def add_redo_file(
    capture: Capture,
    arena: Arena,
    objects: Mapping[str, bytes],
    assembly: Assembly,
    fuzzy: FuzzyParts,
) -> None:
    """Add the redo file to a base, and to its parts the last updates that they have seen.

    Args:
        capture: base with the identity of the last step.
        arena: memory of the base and the updates; they stay there until the base is released.
        objects: encoded objects of the last step mark.

    Raises:
        KeeperError: updates are missing that would bring the parts to that step (I3, I4).
    """
    identity = capture.plan.identity
    lsns = {name: lsn for lsn, names in fuzzy.seen for name in names if lsn < identity.lsn}
    # Before the capture is changed: an incomplete base must not get a redo file.
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
    # Updates are written from the arena without a copy; the rest comes from the plan's body.
    slices: list[tuple[int, int] | bytes] = []
    for place in plan.layout.placed:
        begin = places.get(place.entry.name)
        size = place.end - place.begin
        slices.append(body.source(place.entry.name) if begin is None else (begin, size))
    capture.redo = RedoFile(plan, body, tuple(slices))
    capture.plan = _of_several_updates(capture.plan, lsns)


def _check_complete(assembly: Assembly, first: int, last: int) -> None:
    found = [update.head.lsn for update in assembly.updates]
    if found != list(range(first + 1, last + 1)):
        raise KeeperError(
            f"a base of update {last} with parts captured from update {first} on was received "
            f"with the updates {found}: it cannot be completed"
        )


def _of_several_updates(plan: BasePlan, lsns: Mapping[str, int]) -> BasePlan:
    """Return the plan of a base in which the entries ``lsns`` have seen different updates.

    The digest audit compares such entries with no other base, except those that never change.
    """
    shards = []
    for shard in plan.shards:
        names = [place.entry.name for place in shard.layout.placed]
        mine = {name: lsns[name] for name in names if name in lsns}
        shards.append(dataclasses.replace(shard, lsns=mine))
    kinds = {name: k for name, k in plan.kinds.items() if name not in lsns or k == "static"}
    return BasePlan(plan.identity, tuple(shards), kinds)
