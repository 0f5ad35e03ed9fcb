"""A crash at every operation of a deleter that comes too late, of the resume that takes the base
back, and of opening a run folder that a process has left half made."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import pytest

from everstep.commit.base_commit import BaseDeletion, Condemn
from everstep.commit.lineage import BaseId
from everstep.errors import FencedError
from everstep.format.names import CONDEMNED, MANIFEST, RUN_RECORD, base_dir
from everstep.keeper.retain.retention import perform_deletion
from everstep.run.folder import open_run_folder
from everstep.run.scan import newest_timeline
from tests.crash.sim.crashes import Scenario, enumerate_crashes, watch_crashes
from tests.crash.sim.filesystem import SimFileSystem
from tests.crash.sim.training import TrainingScenario

BASES = 3


class Rewound(TrainingScenario):
    """A training went back to step 1 and died; a stale deleter has condemned that base, and died,
    too. The act resumes."""

    def __init__(self, *, saves: int, synced: bool) -> None:
        super().__init__(done=BASES, saves=saves, keep=1 if saves else 9)
        self._synced = synced

    def prepare(self, fs: SimFileSystem) -> None:
        self._keep, keep = 9, self._keep
        super().prepare(fs)
        self._keep = keep
        rewind(self, fs)
        path = base_dir(self.run, 1, 1)
        if self._synced:
            perform_deletion(fs, path, Condemn(), None, lambda: 1)
        else:
            fs.rename(path / MANIFEST, path / CONDEMNED)
        self._done = self._floor = 1


class StaleDeleter(TrainingScenario):
    """The act is a deleter: between its first look at the fence and the rename that follows, the
    training goes back to the very base that it is about to delete."""

    def __init__(self) -> None:
        super().__init__(done=BASES, saves=0, keep=9)
        self._rewound = False

    def act(self, fs: SimFileSystem) -> None:
        self._rewound = False
        deletion = BaseDeletion(BaseId(1, 1), 1)

        def newest() -> int:
            return newest_timeline(fs, self.run)

        path, action = base_dir(self.run, 1, 1), deletion.start()
        try:
            while action is not None:
                event = perform_deletion(fs, path, action, None, newest)
                if not self._rewound:
                    rewind(self, fs)
                    self._rewound = True
                action = deletion.on(event)  # type: ignore[assignment]
        except FencedError:
            return
        raise AssertionError("nobody fenced the deleter off")

    def promised(self) -> tuple[int, int]:
        return (1, 1) if self._rewound else (1, BASES)


class Opening(Scenario):
    """The folder, and the one above it, have been made by a process that died at once."""

    run = PurePath("/disk/new/run")

    def __init__(self, *made: str) -> None:
        self._made = made
        self._done = False

    def prepare(self, fs: SimFileSystem) -> None:
        fs.make_dir(PurePath("/disk"))
        fs.sync_dir(PurePath("/"))
        for path in self._made:
            fs.make_dir(PurePath(path))

    def act(self, fs: SimFileSystem) -> None:
        self._done = False
        open_run_folder(fs, self.run)
        self._done = True

    def check(self, fs: SimFileSystem, promised: Any) -> None:
        there = str(self.run / RUN_RECORD) in fs.paths()
        assert there or not promised, "the folder was opened, and its name is gone"
        open_run_folder(fs, self.run)

    def promised(self) -> bool:
        return self._done


def rewind(scenario: TrainingScenario, fs: SimFileSystem) -> None:
    """A process resumes from step 1, and ends."""
    _, checkpointer = scenario.start(fs, seed=4)
    assert checkpointer.resume(step=1).step == 1
    checkpointer.close()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("synced", [True, False])
def test_resuming_from_what_a_stale_deleter_condemned(synced: bool) -> None:
    report = enumerate_crashes(Rewound(saves=0, synced=synced))
    print(report)
    report.raise_if_any()
    assert report.operations >= 8


@pytest.mark.slow
def test_going_on_from_what_a_stale_deleter_condemned() -> None:
    report = watch_crashes(Rewound(saves=1, synced=True), images_per_point=0)
    print(report)
    report.raise_if_any()
    assert report.operations >= 60


@pytest.mark.slow
@pytest.mark.parametrize("synced", [True, False])
def test_many_more_images(synced: bool) -> None:
    for saves in (0, 2):
        watch_crashes(Rewound(saves=saves, synced=synced), images_per_point=24).raise_if_any()
    enumerate_crashes(StaleDeleter(), images_per_point=24).raise_if_any()


@pytest.mark.slow
def test_a_stale_deleter_may_die_anywhere() -> None:
    report = enumerate_crashes(StaleDeleter())
    print(report)
    report.raise_if_any()
    assert report.operations >= 10


@pytest.mark.parametrize("made", [(), ("/disk/new",), ("/disk/new", "/disk/new/run")])
def test_a_folder_that_a_dead_process_made_keeps_its_name(made: tuple[str, ...]) -> None:
    report = enumerate_crashes(Opening(*made), images_per_point=8)
    print(report)
    report.raise_if_any()
