"""Start a keeper process next to a trainer, and connect to it.

The trainer calls :func:`spawn_keeper`, then :func:`connect`. The new process calls :func:`begin`
first: it forks once more, so that the keeper has no parent that could take it down, and outlives
the
trainer and its process group. Its output goes to its log, whose end becomes part of the error if it
does not start.

No wait is unbounded, and a keeper that dies while starting is noticed at once: each process that
can still write to the log holds a shared lock on it.
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
from everstep.seams.locks import LockedFile, lock_file
from everstep.seams.processes import RUNTIME_DIR_VARIABLE
from everstep.seams.processes.processes import (
    detach_from_parent,
    portable_environment,
    raise_descriptor_limit,
    set_affinity,
    start_detached,
)
from everstep.seams.progress import print_line
from everstep.seams.sockets import UnixStream, connect_stream, own_uid

LINGER_S = 600.0
"""Default time for which a keeper waits for a trainer to return."""

WRITERS = 6
"""Default number of threads of a keeper that write to disk."""

# Generous: Python may start slowly on a busy machine from a network disk.
_SPAWN_TIMEOUT_S = 60.0
_LOCK_TIMEOUT_S = 5.0
_LOOK_AGAIN_S = 0.02
_LIBRARY_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class SpawnOptions:
    """Options of a keeper process, passed on its command line.

    Attributes:
        run: real path of the run folder.
        run_id: from ``run.json``.
        rank: the rank that it serves.
        linger_s: seconds without a trainer after which it persists its state and exits.
        cores: cores to run on; None for those of the trainer.
        threads: number of threads that write to disk.
        detach: make it independent of its parent; False in tests, and for a start in a terminal.
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
        """Key of the keeper; see :func:`~everstep.link.registry.keeper_key`."""
        return keeper_key(self.run, self.run_id, self.rank)

    def arguments(self) -> list[str]:
        """Return the options as command line arguments."""
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
        """Parse command line arguments.

        Raises:
            SystemExit: they are invalid; the reason is on standard error.
        """
        parser = argparse.ArgumentParser(
            prog="python -m everstep.keeper",
            description="Process that makes captured state durable; started by a Checkpointer. "
            "`everstep ps` lists the running ones.",
            allow_abbrev=False,
        )
        parser.add_argument("--run", required=True, help="the run folder")
        parser.add_argument("--run-id", required=True, help="its id, from run.json")
        parser.add_argument("--rank", required=True, type=int)
        parser.add_argument(
            "--linger-s", type=float, default=LINGER_S, help="seconds to wait without a trainer"
        )
        parser.add_argument("--cores", type=_cores, help="cores to run on, e.g. 0,1")
        parser.add_argument("--threads", type=int, default=WRITERS, help="writing threads")
        parser.add_argument("--detach", action="store_true", help="detach from the parent process")
        return cls(**vars(parser.parse_args(list(arguments))))


