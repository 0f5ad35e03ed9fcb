"""Where the keepers of this user are found: one key each, three files per key.

::

    <key>.json   who it is; locked by the keeper as long as it lives
    <key>.sock   where it listens
    <key>.log    what it prints; locked (shared) by whoever may still print into it
    registry.lock  held for a moment by everybody who takes, looks for or clears a key

A keeper lives exactly as long as its lock: the kernel gives it back however the process
ends. Files without a lock are what a killed keeper has left, and are cleared away by the
next process that comes across them. Process ids in files prove nothing.
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
from typing import Any

import xxhash

from everstep.errors import KeeperError, KeeperTimeoutError
from everstep.seams.files.locks import LockedFile, file_identity, held_alone, lock_file, same_file
from everstep.seams.files.posix import PosixFileSystem
from everstep.seams.machine import leads_to
from everstep.seams.network.sockets import SOCKET_PATH_BYTES_MAX, listen_at
from everstep.seams.processes.processes import PidWatch, has_open
from everstep.seams.processes.runtime import RUNTIME_DIR_VARIABLE, runtime_folder, still_used

__all__ = [
    "KeeperFiles",
    "KeeperInfo",
    "Registration",
    "find_keeper",
    "keeper_files",
    "keeper_key",
    "keepers_left_by_a_move",
    "keepers_of",
    "kill_keeper",
    "list_keepers",
    "read_tail",
]

_GATE = "registry.lock"
_GATE_TIMEOUT_S = 5.0
_LOOK_AGAIN_S = 0.05
_DYING_S = 0.5
_INFO_BYTES_MAX = 1 << 16
_LOG_KEPT_S = 86400.0  # of a keeper that was killed: somebody may want to know why
_NAME = re.compile(r"([0-9a-f]{16})\.(json|log)", re.ASCII)
_FILES = PosixFileSystem()


def keeper_key(run: str, run_id: str, rank: int) -> str:
    """What tells a keeper from all others of this user: 16 hexadecimal digits.

    Args:
        run: real path of the run folder (:func:`~everstep.run.folder.run_path`): the
        same run
            copied elsewhere is another one.
        run_id: from ``run.json``: another run at the same place is another one, too.
    """
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
    """The files of a key, in the runtime folder.

    Args:
        create: make the folder if it is not there.

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


@dataclass(frozen=True, slots=True)
class KeeperInfo:
    """Who a keeper is.

    Attributes:
        run: real path of the run folder.
        version: of its everstep.
        protocol: of its messages.
        started_unix_s: for people.
    """

    pid: int
    run: str
    run_id: str
    rank: int
    version: str
    protocol: int
    started_unix_s: float

    @property
    def key(self) -> str:
        """See :func:`keeper_key`."""
        return keeper_key(self.run, self.run_id, self.rank)

    def encode(self) -> bytes:
        """The contents of the file."""
        return json.dumps(asdict(self), ensure_ascii=True).encode("ascii") + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> KeeperInfo | None:
        """The inverse of :meth:`encode`; None for anything else."""
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict):
            return None
        # A newer everstep may tell more.
        found: dict[str, Any] = {name: fields.get(name) for name in cls.__slots__}
        numbers = (found["pid"], found["rank"], found["protocol"])
        texts = (found["run"], found["run_id"], found["version"])
        started = found["started_unix_s"]
        if not all(isinstance(value, str) for value in texts):
            return None
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in numbers):
            return None
        if not isinstance(started, (int, float)):
            return None
        return cls(**found)


