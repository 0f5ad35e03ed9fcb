"""The process that audits: nobody waits for it, it outlives nobody, and it finds a flipped bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

import everstep
from everstep.errors import AuditError
from everstep.format.names import AUDIT_RECORD
from everstep.format.records import AuditRecord
from everstep.link.registry import list_keepers
from everstep.options import LogOptions
from everstep.seams.processes.processes import Child, process_ended
from everstep.trainer.log import untracked_writes as untold
from tests.support.logged import AT_ONCE, World, train
from tests.support.world import TIMEOUT_S, files_below, forget

AUDIT_TIMEOUT_S = 4 * TIMEOUT_S

WAITS = """
import argparse, os, signal, sys
from everstep.seams.processes.processes import yield_resources

parser = argparse.ArgumentParser()
parser.add_argument("--parent", type=int)
parser.add_argument("--out")
options = parser.parse_args()
yield_resources(options.parent)
score = open("/proc/self/oom_score_adj").read().strip()
policy = os.sched_getscheduler(0) == os.SCHED_IDLE
print(os.getpid(), os.nice(0), policy, score, os.environ["CUDA_VISIBLE_DEVICES"] == "", flush=True)
signal.pause()
"""


@pytest.fixture
def waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that says what it is and then waits to be killed."""
    (tmp_path / "waits.py").write_text(WAITS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


PARENT = """
import subprocess, sys, threading
from everstep.seams.processes import processes

def keep():
    child = processes.Child("waits", [])
    print(child._process.stdout.readline().decode(), end="", flush=True)
    child.wait(1000)

thread = threading.Thread(target=keep)
thread.start()
thread.join()
"""


def test_it_yields_to_all_and_dies_with_its_parent(waits: Path) -> None:
    """Even when that is killed at once and has no time to end it."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid, nice, idle, score, no_devices = parent.stdout.readline().split()
        assert (nice, idle, score, no_devices) == ("19", "True", "1000", "True")
        assert not process_ended(int(pid))
    finally:
        parent.kill()
        parent.communicate()
    try:
        assert process_ended(int(pid), TIMEOUT_S), "it lives on without its parent"
    finally:
        if not process_ended(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


def test_without_its_parent_it_does_not_begin(waits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, str(waits / "waits.py"), f"--parent={os.getpid() + 1}"]
    found = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert (found.returncode, found.stdout) == (1, b"")


def test_it_is_killed_when_its_time_is_over(waits: Path) -> None:
    child = Child("waits", [])
    ended = child.wait(0.0)
    assert ended.late
    assert ended.status == -signal.SIGKILL
    assert process_ended(child.pid, TIMEOUT_S)
    child.kill()  # again, and too late


@pytest.mark.slow
def test_what_it_says_and_what_it_cost(tmp_path: Path, at_once: None) -> None:
    """A run that has nothing to audit: words, and no record."""
    run = tmp_path / "run"
    train(run, World(), 1)
    child = Child("everstep.restore.offline.audit_process", [f"--run={run}", "--timeline=1"])
    ended = child.wait(AUDIT_TIMEOUT_S)
    assert (ended.status, ended.output, ended.late) == (0, b"", False), ended.words
    assert "no base without an audit" in ended.words
    assert ended.cpu_s > 0


def test_the_keeper_does_without_torch() -> None:
    body = """
        import sys
        import everstep.keeper.process.server, everstep.keeper.process.auditor
        assert "torch" not in sys.modules, "torch was imported"
        assert "rich" not in sys.modules, "what it never shows was imported"
    """
    command = [sys.executable, "-c", textwrap.dedent(body)]
    found = subprocess.run(command, capture_output=True, timeout=3 * TIMEOUT_S, check=False)
    assert found.returncode == 0, found.stderr.decode()


@pytest.fixture
def at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from now on yield to nobody: what takes only what others leave
    gets nothing while other tests keep all cores busy."""
    (tmp_path / "sitecustomize.py").write_text(AT_ONCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def keepers_gone() -> None:
    for keeper in list_keepers():
        assert process_ended(keeper.pid, TIMEOUT_S), f"keeper {keeper.pid} stays"


def trained(
    run: Path, steps: int, *, flipped_at: int | None = None
) -> tuple[everstep.Checkpointer, list[Any]]:
    """A run with a keeper process; what failed in the background."""
    forget(run)
    world = World()
    failed: list[Any] = []
    ckpt = everstep.Checkpointer(
        run,
        world.state,
        every=4,
        keep=9,
        method=everstep.Method(base="lazy", log="dense"),
        log=LogOptions(to="disk", batch_steps=3),
        on_failure=failed.append,
    )
    ckpt.resume()
    for step in range(1, steps + 1):
        world.train()
        if step == flipped_at:  # as a cosmic ray would, outside the optimizer and everybody
            weight = world.model[0].weight.data
            weight.view(torch.int32).view(-1)[5] ^= 1 << 12
        ckpt.step()
    ckpt.wait()
    return ckpt, failed


def wait_for(run: Path, pattern: str) -> Path:
    waited = threading.Event()
    for _ in range(int(AUDIT_TIMEOUT_S / 0.05)):
        for path in files_below(run, pattern):
            return path
        waited.wait(0.05)
    raise AssertionError(f"there is no {pattern}")


@pytest.mark.slow
@pytest.mark.parametrize("flipped_at", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_a_bit_that_flips_in_the_memory_of_training(
    flipped_at: int | None, run_folder: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the flip on every digest vouches for it; the log of gradients does not."""
    monkeypatch.setattr(untold, "SAMPLED_FIRST_STEPS", 0)  # or training would find it itself
    ckpt, failed = trained(run_folder, 4, flipped_at=flipped_at)
    path = wait_for(run_folder, AUDIT_RECORD)
    record = AuditRecord.decode(path.read_bytes(), PurePath(path))
    assert (record.before, record.step, record.steps) == ((1, 1), 4, 3)
    waited = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.05) if flipped_at else 5):
        ckpt.wait()  # hears of it
        if failed:
            break
        waited.wait(0.05)
    ckpt.close()
    keepers_gone()
    forget(run_folder)
    again = everstep.Checkpointer(run_folder, World(seed=9).state, method="sync", every=None)
    recovery = again.resume()
    again.close()
    if flipped_at is None:
        assert record.verdict == "equal"
        assert not failed
        assert recovery.exact
        told = "audited: base 1 + log of 3 steps = base 4, bit for bit"
        assert f"{told}, {record.entries} entries" in recovery.evidence
        return
    assert record.verdict == "different"
    assert "model/0.weight" in record.differing
    (error,) = failed
    assert isinstance(error, AuditError)
    assert "base 1 + log of 3 steps is not base 4" in str(error)
    assert not recovery.exact
    assert "audit failed: base 1 + log of 3 steps is not base 4" in recovery.evidence
