"""Copies in the memory of another node: a keeper's duty to send its own and to hold those of
others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from everstep.arena.memory import Arena
from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError
from everstep.format.names import TIMELINE_RECORD, base_dir, timeline_dir
from everstep.format.reader import read_record_bytes
from everstep.format.records import Marker
from everstep.keeper.held.newest_capture import NewestCapture
from everstep.keeper.held.peer_base_store import PeerBaseStore
from everstep.keeper.held.peer_log_store import PeerLogStore
from everstep.keeper.log.recall_wire import base_from_wire, base_to_wire, log_to_wire
from everstep.link.job_session import JobSession
from everstep.link.keeper_stats import KeeperStats
from everstep.restore.fetch.held import HeldBase
from everstep.restore.fetch.peer_copy import files_over
from everstep.run.scan import scan_base
from everstep.seams import ReadFile, Seams
from everstep.tiers.options import PeerOptions

# Loaded at first use: only jobs of several ranks, or with bases in memory, need them.
if TYPE_CHECKING:
    from everstep.keeper.held.memory_bases import IsPast, MemoryBases
    from everstep.keeper.persist.job_link import JobLink
    from everstep.keeper.process.duty import Handler, ServedTimeline
    from everstep.keeper.ship.base_sender import Source
    from everstep.keeper.ship.peer_exchange import PeerExchange


class PeerCopies:
    """Copies that this keeper holds for other ranks, and the exchange with its own peer.

    Args:
        newest_capture: the newest capture of this rank; bases are read from it while it is held.
        on_everywhere: called with each base that all peers hold completely, in a thread.

    Attributes:
        store: bases of other ranks (and, with bases in memory, of this one).
        logs: logs of other ranks.
        exchange: sends to the peer and receives from others; None: nothing is exchanged.
        bases: bases of this rank if they live in memory; None: they live on disk.
    """

    handlers: Mapping[str, Handler] = {}

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        newest_capture: NewestCapture,
        on_everywhere: Callable[[ServedTimeline, BaseId], None],
    ) -> None:
        self._clock = seams.clock
        self._filesystem = seams.filesystem
        self._on_everywhere = on_everywhere
        self._run = run
        self._newest_capture = newest_capture
        self._rank = 0
        self.store = PeerBaseStore()
        self.logs = PeerLogStore()
        self.exchange: PeerExchange | None = None
        self.bases: MemoryBases | None = None

    def serve(self, timeline: ServedTimeline) -> None:
        """Start a timeline.

        Its ``peers`` setting has ``bound_bytes`` and ``log_bytes``: memory for other ranks' bases
        and logs; ``bytes_per_s``: maximum rate; ``sends_log``: True if this rank's log is sent, as
        the ``log`` options say; ``holds``: True if bases of this rank live in memory. Without it no
        rank sends or holds anything.
        """
        settings = timeline.settings.get("peers")
        link = timeline.link
        holds = settings is not None and bool(settings.get("holds"))
        sends = link is not None and link.session.peer is not None
        if settings is None or not (holds or sends):
            # Nothing is held any more: return the memory.
            self.store = PeerBaseStore()
            self.logs = PeerLogStore()
        elif link is None:
            self._rank = 0
            self.store.new_start(settings["bound_bytes"], (), timeline.verified)
            timeline.memory_bases = self.bases = self._memory_bases(timeline, None)
        else:
            self._rank = link.session.rank
            self._prepare_stores(settings, link.session)
            self._start_exchange(timeline, settings, link)

    def _prepare_stores(self, settings: Mapping[str, Any], job_session: JobSession) -> None:
        holds = settings.get("holds")
        recovered = job_session.recovered
        own = (job_session.rank,) if holds and recovered is None else ()
        sources = (*job_session.sources, *own)
        spare = job_session.spare if holds else None
        self.store.new_start(settings["bound_bytes"], sources, recovered, spare)
        self.logs.new_start(settings["log_bytes"], job_session.sources)

    def _start_exchange(
        self, timeline: ServedTimeline, settings: Mapping[str, Any], link: JobLink
    ) -> None:
        from everstep.keeper.ship.base_sender import Pace
        from everstep.keeper.ship.log_sender import LogSender
        from everstep.keeper.ship.lossy_log import shrinking
        from everstep.keeper.ship.peer_exchange import PeerExchange
        from everstep.keeper.ship.transfer import PeerLink

        holds = bool(settings.get("holds"))
        to_peer = PeerLink(
            link.session,
            self._clock,
            link.send,
            timeline.notify,
            timeout_s=timeline.timeout_s,
        )
        pace = Pace(settings["bytes_per_s"], at_once=holds)
        exchange = PeerExchange(
            to_peer,
            self.store,
            self.logs,
            pace,
            self._find,
            lambda base: self._on_everywhere(timeline, base),
        )
        self.exchange = exchange
        if settings["sends_log"]:
            exchange.log = LogSender(
                to_peer,
                timeline.log,
                timeline.number,
                self._record_of,
                bytes_per_s=settings["bytes_per_s"],
                shrink=shrinking(PeerOptions(**settings.get("log", {}))),
                on_step=lambda step: timeline.trainer.send(
                    {"kind": "peered", "base": None, "step": step}
                ),
            )
            timeline.log.listeners.append(exchange.logged)
        link.on_peer_copies(exchange.receive)
        # Also valid after the end of the exchange: retention runs until the last base is written.
        if not holds:
            timeline.spared = exchange.needed
        # Only now: the thread must not handle messages before everything is in place.
        exchange.start()
        if holds:
            timeline.memory_bases = self.bases = self._memory_bases(timeline, exchange.is_past)
        if link.session.recovered is not None:
            # A replaced node has lost its copies: send the recovered base again.
            exchange.durable(link.session.recovered)

    def _memory_bases(self, timeline: ServedTimeline, is_past: IsPast | None) -> MemoryBases:
        from everstep.keeper.held.memory_bases import MemoryBases

        return MemoryBases(
            self._filesystem,
            self._run,
            self.store,
            self._clock,
            is_past,
            self.base_durable,
            timeout_s=timeline.timeout_s,
        )

    def base_durable(self, base: BaseId) -> None:
        """Send a base of this rank, which is durable or complete in memory."""
        exchange = self.exchange  # read once: close() in another thread sets it to None
        if exchange is not None:
            exchange.durable(base)

    def recall(self) -> tuple[list[dict[str, Any]], list[Arena]]:
        """Return the copies held for other ranks, encoded for a message, and the arenas they lie
        in.
        """
        # Nothing is copied: the trainer maps the arenas, whose memory lives as long as a reference.
        found = []
        arenas = []
        for copy, arena in self.store.whole():
            found.append({"marker": copy.marker.encode(), "record": copy.record})
            arenas.append(arena)
        return found, arenas

    def recall_logs(self) -> tuple[list[dict[str, Any]], Arena | None]:
        """Return the logs held for other ranks, encoded for a message, and their arena."""
        logs, arena = self.logs.whole()
        return [log_to_wire(log, offset) for log, offset in logs], arena

    @property
    def sends_log(self) -> bool:
        """True if this rank's log is sent to its peer."""
        exchange = self.exchange  # read once, as above
        return exchange is not None and exchange.log is not None

    def add_to(self, stats: KeeperStats) -> None:
        """Add the figures since the start of the timeline to ``stats``."""
        exchange = self.exchange  # read once, as above
        if exchange is None:
            return
        sent = exchange.bases.stats
        stats.peered = sent.sent
        stats.peered_bytes = sent.sent_bytes
        stats.peers_passed_over = sent.missed
        if exchange.log is not None:
            stats.peered_steps = exchange.log.stats.sent
            stats.peer_missed = exchange.log.stats.missed

    def close(self, *, timeout_s: float = 0.0) -> None:
        """Stop sending. Copies that are held stay."""
        bases = self.bases
        self.bases = None
        if bases is not None:
            bases.release()
        exchange = self.exchange
        self.exchange = None
        if exchange is not None:
            exchange.close()

    def _record_of(self, timeline: int) -> bytes | None:
        try:
            path = timeline_dir(self._run, timeline) / TIMELINE_RECORD
            return read_record_bytes(self._filesystem, path)
        except (OSError, EverstepError):
            return None

    def _find(self, base: BaseId) -> Source | None:
        """Return a base of this rank from wherever it can be read; None: it cannot be read yet."""
        record = self._record_of(base.timeline)
        if record is None:
            return None
        try:
            # Memory first: reading it costs the disk nothing.
            found = self._in_peer_store(base) or self._in_memory(base) or self._on_disk(base)
        except (OSError, EverstepError):
            # Not there yet, or deleted by retention: the sender tries again until its timeout.
            return None
        return None if found is None else (found, record)

    def _in_peer_store(self, base: BaseId) -> HeldBase | None:
        copy = self.store.find(self._rank, base)
        if copy is None:
            return None
        return HeldBase(copy.marker, files_over(copy.marker, copy.memory), durable=False)

    def _in_memory(self, base: BaseId) -> HeldBase | None:
        found = self._newest_capture.durable(base)
        if found is None:
            return None
        capture, arena = found
        fields, blobs = base_to_wire(capture)
        held = base_from_wire(fields, dict(enumerate(blobs)), arena)
        folder = base_dir(self._run, base.timeline, base.step)

        def file_of(file: ReadFile, name: str) -> ReadFile:
            open_file = partial(self._filesystem.open, folder / name)
            return _MemoryOrDiskFile(file, lambda: self._newest_capture.has(capture), open_file)

        files = tuple((file_of(file, record.name), record) for file, record in held.files)
        return HeldBase(held.marker, files, durable=True)

    def _on_disk(self, base: BaseId) -> HeldBase | None:
        found = scan_base(self._filesystem, self._run, base)
        if found.status != "committed" or found.manifest is None:
            return None
        if self._rank >= len(found.manifest.markers):
            return None
        marker: Marker = found.manifest.markers[self._rank]
        files = tuple(
            (self._filesystem.open(found.path / record.name), record) for record in marker.files
        )
        return HeldBase(marker, files, durable=True)


class _MemoryOrDiskFile:
    """A file read from memory while it is held there, and from disk after that.

    The memory may be reused between the two checks. Bytes read in that moment do not match the
    digest, which the receiver reports.
    """

    def __init__(
        self, memory: ReadFile, is_there: Callable[[], bool], open_file: Callable[[], ReadFile]
    ) -> None:
        self._memory = memory
        self._is_there = is_there
        self._open = open_file
        self._disk: ReadFile | None = None

    @property
    def size_bytes(self) -> int:
        return self._memory.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        # Checked before and after: the capture may be dropped, and its memory reused, meanwhile.
        if self._is_there():
            got = self._memory.read_into(buffer, offset)
            if self._is_there():
                return got
        if self._disk is None:
            self._disk = self._open()
        return self._disk.read_into(buffer, offset)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
