"""``everstep.load`` and ``everstep.peek`` beside processes: a training process goes on as if nobody
had looked, and what a killed one has left in its keeper's memory is read, and stays there."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.link.registry import find_keeper, list_keepers
from everstep.look import keeper_memory as looking
from everstep.seams.processes.processes import PidWatch
from tests.support.keepers import end_keepers
from tests.support.trainers import finish_trainer, start_trainer, whole_lines
from tests.support.world import forget

_HANGS_S = 120.0

TRAINING = """
import json, os, signal, sys, warnings
import torch
import everstep

run, method, every, last, waits = sys.argv[1:]
warnings.simplefilter("ignore")
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters())
values = {"model": model, "optimizer": optimizer, "epoch": 0}
ckpt = everstep.Checkpointer(run, values, every=int(every), method=method)
recovery = ckpt.resume()

def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def weights():
    return [one.tolist() for one in model.state_dict().values()]

say(step=recovery.step, weights=weights(), source=recovery.source, exact=recovery.exact)
for step in range(recovery.step + 1, int(last) + 1):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    values["epoch"] = step
    ckpt.step()
    if waits == "steps":
        say(step=step, weights=weights())
        sys.stdin.readline()
if waits == "steps":
    ckpt.close()
    sys.exit()
if waits == "durable":
    ckpt.wait()
say(step=step, weights=weights())
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(run: Path, method: str, every: int, last: int, waits: str = "") -> list[dict[str, Any]]:
    """What a training process has said that has ended behind step ``last``; its keeper lives."""
    about = (str(run), method, str(every), str(last), waits)
    status, out, err = finish_trainer(start_trainer(TRAINING, *about), _HANGS_S)
    assert status == -signal.SIGKILL, err
    return [json.loads(line) for line in whole_lines(out)]


def weights(found: everstep.look.load.Loaded) -> list[Any]:
    return [one.tolist() for one in found.state_dict("model").values()]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["logged", "lazy", "checkfreq", "lowdiff_plus", "gockpt_o"])
def test_what_a_killed_process_has_left_in_memory(tmp_path: Path, method: str) -> None:
    """Two looks give what the next start gets, from whichever memory; and that gets it still."""
    run = tmp_path / "run"
    said = killed(run, method, 4, 11)
    try:
        told = everstep.peek(run)
        first, second = everstep.load(run), everstep.load(run)
        assert told.trainer is None
        assert (told.step, told.base_step) == (first.step, first.base_step)
        assert first.exact
        if method in ("logged", "lowdiff_plus"):
            assert first.step == 11
            assert weights(first) == said[-1]["weights"]
            assert first.objects["epoch"] == 11
        with everstep.Checkpointer(run, state := fresh(), every=None, method=method) as ckpt:
            recovery = ckpt.resume()
            assert (recovery.step, recovery.exact) == (first.step, True)
            assert [one.tolist() for one in state["model"].state_dict().values()] == weights(first)
        assert weights(second) == weights(first)
    finally:
        forget(run)
        end_keepers(tmp_path)


def fresh() -> dict[str, Any]:
    model = torch.nn.Linear(4, 3)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "epoch": 0}


def test_a_base_that_only_the_keeper_has(tmp_path: Path) -> None:
    """Its directory is gone, as on a disk that has refused it."""
    run = tmp_path / "run"
    said = killed(run, "lazy", 6, 6, "durable")
    try:
        shutil.rmtree(run / "timeline-00001" / "base")
        found = everstep.load(run)
        assert (found.step, found.source, found.exact) == (6, "memory", True)
        assert weights(found) == said[-1]["weights"]
        told = everstep.peek(run)
        assert (told.step, told.source, told.base_step) == (6, "memory", 6)
        assert everstep.load(run, only="model/*").step == 6
        end_keepers(tmp_path)
        with pytest.raises(everstep.EverstepError):
            everstep.load(run)
    finally:
        end_keepers(tmp_path)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["logged", "async"])
def test_a_process_that_trains_notices_nothing(tmp_path: Path, method: str) -> None:
    """Looked at twenty times while it trains; each look gives the state of some step, in every
    bit. It ends as one that nobody looked at."""
    run, steps = tmp_path / "run", 20
    about = (str(run), method, "3", str(steps), "steps")
    states: dict[int, list[Any]] = {}
    with start_trainer(TRAINING, *about) as trainer:
        first = json.loads(trainer.stdout.readline())
        states[0] = first["weights"]
        keepers: set[int] = set()
        for step in range(1, steps + 1):
            said = json.loads(trainer.stdout.readline())
            assert said["step"] == step
            states[step] = said["weights"]
            told = everstep.peek(run)
            assert told.trainer == trainer.pid
            keepers |= {one.pid for one in list_keepers() if one.run == str(run)}
            if told.step and told.source == "disk":  # else its first base is being written
                found = everstep.load(run)
                assert found.step >= min(told.step, step - 4)
                assert weights(found) == states[found.step]
                assert found.objects["epoch"] == found.step
                assert found.exact
            if method == "logged" and step % 7 == 0:  # when the keeper has come to it
                assert any(everstep.peek(run).step == step for _ in range(5000))
                assert everstep.load(run).step == step, "the log in memory is read"
            trainer.stdin.write("\n")
            trainer.stdin.flush()
        out, err = trainer.communicate(_HANGS_S)
        assert trainer.returncode == 0, err
    end_keepers(tmp_path)
    assert len(keepers) == 1, "the keeper has served this process all the time"
    assert "now serves" not in err
    assert sorted(path.name for path in run.glob("timeline-*")) == ["timeline-00001"]
    assert everstep.load(run).step == (steps if method == "logged" else 18)
    undisturbed = tmp_path / "undisturbed"
    about = (str(undisturbed), method, "3", str(steps), "durable")
    status, out, _ = finish_trainer(start_trainer(TRAINING, *about), _HANGS_S)
    end_keepers(tmp_path)
    assert status == -signal.SIGKILL
    assert json.loads(whole_lines(out)[-1])["weights"] == states[steps]


