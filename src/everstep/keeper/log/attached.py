"""The training process that is attached to a keeper."""

from __future__ import annotations

from typing import Any

from everstep.arena.memory import Arena
from everstep.errors import EverstepError
from everstep.link.capture import Capture
from everstep.link.wire import Connection
from everstep.seams.processes.processes import PidWatch
from everstep.state.layout.shards import ShardLayout


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

    def capture(self, number: int, *, again: bool) -> Capture | None:
        """Return a capture of this process.

        Args:
            again: True if the message repeats an earlier one; then the capture may be over, and
                None is returned.

        Raises:
            KeyError: there is no such capture.
        """
        return self.captures.get(number) if again else self.captures[number]
