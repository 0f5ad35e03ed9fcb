"""The manifest of a base is a pure function of the markers of its ranks (I5)."""

from __future__ import annotations

import itertools

from everstep.format.names import shard_name
from everstep.format.records import FileRecord, Marker, manifest_of


def file_of(rank: int) -> FileRecord:
    return FileRecord(shard_name(rank), 8192, 4096, "a" * 32, "b" * 32)


def marker_of(rank: int, world: int) -> Marker:
    return Marker("run", 3, 100, 250, rank, world, True, (file_of(rank),))


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
