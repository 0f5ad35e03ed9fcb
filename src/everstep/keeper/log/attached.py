"""A training process, as its keeper sees it."""

from __future__ import annotations

from typing import Any

from everstep.arena.memory import Arena
from everstep.errors import EverstepError
from everstep.link.capture import Capture
from everstep.link.wire import Connection
from everstep.seams.processes.processes import PidWatch
from everstep.state.layout.shards import ShardLayout

__all__ = ["Attached"]


class Attached:
    """The training process that is attached.

    Attributes:
        watch: follows it, whoever else has its socket.
        arena: made for it alone.
        captures: those it has begun, by number, until they are durable or have failed.
        objects: parts that have come so far, by capture and name.
        layouts: as messages hold them, by number.
        log_layouts: of records of the log, by the numbers that stand for them now.
        gone: nothing can be said to it any more.
        said_bye: it waits for our end.
    """

    def __init__(self, connection: Connection, pid: int, arena: Arena) -> None:
        self.connection = connection
        self.watch = PidWatch(pid)
        self.arena = arena
        self.captures: dict[int, Capture] = {}
        self.objects: dict[int, dict[str, bytearray]] = {}
        self.layouts: dict[int, dict[str, Any]] = {}
        self.log_layouts: dict[int, ShardLayout] = {}
        self.gone = False
        self.said_bye = False

    def tell(self, message: dict[str, Any]) -> None:
        """Sends; a process that is gone is noticed elsewhere."""
        if self.gone:
            return
        try:
            self.connection.send(message)
        except (EverstepError, OSError):
            self.gone = True

    def goes_on(self) -> None:
        """It waits for an answer, of which there is nothing yet: an empty part says so."""
        self.tell({"kind": "blob", "number": 0, "part": b""})

    def named(self, number: int, *, again: bool) -> Capture | None:
        """A capture of this process; None: it is over, as it may be where this is said again.

        Raises:
            KeyError: there is none.
        """
        return self.captures.get(number) if again else self.captures[number]
