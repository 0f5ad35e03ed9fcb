"""Bases over several steps of several ranks whose parts whoever restores them puts together
(``rebuild="recovery"``): each bit is that of training, whatever ranks there are, or it is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.errors import DamageError, FormatError, MismatchError
from everstep.format.log import LogRecord, record_digest
from everstep.format.records import TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.restore.fetch.held import HeldBase
from everstep.restore.fetch.rank_copies import verify_rank
from everstep.restore.load.load import LoadedBase, Reads, check_contents, load_ranks
from everstep.restore.offline.load import load_job
from everstep.run.scan import BaseFound, scan_base
from everstep.seams import PosixFileSystem
from everstep.state.layout.shards import ShardLayout
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from tests.support.ranks.fuzzy import (
    LAST,
    PARTS,
    TRAINED,
    Records,
    fuzzy_base,
    trained_to_last,
    whole,
)
from tests.support.ranks.sharding import (
    STEP,
    TIMEOUT_S,
    Values,
    as_rank,
    build,
    load,
    locals_of,
    open_all,
)
from tests.support.world import flip

FS = PosixFileSystem()


@pytest.fixture(scope="module")
def ring() -> Iterator[ChunkRing]:
    made = ChunkRing(4, 2)
    yield made
    made.close()


def restored(
    base: BaseFound, layout: str, info: RankInfo, ring: ChunkRing, **given: Any
) -> tuple[Values, LoadedBase]:
    values = build(layout, info, 9)
    return values, load(base, State(values, ranks=info), ring, **{"complete": whole(ring), **given})


def differing(values: Values, wanted: Values) -> list[str]:
    mine, theirs = locals_of(values), locals_of(wanted)
    assert mine.keys() == theirs.keys()
    return [name for name, tensor in theirs.items() if not mine[name].equal(tensor)]


def noted(make: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], list[int]]:
    """The same, with the ranks whose files it was called for."""
    asked: list[int] = []

    def note(opened: Any) -> Any:
        asked.append(opened.marker.rank)
        return make(opened)

    return note, asked


def lsns_of(base: BaseFound) -> list[set[int]]:
    """By rank: updates that its entries have seen."""
    with open_all(base) as opened:
        return [{place.entry.lsn for place in one.placed()} for one in opened]


WAYS = [
    (("ddp", 2), ("ddp", 2)),
    (("ddp", 3), ("ddp", 2)),
    (("ddp", 2), ("one", 1)),
    (("one", 1), ("ddp", 2)),
    (("fsdp", 2), ("fsdp", 2)),
    (("fsdp", 3), ("fsdp", 2)),
    (("fsdp", 2), ("ddp", 2)),
    (("ddp", 2), ("fsdp", 3)),
    (("hsdp", 4), ("hsdp", 4)),
    (("hsdp", 4), ("fsdp", 2)),
    (("tp", 2), ("tp", 2)),
    (("tp", 2), ("one", 1)),
    (("one", 2), ("one", 1)),
]


@pytest.mark.thinned(9)
@pytest.mark.parametrize(("wrote", "starts"), WAYS, ids=str)
def test_all_of_it_is_of_one_step(
    wrote: tuple[str, int], starts: tuple[str, int], tmp_path: Path, ring: ChunkRing
) -> None:
    """Ranks have begun at different steps, and each has captured its parameters one by one."""
    base = fuzzy_base(tmp_path, *wrote, ring)
    for rank, seen in enumerate(lsns_of(base)):
        assert (min(seen), max(seen)) == (STEP + rank % 2, LAST)
    layout, world = starts
    for rank in range(world):
        with as_rank(rank, world) as info:
            values, loaded = restored(base, layout, info, ring)
            assert differing(values, trained_to_last(layout, info)) == [], rank
            assert not any("its redo file was replayed" in note for note in loaded.notes)
            assert loaded.redone > 0
            assert values["own"]["n"] == LAST or rank >= wrote[1]


def test_a_rank_that_took_its_part_in_one_step(tmp_path: Path, ring: ChunkRing) -> None:
    base = fuzzy_base(tmp_path, "ddp", 2, ring, begins=lambda rank: STEP if rank else LAST)
    assert [len(seen) for seen in lsns_of(base)] == [1, PARTS]
    for rank in range(2):
        with as_rank(rank, 2) as info:
            values, _ = restored(base, "ddp", info, ring)
            assert differing(values, trained_to_last("ddp", info)) == []


def test_what_ranks_had_of_their_own_is_told_apart(tmp_path: Path, ring: ChunkRing) -> None:
    """By what it is when it is whole: parts were captured at different steps in any case."""

    def change(values: Values, info: RankInfo, step: int) -> None:
        values["optimizer"].param_groups[0]["lr"] = 0.1 + info.rank

    base = fuzzy_base(tmp_path, "one", 2, ring, change=change)
    with as_rank(0, 1) as info, pytest.raises(MismatchError, match="may mean either"):
        restored(base, "one", info, ring)


def test_what_nobody_needs_of_it_is_not_made_whole(tmp_path: Path, ring: ChunkRing) -> None:
    """A rank that has its own shards, and counters that it has written, reads its own files."""
    base = fuzzy_base(tmp_path, "fsdp", 2, ring)
    with as_rank(1, 2) as info:
        note, asked = noted(whole(ring))
        restored(base, "fsdp", info, ring, complete=note)
    assert asked == [1]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("layout", ["ddp", "hsdp"])
def test_disks_of_their_own_have_parts_of_other_updates(
    layout: str, tmp_path: Path, ring: ChunkRing
) -> None:
    """What is on two disks is the same when it is whole."""
    base = fuzzy_base(tmp_path, layout, 4, ring, near=lambda rank: (rank,))
    for rank in (1, 2):
        with as_rank(rank, 4) as info:
            wanted = trained_to_last(layout, info)
            for there in ([rank], [0, 1, 2, 3]):
                note, asked = noted(whole(ring))
                values, _ = restored(base, layout, info, ring, ranks=there, complete=note)
                assert differing(values, wanted) == []
                assert asked == [rank]


def test_files_in_memory_are_made_whole_like_those_on_disk(tmp_path: Path, ring: ChunkRing) -> None:
    """Of a keeper that has outlived its rank, or of a peer's."""
    base = fuzzy_base(tmp_path, "ddp", 2, ring)
    assert base.manifest is not None
    opened = []
    for marker in base.manifest.markers:
        files = tuple((FS.open(base.path / one.name), one) for one in marker.files)
        opened.append(HeldBase(marker, files, durable=False).open())
    try:
        with as_rank(1, 2) as info:
            values = build("ddp", info, 9)
            state = State(values, ranks=info)
            load_ranks(opened, state, Reads(ring, TIMEOUT_S), strict=True, complete=whole(ring))
            assert differing(values, trained_to_last("ddp", info)) == []
    finally:
        for one in opened:
            one.close()


