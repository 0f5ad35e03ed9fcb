"""Ranks that are processes, whose keepers follow their logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.link.registry import kill_keeper, list_keepers
from tests.support.keepers import end_keepers
from tests.support.ranks import log_processes, processes
from tests.support.ranks.log_processes import LogJob, undisturbed
from tests.support.ranks.processes import STEPS, WORLD, check

LOADS_S = 120.0


LONG = {"progress_timeout_s": LOADS_S}


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
    program = log_processes.TRAINING
    for old, new in changes:
        assert program.count(old) == 1
        program = program.replace(old, new)
    monkeypatch.setattr(log_processes, "TRAINING", program)


@pytest.fixture(autouse=True)
def replicas_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper loads torch for longer than all of this takes."""
    for one in (log_processes, processes):
        monkeypatch.setattr(one, "TIMEOUT_S", LOADS_S)
    waits = "    ckpt.step()\n    if step == 4: ckpt.wait()\n"
    stats = "say(committed=ckpt.stats().committed"
    captured = "captured=inspect(ckpt).saver._captures"
    restarts = f"{stats}, restarts=ckpt.stats().keeper_restarts, {captured}"
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


def followed(made: Made, folder: Path, kind: str, **options: Any) -> LogJob:
    made.append(LogJob(folder, kind, **{"method": "lowdiff_plus", "every": 2, **LONG, **options}))
    return made[-1]


def came_back(job: LogJob, expected: Steps, *, by_replicas: bool = False) -> int:
    """The step to which all ranks came back, to go on from it bit for bit; from then on training
    has captured no base but the first.

    Args:
        by_replicas: nothing was replayed, as the replicas of all had that step.
    """
    said = job.to_the_end()
    if by_replicas:
        found = [(lines[0]["source"], lines[0]["replayed"]) for lines in said]
        assert found == [("memory", 0)] * WORLD
    step = check(said, expected)[0]
    if job.options["method"] == "lowdiff_plus":
        assert [lines[-1]["captured"] for lines in said] == [int(step < STEPS)] * WORLD
    return step


def committed(job: LogJob) -> set[int]:
    """Steps of the bases that have a manifest, whatever their timeline."""
    return {step for (_, step), status in job.statuses().items() if status == "committed"}


def compressed_training(
    tmp_path: Path, made: Made, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill and resume a compressed training: its log holds what was consumed, and residuals."""
    change(monkeypatch, (STATE, COMPRESSED_STATE))
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    expected = undisturbed(kind, folder)
    job = followed(made, tmp_path, kind, keep=50)
    job.until_all_die(5)
    assert came_back(job, expected) == 5
    assert {4, 6, STEPS} <= committed(job)
    assert came_back(job, expected) == STEPS


def lose_a_node(
    tmp_path: Path, made: Made, kind: str, expected: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill all and one keeper: bases of replicas and the log are in the other node's memory."""
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
