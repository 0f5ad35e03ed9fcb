"""Helpers of the checks: sources, some of which fail, and concurrent work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from everstep.seams.files.filesystem import ReadFile
from everstep.tiers.contract import Tier
from everstep.tiers.memory import MemoryFile
from everstep.tiers.streams import read_whole

WRITERS = 8
"""Number of concurrent writers."""

_T = TypeVar("_T")
_TIMEOUT_S = 60.0


class BrokenError(Exception):
    """Error of a source, not of a tier."""


class BrokenSource:
    """A source that fails after its middle."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if offset + buffer.nbytes > self.size_bytes // 2:
            raise BrokenError
        return buffer.nbytes

    def close(self) -> None: ...


class ShortSource:
    """A source that ends at its middle."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return max(0, min(buffer.nbytes, self.size_bytes // 2 - offset))

    def close(self) -> None: ...


def bytes_of(size: int, seed: int = 0) -> bytes:
    """Return bytes of which no two ranges are equal."""
    words = -(-size // 8)
    start = (seed + 1) << 40
    return b"".join((start + n).to_bytes(8, "big") for n in range(words))[:size]


def source_of(data: bytes) -> ReadFile:
    """Return a source of these bytes."""
    return MemoryFile([memoryview(data)])


def read_object(tier: Tier, name: str) -> bytes:
    """Return all bytes of an object."""
    file = tier.open(name)
    try:
        return read_whole(file, name)
    finally:
        file.close()


def read_or_none(tier: Tier, name: str) -> bytes | None:
    """Return all bytes of an object; None if it does not exist."""
    try:
        return read_object(tier, name)
    except FileNotFoundError:
        return None


def read_range(file: ReadFile, begin: int, length: int) -> bytes:
    """Return ``length`` bytes from an offset on, or fewer at the end."""
    buffer = bytearray(length)
    got = file.read_into(memoryview(buffer), begin)
    return bytes(buffer[:got])


def raised_by(call: Callable[[], object]) -> BaseException | None:
    """Return the exception that a call raises, or None."""
    try:
        call()
    except Exception as error:
        return error
    return None


def creating(tiers: list[Tier], name: str, start: threading.Barrier) -> Callable[[int], bool]:
    """Return a writer that creates one name as soon as all other writers are ready to do it."""

    def create(number: int) -> bool:
        start.wait(_TIMEOUT_S)
        return tiers[number].create(name, f"writer {number}".encode())

    return create


def at_once(work: Callable[[int], _T]) -> list[_T]:
    """Run ``work(0)`` to ``work(7)`` in concurrent threads; return their results."""
    results: dict[int, _T] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT_S)
    if errors:
        raise errors[0]
    assert len(results) == WRITERS, f"{WRITERS - len(results)} writers hang"
    return [results[number] for number in range(WRITERS)]
