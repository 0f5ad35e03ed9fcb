"""A crash, and an error, at every I/O operation of saving, retention and resuming.

Every state that a crash may leave is given to a new process: it must resume from the last
base or from the new one, whole and exact, from the new one if that was reported durable,
and it must be able to go on from there. The counts are printed (``pytest -rP``).
"""

from __future__ import annotations

import errno
import threading
from pathlib import PurePath

import pytest

import everstep.tiers.durable_files
from tests.crash.sim.crashes import Report, enumerate_crashes, enumerate_errors, watch_crashes
from tests.crash.sim.faults import Fault, Moment, Operation
from tests.crash.sim.filesystem import SimFileSystem
from tests.crash.sim.training import TrainingScenario

SHARD = ".safetensors.tmp"
WRITING = Fault("crash_after", ops=frozenset({"rename"}), path=f"*{SHARD}")
"""The shard has its name, and there is no marker yet."""
DELETING = Fault("crash_after", ops=frozenset({"rename"}), path="*/manifest.json")
"""The old base is condemned, its files are there."""


@pytest.fixture(autouse=True)
def park_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data files as tiny as these are worth recycling, too."""
    monkeypatch.setattr(everstep.tiers.durable_files, "_WORTH_BYTES", 1)


def passes(report: Report, *, operations_min: int) -> None:
    print(report)
    report.raise_if_any()
    assert report.operations >= operations_min


def test_a_checkpointer_that_cannot_be_closed_leaves_no_threads() -> None:
    """The simulated disk refuses every operation after the crash, also those of close()."""
    passes(enumerate_crashes(TrainingScenario(done=0), images_per_point=0), operations_min=10)
    left = {thread.name for thread in threading.enumerate()}
    assert not [name for name in left if name.startswith("everstep-write")]


def test_sampled_crashes_of_the_first_save() -> None:
    passes(watch_crashes(TrainingScenario(done=0), images_per_point=1), operations_min=30)


@pytest.mark.slow
def test_first_save_ever() -> None:
    passes(enumerate_crashes(TrainingScenario(done=0)), operations_min=30)


@pytest.mark.slow
def test_second_save() -> None:
    passes(enumerate_crashes(TrainingScenario(done=1)), operations_min=30)


@pytest.mark.slow
def test_saves_that_delete_and_recycle() -> None:
    scenario = TrainingScenario(done=2, saves=2, keep=1)
    passes(watch_crashes(scenario, images_per_point=2), operations_min=80)


def test_deleting_and_recycling_happen_in_that_scenario() -> None:
    scenario = TrainingScenario(done=2, saves=2, keep=1)
    fs = SimFileSystem()
    scenario.prepare(fs)
    after = fs.clone()
    scenario.act(after)
    seen = [(operation.op, operation.detail) for operation in after.log]
    assert any(op == "rename" and "condemned" in detail for op, detail in seen)
    assert any(op == "rename" and "/slots/" in detail for op, detail in seen)
    assert any(op == "reuse" for op, _ in seen)
    claimed = [o for o in after.log if o.op == "rename" and "/slots/" in o.path]
    assert claimed, "no parked file was used again"


@pytest.mark.slow
def test_static_files_that_are_linked_to_and_let_go() -> None:
    scenario = TrainingScenario(done=1, keep=1, static=True)
    passes(watch_crashes(scenario, images_per_point=2), operations_min=50)
    fs = SimFileSystem()
    scenario.prepare(fs)
    after = fs.clone()
    scenario.act(after)
    assert sum(operation.op == "link" and SHARD in operation.detail for operation in after.log) == 1


@pytest.mark.slow
def test_errors_in_linking_to_static_files() -> None:
    class Static(TrainingScenario):
        def tolerates(self, operation: Operation) -> bool:
            """What cannot be linked to is written."""
            about = operation.op in ("link", "open", "read") and "-00001" in operation.path
            return about or super().tolerates(operation)

    scenario = Static(done=1, saves=1, static=True)
    report = enumerate_errors(scenario, errnos_injected=[errno.EIO], images_per_point=1)
    passes(report, operations_min=30)


def test_resuming() -> None:
    passes(enumerate_crashes(TrainingScenario(done=2, saves=0)), operations_min=10)


@pytest.mark.slow
def test_background_saves() -> None:
    scenario = TrainingScenario(done=1, keep=1, method="async")
    passes(watch_crashes(scenario, images_per_point=1), operations_min=30)


@pytest.mark.slow
@pytest.mark.parametrize("first", [WRITING, pytest.param(DELETING, marks=pytest.mark.slow)])
def test_a_second_crash_while_cleaning_up_after_the_first(first: Fault) -> None:
    scenario = TrainingScenario(done=1, keep=1, crash_first=first)
    passes(watch_crashes(scenario, images_per_point=4), operations_min=30)


@pytest.mark.parametrize("noticed", [True, False])
def test_a_mapped_file_never_changes(noticed: bool) -> None:
    """Whoever has mapped a base that is deleted keeps the bytes it had."""
    scenario = TrainingScenario(done=1, saves=3, keep=1)
    fs = SimFileSystem()
    scenario.prepare(fs)
    changed = []

    def map_newest(operation: Operation, moment: Moment) -> None:
        if moment == "after" and operation.op == "rename" and operation.path.endswith(SHARD):
            path = PurePath(operation.path.removesuffix(".tmp"))
            mapped = fs.map(path)
            if not noticed:  # as if reuse() had not looked for mappings
                mapped.close()
            changed.append((mapped, mapped.read()))

    fs.watch(map_newest)
    scenario.act(fs)
    assert len(changed) == 3
    untouched = [mapped.read() == before for mapped, before in changed]
    assert all(untouched) == noticed


@pytest.mark.slow
def test_errors_in_the_first_save() -> None:
    report = enumerate_errors(TrainingScenario(done=0), images_per_point=0)
    passes(report, operations_min=30)


@pytest.mark.slow
def test_errors_in_saves_that_delete_and_recycle() -> None:
    scenario = TrainingScenario(done=1, saves=2, keep=1)
    report = enumerate_errors(scenario, errnos_injected=[errno.EIO], images_per_point=0)
    passes(report, operations_min=60)


@pytest.mark.slow
def test_errors_while_cleaning_up_after_a_crash() -> None:
    scenario = TrainingScenario(done=1, keep=1, crash_first=WRITING)
    report = enumerate_errors(scenario, errnos_injected=[errno.EIO], images_per_point=0)
    passes(report, operations_min=30)


@pytest.mark.slow
def test_errors_in_background_saves() -> None:
    scenario = TrainingScenario(done=1, keep=1, method="async")
    report = enumerate_errors(scenario, errnos_injected=[errno.ENOSPC], images_per_point=0)
    passes(report, operations_min=30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1000, 2000])
@pytest.mark.parametrize(
    ("done", "saves", "keep"), [(0, 1, 3), (1, 1, 3), (2, 2, 1), (3, 3, 2), (3, 0, 3)]
)
def test_many_more_images(done: int, saves: int, keep: int, seed: int) -> None:
    scenario = TrainingScenario(done=done, saves=saves, keep=keep, thorough=True)
    passes(enumerate_crashes(scenario, images_per_point=24, seed=seed), operations_min=10)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_many_more_images_of_background_saves(keep: int) -> None:
    scenario = TrainingScenario(done=2, saves=3, keep=keep, method="async", thorough=True)
    passes(watch_crashes(scenario, images_per_point=24), operations_min=80)


@pytest.mark.slow
@pytest.mark.parametrize(("done", "saves", "keep"), [(0, 2, 3), (2, 2, 1), (3, 3, 2)])
def test_many_more_images_of_static_files(done: int, saves: int, keep: int) -> None:
    scenario = TrainingScenario(done=done, saves=saves, keep=keep, static=True, thorough=True)
    passes(enumerate_crashes(scenario, images_per_point=24), operations_min=80)


@pytest.mark.slow
def test_every_pair_of_crashes() -> None:
    """The first at each operation of a process, the second at each of the next process's."""
    undisturbed = enumerate_crashes(TrainingScenario(done=1, keep=1), images_per_point=0)
    for at in range(1, undisturbed.operations + 1):
        first = Fault("crash_after", at=at)
        scenario = TrainingScenario(done=1, keep=1, crash_first=first)
        passes(watch_crashes(scenario, images_per_point=4), operations_min=10)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sync", "async"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_every_error_everywhere(method: str, code: int) -> None:
    assert method in ("sync", "async")
    scenario = TrainingScenario(
        done=2, saves=2, keep=1, method="sync" if method == "sync" else "async"
    )
    report = enumerate_errors(scenario, errnos_injected=[code], images_per_point=8)
    passes(report, operations_min=80)
