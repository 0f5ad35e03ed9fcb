"""The log of a ZeroRedundancyOptimizer: each rank records what it updates for all, and replays
that; in other parts, what all of them have recorded together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.errors import FormatError
from everstep.format.writer import ChunkRing
from everstep.recover.redo import update_of
from everstep.state.image import State
from everstep.state.log_parts import left_to_others_bytes, updated_elsewhere
from everstep.state.ranks import RankInfo
from everstep.state.zero import ZeroProvider
from tests.unit.relogged import Logs, logged, redone, train
from tests.unit.sharding import STEP, Values, as_rank, build, locals_of

STEPS = 3


@pytest.fixture(scope="module")
def ring() -> Iterator[ChunkRing]:
    made = ChunkRing(4, 2)
    yield made
    made.close()


def trained_on(layout: str, info: RankInfo) -> Values:
    """A rank of a job that nobody disturbed."""
    values = build(layout, info, 3)
    for step in range(STEP + 1, STEP + 1 + STEPS):
        train(values, step)
        values["optimizer"].step()
    return values


def differing(values: Values, wanted: Values, names: frozenset[str]) -> list[str]:
    """Names of tensors that differ, of those that are no other rank's to update."""
    mine, theirs = locals_of(values), locals_of(wanted)
    assert mine.keys() == theirs.keys()
    return [n for n, t in theirs.items() if n not in names and not mine[n].equal(t)]


@pytest.mark.parametrize(
    ("wrote", "starts"),
    [
        (("zero", 2), ("one", 1)),
        (("zero", 3), ("ddp", 2)),
        (("ddp", 2), ("zero", 3)),
        (("fsdp", 2), ("zero", 2)),
        (("zero", 2), ("fsdp", 2)),
        (("zero", 2), ("zero", 3)),
    ],
    ids=str,
)
def test_in_other_parts_it_is_replayed_bit_for_bit(
    wrote: tuple[str, int], starts: tuple[str, int], tmp_path: Path, ring: ChunkRing
) -> None:
    base, logs = logged(tmp_path, *wrote, ring, STEPS)
    layout, world = starts
    updated = set()
    for rank in range(world):
        with as_rank(rank, world) as info:
            wanted = trained_on(layout, info)
            elsewhere = updated_elsewhere(State(wanted, ranks=info))
            updated |= locals_of(wanted).keys() - elsewhere
            for together in (True, False):
                values, restored = redone(base, logs, layout, info, ring, STEPS, together=together)
                assert (restored.replayed, restored.inexact, restored.skipped) == (STEPS, "", [])
                assert differing(values, wanted, elsewhere) == [], rank
    assert updated >= {f"model/{name}" for name, _ in build_names()}


def build_names() -> list[tuple[str, int]]:
    with as_rank(0, 1) as info:
        model = build("one", info, 3)["model"]
        return [(name, parameter.numel()) for name, parameter in model.named_parameters()]


def first(logs: Logs, rank: int) -> list[str]:
    """Names of the gradients in a rank's first record."""
    return sorted(update_of(logs[rank, STEP + 1][0], own=True).gradients)


def test_each_gradient_is_in_one_log(tmp_path: Path, ring: ChunkRing) -> None:
    _, logs = logged(tmp_path, "zero", 3, ring, 1)
    recorded = [name for rank in range(3) for name in first(logs, rank)]
    assert len(recorded) == len(set(recorded)) == len(build_names())
    sizes = dict(build_names())
    for rank in range(3):
        with as_rank(rank, 3) as info:
            state = State(build("zero", info, 3), ranks=info)
            provider = state.providers["optimizer"]
            assert isinstance(provider, ZeroProvider)
            assert set(first(logs, rank)) == provider.owned()
            own = {name.removeprefix("model.") for name in provider.owned()}
            left = sum(size * 4 for name, size in sizes.items() if name not in own)
            assert left_to_others_bytes(state) == left


def test_a_part_that_is_missing_is_noticed(tmp_path: Path, ring: ChunkRing) -> None:
    """Not taken for a parameter without a gradient."""
    base, logs = logged(tmp_path, "zero", 3, ring, STEPS)
    for step in range(STEP + 1, STEP + 1 + STEPS):
        logs[2, step] = logs[1, step]
    with as_rank(0, 1) as info, pytest.raises(FormatError):
        redone(base, logs, "one", info, ring, STEPS, together=False)
