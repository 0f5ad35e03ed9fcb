"""What files are called: sortable, parsed strictly, never confused."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.format.names import (
    base_dir,
    marker_name,
    parse_base,
    parse_marker,
    parse_rank,
    parse_shard,
    parse_timeline,
    shard_name,
    timeline_dir,
)

RUN = PurePath("/run")
timelines = st.integers(0, 10**9 - 1)
steps = st.integers(0, 10**18 - 1)
ranks = st.integers(0, 10**9 - 1)


@given(timeline=timelines, step=steps, rank=ranks, part=ranks)
def test_names_are_parsed_back(timeline: int, step: int, rank: int, part: int) -> None:
    assert parse_timeline(timeline_dir(RUN, timeline).name) == timeline
    assert parse_base(base_dir(RUN, timeline, step).name) == step
    assert parse_marker(marker_name(rank)) == rank
    assert parse_shard(shard_name(rank, part)) == (rank, part)
    assert parse_rank(marker_name(rank)) == parse_rank(shard_name(rank, part)) == rank


@given(a=st.integers(0, 99_999), b=st.integers(0, 99_999))
def test_names_sort_as_numbers_do(a: int, b: int) -> None:
    for name in (lambda n: timeline_dir(RUN, n).name, lambda n: base_dir(RUN, 1, n).name):
        assert (name(a) < name(b)) == (a < b)


def test_the_layout_of_the_design() -> None:
    assert str(base_dir(RUN, 2, 1200)) == "/run/timeline-00002/base/000000001200"
    assert shard_name(0) == "rank-00000.safetensors"
    assert shard_name(3, 1) == "rank-00003-00001.safetensors"
    assert marker_name(7) == "rank-00007.done"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "timeline-1",
        "timeline-000001",
        "timeline-00001 ",
        "timeline-00001\n",
        "timeline--0001",
        "timeline-0000a",
        "timeline-\u0660\u0660\u0660\u0660\u0661",
        "Timeline-00001",
        "xtimeline-00001",
        "000000000001/../..",
        "0000000000001",
        "00000000001",
        "+00000000001",
        "rank-0.done",
        "rank-00000.done.tmp",
        "rank-000000.done",
        "rank-00000.safetensors~",
        "rank-00000-00000.safetensors",
        "rank-00000-1.safetensors",
        "rank-00000.safetensors/x",
        "../rank-00000.safetensors",
        "rank-00000\0.done",
    ],
)
def test_other_names_are_none_of_ours(name: str) -> None:
    assert parse_timeline(name) is None
    assert parse_base(name) is None
    assert parse_marker(name) is None
    assert parse_shard(name) is None
    assert parse_rank(name) is None


@given(name=st.text("timelnrak-0123456789.dosf\n ", max_size=24))
def test_a_name_means_one_thing_and_is_written_one_way(name: str) -> None:
    found = {
        "timeline": (parse_timeline(name), lambda n: timeline_dir(RUN, n).name),
        "base": (parse_base(name), lambda n: base_dir(RUN, 1, n).name),
        "marker": (parse_marker(name), marker_name),
        "shard": (parse_shard(name), lambda n: shard_name(*n)),
    }
    meanings = {kind: parsed for kind, parsed in found.items() if parsed[0] is not None}
    assert len(meanings) <= 1
    for number, write in meanings.values():
        assert write(number) == name
