"""Hosts with disks of their own hand each other what only the disk of one of them has."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from everstep.commit.job.offers import BaseOffer, Offer, Piece
from everstep.commit.lineage import BaseId
from everstep.errors import RecoveryError
from everstep.format.digests import digest
from everstep.format.names import base_dir, marker_name, shard_name
from everstep.format.records import Manifest, Marker
from everstep.restore.fetch import peers
from everstep.restore.fetch.held import HeldBase
from everstep.restore.fetch.peer_plan import offers_on_disks, prove_timelines, with_proven_bases
from everstep.restore.fetch.peers import (
    CopyOffer,
    ServedFiles,
    _SharedEntries,
    coverage_on_disk,
    fetch_plan,
)
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem, ReadFile
from everstep.state.layout.entries import Entry
from everstep.state.layout.shards import Placed
from everstep.trainer.job import job as job_module
from tests.support.ranks.logs import die
from tests.support.ranks.peering import RUN, bytes_of, piece, record_of
from tests.support.ranks.replicas import alike, folders, replicas, until
from tests.support.ranks.replicas import resume as resume_replicas
from tests.support.ranks.replicas import train as train_replicas
from tests.support.ranks.replicas import trained as trained_replicas
from tests.support.ranks.replicas_left import BASES, own_models, saved
from tests.support.ranks.together import on_all, resume, save, train, trained, trainings

__all__ = ["alike"]

FS = PosixFileSystem()
A, B = BaseId(1, 10), BaseId(1, 20)


def saved_by(*paths: Path, steps: tuple[int, ...] = (2,)) -> None:
    """A job whose ranks have nothing in common, with a base behind each of so many more steps."""
    with trainings(*paths, keep=9) as ranks:
        resume(ranks)
        for count in steps:
            train(ranks, count)
            save(ranks)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("order", [(1, 0), (2, 0, 1)], ids=str)
def test_hosts_come_back_as_other_ranks(tmp_path: Path, order: tuple[int, ...]) -> None:
    """A launcher numbers hosts as they come: each rank's file is on the disk of another one now."""
    paths = folders(tmp_path, shared=False, world=len(order))
    saved_by(*paths)
    with trainings(*(paths[host] for host in order)) as ranks:
        for rank, found in enumerate(resume(ranks)):
            assert (found.step, found.exact, found.source) == (2, True, "peer")
            assert torch.equal(ranks[rank].weight, trained(rank, 2))
        train(ranks, 2)
        save(ranks)
    with trainings(*(paths[host] for host in order)) as ranks:  # now each disk has its own
        assert {(one.step, one.source) for one in resume(ranks)} == {(4, "disk")}
        for rank, one in enumerate(ranks):
            assert torch.equal(one.weight, trained(rank, 4))


def test_nothing_is_sent_where_each_disk_has_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = folders(tmp_path, shared=False)
    saved_by(*paths)
    monkeypatch.setattr(ServedFiles, "read", None)
    with trainings(*paths) as ranks:
        assert {(one.step, one.source) for one in resume(ranks)} == {(2, "disk")}


def test_new_hosts_with_empty_disks_join(tmp_path: Path) -> None:
    paths = folders(tmp_path, shared=False, world=4)
    saved(paths[:2])
    with replicas(*paths, **BASES) as ranks:
        for one in resume_replicas(ranks):
            assert (one.step, one.source) == (4, "peer")
        for training in ranks:
            assert all(map(torch.equal, training.weights, trained_replicas(4)))
        train_replicas(ranks, 2)
        for training in ranks:
            training.ckpt.wait(20)
            assert all(map(torch.equal, training.weights, trained_replicas(6)))


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("world", "lost"), [(2, (1,)), (2, (0,)), (4, (1, 2)), (3, (0, 1))])
def test_a_host_that_was_replaced_takes_what_the_others_have(
    tmp_path: Path, world: int, lost: tuple[int, ...]
) -> None:
    """Its part of what all had in common is on every disk that is left."""
    paths = folders(tmp_path, shared=False, world=world)
    saved(paths)
    for host in lost:
        shutil.rmtree(paths[host])
    gone = ", ".join(map(str, lost))
    with replicas(*paths, **BASES) as ranks:
        for rank, one in enumerate(resume_replicas(ranks)):
            assert (one.step, one.exact) == (4, False), one
            assert one.source == ("peer" if rank in lost else "disk")
            if rank in lost:
                assert f"rng: rank {rank} starts with the state its program made" in str(one.notes)
        assert {len(training.state) for training in ranks} == {3}
        for training in ranks:
            assert all(map(torch.equal, training.weights, trained_replicas(4))), gone
        train_replicas(ranks, 2)
        for training in ranks:
            training.ckpt.wait(20)
    with replicas(*paths, **BASES) as ranks:
        assert {(one.step, one.source) for one in resume_replicas(ranks)} == {(6, "disk")}
        for training in ranks:
            assert all(map(torch.equal, training.weights, trained_replicas(6)))


