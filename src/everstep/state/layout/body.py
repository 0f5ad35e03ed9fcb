"""What the writer of a shard asks for: the bytes of its body, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

__all__ = ["PIECE_BYTES", "Body", "Seen", "pieces"]

PIECE_BYTES = 512 << 10
"""Bytes that are copied and digested in one go: source and copy together stay in the
second-level cache."""

Seen = Callable[[memoryview], None]


class Body(Protocol):
    """The data bytes of one shard: tensors in file order, then objects."""

    def fill(self, begin: int, chunk: memoryview, seen: Seen) -> None:
        """Puts data bytes ``[begin, begin + len(chunk))`` into ``chunk``, and shows them to
        ``seen`` in order, while they are in the cache."""
        ...

    def held(self, begin: int, end: int) -> memoryview | None:
        """Data bytes ``[begin, end)`` where they already lie, if they do; begins at a page if
        ``begin`` is a multiple of one. Waits for bytes that are still being captured. Bytes
        behind ``end`` up to the next page are there, and of no meaning."""
        ...

    def objects_bytes(self) -> Mapping[str, int]:
        """Sizes of the objects that follow the tensors, by entry name; waits until they are
        known. Asked for after all whole chunks of tensors."""
        ...


def pieces(memory: memoryview) -> Iterator[memoryview]:
    """``memory`` in pieces of at most :data:`PIECE_BYTES`."""
    for begin in range(0, memory.nbytes, PIECE_BYTES):
        yield memory[begin : begin + PIECE_BYTES]
