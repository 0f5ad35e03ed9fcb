"""Presets by the names of papers: what a reader of the paper expects after a kill."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.keepers import end_keepers
from tests.support.trainers import finish_trainer, start_trainer, whole_lines
from tests.support.world import TIMEOUT_S

TRAINING = """
import hashlib, json, os, signal, sys, time
import torch
import everstep
from everstep.compress import Compressor
from everstep.link.registry import kill_keeper, list_keepers

run, method, tier, kill_at, with_keeper = *sys.argv[1:4], *map(int, sys.argv[4:6])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer}
if method == "lowdiff":
    state["compressor"] = Compressor(optimizer, ratio=0.1)

def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def digest():
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().numpy().tobytes())
    return digest.hexdigest()

tiers = [tier] if tier else []
with everstep.Checkpointer(run, state, method=method, every=1000, tiers=tiers) as ckpt:
    recovery = ckpt.resume()
    say(resumed=recovery.step, exact=recovery.exact, digest=digest())
    for step in range(recovery.step + 1, 21):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
        say(step=step, digest=digest())
        if step == kill_at:
            while tier and not (ckpt.stats().copies and ckpt.stats().copied_steps >= 10):
                time.sleep(0.01)
            for info in list_keepers() if with_keeper else ():
                if info.run == run:
                    kill_keeper(info)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def trained(
    run: Path, method: str, kill_at: int = 0, *, keeper: bool = False, tier: str = ""
) -> tuple[list[dict[str, Any]], str]:
    """Return the lines that a training has written, and those of its start."""
    process = start_trainer(TRAINING, str(run), method, tier, str(kill_at), str(int(keeper)))
    status, out, err = finish_trainer(process, TIMEOUT_S)
    assert status == (-signal.SIGKILL if kill_at else 0), err
    return [json.loads(line) for line in whole_lines(out)], err


def digests_of(said: list[dict[str, Any]]) -> dict[int, str]:
    return {one["step"]: one["digest"] for one in said if "step" in one}


def test_lowdiff_writes_its_differentials_to_disk(tmp_path: Path) -> None:
    """Killed with its keeper it comes back at its last steps, not at the first base."""
    said, start = trained(tmp_path / "run", "lowdiff", 17, keeper=True)
    assert "compressed gradients" in start
    assert "error_feedback=False" in start
    again, _ = trained(tmp_path / "run", "lowdiff")
    assert again[0]["resumed"] in (16, 17)
    assert again[0]["exact"]
    assert again[0]["digest"] == digests_of(said)[again[0]["resumed"]]
    end_keepers(tmp_path)


@pytest.mark.parametrize("lost", ["process", "machine"])
def test_tiercheck_has_exact_gradients_here_and_approximate_ones_there(
    lost: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    tier = str(tmp_path / "store")
    said, start = trained(run, "tiercheck", 17, keeper=lost == "machine", tier=tier)
    assert f"local memory (exact), {tier} (adaptive); no other node" in start
    if lost == "machine":
        shutil.rmtree(run)
    again, _ = trained(run, "tiercheck", tier=tier)
    step = again[0]["resumed"]
    is_same = again[0]["digest"] == digests_of(said)[step]
    if lost == "process":
        assert (step, again[0]["exact"], is_same) == (17, True, True)
    else:
        assert 10 <= step <= 17
        assert (again[0]["exact"], is_same) == (False, False)
    end_keepers(tmp_path)


def test_tiercheck_says_which_tiers_are_missing(tmp_path: Path) -> None:
    _, start = trained(tmp_path / "run", "tiercheck")
    assert "no other node; no remote storage in tiers=" in start
    end_keepers(tmp_path)
