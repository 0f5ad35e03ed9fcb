"""Who holds which part of a tensor, who writes it, and that any layout can be read by any other."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everstep.errors import FormatError
from everstep.format.header import (
    ShardHeader,
    ShardIdentity,
    decode_header,
    encode_header,
    header_size_bytes,
)
from everstep.restore.load.saved_ranks import Piece
from everstep.restore.load.targets import PieceReads, fills
from everstep.state.layout.entries import Entry
from everstep.state.layout.placement import Box, Cut, Placement, box_on_mesh, replicas_on_mesh
from everstep.state.layout.shards import plan_shards
from everstep.state.ranks.writers import RankInfo, Replication, WriterAssignment

Layout = tuple[tuple[int, ...], tuple[Cut, ...]]
"""Shape of a mesh, and a cut for each of its dimensions."""

DTYPES = {"U8": "u1", "BF16": "u2", "F32": "u4", "F64": "u8"}
ONE: Layout = ((1,), (Cut(None),))


def placement_of(layout: Layout) -> Placement:
    mesh, cuts = layout
    return Placement(tuple(range(math.prod(mesh))), cuts, mesh)


def box_of(shape: tuple[int, ...], placement: Placement, rank: int) -> Box:
    return box_on_mesh(shape, placement.mesh, placement.coordinate(rank), placement.cuts)


@st.composite
def layouts(draw: Any, dims: int) -> Layout:
    """One or two dimensions of a mesh, which cut any dimensions, or none."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    cut = st.none() if dims == 0 else st.none() | st.integers(0, dims - 1)
    cuts = [Cut(draw(cut)) for _ in mesh]
    both = len(mesh) == 2 and cuts[0].dim is not None and cuts[0].dim == cuts[1].dim
    if both and draw(st.booleans()):  # FSDP over tensor parallelism of the same dimension
        cuts[0] = Cut(cuts[0].dim, mesh[1])
    return mesh, tuple(cuts)


@st.composite
def cases(draw: Any) -> tuple[tuple[int, ...], str, Layout, Layout]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    return shape, dtype, draw(layouts(len(shape))), draw(layouts(len(shape)))


