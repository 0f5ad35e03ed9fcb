"""Read a source completely and check its size."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.errors import DamageError, FormatError
from everstep.format.records import RECORD_BYTES_MAX
from everstep.seams.files.filesystem import ReadFile


def pieces_of(source: ReadFile, name: str, piece_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a source in order; each piece has memory of its own.

    Raises:
        DamageError: it is shorter than its size says.
    """
    at = 0
    size_bytes = source.size_bytes
    while at < size_bytes:
        # Not reused: the consumer may still be sending earlier pieces (parts of an upload).
        piece = memoryview(bytearray(min(piece_bytes, size_bytes - at)))
        got = source.read_into(piece, at)
        if got != piece.nbytes:
            raise DamageError(
                f"{name}: ends at byte {at + got}, expected {size_bytes} bytes", path=name
            )
        yield piece
        at += got


def read_whole(source: ReadFile, name: str) -> bytes:
    """Return all bytes of a source.

    Raises:
        DamageError: it is shorter than its size says.
    """
    data = bytearray(source.size_bytes)
    if data and (got := source.read_into(memoryview(data), 0)) != len(data):
        raise DamageError(f"{name}: ends at byte {got}, expected {len(data)} bytes", path=name)
    return bytes(data)


def read_record(source: ReadFile, name: str) -> bytes:
    """Return all bytes of a small object.

    Raises:
        FormatError: it is too large for a record.
        DamageError: it is shorter than its size says.
    """
    # Before memory of this size is allocated: the storage may claim any size.
    if source.size_bytes > RECORD_BYTES_MAX:
        raise FormatError(f"{name}: {source.size_bytes} bytes, too many for a record", path=name)
    return read_whole(source, name)
