"""Ranks that are processes, with keepers that are processes: killed anywhere, they come back to the
same step, and end with the same bits as a training that nobody disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from tests.support.keepers import end_keepers
from tests.support.trainers import Trainer, finish_trainer, start_trainer, whole_lines
from tests.support.world import TIMEOUT_S

WORLD, STEPS = 2, 7
_LAUNCHER_S = 9 * TIMEOUT_S  # it loads torch five times

TRAINING = """
import hashlib, json, os, signal, sys, time, warnings
from concurrent import futures
import torch, torch.distributed as dist
import everstep
from everstep.link.registry import list_keepers

run, options = sys.argv[1], json.loads(sys.argv[2])
options = {"every": 2, "on_failure": "warn", "progress_timeout_s": 30.0, **options}
warnings.simplefilter("ignore")
if len(sys.argv) > 3:
    rank, meet, world = int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.5),
    torch.nn.Linear(64, 8),
)
# Buckets are made anew behind the first step of a process: with more than two ranks, gradients are
# summed in another order then, and no start has the bits of another one.
fixed = dist.get_world_size() > 2
model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=fixed)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(100 + rank)  # each rank has data and noise of its own

def shared():  # what all ranks have in common
    h = hashlib.sha256()
    for p in model.parameters():
        for t in (p.detach(), *optimizer.state.get(p, {}).values()):
            h.update(t.numpy().tobytes())
    return h.hexdigest()

def digest():
    h = hashlib.sha256()
    for t in model.module.state_dict().values():
        h.update(t.numpy().tobytes())
    for p in model.parameters():
        for t in optimizer.state.get(p, {}).values():
            h.update(t.numpy().tobytes())
    h.update(torch.get_rng_state().numpy().tobytes())
    return h.hexdigest()

def say(**what):
    os.write(1, (json.dumps({"rank": rank, **what}) + "\\n").encode())  # ranks may share it

ckpt = everstep.Checkpointer(run, {"model": model, "optimizer": optimizer}, **options)
recovery = ckpt.resume()
deadly = os.environ.pop("EVERSTEP_FAILPOINTS", "")  # keepers that are started later live on
armed = {info.pid for info in list_keepers() if (info.run, info.rank) == (run, rank)}
say(resumed=recovery.step, timeline=recovery.timeline, exact=recovery.exact, digest=digest(),
    shared=shared(), notes=recovery.notes, source=recovery.source,
    reads=[[one.rank, one.source, one.size_bytes] for one in recovery.reads])
