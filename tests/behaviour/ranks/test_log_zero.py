"""The log of a ZeroRedundancyOptimizer: each rank records what it updates for all, and replays
that; in other parts, what all of them have recorded together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.capture.spot_check import Probe
from everstep.errors import AuditError, FormatError
from everstep.format.writer import ChunkRing
from everstep.link.channel import BackgroundChannel
from everstep.link.recordable import Layouts
from everstep.restore.redo.driver import ReplayDriver, Step
from everstep.restore.redo.live import LiveMemory
from everstep.restore.redo.updates import DeclaredRedo, update_from_record
from everstep.run.scan import BaseFound
from everstep.seams.clock import ManualClock
from everstep.state.layout.entries import SPOT
from everstep.state.providers.optimizers import ZeroProvider
from everstep.state.ranks import rank_share as share
from everstep.state.ranks.log_shares import bytes_logged_elsewhere, updated_elsewhere
from everstep.state.ranks.writers import RankInfo, Replication, find_replication
from everstep.state.training_state import State
from everstep.trainer.log.untracked_writes import UntrackedWrites
from tests.support.ranks.relogged import Logs, logged, record_of, records_of, redone, train
from tests.support.ranks.sharding import STEP, Values, as_rank, build, load, locals_of

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


@pytest.mark.thinned(3)
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
@pytest.mark.thinned(2)
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
    return sorted(update_from_record(logs[rank, STEP + 1][0], own=True).gradients)


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
            assert bytes_logged_elsewhere(state) == left


def test_a_part_that_is_missing_is_noticed(tmp_path: Path, ring: ChunkRing) -> None:
    """Not taken for a parameter without a gradient."""
    base, logs = logged(tmp_path, "zero", 3, ring, STEPS)
    for step in range(STEP + 1, STEP + 1 + STEPS):
        logs[2, step] = logs[1, step]
    with as_rank(0, 1) as info, pytest.raises(FormatError):
        redone(base, logs, "one", info, ring, STEPS, together=False)


# --- Who updates a parameter writes it, and has samples of it ---------------------------------

WORLD = 5
"""So many ranks would share them out otherwise: of two that are of one size each writes what the
other one updates."""


def owned_by(state: State) -> set[str]:
    """Entries of the parameters that this rank updates."""
    provider = state.providers["optimizer"]
    assert isinstance(provider, ZeroProvider)
    return {"model/" + name.removeprefix("model.") for name in provider.owned()}


def in_samples(state: State) -> set[str]:
    """Parameters of which marks of this rank's log hold some elements."""
    survey = state.survey()
    channel = BackgroundChannel("raise", ManualClock(), progress_timeout_s=9.0)
    untold = UntrackedWrites(channel, state)
    untold.start(survey, STEP)
    which = untold.samples(STEP + 1)[f"{SPOT}which"].numpy()
    bits = np.unpackbits(which)[: len(survey.tensors)]
    names = [name for name, bit in zip(sorted(survey.tensors), bits, strict=True) if bit]
    return {name for name in names if name.startswith("model/")}


@pytest.mark.parametrize(
    "disks",
    [((0, 1, 2, 3, 4),), ((0,), (1,), (2,), (3,), (4,)), ((0, 3), (1, 2, 4))],
    ids=["one disk", "disks of their own", "two disks"],
)
def test_each_rank_writes_and_samples_what_it_updates(disks: tuple[tuple[int, ...], ...]) -> None:
    every = {f"model/{name}" for name, _ in build_names()}
    sampled = list[str]()
    for disk in disks:
        on_disk = list[str]()
        for rank in disk:
            near = None if len(disks) == 1 else disk
            with as_rank(rank, WORLD) as info:
                state = State(build("zero", info, 3), ranks=replace(info, near=near))
                own = owned_by(state)
                written = state.survey().tensors.keys() & every
                assert own
                assert written >= own
                assert near is not None or written == own
                assert in_samples(state) == own
                sampled += own
                on_disk += written
        assert sorted(on_disk) == sorted(every), "once on each disk"
    assert sorted(sampled) == sorted(every)


def replayed(base: BaseFound, logs: Logs, info: RankInfo, ring: ChunkRing) -> Values:
    """A rank that was there, behind its own log."""
    values = build("zero", info, 9)
    state = State(values, ranks=info)
    load(base, state, ring)
    redo = ReplayDriver(LiveMemory(state), compares=True)
    for step in range(STEP + 1, STEP + 1 + STEPS):
        update, mark = logs[info.rank, step]
        redo.step(Step.of([update], mark))
    redo.finish()
    return values


