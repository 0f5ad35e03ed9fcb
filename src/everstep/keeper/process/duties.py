"""The duties of a keeper for the trainer that is attached: the order in which they start and end.

All methods run in the thread that receives messages, except for the callbacks that the writing
thread calls when a base ends.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from everstep.commit import BaseId
from everstep.errors import EverstepError, KeeperError
from everstep.format.writer import ChunkRing
from everstep.keeper.held import NewestCapture
from everstep.keeper.log import Logs
from everstep.keeper.persist import BaseWriter
from everstep.keeper.process.auditor import Audits
from everstep.keeper.process.bases import Bases
from everstep.keeper.process.duty import AttachedTrainer, Duty, Handler, ServedTimeline
from everstep.keeper.process.recalls import Recalls
from everstep.keeper.replica import Rebuilds, ServedReplica
from everstep.keeper.ship import Couriers, PeerCopies
from everstep.link import BackgroundChannel, error_to_wire
from everstep.link.capture import Capture
from everstep.seams import Seams

_log = logging.getLogger("everstep.keeper")


class Duties:
    """Duties of one keeper process, for one training process after the other.

    Args:
        run: the run folder.
        ring: chunks and threads that write to disk.

    Attributes:
        newest_capture: newest complete capture in memory.
        bases: receives captures and has them written.
        logs: gradient logs in memory and on disk.
        replicas: copy of the state that follows the log, if there is one.
        peers: copies exchanged with other nodes.
        copies: copies in other tiers, if there are any.
        audits: audits bases, if the training process asked for it.
        recalls: describes the contents of memory.
        handlers: handler of each kind of message from the attached trainer.
        timeline: timeline that is served; None before the first.
    """

    def __init__(self, seams: Seams, run: PurePath, ring: ChunkRing) -> None:
        filesystem = seams.filesystem
        self._clock = seams.clock
        self.newest_capture = held = NewestCapture()
        self.replicas = ServedReplica(filesystem, run, held)
        # The process that could have resumed from a frozen replica records a log of its own.
        self.logs = Logs(seams, run, ring, on_record=self.replicas.arrived)
        self.peers = PeerCopies(seams, run, self.base_at_peers)
        self._rebuilds = rebuilds = Rebuilds(filesystem, run, held)
        self.bases = Bases(seams, run, ring, held, self.logs, rebuilds, self)
        self.copies = Couriers(seams, run)
        self.audits = Audits(seams, run, self.logs)
        self.recalls = Recalls(held, self.bases, self.logs, self.replicas, self.peers, self.copies)
        # In the order in which they start: bases need the log, and where peers hold bases; replica
        # and rebuilds hand bases over.
        self._all: tuple[Duty, ...] = (
            self.logs,
            self.peers,
            self.bases,
            self.replicas,
            rebuilds,
            self.copies,
            self.audits,
        )
        self.handlers: dict[str, Handler] = {
            "serve": self.serve,
            "recall": self.recalls.recall,
        }
        for duty in self._all:
            self.handlers.update(duty.handlers)
        self.timeline: ServedTimeline | None = None

    @property
    def writer(self) -> BaseWriter | None:
        """Thread that writes bases; None before the first timeline."""
        return self.bases.writer

    def serve(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Start to serve a new timeline; end the previous one.

        Raises:
            KeeperError: bases of the previous timeline are still being written.
        """
        # Two writers at once would recycle and delete each other's files.
        if self.writer is not None and self.writer.waiting:
            raise KeeperError("earlier captures are still being written: send settle first")
        # Logs stay, as the new process may resume from them. The replica before the bases: it hands
        # bases to the writing thread.
        ending: tuple[Duty, ...] = (
            self.audits,
            self.copies,
            self.peers,
            self.replicas,
            self.bases,
        )
        for duty in ending:
            duty.close()
        number = message["timeline"]
        verified = None if message["verified"] is None else BaseId(*message["verified"])
        if verified is not None:
            self.newest_capture.drop_not_durable()
        # A folder that was put back to an older state reuses timeline numbers: captures in memory
        # of the same or a later number belong to a history that no longer exists.
        put_back = self.logs.served_timelines.start_timeline(number)
        if put_back:
            self.newest_capture.drop_from_timeline(number)
        link = self.bases.open_link(message.get("seat"), trainer)
        self.newest_capture.on_disk = None if link is None else link.session.recovered

        def report(error: EverstepError) -> None:
            _log.error("%s", error)
            # The trainer ignores errors of an older timeline than its own.
            trainer.send({"kind": "error", "error": error_to_wire(error), "of_timeline": number})

        channel = BackgroundChannel(report, self._clock, progress_timeout_s=trainer.timeout_s)
        timeline = ServedTimeline(trainer, message, channel, verified, link, put_back)
        for duty in self._all:
            duty.serve(timeline)
        # Last: its log and its writer exist only now.
        self.timeline = timeline

    def close(self) -> None:
        """End all threads after they have finished their work."""
        # Producers before consumers: replica and rebuilds hand bases to the writing thread, and its
        # bases are what audits, copies and peers use. Logs last, as all of them read from these.
        ending: tuple[Duty, ...] = (
            self.replicas,
            self._rebuilds,
            self.audits,
            self.copies,
            self.peers,
            self.bases,
            self.logs,
        )
        timeout_s = 0.0 if self.timeline is None else self.timeline.timeout_s
        for duty in ending:
            duty.close(timeout_s=timeout_s)
        self.bases.close_mailbox()

    def settle(self) -> None:
        """Fail bases that only wait for other ranks: the next start of the job decides on them."""
        if self.writer is not None:
            self.writer.release()

    def lose(self, trainer: AttachedTrainer) -> None:
        """Give up what only a living trainer can complete: it has ended."""
        self.replicas.lose()
        if not trainer.detaching:
            self.copies.trainer_lost()
        self.bases.lose(trainer)

    def finish(self) -> bool:
        """Start work that must be done before the keeper exits; return True while there is any."""
        if self.timeline is None:
            return False
        if self.replicas.finish():
            return True
        # Last chance for a parked capture: it is lost with this process. Those of several ranks are
        # not of the same step, and so no base.
        arena = self.timeline.trainer.arena
        parked = None
        if not self.timeline.writer.is_one_of_several:
            parked = self.newest_capture.parked(arena, self.timeline.number)
        if parked is not None:
            self.bases.write_parked(parked)
            return True
        # Checked after the replica: it may have handed over a base since the caller's check.
        return bool(self.timeline.writer.waiting) or self.copies.finish()

    def pass_on(self) -> None:
        """Send collected errors to the trainer; return when they were sent."""
        if self.timeline is not None:
            self.timeline.pass_on()

    def stats(self) -> dict[str, Any]:
        """Return the counters of this keeper as message fields."""
        assert self.timeline is not None
        stats = self.timeline.writer.stats
        stats.cpu_s = time.process_time()
        self.logs.add_to(stats)
        self.copies.add_to(stats)
        self.peers.add_to(stats)
        return {
            "stats": dataclasses.asdict(stats),
            "timeline": self.timeline.number,
            "replica": self.replicas.progress,
        }

    @property
    def held_step(self) -> int | None:
        """Step of the newest state in memory; None without one."""
        step = self.replicas.step
        return self.newest_capture.step if step is None else step

    @property
    def holds_only_copy(self) -> bool:
        """True if memory holds state that a later trainer may need and no disk has."""
        held = self.newest_capture.is_only_copy or self.logs.memory_step is not None
        return held or bool(self.peers.store.held or self.peers.logs.held)

    def arena_bytes(self, trainer: AttachedTrainer | None) -> int:
        """Return the host memory in use, in bytes.

        Counts the arenas of the attached trainer, of earlier trainers and of the replica, and the
        copies held for other ranks. An arena reserves address space as large as its budget, but
        takes pages only where something was written.
        """
        mine = None if trainer is None else trainer.arena
        found = (mine, self.newest_capture.arena, self.replicas.arena, *self.logs.arenas)
        # By identity: one arena may hold the base and the log.
        mine_bytes = {id(arena): arena.taken_bytes for arena in found if arena is not None}
        held_bytes = self.peers.store.used_bytes + self.peers.logs.used_bytes
        return sum(mine_bytes.values()) + held_bytes

    # --- In the writing thread ---

    def base_ended(self, trainer: AttachedTrainer, capture: Capture) -> None:
        """Handle a base that is durable or has failed."""
        trainer.captures.pop(capture.number, None)
        error = capture.save.durable.exception()
        fields = {"number": capture.number}
        if error is None:
            self.logs.base_durable(capture.save.timeline, at_peers=self.peers.sends_log)
            self.copies.base_known(BaseId(capture.timeline, capture.step))
            fields["size_bytes"] = capture.plan.size_bytes
            try:
                self.replicas.base_durable(capture, trainer.arena)
            finally:
                # The base is durable whatever happens to the replica.
                trainer.send({"kind": "durable", **fields, **self.stats()})
            return
        self.newest_capture.failed(capture, error, reused=not trainer.unreachable)
        ours = error if isinstance(error, EverstepError) else EverstepError(repr(error))
        self.replicas.base_failed(capture, ours)
        trainer.send({"kind": "failed", "error": error_to_wire(ours), **fields, **self.stats()})

    def base_retained(self, timeline: ServedTimeline, capture: Capture) -> None:
        """Handle the end of a base and its retention."""
        # Errors before ``done``: a trainer may exit as soon as it receives ``done``.
        timeline.pass_on()
        if capture.arena is None:
            timeline.trainer.send({"kind": "done", "number": capture.number})
        else:
            # A base in the replica's own memory: no trainer waits for the block.
            self.replicas.done(capture)
        if capture.save.durable.exception() is None and not capture.save.in_memory:
            base = BaseId(capture.timeline, capture.step)
            self.copies.base_durable(base)
            self.audits.base_durable()
            self.peers.base_durable(base)

    def base_at_peers(self, timeline: ServedTimeline, base: BaseId) -> None:
        """Handle a base that all peers hold completely; in the thread of the exchange."""
        if base.timeline == timeline.number:
            self.logs.drop_older(base.timeline)
            timeline.trainer.send(
                {
                    "kind": "peered",
                    "of_timeline": base.timeline,
                    "base": base.step,
                    "step": None,
                    **self.stats(),
                }
            )
