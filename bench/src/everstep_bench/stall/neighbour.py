"""A process that copies and digests as many bytes as a save does, and does nothing else: what
this machine takes from training for that, whoever does it.

``python -m everstep_bench.stall.neighbour`` is that process: it works when it is sent a line.
"""

from __future__ import annotations

import functools
import sys
from typing import IO

from everstep_bench.harness.children import Child, say
from everstep_bench.harness.figures import Role
from everstep_bench.harness.placement import Placement
from everstep_bench.options import NEIGHBOUR
from everstep_bench.stall.arms import Arm, Pending

_PIECE_BYTES = 4 << 20


class Neighbour(Arm):
    """Saves nothing.

    Args:
        size_bytes: of the state.
        placement: where the process runs.
    """

    role: Role = "control"

    def __init__(self, size_bytes: int, placement: Placement) -> None:
        super().__init__(
            NEIGHBOUR, "a process that copies and digests as many bytes, and saves nothing"
        )
        self._size_bytes = size_bytes
        self._placement = placement
        self._child: Child | None = None

    def open(self) -> None:
        """Start the process."""
        self._child = Child("stall.neighbour", str(self._size_bytes))
        self._child.next("ready")
        self._placement.place(self._child.pid)

    def save(self) -> Pending:
        """Let it work."""
        assert self._child is not None
        pending = Pending()
        self._child.tell()
        pending.finish_after(functools.partial(self._child.next, "done"), "everstep-neighbour")
        return pending

    def processes(self) -> list[int]:
        """Return the one process."""
        return [] if self._child is None else [self._child.pid]

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.end()
            self._child = None


def main(arguments: list[str], words: IO[str] = sys.stdin) -> int:
    """Serve until standard input ends; return the exit status.

    Args:
        arguments: how many bytes to copy and digest.
    """
    import numpy as np
    import xxhash

    size_bytes = int(arguments[0])
    source = np.ones(size_bytes, np.uint8)
    target = np.zeros(size_bytes, np.uint8)
    say("ready")
    for _ in words:
        digest = xxhash.xxh3_128()
        for begin in range(0, size_bytes, _PIECE_BYTES):
            piece = target[begin : begin + _PIECE_BYTES]
            np.copyto(piece, source[begin : begin + _PIECE_BYTES])
            digest.update(piece.data)
        say("done", digest=digest.hexdigest())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