def times_of_files(run: Path) -> dict[Path, int]:
    """Times of all files but those of the event log, which the process writes while it waits."""
    found = [path for path in run.rglob("*") if "events" not in path.parts]
    return {path: path.lstat().st_mtime_ns for path in found}


def test_the_files_of_a_process_that_waits_are_as_they_were(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_trainer(TRAINING, str(run), "async", "2", "4", "steps") as trainer:
        for step in range(5):
            assert json.loads(trainer.stdout.readline())["step"] == step
            if 0 < step < 4:
                trainer.stdin.write("\n")
                trainer.stdin.flush()
        settled(run)
        before = times_of_files(run)
        for _ in range(20):
            assert everstep.load(run).step == 4
            assert everstep.peek(run).step == 4
        assert times_of_files(run) == before
        _, err = trainer.communicate(_HANGS_S)
        assert trainer.returncode == 0, err


def settled(run: Path) -> None:
    """Returns when the keeper has written everything."""
    from everstep.cli.ps import request_status

    (info,) = [one for one in list_keepers() if one.run == str(run)]
    for _ in range(2000):
        status = request_status(info)
        if status is not None and not status.writing:
            return
    raise AssertionError("it goes on writing")


RANKS = """
import json, os, signal, sys, warnings
import torch
import torch.distributed as dist
import everstep

run, meet, parts, rank, last, ends = sys.argv[1:]
warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=int(rank), world_size=2)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
optimizer = torch.optim.AdamW(model.parameters())
values = {"model": model, "optimizer": optimizer}
values = {name: one for name, one in values.items() if name in parts.split(",")}
method = "logged" if ends == "killed" else "lazy"
ckpt = everstep.Checkpointer(run, values, every=4, method=method, keep=9)
recovery = ckpt.resume(strict="optimizer" in values)
for step in range(recovery.step, int(last)):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt.step()
weights = [one.tolist() for one in model.module.state_dict().values()]
said = {"step": recovery.step, "base": recovery.base_step, "weights": weights}
os.write(1, (json.dumps({**said, "notes": recovery.notes}) + "\\n").encode())
dist.barrier()
if ends == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
ckpt.close()
dist.barrier()
"""


def two_ranks(run: Path, parts: str, last: int, ends: str = "") -> list[dict[str, Any]]:
    """What each rank of a job has said that has ended."""
    about = (str(run), str(run.parent / f"meet-{parts}-{last}"), parts)
    ranks = [start_trainer(RANKS, *about, str(rank), str(last), ends) for rank in range(2)]
    ended = [finish_trainer(one, _HANGS_S) for one in ranks]
    assert [one[0] for one in ended] == [-signal.SIGKILL if ends else 0] * 2, ended
    return [json.loads(whole_lines(out)[-1]) for _, out, _ in ended]


@pytest.mark.slow
def test_what_killed_ranks_have_left_in_memory(tmp_path: Path) -> None:
    """The log is in the memory of two keepers, and on no disk."""
    run = tmp_path / "run"
    said, _ = two_ranks(run, "model,optimizer", 7, "killed")
    try:
        found = everstep.load(run, only="model/*")
        assert (everstep.peek(run).step, found.step, found.replayed) == (7, 7, 3)
        assert found.exact, "what each rank has for itself is not asked for"
        assert weights(found) == said["weights"]
        assert not everstep.load(run).exact
        assert everstep.load(run).step == 7, "and it is there still"
    finally:
        end_keepers(tmp_path)


@pytest.mark.slow
def test_ranks_pass_over_a_base_of_a_part_of_the_state(tmp_path: Path) -> None:
    run = tmp_path / "run"
    two_ranks(run, "model,optimizer", 4)
    for one in two_ranks(run, "model", 8):
        assert one["step"] == 4
        assert "taken the run over without 'optimizer'" in one["notes"][0]
    for one in two_ranks(run, "model,optimizer", 9):
        assert (one["step"], one["base"]) == (4, 4)
    end_keepers(tmp_path)


def test_a_keeper_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has in memory is not silently left out."""
    run = tmp_path / "run"
    killed(run, "logged", 4, 7)
    (info,) = [one for one in list_keepers() if one.run == str(run)]
    everstep.load(run)  # from now on all of it is written
    monkeypatch.setattr(looking, "_REPLY_TIMEOUT_S", 0.3)
    os.kill(info.pid, signal.SIGSTOP)
    try:
        found = everstep.load(run)
        assert found.step < 7
        assert f"(process {info.pid}) could not be queried" in found.notes[0]
        assert f"(process {info.pid}) could not be queried" in everstep.peek(run).notes[0]
        os.kill(info.pid, signal.SIGCONT)
        monkeypatch.undo()
        assert everstep.load(run).step == 7
        assert find_keeper(info.key) is not None
    finally:
        with PidWatch(info.pid) as watch:
            watch.signal(signal.SIGCONT)
        end_keepers(tmp_path)
