"""Registry of the keepers of this user: one key per run and rank, three files per key.

::

    <key>.json   identity of the keeper; locked by it as long as it lives
    <key>.sock   socket that it listens at
    <key>.log    its output; locked (shared) by each process that may still write to it
    registry.lock  held briefly by each process that takes, looks up or clears a key

A keeper is alive exactly as long as its lock is held: the kernel releases the lock however the
process ends. Files without a lock are left over from a keeper that was killed; the next process
that sees them deletes them. Process ids in files prove nothing, as they are reused.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Annotated

import msgspec
import xxhash

from everstep.errors import KeeperError, KeeperTimeoutError
from everstep.seams import PosixFileSystem
from everstep.seams.locks import LockedFile, file_identity, lock_file, same_file, try_lock
from everstep.seams.machine import resolve_path
from everstep.seams.processes import RUNTIME_DIR_VARIABLE, PidWatch
from everstep.seams.processes.processes import has_file_open, refresh_times, runtime_folder
from everstep.seams.sockets import SOCKET_PATH_BYTES_MAX, listen_at

_GATE = "registry.lock"
_GATE_TIMEOUT_S = 5.0
_LOOK_AGAIN_S = 0.05
_DYING_S = 0.5
_INFO_BYTES_MAX = 1 << 16
# Time for which the log of a killed keeper is kept, for people who look for the reason.
_LOG_KEPT_S = 86400.0
_NAME = re.compile(r"([0-9a-f]{16})\.(json|log)", re.ASCII)
_FILES = PosixFileSystem()


def keeper_key(run: str, run_id: str, rank: int) -> str:
    """Return the key of a keeper, unique for this user: 16 hexadecimal digits.

    Args:
        run: real path of the run folder (:func:`~everstep.run.folder.run_path`); a copy
            of the run elsewhere is another run.
        run_id: from ``run.json``; a later run at the same path is another run.
        rank: the rank.
    """
    # ensure_ascii also escapes the surrogates that stand for undecodable bytes of a path.
    text = json.dumps([run, run_id, rank], ensure_ascii=True)
    return xxhash.xxh3_64_hexdigest(text.encode("ascii"))


@dataclass(frozen=True, slots=True)
class KeeperFiles:
    """The files of one key."""

    info: PurePath
    socket: PurePath
    log: PurePath

    @property
    def folder(self) -> PurePath:
        """The runtime folder."""
        return self.info.parent


def keeper_files(key: str, *, create: bool = True) -> KeeperFiles:
    """Return the files of a key, in the runtime folder.

    Args:
        create: create the folder if it does not exist.

    Raises:
        KeeperError: the folder cannot be used, or its path is too long for a socket.
    """
    folder = runtime_folder(create=create)
    path = folder / f"{key}.sock"
    size_bytes = len(str(path).encode("utf-8", "surrogateescape"))
    if size_bytes > SOCKET_PATH_BYTES_MAX:
        raise KeeperError(
            f"{path} is too long for a socket: {size_bytes} bytes, at most {SOCKET_PATH_BYTES_MAX}",
            path=path,
            hint=f"set {RUNTIME_DIR_VARIABLE} to a folder with a shorter path",
        )
    return KeeperFiles(folder / f"{key}.json", path, folder / f"{key}.log")


_Number = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class KeeperInfo:
    """Identity of a keeper.

    Attributes:
        pid: its process id.
        run: real path of the run folder.
        run_id: from ``run.json``.
        rank: the rank that it serves.
        version: its version of everstep.
        protocol: version of its messages.
        started_unix_s: start time, for display.
    """

    pid: _Number
    run: str
    run_id: str
    rank: _Number
    version: str
    protocol: _Number
    started_unix_s: float

    @property
    def key(self) -> str:
        """Key of the keeper; see :func:`keeper_key`."""
        return keeper_key(self.run, self.run_id, self.rank)

    def encode(self) -> bytes:
        """Return the contents of the file."""
        return json.dumps(asdict(self), ensure_ascii=True).encode("ascii") + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> KeeperInfo | None:
        """Decode the contents of the file; None for anything else."""
        # A newer version of everstep may write more fields: they are ignored.
        try:
            # Not by msgspec's own decoder, which refuses the surrogates of undecodable paths.
            return msgspec.convert(json.loads(data), cls)
        except (msgspec.ValidationError, ValueError, RecursionError):
            return None


class Registration:
    """Registration that a keeper holds as long as it lives; made by :meth:`acquire`.

    Attributes:
        key: key of the keeper.
        info: identity of the keeper.
        files: files of the key.
    """

    def __init__(self, key: str, info: KeeperInfo, files: KeeperFiles, lock: LockedFile) -> None:
        self.key = key
        self.info = info
        self.files = files
        self._lock = lock
        self._socket: tuple[int, int] | None = None  # identity of the socket file, once it exists
        # Only output that goes to the log follows it later: a keeper started by hand prints to its
        # terminal.
        self._prints = [fd for fd in (1, 2) if same_file(fd, files.log)]

    @classmethod
    def acquire(cls, key: str, info: KeeperInfo, *, timeout_s: float = 0.0) -> Registration | None:
        """Take the key for this process; return None if another keeper holds it until
        ``timeout_s``.

        Files left over from a killed keeper are deleted.

        Raises:
            KeeperError: the runtime folder cannot be used.
        """
        assert key == info.key
        files = keeper_files(key)
        deadline_s = time.monotonic() + timeout_s
        while True:
            # Inside the gate: a lookup takes the same lock for a moment, and must not be mistaken
            # for a keeper.
            with _gate(files.folder), _keeper_errors(files.info):
                lock = lock_file(files.info)
                if lock is not None:
                    try:
                        # The stale socket first: with the lock held, clients take whatever answers
                        # there for this keeper.
                        _clear_socket(files)
                        lock.replace(info.encode())
                    except BaseException:
                        # Nothing of a failed registration may stay: others would wait for a keeper
                        # that never listens.
                        lock.unlink()
                        lock.release()
                        raise
                    return cls(key, info, files, lock)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            # Polled: the file lock of another process wakes no waiter with a deadline.
            time.sleep(min(left_s, _LOOK_AGAIN_S))

    def listen(self) -> socket.socket:
        """Listen, non-blocking, at the socket of the key; accept connections with ``wire.accept``.

        Raises:
            KeeperError: the system refuses.
        """
        with _keeper_errors(self.files.socket):
            listener = listen_at(self.files.socket)
            # is_current compares it: a file of this name may later belong to another keeper.
            self._socket = file_identity(self.files.socket)
            return listener

    def again(self) -> socket.socket | None:
        """Recreate the files by which others find this keeper, and listen there.

        Returns:
            The new listener; None if another keeper holds the key.

        Raises:
            KeeperError: the runtime folder cannot be used; existing files are unchanged.
        """
        files = keeper_files(self.key)
        with _gate(files.folder), _keeper_errors(files.info):
            before = self._lock
            # Deleted files have left the old lock on an inode without a name: take the key again.
            lock = before if before.is_current else lock_file(files.info, timeout_s=_DYING_S)
            if lock is None:
                return None
            try:
                _clear_socket(files)
                if lock is not before:
                    lock.replace(self.info.encode())
                listener = self.listen()
            except BaseException:
                if lock is not before:
                    lock.unlink()
                    lock.release()
                raise
            # Release the old lock only after the new one is held: otherwise another keeper could
            # register between the two.
            self._lock = lock
            if lock is not before:
                before.release()
            self._redirect_output()
        return listener

    def _redirect_output(self) -> None:
        """Redirect standard output and error to a new log file if the old one was deleted."""
        if all(same_file(fd, self.files.log) for fd in self._prints):
            return
        # The log is for people only: a failure must not cost the registration.
        with contextlib.suppress(OSError):
            log = lock_file(self.files.log, shared=True)
            if log is not None:
                log.put_at(self._prints)

    def refresh_times(self) -> None:
        """Refresh the times of the files, so that no cleanup of old files deletes them."""
        refresh_times([self.files.folder, self.files.info, self.files.socket, self.files.log])

    @property
    def is_current(self) -> bool:
        """True while other processes can find this keeper.

        False after its files were deleted, as the system does with the contents of
        ``$XDG_RUNTIME_DIR`` at the end of a login: no process can attach any more.
        """
        try:
            return self._lock.is_current and file_identity(self.files.socket) == self._socket
        except OSError:
            # The folder was replaced by a file, or belongs to another user now.
            return False

    def release(self) -> None:
        """Release the key and delete its files; harmless when repeated.

        The log stays if another process may still write to it.
        """
        if self._lock.fd < 0:
            return
        try:
            # Otherwise the files belong to another keeper that has registered since.
            if self._lock.is_current:
                _clear_socket(self.files)
                # Delete the log only if no other process may still write to it.
                if any(same_file(fd, self.files.log) and try_lock(fd) for fd in (1, 2)):
                    _unlink(self.files.log)
                self._lock.unlink()
        except OSError:
            # Files that stay have no lock: the next process that sees them deletes them.
            pass
        finally:
            # Last, after the files: a process that gets the lock expects none of a live keeper.
            self._lock.release()


# --- Lookup -----------------------------------------------------------------------------


def list_keepers() -> list[KeeperInfo]:
    """Return the living keepers of this user, by run and rank; delete files of dead ones.

    Logs of dead keepers are kept for a day.

    Raises:
        KeeperError: the runtime folder cannot be used.
    """
    folder = runtime_folder(create=False)
    found = []
    with _keeper_errors(folder):
        try:
            entries = _FILES.scan(folder)
        except FileNotFoundError:
            return []
    now_s = time.time()
    with _gate(folder):
        for entry in entries:
            # Only names that this registry creates: other files in the folder are left alone.
            match = _NAME.fullmatch(entry.name)
            if match is None or entry.kind != "file":
                continue
            files = _files_in(folder, match[1])
            # A file may be deleted meanwhile, or not be readable: skip it.
            with contextlib.suppress(OSError):
                if match[2] == "json":
                    info = _holder(files)
                    # A file whose contents do not match its name was not written by a keeper.
                    if info is not None and info.key == match[1]:
                        found.append(info)
                elif now_s - entry.mtime_s > _LOG_KEPT_S:
                    _clear_log(files)
    return sorted(found, key=lambda info: (info.run, info.rank, info.pid))


def keepers_of(run: PurePath, run_id: str) -> list[KeeperInfo]:
    """Return the living keepers of a run, at most one per rank.

    Includes keepers that know the folder under another name (a bind mount, or a symbolic link that
    an
    older version did not resolve), for ranks without a keeper under this name.

    Raises:
        KeeperError: the runtime folder cannot be used.
    """
    found = dict[int, KeeperInfo]()
    for info in list_keepers():
        if info.run_id != run_id:
            continue
        if info.run == str(run) or (info.rank not in found and _same_folder(info.run, run)):
            found[info.rank] = info
    return [found[rank] for rank in sorted(found)]


def keepers_left_by_a_move(run_id: str) -> list[KeeperInfo]:
    """Return the living keepers of a run whose folder was moved or renamed.

    They can no longer write to it, as it does not exist where they expect it.

    Raises:
        KeeperError: the runtime folder cannot be used.
    """
    return [info for info in list_keepers() if info.run_id == run_id and _is_nowhere(info.run)]


def _is_nowhere(run: str) -> bool:
    """Return True if the folder certainly does not exist."""
    try:
        return file_identity(resolve_path(PurePath(run))) is None
    except OSError:
        # Not accessible to this user, or its disk is unavailable: unknown, so not moved.
        return False


def _same_folder(run: str, other: PurePath) -> bool:
    """Return True if two paths certainly lead to the same folder."""
    try:
        there = file_identity(resolve_path(PurePath(run)))
        return there is not None and there == file_identity(resolve_path(other))
    except OSError:
        # Not accessible to this user, or its disk is unavailable: unknown, so different.
        return False


def find_keeper(key: str) -> KeeperInfo | None:
    """Return the living keeper that holds the key; None without one.

    Raises:
        KeeperError: the runtime folder cannot be used.
    """
    folder = runtime_folder(create=False)
    files = _files_in(folder, key)
    with _keeper_errors(files.info):
        # Without the gate for the common case: no file, no keeper.
        if file_identity(files.info) is None:
            return None
        with _gate(folder):
            return _holder(files)


def kill_keeper(info: KeeperInfo) -> bool:
    """Kill (SIGKILL) this keeper and no other process; return False if it has already ended.

    State in its memory that was not written is lost.

    Raises:
        KeeperError: the process is alive but cannot be verified to be that keeper (it may run in
            another container), or this user may not kill it.
    """
    folder = runtime_folder(create=False)
    files = _files_in(folder, info.key)
    # Open the process before the check: the keeper still holds its lock afterwards, so its process
    # id cannot have been reused before it was opened.
    with PidWatch(info.pid) as watch:
        # After the process was opened: an id that was reused since does not hold this lock.
        if find_keeper(info.key) != info:
            return False
        identity = file_identity(files.info)
        if watch.ended() or identity is None or not has_file_open(info.pid, files.info, identity):
            # A dying process may have closed its files while it still holds the lock: wait.
            watch.ended(_DYING_S)
            if find_keeper(info.key) != info:
                return False
            raise KeeperError(
                f"process {info.pid} cannot be verified to be the keeper of {info.run}",
                rank=info.rank,
                hint="it may run in another container: stop it there",
            )
        try:
            return watch.signal(signal.SIGKILL)
        except PermissionError as error:
            raise KeeperError(
                f"the keeper {info.pid} may not be killed: {error.strerror}", rank=info.rank
            ) from error


def read_tail(path: PurePath, *, lines_max: int = 12, bytes_max: int = 8192) -> list[str]:
    """Return the last lines of a text file; an empty list if it cannot be read."""
    # For the text of an error only: a log that cannot be read must not hide that error.
    try:
        text = _read(path, bytes_max, at_end=True).decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines_max:]


# --- Helpers ----------------------------------------------------------------------------


def _files_in(folder: PurePath, key: str) -> KeeperFiles:
    return KeeperFiles(folder / f"{key}.json", folder / f"{key}.sock", folder / f"{key}.log")


@contextlib.contextmanager
def _gate(folder: PurePath) -> Iterator[None]:
    """Exclude all other processes, so that a lock taken by a lookup is not mistaken for a
    keeper's."""
    path = folder / _GATE
    with _keeper_errors(path):
        # Bounded: a stopped process inside the gate must not block all others for ever.
        lock = lock_file(path, timeout_s=_GATE_TIMEOUT_S)
    if lock is None:
        raise KeeperTimeoutError(
            f"another process has held {path} for {_GATE_TIMEOUT_S:g} s",
            path=path,
            hint=f"find out which: fuser -v {path}",
        )
    try:
        yield
    finally:
        lock.release()


