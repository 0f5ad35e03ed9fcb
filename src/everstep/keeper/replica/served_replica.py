"""The replica of the timeline that is served, as the thread that waits for messages sees it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from everstep.arena.memory import Arena
from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError
from everstep.format.names import TIMELINE_RECORD, timeline_dir
from everstep.format.reader import read_record_bytes
from everstep.format.records import TimelineRecord
from everstep.keeper.held.newest_capture import NewestCapture
from everstep.keeper.log.attached import Attached
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.persist.local_keeper import LocalKeeper
from everstep.keeper.replica.replica import Ask, Replica, ReplicaLimits
from everstep.link.capture import Capture
from everstep.link.samples import Samples
from everstep.link.wire import error_to_wire
from everstep.seams.files.filesystem import FileSystem

if TYPE_CHECKING:  # one rank does without
    from everstep.keeper.persist.rank_commits import RankCommits

__all__ = ["Replicas"]

_log = logging.getLogger("everstep.keeper")


class Replicas:
    """At most one replica at a time: that of the log of the process that is served."""

    def __init__(
        self, filesystem: FileSystem, run: PurePath, newest_capture: NewestCapture
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._newest_capture = newest_capture
        self._replica: Replica | None = None
        self._commits: RankCommits | None = None
        self._timeline = 0
        self._trainer: Attached | None = None
        self._frozen: Capture | None = None  # in the memory that is held for the next process
        self._frozen_for: Attached | None = None
        self._asked: set[int] = set()  # bases that are to come

    @property
    def step(self) -> int | None:
        """Of the state that the replica holds, if there is one."""
        return None if self._replica is None else self._replica.step

    @property
    def progress(self) -> list[int | None]:
        """That step, the number up to which records are read no more, and the bytes it takes."""
        if self._replica is None:
            return [None, 0, 0]
        arena = self._replica.arena
        size_bytes = 0 if arena is None else arena.size_bytes
        return [self._replica.step, self._replica.applied, size_bytes]

    @property
    def arena(self) -> Arena | None:
        """The memory of the replica, if there is any."""
        return None if self._replica is None else self._replica.arena

    def serve(
        self,
        trainer: Attached,
        message: dict[str, Any],
        log: LogStore,
        keeper: LocalKeeper,
        timeout_s: float,
    ) -> None:
        """A new timeline; ``message`` says whether it has a replica."""
        self.close()
        self._trainer = trainer
        timeline = message["timeline"]
        limits = message.get("replica")
        self._commits = keeper.commits
        self._timeline = timeline
        asked = self._asked = set()
        if limits is None:
            return
        log.reliefs.append(lambda: bool(asked))  # it is to have a base
        self._replica = Replica(
            log,
            keeper,
            lambda: self._record(timeline),
            ReplicaLimits(limits["size_bytes"], limits["threads"]),
            _Told(trainer, self._commits, timeline, self._asked),
            timeout_s=timeout_s,
        )

    def close(self, *, timeout_s: float = 0.0) -> None:
        """No replica any more; what was frozen of it stays as it is."""
        if self._replica is not None:
            self._replica.close(timeout_s=timeout_s)
        self._replica = self._frozen = self._frozen_for = self._trainer = None

    def ask(self, trainer: Attached, message: dict[str, Any]) -> None:
        """A base is due."""
        if trainer is self._frozen_for:  # what it was frozen for has come to nothing
            self.arrived()
        samples = tuple(Samples(*some) for some in message["samples"])
        ask = Ask(message["number"], message["step"], message["exact"], samples)
        if self._replica is None:
            gone = EverstepError("this keeper has no replica", step=ask.step)
            told = _Told(trainer, self._commits, self._timeline, self._asked)
            told.refused([ask], gone)
            return
        self._asked.add(ask.number)
        self._replica.ask(ask)

    def base_durable(self, base: Capture, arena: Arena) -> None:
        """In the writing thread: the training process's own base, before it is told."""
        if self._replica is not None:
            self._replica.begin(base, arena)

    def base_failed(self, base: Capture, error: EverstepError) -> None:
        """In the writing thread: likewise; nobody waits for what was to follow."""
        if self._replica is not None:
            self._replica.failed(base, error)

    def freeze(self, trainer: Attached | None, *, own: bool) -> None:
        """Puts the replica as it is into the memory that is held for ``trainer`` (None: for a
        process that only reads it); not one of several ranks' replicas, as those of the others are
        at other steps."""
        if self._replica is None or (self._trainer is trainer and not own):
            return
        if self._commits is not None:
            return
        frozen = self._replica.freeze()
        if frozen is None or frozen.arena is None:
            return
        self._frozen_for = trainer
        if frozen is not self._frozen:
            self._frozen = frozen
            self._newest_capture.take(frozen, frozen.arena)

    def arrived(self) -> None:
        """A record of the log has come: whoever wanted the state as it was goes on with its own."""
        frozen = self._frozen
        self._frozen = None
        self._frozen_for = None
        if frozen is not None and self._replica is not None:
            self._newest_capture.drop(frozen)
            self._replica.thaw()

    def lose(self) -> None:
        """The training process is gone: nobody waits for what it has asked for, and the next one
        does not want to."""
        self._asked.clear()
        if self._replica is not None:
            self._replica.forget_asks()

    def finish(self) -> bool:
        """The keeper is about to end; whether it has to wait for a base until then."""
        self.arrived()
        alone = self._commits is None  # other keepers end at other steps
        return alone and self._replica is not None and self._replica.finish()

    def done(self, base: Capture) -> None:
        """In the writing thread: retention behind a base of the replica is over, too."""
        if self._trainer is not None:
            self._trainer.tell({"kind": "retained", "step": base.step})

    def _record(self, timeline: int) -> TimelineRecord | None:
        path = timeline_dir(self._run, timeline) / TIMELINE_RECORD
        try:
            return TimelineRecord.decode(read_record_bytes(self._filesystem, path), path)
        except (OSError, EverstepError) as error:
            _log.error("%s", error)
            return None


