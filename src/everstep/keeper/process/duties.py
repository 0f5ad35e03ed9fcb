"""Duties of a keeper for the training process that is attached: bases, log, state in memory.

All methods run in the thread that receives messages, except for the callbacks that the writing
thread calls when a base ends.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgpack

from everstep.arena.memory import Arena
from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError, KeeperError, StateError
from everstep.format.plan import BasePlan
from everstep.format.writer import ChunkRing, Written
from everstep.keeper.held.newest_capture import LookReply, NewestCapture
from everstep.keeper.log.attached import AttachedTrainer
from everstep.keeper.log.logs import Logs
from everstep.keeper.persist.base_writer import BaseWriter
from everstep.keeper.persist.committer import Timeline
from everstep.keeper.persist.job_link import JobLink
from everstep.keeper.replica.rebuilds import Rebuilds
from everstep.keeper.replica.served_replica import ServedReplica
from everstep.keeper.ship.peer_copies import PeerCopies
from everstep.link.capture import Capture, Incoming
from everstep.link.channel import BackgroundChannel
from everstep.link.job_session import JobSession, mailbox_error
from everstep.link.messages import (
    identity_from_wire,
    identity_to_wire,
    layout_from_wire,
    parts_of,
)
from everstep.link.save import Save
from everstep.link.wire import error_from_wire, error_to_wire
from everstep.seams import Seams
from everstep.seams.failpoints import failpoint
from everstep.seams.network.mailbox import TcpMailbox

# Loaded at first use, as most runs do not need them: training waits for a keeper to start.
if TYPE_CHECKING:
    from everstep.keeper.process.auditor import AuditedElsewhere, Auditor
    from everstep.keeper.ship.couriers import Couriers

__all__ = ["HANDLERS", "Duties"]

_log = logging.getLogger("everstep.keeper")


class Duties:
    """Duties of one keeper process, for one training process after the other.

    Args:
        run: the run folder.
        ring: chunks and threads that write to disk.

    Attributes:
        keeper: makes bases durable; None before the first timeline.
        channel: collects errors of background work for the training process that is attached.
        newest_capture: newest complete capture in memory.
        logs: gradient logs in memory and on disk.
        replicas: copy of the state that follows the log, if there is one.
        rebuilds: multi-step captures that are brought to one step.
        auditor: audits bases, if the training process asked for it.
        couriers: copy bases to other tiers, if there are any.
        peers: copies exchanged with other nodes.
        mailbox: open for the next timeline, if there are several ranks.
        timeline: number of the timeline that is served.
        timeout_s: seconds without progress after which a transfer counts as hung.
        stopping: True when the keeper was asked to stop: no new capture is accepted.
    """

    def __init__(self, seams: Seams, run: PurePath, ring: ChunkRing, *, timeout_s: float) -> None:
        self._seams = seams
        self._run = run
        self._ring = ring
        # Both the serving and the writing thread pass errors on.
        self._reporting = threading.Lock()
        self.keeper: BaseWriter | None = None
        self.channel: BackgroundChannel | None = None
        self.newest_capture = NewestCapture()
        self.logs = Logs(seams, run, ring)
        self.replicas = ServedReplica(seams.filesystem, run, self.newest_capture)
        self.rebuilds = Rebuilds(seams.filesystem, run, self.newest_capture)
        self.auditor: Auditor | AuditedElsewhere | None = None
        self.couriers: Couriers | None = None
        self.peers = PeerCopies(seams, run, self.newest_capture, timeout_s=timeout_s)
        self.mailbox: TcpMailbox | None = None
        self.timeline = self._bases_durable = 0
        self._arena: Arena | None = None
        self.timeout_s = timeout_s
        self.stopping = False

    def serve(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Start to serve a new timeline; end the previous one."""
        mailbox = self.mailbox
        self.mailbox = None
        self._end_timeline()
        verified = None if message["verified"] is None else BaseId(*message["verified"])
        if verified is not None:
            self.newest_capture.drop_not_durable()
        timeline = message["timeline"]
        self.channel = channel = BackgroundChannel(
            lambda error: _report(trainer, error, of_timeline=timeline),
            self._seams.clock,
            progress_timeout_s=self.timeout_s,
        )
        fields = message.get("seat")
        job_session = None if fields is None else JobSession.from_wire(fields)
        link = None
        self.newest_capture.on_disk = None
        if job_session is not None:
            assert mailbox is not None
            self.newest_capture.on_disk = job_session.recovered
            link = JobLink(job_session, mailbox, self._seams.clock, timeout_s=self.timeout_s)
        self.timeline = timeline
        self._bases_durable = 0
        self._arena = trainer.arena
        # A folder that was put back to an older state reuses timeline numbers: captures in memory
        # of the same or a later number belong to a history that no longer exists.
        if self.logs.serve(trainer, channel, message, self.timeout_s):
            self.newest_capture.drop_from_timeline(self.timeline)
        log = self.logs.current
        assert log is not None
        self.peers.serve(
            trainer,
            message.get("peers"),
            link,
            log,
            timeline=self.timeline,
            verified=verified,
            on_everywhere=lambda base: self._on_everywhere(trainer, base),
        )
        self.keeper = BaseWriter(
            Timeline(
                self._seams,
                self._run,
                timeline,
                self._ring,
                self.timeout_s,
                keep=message["keep"],
                history=message.get("history", "last"),
                verified=verified,
                link=link,
                spared=self.peers.spared,
            ),
            channel,
            trainer.arena,
            records=log,
            bases=self.peers.bases,
            on_done=lambda capture: self._on_done(trainer, channel, capture),
        )
        # Queued before any base, so that the sweep never sees files of a base in progress.
        self.keeper.sweep_in_background()
        self.replicas.serve(trainer, message, log, self.keeper, self.timeout_s)
        self.rebuilds.serve(message)
        self._start_couriers(message, link, channel)
        self.auditor = None
        if (message.get("log") or {}).get("audit"):
            from everstep.keeper.process.auditor import auditor_of

            self.auditor = auditor_of(
                job_session,
                self._seams,
                self._run,
                self.timeline,
                channel.post,
                self.logs,
                self.timeout_s,
            )

    def _end_timeline(self) -> None:
        """End the work for the previous timeline.

        Raises:
            KeeperError: bases of it are still being written.
        """
        if self.auditor is not None:
            self.auditor.close()
        if self.couriers is not None:
            self.couriers.close()
        self.peers.close()
        if self.keeper is None:
            return
        # Two writers at once would recycle and delete each other's files.
        if self.keeper.waiting:
            raise KeeperError("earlier captures are still being written: send settle first")
        # The replica first: it hands bases to the keeper.
        self.replicas.close()
        self.keeper.close()

    def _start_couriers(
        self,
        message: Mapping[str, Any],
        link: JobLink | None,
        channel: BackgroundChannel,
    ) -> None:
        """Start to copy bases and log to the tiers that the message names."""
        assert self.keeper is not None
        before = self.couriers
        self.couriers = None
        if not message.get("tiers"):
            return
        from everstep.keeper.ship.couriers import Couriers

        self.couriers = Couriers(
            self._seams,
            self._run,
            identity_from_wire(message["identity"]),
            channel.post,
            timeout_s=self.timeout_s,
            link=link,
            before=before,
        )
        assert self.logs.current is not None
        self.couriers.start(message["tiers"], self.logs.current)
        # An earlier keeper may have ended before it copied the newest base.
        self.couriers.base_durable()

    def listen(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Open a mailbox for the keepers of the other ranks, and reply with its port."""
        reply: dict[str, Any] = {"kind": "listening", "port": 0, "error": None}
        if self.mailbox is not None:
            self.mailbox.close()
        # A trainer that lost its connection and attaches again asks for the same port: free it.
        if self.keeper is not None:
            self.keeper.free_port(message["port"])
        try:
            self.mailbox = TcpMailbox(message["host"], message["port"])
            reply["port"] = self.mailbox.address[1]
        except OSError as error:
            reply["error"] = error_to_wire(mailbox_error(message["host"], message["port"], error))
        trainer.send(reply)

    def settle(self) -> None:
        """Fail bases that only wait for other ranks: the next start of the job decides on them."""
        if self.keeper is not None:
            self.keeper.release()

    def layout(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Receive the layout of the files of captures to come."""
        # One layout at a time: captures of the previous one have begun, and hold their plan.
        trainer.layouts = {message["number"]: message["layout"]}

    def begin(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Register a capture that has begun.

        Raises:
            KeeperError: the keeper was asked to stop.
        """
        assert self.keeper is not None
        # A stopping keeper waits for its captures: accepting more could keep it alive for ever.
        if self.stopping:
            raise KeeperError("this keeper was asked to stop")
        # As in captured(): a rebuilt base that is complete replaces the log before it.
        if self.rebuilds.take_completed() and not self.keeper.is_one_of_several:
            self.logs.drop_older(self.timeline)
        identity = identity_from_wire(message["identity"])
        arena = trainer.arena
        word = message["word"]
        plan = layout_from_wire(trainer.layouts[message["layout"]], identity)
        capture = Capture(
            number=message["number"],
            layout=message["layout"],
            plan=plan,
            save=Save(
                identity.step,
                identity.timeline,
                parked=bool(message.get("parked")),
                in_memory=bool(message.get("in_memory")),
            ),
            offset=message["offset"],
            word=word,
            stream=message["stream"],
            incoming=Incoming(lambda: arena.progress(word), timeout_s=self.timeout_s),
            on_end=lambda ended: self._on_end(trainer, ended),
        )
        trainer.captures[capture.number] = capture
        # The trainer may fill the block from now on: a capture held in the same memory is lost.
        self.newest_capture.drop_overwritten(capture, arena)
        failpoint("keeper.after_begin")
        if not capture.parked:
            self.keeper.begin(capture)

    def part(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Receive a chunk of an encoded object, of a capture or of a log record."""
        objects = trainer.objects.setdefault(message["number"], {})
        objects.setdefault(message["name"], bytearray()).extend(message["part"])

    def captured(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Take over a capture that is complete."""
        parts = trainer.objects.pop(message["number"], {})
        capture = trainer.captures.get(message["number"])
        # It has failed meanwhile: the trainer may already use its memory again.
        if capture is None or capture.incoming.lost:
            return
        assert self.keeper is not None
        failpoint("keeper.after_captured")
        # Before the log is dropped: at each moment memory holds a base, or a log that leads there.
        self.newest_capture.take(capture, trainer.arena)
        # Of several ranks another one may still lose its share of this base: the log stays until
        # the base is durable on all of them.
        if not self.keeper.is_one_of_several:
            self.logs.drop_older(self.timeline)
        objects = {name: bytes(data) for name, data in parts.items()}
        # A parked capture is written only on request; it still has to count as complete.
        if capture.parked:
            capture.incoming.arrived(objects)
        else:
            self.keeper.captured(capture, objects)

    def persist(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Make a capture durable that was to stay in memory only."""
        self._persist(trainer.capture(message["number"], again=message.get("again", False)))

    def redo(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Receive an update that concerns a multi-step capture."""
        self.rebuilds.update(trainer, message)

    def assemble(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Rebuild a multi-step capture, all of which has arrived."""
        parts = trainer.objects.pop(message["number"], {})
        capture = trainer.captures.get(message["number"])
        # As in captured(): it has failed meanwhile.
        if capture is None or capture.incoming.lost:
            return
        assert self.keeper is not None
        objects = {name: bytes(data) for name, data in parts.items()}
        # In a thread of its own: replay takes long, and messages must be answered meanwhile.
        self.rebuilds.assemble(trainer, message, capture, objects, self.keeper)

    def abandon(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Give up a capture whose remaining data will never arrive."""
        trainer.objects.pop(message["number"], None)
        self.rebuilds.forget(message["number"])
        capture = trainer.captures.get(message["number"])
        why = message["error"]
        if capture is not None and capture.parked:
            # Nobody writes a parked capture, so the error has to be sent from here.
            del trainer.captures[capture.number]
            if why is not None:
                trainer.send({"kind": "error", "error": why})
        elif capture is not None and self.keeper is not None:
            self.keeper.abandon(capture, None if why is None else error_from_wire(why))
            return
        # The capture has ended, or the trainer was interrupted before it sent ``begin``. Reply all
        # the same: the trainer keeps the memory until it receives ``done``.
        interrupted = StateError("the save was interrupted")
        number = {"number": message["number"]}
        trainer.send({"kind": "failed", "error": error_to_wire(interrupted), **number})
        trainer.send({"kind": "done", **number})

    def log(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Receive a log record, the layout of records, or the end of the log."""
        if message["kind"] == "log":
            self.replicas.arrived()
        self.logs.on_message(trainer, message)

    def forget(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Drop a capture from memory that the trainer no longer needs."""
        capture = trainer.captures.get(message["number"])
        if capture is not None and capture.parked:
            del trainer.captures[capture.number]
        self.newest_capture.forget(message["number"], trainer.arena)

    def recall(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Send everything that is in memory to a restarted trainer: the newest base and
        the logs."""
        own = bool(message.get("own"))
        # First: a replica that goes on would change the memory that is about to be described.
        self.replicas.freeze(trainer, own=own)
        found = self.newest_capture.recall(trainer.arena, self._audit, own=own)
        logs = self.logs.recall(trainer, own=own, timeout_s=self.timeout_s)
        recalled, blobs, arenas = self._in_memory(found, logs)
        # After the last step that has arrived: steps after the resume may replace them.
        if own and self.couriers is not None:
            self.couriers.pause()
        # Blobs before the reply that refers to them; in chunks, as one message is limited in size.
        for number, blob in enumerate(blobs):
            for part in parts_of(blob):
                trainer.connection.send({"kind": "blob", "number": number, "part": part})
        fds = [arena.fd for arena in arenas if arena.fd is not None]
        trainer.connection.send({"kind": "recalled", **recalled}, fds)

    def look(self, *, served: bool) -> LookReply:
        """Return the contents of memory for a process that only reads them.

        Nothing is written, flushed or given up, and no attachment changes. While a trainer is
        alive, only captures with digests are shown: their memory may be overwritten while it is
        read, and only the digest reveals that.

        Args:
            served: True if a live training process is attached.
        """
        keeper = self.keeper
        unsettled = self.logs.arriving or (keeper is not None and bool(keeper.waiting))
        # Only without a trainer: freezing stops the replica, which a live trainer still needs.
        if not served and not unsettled:
            self.replicas.freeze(None, own=True)
        pending = self.newest_capture.undigested if served else None
        found = self.newest_capture.look(None if served or unsettled else self._audit)
        return LookReply(
            *self._in_memory(found, self.logs.look()),
            settled=served or not unsettled,
            moves=[] if keeper is None else [keeper.moves, keeper.log_moves],
            pending=None if pending is None else identity_to_wire(pending),
        )

    def _audit(self, plan: BasePlan, written: Sequence[Written]) -> None:
        if self.keeper is not None:
            self.keeper.audit(plan, written)

    def _in_memory(
        self,
        found: tuple[dict[str, Any], list[bytes], Arena] | None,
        logs: Iterable[tuple[Arena, bytes]],
    ) -> tuple[dict[str, Any], list[bytes], list[Arena]]:
        """Describe the base, the logs and the copies of other ranks that are in memory.

        Returns:
            The fields of a reply; the blobs that they refer to by index; the arenas, likewise.
        """
        base: dict[str, Any] | None = None
        blobs: list[bytes] = []
        arenas: list[Arena] = []
        if found is not None:
            base, blobs, arena = found
            base["arena"] = 0
            arenas = [arena]
        listed = []
        for arena, index in logs:
            if arena not in arenas:
                arenas.append(arena)
            listed.append([len(blobs), arenas.index(arena)])
            blobs.append(index)
        copies, memories = self.peers.recall()
        for place, copy in enumerate(copies, len(arenas)):
            copy["arena"] = place
        arenas += memories
        recalled: dict[str, Any] = {"base": base, "logs": listed, "copies": copies}
        recalled["peer_logs"] = []
        recalled["served"] = self.logs.served_timelines.to_wire()
        rows, memory = self.peers.recall_logs()
        if rows and memory is not None:
            recalled["peer_logs"] = [[len(blobs), len(arenas)]]
            blobs.append(msgpack.packb(rows))
            arenas.append(memory)
        return recalled, blobs, arenas

    def ask(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """Receive the request for a base that the replica is to provide."""
        self.replicas.request_base(trainer, message)

    def no_replica(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        """End the replica."""
        self.replicas.close()

    def lose(self, trainer: AttachedTrainer) -> None:
        """Drop captures that are incomplete: the training process has ended."""
        self.replicas.lose()
        if self.couriers is not None and not trainer.detaching:
            self.couriers.trainer_lost()
        for capture in list(trainer.captures.values()):
            # A capture that is being rebuilt has arrived completely, so it is not dropped.
            there = capture.incoming.complete or capture.assembling
            if not there and self.keeper is not None:
                _log.info("the capture of step %d is incomplete: dropped", capture.step)
                # Without an error: no trainer is attached that could receive it.
                self.keeper.abandon(capture, None)
        if self.keeper is not None:
            self.keeper.training_ended()

    def stats(self) -> dict[str, Any]:
        """Return the counters of this keeper as message fields."""
        assert self.keeper is not None
        stats = self.keeper.stats
        stats.cpu_s = time.process_time()
        self.logs.add_to(stats)
        if self.couriers is not None:
            self.couriers.add_to(stats)
        self.peers.add_to(stats)
        return {
            "stats": dataclasses.asdict(stats),
            "timeline": self.timeline,
            "replica": self.replicas.progress,
        }

    def pass_on(self, channel: BackgroundChannel | None) -> None:
        """Send collected errors to the trainer; return when they were sent."""
        if channel is not None:
            # Serialised: when this returns, no other thread still holds an unsent error.
            with self._reporting:
                channel.check()

    @property
    def held_step(self) -> int | None:
        """Step of the newest state in memory; None without one."""
        step = self.replicas.step
        return self.newest_capture.step if step is None else step

    def arena_bytes(self, trainer: AttachedTrainer | None) -> int:
        """Return the host memory in use, in bytes.

        Counts the arenas of the attached trainer, of earlier trainers and of the replica, and the
        copies
        held for other ranks. An arena reserves address space as large as its budget, but takes
        pages only
        where something was written.
        """
        mine = None if trainer is None else trainer.arena
        found = (mine, self.newest_capture.arena, self.replicas.arena, *self.logs.arenas)
        # By identity: one arena may hold the base and the log.
        mine_bytes = {id(arena): arena.taken_bytes for arena in found if arena is not None}
        held_bytes = self.peers.store.used_bytes + self.peers.logs.used_bytes
        return sum(mine_bytes.values()) + held_bytes

    def finish(self) -> bool:
        """Start work that must be done before the keeper exits; return True while there is any."""
        if self.keeper is None:
            return False
        if self.replicas.finish():
            return True
        # Last chance for a parked capture: it is lost with this process.
        parked = self._arena and self.newest_capture.parked(self._arena, self.timeline)
        if parked:
            self._persist(parked)
            return True
        # Checked after the replica: it may have handed over a base since the caller's check.
        if self.keeper.waiting:
            return True
        return self.couriers is not None and self.couriers.finish()

    def _persist(self, capture: Capture | None) -> None:
        """Write a parked capture like any other; harmless when repeated."""
        if capture is not None and capture.parked and self.keeper is not None:
            capture.save.parked = False
            self.keeper.begin(capture)
            self.keeper.captured(capture, capture.incoming.objects())

    def close(self) -> None:
        """End all threads after they have finished their work."""
        # Producers before consumers: replica and rebuilds hand bases to the keeper, and the
        # keeper's bases are what auditor, couriers and peers use.
        self.replicas.close(timeout_s=self.timeout_s)
        self.rebuilds.close(timeout_s=self.timeout_s)
        if self.auditor is not None:
            self.auditor.close()
        if self.couriers is not None:
            self.couriers.close()
        self.peers.close()
        if self.keeper is not None:
            self.keeper.close()
        if self.mailbox is not None:
            self.mailbox.close()
        self.logs.flush()
        self.logs.close(self.timeout_s)

    def _on_done(
        self, trainer: AttachedTrainer, channel: BackgroundChannel, capture: Capture
    ) -> None:
        """Handle the end of a base and its retention, in the writing thread."""
        # Errors before ``done``: a trainer may exit as soon as it receives ``done``.
        self.pass_on(channel)
        if capture.arena is None:
            trainer.send({"kind": "done", "number": capture.number})
        else:
            # A base in the replica's own memory: no trainer waits for the block.
            self.replicas.done(capture)
        if capture.save.durable.exception() is None and not capture.save.in_memory:
            if self.couriers is not None:
                self.couriers.base_durable(BaseId(capture.timeline, capture.step))
            if self.auditor is not None:
                self.auditor.base_durable()
            self.peers.base_durable(BaseId(capture.timeline, capture.step))

    def _on_end(self, trainer: AttachedTrainer, capture: Capture) -> None:
        """Handle a base that is durable or has failed, in the writing thread."""
        trainer.captures.pop(capture.number, None)
        error = capture.save.durable.exception()
        fields = {"number": capture.number}
        if error is None:
            self._drop_older(capture.save.timeline)
            if self.couriers is not None:
                self.couriers.base_known(BaseId(capture.timeline, capture.step))
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

    def _drop_older(self, timeline: int) -> None:
        """Drop the log before a base of this timeline that is durable on all ranks.

        Where peers hold the log, too, recovery from the loss of a node needs the log before the
        first base
        that all peers hold. After two more durable bases, it is dropped all the same.
        """
        # Called by the writing thread only, so no lock is needed.
        self._bases_durable += 1
        if not self.peers.sends_log or self._bases_durable > 2:
            self.logs.drop_older(timeline)

    def _on_everywhere(self, trainer: AttachedTrainer, base: BaseId) -> None:
        """Handle a base that all peers hold completely."""
        if base.timeline == self.timeline:
            self.logs.drop_older(base.timeline)
            trainer.send({"kind": "peered", "base": base.step, "step": None, **self.stats()})


def _report(
    trainer: AttachedTrainer, error: EverstepError, kind: str = "error", **more: int
) -> None:
    """Send an error to the trainer that it concerns, and to no other."""
    _log.error("%s", error)
    trainer.send({"kind": kind, "error": error_to_wire(error), **more})


HANDLERS: Mapping[str, Callable[[Duties, AttachedTrainer, dict[str, Any]], None]] = {
    "listen": Duties.listen,
    "serve": Duties.serve,
    "layout": Duties.layout,
    "begin": Duties.begin,
    "object": Duties.part,
    "captured": Duties.captured,
    "redo": Duties.redo,
    "assemble": Duties.assemble,
    "persist": Duties.persist,
    "abandon": Duties.abandon,
    "log_layout": Duties.log,
    "log": Duties.log,
    "forget_log": Duties.log,
    "log_to_disk": Duties.log,
    "ask": Duties.ask,
    "no_replica": Duties.no_replica,
    "forget": Duties.forget,
    "recall": Duties.recall,
}
"""Handler of each kind of message from the training process that is attached."""
