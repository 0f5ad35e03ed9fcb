"""Processes of the benchmark that work when they are told to and answer with a line."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import everstep
from everstep.errors import DeadlineError, EverstepError
from everstep_bench.stall.arms import TIMEOUT_S

__all__ = ["answer", "end", "running", "start", "tell"]

_END_S = 10.0


def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """``python -m module arguments``, with pipes."""
    home = str(Path(everstep.__file__).parent.parent)
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C is for the benchmark, which ends them in good order
    )


@contextlib.contextmanager
def running(module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The same, until the end of the block; killed if that fails."""
    process = start(module, *arguments)
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    finally:
        end(process)


def tell(process: subprocess.Popen[bytes], word: bytes) -> None:
    """Sends it a line."""
    _pipe(process.stdin).write(word)


def answer(process: subprocess.Popen[bytes], who: str) -> bytes:
    """Its next line.

    Raises:
        EverstepError: it has ended.
        DeadlineError: it hangs.
    """
    pipe = _pipe(process.stdout)
    ready, _, _ = select.select([pipe], [], [], TIMEOUT_S)
    if not ready:
        raise DeadlineError(f"a {who} has not answered within {TIMEOUT_S:g} s")
    line = pipe.readline()
    if not line:
        raise EverstepError(
            f"a {who} has ended: exit status {process.wait(_END_S)}",
            hint="what it said is above; too much for this machine?",
        )
    return line


def end(process: subprocess.Popen[bytes]) -> None:
    """Lets it end with its standard input; if it does not, kills it."""
    stdin = _pipe(process.stdin)
    if not stdin.closed:
        stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _pipe(process.stdout).close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
