"""Where entries lie: no holes, all aligned, split before a header grows too large."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from everstep.format.header import ShardIdentity, encode_header, header_size_bytes
from everstep.state.layout.entries import DTYPE_BYTES, Entry
from everstep.state.layout.shards import append_objects, plan_shards

IDENTITY = ShardIdentity("r" * 32, 2, 10**11, 10**12, 3, 4, True)

entries_of = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
        st.sampled_from(list(DTYPE_BYTES)),
        st.lists(st.integers(0, 7), max_size=4).map(tuple),
        st.integers(0, 2**62),
    ),
    unique_by=lambda item: item[0],
    max_size=20,
).map(lambda items: [Entry.whole(n, d, s, lsn=lsn) for n, d, s, lsn in items])


@given(entries=entries_of, header_bytes_max=st.integers(1, 20_000))
def test_no_holes_and_natural_alignment(entries: list[Entry], header_bytes_max: int) -> None:
    shards = plan_shards(entries, header_bytes_max=header_bytes_max)
    assert len(shards) >= 1
    assert sorted(p.entry.name for s in shards for p in s.placed) == sorted(e.name for e in entries)
    for shard in shards:
        position = 0
        for place in shard.placed:
            assert place.begin == position
            assert place.begin % DTYPE_BYTES[place.entry.dtype] == 0
            position = place.end
            assert place.end - place.begin == place.entry.size_bytes
        assert shard.size_bytes == position


@given(entries=entries_of)
def test_entries_of_one_width_keep_their_order(entries: list[Entry]) -> None:
    (shard,) = plan_shards(entries, header_bytes_max=1 << 30)
    for width in (1, 2, 4, 8):
        placed = [p.entry for p in shard.placed if DTYPE_BYTES[p.entry.dtype] == width]
        assert placed == [e for e in entries if DTYPE_BYTES[e.dtype] == width]


def test_one_entry_too_large_for_any_header_gets_a_file_of_its_own() -> None:
    entries = [Entry.whole(name * 500, "F32", (1,)) for name in "abc"]
    assert [len(s.placed) for s in plan_shards(entries, header_bytes_max=100)] == [1, 1, 1]
    assert len(plan_shards([])) == 1


@given(entries=entries_of, objects=st.dictionaries(st.text("abc/", min_size=1), st.binary()))
def test_objects_follow_the_tensors(entries: list[Entry], objects: dict[str, bytes]) -> None:
    (tensors,) = plan_shards(entries, header_bytes_max=1 << 30)
    sizes = {name: len(data) for name, data in objects.items()}
    whole = append_objects(tensors, sizes, lsn=9)
    assert whole.placed[: len(entries)] == tensors.placed
    position = tensors.size_bytes
    for place, (name, data) in zip(whole.placed[len(entries) :], objects.items(), strict=True):
        assert place.entry == Entry.whole(name, "U8", (len(data),), lsn=9)
        assert (place.begin, place.end) == (position, position + len(data))
        position = place.end


@given(
    entries=entries_of,
    sizes=st.lists(st.integers(0, 2**60), max_size=3),
    aliases=st.dictionaries(st.text(min_size=1, max_size=9), st.just("x"), max_size=4),
)
def test_the_reserved_room_is_enough(
    entries: list[Entry], sizes: list[int], aliases: dict[str, str]
) -> None:
    """Whatever sizes the objects turn out to have, and whatever the digests are."""
    (layout,) = plan_shards(entries, header_bytes_max=1 << 30)
    names = [f"everstep/objects/{number}ä" for number in range(len(sizes))]
    aliases = {k.encode("utf-8", "replace").decode(): v for k, v in aliases.items()}
    room = header_size_bytes(IDENTITY, layout.placed, names, aliases)
    assert room % 4096 == 0

    objects = dict(zip(names, sizes, strict=True))
    placed = append_objects(layout, objects, lsn=IDENTITY.lsn).placed
    header = encode_header(IDENTITY, placed, ["f" * 32] * len(placed), aliases, room)
    assert len(header) == room
    assert int.from_bytes(header[:8], "little") == room - 8
    assert math.prod(header[8:9]) == ord("{")
