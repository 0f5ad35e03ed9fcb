"""A crash, and an error, at every I/O operation of a save of ``torch.distributed.checkpoint``.

Whatever a crash leaves, the next process loads the older checkpoint or the new one, whole, and the
new one if the save had ended; and it can save again.
"""

from __future__ import annotations

import random
from pathlib import PurePath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException

from everstep.errors import EverstepError, RecoveryError
from everstep.format.names import SLOTS_DIR, TEMPORARY_SUFFIX
from everstep.integrations.dcp import EverstepStorageReader
from everstep.seams import ManualClock, Seams
from tests.crash.sim.crashes import Report, Scenario, enumerate_crashes, enumerate_errors
from tests.crash.sim.faults import Operation
from tests.crash.sim.filesystem import SimFileSystem
from tests.crash.sim.invariants import assert_nothing_vouches_for_torn_bytes
from tests.crash.sim.training import freeze, known_names
from tests.support.ranks.dcp_saves import blank, save_as_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def small_state(seed: int) -> dict[str, Any]:
    weights = {"weight": torch.full((4, 3), float(seed)), "scale": torch.tensor(seed)}
    return {"model": weights, "train": {"step": seed, "name": f"seed {seed}"}}


class SaveScenario(Scenario):
    """A save to an id; loading must give the checkpoint before it, or its own.

    Args:
        world: number of ranks, which all crash at once.
        again: the id has a checkpoint already.
    """

    folder = PurePath("/disk/step-5")

    def __init__(self, *, world: int, again: bool) -> None:
        self._world, self._again = world, again
        self._states = [small_state(seed) for seed in range(3)]
        self._ended = False

    def prepare(self, fs: SimFileSystem) -> None:
        fs.make_dir(self.folder.parent)
        fs.sync_dir(self.folder.parent.parent)
        if self._again:
            self._save(fs, self._states[0], "prepare")

    def act(self, fs: SimFileSystem) -> None:
        self._ended = False
        self._save(fs, self._states[1], "act")
        self._ended = True

    def go_on(self, fs: SimFileSystem) -> None:
        self._save(fs, self._states[1], "again")
        self._ended = True

    def promised(self) -> bool:
        return self._ended

    def check(self, fs: SimFileSystem, promised: bool) -> None:
        assert_nothing_vouches_for_torn_bytes(fs)
        allowed = self._states[1:2] if promised else self._states[:2]
        try:
            found = self._load(fs)
        except RecoveryError:
            assert not promised
            assert not self._again, "the older checkpoint is lost"
        else:
            allowed = allowed if self._again else self._states[1:2]
            assert freeze(found) in [freeze(one) for one in allowed]
        self._save(fs, self._states[2], "check")
        assert freeze(self._load(fs)) == freeze(self._states[2])
        left = [path for path in fs.paths() if path.endswith(TEMPORARY_SUFFIX)]
        assert not left, f"left over by a save that succeeded: {', '.join(left)}"

    def tolerates(self, operation: Operation) -> bool:
        """Empty directories and parked files that stay are removed by the next sweep."""
        parked = operation.op == "unlink" and PurePath(operation.path).parent.name == SLOTS_DIR
        return operation.op in ("reuse", "remove_dir") or parked

    def _save(self, fs: SimFileSystem, state: dict[str, Any], process: str) -> None:
        with known_names(random.Random(process)):
            seams = Seams(filesystem=fs, clock=ManualClock())
            save_as_ranks(state, self.folder, self._world, seams)

    def _load(self, fs: SimFileSystem) -> dict[str, Any]:
        state: dict[str, Any] = blank(self._states[0])
        reader = EverstepStorageReader(self.folder, seams=Seams(filesystem=fs))
        try:
            torch_dcp.load(state, storage_reader=reader)
        except CheckpointException as error:
            cause = error.failures[0][0]
            assert isinstance(cause, EverstepError), cause
            raise cause from None
        return state


def passes(report: Report, *, operations_min: int) -> None:
    print(report)
    report.raise_if_any()
    assert report.operations >= operations_min


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_every_crash(world: int, again: bool) -> None:
    passes(enumerate_crashes(SaveScenario(world=world, again=again)), operations_min=30)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_every_error(again: bool) -> None:
    report = enumerate_errors(SaveScenario(world=2, again=again), images_per_point=0)
    passes(report, operations_min=30)