def test_nobody_takes_it_as_it_is(tmp_path: Path, ring: ChunkRing) -> None:
    base = fuzzy_base(tmp_path, "ddp", 2, ring)
    with as_rank(0, 2) as info, pytest.raises(FormatError, match="at different updates"):
        restored(base, "ddp", info, ring, complete=None)


# --- What cannot be made whole ----------------------------------------------------------


def emptied(records: Records) -> list[LogRecord]:
    """An update that concerns a part concerns nothing."""
    none = memoryview(b"")
    last = len(records) - 2
    first = dataclasses.replace(
        records[last],
        layout=ShardLayout(()),
        objects={},
        data=none,
        digest=record_digest(none, {}),
    )
    return [*records[:last], first, *records[last + 1 :]]


def reshaped(records: Records) -> list[LogRecord]:
    mark = records[-1]
    return [*records[:-1], replace(mark, head=replace(mark.head, shape="another"))]


def negated(records: Records) -> list[LogRecord]:
    """A gradient of another sign, whose digest vouches for it."""
    one = records[-2]
    data = memoryview(bytearray(one.data))
    data[one.layout.placed[0].begin + 3] ^= 0x80
    return [*records[:-2], replace(one, data=data, digest=record_digest(data, one.objects)),
            records[-1]]  # fmt: skip


def torn(lsns: dict[str, int]) -> dict[str, int]:
    name = next(name for name in lsns if name.endswith("exp_avg") and lsns[name] < LAST)
    return {**lsns, name: lsns[name] + 1}


def lifted(lsns: dict[str, int]) -> dict[str, int]:
    """Parts that have seen all updates, of which there are gradients."""
    return {name: LAST if lsn == LAST - 1 else lsn for name, lsn in lsns.items()}


