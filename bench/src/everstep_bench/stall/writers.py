"""Other ranks' worth of flushing at the same time: processes that save through runs of their
own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from everstep_bench.stall.cores import Placement
from everstep_bench.stall.helpers import answer, end, start, tell

__all__ = ["Writers"]

_WORD = b"save\n"
_WHO = "writer"


class Writers:
    """So many processes, each with a state of the same size.

    A context manager: they are started on entry, and ended on exit whatever happens.
    """

    def __init__(self, count: int, size_bytes: int, folder: Path, placement: Placement) -> None:
        self._count = count
        self._size_bytes = size_bytes
        self._folder = folder
        self._placement = placement
        self._processes: list[subprocess.Popen[bytes]] = []
        self._busy = False

    def __enter__(self) -> Writers:
        try:
            for number in range(self._count):
                self._processes.append(self._start(self._folder / f"writer-{number}"))
            for process in self._processes:
                answer(process, _WHO)
                self._placement.place(process.pid)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def flush(self) -> None:
        """All of them begin to save now."""
        for process in self._processes:
            tell(process, _WORD)
        self._busy = bool(self._processes)

    def wait(self) -> float | None:
        """Returns when all that have begun are durable: how long the slowest took; None if
        none had.

        Raises:
            EverstepError: one of them has ended, or hangs.
        """
        if not self._busy:
            return None
        self._busy = False
        return max(float(answer(process, _WHO)) for process in self._processes)

    def _start(self, run: Path) -> subprocess.Popen[bytes]:
        process = start("everstep_bench.stall.writer", str(run), str(self._size_bytes))
        self._placement.place(process.pid)
        return process

    def _end(self) -> None:
        for process in self._processes:
            end(process)
        self._processes.clear()
