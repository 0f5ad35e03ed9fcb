"""One duty of the keeper, and the timeline that all duties serve.

The training process that is attached to a keeper.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from everstep.arena import Arena
from everstep.commit import BaseId
from everstep.errors import EverstepError
from everstep.link import BackgroundChannel, Connection, error_to_wire
from everstep.link.capture import Capture
from everstep.seams.processes import PidWatch
from everstep.state.layout import ShardLayout

if TYPE_CHECKING:
    from everstep.keeper.held.peer_stores import MemoryBases
    from everstep.keeper.log.log_store import LogStore
    from everstep.keeper.persist.base_writer import BaseWriter
    from everstep.keeper.persist.job_link import JobLink


class AttachedTrainer:
    """Connection to the attached training process, and the state that its messages build up.

    Attributes:
        watch: process watch; works even if another process holds the socket.
        arena: shared memory created for this process.
        timeout_s: seconds without progress after which this process takes a transfer for hung.
        captures: captures in progress by number, until they are durable or have failed.
        objects: chunks of encoded objects received so far, by capture number and object name.
        layouts: layouts by number, as messages encode them.
        log_layouts: layouts of log records by number.
        unreachable: True after a failed send; nothing is sent any more.
        detaching: True after the process asked to detach and waits for the keeper to finish.
    """

    def __init__(self, connection: Connection, pid: int, arena: Arena, *, timeout_s: float) -> None:
        self.connection = connection
        self.watch = PidWatch(pid)
        self.arena = arena
        self.timeout_s = timeout_s
        self.captures: dict[int, Capture] = {}
        self.objects: dict[int, dict[str, bytearray]] = {}
        self.layouts: dict[int, dict[str, Any]] = {}
        self.log_layouts: dict[int, ShardLayout] = {}
        self.unreachable = False
        self.detaching = False

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, unless the connection is broken.

        A failure is not raised: the event loop detects the end of the process by its pid.
        """
        if self.unreachable:
            return
        try:
            self.connection.send(message)
        # Several threads send. The first failure disables all later sends: a partly sent message
        # would make the rest of the stream unreadable.
        except (EverstepError, OSError):
            self.unreachable = True

    @property
    def has_ended(self) -> bool:
        """True if the process has ended or can no longer be reached."""
        # Process id 0: the process is in another PID namespace and cannot be watched. Only the end
        # of its connection tells that it has ended.
        return self.unreachable or (self.watch.pid != 0 and self.watch.ended())

    def send_progress(self) -> None:
        """Send an empty chunk to a process that waits for a reply, so that its timeout starts
        again.
        """
        self.send({"kind": "blob", "number": 0, "part": b""})


_log = logging.getLogger("everstep.keeper")

Handler = Callable[[AttachedTrainer, Any], None]
"""Handles a message of the attached trainer; raises KeeperError if it is invalid."""


class Duty(Protocol):
    """Part of the work of a keeper, for one timeline after the other.

    All methods run in the thread that receives messages.
    """

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handler of each kind of message that this duty receives."""
        ...

    def serve(self, timeline: ServedTimeline) -> None:
        """Start to serve a timeline; the previous one was closed."""
        ...

    def close(self, *, timeout_s: float = 0.0) -> None:
        """End the work for the timeline, and wait ``timeout_s`` for what is being done."""
        ...


@dataclass(slots=True, eq=False)
class ServedTimeline:
    """Timeline of a trainer, from its ``serve`` message to that of the next one.

    Attributes:
        settings: the ``serve`` message.
        channel: collects errors of background work for the trainer.
        verified: base that was read back and found intact, if any.
        link: link to the keepers of the other ranks; None for a single rank.
        put_back: the run folder was put back to an older state: data of this timeline, and of
            higher numbers, belongs to a history that no longer exists.
        spared: returns bases that disks must keep, however old they are, as peers hold their files.
        memory_bases: holds bases that live in memory; None: they live on disk.
        log: the gradient log, once it is open.
        writer: writes bases, once it has started.
    """

    trainer: AttachedTrainer
    settings: Mapping[str, Any]
    channel: BackgroundChannel
    verified: BaseId | None
    link: JobLink | None
    put_back: bool
    spared: Callable[[], Iterable[BaseId]] = tuple
    memory_bases: MemoryBases | None = None
    log: LogStore = field(init=False)
    writer: BaseWriter = field(init=False)
    # Both the serving and the writing thread pass errors on.
    _reporting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def number(self) -> int:
        """Number of the timeline."""
        number: int = self.settings["timeline"]
        return number

    @property
    def timeout_s(self) -> float:
        """Seconds without progress after which a transfer counts as hung."""
        return self.trainer.timeout_s

    def pass_on(self) -> None:
        """Send collected errors to the trainer; return when they were sent."""
        # Serialised: when this returns, no other thread still holds an unsent error.
        with self._reporting:
            self.channel.check()

    def notify(self, error: EverstepError) -> None:
        """Send the trainer a notice; training goes on."""
        _log.error("%s", error)
        self.trainer.send({"kind": "notice", "error": error_to_wire(error)})
