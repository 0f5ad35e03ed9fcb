"""What a keeper shows to a process that only reads it.

It is one small message, whatever there is to tell: the index goes into memory of its own, whose
descriptor comes along. So a reader that is stopped never makes the keeper wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from everstep.arena.memory import Arena
from everstep.link.wire import Connection

__all__ = ["Look"]


@dataclass(frozen=True, slots=True)
class Look:
    """What a keeper shows to a process that is not attached.

    Attributes:
        recalled, blobs, arenas: as in the answer to ``recall``.
        settled: nothing of it is still being written or digested.
        moves: change as long as that goes on.
        pending: the identity of a base in memory that has no digests yet.
    """

    recalled: dict[str, Any]
    blobs: list[bytes]
    arenas: list[Arena]
    settled: bool
    moves: list[int]
    pending: dict[str, Any] | None

    def send(self, connection: Connection, trainer: int | None) -> None:
        """Sends it.

        Args:
            trainer: the process that is served.
        """
        index: bytes = msgpack.packb(
            {**self.recalled, "blobs": self.blobs, "pending": self.pending},
            unicode_errors="surrogatepass",
        )
        about = {"settled": self.settled, "moves": self.moves, "trainer": trainer}
        with Arena.create(len(index)) as memory:
            memory.view[: len(index)] = index
            fds = [one.fd for one in (memory, *self.arenas) if one.fd is not None]
            connection.send({"kind": "looked", "size_bytes": len(index), **about}, fds)