def part_of(whole: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    slices = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
    return whole[slices]


def write_all(
    whole: np.ndarray[Any, Any], dtype: str, layout: Layout
) -> list[tuple[ShardHeader, bytes]]:
    """A header and a body of each rank."""
    placement, written = placement_of(layout), []
    world = math.prod(layout[0])
    for rank in range(world):
        box = box_of(whole.shape, placement, rank)
        entry = Entry("model/w", dtype, box.shape, whole.shape, box.offset, placement.text)
        common = Replication({}, {"optimizer/state/model.w": "model/w"}, {})
        mine = WriterAssignment(RankInfo(rank, world), [entry], common).mine()
        (shard,) = plan_shards(list(mine.values()))
        identity = ShardIdentity("run", 1, 1, 1, rank, world, True)
        room = header_size_bytes(identity, shard.placed, (), {})
        body = part_of(whole, box).tobytes() if mine else b""
        data = encode_header(identity, shard.placed, ["0" * 32] * len(mine), {}, room)
        written.append((decode_header(data, room + len(body), PurePath("x")), body))
    return written


@settings(max_examples=150)
@given(cases(), st.integers(1, 50))
@example(((7, 5), "F32", ((2, 2), (Cut(0, 2), Cut(0))), ((3,), (Cut(1),))), 3)
@example(((1, 3), "BF16", ((4,), (Cut(0),)), ONE), 1)
@example(((), "F64", ((3,), (Cut(None),)), ((2, 2), (Cut(None), Cut(None)))), 2)
def test_any_layout_is_read_by_any_other(
    case: tuple[tuple[int, ...], str, Layout, Layout], step: int
) -> None:
    shape, dtype, source, target = case
    rng = np.random.default_rng(0)
    size = math.prod(shape)
    words = rng.integers(0, 256, size * int(DTYPES[dtype][1]), dtype=np.uint8)
    whole = words.view(DTYPES[dtype]).reshape(shape)
    files = write_all(whole, dtype, source)
    assert sum(len(body) for _, body in files) == whole.nbytes  # every byte once
    pieces = [
        Piece(rank, index, rank, place.entry, "", Placement.parse(place.entry.placement))
        for rank, (header, _) in enumerate(files)
        for index, place in enumerate(header.placed)
    ]
    placement = placement_of(target)
    for rank in range(math.prod(target[0])):
        box = box_of(shape, placement, rank)
        memory = np.full(box.shape, 1, DTYPES[dtype])
        found, missing = fills(pieces, box, memoryview(memory.reshape(-1).view("u1")))
        assert not missing
        for number, (header, body) in enumerate(files):
            reads = PieceReads(header, [fill for fill in found if fill.piece.file == number])
            for index in reads.wanted:
                place = header.placed[index]
                for begin in range(place.begin, place.end, step):
                    end = min(place.end, begin + step)
                    reads.sink(begin, memoryview(body)[begin:end])
                reads.entry_done(index)
        assert memory.tobytes() == part_of(whole, box).tobytes()


@given(st.data())
def test_replicas_hold_the_same_part_and_no_other_rank_does(data: Any) -> None:
    placement = placement_of(data.draw(layouts(2)))
    assert placement.ranks is not None
    shape = (64, 64)  # so large that no two parts are equal by being empty
    for rank in placement.ranks:
        box = box_of(shape, placement, rank)
        same = [other for other in placement.ranks if box_of(shape, placement, other) == box]
        assert replicas_on_mesh(placement, rank) == tuple(same)


@given(st.data())
def test_placements_are_read_back(data: Any) -> None:
    mesh, cuts = data.draw(layouts(3))
    size = math.prod(mesh)
    ranks = data.draw(
        st.lists(st.integers(0, 40), min_size=size, max_size=size, unique=True)
        | st.builds(
            lambda a, s: list(range(a, a + s * size, s)), st.integers(0, 9), st.integers(1, 5)
        )
    )
    for placement in (Placement(tuple(ranks), cuts, mesh), Placement(tuple(ranks)), Placement()):
        assert Placement.parse(placement.text) == placement


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement(), "whole"),
        (Placement((2,)), "whole@2"),
        (Placement(tuple(range(8)), (Cut(None), Cut(0)), (2, 4)), "replicate,shard(0)@2x4:0-7"),
        (Placement((0, 2, 4, 6), (Cut(1, 2),), (4,)), "strided(1,2)@4:0-6/2"),
        (Placement((9, 3)), "whole@9,3"),
    ],
)
def test_texts(placement: Placement, text: str) -> None:
    assert placement.text == text


@pytest.mark.parametrize(
    "text",
    ["", "half", "whole@", "whole@3-1", "whole@1,1", "whole@0-9999999999", "shard(0)@2:0-2",
     "shard(0)@0-1", "shard(x)@2:0-1", "shard(0),shard(1)@2:0-1", "whole@0-4/0"],
)  # fmt: skip
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"placement|ranks|mesh|rank twice|literal"):
        Placement.parse(text)


def test_strided_parts_whose_order_cannot_be_told_are_refused() -> None:
    with pytest.raises(ValueError, match="no mesh dimensions to its right"):
        box_on_mesh((8,), (2, 3), (0, 0), (Cut(0, 2), Cut(0)))


def entry(name: str, size: int, placement: str = "whole") -> Entry:
    return Entry(name, "U8", (size,), (size,), (0,), placement)


def shares(
    world: int,
    entries: list[Entry],
    common: Replication,
    near: dict[int, tuple[int, ...]] | None = None,
) -> list[dict[str, Entry]]:
    return [
        WriterAssignment(RankInfo(rank, world, near and near[rank]), entries, common).mine()
        for rank in range(world)
    ]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 7))
def test_what_is_common_is_written_once_and_evenly(sizes: list[int], world: int) -> None:
    everyone = tuple(range(world))
    names = [f"model/p{number}" for number in range(len(sizes))]
    entries, states = [], {}
    for name, size in zip(names, sizes, strict=True):
        front = f"optimizer/state/model.{name[6:]}"
        states[front] = name
        entries += [entry(name, size), entry(f"{front}/exp_avg", size), entry(f"{front}/step", 4)]
    written = shares(world, entries, Replication(dict.fromkeys(names, everyone), states, {}))
    assert sorted(name for mine in written for name in mine) == sorted(e.name for e in entries)
    for mine in written:
        for front, name in states.items():  # a parameter with its moments
            assert (name in mine) == (f"{front}/exp_avg" in mine) == (f"{front}/step" in mine)
    loads = [sum(e.size_bytes for n, e in mine.items() if n in names) for mine in written]
    assert max(loads) - min(loads) <= max(sizes)


