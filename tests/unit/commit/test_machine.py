"""The life of a base as a state machine: the order is the guarantee (I5, I11)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.commit.base_commit import (
    BaseCommit,
    CheckFence,
    FenceSeen,
    FilesDurable,
    GatherMarkers,
    ManifestDurable,
    MarkerDurable,
    MarkersSeen,
    Phase,
    WriteFiles,
    WriteManifest,
    WriteMarker,
)
from everstep.errors import FencedError
from everstep.format.header import ShardIdentity
from everstep.format.names import shard_name
from everstep.format.records import FileRecord, Manifest, Marker, manifest_of


def identity(rank: int = 0, world: int = 1, timeline: int = 3) -> ShardIdentity:
    return ShardIdentity("run", timeline, 100, 250, rank, world, True)


def file_of(rank: int) -> FileRecord:
    return FileRecord(shard_name(rank), 8192, 4096, "a" * 32, "b" * 32)


def marker_of(rank: int, world: int) -> Marker:
    return Marker("run", 3, 100, 250, rank, world, True, (file_of(rank),))


def test_one_rank_in_order() -> None:
    commit = BaseCommit(identity())
    assert commit.start() == CheckFence()
    assert commit.on(FenceSeen(3)) == WriteFiles()
    assert commit.on(FilesDurable((file_of(0),))) == WriteMarker(marker_of(0, 1))
    assert commit.on(MarkerDurable()) == GatherMarkers()
    assert commit.on(MarkersSeen({0: marker_of(0, 1)})) == CheckFence()
    assert commit.on(FenceSeen(3)) == WriteManifest(Manifest((marker_of(0, 1),)))
    assert commit.phase is Phase.COMMITTING
    assert commit.on(ManifestDurable()) is None
    assert commit.phase is Phase.COMMITTED


@pytest.mark.parametrize("moment", ["at the start", "before the manifest"])
def test_a_newer_timeline_fences_it_off(moment: str) -> None:
    commit = BaseCommit(identity())
    commit.start()
    if moment == "before the manifest":
        commit.on(FenceSeen(3))
        commit.on(FilesDurable((file_of(0),)))
        commit.on(MarkerDurable())
        commit.on(MarkersSeen({0: marker_of(0, 1)}))
    with pytest.raises(FencedError, match="timeline 4 has taken the run over"):
        commit.on(FenceSeen(4))


def test_an_older_timeline_does_not() -> None:
    commit = BaseCommit(identity())
    commit.start()
    assert commit.on(FenceSeen(2)) == WriteFiles()


@given(st.integers(2, 5), st.randoms(use_true_random=False))
def test_no_manifest_before_every_marker(world: int, random: object) -> None:
    """Markers of the other ranks turn up in any order."""
    order = list(range(1, world))
    random.shuffle(order)  # type: ignore[attr-defined]
    commit = BaseCommit(identity(world=world))
    commit.start()
    commit.on(FenceSeen(3))
    commit.on(FilesDurable((file_of(0),)))
    commit.on(MarkerDurable())
    seen = {0: marker_of(0, world)}
    for rank in order:
        assert commit.on(MarkersSeen(dict(seen))) == GatherMarkers()
        seen[rank] = marker_of(rank, world)
    assert commit.on(MarkersSeen(dict(seen))) == CheckFence()
    written = commit.on(FenceSeen(3))
    assert isinstance(written, WriteManifest)
    assert [marker.rank for marker in written.manifest.markers] == list(range(world))


def test_the_manifest_is_a_function_of_the_markers() -> None:
    """Whoever finds them, in whatever order, writes the same bytes."""
    markers = [marker_of(rank, 3) for rank in range(3)]
    encoded = set()
    for order in itertools.permutations(markers):
        manifest = manifest_of({marker.rank: marker for marker in order})
        assert manifest is not None
        encoded.add(manifest.encode())
    assert len(encoded) == 1


def test_markers_that_disagree_yield_none() -> None:
    other_step = Marker("run", 3, 101, 250, 1, 2, True, (file_of(1),))
    other_world = marker_of(1, 3)
    other_run = Marker("other", 3, 100, 250, 1, 2, True, (file_of(1),))
    for stranger in (other_step, other_world, other_run):
        assert manifest_of({0: marker_of(0, 2), 1: stranger}) is None
    assert manifest_of({0: marker_of(0, 2), 1: marker_of(0, 2)}) is None
    assert manifest_of({}) is None
