"""Child processes of a bench: each works on an order, and answers with lines of JSON.

``python -m everstep_bench.MODULE ORDER``, started by the benchmark, not by people.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import everstep
from everstep.errors import DeadlineError, EverstepError

TIMEOUT_S = 600.0
"""A save, or an answer, that takes longer has failed."""

EXIT_ORPHANED = 70
"""Exit status of a child whose benchmark has ended."""

_END_S = 10.0
_READ_BYTES = 1 << 16

_Order = TypeVar("_Order", bound="Order")


@dataclass(frozen=True)
class Order:
    """Order for a child process.

    Attributes:
        parent: process to live and die with.
    """

    parent: int

    def encode(self) -> str:
        """As an argument."""
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def decode(cls: type[_Order], text: str) -> _Order:
        """From an argument."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))

    @property
    def is_orphaned(self) -> bool:
        """Return True if the process that gave the order has ended."""
        return os.getppid() != self.parent


def say(event: str, **fields: Any) -> None:
    """Tell the benchmark, with the time on the clock that processes of one machine share."""
    # One write, in the kernel's hands when it returns: a kill right after cannot take it back.
    text = json.dumps({"event": event, "at_s": time.monotonic(), **fields})
    os.write(sys.stdout.fileno(), text.encode() + b"\n")


class Child:
    """A child process, and what it has said. A context manager: killed if its block fails, and
    ended after it.

    Args:
        command: another program than the module.

    Attributes:
        pid: its number.
    """

    def __init__(self, module: str, *arguments: str, command: Sequence[str] = ()) -> None:
        home = str(Path(everstep.__file__).parent.parent)
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            command or [sys.executable, "-m", f"everstep_bench.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the benchmark, which ends them in good order
        )
        assert self._process.stdout is not None
        self._module = module
        self._descriptor = self._process.stdout.fileno()
        self._read = b""
        self._ended = False
        self.pid = self._process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self.end()

    def tell(self) -> None:
        """Send it a line: it goes on with its work."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    def next(self, event: str | None = None, step: int | None = None) -> dict[str, Any]:
        """Return its next word, which must be this one, if one is named.

        Raises:
            EverstepError: it has ended, or says something else.
            DeadlineError: it hangs.
        """
        for word in self.until(time.monotonic() + TIMEOUT_S):
            wanted = {"event": event or word["event"], "step": step or word.get("step")}
            if any(word.get(name) != value for name, value in wanted.items()):
                said = f"{word['event']!r}, step {word.get('step')}"
                raise EverstepError(f"{self._module} says {said}, not {wanted}")
            return word
        raise DeadlineError(f"{self._module} has not answered within {TIMEOUT_S:g} s")

    def until(self, end_s: float) -> Iterator[dict[str, Any]]:
        """Yield its words until a moment of the monotonic clock.

        Raises:
            EverstepError: it has ended.
        """
        while True:
            yield from self._lines()
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            self.wait(left_s)
            if self._ended and b"\n" not in self._read:
                raise EverstepError(
                    f"{self._module} has ended: exit status {self._process.wait(_END_S)}",
                    hint="what it said is above; too much for this machine?",
                )

    def wait(self, timeout_s: float) -> bool:
        """Wait for a word or its end; return True if there is one."""
        if b"\n" not in self._read and select.select([self._descriptor], [], [], timeout_s)[0]:
            self._take()
        return self._ended or b"\n" in self._read

    def kill(self) -> list[dict[str, Any]]:
        """Kill it (SIGKILL); return its remaining words, without one that the kill cut short."""
        self._process.kill()
        self._process.wait()
        while not self._ended:
            self._take()
        return list(self._lines())

    def end(self) -> None:
        """Let it end with its standard input; kill it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _take(self) -> None:
        found = os.read(self._descriptor, _READ_BYTES)
        self._read += found
        self._ended = not found

    def _lines(self) -> Iterator[dict[str, Any]]:
        while b"\n" in self._read:
            line, self._read = self._read.split(b"\n", 1)
            yield json.loads(line)