def test_each_rank_replays_its_own_log_bit_for_bit(tmp_path: Path, ring: ChunkRing) -> None:
    base, logs = logged(tmp_path, "zero", 3, ring, STEPS)
    for rank in range(3):
        with as_rank(rank, 3) as info:
            wanted = trained_on("zero", info)
            elsewhere = updated_elsewhere(State(wanted, ranks=info))
            assert differing(replayed(base, logs, info, ring), wanted, elsewhere) == []


@pytest.mark.thinned(3)
@pytest.mark.parametrize("of", ["weight", "bias"])
@pytest.mark.parametrize("layer", ["up", "norm", "down"])
def test_what_is_written_past_the_optimizer_is_found(
    layer: str, of: str, tmp_path: Path, ring: ChunkRing
) -> None:
    """To any parameter, by the rank that updates it, where no version counter tells."""
    name, writers = f"{layer}.{of}", set[int]()

    def change(values: Values, info: RankInfo) -> None:
        own = values["optimizer"].optim.param_groups
        parameter = dict(values["model"].named_parameters())["module." + name]
        if any(parameter is one for group in own for one in group["params"]):
            writers.add(info.rank)
            if values["own"]["n"] == STEP + 2:
                parameter.data.add_(1.0)

    base, logs = logged(tmp_path, "zero", WORLD, ring, STEPS, change=change)
    (writer,) = writers
    for rank in range(WORLD):
        with as_rank(rank, WORLD) as info:
            if rank != writer:
                replayed(base, logs, info, ring)
                continue
            with pytest.raises(AuditError, match=f"'model/{name}'"):
                replayed(base, logs, info, ring)
    with as_rank(0, 1) as info, pytest.raises(AuditError, match=f"'model/{name}'"):
        redone(base, logs, "one", info, ring, STEPS)


@pytest.mark.parametrize("world", [2, 3])
def test_where_others_have_written_what_a_rank_updates_its_log_leads_on(
    world: int, tmp_path: Path, ring: ChunkRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bases were split once: to those who replay it, that is another layout."""

    def by_the_next(*about: Any) -> Replication:
        found = find_replication(*about)
        next_to = {name: ((r + 1) % world, ranks) for name, (r, ranks) in found.updaters.items()}
        return replace(found, updaters=next_to)

    with monkeypatch.context() as patched:
        patched.setattr(share, "find_replication", by_the_next)
        base, logs = logged(tmp_path, "zero", world, ring, STEPS)
        with as_rank(0, world) as info:
            state = State(build("zero", info, 3), ranks=info)
            assert owned_by(state).isdisjoint(state.survey().tensors)
    for rank in range(world):
        with as_rank(rank, world) as info:
            wanted = trained_on("zero", info)
            elsewhere = updated_elsewhere(State(wanted, ranks=info))
            values, restored = redone(base, logs, "zero", info, ring, STEPS)
            assert (restored.replayed, restored.inexact, restored.skipped) == (STEPS, "", [])
            assert differing(values, wanted, elsewhere) == []


@pytest.mark.parametrize(("layout", "update"), [("zero", None), ("ddp", "mean/*")])
def test_what_a_registered_function_updates_is_in_the_marks(
    layout: str, update: str | None
) -> None:
    """A rank that replays has not what the others update, and the function would read that."""
    with as_rank(0, 2) as info:
        values = {**build(layout, info, 3), "mean": torch.nn.Linear(5, 8).requires_grad_(False)}
        state = State(values, declared={"mean/*": lambda: None}, ranks=info)
        owners = state.survey().shape.owners
        for name in ("mean/weight", "mean/bias"):
            assert (owners[name].kind, owners[name].update) == ("declared", update)
            assert owners[name].in_marks == (update is None)
        state.ownership_rules.check_updates(["mean/*"])


def test_a_log_that_has_left_it_out_gives_nothing_exact(tmp_path: Path, ring: ChunkRing) -> None:
    """As they were written once: its marks hold but samples."""
    functions = {"mean/*": lambda: None}
    with as_rank(0, 2) as info:
        values = {**build("zero", info, 3), "mean": torch.nn.Linear(5, 8).requires_grad_(False)}
        state = State(values, declared=functions, ranks=info)
        ((_, (_, mark)),) = records_of(values, state, 1)
        samples = Probe().take(State({"mean": values["mean"]}, declared=functions).survey())
        assert samples
        for logged, exact in (({}, True), (samples, False)):
            layout = Layouts().of(logged)
            found = DeclaredRedo(state)
            found.settle(record_of(mark.head, layout, {}, logged))
            assert found.exactness.exact == exact
