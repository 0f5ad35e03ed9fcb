"""What a keeper does for the training process that it serves: bases, log, what is in memory.

Everything here is done in the thread that waits for messages, but for what the writing thread
calls when a base has ended.
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
from everstep.keeper.log.attached import Attached
from everstep.keeper.log.logs import Logs
from everstep.keeper.persist.local_keeper import LocalKeeper
from everstep.keeper.replica.rebuilds import Rebuilds
from everstep.keeper.replica.replicas import Replicas
from everstep.keeper.ship.peers import Peers
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
from everstep.seams.network.peers import PeerMailbox

# What most runs do not need is loaded with its first use: training waits for a keeper to start.
if TYPE_CHECKING:
    from everstep.keeper.process.auditor import AuditedElsewhere, Auditor
    from everstep.keeper.ship.mirrors import Mirrors

__all__ = ["HANDLERS", "Duties"]

_log = logging.getLogger("everstep.keeper")


class Duties:
    """The duties of one keeper process, whichever training process is attached.

    Args:
        run: the run folder.
        ring: chunks and threads that write.

    Attributes:
        keeper: makes bases durable; None before the first timeline.
        channel: of what fails behind the training process that is served.
        auditor: audits bases, if the training process wants it to.
        mirrors: copy bases to other tiers, if there are any.
        timeline: that is served.
        timeout_s: a transfer that takes longer counts as hung.
        stopping: nothing new is begun.
    """

    def __init__(self, seams: Seams, run: PurePath, ring: ChunkRing, *, timeout_s: float) -> None:
        self._seams = seams
        self._run = run
        self._ring = ring
        self._reporting = threading.Lock()
        self.keeper: LocalKeeper | None = None
        self.channel: BackgroundChannel | None = None
        self.newest_capture = NewestCapture()
        self.logs = Logs(seams, run, ring)
        self.replicas = Replicas(seams.filesystem, run, self.newest_capture)
        self.rebuilds = Rebuilds(seams.filesystem, run, self.newest_capture)
        self.auditor: Auditor | AuditedElsewhere | None = None
        self.mirrors: Mirrors | None = None
        self.peers = Peers(seams.filesystem, run, self.newest_capture)
        self.mailbox: PeerMailbox | None = None  # of the next timeline, if there are several ranks
        self.timeline = self._bases_durable = 0
        self._arena: Arena | None = None
        self.timeout_s = timeout_s
        self.stopping = False

    def serve(self, trainer: Attached, message: dict[str, Any]) -> None:
        """A new timeline."""
        if self.auditor is not None:
            self.auditor.close()
        if self.mirrors is not None:
            self.mirrors.close()
        self.peers.close()
        mailbox = self.mailbox
        self.mailbox = None
        if self.keeper is not None:
            if self.keeper.waiting:  # two that write at once would take each other's files away
                raise KeeperError("earlier captures are still being written: settle first")
            self.replicas.close()
            self.keeper.close()
        if (verified := message["verified"]) is not None:
            self.newest_capture.passed_over()
        timeline = message["timeline"]
        self.channel = channel = BackgroundChannel(
            lambda error: _report(trainer, error, of_timeline=timeline),
            self._seams.clock,
            progress_timeout_s=self.timeout_s,
        )
        told = message.get("seat")
        job_session = None if told is None else JobSession.from_wire(told)
        self.newest_capture.on_disk = None if job_session is None else job_session.recovered
        self.keeper = LocalKeeper(
            self._seams,
            self._run,
            timeline,
            channel,
            self._ring,
            trainer.arena,
            keep=message["keep"],
            verified=None if verified is None else BaseId(*verified),
            timeout_s=self.timeout_s,
            history=message.get("history", "last"),
            on_done=lambda capture: self._on_done(trainer, channel, capture),
            job_session=job_session,
            mailbox=mailbox,
        )
        self.timeline = timeline
        self._bases_durable = 0
        self._arena = trainer.arena
        self.keeper.sweep_in_background()
        if self.logs.serve(trainer, channel, message, self.timeout_s):
            self.newest_capture.drop_from(self.timeline)
        assert self.logs.current is not None
        self.keeper.log_of_run = self.logs.current
        about = message.get("peers"), job_session, self.keeper.commits, self._seams.clock
        self.peers.serve(
            *about,
            lambda notice: _report(trainer, notice, "notice"),
            timeout_s=self.timeout_s,
            timeline=self.timeline,
            log=self.logs.current,
            on_everywhere=lambda base: self._on_everywhere(trainer, base),
            on_step=lambda step: trainer.tell({"kind": "peered", "base": None, "step": step}),
            verified=None if verified is None else BaseId(*verified),
        )
        self.keeper.bases = self.peers.bases
        self.replicas.serve(trainer, message, self.logs.current, self.keeper, self.timeout_s)
        self.rebuilds.serve(message)
        before = self.mirrors
        self.mirrors = None
        if message.get("tiers"):
            from everstep.keeper.ship.mirrors import Mirrors

            places = self._seams, self._run, self.timeline, message["tiers"], channel.post
            self.mirrors = Mirrors(
                *places,
                timeout_s=self.timeout_s,
                job_session=job_session,
                commits=self.keeper.commits,
                log=self.logs.current,
                identity=identity_from_wire(message["identity"]),
                before=before,
            )
            self.mirrors.base_durable()  # perhaps an earlier keeper did not come to it
        self.auditor = None
        if (message.get("log") or {}).get("audit"):
            from everstep.keeper.process.auditor import auditor_of

            whose = job_session, self._seams, self._run, self.timeline, channel.post
            self.auditor = auditor_of(*whose, self.logs, self.timeout_s)

    def listen(self, trainer: Attached, message: dict[str, Any]) -> None:
        """The keepers of other ranks are going to send messages."""
        reply: dict[str, Any] = {"kind": "listening", "port": 0, "error": None}
        if self.mailbox is not None:
            self.mailbox.close()
        if self.keeper is not None:  # perhaps its trainer had lost it, and comes back
            self.keeper.leave(message["port"])
        try:
            self.mailbox = PeerMailbox(message["host"], message["port"])
            reply["port"] = self.mailbox.address[1]
        except OSError as error:
            reply["error"] = error_to_wire(mailbox_error(message["host"], message["port"], error))
        trainer.tell(reply)

    def settle(self) -> None:
        """A new start begins: what only waits for other ranks is left to it."""
        if self.keeper is not None:
            self.keeper.release()

    def layout(self, trainer: Attached, message: dict[str, Any]) -> None:
        """A layout of files that captures will have."""
        trainer.layouts = {message["number"]: message["layout"]}  # the one before is over

    def begin(self, trainer: Attached, message: dict[str, Any]) -> None:
        """A capture has begun."""
        assert self.keeper is not None
        if self.stopping:  # or there would be no end of it
            raise KeeperError("this keeper was asked to stop")
        if self.rebuilds.take_whole() and not self.keeper.is_one_of_several:  # as in captured()
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
        self.newest_capture.written_over_by(capture, arena)
        failpoint("keeper.after_begin")
        if not capture.parked:
            self.keeper.begin(capture)

    def part(self, trainer: Attached, message: dict[str, Any]) -> None:
        """A part of an object of a capture, or of a record of the log."""
        objects = trainer.objects.setdefault(message["number"], {})
        objects.setdefault(message["name"], bytearray()).extend(message["part"])

    def captured(self, trainer: Attached, message: dict[str, Any]) -> None:
        """A capture is whole."""
        parts = trainer.objects.pop(message["number"], {})
        capture = trainer.captures.get(message["number"])
        if capture is None or capture.incoming.lost:
            return  # it has failed meanwhile, and the trainer may use its memory again
        assert self.keeper is not None
        failpoint("keeper.after_captured")
        self.newest_capture.take(capture, trainer.arena)
        if not self.keeper.is_one_of_several:  # else other ranks may yet lose theirs of it
            self.logs.drop_older(self.timeline)  # nothing needs them any more
        objects = {name: bytes(data) for name, data in parts.items()}
        if capture.parked:
            capture.incoming.arrived(objects)
        else:
            self.keeper.captured(capture, objects)

    def persist(self, trainer: Attached, message: dict[str, Any]) -> None:
        """What was to stay in memory becomes durable after all."""
        self._persist(trainer.named(message["number"], again=message.get("again", False)))

    def redo(self, trainer: Attached, message: dict[str, Any]) -> None:
        """An update that concerns a capture over several steps."""
        self.rebuilds.update(trainer, message)

    def assemble(self, trainer: Attached, message: dict[str, Any]) -> None:
        """Such a capture is all there."""
        parts = trainer.objects.pop(message["number"], {})
        capture = trainer.captures.get(message["number"])
        if capture is None or capture.incoming.lost:
            return  # as in captured()
        assert self.keeper is not None
        objects = {name: bytes(data) for name, data in parts.items()}
        self.rebuilds.assemble(trainer, message, capture, objects, self.keeper)

    def abandon(self, trainer: Attached, message: dict[str, Any]) -> None:
        """The rest of a capture will never come."""
        trainer.objects.pop(message["number"], None)
        self.rebuilds.forget(message["number"])
        capture = trainer.captures.get(message["number"])
        why = message["error"]
        if capture is not None and capture.parked:
            del trainer.captures[capture.number]  # nobody writes it, so nobody else says so
            if why is not None:
                trainer.tell({"kind": "error", "error": why})
        elif capture is not None and self.keeper is not None:
            self.keeper.abandon(capture, None if why is None else error_from_wire(why))
            return
        # It is over; or the trainer was interrupted before it said that it had begun.
        gone = StateError("the save was interrupted")
        number = {"number": message["number"]}
        trainer.tell({"kind": "failed", "error": error_to_wire(gone), **number})
        trainer.tell({"kind": "done", **number})

    def log(self, trainer: Attached, message: dict[str, Any]) -> None:
        """A record of the log, or of its layout, or of its end."""
        if message["kind"] == "log":
            self.replicas.arrived()
        self.logs.on_message(trainer, message)

    def forget(self, trainer: Attached, message: dict[str, Any]) -> None:
        """What is in memory is needed no more."""
        capture = trainer.captures.get(message["number"])
        if capture is not None and capture.parked:
            del trainer.captures[capture.number]
        self.newest_capture.forget(message["number"], trainer.arena)

    def recall(self, trainer: Attached, message: dict[str, Any]) -> None:
        """Hands over what is in memory: the newest base, and the logs."""
        own = bool(message.get("own"))
        self.replicas.freeze(trainer, own=own)
        found = self.newest_capture.recall(trainer.arena, self._audit, own=own)
        logs = self.logs.recall(trainer, own=own, timeout_s=self.timeout_s)
        recalled, blobs, arenas = self._in_memory(found, logs)
        if own and self.mirrors is not None:  # behind the last step that has come
            self.mirrors.pause()
        for number, blob in enumerate(blobs):
            for part in parts_of(blob):
                trainer.connection.send({"kind": "blob", "number": number, "part": part})
        fds = [arena.fd for arena in arenas if arena.fd is not None]
        trainer.connection.send({"kind": "recalled", **recalled}, fds)

    def look(self, *, served: bool) -> LookReply:
        """Return what is in memory, for a process that only reads it.

        Nothing is written, flushed or given up, and no attachment changes. Of a training process
        that lives, only what has a digest already is shown: its memory may be written over while
        it is read, which the digest then tells.

        Args:
            served: a training process is attached, and lives.
        """
        keeper = self.keeper
        unsettled = self.logs.arriving or (keeper is not None and bool(keeper.waiting))
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
        """Return the base, the logs and what is held for other ranks as messages hold them, with
        the blobs that these name by number, and the memory that they lie in."""
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
        recalled["peer_logs"], recalled["served"] = [], self.logs.histories.to_wire()
        rows, memory = self.peers.recall_logs()
        if rows and memory is not None:
            recalled["peer_logs"] = [[len(blobs), len(arenas)]]
            blobs.append(msgpack.packb(rows))
            arenas.append(memory)
        return recalled, blobs, arenas

    def ask(self, trainer: Attached, message: dict[str, Any]) -> None:
        """A base is due, which the replica is to give."""
        self.replicas.ask(trainer, message)

    def no_replica(self, trainer: Attached, message: dict[str, Any]) -> None:
        """There is to be no replica any more."""
        self.replicas.close()

    def lose(self, trainer: Attached) -> None:
        """The training process is gone: what it has not captured whole is dropped."""
        self.replicas.lose()
        if self.mirrors is not None and not trainer.said_bye:
            self.mirrors.lost()
        for capture in list(trainer.captures.values()):
            there = capture.incoming.complete or capture.assembling
            if not there and self.keeper is not None:
                _log.info("step %d was not captured whole", capture.step)
                self.keeper.abandon(capture, None)  # nobody is there to be told
        if self.keeper is not None:
            self.keeper.no_more()

    def stats(self) -> dict[str, Any]:
        """What was done so far, as messages hold it."""
        assert self.keeper is not None
        stats = self.keeper.stats
        stats.cpu_s = time.process_time()
        self.logs.add_to(stats)
        if self.mirrors is not None:
            self.mirrors.add_to(stats)
        self.peers.add_to(stats)
        return {
            "stats": dataclasses.asdict(stats),
            "timeline": self.timeline,
            "replica": self.replicas.progress,
        }

    def pass_on(self, channel: BackgroundChannel | None) -> None:
        """Tells the trainer what has failed; when this returns, it has been told."""
        if channel is not None:
            with self._reporting:
                channel.check()

    @property
    def held_step(self) -> int | None:
        """Of the newest state in memory."""
        step = self.replicas.step
        return self.newest_capture.step if step is None else step

    def arena_bytes(self, trainer: Attached | None) -> int:
        """Host memory that captured state has taken: of the process that is served, of what those
        before it have left, and of a replica. An arena is reserved as large as its budget, and
        takes pages only where something was written."""
        mine = None if trainer is None else trainer.arena
        found = (mine, self.newest_capture.arena, self.replicas.arena, *self.logs.arenas)
        mine_bytes = {id(arena): arena.taken_bytes for arena in found if arena is not None}
        held_bytes = self.peers.store.used_bytes + self.peers.logs.used_bytes
        return sum(mine_bytes.values()) + held_bytes

    def finish(self) -> bool:
        """The keeper is about to end; whether something is still to be written before."""
        if self.keeper is None:
            return False
        if self.replicas.finish():
            return True
        parked = self._arena and self.newest_capture.parked(self._arena, self.timeline)
        if parked:
            self._persist(parked)
            return True
        if self.keeper.waiting:  # the replica has handed it over since that was last looked at
            return True
        return self.mirrors is not None and self.mirrors.finish()

    def _persist(self, capture: Capture | None) -> None:
        """A whole capture that was parked is written like any other; once, however often said."""
        if capture is not None and capture.parked and self.keeper is not None:
            capture.save.parked = False
            self.keeper.begin(capture)
            self.keeper.captured(capture, capture.incoming.objects())

    def close(self) -> None:
        """Ends all threads, behind what they have to do."""
        self.replicas.close(timeout_s=self.timeout_s)
        self.rebuilds.close(timeout_s=self.timeout_s)
        if self.auditor is not None:
            self.auditor.close()
        if self.mirrors is not None:
            self.mirrors.close()
        self.peers.close()
        if self.keeper is not None:
            self.keeper.close()
        if self.mailbox is not None:
            self.mailbox.close()
        self.logs.flush()
        self.logs.close(self.timeout_s)

    def _on_done(self, trainer: Attached, channel: BackgroundChannel, capture: Capture) -> None:
        """In the writing thread: retention is over, too. What failed is told before: whoever
        waits for the end and then goes must have heard of it."""
        self.pass_on(channel)
        if capture.arena is None:
            trainer.tell({"kind": "done", "number": capture.number})
        else:
            self.replicas.done(capture)
        if capture.save.durable.exception() is None and not capture.save.in_memory:
            if self.mirrors is not None:
                self.mirrors.base_durable(BaseId(capture.timeline, capture.step))
            if self.auditor is not None:
                self.auditor.base_durable()
            self.peers.base_durable(BaseId(capture.timeline, capture.step))

    def _on_end(self, trainer: Attached, capture: Capture) -> None:
        """In the writing thread: a base is durable or has failed."""
        trainer.captures.pop(capture.number, None)
        error = capture.save.durable.exception()
        about = {"number": capture.number}
        if error is None:
            self._drop_older(capture.save.timeline)
            if self.mirrors is not None:
                self.mirrors.base_known(BaseId(capture.timeline, capture.step))
            about["size_bytes"] = capture.plan.size_bytes
            try:
                self.replicas.base_durable(capture, trainer.arena)
            finally:  # whatever happens there, it is durable
                trainer.tell({"kind": "durable", **about, **self.stats()})
            return
        self.newest_capture.failed(capture, error, reused=not trainer.gone)
        ours = error if isinstance(error, EverstepError) else EverstepError(repr(error))
        self.replicas.base_failed(capture, ours)
        trainer.tell({"kind": "failed", "error": error_to_wire(ours), **about, **self.stats()})

    def _drop_older(self, timeline: int) -> None:
        """A base of this timeline is durable on all ranks. Where peers hold the log, too, a node
        that is lost needs what is before the first base that is whole with all of them; when two
        more are durable, nobody waits for that."""
        self._bases_durable += 1
        if not self.peers.sends_log or self._bases_durable > 2:
            self.logs.drop_older(timeline)

    def _on_everywhere(self, trainer: Attached, base: BaseId) -> None:
        """A base is whole with all peers."""
        if base.timeline == self.timeline:
            self.logs.drop_older(base.timeline)
            trainer.tell({"kind": "peered", "base": base.step, "step": None, **self.stats()})


def _report(trainer: Attached, error: EverstepError, kind: str = "error", **more: int) -> None:
    """What fails is told to the trainer whose it is, and to no other."""
    _log.error("%s", error)
    trainer.tell({"kind": kind, "error": error_to_wire(error), **more})


HANDLERS: Mapping[str, Callable[[Duties, Attached, dict[str, Any]], None]] = {
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
"""What is done at each kind of message from the training process that is attached."""