class Registration:
    """What a keeper holds as long as it lives. Made by :meth:`acquire`.

    Attributes:
        key, info: as given.
        files: of the key.
    """

    def __init__(self, key: str, info: KeeperInfo, files: KeeperFiles, lock: LockedFile) -> None:
        self.key = key
        self.info = info
        self.files = files
        self._lock = lock
        self._socket: tuple[int, int] | None = None  # none yet
        self._prints = [fd for fd in (1, 2) if same_file(fd, files.log)]

    @classmethod
    def acquire(cls, key: str, info: KeeperInfo, *, timeout_s: float = 0.0) -> Registration | None:
        """Takes the key for this process; None if another keeper has it until ``timeout_s``.

        What a killed keeper has left behind is cleared away.

        Raises:
            KeeperError: the runtime folder cannot be used.
        """
        assert key == info.key
        files = keeper_files(key)
        deadline_s = time.monotonic() + timeout_s
        while True:
            with _gate(files.folder), _in_words(files.info):
                lock = lock_file(files.info)
                if lock is not None:
                    try:
                        _clear_socket(files)
                        lock.replace(info.encode())
                    except BaseException:
                        lock.unlink()
                        lock.release()
                        raise
                    return cls(key, info, files, lock)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(left_s, _LOOK_AGAIN_S))

    def listen(self) -> socket.socket:
        """Listens, non-blocking, at the key's socket; connections are for ``wire.accept``.

        Raises:
            KeeperError: the system refuses.
        """
        with _in_words(self.files.socket):
            listener = listen_at(self.files.socket)
            self._socket = file_identity(self.files.socket)
            return listener

    def again(self) -> socket.socket | None:
        """Makes the files anew by which others find this keeper, and listens there; None if another
        keeper has the key.

        Raises:
            KeeperError: the runtime folder cannot be used; what there was stays as it is.
        """
        files = keeper_files(self.key)
        with _gate(files.folder), _in_words(files.info):
            before = self._lock
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
            self._lock = lock
            if lock is not before:
                before.release()
            self._print_again()
        return listener

    def _print_again(self) -> None:
        """What goes into a log that nobody finds goes into another."""
        if all(same_file(fd, self.files.log) for fd in self._prints):
            return
        with contextlib.suppress(OSError):  # it is for people, and nothing depends on it
            log = lock_file(self.files.log, shared=True)
            if log is not None:
                log.put_at(self._prints)

    def still_used(self) -> None:
        """Keeps the files of a keeper that lives for long from whoever cleans up."""
        still_used([self.files.folder, self.files.info, self.files.socket, self.files.log])

    @property
    def is_current(self) -> bool:
        """Whether others still find this keeper.

        False once somebody has deleted its files (the system does, at the end of a login,
        with what is in ``$XDG_RUNTIME_DIR``): nobody can attach to it any more.
        """
        try:
            return self._lock.is_current and file_identity(self.files.socket) == self._socket
        except OSError:  # what is there now is no folder, or not ours
            return False

    def release(self) -> None:
        """Gives the key up and removes its files; harmless when called again.

        The log stays if another process prints into it.
        """
        if self._lock.fd < 0:
            return
        try:
            if self._lock.is_current:  # else what is there now is not ours
                _clear_socket(self.files)
                if any(same_file(fd, self.files.log) and held_alone(fd) for fd in (1, 2)):
                    _unlink(self.files.log)
                self._lock.unlink()
        except OSError:  # whatever stays is cleared away by the next who comes
            pass
        finally:
            self._lock.release()


# --- Looking ----------------------------------------------------------------------------


def list_keepers() -> list[KeeperInfo]:
    """The living keepers of this user, by run and rank; clears away what dead ones have left.

    Their logs are kept for a day.

    Raises:
        KeeperError: the runtime folder cannot be used.
    """
    folder = runtime_folder(create=False)
    found = []
    with _in_words(folder):
        try:
            entries = _FILES.scan(folder)
        except FileNotFoundError:
            return []
    now_s = time.time()
    with _gate(folder):
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None or entry.kind != "file":
                continue
            files = _files_in(folder, match[1])
            with contextlib.suppress(OSError):  # gone again, or none of ours: not our business
                if match[2] == "json":
                    info = _holder(files)
                    if info is not None and info.key == match[1]:
                        found.append(info)
                elif now_s - entry.mtime_s > _LOG_KEPT_S:
                    _clear_log(files)
    return sorted(found, key=lambda info: (info.run, info.rank, info.pid))


