"""Bases of the attached trainer: receive captures and have them written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Protocol

from everstep.commit.retention import KeepRules
from everstep.errors import KeeperError, StateError
from everstep.format.records import Annotations
from everstep.format.writer import ChunkRing
from everstep.keeper.held import NewestCapture
from everstep.keeper.log import Logs
from everstep.keeper.persist import BaseWriter, JobLink, Timeline
from everstep.keeper.process.duty import AttachedTrainer, Handler, ServedTimeline
from everstep.keeper.replica import Rebuilds
from everstep.link import Save, error_to_wire
from everstep.link.capture import Capture, Incoming
from everstep.link.messages import JobSession, from_plain, mailbox_error, plan_from_wire
from everstep.link.wire import error_from_wire
from everstep.seams import Seams, failpoint
from everstep.seams.mailbox import TcpMailbox

_log = logging.getLogger("everstep.keeper")


class BaseEvents(Protocol):
    """Receives the ends of bases, in the writing thread."""

    def base_ended(self, trainer: AttachedTrainer, capture: Capture) -> None:
        """A base is durable or has failed; retention follows."""
        ...

    def base_retained(self, timeline: ServedTimeline, capture: Capture) -> None:
        """Retention after a base is over."""
        ...


class Bases:
    """Takes over the captures of the attached trainer.

    Args:
        run: the run folder.
        ring: chunks and threads that write to disk.

    Attributes:
        mailbox: open for the next timeline, if there are several ranks.
        stopping: True when the keeper was asked to stop: no new capture is accepted.
    """

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        ring: ChunkRing,
        newest_capture: NewestCapture,
        logs: Logs,
        rebuilds: Rebuilds,
        events: BaseEvents,
    ) -> None:
        self._seams = seams
        self._run = run
        self._ring = ring
        self._newest_capture = newest_capture
        self._logs = logs
        self._rebuilds = rebuilds
        self._events = events
        self._timeline: ServedTimeline | None = None
        self.mailbox: TcpMailbox | None = None
        self.stopping = False

    @property
    def writer(self) -> BaseWriter | None:
        """Thread that writes bases; None before the first timeline."""
        return None if self._timeline is None else self._timeline.writer

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of messages about captures, and of the mailbox of the next timeline."""
        return {
            "listen": self.listen,
            "layout": self.layout,
            "begin": self.begin,
            "object": self.chunk,
            "captured": self.captured,
            "persist": self.persist,
            "abandon": self.abandon,
            "forget": self.forget,
            "annotate": self.annotate,
        }

    def serve(self, timeline: ServedTimeline) -> None:
        """Start to write the bases of a timeline."""
        settings = timeline.settings
        timeline.writer = BaseWriter(
            Timeline(
                self._seams,
                self._run,
                timeline.number,
                self._ring,
                timeline.timeout_s,
                keep=from_plain(settings["keep"], KeepRules),
                history=settings.get("history", "last"),
                verified=timeline.verified,
                link=timeline.link,
                spared=timeline.spared,
            ),
            timeline.channel,
            timeline.trainer.arena,
            records=timeline.log,
            bases=timeline.memory_bases,
            on_done=lambda capture: self._events.base_retained(timeline, capture),
        )
        # Queued before any base, so that the sweep never sees files of a base in progress.
        timeline.writer.queue(timeline.writer.sweep)
        self._timeline = timeline

    def close(self, *, timeout_s: float = 0.0) -> None:
        """End the writing thread after it has persisted the captures in the queue."""
        if (writer := self.writer) is not None:
            writer.close()

    def open_link(
        self, session: Mapping[str, Any] | None, trainer: AttachedTrainer
    ) -> JobLink | None:
        """Open the link of the next timeline to the other ranks; return None for a single rank.

        Args:
            session: place of this rank in the job, as the ``serve`` message has it.
        """
        mailbox = self.mailbox
        # Handed over: the link closes it from now on, not close_mailbox().
        self.mailbox = None
        if session is None:
            return None
        assert mailbox is not None
        clock = self._seams.clock
        return JobLink(JobSession.from_wire(session), mailbox, clock, timeout_s=trainer.timeout_s)

    def close_mailbox(self) -> None:
        """Close a mailbox that no timeline has used."""
        if self.mailbox is not None:
            self.mailbox.close()

    def listen(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Open a mailbox for the keepers of the other ranks, and reply with its port."""
        reply: dict[str, Any] = {"kind": "listening", "port": 0, "error": None}
        if self.mailbox is not None:
            self.mailbox.close()
        # A trainer that lost its connection and attaches again asks for the same port: free it.
        if (writer := self.writer) is not None:
            writer.free_port(message["port"])
        try:
            self.mailbox = TcpMailbox(message["host"], message["port"])
            reply["port"] = self.mailbox.address[1]
        except OSError as error:
            reply["error"] = error_to_wire(mailbox_error(message["host"], message["port"], error))
        trainer.send(reply)

    def layout(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Receive the layout of the files of captures to come."""
        # One layout at a time: captures of the previous one have begun, and hold their plan.
        trainer.layouts = {message["number"]: message["layout"]}

    def begin(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Register a capture that has begun.

        Raises:
            KeeperError: the keeper was asked to stop.
        """
        timeline = self._timeline
        assert timeline is not None
        # A stopping keeper waits for its captures: accepting more could keep it alive for ever.
        if self.stopping:
            raise KeeperError("this keeper was asked to stop")
        # As in captured(): a rebuilt base that is complete replaces the log before it.
        if self._rebuilds.take_completed() and not timeline.writer.is_one_of_several:
            self._logs.drop_older(timeline.number)
        arena = trainer.arena
        word = message["word"]
        plan = plan_from_wire(trainer.layouts[message["layout"]], message["identity"])
        capture = Capture(
            number=message["number"],
            layout=message["layout"],
            plan=plan,
            save=Save(
                plan.identity.step,
                plan.identity.timeline,
                parked=bool(message.get("parked")),
                in_memory=bool(message.get("in_memory")),
            ),
            offset=message["offset"],
            word=word,
            stream=message["stream"],
            incoming=Incoming(lambda: arena.progress(word), timeout_s=timeline.timeout_s),
            on_end=lambda ended: self._events.base_ended(trainer, ended),
        )
        trainer.captures[capture.number] = capture
        # The trainer may fill the block from now on: a capture held in the same memory is lost.
        self._newest_capture.drop_overwritten(capture, arena)
        failpoint("keeper.after_begin")
        if not capture.parked:
            timeline.writer.begin(capture)

    def chunk(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Receive a chunk of an encoded object, of a capture or of a log record."""
        objects = trainer.objects.setdefault(message["number"], {})
        objects.setdefault(message["name"], bytearray()).extend(message["part"])

    def captured(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Take over a capture that is complete."""
        parts = trainer.objects.pop(message["number"], {})
        capture = trainer.captures.get(message["number"])
        # It has failed meanwhile: the trainer may already use its memory again.
        if capture is None or capture.incoming.lost:
            return
        timeline = self._timeline
        assert timeline is not None
        failpoint("keeper.after_captured")
        # Before the log is dropped: at each moment memory holds a base, or a log that leads there.
        several = timeline.writer.is_one_of_several
        self._newest_capture.take(capture, trainer.arena, several=several)
        # Of several ranks another one may still lose its share of this base: the log stays until
        # the base is durable on all of them.
        if not several:
            self._logs.drop_older(timeline.number)
        objects = {name: bytes(data) for name, data in parts.items()}
        # A parked capture is written only on request; it still has to count as complete.
        if capture.parked:
            capture.incoming.arrived(objects)
        else:
            timeline.writer.captured(capture, objects)

    def persist(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Make a capture durable that was to stay in memory only."""
        number = message["number"]
        # A repeated message may arrive after the end of its capture.
        again = message.get("again")
        self.write_parked(trainer.captures.get(number) if again else trainer.captures[number])

    def abandon(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Give up a capture whose remaining data will never arrive."""
        trainer.objects.pop(message["number"], None)
        self._rebuilds.forget(message["number"])
        capture = trainer.captures.get(message["number"])
        why = message["error"]
        if capture is not None and capture.parked:
            # Nobody writes a parked capture, so the error has to be sent from here.
            del trainer.captures[capture.number]
            if why is not None:
                trainer.send({"kind": "error", "error": why})
        elif capture is not None and (writer := self.writer) is not None:
            writer.abandon(capture, None if why is None else error_from_wire(why))
            return
        # The capture has ended, or the trainer was interrupted before it sent ``begin``. Reply all
        # the same: the trainer keeps the memory until it receives ``done``.
        interrupted = StateError("the save was interrupted")
        number = {"number": message["number"]}
        trainer.send({"kind": "failed", "error": error_to_wire(interrupted), **number})
        trainer.send({"kind": "done", **number})

    def forget(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Drop a capture from memory that the trainer no longer needs."""
        capture = trainer.captures.get(message["number"])
        if capture is not None and capture.parked:
            del trainer.captures[capture.number]
        self._newest_capture.forget(message["number"], trainer.arena)

    def annotate(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Receive metrics and a note for a base."""
        assert self.writer is not None
        self.writer.annotate(from_plain(message["annotations"], Annotations))

    def lose(self, trainer: AttachedTrainer) -> None:
        """Drop captures that are incomplete: the trainer has ended."""
        writer = self.writer
        if writer is None:
            return
        # A copy: the writing thread removes captures that have ended.
        for capture in list(trainer.captures.values()):
            # A capture that is being rebuilt has arrived completely, so it is not dropped.
            if not capture.incoming.complete and not capture.assembling:
                _log.info("the capture of step %d is incomplete: dropped", capture.step)
                # Without an error: no trainer is attached that could receive it.
                writer.abandon(capture, None)
        writer.training_ended()

    def write_parked(self, capture: Capture | None) -> None:
        """Write a parked capture like any other; harmless when repeated."""
        writer = self.writer
        if capture is not None and capture.parked and writer is not None:
            capture.save.parked = False
            writer.begin(capture)
            writer.captured(capture, capture.incoming.objects())
