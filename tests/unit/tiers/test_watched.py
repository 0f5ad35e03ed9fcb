"""A place whose calls hang is told of, and nobody waits for it; what moves is left alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path, PurePath

import pytest
import torch

from everstep import Checkpointer
from everstep.errors import DeadlineError, EverstepError
from everstep.format.header import ShardIdentity
from everstep.keeper.ship.couriers import Couriers, WatchedTier
from everstep.seams import ManualClock, Seams
from everstep.testing.conformance import CHECKS, Check, Place
from everstep.tiers.memory import MemoryFile, MemoryTier
from everstep.tiers.options import TierOptions
from tests.support.following import until
from tests.support.ranks.peer_logs import Log
from tests.support.world import Gate, HookedFileSystem


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_is_the_tier_that_it_watches(check: Check) -> None:
    tier = WatchedTier(MemoryTier(), ManualClock())
    check(Place(lambda: tier, large_bytes=1_000_001))
    assert tier.stuck(1e-9) is None, "nothing is under way"


def test_what_is_written_moves_with_each_piece() -> None:
    clock, moved = ManualClock(), []

    class Slow(MemoryFile):
        def read_into(self, buffer: memoryview, offset: int) -> int:
            clock.advance(7.0)
            moved.append(tier.stuck(7.0))
            return super().read_into(buffer, offset)

    tier = WatchedTier(MemoryTier(), clock)
    tier.put("a", Slow([memoryview(bytes(100))]))
    assert moved[0] == ("writing a", 7.0), "a piece that takes long"
    assert set(moved) == {("writing a", 7.0)}, "and not longer with each"
    assert tier.stuck(1.0) is None


def test_a_place_that_hangs_is_told_of_once_and_not_waited_for(
    run_folder: Path, tmp_path: Path
) -> None:
    model = torch.nn.Linear(3, 3)
    with Checkpointer(run_folder, {"model": model}, method="sync", every=1) as ckpt:
        ckpt.resume()
        ckpt.step()
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
    couriers.start(told, identity, Log().store, posted.append, timeout_s=30.0)
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
