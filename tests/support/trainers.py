"""Training processes of tests, forked from a process that has loaded torch already.

Loading torch takes longer than what most of these processes do; with a fork each of them has it
at once. Everything else is as with ``python -c``: a process of its own, with its own pipes,
environment, arguments, ``__main__`` and end of the interpreter. It is no child of the tests, but
of the process that it was forked from, which tells how it ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = [
    "Popen",
    "Trainer",
    "end_server",
    "finish_trainer",
    "run_trainer",
    "server_process",
    "start_trainer",
    "whole_lines",
]

Popen = subprocess.Popen[str]

ROOT = Path(__file__).parents[2]
_START_S = 90.0  # of the server, which loads torch
_MESSAGE_BYTES = 1 << 20
_CODE = "from tests.support.trainers import _serve; _serve({})"


class Trainer:
    """A process that was started by :func:`start_trainer`; to be used as
    :class:`subprocess.Popen` is.

    Attributes:
        returncode: minus the signal that ended it; None while it runs.
    """

    def __init__(self, pid: int, pipes: Sequence[int], ended: int) -> None:
        self.pid = pid
        self.stdin: IO[str] = os.fdopen(pipes[0], "w")
        self.stdout: IO[str] = os.fdopen(pipes[1])
        self.stderr: IO[str] = os.fdopen(pipes[2])
        self.returncode: int | None = None
        self._ended = ended
        self._readers: list[threading.Thread] = []
        self._read = ["", ""]

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, when it has ended.

        Raises:
            subprocess.TimeoutExpired: not within ``timeout`` seconds.
        """
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._ended, select.POLLIN)
            if not poller.poll(None if timeout is None else max(0, round(1000 * timeout))):
                raise subprocess.TimeoutExpired("a trainer", timeout or 0.0)
            said = os.read(self._ended, 64)
            assert said, "the process that trainers are forked from is gone"
            self.returncode = int(said)
            os.close(self._ended)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it says on standard output, and on standard error, to its end.

        Raises:
            subprocess.TimeoutExpired: not within ``timeout`` seconds; may be called again.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
            for number in range(2):
                self._readers.append(threading.Thread(target=self._read_all, args=(number,)))
                self._readers[-1].start()
        for reader in self._readers:
            reader.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("a trainer", timeout or 0.0)
        self.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        return self._read[0], self._read[1]

    def kill(self) -> None:
        """Ends it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends it, if it has not ended, and closes its pipes."""
        self.kill()
        self.wait(_START_S)
        for reader in self._readers:
            reader.join()
        for pipe in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_all(self, number: int) -> None:
        with (self.stdout, self.stderr)[number] as file:
            self._read[number] = file.read()


def whole_lines(text: str) -> list[str]:
    """Of what a process has said: one that is killed may be cut off in mid-line."""
    return text[: text.rfind("\n") + 1].splitlines()


class _Server:
    """The process that trainers are forked from, seen from the tests."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CODE.format(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self._socket.settimeout(_START_S)

    def start(self, job: Mapping[str, Any]) -> Trainer:
        """Forks a process that does ``job``."""
        pipes = [os.pipe() for _ in range(4)]
        ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][1]]
        try:
            socket.send_fds(self._socket, [json.dumps(job).encode()], theirs)
            said = self._socket.recv(64)
        finally:
            for number in theirs:
                os.close(number)
        assert said, "the process that trainers are forked from is gone"
        return Trainer(int(said), ours, pipes[3][0])

    def end(self) -> None:
        """Returns when it has ended, and all processes that were forked from it."""
        self._socket.close()
        self.process.wait(_START_S)


_server: _Server | None = None


def start_trainer(
    code: str, *arguments: str, new_session: bool = False, **environment: str
) -> Trainer:
    """Runs ``code`` as ``python -c`` would, in a process of its own.

    Args:
        arguments: behind ``-c`` in ``sys.argv``.
        new_session: it leads a session and a process group of its own.
        environment: added to that of this process.
    """
    global _server
    if _server is None:
        _server = _Server()
    job = {
        "code": code,
        "arguments": arguments,
        "environment": {**os.environ, **environment},
        "new_session": new_session,
    }
    return _server.start(job)


def run_trainer(
    code: str, *arguments: str, timeout_s: float, **environment: str
) -> tuple[int, str, str]:
    """Runs ``code`` to its end: exit status, standard output, standard error.

    Raises:
        AssertionError: it has not ended within ``timeout_s``; it is killed.
    """
    with start_trainer(code, *arguments, **environment) as trainer:
        return finish_trainer(trainer, timeout_s)


def finish_trainer(trainer: Trainer | Popen, timeout_s: float) -> tuple[int, str, str]:
    """As :func:`run_trainer`, of one that runs already, or of any other process with pipes."""
    with trainer:
        try:
            out, err = trainer.communicate(timeout_s)
        except subprocess.TimeoutExpired:
            trainer.kill()
            out, err = trainer.communicate(_START_S)
            raise AssertionError(f"the process hangs:\n{out}\n{err}") from None
        assert trainer.returncode is not None
        return trainer.returncode, out, err


def server_process() -> subprocess.Popen[bytes]:
    """Return the process that trainers are forked from now."""
    assert _server is not None
    return _server.process


def end_server() -> None:
    """Ends what trainers are forked from, if there is any."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.end()


# --- The process that they are forked from ------------------------------------------------


def _serve(number: int) -> None:
    """Forks a process for each job, in which this function returns; all others end with it."""
    import torch._dynamo  # noqa: F401, what optimizers load when they are first made

    import everstep.checkpointer  # noqa: F401

    gc.collect()
    gc.freeze()  # or the end of each of them copies all pages to clean up what is loaded

    connection = socket.socket(fileno=number)
    wakes, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([number, wakes], [], [])
        if wakes in ready:
            os.read(wakes, 4096)
            for pid in [*running]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    _tell(running.pop(pid), os.waitstatus_to_exitcode(status))
        if number not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 4)
        if not message:  # the tests are over, or were killed
            break
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            for other in (wakes, woken, descriptors[3], *running.values()):
                os.close(other)
            _work(json.loads(message), descriptors[:3])
            return
        for other in descriptors[:3]:
            os.close(other)
        running[pid] = descriptors[3]
        connection.send(str(pid).encode())
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _tell(descriptor: int, status: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
        os.write(descriptor, str(status).encode())
    os.close(descriptor)


def _work(job: dict[str, Any], descriptors: Sequence[int]) -> None:
    from everstep.seams import failpoints

    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if job["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(job["environment"])
    # What is read from the environment when a module is loaded.
    failpoints.arm_from_environment(os.environ.get("EVERSTEP_FAILPOINTS", ""))
    sys.argv = ["-c", *job["arguments"]]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(job["code"], "<string>", "exec"), main.__dict__)
