"""Digests: xxh3-128 of every entry, of the header, and of the entire file (``adr/002``).

The digest of a file is the digest of a list of digests: the header's, then each entry's in file
order. Entries lie without holes, so exactly one of these digests covers each byte. Unlike one
digest over all bytes it can be computed in one pass, by several threads, and although the header is
written last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import xxhash

from everstep.state.layout import Placed

DIGEST_CHARS = 32


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3-128 of ``data`` as 32 hexadecimal characters."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_file(header_digest: str, entry_digests: Iterable[str]) -> str:
    """Return the digest of a shard from the digests of its header and entries, in file order."""
    return digest("".join([header_digest, *entry_digests]).encode("ascii"))


class Digester:
    """Digests of entries, from the bytes of a body in file order.

    Args:
        placed: entries in file order, without holes.
        on_entry: called with index and digest of each completed entry.
    """

    def __init__(
        self, placed: Sequence[Placed], on_entry: Callable[[int, str], None] | None = None
    ) -> None:
        self._on_entry = on_entry
        self._placed = list(placed)
        self._next = 0
        self._left_bytes = 0  # of the current entry
        self._hash = xxhash.xxh3_128()
        # Looked up once: reset() keeps the hash object.
        self._update = self._hash.update
        self.digests: list[str] = []
        self._begin_entry()

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the body."""
        size = data.nbytes
        # An entry is completed with its last byte: no further byte follows the last entry.
        while size >= self._left_bytes:
            # Nothing is completed without bytes: _left_bytes is 0 after the last known entry, to
            # which extend() may add others.
            if not size:
                return
            self._update(data[: self._left_bytes])
            data = data[self._left_bytes :]
            size -= self._left_bytes
            self._end_entry()
            self._begin_entry()
        self._update(data)
        self._left_bytes -= size

    def extend(self, placed: Sequence[Placed]) -> None:
        """Append entries to the known ones."""
        at_end = self._next == len(self._placed)
        self._placed += placed
        if at_end:
            self._begin_entry()

    def _begin_entry(self) -> None:
        """Begin the next entry; entries without bytes are completed at once."""
        while self._next < len(self._placed):
            place = self._placed[self._next]
            self._left_bytes = place.end - place.begin
            if self._left_bytes:
                return
            self._end_entry()
        self._left_bytes = 0

    def _end_entry(self) -> None:
        self.digests.append(self._hash.hexdigest())
        self._hash.reset()
        self._next += 1
        if self._on_entry is not None:
            self._on_entry(self._next - 1, self.digests[-1])
