"""Ranges of an arena, against one owner per unit in a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.arena import Allocator
from everstep.errors import OptionError, StateError

UNIT = 4096


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

    def own(self, start: int, count: int) -> None:
        self._last += 1
        self.units[start : start + count] = [self._last] * count
        self.blocks[start] = count

    def free(self, start: int) -> bool:
        count = self.blocks.pop(start, 0)
        self.units[start : start + count] = [0] * count
        return count > 0


def units_of(size_bytes: int) -> int:
    return max(1, -(-size_bytes // UNIT))


sizes = st.integers(0, 7 * UNIT)
actions = st.one_of(
    st.tuples(st.just("allocate"), sizes),
    st.tuples(st.just("allocate"), sizes),
    st.tuples(st.just("free"), st.integers(0, 30)),  # of the live ones
    st.tuples(st.just("free at"), st.integers(-1, 13)),
)


@given(st.integers(1, 12), st.lists(actions, max_size=60))
def test_as_the_oracle(units: int, todo: list[tuple[str, int]]) -> None:
    allocator = Allocator(units * UNIT)
    owners = Owners(units)
    assert allocator.size_bytes == units * UNIT
    for action, value in todo:
        if action == "allocate":
            offset = owners.allocate(units_of(value))
            expected = None if offset is None else offset * UNIT
            assert allocator.allocate(value) == expected, "lowest first fit"
        elif action == "free":
            if owners.blocks:
                start = sorted(owners.blocks)[value % len(owners.blocks)]
                assert owners.free(start)
                allocator.free(start * UNIT)
        elif owners.free(value):
            allocator.free(value * UNIT)
        else:
            with pytest.raises(StateError, match="no live block"):
                allocator.free(value * UNIT)
        assert allocator.used_bytes == UNIT * sum(map(bool, owners.units))
    for start in owners.blocks:
        allocator.free(start * UNIT)
    assert allocator.used_bytes == 0
    assert allocator.allocate(units * UNIT) == 0, "nothing leaks: one hole of everything"


def test_exactly_full_is_not_empty() -> None:
    """A ring buffer whose head meets its tail cannot tell; it then hands out live memory."""
    allocator = Allocator(4 * UNIT)
    assert [allocator.allocate(2 * UNIT), allocator.allocate(2 * UNIT)] == [0, 2 * UNIT]
    for _ in range(3):
        assert allocator.allocate(1) is None
        assert allocator.used_bytes == 4 * UNIT
        # The oldest goes, as in a ring, and the arena is exactly full again.
        allocator.free(0)
        assert allocator.allocate(3 * UNIT) is None
        assert allocator.allocate(2 * UNIT) == 0
    one = Allocator(UNIT)
    assert [one.allocate(UNIT), one.allocate(0)] == [0, None]


def test_exactly_empty_is_not_full() -> None:
    allocator = Allocator(4 * UNIT)
    for _ in range(3):
        assert allocator.allocate(4 * UNIT) == 0
        allocator.free(0)
        assert allocator.used_bytes == 0


def test_freed_out_of_order_merges_on_both_sides() -> None:
    allocator = Allocator(5 * UNIT)
    offsets = [allocator.allocate(UNIT) for _ in range(5)]
    assert offsets == [n * UNIT for n in range(5)]
    for freed, largest in ((3, 1), (1, 1), (2, 3), (4, 4), (0, 5)):
        allocator.free(freed * UNIT)
        assert allocator.allocate((largest + 1) * UNIT) is None
        offset = allocator.allocate(largest * UNIT)
        assert offset is not None
        allocator.free(offset)


def test_nothing_counts_as_one_unit() -> None:
    allocator = Allocator(3 * UNIT)
    assert [allocator.allocate(0) for _ in range(4)] == [0, UNIT, 2 * UNIT, None]


def test_a_block_is_freed_once_and_by_its_start() -> None:
    allocator = Allocator(4 * UNIT)
    allocator.allocate(2 * UNIT)
    with pytest.raises(StateError, match=rf"no live block of the arena starts at offset {UNIT}"):
        allocator.free(UNIT)
    allocator.free(0)
    with pytest.raises(StateError, match="freed before"):
        allocator.free(0)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(OptionError, match="-1 bytes"):
        Allocator(UNIT).allocate(-1)


def test_blocks_are_pages() -> None:
    allocator = Allocator(1 << 20)
    assert [allocator.allocate(1), allocator.allocate(4097)] == [0, 4096]