def test_state_that_is_there_on_some_ranks_only_changes_no_other_writer() -> None:
    names = {f"model/p{n}": (0, 1) for n in range(6)}
    states = {f"optimizer/state/model.p{n}": f"model/p{n}" for n in range(6)}
    bare = [entry(name, 10 + n) for n, name in enumerate(names)]
    more = [*bare, entry("optimizer/state/model.p3/exp_avg", 500)]
    common = Replication(names, states, {})
    for rank in (0, 1):
        without = set(WriterAssignment(RankInfo(rank, 2), bare, common).mine())
        assert (
            set(WriterAssignment(RankInfo(rank, 2), more, common).mine()) - {more[-1].name}
            == without
        )


def test_what_is_common_is_written_once_to_each_disk() -> None:
    names = {f"model/p{n}": (0, 1, 2, 3) for n in range(5)}
    near = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    entries = [entry(name, 10) for name in names]
    written = shares(4, entries, Replication(names, {}, {}), near)
    for pair in ((0, 1), (2, 3)):
        assert sorted(name for rank in pair for name in written[rank]) == sorted(names)


def test_who_updates_a_parameter_for_all_writes_it() -> None:
    everyone, names = (0, 1, 2), [f"model/p{number}" for number in range(6)]
    updaters = {name: (number % 2, everyone) for number, name in enumerate(names[:4])}
    common = Replication(dict.fromkeys(names, everyone), {}, {}, updaters)
    entries = [entry(name, 10) for name in names]
    written = shares(3, entries, common)
    for name, (rank, _) in updaters.items():
        assert [name in mine for mine in written] == [rank == other for other in everyone]
    assert sorted(name for mine in written for name in mine) == sorted(names)
    assert [len(mine) for mine in written] == [2, 2, 2], "the others, to whoever has least"
    apart = {0: (0, 2), 1: (1,), 2: (0, 2)}
    zero, one, two = shares(3, entries, common, apart)
    assert set(one) == set(names)
    assert {names[0], names[2]} <= set(zero)
    assert sorted([*zero, *two]) == sorted(names), "once on each disk"


def test_ranks_that_do_not_know_who_updates_what_split_as_ever() -> None:
    """Each half of the ranks has an optimizer of its own, and knows of no other."""
    everyone, names = (0, 1, 2, 3), [f"model/p{number}" for number in range(5)]
    entries, alike = [entry(name, 10) for name in names], dict.fromkeys(names, everyone)
    halves = [(0, 1), (0, 1), (2, 3), (2, 3)]
    commons = [
        Replication(alike, {}, {}, {name: (half[n % 2], half) for n, name in enumerate(names)})
        for half in halves
    ]
    about = list(enumerate(zip(commons, halves, strict=True)))
    together = [WriterAssignment(RankInfo(rank, 4), entries, c).mine() for rank, (c, _) in about]
    assert sorted(name for mine in together for name in mine) == sorted(names)
    apart = [
        WriterAssignment(RankInfo(rank, 4, half), entries, c).mine() for rank, (c, half) in about
    ]
    for rank, mine in enumerate(apart):
        assert sorted(mine) == names[rank % 2 :: 2]


def test_what_is_nobody_elses_says_whose_it_is() -> None:
    (zero, one) = shares(2, [entry("loader/x", 3)], Replication({}, {}, {}))
    assert zero["loader/x"].placement == "whole@0"
    assert one["loader/x"].placement == "whole@1"


def test_overlapping_pieces_are_refused() -> None:
    def piece(offset: int) -> Piece:
        part = Entry("w", "U8", (3,), (5,), (offset,), "shard(0)@2:0-1")
        return Piece(0, 0, 0, part, "", Placement.parse(part.placement))

    with pytest.raises(FormatError, match="overlap"):
        fills([piece(0), piece(2)], Box((0,), (5,)), memoryview(bytearray(5)))
