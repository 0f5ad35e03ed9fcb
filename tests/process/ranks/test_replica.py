"""Ranks that are processes, whose keepers follow their logs: killed anywhere, they come back to the
last step that all of them had, and end with the same bits as a training that nobody disturbed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.link.registry import kill_keeper, list_keepers
from tests.process.ranks import test_log_together as test_log_together_processes
from tests.process.ranks import test_together as test_together_processes
from tests.process.ranks.test_log_together import LogJob, undisturbed
from tests.process.ranks.test_together import STEPS, WORLD, check
from tests.support.keepers import end_keepers
from tests.support.trainers import finish_trainer

pytestmark = pytest.mark.slow
_LOADS_S = 120.0

LONG = {"progress_timeout_s": _LOADS_S}
Made = list[LogJob]
Steps = list[dict[int, str]]

UPDATE = """
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
"""
LARGE_UPDATE = """
    for half in range(2):  # accumulated, clipped; every third step is skipped by the scaler
        model.require_backward_grad_sync = half == 1
        loss = model(torch.randn(16, 32)).square().mean() / 2
        (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        if step % 3 == 0:
            next(model.parameters()).grad.fill_(float("inf"))
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer) if scaler else optimizer.step()
    scaler.update() if scaler else None
"""
STATE = """
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
"""
LARGE_STATE = """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if kind == "ddp" else None
for group in optimizer.param_groups:
    group["fused"] = kind == "ddp"
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
state |= {"scaler": scaler} if scaler else {}
"""


def change(monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str]) -> None:
    """Changes the program that is trained."""
    program = test_log_together_processes.TRAINING
    for old, new in changes:
        assert program.count(old) == 1
        program = program.replace(old, new)
    monkeypatch.setattr(test_log_together_processes, "TRAINING", program)


@pytest.fixture(autouse=True)
def replicas_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper loads torch for longer than all of this takes."""
    for one in (test_log_together_processes, test_together_processes):
        monkeypatch.setattr(one, "TIMEOUT_S", _LOADS_S)
    waits = "    ckpt.step()\n    if step == 4: ckpt.wait()\n"
    stats = "say(committed=ckpt.stats().committed"
    restarts = f"{stats}, restarts=ckpt.stats().keeper_restarts, captured=ckpt._saver._captures"
    change(monkeypatch, ("    ckpt.step()\n", waits), (stats, restarts))


COMPRESSED_STATE = """
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
state["compressor"] = everstep.compress.Compressor(optimizer, ratio=0.05)
if options["method"] == "lowdiff_plus":
    options["method"] = everstep.Method(base="lazy", log="topk", apply="replica")
"""


@pytest.fixture
def made() -> Iterator[Made]:
    """Jobs, whose keepers end with the test."""
    jobs: Made = []
    yield jobs
    for job in jobs:
        end_keepers(job.run.parent)


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return undisturbed(kind, tmp_path_factory.mktemp("undisturbed"))


def followed(made: Made, folder: Path, kind: str, **options: Any) -> LogJob:
    made.append(LogJob(folder, kind, **{"method": "lowdiff_plus", "every": 2, **LONG, **options}))
    return made[-1]


def came_back(job: LogJob, expected: Steps) -> int:
    """The step to which all ranks came back, to go on from it bit for bit; from then on training
    has captured no base but the first."""
    said = job.to_the_end()
    step = check(said, expected)[0]
    if job._options["method"] == "lowdiff_plus":
        assert [lines[-1]["captured"] for lines in said] == [int(step < STEPS)] * WORLD
    return step


def committed(job: LogJob) -> set[int]:
    """Steps of the bases that have a manifest, whatever their timeline."""
    return {step for (_, step), status in job.statuses().items() if status == "committed"}


@pytest.mark.parametrize("step", [3, 6])
def test_all_ranks_are_killed(
    tmp_path: Path, made: Made, kind: str, expected: Steps, step: int
) -> None:
    job = followed(made, tmp_path, kind)
    job.until_all_die(step)
    assert came_back(job, expected) == step
    assert STEPS in committed(job)


