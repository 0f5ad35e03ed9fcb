"""A crash at every I/O operation of a log whose segments change their length while it is written.

Every state that a crash may leave is given to a new process: it goes on from a step that had been
promised to be on disk, or a later one, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from pathlib import PurePath
from typing import Any

import pytest

from everstep.checkpointer import Checkpointer
from everstep.format.names import marker_name
from everstep.keeper.log.segment_queue import AutoBatch
from everstep.options import KeeperOptions, LogOptions
from everstep.seams import FileSystem, ManualClock, Seams
from everstep.testing import inspect
from everstep.trainer.attach.keeper import ThreadKeeper
from everstep.trainer.log.kept_records import DiskLog
from tests.crash.sim.crashes import Scenario, watch_crashes
from tests.crash.sim.filesystem import SimFileSystem
from tests.crash.sim.training import TinyTraining

LENGTHS = (1, 3, 2)
LAG_STEPS = 3
TIMEOUT_S = 30.0


class Logged(Scenario):
    """A base, then steps that a log has in segments of :data:`LENGTHS`; training is at most
    :data:`LAG_STEPS` steps ahead of the disk."""

    run = PurePath("/disk/run")

    def __init__(self, steps: int = sum(LENGTHS)) -> None:
        self._steps = steps
        self._begun = 0
        self._numbers: dict[int, int] = {}  # of the last record of each step
        self._disk: DiskLog | None = None
        training = TinyTraining(1)
        self._expected = [training.snapshot()]
        for _ in range(steps + 2):
            training.train_step()
            self._expected.append(training.snapshot())

    def prepare(self, fs: SimFileSystem) -> None:
        fs.make_dir(self.run.parent)
        fs.sync_dir(self.run.parent.parent)
        training, ckpt = self.start(fs, seed=1)
        ckpt.resume()
        training.train_step()
        ckpt.step()
        ckpt.wait(TIMEOUT_S)
        ckpt.close()

    def act(self, fs: SimFileSystem) -> None:
        self._begun, self._numbers, self._disk = 1, {}, None
        training, ckpt = self.start(fs, seed=1)
        assert ckpt.resume().step == 1
        recorder = inspect(ckpt).recorder
        assert recorder is not None
        self._disk = recorder.disk
        while self._begun <= self._steps:
            training.train_step()
            self._begun += 1
            ckpt.step()
            self._numbers[self._begun] = recorder.memory.number
        recorder.base_step = 1 << 40  # no base at the end
        keeper = inspect(ckpt).keeper
        assert isinstance(keeper, ThreadKeeper)
        assert keeper.records is not None
        keeper.records.settle(TIMEOUT_S)
        ckpt.close()

    def promised(self) -> Hashable:
        """The last step that training knows to be on disk; the last that has begun."""
        disk = self._disk
        known = [n for n, last in self._numbers.items() if disk is not None and disk.has(last)]
        return max([1, *known]), self._begun

    def check(self, fs: SimFileSystem, promised: Any) -> None:
        training, ckpt = self.start(fs, seed=2)
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
        log = LogOptions(to="disk", batch_steps="auto", lag_steps=LAG_STEPS, audit=False)
        ckpt = Checkpointer(
            str(self.run),
            training.state,
            method="logged",
            every=1000,
            log=log,
            keeper=KeeperOptions(process=False),
            seams=Seams(filesystem=fs, clock=ManualClock()),
        )
        return training, ckpt


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each segment is as long as the next of :data:`LENGTHS`, whatever the last ones took."""
    made = AutoBatch.__init__

    def begin(self: AutoBatch, *arguments: Any) -> None:
        made(self, *arguments)
        self.to_come = itertools.cycle(LENGTHS)  # type: ignore[attr-defined]
        self.steps = next(self.to_come)  # type: ignore[attr-defined]

    def written(self: AutoBatch, *measured: Any) -> None:
        self.steps = next(self.to_come)  # type: ignore[attr-defined]

    monkeypatch.setattr(AutoBatch, "__init__", begin)
    monkeypatch.setattr(AutoBatch, "segment_written", written)


@pytest.mark.usefixtures("lengths")
def test_segments_have_these_lengths() -> None:
    scenario, fs = Logged(), SimFileSystem()
    scenario.prepare(fs)
    scenario.act(fs)
    steps = [path.parts[-2] for path in map(PurePath, fs.paths()) if path.name == marker_name(0)]
    found = [tuple(map(int, name.split("-"))) for name in sorted(steps) if "-" in name]
    assert [last - after for after, last in found] == list(LENGTHS)


@pytest.mark.slow
@pytest.mark.usefixtures("lengths")
@pytest.mark.parametrize("images", [0, 3])
def test_a_crash_with_segments_of_changing_lengths(images: int) -> None:
    report = watch_crashes(Logged(), images_per_point=images)
    print(report)
    report.raise_if_any()
    assert report.operations > 60
    assert report.checked > 40
