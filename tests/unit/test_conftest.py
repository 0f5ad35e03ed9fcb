"""The checks and fixtures that all tests rely on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from everstep.bench.workloads.training import Training
from everstep.seams import failpoints
from tests.leftovers import (
    MARK,
    SHARED_MEMORY,
    processes_left,
    processes_marked,
    shared_memory_names,
    wait_for_exit,
)

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


def test_names_in_shared_memory_are_found_and_other_runs_left_alone(tmpfs_folder: Path) -> None:
    run_id = os.environ[MARK]
    assert tmpfs_folder.parent == SHARED_MEMORY
    assert tmpfs_folder.name in shared_memory_names(run_id)
    assert tmpfs_folder.name not in shared_memory_names("another-run")


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
