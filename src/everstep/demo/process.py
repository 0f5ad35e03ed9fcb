"""One child process: start it, follow its journal, kill it by its process id."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from everstep.workloads.journal import Event, JournalReader
from everstep.workloads.processes import training_environment

CHILD_COMMAND: tuple[str, ...] = (sys.executable, "-m", "everstep.demo.child")

_TAIL_BYTES = 4000
_REAP_TIMEOUT_S = 10.0


class Child:
    """A training process, started by the constructor.

    Args:
        name: shown to users, and the name of its files in ``folder``.
        command: program and arguments; the paths of order and parent id are appended.
        folder: working directory; receives order, journal and log.
        order: the contents of the order file, see :mod:`everstep.demo.child`.

    Attributes:
        events: journal entries read so far.
        heard_s: monotonic time of the last new entry.
        status: exit status as of the last :meth:`poll`; None while it runs, minus the
            signal's number if a signal ended it.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, order: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.events: list[Event] = []
        self.status: int | None = None
        self.heard_s = time.monotonic()
        self._log = folder / f"{name}.log"
        self._reader = JournalReader(folder / f"{name}.jsonl")
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**order, "journal": str(folder / f"{name}.jsonl")}))
        command = [*command, str(path), str(os.getpid())]
        with self._log.open("wb") as log:
            self._process = self._start(command, folder, training_environment(), log)

    def _start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], log: BinaryIO
    ) -> subprocess.Popen[bytes]:
        # In a session of its own: Ctrl-C reaches the supervisor only, which ends its children.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
        )

    def report(self, kind: str) -> Event:
        """Return the event ``"resumed"`` or ``"finished"``; an empty one before it."""
        return next((event for event in self.events if event["event"] == kind), {})

    @property
    def steps(self) -> list[Event]:
        """The events of the steps that this process has taken."""
        return [event for event in self.events if event["event"] == "step"]

    @property
    def step(self) -> int:
        """The last step it has reported, taken or resumed; 0 before."""
        return next((event["step"] for event in reversed(self.events) if "step" in event), 0)

    @property
    def position(self) -> tuple[int, float | None]:
        """The last step it has reported, and its loss; None before its first own step."""
        taken = self.steps
        return self.step, float.fromhex(taken[-1]["loss"]) if taken else None

    @property
    def losses(self) -> list[tuple[int, str]]:
        """``(step, loss in hexadecimal)`` of every step it has taken."""
        return [(event["step"], event["loss"]) for event in self.steps]

    def poll(self) -> None:
        """Read new journal entries, and the exit status once there is one."""
        status = self._process.poll()  # before reading: then no entry can come after the read
        new = self._reader.read_new()
        if new:
            self.heard_s = time.monotonic()
            self.events += new
        self.status = status

    def kill(self) -> None:
        """Send SIGKILL to this process and wait for its end; do nothing if it has ended."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=_REAP_TIMEOUT_S)

    def log_tail(self) -> str:
        """Return the end of its standard output and error."""
        return self._log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
