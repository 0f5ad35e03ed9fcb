"""Logs that are copied to another tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep import LogOptions
from everstep.commit.retention import KeepRules
from everstep.format.header import ShardIdentity
from everstep.keeper.ship.courier import Courier
from everstep.keeper.ship.log_copies import LogCopies, shrinking
from everstep.seams import SystemClock
from everstep.testing import inspect
from everstep.tiers.memory import MemoryTier
from everstep.tiers.options import PeerOptions, TierOptions
from tests.support.ranks.copying import Job
from tests.support.ranks.logs import die as all_die
from tests.support.ranks.together import RankTraining, resume, train, trainings

ON_DISK = {"log": LogOptions(to="disk", batch_steps=1)}


def copy_log(one: RankTraining, tier: MemoryTier, ratio: float | None = None) -> None:
    """What the keeper of a rank would do."""
    keeper = inspect(one.ckpt).keepers.current
    assert keeper is not None
    identity = ShardIdentity(inspect(one.ckpt).run_id, 1, 0, 0, one.rank, 2, True)
    posted: list[Any] = []
    form = TierOptions("/place", log="adaptive", log_ratio=ratio) if ratio else PeerOptions()
    courier = Courier(tier, 1, SystemClock(), posted.append)
    records: Any = keeper.records  # type: ignore[attr-defined]
    copies = LogCopies(
        courier, records, identity, batch_steps=1, keep=KeepRules(1), lossy=shrinking(form)
    )
    copies.flush()
    copies.turn()
    assert not posted


def until(
    runs: list[Path], store: MemoryTier, steps: int, *, ratio: float | None = None, **options: Any
) -> None:
    """Two ranks with a base at step 4, whose copies and logs are in the store."""
    settings = {"method": "logged", "every": 4, "tiers": ["/copies"], **options}
    with trainings(*runs, **settings) as ranks:
        resume(ranks)
        train(ranks, 4)
        for one in ranks:
            one.ckpt.wait(20)
        Job(runs, store).copy()
        train(ranks, steps - 4)
        all_die(ranks)
        for one in ranks:
            copy_log(one, store, ratio)