def test_of_more_hosts_than_before_one_was_lost(tmp_path: Path) -> None:
    paths = folders(tmp_path, shared=False, world=4)
    saved(paths[:2])
    shutil.rmtree(paths[0])
    with replicas(*paths, **BASES) as ranks:
        assert [(one.step, one.source) for one in resume_replicas(ranks)] == [
            (4, "disk" if rank == 1 else "peer") for rank in range(4)
        ]
        for training in ranks:
            assert all(map(torch.equal, training.weights, trained_replicas(4)))
        # One by one each would wait for the others' part of its last base.
        on_all(*(one.ckpt.close for one in ranks))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", ["in another order", "more hosts", "one was lost"])
def test_hosts_with_a_log(tmp_path: Path, case: str) -> None:
    """Its steps are redone where all can see who had what of the base; where not, it is said."""
    paths = folders(tmp_path, shared=False, world=3)
    until(paths[:2] if case == "more hosts" else paths, 6)
    if case == "one was lost":
        shutil.rmtree(paths[1])
    again = (*paths[1:], paths[0]) if case == "in another order" else paths
    step = 6 if case == "more hosts" else 4
    with replicas(*again) as ranks:
        for found in resume_replicas(ranks):
            assert (found.step, found.base_step) == (step, 4)
            assert found.exact == (case != "one was lost")
            if case == "in another order":
                assert "log: the old layout is in files of other ranks" in str(found.skipped)
        for training in ranks:
            assert all(map(torch.equal, training.weights, trained_replicas(step)))
        train_replicas(ranks, 3)
        die(ranks)
    with replicas(*again) as ranks:
        for found in resume_replicas(ranks):
            assert (found.step, found.source) == (step + 3, "disk")
        for training in ranks:
            assert all(map(torch.equal, training.weights, trained_replicas(step + 3)))
        die(ranks)


def test_what_only_a_lost_host_had_is_missed(tmp_path: Path) -> None:
    """Ranks that have nothing in common: nobody's tensors are taken for another one's."""
    paths = folders(tmp_path, shared=False)
    with own_models(paths) as ranks:
        resume_replicas(ranks)
        train_replicas(ranks, 2)
        for one in ranks:
            one.ckpt.wait(20)
    shutil.rmtree(paths[0])
    with own_models(paths) as ranks:
        before = [one.weights for one in ranks]
        with pytest.raises(RecoveryError, match=r"files of rank"):
            resume_replicas(ranks)
        for one, weights in zip(ranks, before, strict=True):
            assert all(map(torch.equal, one.weights, weights)), "nothing has been touched"


def test_what_comes_damaged_is_passed_over_by_all(tmp_path: Path) -> None:
    paths = folders(tmp_path, shared=False)
    saved_by(*paths, steps=(2, 2))
    spoil(base_dir(paths[0], 1, 4) / shard_name(0))
    with trainings(*reversed(paths)) as ranks:
        assert [(one.step, one.source) for one in resume(ranks)] == [(2, "peer")] * 2
        for rank, one in enumerate(ranks):
            assert torch.equal(one.weight, trained(rank, 2))


def spoil(file: PurePath) -> None:
    data = bytearray(Path(file).read_bytes())
    data[-1000 if len(data) > 5000 else -1] ^= 1
    Path(file).write_bytes(data)


def test_a_file_that_cannot_be_read_where_it_is_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = folders(tmp_path, shared=False)
    saved_by(*paths, steps=(2, 2))
    opened = peers.ServedFiles

    class Gone(opened):  # type: ignore[misc,valid-type]
        def __init__(self, opens: Any, base: BaseId, marker: Any) -> None:
            def fails(base: BaseId, name: str) -> ReadFile:
                if base.step == 4:
                    raise OSError("it was there")
                return opens(base, name)  # type: ignore[no-any-return]

            super().__init__(fails, base, marker)

    monkeypatch.setattr(peers, "ServedFiles", Gone)
    with trainings(*reversed(paths)) as ranks:
        assert [one.step for one in resume(ranks)] == [2, 2]


def test_what_there_is_no_memory_for_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = folders(tmp_path, shared=False)
    saved_by(*paths)
    monkeypatch.setattr(job_module, "memory_available_bytes", lambda: 1000)
    with (
        trainings(*reversed(paths)) as ranks,
        pytest.raises(RecoveryError, match="the files of rank"),
    ):
        resume(ranks)