class _Told:
    """Tells the training process what becomes of its replica, and other ranks of what they would
    wait for in vain."""

    def __init__(
        self, trainer: Attached, commits: RankCommits | None, timeline: int, asked: set[int]
    ) -> None:
        self._trainer = trainer
        self._commits = commits
        self._timeline = timeline
        self._asked = asked

    def persisted(self, asks: Sequence[Ask], base: Capture) -> None:
        error = base.save.durable.exception()
        if error is not None:
            ours = error if isinstance(error, EverstepError) else EverstepError(repr(error))
            self.refused(asks, ours, base.step)
            return
        self._asked.difference_update(ask.number for ask in asks)
        self._trainer.tell(
            {
                "kind": "persisted",
                "numbers": [ask.number for ask in asks],
                "step": base.step,
                "size_bytes": base.plan.size_bytes,
            }
        )

    def refused(self, asks: Sequence[Ask], error: EverstepError, step: int | None = None) -> None:
        """``step``: of the base that has failed."""
        self._asked.difference_update(ask.number for ask in asks)
        if self._commits is not None:
            for ask in asks:
                why = f"this rank's replica does not give it: {error.message}"
                self._commits.refuse(BaseId(self._timeline, ask.step), why)
        self._trainer.tell(
            {
                "kind": "asks_refused",
                "numbers": [ask.number for ask in asks],
                "step": step,
                "error": error_to_wire(error),
            }
        )

    def stopped(self, error: EverstepError, *, for_good: bool) -> None:
        _log.error("the replica does not follow any more: %s", error)
        self._trainer.tell({"kind": "error", "error": error_to_wire(error)})
        self._trainer.tell({"kind": "replica_stopped", "for_good": for_good, "why": error.message})
