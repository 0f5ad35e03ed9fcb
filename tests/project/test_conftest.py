"""The checks and fixtures that all tests rely on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from everstep.link.registry import keeper_files
from everstep.link.spawn import SpawnOptions, connect, spawn_keeper
from everstep.seams import failpoints
from everstep.workloads.training import Training
from tests.support.keepers import end_keepers
from tests.support.leftovers import (
    MARK,
    SHARED_MEMORY,
    left_behind,
    processes_left,
    processes_marked,
    shared_memory_names,
    wait_for_exit,
)
from tests.support.world import TIMEOUT_S

_WAITS_FOR_ITS_END = "import os, sys; os.setsid(); print('here', flush=True); sys.stdin.readline()"


def test_process_that_outlives_the_run_is_found_even_in_a_session_of_its_own() -> None:
    run_id = "a-run-of-its-own"
    child = subprocess.Popen(
        [sys.executable, "-c", _WAITS_FOR_ITS_END],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: run_id},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        assert list(processes_marked(run_id)) == [child.pid]
        assert list(processes_left(run_id, timeout_s=0.0)) == [child.pid]
        assert processes_marked("another-run") == {}
        assert not wait_for_exit(child.pid, timeout_s=0.0)
        child.communicate(b"\n", timeout=60)
    assert processes_left(run_id, timeout_s=10.0) == {}
    assert wait_for_exit(child.pid, timeout_s=0.0)


def test_keepers_are_ended_whether_they_are_found_yet_or_not(tmp_path: Path) -> None:
    spawn = [SpawnOptions(str(tmp_path / name / "run"), "id", 0) for name in ("one", "other")]
    for options in spawn:
        Path(options.run).mkdir(parents=True)
    spawn_keeper(spawn[1])
    connect(spawn[1].key, timeout_s=TIMEOUT_S).close()
    spawn_keeper(spawn[0])  # it has still to load all that it needs

    def left() -> list[str]:
        found = processes_marked(os.environ[MARK]).values()
        return [options.run for options in spawn if any(options.run in one for one in found)]

    end_keepers(tmp_path / "one")
    assert left() == [spawn[1].run]
    end_keepers(tmp_path / "other")
    assert left() == []
    assert not any(os.path.exists(keeper_files(options.key).socket) for options in spawn)


def test_names_in_shared_memory_are_found_and_other_runs_left_alone(tmpfs_folder: Path) -> None:
    run_id = os.environ[MARK]
    assert tmpfs_folder.parent == SHARED_MEMORY
    assert tmpfs_folder.name in shared_memory_names(run_id)
    assert tmpfs_folder.name not in shared_memory_names("another-run")


def test_what_is_left_is_told(tmp_path: Path) -> None:
    """Also of those that share the tests of a run; nothing of other runs."""
    run_id, ours = "a-run-of-its-own", os.environ[MARK]
    names = shared_memory_names(run_id)
    (tmp_path / "gw0").mkdir()
    assert left_behind(run_id, tmp_path, before=names) == []
    (tmp_path / "gw0" / "k.sock").touch()
    with tempfile.TemporaryDirectory(prefix=f"everstep-test-{ours}-", dir=SHARED_MEMORY) as folder:
        child = subprocess.Popen(
            [sys.executable, "-c", _WAITS_FOR_ITS_END],
            stdin=subprocess.PIPE,
            env={**os.environ, MARK: f"{run_id}.gw0"},
        )
        with child:
            processes, sockets = left_behind(run_id, tmp_path, before=names, timeout_s=0.0)
            child.communicate(b"\n", timeout=60)
        assert processes.startswith(f"the test run left processes: {{{child.pid}: ")
        assert sockets == "keepers left ['k.sock']"
        # Other tests of this process may have one at work that forks trainers.
        *_, line = left_behind(ours, tmp_path / "nothing", before=None, timeout_s=0.0)
        assert line.endswith(f"{[Path(folder).name]}")
    assert processes_left(f"{run_id}.gw", timeout_s=0.0) == {}


LEAVES = """
import os, subprocess
def test_one_that_ends_its_process_before_anything_can_be_looked_at():
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    with open({path!r}, "w") as file:
        file.write(str(child.pid))
    os._exit(1)
"""


LEAVES_A_NAME = """
import os
def test_one_that_leaves_what_only_the_run_as_a_whole_can_see():
    name = "everstep-test-" + os.environ["EVERSTEP_TEST_RUN"].partition(".")[0] + "-left"
    with open({path!r}, "w") as file:
        file.write(name)
    open("/dev/shm/" + name, "w").close()
"""


@pytest.mark.slow
def test_a_run_that_is_shared_fails_for_a_name_that_is_left(tmp_path: Path) -> None:
    left, module = tmp_path / "left", tmp_path / "test_leaves.py"
    module.write_text(LEAVES_A_NAME.format(path=str(left)))
    done = shared_run(tmp_path, module)
    try:
        assert "1 passed" in done.stdout, done.stdout
        assert "FAILED: the test run left names under " in done.stdout, done.stdout
        assert done.returncode == 1
    finally:
        (SHARED_MEMORY / left.read_text()).unlink()


def shared_run(folder: Path, module: Path) -> subprocess.CompletedProcess[str]:
    """A test run of its own, of one file, whose tests are shared by one process."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("PYTEST_", "EVERSTEP_"))}
    words = [
        "-p",
        "tests.conftest",
        "-n",
        "1",
        "--max-worker-restart",
        "0",
        "-p",
        "no:cacheprovider",
    ]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, f"--rootdir={folder}", str(module)],
        cwd=Path(__file__).parents[2],
        env={**clean, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [True, False])
def test_a_run_that_is_shared_fails_when_it_leaves_something(tmp_path: Path, leaves: bool) -> None:
    """Even if the process that left it was killed, and could not look itself."""
    left = tmp_path / "left"
    module = tmp_path / "test_leaves.py"
    module.write_text(LEAVES.format(path=str(left)) if leaves else "def test_nothing(): pass\n")
    done = shared_run(tmp_path, module)
    try:
        assert done.returncode == int(leaves), done.stdout
        assert ("FAILED: the test run left processes: " in done.stdout) == leaves, done.stdout
        assert not list(tmp_path.glob("everstep-test-*"))
    finally:
        if leaves:
            os.kill(int(left.read_text()), signal.SIGKILL)


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_training_is_a_function_of_its_seed(make_training: Callable[[int], Training]) -> None:
    def weights_and_next_loss(seed: int) -> tuple[list[torch.Tensor], float]:
        training = make_training(seed)
        weights = [parameter.detach().clone() for parameter in training.model.parameters()]
        return weights, training.step()

    first, again, other = (weights_and_next_loss(seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first[0], again[0], strict=True))
    assert first[1] == again[1]
    assert first[1] != other[1]
    assert len(make_training(1).optimizer.state) > 0


def test_generators_start_alike_in_every_test_first() -> None:
    assert _draws() == _draws_expected()


def test_generators_start_alike_in_every_test_second() -> None:
    assert _draws() == _draws_expected()


def test_failpoints_armed_in_a_test() -> None:
    failpoints.arm("save.before_header", "raise")


def test_failpoints_are_disarmed_in_the_next() -> None:
    failpoints.failpoint("save.before_header")


def _draws() -> tuple[float, float]:
    return random.random(), torch.rand(()).item()


def _draws_expected() -> tuple[float, float]:
    from tests.conftest import SEED

    generator = torch.Generator().manual_seed(SEED)
    return random.Random(SEED).random(), torch.rand((), generator=generator).item()
