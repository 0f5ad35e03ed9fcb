"""Files in memory read as files on a disk do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.tiers.memory import MemoryFile

PARTS = st.lists(st.binary(max_size=9), max_size=6)


@given(PARTS, st.integers(0, 60), st.integers(0, 60))
def test_reads_are_slices_of_the_whole(parts: list[bytes], offset: int, length: int) -> None:
    whole = b"".join(parts)
    file = MemoryFile([memoryview(part) for part in parts])
    assert file.size_bytes == len(whole)
    buffer = bytearray(b"\xaa" * length)
    got = file.read_into(memoryview(buffer), offset)
    wanted = whole[offset : offset + length]
    assert got == len(wanted), "short only at the end"
    assert bytes(buffer) == wanted + b"\xaa" * (length - got), "nothing behind it is touched"


@given(PARTS, st.integers(1, 5))
def test_read_in_pieces(parts: list[bytes], step: int) -> None:
    file = MemoryFile([memoryview(part) for part in parts])
    found = b""
    while True:
        buffer = bytearray(step)
        got = file.read_into(memoryview(buffer), len(found))
        found += buffer[:got]
        if got < step:
            break
    assert found == b"".join(parts)


def test_it_shows_what_is_in_memory_now() -> None:
    memory = bytearray(b"abcdef")
    file = MemoryFile([memoryview(memory)[1:3], memoryview(memory)[4:]])
    memory[4] = ord("X")
    buffer = bytearray(4)
    assert file.read_into(memoryview(buffer), 0) == 4
    assert bytes(buffer) == b"bcXf"


def test_it_can_be_opened_and_closed_again() -> None:
    """A resume that has to choose once more reads the same base from its beginning."""
    file = MemoryFile([memoryview(b"abc")])
    for _ in range(2):
        buffer = bytearray(3)
        assert file.read_into(memoryview(buffer), 0) == 3
        file.close()
