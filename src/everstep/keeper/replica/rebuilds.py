"""Bases that were captured over several steps, until they are whole: the keeper's side.

A thread of its own brings the parts to one step (:mod:`.rebuild_state`), or puts together what
whoever restores them needs for it (:mod:`.fuzzy`), so that messages are answered meanwhile. From
then on it is a base like any other; until then the one before it stays.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from everstep.errors import EverstepError, KeeperError
from everstep.format.log import RecordHead
from everstep.format.names import TIMELINE_RECORD, timeline_dir
from everstep.format.plan import BasePlan
from everstep.format.reader import read_record_bytes
from everstep.format.records import TimelineRecord
from everstep.keeper.held.newest_capture import NewestCapture
from everstep.keeper.log.attached import Attached
from everstep.keeper.persist.local_keeper import LocalKeeper
from everstep.keeper.replica.redo_file import leave_fuzzy
from everstep.link.assembly import Assembly, PartialUpdate, assembly_from_wire
from everstep.link.capture import Capture
from everstep.seams.failpoints import failpoint
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.processes.threads import IoThreads

__all__ = ["Rebuilds"]

_log = logging.getLogger("everstep.keeper")


class Rebuilds:
    """Those of the training process that is served."""

    def __init__(
        self, filesystem: FileSystem, run: PurePath, newest_capture: NewestCapture
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._newest_capture = newest_capture
        self._updates: dict[int, list[PartialUpdate]] = defaultdict(list)
        self._threads = 1
        self._thread: IoThreads | None = None
        self._whole = False  # since that was last asked

    def serve(self, message: Mapping[str, Any]) -> None:
        """A new timeline; ``message`` says whether its bases have to be made whole."""
        self._updates.clear()
        wanted = message.get("rebuild")
        if wanted is None:
            return
        self._threads = wanted["threads"]
        if self._thread is None:
            self._thread = IoThreads(1, "everstep-rebuild")
        if wanted["warm"]:
            self._thread.submit(_warm)  # it takes seconds, and the first base some steps

    def update(self, trainer: Attached, message: Mapping[str, Any]) -> None:
        """An update that concerns a base.

        Raises:
            KeeperError: it makes no sense.
        """
        layout = trainer.log_layouts[message["layout"]]
        if not 0 <= message["offset"] <= trainer.arena.size_bytes - layout.size_bytes:
            raise KeeperError("an update outside of the arena")
        self._updates[message["number"]].append(
            PartialUpdate(
                RecordHead(*message["head"]), layout, message["objects"], message["offset"]
            )
        )

    def assemble(
        self,
        trainer: Attached,
        message: Mapping[str, Any],
        capture: Capture,
        objects: Mapping[str, bytes],
        keeper: LocalKeeper,
    ) -> None:
        """All parts of a base are there, and all updates: whatever happens to training, it is made
        whole and becomes durable.

        Raises:
            KeeperError: this keeper was not asked to make bases whole.
        """
        updates = self._updates.pop(capture.number, [])
        if self._thread is None:
            raise KeeperError("a base in parts, of a process that has not spoken of any")
        assembly = assembly_from_wire(message, updates)
        capture.assembling = True
        if keeper.is_one_of_several:  # the others go by the order of bases
            keeper.expect(capture)
        rebuild = self._thread.submit(self._rebuild, trainer, capture, objects, assembly, keeper)
        rebuild.add_done_callback(lambda _: capture.made.set())  # whatever comes of it

    def forget(self, number: int) -> None:
        """The rest of a base will never come."""
        self._updates.pop(number, None)

    def take_whole(self) -> bool:
        """Whether a base has become whole since the last call."""
        whole = self._whole
        self._whole = False
        return whole

    def close(self, *, timeout_s: float = 0.0) -> None:
        """Ends the thread, behind what it has to do."""
        if self._thread is not None:
            self._thread.close(timeout_s)

    def _rebuild(
        self,
        trainer: Attached,
        capture: Capture,
        objects: Mapping[str, bytes],
        assembly: Assembly,
        keeper: LocalKeeper,
    ) -> None:
        """In the thread."""
        error: EverstepError | None = None
        try:
            failpoint("rebuild.before")
            if assembly.fuzzy is not None:
                leave_fuzzy(capture, trainer.arena, objects, assembly, assembly.fuzzy)
            else:
                objects = self._rebuilt(trainer, capture, objects, assembly)
            failpoint("rebuild.after")
        except EverstepError as found:
            error = found
        except Exception as found:
            what = f"internal error while a base was made whole: {found!r}"
            error = EverstepError(what, step=capture.step)
            error.__cause__ = found
        # A base that is whole needs its updates no more; its own block is kept until it is durable.
        trainer.tell({"kind": "rebuilt", "number": capture.number, "whole": error is None})
        if error is not None:
            _log.error("%s", error)
            keeper.abandon(capture, error)
            return
        self._whole = True
        self._newest_capture.take(capture, trainer.arena)
        keeper.captured(capture, objects)

    def _rebuilt(
        self,
        trainer: Attached,
        capture: Capture,
        objects: Mapping[str, bytes],
        assembly: Assembly,
    ) -> Mapping[str, bytes]:
        """Brings all parts to one step; returns the objects."""
        from everstep.keeper.replica.replica_state import rebuild

        made, objects = rebuild(
            capture,
            trainer.arena,
            objects,
            assembly,
            self._record(capture.plan.identity.timeline),
            threads=self._threads,
        )
        capture.plan = BasePlan(made, capture.plan.shards, capture.plan.kinds)
        return objects

    def _record(self, timeline: int) -> TimelineRecord | None:
        path = timeline_dir(self._run, timeline) / TIMELINE_RECORD
        try:
            return TimelineRecord.decode(read_record_bytes(self._filesystem, path), path)
        except (OSError, EverstepError) as error:
            _log.error("%s", error)
            return None


def _warm() -> None:
    import everstep.keeper.replica.replica_state  # noqa: F401
