"""Multi-step bases in the keeper, from the last message until they are complete.

A thread of its own brings the parts to one step (:func:`.replica_state.rebuild`) or adds the file
that a restore needs for that (:mod:`.rebuilds`), so that the event loop keeps answering messages.
Then the base is treated like any other; until then the previous base stays.

Redo file of a fuzzy multi-step base: the gradients that bring its parts to one step at restore.

The parts stay as they were captured, each with the number of the last update it has seen. The later
gradients go into one more file of the same base, in the format of a log segment. So the base
commits when all of it is durable; it is verified, copied and deleted with it, and depends on
nothing outside. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from everstep.arena import Arena
from everstep.errors import EverstepError, KeeperError
from everstep.format import BasePlan, ShardIdentity, TimelineRecord, timeline_dir
from everstep.format.log import LogRecord, RecordHead, plan_segment, record_digest
from everstep.format.names import TIMELINE_RECORD, shard_name
from everstep.format.reader import read_record_bytes
from everstep.keeper.held import NewestCapture
from everstep.keeper.persist import BaseWriter
from everstep.keeper.process import AttachedTrainer, Handler, ServedTimeline
from everstep.keeper.replica.replica import import_torch
from everstep.link.assembly import Assembly, FuzzyParts, PartialUpdate, assembly_from_wire
from everstep.link.capture import Capture, RedoFile
from everstep.seams import FileSystem, failpoint
from everstep.seams.processes import IoThreads
from everstep.state.layout import ShardLayout


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
    records = records_of(identity, arena.view, assembly, objects, (fuzzy.layout, fuzzy.data))
    places: dict[str, int] = {}
    for number, update in enumerate(assembly.updates):
        for place in update.layout.placed:
            name = f"{number:06d}/{place.entry.dtype}"
            places.setdefault(name, update.offset + place.begin)
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


def records_of(
    identity: ShardIdentity,
    arena: memoryview,
    assembly: Assembly,
    objects: Mapping[str, bytes],
    mark: tuple[ShardLayout, bytes],
) -> list[LogRecord]:
    """Return the updates of a multi-step base and its step mark, as records of a log.

    Args:
        identity: identity of the base at its last step.
        arena: memory of the updates; their records refer to it.
        objects: encoded objects of the mark.
        mark: layout and data of its tensors.
    """
    head = RecordHead(
        "mark", identity.timeline, identity.step, identity.lsn, assembly.shape, identity.exact
    )
    found = []
    for update in assembly.updates:
        data = arena[update.offset : update.offset + update.layout.size_bytes]
        digest = record_digest(data, update.objects)
        found.append(LogRecord(update.head, update.layout, update.objects, data, digest))
    layout, tensors = mark
    data = memoryview(tensors)
    found.append(LogRecord(head, layout, objects, data, record_digest(data, objects)))
    return found


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


_log = logging.getLogger("everstep.keeper")


class Rebuilds:
    """Assembles the multi-step bases of the attached training process."""

    def __init__(
        self, filesystem: FileSystem, run: PurePath, newest_capture: NewestCapture
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._newest_capture = newest_capture
        self._updates: dict[int, list[PartialUpdate]] = defaultdict(list)
        self._writer: BaseWriter | None = None
        self._threads = 1
        self._thread: IoThreads | None = None
        self._completed = False

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of messages about multi-step captures."""
        return {"redo": self._add_update, "assemble": self._assemble}

    def serve(self, timeline: ServedTimeline) -> None:
        """Start a timeline; its ``rebuild`` setting says whether bases must be assembled."""
        self._writer = timeline.writer
        self._updates.clear()
        wanted = timeline.settings.get("rebuild")
        if wanted is None:
            return
        self._threads = wanted["threads"]
        if self._thread is None:
            self._thread = IoThreads(1, "everstep-rebuild")
        if wanted["warm"]:
            # The import of torch takes seconds; the first base takes a few steps to capture.
            self._thread.submit(import_torch)

    def _add_update(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Add an update that a base in progress needs.

        Raises:
            KeeperError: the message is invalid.
        """
        layout = trainer.log_layouts[message["layout"]]
        # Offsets come from another process: an invalid one must not read beyond the arena.
        if not 0 <= message["offset"] <= trainer.arena.size_bytes - layout.size_bytes:
            raise KeeperError("received an update that lies outside the arena")
        self._updates[message["number"]].append(
            PartialUpdate(
                RecordHead(*message["head"]), layout, message["objects"], message["offset"]
            )
        )

    def _assemble(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Assemble a base, all parts and updates of which have arrived.

        From here on the base becomes durable even if the training process dies.

        Raises:
            KeeperError: the process did not announce multi-step bases.
        """
        parts = trainer.objects.pop(message["number"], {})
        capture = trainer.captures.get(message["number"])
        # It has failed meanwhile: the trainer may already use its memory again.
        if capture is None or capture.incoming.lost:
            return
        writer = self._writer
        assert writer is not None
        objects = {name: bytes(data) for name, data in parts.items()}
        updates = self._updates.pop(capture.number, [])
        if self._thread is None:
            raise KeeperError("received a multi-step base from a process that announced none")
        assembly = assembly_from_wire(message, updates)
        capture.assembling = True
        # All ranks commit bases in the same order: reserve this base's place before later ones.
        if writer.is_one_of_several:
            writer.expect(capture)
        # In the thread: replay takes long, and messages must be answered meanwhile.
        rebuild = self._thread.submit(self._rebuild, trainer, capture, objects, assembly, writer)
        # Also after an error: other threads wait for this event.
        rebuild.add_done_callback(lambda _: capture.made.set())

    def forget(self, number: int) -> None:
        """Drop the updates of a base that will never be complete."""
        self._updates.pop(number, None)

    def take_completed(self) -> bool:
        """Return True if a base was completed since the last call."""
        completed = self._completed
        self._completed = False
        return completed

    def close(self, *, timeout_s: float = 0.0) -> None:
        """End the thread after its pending work."""
        if self._thread is not None:
            self._thread.close(timeout_s)

    def _rebuild(
        self,
        trainer: AttachedTrainer,
        capture: Capture,
        objects: Mapping[str, bytes],
        assembly: Assembly,
        writer: BaseWriter,
    ) -> None:
        """Assemble a base and queue it for writing, in the thread."""
        error: EverstepError | None = None
        try:
            failpoint("rebuild.before")
            if assembly.fuzzy is not None:
                add_redo_file(capture, trainer.arena, objects, assembly, assembly.fuzzy)
            else:
                objects = self._rebuilt(trainer, capture, objects, assembly)
            failpoint("rebuild.after")
        except EverstepError as found:
            error = found
        except Exception as found:
            message = f"internal error while assembling a base: {found!r}"
            error = EverstepError(message, step=capture.step)
            error.__cause__ = found
        # The trainer may reuse the memory of the updates now; the base's own block is kept until
        # the base is durable.
        trainer.send({"kind": "rebuilt", "number": capture.number, "whole": error is None})
        if error is not None:
            _log.error("%s", error)
            writer.abandon(capture, error)
            return
        self._completed = True
        # Before it is queued: from here on a restarted trainer can recall it from memory.
        self._newest_capture.take(capture, trainer.arena)
        writer.captured(capture, objects)

    def _rebuilt(
        self,
        trainer: AttachedTrainer,
        capture: Capture,
        objects: Mapping[str, bytes],
        assembly: Assembly,
    ) -> Mapping[str, bytes]:
        """Bring all parts to one step; return the objects of that step."""
        # Imported here, in the thread: importing torch takes seconds.
        from everstep.keeper.replica.replica_state import rebuild

        made, objects = rebuild(
            capture,
            trainer.arena.view,
            objects,
            assembly,
            timeline_record(self._filesystem, self._run, capture.plan.identity.timeline),
            threads=self._threads,
        )
        capture.plan = BasePlan(made, capture.plan.shards, capture.plan.kinds)
        return objects


def timeline_record(filesystem: FileSystem, run: PurePath, timeline: int) -> TimelineRecord | None:
    """Return the record of a timeline, which names the conditions of training; None if it cannot be
    read: nothing is called exact then."""
    path = timeline_dir(run, timeline) / TIMELINE_RECORD
    try:
        return TimelineRecord.decode(read_record_bytes(filesystem, path), path)
    except (OSError, EverstepError) as error:
        _log.error("%s", error)
        return None