def test_a_disk_of_another_start_lends_nothing(tmp_path: Path) -> None:
    """Two starts have opened timeline 1, and one of them never trained on it (I7)."""
    ours, wants = offer(0, B), Offer(2, "2", RUN, 1, {}, {})
    theirs = dataclasses.replace(offer(1), timelines={1: record_of(1, "other")})
    found = offers_on_disks([ours, theirs, wants], [])
    assert [(one.holder, one.base, one.disk) for one in found] == [(0, B, True)]
    assert found[0].record == record_of(1).encode()
    plan, _ = fetch_plan([ours, theirs, wants], found, lambda rank, manifest: (0,), None)
    assert plan == {}, "rank 1 knows another timeline of that number, and takes none of it"
    both = dataclasses.replace(offer(1, B), timelines={1: record_of(1, "other")})
    assert offers_on_disks([ours, both, wants], []) == [], "nobody can say which one is meant"


def test_each_disk_is_asked_once_and_behind_keepers() -> None:
    held = CopyOffer(0, piece(0, B).marker, record_of(1).encode())
    same = dataclasses.replace(offer(0, B), rank=1)
    assert [(one.holder, one.disk) for one in offers_on_disks([offer(0, B), same], [])] == [
        (0, True)
    ]
    assert [one.holder for one in offers_on_disks([offer(0, B), same], [held])] == [1]
    wants = [offer(0, B), Offer(1, "1", RUN, 1, {}, {})]
    plan, _ = fetch_plan(
        wants, [held, *offers_on_disks(wants, [])], lambda rank, manifest: (0,), None
    )
    assert plan == {}, "one part of two is no base"


def offer(rank: int, *bases: BaseId, world: int = 2) -> Offer:
    """What a rank with a disk of its own can read: its own file."""
    found = {b: BaseOffer({rank: Piece(piece(rank, b, world=world).marker)}) for b in bases}
    return Offer(rank, str(rank), RUN, 2, {1: record_of(1)}, found)


def test_a_copy_in_a_store_is_read_there(tmp_path: Path) -> None:
    """What a rank can read by itself does not come from another one's disk."""
    there = {1: Piece(piece(1, B).marker, ("object",))}
    offers = [offer(0, B), dataclasses.replace(offer(1), bases={B: BaseOffer(there)})]
    other = {0: Piece(piece(0, B).marker), 1: Piece(piece(1, B).marker)}
    offers[0] = dataclasses.replace(offers[0], bases={B: BaseOffer(other)})
    told = offers_on_disks(offers, [])
    assert {one.marker.rank for one in told} == {0, 1}
    assert fetch_plan(offers, told, lambda rank, manifest: (rank,), None)[0] == {}


def test_of_replicas_the_disk_is_asked_that_has_most_in_common(tmp_path: Path) -> None:
    """Where shards are replicated over some hosts only, another one's shard is of no use."""
    markers = tuple(piece(rank, B, world=4).marker for rank in range(4))
    offers = []
    for rank in range(3):
        others = tuple(one for one in markers if one.rank != rank)
        one = offer(rank, B, world=4)
        offers.append(
            dataclasses.replace(one, bases={B: dataclasses.replace(one.bases[B], listed=others)})
        )
    offers.append(Offer(3, "3", RUN, 1, {}, {}))
    manifest = digest(Manifest(tuple(markers)).encode())
    offers = [
        dataclasses.replace(
            one, bases={b: dataclasses.replace(o, manifest=manifest) for b, o in one.bases.items()}
        )
        for one in offers
    ]
    covers = [{B: {0: 100, 2: 100, 3: 5}}, {B: {1: 100, 3: 100}}, {B: {0: 100, 2: 100}}, {}]
    nobody = [{B: {0: 100}}, {B: {1: 100}}, {}, {}]
    needs = lambda rank, manifest: (rank,)  # noqa: E731
    told = offers_on_disks(offers, [])
    assert fetch_plan(offers, told, needs, None) == ({}, None)
    assert fetch_plan(offers, told, needs, None, covers=nobody) == ({}, None)
    plan, choice = fetch_plan(offers, told, needs, None, covers=covers)
    assert choice is not None
    assert (choice.base, choice.partly) == (B, True)
    assert {rank: [one.holder for one in found] for rank, found in plan.items()} == {3: [1]}


