"""A promise is kept when processes are killed, and when the machine is gone with its disk."""

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

STEPS = 9

TRAINING = """
import hashlib, json, os, signal, sys, time
import torch
import everstep
from everstep.link.registry import kill_keeper, list_keepers
from everstep.tiers import options as tier_options
from everstep.trainer.job import promised

run, options, kill_at, with_keeper = sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:5])
# A directory stands for a network file system.
for module in (promised, tier_options):
    module.mounted_as = lambda path: "nfs4" if "store" in str(path) else "ext4"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def digest():
    digest = hashlib.sha256()
    for p in model.parameters():
        for t in (p.detach(), *optimizer.state.get(p, {}).values()):
            digest.update(t.numpy().tobytes())
    return digest.hexdigest()

with everstep.Checkpointer(run, {"model": model, "optimizer": optimizer}, **options) as ckpt:
    recovery = ckpt.resume()
    say(resumed=recovery.step, exact=recovery.exact, digest=digest())
    for step in range(recovery.step + 1, 10):
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if options.get("even_if") == "power" and "s" == options["lose_at_most"][-1]:
            time.sleep(0.02)
        ckpt.step()
        say(step=step, digest=digest())
        if step == kill_at:
            for info in list_keepers() if with_keeper else ():
                if info.run == run:
                    kill_keeper(info)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def trained(run: Path, options: dict[str, Any], kill_at: int, *, keeper: bool) -> list[Any]:
    """Return the lines that a training has written; it must end as expected."""
    options = json.dumps(options)  # type: ignore[assignment]
    process = start_trainer(TRAINING, str(run), options, str(kill_at), str(int(keeper)))  # type: ignore[arg-type]
    status, out, err = finish_trainer(process, TIMEOUT_S)
    assert status == (-signal.SIGKILL if kill_at else 0), err
    return [json.loads(line) for line in whole_lines(out)]


@pytest.mark.parametrize("kill_at", [1, 6])
@pytest.mark.parametrize(
    ("most", "even_if", "method"),
    [
        (1, "process", None),
        (3, "process", "lazy"),
        (1, "process", "async"),
        (1, "power", None),
        (4, "power", None),
        (1, "power", "lazy"),
        (4, "power", "lazy"),
        (1, "node", None),
        (3, "rack", None),
        (4, "rack", "lazy"),
    ],
)
@pytest.mark.thinned(4)
def test_killed(most: int, even_if: str, method: str | None, kill_at: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options: dict[str, Any] = {"lose_at_most": f"{most} steps", "even_if": even_if}
    options |= {"method": method, "every": 100}
    if even_if in ("node", "rack"):
        options["tiers"] = [str(tmp_path / "store")]
    said = trained(run, options, kill_at, keeper=even_if != "process")
    digests = {0: said[0]["digest"], **{one["step"]: one["digest"] for one in said[1:]}}
    assert max(digests) == kill_at
    if even_if in ("node", "rack"):
        shutil.rmtree(run)
    again = trained(run, options, 0, keeper=False)
    step = again[0]["resumed"]
    assert kill_at - (most - 1) <= step <= kill_at
    assert again[0]["exact"]
    assert again[0]["digest"] == digests[step]
    assert again[-1]["step"] == STEPS
    end_keepers(tmp_path)


def test_time_that_was_promised(tmp_path: Path) -> None:
    """Steps of 20 ms, of which three fit into the time, the one in flight counted."""
    options = {"lose_at_most": "0.08s", "even_if": "power"}
    said = trained(tmp_path / "run", options, 6, keeper=True)
    assert said[-1]["step"] == 6
    again = trained(tmp_path / "run", options, 0, keeper=False)
    assert 6 - 3 <= again[0]["resumed"] <= 6
    end_keepers(tmp_path)