def _cores(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


# --- Trainer side -----------------------------------------------------------------------


def spawn_keeper(
    options: SpawnOptions,
    *,
    program: Sequence[str] | None = None,
    timeout_s: float = _SPAWN_TIMEOUT_S,
) -> None:
    """Start a keeper; return when it runs on its own, which is before it accepts connections.

    If another keeper holds the key or is faster, the new one exits by itself.

    Args:
        program: command to run instead of ``python -m everstep.keeper``; for tests.
        timeout_s: seconds to wait for the start.

    Raises:
        KeeperError: it could not be started; the message has the end of its log.
    """
    files = keeper_files(options.key)
    command = [*(program or keeper_program()), *options.arguments()]
    log = open_log(files)
    try:
        status = start_detached(
            command, output=log.fd, environment=keeper_environment(files), timeout_s=timeout_s
        )
    except OSError as error:
        raise KeeperError(
            f"a keeper process cannot be started: {error.strerror or error}",
            rank=options.rank,
            path=error.filename or command[0],
        ) from error
    finally:
        # Closed without unlocking: the keeper has inherited the descriptor, and with it the lock.
        log.close()
    if status is None:
        raise _no_keeper(files, f"the keeper did not start within {timeout_s:g} s", late=True)
    if status:
        raise _no_keeper(files, f"the keeper could not be started: exit status {status}")


def keeper_program() -> list[str]:
    """Return the command line of a keeper, without its options.

    Raises:
        KeeperError: Python does not know its own executable.
    """
    if not sys.executable:
        raise KeeperError(
            "a keeper process cannot be started: this Python does not know its own executable",
            hint="set sys.executable to the path of python",
        )
    # Absolute, as the keeper starts in /. Links are not resolved: Python finds a virtual
    # environment by the path it was started with.
    return [os.path.abspath(sys.executable), "-X", "faulthandler", "-m", "everstep.keeper"]


def keeper_environment(files: KeeperFiles) -> dict[str, str]:
    """Return the environment of a keeper."""
    found = portable_environment()
    # As resolved here: the keeper starts in /, where a relative path would name another folder.
    found[RUNTIME_DIR_VARIABLE] = str(files.folder)
    # The keeper computes little: thread pools of numeric libraries would only cost memory.
    found.update(dict.fromkeys(_LIBRARY_THREADS, "1"))
    return found


def open_log(files: KeeperFiles) -> LockedFile:
    """Open the log with a shared lock; empty it unless another process may write to it."""
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    try:
        while time.monotonic() < deadline_s:
            # Exclusive first: only then is no other process writing, and the log may be emptied.
            log = lock_file(files.log)
            if log is not None:
                log.replace(b"")
                # Downgraded in two steps, so another process may get the lock in between: then
                # start over.
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
    """Connect to the keeper of a key, which may still be starting.

    With ``timeout_s=0`` only one attempt is made, to find out if there is a keeper.

    Raises:
        KeeperTimeoutError: no keeper has answered in time.
        KeeperError: the keeper that was started has ended, or another user's process answers. The
            message has the last lines of the log, if there is one.
    """
    files = keeper_files(key, create=False)
    deadline_s = time.monotonic() + timeout_s
    while True:
        stream = _try_to_connect(files)
        if stream is not None:
            return Connection(_verified(stream, files), send_timeout_s=send_timeout_s)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            reason = f"no keeper has answered within {timeout_s:g} s" if timeout_s else "no keeper"
            raise _no_keeper(files, f"{reason} at {files.socket}", late=True)
        # Checked after the attempt: a keeper that has died must not cost the whole timeout.
        if _has_ended(files, key):
            raise _no_keeper(files, "the keeper has ended")
        # Polled: a socket that does not exist yet cannot be waited for.
        time.sleep(min(left_s, _LOOK_AGAIN_S))


def _try_to_connect(files: KeeperFiles) -> UnixStream | None:
    try:
        return connect_stream(files.socket)
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        # The keeper has not created its socket yet, has left a stale one, or its queue is full: try
        # again.
        return None
    except OSError as error:
        raise KeeperError(
            f"the keeper's socket cannot be used: {error.strerror or error}", path=files.socket
        ) from error


def _verified(stream: UnixStream, files: KeeperFiles) -> UnixStream:
    """Return ``stream`` if the process at the other end belongs to this user."""
    try:
        peer = stream.peer()
        if peer.uid == own_uid():
            return stream
        error = KeeperError(
            f"another user's process answers at {files.socket} "
            f"(process {peer.pid}, uid {peer.uid})",
            path=files.socket,
            hint=f"set {RUNTIME_DIR_VARIABLE} to a folder of your own",
        )
    except OSError as problem:
        error = KeeperError(
            f"the owner of the process that answers cannot be determined: {problem}",
            path=files.socket,
        )
    stream.close()
    raise error


def _has_ended(files: KeeperFiles, key: str) -> bool:
    """Return True if a keeper was started for this key and none of its processes is left."""
    try:
        log = lock_file(files.log, create=False)
    except OSError:
        # No log: a keeper may have been started by hand in a terminal.
        return False
    if log is None:
        return False
    log.release()
    # No process writes to the log. A keeper started by hand writes elsewhere: ask the registry,
    # too.
    return find_keeper(key) is None


def _no_keeper(files: KeeperFiles, message: str, *, late: bool = False) -> KeeperError:
    """Return the error for a keeper that cannot be reached, with the end of its log."""
    tail = read_tail(files.log)
    if tail:
        message += "; its log ends with:" + "".join(f"\n    {line}" for line in tail)
    kind = KeeperTimeoutError if late else KeeperError
    return kind(message, path=files.log if tail else None)


# --- Keeper side ------------------------------------------------------------------------


def begin(arguments: Sequence[str]) -> SpawnOptions:
    """Prepare a keeper process; its ``main`` calls this before it imports anything large.

    Parses the arguments, detaches the process if requested (the caller continues in the child),
    raises
    the limit of open descriptors, and pins the process to its cores.
    """
    options = SpawnOptions.parse(arguments)
    # Before any thread exists: only the calling thread survives a fork.
    if options.detach:
        detach_from_parent()
    # Other processes open connections: they must not use up the descriptors for its files.
    raise_descriptor_limit()
    if options.cores is not None:
        try:
            set_affinity(options.cores)
        except (OSError, ValueError) as error:
            # It runs slower without its cores, but it runs.
            print_line(f"everstep keeper: {error}")
    return options
