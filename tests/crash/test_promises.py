"""A loss of power at every I/O operation costs no more steps than were promised."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import PurePath
from typing import Any

import pytest

from everstep.checkpointer import Checkpointer
from everstep.options import KeeperOptions
from everstep.seams import FileSystem, ManualClock, Seams
from tests.crash.sim.crashes import Scenario, watch_crashes
from tests.crash.sim.filesystem import SimFileSystem
from tests.crash.sim.training import TinyTraining

STEPS = 5


class Promised(Scenario):
    """Some steps with a promise; the process trains on with a state that has begun."""

    run = PurePath("/disk/run")

    def __init__(self, most: int, method: str | None) -> None:
        self._most = most
        self._method = method
        self._begun = self._done = 0
        training = TinyTraining(1)
        self._expected = [training.snapshot()]
        for _ in range(STEPS + 2):
            training.train_step()
            self._expected.append(training.snapshot())

    def prepare(self, fs: SimFileSystem) -> None:
        fs.make_dir(self.run.parent)
        fs.sync_dir(self.run.parent.parent)

    def act(self, fs: SimFileSystem) -> None:
        self._begun = self._done = 0
        training, ckpt = self.start(fs, seed=1)
        assert ckpt.resume().step == 0
        for step in range(1, STEPS + 1):
            self._begun = step
            training.train_step()
            ckpt.step()
            self._done = step
        ckpt.close()

    def promised(self) -> Hashable:
        """The last step that must come back, and the last that may."""
        in_flight = 1 if self._begun > self._done else 0
        return max(0, self._begun - self._most + 1 - in_flight), self._begun

    def check(self, fs: SimFileSystem, promised: Any) -> None:
        training, ckpt = self.start(fs, seed=2)
        if promised[0] == 0:  # the process may have begun with another state: nothing is there
            training, ckpt = self.start(fs, seed=1)
        recovery = ckpt.resume()
        least, most = promised
        assert least <= recovery.step <= most, f"step {recovery.step} of {promised}"
        assert recovery.exact, recovery.evidence
        assert training.snapshot() == self._expected[recovery.step]
        training.train_step()
        ckpt.step()
        assert training.snapshot() == self._expected[recovery.step + 1]
        ckpt.close()

    def start(self, fs: FileSystem, *, seed: int) -> tuple[TinyTraining, Checkpointer]:
        training = TinyTraining(seed)
        ckpt = Checkpointer(
            str(self.run),
            training.state,
            method=self._method,
            lose_at_most=f"{self._most} steps",
            even_if="power",
            keeper=KeeperOptions(process=False),
            seams=Seams(filesystem=fs, clock=ManualClock()),
        )
        return training, ckpt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "method"), [(1, None), (3, None), (1, "lazy"), (4, "lazy"), (2, "sync")]
)
def test_power_is_lost_at_every_operation(most: int, method: str | None) -> None:
    report = watch_crashes(Promised(most, method), images_per_point=3)
    print(report)
    report.raise_if_any()
    assert report.operations > 60
    assert report.checked > 40