def test_whose_entries_a_disk_has_is_read_from_headers(tmp_path: Path) -> None:
    paths = folders(tmp_path, shared=False)
    saved(paths)
    bases = scan_run(FS, paths[0]).bases
    found = coverage_on_disk(FS, bases)
    sizes = found[BaseId(1, 4)]
    assert set(sizes) == {0, 1}
    assert sizes[0] > sizes[1] > 0, "what rank 0 had for itself is none of rank 1's"
    spoil(base_dir(paths[0], 1, 4) / marker_name(0))
    (base_dir(paths[0], 1, 2) / shard_name(0)).write_bytes(b"")  # type: ignore[attr-defined]
    assert BaseId(1, 2) not in coverage_on_disk(FS, scan_run(FS, paths[0]).bases)


def test_another_ranks_shard_is_nothing_in_common() -> None:
    common, spread = _SharedEntries(), "replicate,shard(0)@2x2:0-3"
    common.count(Placed(Entry("a", "U8", (10,), (20,), (10,), spread), 0, 10), 1, 4)
    assert common.sizes == {1: 10, 3: 10}
    common.count(Placed(Entry.whole("b", "U8", (5,)), 10, 15), 1, 4)
    assert common.sizes == {1: 15, 3: 15}, "of ranks 0 and 2 a part of what is there is missing"
    common.count(Placed(Entry("a", "U8", (10,), (20,), (0,), spread), 0, 10), 0, 4)
    assert common.sizes == dict.fromkeys(range(4), 15)


def test_bytes_of_several_files_lie_one_after_the_other(tmp_path: Path) -> None:
    first, second = piece(0, A, size_bytes=3000), piece(1, A, size_bytes=2000)
    data = bytes_of(first) + bytes_of(second)
    (a,), (b,) = first.marker.files, second.marker.files
    records = (dataclasses.replace(a, name="a"), dataclasses.replace(b, name="b"))
    marker = dataclasses.replace(first.marker, files=records)
    (tmp_path / "a").write_bytes(bytes_of(first))
    (tmp_path / "b").write_bytes(bytes_of(second))
    files = ServedFiles(lambda base, name: FS.open(tmp_path / name), A, marker)
    for begin, size in [(0, 10), (a.length - 5, 10), (a.length, 7), (0, len(data)), (5, 1 << 20)]:
        assert files.read(begin, size) == data[begin : begin + size]
    assert files.read(len(data), 5) == b""
    files.close()
    files.close()
    (tmp_path / "b").write_bytes(b"short")
    files = ServedFiles(lambda base, name: FS.open(tmp_path / name), A, marker)
    assert files.read(0, len(data)) == b""
    files.close()
    assert isinstance(first, HeldBase)


def committed(*markers: Marker) -> str:
    return digest(Manifest(markers).encode())


def test_a_disk_is_gone_and_the_keeper_beside_it_lives() -> None:
    """It holds the base of a timeline that its disk knows no more of: which one that is, the
    manifest on another disk says, and nothing else does (I7)."""
    mine, theirs = piece(1, B).marker, piece(0, B).marker
    sees = dataclasses.replace(
        offer(0), bases={B: BaseOffer({0: Piece(theirs)}, committed(theirs, mine))}
    )
    offers = [sees, Offer(1, "1", RUN, 1, {}, {})]
    found = prove_timelines(offers, {1: mine})
    assert found == {1: record_of(1)}
    counted = with_proven_bases(offers, {1: mine}, found)
    assert counted[0] == sees
    assert counted[1].bases[B].pieces == {1: Piece(mine, ("memory",))}
    plan, choice = fetch_plan(counted, [], lambda rank, manifest: (rank,), None)
    assert plan == {}
    assert choice is not None
    assert choice.base == B


def test_what_no_manifest_proves_is_not_offered() -> None:
    mine, theirs = piece(1, B).marker, piece(0, B).marker
    lost = Offer(1, "1", RUN, 1, {}, {})
    sees = dataclasses.replace(
        offer(0), bases={B: BaseOffer({0: Piece(theirs)}, committed(theirs, mine))}
    )
    assert prove_timelines([sees, lost], {1: piece(1, B, salt=1).marker}) == {}, "of another start"
    assert prove_timelines([offer(0, B), lost], {1: mine}) == {}, (
        "nobody knows whether it was committed"
    )
    assert prove_timelines([offer(0), lost], {1: mine}) == {}
    unknown = dataclasses.replace(sees, timelines={1: None})
    assert prove_timelines([unknown, lost], {1: mine}) == {}, "its record is damaged"
    assert prove_timelines([sees, lost], {}) == {}
    both = [Offer(0, "0", RUN, 1, {}, {}), lost]
    assert prove_timelines(both, {0: theirs, 1: mine}) == {}, (
        "two keepers prove nothing to each other"
    )
    third = dataclasses.replace(sees, rank=2, bases={B: BaseOffer({}, committed(theirs, mine))})
    assert set(prove_timelines([*both, third], {0: theirs, 1: mine})) == {0, 1}
