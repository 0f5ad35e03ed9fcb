"""A process that copies and digests as many bytes as a save does, and does nothing else: what
this machine takes from training for that, whoever does it.

``python -m everstep_bench.stall.neighbour`` is that process. Started by the benchmark, not by
people: reads a word from standard input, works, answers with a line; ends with its standard
input.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import IO

from everstep.errors import EverstepError
from everstep_bench.stall.arms import Arm, Pending, Role
from everstep_bench.stall.cores import Placement
from everstep_bench.stall.helpers import answer, end, start, tell

__all__ = ["Neighbour", "main"]

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
            "neighbour", "a process that copies and digests as many bytes, and saves nothing"
        )
        self._size_bytes = size_bytes
        self._placement = placement
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Starts the process."""
        self._process = start("everstep_bench.stall.neighbour", str(self._size_bytes))
        answer(self._process, self.name)
        self._placement.place(self._process.pid)

    def save(self) -> Pending:
        """Lets it work."""
        process = self._process
        assert process is not None
        pending = Pending()

        def wait() -> None:
            try:
                answer(process, self.name)
            except EverstepError as error:
                pending.finish(error)
            else:
                pending.finish()

        tell(process, b"work\n")
        threading.Thread(target=wait, name="everstep-neighbour", daemon=True).start()
        return pending

    def processes(self) -> list[int]:
        """The one process."""
        return [] if self._process is None else [self._process.pid]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            end(self._process)
            self._process = None


def main(arguments: list[str], words: IO[str] = sys.stdin) -> int:
    """Serves until standard input ends; returns the exit status.

    Args:
        arguments: how many bytes to copy and digest.
    """
    import numpy as np
    import xxhash

    size_bytes = int(arguments[0])
    source = np.ones(size_bytes, np.uint8)
    target = np.zeros(size_bytes, np.uint8)
    print("ready", flush=True)
    for _ in words:
        digest = xxhash.xxh3_128()
        for begin in range(0, size_bytes, _PIECE_BYTES):
            piece = target[begin : begin + _PIECE_BYTES]
            np.copyto(piece, source[begin : begin + _PIECE_BYTES])
            digest.update(piece.data)
        print(digest.hexdigest(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
