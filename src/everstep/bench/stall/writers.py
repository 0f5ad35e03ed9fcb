"""Other ranks' worth of flushing at the same time: processes that save through runs of their
own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import IO

import everstep
from everstep.bench.stall.arms import TIMEOUT_S
from everstep.bench.stall.cores import Placement
from everstep.errors import DeadlineError, EverstepError

__all__ = ["Writers"]

_WORD = b"save\n"
_END_S = 10.0


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
                self._answer(process)
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
            _pipe(process.stdin).write(_WORD)
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
        return max(float(self._answer(process)) for process in self._processes)

    def _start(self, run: Path) -> subprocess.Popen[bytes]:
        home = str(Path(everstep.__file__).parent.parent)
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", "everstep.bench.stall.writer", str(run), str(self._size_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the benchmark, which ends them in good order
        )
        self._placement.place(process.pid)
        return process

    def _answer(self, process: subprocess.Popen[bytes]) -> bytes:
        pipe = _pipe(process.stdout)
        ready, _, _ = select.select([pipe], [], [], TIMEOUT_S)
        if not ready:
            raise DeadlineError(f"a writer has not answered within {TIMEOUT_S:g} s")
        line = pipe.readline()
        if not line:
            raise EverstepError(
                f"a writer has ended: exit status {process.wait(_END_S)}",
                hint="what it said is above; too many --writers for this machine?",
            )
        return line

    def _end(self) -> None:
        for process in self._processes:
            _pipe(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _pipe(process.stdout).close()
        self._processes.clear()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
