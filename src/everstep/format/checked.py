"""A shard read from its first byte to its last, and found whole on the way."""

from __future__ import annotations

from pathlib import PurePath

from everstep.errors import DamageError, StorageError
from everstep.format.digests import Digester, digest
from everstep.format.header import ShardHeader
from everstep.format.records import FileRecord
from everstep.seams.files.filesystem import ReadFile

__all__ = ["CheckedFile"]


class CheckedFile:
    """A shard for whoever copies it: a damaged one is never copied whole.

    It is read in order. Before the last bytes are handed over all of them have been compared with
    the digests of the header, and the header with that of the marker; a copy that is whole is
    therefore one of what was written.

    Args:
        header: verified against ``record``.
    """

    def __init__(
        self, file: ReadFile, header: ShardHeader, record: FileRecord, path: PurePath
    ) -> None:
        self._file = file
        self._header = header
        self._record = record
        self._path = path
        self._begin()

    @property
    def size_bytes(self) -> int:
        return self._record.length

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """The next bytes; from the beginning again if ``offset`` is 0.

        Raises:
            DamageError: what was read is not what the digests say.
            StorageError: it cannot be read.
        """
        if offset == 0:
            self._begin()
        assert offset == self._at, "a checked file is read in order"
        try:
            got = self._file.read_into(buffer, offset)
        except OSError as error:
            raise StorageError(
                f"could not read {self._path.name}: {error.strerror or error}",
                step=self._header.identity.step,
                rank=self._header.identity.rank,
                path=self._path,
                hint="look at the disk or the network file system (dmesg, df, mount)",
            ) from error
        data = buffer.cast("B")[: min(got, self._record.length - offset)]
        self._at += data.nbytes
        room = self._header.room_bytes
        if len(self._head) < room:
            part = data[: room - len(self._head)]
            self._head += part
            data = data[part.nbytes :]
        self._digester.update(data)
        if self._at == self._record.length:
            self._check_whole()
        return got

    def close(self) -> None:
        self._file.close()

    def _begin(self) -> None:
        self._at = 0
        self._head = bytearray()
        self._digester = Digester(self._header.placed, self._check_entry)

    def _check_entry(self, index: int, found: str) -> None:
        if found != self._header.digests[index]:
            name = self._header.placed[index].entry.name
            raise self._damage(f"entry {name!r} is damaged: its digest does not match", name)

    def _check_whole(self) -> None:
        if digest(memoryview(self._head)) != self._record.header_digest:
            raise self._damage("the header's digest does not match", None)
        if len(self._digester.digests) != len(self._header.digests):
            raise self._damage("it ends before its last entry", None)

    def _damage(self, problem: str, entry: str | None) -> DamageError:
        return DamageError(
            f"{self._path}: {problem}",
            entry=entry,
            path=self._path,
            step=self._header.identity.step,
            rank=self._header.identity.rank,
        )