SPOILT: dict[str, tuple[str, Any, str]] = {
    "a hole": ("spoil", lambda records: records[:-2] + records[-1:], "the base is incomplete"),
    "another shape": ("spoil", reshaped, "another composition"),
    "a gradient dropped": ("spoil", emptied, "gives another"),
    "another gradient": ("spoil", negated, "gives another"),
    "torn apart": ("seen", torn, "were captured at different updates"),
    "seen already": ("seen", lifted, "which was captured after update"),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", SPOILT)
def test_what_cannot_be_made_whole_is_no_base(
    how: str, rank: int, tmp_path: Path, ring: ChunkRing
) -> None:
    """With digests that vouch for every bit; the error names whose files they are."""
    what, change, reason = SPOILT[how]

    def spoil(of: int, found: Any) -> Any:
        return change(found) if of == rank else found

    base = fuzzy_base(tmp_path, "ddp", 2, ring, begins=lambda _: STEP, **{what: spoil})
    for mine in range(2):
        with as_rank(mine, 2) as info, pytest.raises(FormatError, match=reason) as caught:
            restored(base, "ddp", info, ring)
        assert f"rank-{rank:05d}" in str(caught.value.path) or caught.value.rank == rank
    with pytest.raises(FormatError, match=reason):
        offline(base, ring, tmp_path, trained=TRAINED)


def test_a_change_behind_the_optimizers_back_is_found(tmp_path: Path, ring: ChunkRing) -> None:
    def change(values: Values, info: RankInfo, step: int) -> None:
        if (info.rank, step) == (1, LAST):
            with torch.no_grad():
                for parameter in values["model"].parameters():
                    parameter.mul_(1.5)

    base = fuzzy_base(tmp_path, "ddp", 2, ring, change=change)
    with as_rank(0, 2) as info, pytest.raises(FormatError, match="gives another") as caught:
        restored(base, "ddp", info, ring)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("trained", "why"),
    [
        (None, "is damaged"),
        (replace(TRAINED, fingerprint={**TRAINED.fingerprint, "device": "a GPU"}), "on a GPU"),
    ],
    ids=["nobody knows where", "elsewhere"],
)
def test_other_conditions_are_not_called_exact(
    trained: TimelineRecord | None, why: str, tmp_path: Path, ring: ChunkRing
) -> None:
    base = fuzzy_base(tmp_path, "ddp", 2, ring)
    with as_rank(0, 2) as info:
        values, loaded = restored(base, "ddp", info, ring, complete=whole(ring, trained))
        assert differing(values, trained_to_last("ddp", info)) == []
    (note,) = [one for one in loaded.notes if "its redo file was replayed" in one]
    assert why in note


# --- Without the program ----------------------------------------------------------------


def offline(base: BaseFound, ring: ChunkRing, run: Path, **given: Any) -> Any:
    found = replace(scan_base(FS, run, base.id), manifest=base.manifest)
    return load_job(FS, found, Reads(ring, TIMEOUT_S), **given)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("layout", "world"), [("ddp", 2), ("fsdp", 3), ("hsdp", 4)])
def test_commands_make_it_whole(layout: str, world: int, tmp_path: Path, ring: ChunkRing) -> None:
    """Its digests are those of the same base taken in one step."""
    base = fuzzy_base(tmp_path / "run", layout, world, ring)
    with open_all(base) as opened:
        check_contents(opened)
    state = offline(base, ring, tmp_path / "run", trained=TRAINED)
    assert state.doubt == ""
    sharp = fuzzy_base(tmp_path / "sharp", layout, world, ring, begins=lambda rank: LAST)
    assert all(seen == {LAST} for seen in lsns_of(sharp))
    assert state.digests() == offline(sharp, ring, tmp_path / "sharp").digests()
    found, _ = state.whole()
    with as_rank(0, 1) as info:
        wanted = locals_of(trained_to_last("one", info))
    for name, tensor in wanted.items():
        there = name.replace("optimizer/", "optimizer/state/model.")
        assert found.tensors[there].equal(tensor), name
    elsewhere = offline(base, ring, tmp_path / "run", trained=None)
    assert "damaged" in elsewhere.doubt


@pytest.mark.parametrize("rank", [0, 1])
def test_one_bit_of_any_ranks_gradients_is_noticed(
    rank: int, tmp_path: Path, ring: ChunkRing
) -> None:
    base = fuzzy_base(tmp_path, "ddp", 2, ring)
    assert base.manifest is not None
    back = partial(verify_rank, FS, tmp_path, base.id, rank, ring, timeout_s=TIMEOUT_S)
    assert back() == ""
    path = Path(base.path / base.manifest.markers[rank].files[-1].name)
    with open_all(base) as opened:
        redo = opened[rank].redo
        assert redo is not None
        begin = redo[2].room_bytes
    flip(path, begin + 5)  # its index, which is read whenever the base is opened, lies at its end
    with as_rank(1 - rank, 2) as info, pytest.raises((DamageError, FormatError)) as caught:
        restored(base, "ddp", info, ring)
    assert path.name in str(caught.value)
    assert path.name in back(), "read back before an older one is deleted"
