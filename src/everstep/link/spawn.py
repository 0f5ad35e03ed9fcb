"""Starting a keeper process beside a trainer, and connecting to it.

The trainer calls :func:`spawn_keeper`, then :func:`connect`. In the new process the first
thing that happens is :func:`begin`: it forks once more, so that the keeper is nobody's
child, and outlives the trainer and its process group. What it prints goes into its log,
whose end becomes part of the error if it never comes up.

Neither waits for ever, and a keeper that has died while starting is noticed at once: every
process that can still print into the log holds a shared lock on it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.errors import KeeperError, KeeperTimeoutError
from everstep.link.registry import (
    KeeperFiles,
    find_keeper,
    keeper_files,
    keeper_key,
    read_tail,
)
from everstep.link.wire import SEND_TIMEOUT_S, Connection
from everstep.seams.files.locks import LockedFile, lock_file
from everstep.seams.messages import say
from everstep.seams.network.sockets import UnixStream, connect_stream, own_uid
from everstep.seams.processes.processes import (
    detach_from_parent,
    portable_environment,
    raise_descriptor_limit,
    set_affinity,
    start_detached,
)
from everstep.seams.processes.runtime import RUNTIME_DIR_VARIABLE

__all__ = ["LINGER_S", "WRITERS", "SpawnOptions", "begin", "connect", "spawn_keeper"]

LINGER_S = 600.0
"""How long a keeper waits for a trainer to come back, by default."""

WRITERS = 6
"""Threads of a keeper that write, by default."""

_SPAWN_TIMEOUT_S = 60.0  # of an interpreter on a busy machine, with a slow network disk
_LOCK_TIMEOUT_S = 5.0
_LOOK_AGAIN_S = 0.02
_LIBRARY_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class SpawnOptions:
    """What a keeper process is told at its start.

    Attributes:
        run: real path of the run folder.
        run_id: from ``run.json``.
        linger_s: without a trainer for so long, it persists what it has and ends.
        cores: where it may run; None for wherever the trainer may.
        threads: threads that write.
        detach: whether it makes itself nobody's child first; false in tests, and for people
            who start one in a terminal.
    """

    run: str
    run_id: str
    rank: int
    linger_s: float = LINGER_S
    cores: tuple[int, ...] | None = None
    threads: int = WRITERS
    detach: bool = True

    @property
    def key(self) -> str:
        """See :func:`~everstep.link.registry.keeper_key`."""
        return keeper_key(self.run, self.run_id, self.rank)

    def arguments(self) -> list[str]:
        """The options as words of a command line."""
        words = [
            f"--run={self.run}",
            f"--run-id={self.run_id}",
            f"--rank={self.rank}",
            f"--linger-s={self.linger_s!r}",
            f"--threads={self.threads}",
        ]
        if self.cores is not None:
            words.append(f"--cores={','.join(map(str, self.cores))}")
        return words + (["--detach"] if self.detach else [])

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> SpawnOptions:
        """The inverse of :meth:`arguments`.

        Raises:
            SystemExit: with words on standard error, for anything else.
        """
        parser = argparse.ArgumentParser(
            prog="python -m everstep.keeper",
            description="The process that makes captured state durable; started by a "
            "Checkpointer. `everstep ps` lists those that run.",
            allow_abbrev=False,
        )
        parser.add_argument("--run", required=True, help="the run folder")
        parser.add_argument("--run-id", required=True, help="its id, from run.json")
        parser.add_argument("--rank", required=True, type=int)
        parser.add_argument("--linger-s", type=float, default=LINGER_S, help="without a trainer")
        parser.add_argument("--cores", type=_cores, help="where to run, e.g. 0,1")
        parser.add_argument("--threads", type=int, default=WRITERS, help="that write")
        parser.add_argument("--detach", action="store_true", help="be nobody's child")
        return cls(**vars(parser.parse_args(list(arguments))))


def _cores(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


# --- The trainer's side -----------------------------------------------------------------


def spawn_keeper(
    options: SpawnOptions,
    *,
    program: Sequence[str] | None = None,
    timeout_s: float = _SPAWN_TIMEOUT_S,
) -> None:
    """Starts a keeper; returns when it is on its own, which is before it can be connected to.

    If another keeper has the key already, or is faster, the new one ends by itself.

    Args:
        program: what to run instead of ``python -m everstep.keeper``; for tests.

    Raises:
        KeeperError: it could not be started, with the end of its log.
    """
    files = keeper_files(options.key)
    command = [*(program or _program()), *options.arguments()]
    log = _open_log(files)
    try:
        status = start_detached(
            command, output=log.fd, environment=_environment(files), timeout_s=timeout_s
        )
    except OSError as error:
        raise KeeperError(
            f"a keeper process cannot be started: {error.strerror or error}",
            rank=options.rank,
            path=error.filename or command[0],
        ) from error
    finally:
        log.close()  # not unlocked: the keeper has it now
    if status is None:
        raise _no_keeper(files, f"the keeper has not started within {timeout_s:g} s", late=True)
    if status:
        raise _no_keeper(files, f"the keeper could not be started: exit status {status}")


def _program() -> list[str]:
    if not sys.executable:
        raise KeeperError(
            "a keeper process cannot be started: this Python does not know its own executable",
            hint="set sys.executable to the path of python",
        )
    return [os.path.abspath(sys.executable), "-X", "faulthandler", "-m", "everstep.keeper"]


def _environment(files: KeeperFiles) -> dict[str, str]:
    found = portable_environment()
    found[RUNTIME_DIR_VARIABLE] = str(files.folder)
    found.update(dict.fromkeys(_LIBRARY_THREADS, "1"))  # it computes nothing
    return found


def _open_log(files: KeeperFiles) -> LockedFile:
    """The log with a shared lock, emptied unless another process prints into it."""
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    try:
        while time.monotonic() < deadline_s:
            log = lock_file(files.log)
            if log is not None:
                log.replace(b"")
                if log.share(_LOCK_TIMEOUT_S):
                    return log
                log.close()
            else:
                log = lock_file(files.log, shared=True, timeout_s=_LOOK_AGAIN_S)
                if log is not None:
                    return log
    except OSError as error:
        raise KeeperError(
            f"the keeper's log cannot be written: {error.strerror or error}", path=files.log
        ) from error
    raise KeeperTimeoutError(
        f"another process has held {files.log} for {_LOCK_TIMEOUT_S:g} s", path=files.log
    )


def connect(key: str, *, timeout_s: float, send_timeout_s: float = SEND_TIMEOUT_S) -> Connection:
    """Connects to the keeper of a key, which may still be starting.

    With ``timeout_s=0`` it is one attempt: is there a keeper?

    Raises:
        KeeperTimeoutError: none has come up in time.
        KeeperError: the one that was started has ended; or what answers is another user's
            process. With the last lines of the log, if there is one.
    """
    files = keeper_files(key, create=False)
    deadline_s = time.monotonic() + timeout_s
    while True:
        stream = _try_to_connect(files)
        if stream is not None:
            return Connection(_verified(stream, files), send_timeout_s=send_timeout_s)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            what = f"no keeper has answered within {timeout_s:g} s" if timeout_s else "no keeper"
            raise _no_keeper(files, f"{what} at {files.socket}", late=True)
        if _has_ended(files, key):
            raise _no_keeper(files, "the keeper has ended")
        time.sleep(min(left_s, _LOOK_AGAIN_S))


def _try_to_connect(files: KeeperFiles) -> UnixStream | None:
    try:
        return connect_stream(files.socket)
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        return None
    except OSError as error:
        raise KeeperError(
            f"the keeper's socket cannot be used: {error.strerror or error}", path=files.socket
        ) from error


def _verified(stream: UnixStream, files: KeeperFiles) -> UnixStream:
    """``stream``, if the process at the other end is this user's."""
    try:
        peer = stream.peer()
        if peer.uid == own_uid():
            return stream
        error = KeeperError(
            f"what answers at {files.socket} is another user's process "
            f"(process {peer.pid}, uid {peer.uid})",
            path=files.socket,
            hint=f"set {RUNTIME_DIR_VARIABLE} to a folder of your own",
        )
    except OSError as problem:
        error = KeeperError(
            f"the system does not tell whose process answers: {problem}", path=files.socket
        )
    stream.close()
    raise error


