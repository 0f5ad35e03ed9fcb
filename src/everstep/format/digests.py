"""Digests: xxh3-128 of every entry, of the header, and of the file as a whole.

The file's digest is the digest of a list of digests: the header's, then each entry's in
file order. As entries lie without holes, every byte of the file is under exactly one leaf.
Unlike one digest over all bytes it can be computed although the header is written last,
in one pass, and by several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import xxhash

from everstep.state.layout.shards import Placed

__all__ = ["DIGEST_CHARS", "Digester", "digest", "digest_of_file"]

DIGEST_CHARS = 32


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 of ``data`` as 32 hexadecimal characters."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_file(header_digest: str, entry_digests: Iterable[str]) -> str:
    """The digest of a shard from the digests of its parts, in file order."""
    return digest("".join([header_digest, *entry_digests]).encode("ascii"))


class Digester:
    """Digests entries from the bytes of a body that arrive in file order.

    Args:
        placed: the entries in file order, without holes.
        on_entry: called with the index and digest of each entry as it is complete.
    """

    def __init__(
        self, placed: Sequence[Placed], on_entry: Callable[[int, str], None] | None = None
    ) -> None:
        self._on_entry = on_entry
        self._placed = list(placed)
        self._next = 0
        self._left_bytes = 0  # of the entry under way
        self._hash = xxhash.xxh3_128()
        self._update = self._hash.update
        self.digests: list[str] = []
        self._begin_entry()

    def update(self, data: memoryview) -> None:
        """Takes the next bytes of the body."""
        size = data.nbytes
        while size >= self._left_bytes:
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
        """Adds entries behind those that are known already."""
        at_end = self._next == len(self._placed)
        self._placed += placed
        if at_end:
            self._begin_entry()

    def _begin_entry(self) -> None:
        """Sets out on the next entry; one without bytes is finished at once."""
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