for step in range(recovery.step + 1, 8):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt.step()
    say(step=step, digest=digest(), shared=shared())
    dies = os.environ.get("DIES", "")
    if first and os.environ.get("ENDS", dies).endswith(f" {step}"):
        last = ckpt._saver._last  # is with the keepers of all ranks, whatever time they took
        if last is not None:
            futures.wait([last.staged], 60)
        dist.barrier()
    if first and dies == f"{rank} {step}":
        deadline_s = time.monotonic() + 60
        while deadly and armed & {info.pid for info in list_keepers()}:  # first it, then this
            assert time.monotonic() < deadline_s, "the keeper lives on"
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
ckpt.close()
say(committed=ckpt.stats().committed)
"""


class Job:
    """One start of the job after the other, on one run folder."""

    def __init__(self, folder: Path, *, world: int = WORLD, **options: Any) -> None:
        self.run = folder / "run"
        self.world = world
        self._folder, self._options, self._starts = folder, options, 0

    def start(self, *environments: dict[str, str]) -> list[Trainer]:
        self._starts += 1
        meet = str(self._folder / f"meet-{self._starts}")
        found = environments or ({},) * self.world
        about = str(self.run), json.dumps(self._options)
        return [
            start_trainer(TRAINING, *about, str(rank), meet, str(self.world), **found[rank])
            for rank in range(self.world)
        ]

    def to_the_end(self) -> list[list[dict[str, Any]]]:
        """What each rank says in a start that nobody disturbs."""
        ranks = self.start()
        said = []
        for one in ranks:
            status, out, err = finish_trainer(one, TIMEOUT_S)
            assert status == 0, err
            said.append([json.loads(line) for line in out.splitlines()])
        return said

    def until_one_dies(self, *environments: dict[str, str]) -> list[str]:
        """As a launcher does: when one rank has died, all are killed; what they said."""
        dying = next(rank for rank, env in enumerate(environments) if env)
        ends = {"ENDS": environments[dying].get("DIES", "")}
        ranks = self.start(*[{**ends, **environment} for environment in environments])
        status, _, err = finish_trainer(ranks[dying], TIMEOUT_S)
        assert status == -signal.SIGKILL, err
        said = []
        for rank, one in enumerate(ranks):
            if rank != dying:
                one.kill()
                said.append(finish_trainer(one, TIMEOUT_S)[2])
        return said

    def statuses(self) -> dict[tuple[int, int], str]:
        bases = scan_run(PosixFileSystem(), self.run).bases
        return {(base.id.timeline, base.id.step): base.status for base in bases}


@pytest.fixture(autouse=True)
def no_keeper_stays(tmp_path: Path) -> Iterator[None]:
    yield
    end_keepers(tmp_path)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, method="lazy")


@cache
def undisturbed(folder: Path) -> list[dict[int, str]]:
    """Digests of each rank, by step."""
    said = Job(folder, method="sync").to_the_end()
    return [{one["step"]: one["digest"] for one in lines if "step" in one} for lines in said]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


def check(said: list[list[dict[str, Any]]], expected: list[dict[int, str]]) -> tuple[int, int]:
    """All ranks have resumed the same step, exactly, and ended as if nothing had been; returns
    step and timeline."""
    resumed = {(lines[0]["resumed"], lines[0]["timeline"]) for lines in said}
    assert len(resumed) == 1, resumed
    step, timeline = resumed.pop()
    for lines, wanted in zip(said, expected, strict=True):
        if step:
            assert lines[0]["digest"] == wanted[step]
        assert lines[0]["exact"]
        found = {one["step"]: one["digest"] for one in lines if "step" in one}
        assert found == {at: wanted[at] for at in range(step + 1, STEPS + 1)}
    return step, timeline


def test_a_killed_rank_takes_all_back_to_the_same_base(
    job: Job, expected: list[dict[int, str]]
) -> None:
    job.until_one_dies({}, {"DIES": "1 5"})
    assert check(job.to_the_end(), expected) == (4, 2)
    assert all(status == "committed" for status in job.statuses().values())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sync", "async", "lazy"])
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize(
    "point",
    [
        "save.before_write",
        "save.before_rename",
        "save.before_marker",
        "save.before_manifest",
        "save.after_manifest",
        "capture.before_captured",
        "capture.after_captured",
        "resume.before_timeline",
    ],
)
def test_a_rank_dies_at_a_named_point(
    tmp_path: Path, expected: list[dict[int, str]], method: str, rank: int, point: str
) -> None:
    writes_manifest = point in ("save.before_manifest", "save.after_manifest")
    if rank and writes_manifest:
        pytest.skip("rank 0 writes the manifest of a shared folder")
    if method == "sync" and point.startswith("capture."):
        pytest.skip("nothing is captured")
    job = Job(tmp_path, method=method)
    hit = 1 if point.startswith("resume.") else 2
    deadly = {"EVERSTEP_FAILPOINTS": f"{point}=kill:{hit}"}
    if method != "sync" and point.startswith("save."):  # the keeper dies there, and then its rank
        deadly["DIES"] = f"{rank} 6"
    environments = [deadly if number == rank else {} for number in range(WORLD)]
    job.until_one_dies(*environments)
    step, timeline = check(job.to_the_end(), expected)
    assert step == (0 if hit == 1 else step)
    assert step in (0, 2, 4, 6), "only bases of all ranks count"
    assert timeline >= 1
    assert set(job.statuses().values()) == {"committed"}


def test_a_keeper_that_died_between_files_and_marker_leaves_no_base(
    job: Job, expected: list[dict[int, str]]
) -> None:
    deadly = {"EVERSTEP_FAILPOINTS": "save.before_marker=kill:2", "DIES": "1 5"}
    job.until_one_dies({}, deadly)
    step, _ = check(job.to_the_end(), expected)
    assert step in (2, 4), "base 4 is whole in memory, or the one before is all there is"


def test_a_leader_that_died_before_the_manifest_is_rolled_forward(
    job: Job, expected: list[dict[int, str]]
) -> None:
    deadly = {"EVERSTEP_FAILPOINTS": "save.before_manifest=kill:2", "DIES": "0 5"}
    job.until_one_dies(deadly, {})
    assert check(job.to_the_end(), expected) == (4, 2)


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_number_of_ranks_goes_on(job: Job, world: int) -> None:
    """With what all had in common; what was a rank's own, and is not there any more or not yet,
    makes the resume inexact, and is said."""
    before = [line["shared"] for line in job.to_the_end()[0] if line.get("step") == STEPS - 1]
    job.world = world
    said = job.to_the_end()
    assert [lines[0]["resumed"] for lines in said] == [STEPS - 1] * world
    assert {lines[0]["shared"] for lines in said} == set(before)
    assert len({lines[-2]["shared"] for lines in said}) == 1, "they train on together"
    if world > WORLD:
        assert said[-1][0]["notes"]
    assert not any(lines[0]["exact"] for lines in said)


def test_a_lost_keeper_costs_one_base_and_the_others_go_on(
    job: Job, expected: list[dict[int, str]]
) -> None:
    # Each keeper of rank 1 dies before it writes its second base.
    ranks = job.start({}, {"EVERSTEP_FAILPOINTS": "keeper.before_persist=kill:2"})
    for rank, one in enumerate(ranks):
        status, out, err = finish_trainer(one, 2 * TIMEOUT_S)
        assert status == 0, err
        said = [json.loads(line) for line in out.splitlines()]
        assert said[-1]["rank"] == rank
    found = job.statuses()
    assert found.pop((1, 2)) == "committed"
    # Training may have been over before that keeper came to its second base.
    assert {step for _, step in found} <= {6}
    assert check(job.to_the_end(), expected)[0] in (2, 6)


@pytest.mark.slow
def test_torchrun_restarts_all_ranks_and_they_go_on(
    tmp_path: Path, expected: list[dict[int, str]]
) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={WORLD}", "--max-restarts=1", "--monitor-interval=0.1"]
    # Else restarted workers find the addresses of those that were killed in the launcher's store.
    workaround = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launcher = subprocess.Popen(
        [*command, str(script), str(tmp_path / "run"), json.dumps({"method": "async"})],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **workaround, "DIES": "1 5"},
        start_new_session=True,
    )
    try:
        out, err = launcher.communicate(timeout=_LAUNCHER_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 0, err
    said = [json.loads(line) for line in whole_lines(out) if line.startswith("{")]
    again: list[list[dict[str, Any]]] = []
    for rank in range(WORLD):
        lines = [one for one in said if one["rank"] == rank]
        starts = [number for number, one in enumerate(lines) if "resumed" in one]
        assert len(starts) == 2
        again.append(lines[starts[1] :])
    assert check(again, expected) == (4, 2)