@pytest.mark.parametrize("seed", range(4))
def test_one_rank_is_killed(
    tmp_path: Path, made: Made, kind: str, expected: Steps, seed: int
) -> None:
    job = followed(made, tmp_path, kind, every=1 + seed % 2)
    rank, step = seed % WORLD, random.Random(seed).randrange(2, STEPS)
    job.until_one_dies(*({"DIES": str(step)} if r == rank else {} for r in range(WORLD)))
    assert came_back(job, expected) in (step - 1, step), "at most the step in flight is lost"


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize(
    "point",
    [
        "replica.before_apply=kill:2",
        "replica.after_apply=kill:1",
        "replica.before_persist=kill:1",
        "save.before_marker=kill:2",
    ],
)
def test_a_keeper_is_killed(
    tmp_path: Path, made: Made, kind: str, expected: Steps, point: str, rank: int
) -> None:
    """Training goes on; what this rank's next keeper lacks, it gets from training."""
    job = followed(made, tmp_path, kind, keep=50)
    deadly = ({"EVERSTEP_FAILPOINTS": point} if r == rank else {} for r in range(WORLD))
    ended = [finish_trainer(one, _LOADS_S) for one in job.start(*deadly)]
    assert [status for status, _, _ in ended] == [0] * WORLD, ended
    said = [[json.loads(line) for line in out.splitlines()] for _, out, _ in ended]
    check(said, expected)
    assert [lines[-1]["restarts"] for lines in said] == [int(r == rank) for r in range(WORLD)]
    assert {6, STEPS} <= committed(job)
    assert came_back(job, expected) == STEPS


def test_what_comes_before_an_update_is_in_the_log(
    tmp_path: Path, made: Made, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation, a scaler that skips updates, clipping, a fused kernel."""
    change(monkeypatch, (UPDATE, LARGE_UPDATE), (STATE, LARGE_STATE))
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    expected = undisturbed(kind, folder)
    job = followed(made, tmp_path, kind)
    job.until_all_die(5)
    assert came_back(job, expected) == 5
    assert came_back(job, expected) == STEPS


def test_compressed_training(
    tmp_path: Path, made: Made, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log holds what was consumed, and residuals."""
    change(monkeypatch, (STATE, COMPRESSED_STATE))
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    expected = undisturbed(kind, folder)
    job = followed(made, tmp_path, kind, keep=50)
    job.until_all_die(5)
    assert came_back(job, expected) == 5
    assert {4, 6, STEPS} <= committed(job)
    assert came_back(job, expected) == STEPS


@pytest.mark.parametrize(
    ("before", "after"), [("logged", "lowdiff_plus"), ("lowdiff_plus", "logged")]
)
def test_another_method_goes_on(
    tmp_path: Path, made: Made, kind: str, expected: Steps, before: str, after: str
) -> None:
    """Who writes and records what may be split otherwise then."""
    job = followed(made, tmp_path, kind, method=before)
    job.until_all_die(5)
    job._options["method"] = after
    assert came_back(job, expected) == 5


def test_a_node_that_is_lost_comes_back_from_its_peer(
    tmp_path: Path, made: Made, kind: str, expected: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bases of replicas, and the log behind them, are in the memory of the other node, too."""
    opened = "ckpt = everstep.Checkpointer(run, state, **options)"
    nodes = "from everstep.tiers.options import PeerOptions\n"
    nodes += "peers = [PeerOptions(emulated_node=str(rank))]\n"
    change(monkeypatch, (opened, nodes + opened.replace("**", "tiers=peers, **")))
    job = followed(made, tmp_path, kind)
    job.until_all_die(6)
    for info in list_keepers():
        if info.run == str(job.run) and info.rank == 1:
            kill_keeper(info)
    assert came_back(job, expected) >= 4
