"""One child process: started, followed through its journal, killed by its id."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from everstep.demo.journal import Event, JournalReader

__all__ = ["CHILD_COMMAND", "Child", "child_environment"]

CHILD_COMMAND: tuple[str, ...] = (sys.executable, "-m", "everstep.demo.child")

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TAIL_BYTES = 4000
_REAP_TIMEOUT_S = 10.0


def child_environment(failpoints: str = "") -> dict[str, str]:
    """The environment of a training process: one thread, no GPU, nothing left to chance."""
    environment = dict(os.environ)
    environment.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    environment["PYTHONHASHSEED"] = "0"
    environment["CUDA_VISIBLE_DEVICES"] = ""  # both runs are on the CPU: that is what is compared
    environment["EVERSTEP_FAILPOINTS"] = failpoints
    if "PYTHONPATH" in environment:  # the child works in another directory
        parts = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts)
    return environment


class Child:
    """A training process that has just been started.

    Args:
        name: for people, and for its files in ``folder``.
        command: program and arguments; the journal's path is appended.
        folder: working directory; receives journal and log.
        environment: as from :func:`child_environment`.

    Attributes:
        events: what it has reported so far.
        status: its exit status as of the last :meth:`poll`; None while it runs, minus the
            signal's number if one ended it.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.events: list[Event] = []
        self.status: int | None = None
        self._log = folder / f"{name}.log"
        journal = folder / f"{name}.jsonl"
        self._reader = JournalReader(journal)
        self.started_s = self.heard_s = time.monotonic()
        command = [*command, "--journal", str(journal), "--parent", str(os.getpid())]
        with self._log.open("wb") as log:
            self._process = self._start(command, folder, environment, log)

    def _start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], log: BinaryIO
    ) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches the supervisor alone, which ends its children.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def step(self) -> int:
        """The last step that the process has reported, resumed ones included; 0 before."""
        return next((event["step"] for event in reversed(self.events) if "step" in event), 0)

    @property
    def resumed(self) -> Event | None:
        """The report of its resume, once it is there."""
        return next((event for event in self.events if event["event"] == "resumed"), None)

    @property
    def finished(self) -> Event | None:
        """Its last report, once it is there."""
        return next((event for event in self.events if event["event"] == "finished"), None)

    @property
    def position(self) -> tuple[int, float | None]:
        """The last step that it has reported, and its loss; None before its first own step."""
        for event in reversed(self.events):
            if event["event"] == "step":
                return event["step"], float.fromhex(event["loss"])
        return self.step, None

    @property
    def losses(self) -> list[tuple[int, str]]:
        """``(step, loss in hexadecimal)`` of every step it has taken."""
        return [(event["step"], event["loss"]) for event in self.events if event["event"] == "step"]

    def poll(self) -> None:
        """Reads what is new in the journal, and the exit status once there is one."""
        status = self._process.poll()  # before reading: then nothing can come after the read
        new = self._reader.read_new()
        if new:
            self.heard_s = time.monotonic()
            self.events += new
        self.status = status

    def kill(self) -> None:
        """Sends SIGKILL to this very process and waits until it is gone; harmless if it is."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=_REAP_TIMEOUT_S)

    def log_tail(self) -> str:
        """The end of what it wrote to standard output and error."""
        try:
            data = self._log.read_bytes()
        except FileNotFoundError:
            return ""
        return data[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