def _holder(files: KeeperFiles) -> KeeperInfo | None:
    """Return the keeper that holds the key; delete the files of a dead one. Call within the
    gate."""
    try:
        # The lock can be taken only if its keeper has ended, however it ended.
        lock = lock_file(files.info, create=False)
    except FileNotFoundError:
        return None
    if lock is None:
        try:
            return KeeperInfo.decode(_read(files.info, _INFO_BYTES_MAX))
        except FileNotFoundError:
            # It has ended meanwhile: releasing a key does not take the gate.
            return None
    try:
        # Socket first: list_keepers() looks at .json and .log files only, and would never find a
        # socket that is left without them.
        _clear_socket(files)
        lock.unlink()
    finally:
        lock.release()
    return None


def _clear_socket(files: KeeperFiles) -> None:
    _unlink(files.socket)
    _unlink(files.socket.with_suffix(".tmp"))


def _clear_log(files: KeeperFiles) -> None:
    """Delete an old log, unless a process may still write to it."""
    if file_identity(files.info) is not None:
        return
    # Exclusive, so it fails while any process may still write to the log.
    lock = lock_file(files.log, create=False)
    if lock is not None:
        lock.unlink()
        lock.release()


def _read(path: PurePath, bytes_max: int, *, at_end: bool = False) -> bytes:
    """Return at most ``bytes_max`` bytes of a file, from its beginning or up to its end."""
    with contextlib.closing(_FILES.open(path)) as file:
        buffer = bytearray(min(file.size_bytes, bytes_max))
        start = file.size_bytes - len(buffer) if at_end else 0
        return bytes(buffer[: file.read_into(memoryview(buffer), start)])


def _unlink(path: PurePath) -> None:
    with contextlib.suppress(FileNotFoundError):
        _FILES.unlink(path)


@contextlib.contextmanager
def _keeper_errors(path: PurePath) -> Iterator[None]:
    """Raise an OSError of the block as a KeeperError."""
    try:
        yield
    except OSError as error:
        raise KeeperError(
            f"{path} cannot be used: {error.strerror or error}",
            path=path,
            hint="check the folder; if no keeper runs, it can be removed",
        ) from error