def keepers_of(run: PurePath, run_id: str) -> list[KeeperInfo]:
    """The living keepers of a run, one of each rank.

    Those, too, that know its folder under another name (a bind mount; a symbolic link, with an
    everstep that did not follow it), of ranks that none knows under this one.

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
    """Return the living keepers of a run whose folder is not where they know it: it was moved, or
    renamed, and they cannot write to it any more.

    Raises:
        KeeperError: the runtime folder cannot be used.
    """
    return [info for info in list_keepers() if info.run_id == run_id and _is_nowhere(info.run)]


def _is_nowhere(run: str) -> bool:
    try:
        return file_identity(leads_to(PurePath(run))) is None
    except OSError:  # closed to this user, or its disk is gone: then nobody can tell
        return False


def _same_folder(run: str, other: PurePath) -> bool:
    try:
        there = file_identity(leads_to(PurePath(run)))
        return there is not None and there == file_identity(leads_to(other))
    except OSError:  # closed to this user, or its disk is gone: then nobody can tell
        return False


def find_keeper(key: str) -> KeeperInfo | None:
    """The living keeper that has the key; None if there is none.

    Raises:
        KeeperError: the runtime folder cannot be used.
    """
    folder = runtime_folder(create=False)
    files = _files_in(folder, key)
    with _in_words(files.info):
        if file_identity(files.info) is None:
            return None
        with _gate(folder):
            return _holder(files)


def kill_keeper(info: KeeperInfo) -> bool:
    """Kills (SIGKILL) this very keeper and no other process; False if it is gone already.

    What it held in memory and had not written is lost.

    Raises:
        KeeperError: it lives, but cannot be shown to be that process (it runs in another
            container, say), or may not be killed.
    """
    folder = runtime_folder(create=False)
    files = _files_in(folder, info.key)
    # First the process, then the proof: the keeper still has its lock after this moment, so
    # its number was not given to another process before.
    with PidWatch(info.pid) as watch:
        if find_keeper(info.key) != info:
            return False
        identity = file_identity(files.info)
        if watch.gone() or identity is None or not has_open(info.pid, files.info, identity):
            watch.gone(_DYING_S)  # one that is dying may have closed its files, and hold the lock
            if find_keeper(info.key) != info:
                return False
            raise KeeperError(
                f"process {info.pid} cannot be shown to be the keeper of {info.run}",
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
    """The last lines of a text file; none if it cannot be read."""
    try:
        file = _FILES.open(path)
    except OSError:
        return []
    try:
        start = max(0, file.size_bytes - bytes_max)
        buffer = bytearray(file.size_bytes - start)
        count = file.read_into(memoryview(buffer), start)
    except OSError:
        return []
    finally:
        file.close()
    lines = buffer[:count].decode("utf-8", "replace").splitlines()
    return [line for line in lines if line.strip()][-lines_max:]


# --- Below ------------------------------------------------------------------------------


def _files_in(folder: PurePath, key: str) -> KeeperFiles:
    return KeeperFiles(folder / f"{key}.json", folder / f"{key}.sock", folder / f"{key}.log")


@contextlib.contextmanager
def _gate(folder: PurePath) -> Iterator[None]:
    """Keeps everybody else out, so that a lock taken for a look is not taken for a keeper's."""
    path = folder / _GATE
    with _in_words(path):
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
    """Who has the key; clears away what a dead one has left. Within the gate."""
    try:
        lock = lock_file(files.info, create=False)
    except FileNotFoundError:
        return None
    if lock is None:
        try:
            return KeeperInfo.decode(_read(files.info))
        except FileNotFoundError:  # it has ended meanwhile, which takes no gate
            return None
    try:
        _clear_socket(files)
        lock.unlink()
    finally:
        lock.release()
    return None


def _clear_socket(files: KeeperFiles) -> None:
    _unlink(files.socket)
    _unlink(files.socket.with_suffix(".tmp"))


def _clear_log(files: KeeperFiles) -> None:
    """Removes an old log, unless somebody may still print into it."""
    if file_identity(files.info) is not None:
        return
    lock = lock_file(files.log, create=False)
    if lock is not None:
        lock.unlink()
        lock.release()


def _read(path: PurePath) -> bytes:
    file = _FILES.open(path)
    try:
        buffer = bytearray(min(file.size_bytes, _INFO_BYTES_MAX))
        return bytes(buffer[: file.read_into(memoryview(buffer), 0)])
    finally:
        file.close()


def _unlink(path: PurePath) -> None:
    with contextlib.suppress(FileNotFoundError):
        _FILES.unlink(path)


@contextlib.contextmanager
def _in_words(path: PurePath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KeeperError(
            f"{path} cannot be used: {error.strerror or error}",
            path=path,
            hint="look at the folder; when no keeper runs, it can be removed",
        ) from error
