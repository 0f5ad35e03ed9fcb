"""A place whose calls hang is told of, and nobody waits for it; what moves is left alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everstep import Checkpointer
from everstep.commit.retention import KeepRules
from everstep.errors import DeadlineError, EverstepError
from everstep.format.header import ShardIdentity
from everstep.keeper.ship.base_copies import BaseCopies, CopyGroup
from everstep.keeper.ship.courier import Courier
from everstep.keeper.ship.couriers import Couriers
from everstep.keeper.ship.log_copies import LogCopies
from everstep.seams import ManualClock, PosixFileSystem, ReadFile, Seams
from everstep.testing.conformance import CHECKS, Check, Place
from everstep.tiers.contract import Tier, pieces_of
from everstep.tiers.memory import MemoryFile, MemoryTier
from everstep.tiers.options import TierOptions
from tests.support.following import until
from tests.support.ranks.peer_logs import IDENTITY, Log
from tests.support.world import Gate, HookedFileSystem


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_courier_sees_the_tier_that_it_watches(check: Check) -> None:
    tier = _courier(MemoryTier(), ManualClock()).place.tier
    check(Place(lambda: tier, large_bytes=1_000_001))


def _courier(tier: Tier, clock: ManualClock) -> Courier:
    def fail(error: EverstepError) -> None:
        raise error

    return Courier(tier, 1, clock, fail)


def test_each_operation_on_a_place_and_each_read_of_it_moves_its_courier() -> None:
    clock = ManualClock()
    tier = MemoryTier()
    tier.put("a", MemoryFile([memoryview(b"bytes")]))
    courier = _courier(tier, clock)
    stalled: list[float] = []

    def turn() -> None:
        file = courier.place.tier.open("a")
        for operation in (
            lambda: courier.place.tier.scan(),
            lambda: courier.place.tier.create("b", b"x"),
            lambda: file.read_into(memoryview(bytearray(5)), 0),
            lambda: courier.place.size_of("a"),
        ):
            clock.advance(7.0)
            stalled.append(courier.stalled_s)
            operation()
            stalled.append(courier.stalled_s)

    work: Any = SimpleNamespace(turn=turn)
    courier.take_turn(work)
    assert stalled == [7.0, 0.0] * 4


@pytest.mark.parametrize("base", [True, False], ids=["base", "log"])
def test_what_is_written_moves_with_each_piece(run_folder: Path, base: bool) -> None:
    """A tier that takes the bytes piece by piece, each of which takes long."""
    clock = ManualClock()
    stalled: list[float] = []
    found: list[Courier] = []

    class Slow(MemoryTier):
        def put(self, name: str, source: ReadFile) -> None:
            data = bytearray()
            for piece in pieces_of(source, name, 1 + source.size_bytes // 4):
                clock.advance(7.0)
                stalled.append(found[0].stalled_s)
                data += piece
            super().put(name, MemoryFile([memoryview(bytes(data))]))

    courier = _courier(Slow(), clock)
    found.append(courier)
    if base:
        _one_base(run_folder)
        group = CopyGroup(None, clock, 0, 0, 1, timeout_s=120.0)
        courier.take_turn(
            BaseCopies(courier, PosixFileSystem(), run_folder, group, keep=KeepRules(1))
        )
    else:
        log = Log()
        log.step(1)
        courier.take_turn(LogCopies(courier, log.store, IDENTITY, batch_steps=1, keep=KeepRules(1)))
    assert courier.stats.copied == 1
    assert len(stalled) >= 4
    assert set(stalled) == {7.0}, "and not longer with each"


def _one_base(run_folder: Path) -> None:
    model = torch.nn.Linear(3, 3)
    with Checkpointer(run_folder, {"model": model}, method="sync", every=1) as ckpt:
        ckpt.resume()
        ckpt.step()


def test_a_place_that_hangs_is_told_of_once_and_not_waited_for(
    run_folder: Path, tmp_path: Path
) -> None:
    _one_base(run_folder)
    gate, clock, place = Gate(), ManualClock(), tmp_path / "place"

    def hang(op: str, path: PurePath) -> None:
        if op == "create" and place in Path(path).parents and path.suffix == ".tmp":
            gate.wait_at()

    posted: list[EverstepError] = []
    filesystem = HookedFileSystem(hang)
    told = [dataclasses.asdict(TierOptions(str(place)))]
    seams = Seams(filesystem=filesystem, clock=clock)
    identity = ShardIdentity("0" * 32, 1, 0, 0, 0, 1, True)
    couriers = Couriers(seams, PurePath(run_folder))
    couriers.start(told, identity, Log().store, posted.append, keep=KeepRules(1), timeout_s=30.0)
    try:
        couriers.base_durable()
        assert gate.reached.wait(30)
        clock.advance(599.0)
        assert couriers.finish(), "it may take as long as that"
        assert not posted
        clock.advance(1.0)
        assert not couriers.finish()
        assert not couriers.finish()
        (error,) = posted
        assert isinstance(error, DeadlineError)
        assert f"copying to {place} hangs" in str(error)
        assert "for 600 s" in str(error)
        gate.open()
        until(lambda: couriers.bases[0].courier.stats.copied == 1, "the copy")
        until(lambda: not couriers.finish(), "the end of it")
        assert len(posted) == 1
    finally:
        gate.open()
        couriers.close()