def _has_ended(files: KeeperFiles, key: str) -> bool:
    """Whether a keeper was started for this key and no process of it is left."""
    try:
        log = lock_file(files.log, create=False)
    except OSError:  # none was started by us: somebody may be starting one by hand
        return False
    if log is None:
        return False
    log.release()
    return find_keeper(key) is None


def _no_keeper(files: KeeperFiles, what: str, *, late: bool = False) -> KeeperError:
    tail = read_tail(files.log)
    if tail:
        what += "; its log ends with:" + "".join(f"\n    {line}" for line in tail)
    kind = KeeperTimeoutError if late else KeeperError
    return kind(what, path=files.log if tail else None)


# --- The keeper's side ------------------------------------------------------------------


def begin(arguments: Sequence[str]) -> SpawnOptions:
    """What the keeper's ``main`` calls first, before it imports anything large.

    Reads the arguments, detaches the process if they say so (the caller goes on in the
    child), lets it have as many descriptors as it may, and keeps it on its cores.
    """
    options = SpawnOptions.parse(arguments)
    if options.detach:
        detach_from_parent()
    raise_descriptor_limit()  # connections come from others, and its files must not run short
    if options.cores is not None:
        try:
            set_affinity(options.cores)
        except (OSError, ValueError) as error:  # slower, but of use all the same
            say(f"everstep keeper: {error}")
    return options
