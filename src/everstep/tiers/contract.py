"""The contract for places that store bytes.

A tier stores *objects*: bytes under a name. Commit, mirroring and recovery need nothing else from
memory, a disk or an object store, so a new kind of place is little work.
:mod:`everstep.testing.conformance` tests whether an implementation keeps the contract.

Every tier guarantees:

- :meth:`Tier.put` and :meth:`Tier.create` return when the object is complete and as durable as the
  tier is. Before that, and after any error, the name has its previous content, never a mixture and
  never only some of the bytes.
- :meth:`Tier.create` changes nothing if the name has other content: of several concurrent calls, in
  any processes, exactly one wins.
- Repeating any operation is harmless. everstep writes each name once: anything written again (after
  a lost reply, or by an older process that wakes up) is identical.
- A reader sees all bytes of one object, or an error. If the object is replaced meanwhile, the
  reader continues with the old one or raises.
- Errors are ``FileNotFoundError`` for a missing name, otherwise
  :class:`~everstep.errors.StorageError` with the tier's kind and the object's address;
  :class:`~everstep.errors.UnreachableError` if a retry may succeed. Neither an error's text nor its
  cause contains credentials.

Limits of a tier are stated in its :class:`Traits`.

Read a source completely and check its size.
"""

from __future__ import annotations

import contextlib
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from everstep.errors import DamageError, FormatError, OptionError
from everstep.format.names import TEMPORARY_SUFFIX
from everstep.format.records import RECORD_BYTES_MAX
from everstep.seams import ReadFile

NAME_BYTES_MAX = 512
"""Maximum bytes of a name in UTF-8. S3 allows 1024, including the prefix of the run."""
PART_BYTES_MAX = 200
"""Maximum bytes between slashes. File systems allow 255, including a temporary suffix."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a tier.

    Attributes:
        kind: ``"memory"``, ``"peer"``, ``"disk"`` or ``"object"``; the ``tier`` of errors.
        cost: order of recovery, cheapest first (TierCheck section 3.3); 0 for this node's memory.
        consistent: True: listings are up to date. False: a listing may be outdated; callers that
            need certainty open the name.
    """

    kind: str
    cost: int
    consistent: bool = True


@dataclass(frozen=True, slots=True, order=True)
class Item:
    """One name in a listing.

    Attributes:
        name: name, from the root of the tier.
        size_bytes: size in bytes; None for a folder, i.e. a prefix of other names.
        modified_s: time of the last change by the storage's clock, for display only.
    """

    name: str
    size_bytes: int | None
    modified_s: float = 0.0


class Tier(Protocol):
    """A place that stores objects. All methods may be called from any thread."""

    @property
    def traits(self) -> Traits: ...

    @property
    def url(self) -> str:
        """Address for messages, without credentials."""
        ...

    def put(self, name: str, source: ReadFile) -> None:
        """Write an object, replacing an existing one.

        Args:
            source: read in order from the first byte; again from the first if something must be
                repeated. Its own errors pass through.

        Raises:
            OptionError: ``name`` is invalid.
            DamageError: the source has fewer bytes than its size says.
            OutOfSpaceError, PermissionDeniedError, UnreachableError, DeadlineError, StorageError:
                see :mod:`everstep.errors`.
        """
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a small object if the name is free.

        Returns:
            True if the object now has exactly these bytes, whoever has written them, as the reply
            to an earlier attempt may have been lost. Bytes that decide which process was first must
            therefore be unique to the writer. False if it has other bytes; nothing was changed.
        """
        ...

    def open(self, name: str) -> ReadFile:
        """Open the current version of an object for reading any range.

        Raises:
            FileNotFoundError: there is no such object.
        """
        ...

    def scan(self, prefix: str = "") -> list[Item]:
        """Return names directly under ``prefix`` (a name without a trailing slash), sorted.

        Empty if there are none. A folder may still be listed after its last object was deleted.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete an object if it exists."""
        ...

    def sweep(self, prefix: str) -> None:
        """Remove remains of incomplete writes by crashed processes directly under ``prefix``.

        No listing shows them. Writes that are in progress there may fail.
        """
        ...

    def check(self) -> None:
        """Check that the tier can be read now.

        Raises:
            UnreachableError, PermissionDeniedError, DeadlineError, StorageError: it cannot be read.
        """
        ...

    def refresh(self) -> None:
        """Drop credentials and connections; obtain new ones from their source."""
        ...

    def close(self) -> None:
        """Release connections and memory."""
        ...


class ReadThrough:
    """Open file whose reads go through a function.

    Args:
        read: reads ``(buffer, offset)`` from the file.
    """

    def __init__(self, file: ReadFile, read: Callable[[memoryview, int], int]) -> None:
        self._file = file
        self._read = read

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return self._read(buffer, offset)

    def close(self) -> None:
        self._file.close()


def check_name(name: str) -> None:
    """Raise if a name is not valid on every kind of tier.

    Names consist of components between single slashes. Everything that some tier would interpret
    differently is refused.

    Raises:
        OptionError: the name is invalid.
    """
    problem = _problem(name)
    if problem:
        raise OptionError(f"{name!r} is not a valid object name: {problem}")


def _problem(name: str) -> str:
    if not isinstance(name, str) or not name:
        return "it must be a non-empty string"
    try:
        # Fails for lone surrogates, which os.fsdecode() makes of file names that are not UTF-8.
        size_bytes = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if size_bytes > NAME_BYTES_MAX:
        return f"it has more than {NAME_BYTES_MAX} bytes"
    if any(unicodedata.category(char).startswith("C") for char in name) or "\\" in name:
        return "it contains a control character or a backslash"
    if unicodedata.normalize("NFC", name) != name:
        return "it is not in Unicode normal form C: some file systems would change it"
    for component in name.split("/"):
        if component in ("", ".", ".."):
            return f"it contains the component {component!r}"
        if len(component.encode("utf-8")) > PART_BYTES_MAX:
            return f"a component has more than {PART_BYTES_MAX} bytes"
        # Directories as tiers hide such names from listings, and sweep() deletes them.
        if component.endswith(TEMPORARY_SUFFIX):
            return f"the suffix {TEMPORARY_SUFFIX!r} is reserved for incomplete files"
    return ""


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


def read_record(tier: Tier, name: str) -> bytes | None:
    """Return all bytes of a small object; None if there is no such object.

    Raises:
        FormatError: it is too large for a record.
        DamageError: it is shorter than its size says.
    """
    try:
        # Opened, not listed: a listing of a store may be outdated.
        file = tier.open(name)
    except FileNotFoundError:
        return None
    with contextlib.closing(file):
        # Before memory of this size is allocated: the storage may claim any size.
        if file.size_bytes > RECORD_BYTES_MAX:
            raise FormatError(f"{name}: {file.size_bytes} bytes, too many for a record", path=name)
        return read_whole(file, name)
