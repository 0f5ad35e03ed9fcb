"""Ranges of an arena, against one owner per unit in a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.arena.allocator import Allocator
from everstep.errors import OptionError, StateError

UNIT = 64


class Owners:
    """The oracle: who owns each unit, 0 for nobody."""

    def __init__(self, units: int) -> None:
        self.units = [0] * units
        self.blocks: dict[int, int] = {}  # first unit -> count
        self._last = 0

    def allocate(self, count: int) -> int | None:
        for start in range(len(self.units) - count + 1):
            if not any(self.units[start : start + count]):
                self.own(start, count)
                return start
        return None

    def may_reserve(self, start: int, count: int) -> bool:
        inside = start >= 0 and start + count <= len(self.units)
        return inside and not any(self.units[start : start + count])

    def own(self, start: int, count: int) -> None:
        self._last += 1
        self.units[start : start + count] = [self._last] * count
        self.blocks[start] = count

    def free(self, start: int) -> bool:
        count = self.blocks.pop(start, 0)
        self.units[start : start + count] = [0] * count
        return count > 0

    def longest_hole(self) -> int:
        longest = here = 0
        for owner in self.units:
            here = 0 if owner else here + 1
            longest = max(longest, here)
        return longest


def units_of(size_bytes: int) -> int:
    return max(1, -(-size_bytes // UNIT))


def check(allocator: Allocator, owners: Owners) -> None:
    blocks = {start * UNIT: count * UNIT for start, count in sorted(owners.blocks.items())}
    assert allocator.live == blocks
    assert list(allocator.live) == list(blocks), "by offset"
    assert allocator.used_bytes == UNIT * sum(map(bool, owners.units))
    assert allocator.largest_free_bytes == UNIT * owners.longest_hole()


sizes = st.integers(0, 7 * UNIT)
actions = st.one_of(
    st.tuples(st.just("allocate"), sizes, st.just(0)),
    st.tuples(st.just("allocate"), sizes, st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 30), st.just(0)),  # of the live ones
    st.tuples(st.just("free at"), st.integers(-1, 13), st.just(0)),
    st.tuples(st.just("reserve"), st.integers(-2, 14), sizes),
)


@given(st.integers(1, 12), st.integers(0, UNIT - 1), st.lists(actions, max_size=60))
def test_as_the_oracle(units: int, rest: int, todo: list[tuple[str, int, int]]) -> None:
    allocator = Allocator(units * UNIT + rest, alignment_bytes=UNIT)
    owners = Owners(units)
    assert allocator.size_bytes == units * UNIT
    for action, value, size in todo:
        if action == "allocate":
            offset = owners.allocate(units_of(value))
            expected = None if offset is None else offset * UNIT
            assert allocator.allocate(value) == expected, "lowest first fit"
        elif action == "free":
            if owners.blocks:
                start = sorted(owners.blocks)[value % len(owners.blocks)]
                assert owners.free(start)
                allocator.free(start * UNIT)
        elif action == "free at":
            if owners.free(value):
                allocator.free(value * UNIT)
            else:
                with pytest.raises(StateError, match="no live block"):
                    allocator.free(value * UNIT)
        elif owners.may_reserve(value, units_of(size)):
            owners.own(value, units_of(size))
            allocator.reserve(value * UNIT, size)
        else:
            with pytest.raises(StateError, match="cannot be reserved"):
                allocator.reserve(value * UNIT, size)
        check(allocator, owners)
    for offset in allocator.live:
        allocator.free(offset)
    assert allocator.used_bytes == 0
    assert allocator.largest_free_bytes == units * UNIT, "nothing leaks: one hole of everything"
    assert allocator.allocate(units * UNIT) == 0


def test_exactly_full_is_not_empty() -> None:
    """A ring buffer whose head meets its tail cannot tell; it then hands out live memory."""
    allocator = Allocator(4 * UNIT, alignment_bytes=UNIT)
    assert [allocator.allocate(2 * UNIT), allocator.allocate(2 * UNIT)] == [0, 2 * UNIT]
    for _ in range(3):
        assert allocator.largest_free_bytes == 0
        assert allocator.allocate(1) is None
        assert allocator.used_bytes == 4 * UNIT
        # The oldest goes, as in a ring, and the arena is exactly full again.
        allocator.free(0)
        assert allocator.allocate(3 * UNIT) is None
        assert allocator.allocate(2 * UNIT) == 0
    one = Allocator(UNIT, alignment_bytes=UNIT)
    assert [one.allocate(UNIT), one.allocate(0)] == [0, None]


def test_exactly_empty_is_not_full() -> None:
    allocator = Allocator(4 * UNIT, alignment_bytes=UNIT)
    for _ in range(3):
        assert allocator.allocate(4 * UNIT) == 0
        allocator.free(0)
        assert (allocator.used_bytes, allocator.largest_free_bytes) == (0, 4 * UNIT)


def test_freed_out_of_order_merges_on_both_sides() -> None:
    allocator = Allocator(5 * UNIT, alignment_bytes=UNIT)
    offsets = [allocator.allocate(UNIT) for _ in range(5)]
    assert offsets == [n * UNIT for n in range(5)]
    for freed, largest in ((3, 1), (1, 1), (2, 3), (4, 4), (0, 5)):
        allocator.free(freed * UNIT)
        assert allocator.largest_free_bytes == largest * UNIT


def test_nothing_counts_as_one_unit() -> None:
    allocator = Allocator(3 * UNIT, alignment_bytes=UNIT)
    assert [allocator.allocate(0) for _ in range(4)] == [0, UNIT, 2 * UNIT, None]


def test_a_block_is_freed_once_and_by_its_start() -> None:
    allocator = Allocator(4 * UNIT, alignment_bytes=UNIT)
    allocator.allocate(2 * UNIT)
    with pytest.raises(StateError, match=rf"no live block of the arena starts at offset {UNIT}"):
        allocator.free(UNIT)
    allocator.free(0)
    with pytest.raises(StateError, match="freed before"):
        allocator.free(0)


def test_what_cannot_be_reserved_says_why_and_changes_nothing() -> None:
    allocator = Allocator(4 * UNIT + 5, alignment_bytes=UNIT)
    allocator.reserve(UNIT, UNIT)
    for offset, size, why in (
        (0, UNIT + 1, "a live block of 64 bytes is at offset 64"),
        (UNIT, 0, "a live block of 64 bytes is at offset 64"),
        (2 * UNIT + 1, 1, "multiples of 64"),
        (3 * UNIT, UNIT + 1, "the arena has 256 bytes"),
        (-UNIT, UNIT, "the arena has 256 bytes"),
        (4 * UNIT, 0, "the arena has 256 bytes"),
    ):
        with pytest.raises(StateError, match=why):
            allocator.reserve(offset, size)
    assert allocator.live == {UNIT: UNIT}
    allocator.live.clear()
    assert allocator.live == {UNIT: UNIT}, "a copy"


@pytest.mark.parametrize(
    ("size_bytes", "alignment_bytes"),
    [(0, UNIT), (-1, UNIT), (UNIT - 1, UNIT), (UNIT, 0), (UNIT, -UNIT), (300, 100)],
)
def test_arenas_that_cannot_be(size_bytes: int, alignment_bytes: int) -> None:
    with pytest.raises(OptionError):
        Allocator(size_bytes, alignment_bytes=alignment_bytes)


def test_sizes_that_cannot_be() -> None:
    allocator = Allocator(UNIT, alignment_bytes=UNIT)
    with pytest.raises(OptionError, match="-1 bytes"):
        allocator.allocate(-1)
    with pytest.raises(OptionError, match="-1 bytes"):
        allocator.reserve(0, -1)


def test_blocks_are_pages_by_default() -> None:
    allocator = Allocator(1 << 20)
    assert allocator.alignment_bytes == 4096
    assert [allocator.allocate(1), allocator.allocate(4097)] == [0, 4096]
    assert allocator.live == {0: 4096, 4096: 8192}
