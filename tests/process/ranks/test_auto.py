"""``method="auto"`` on several ranks: rank 0 chooses, and all use the same method."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from everstep.events import Event, read_events
from tests.support.log.eventful import BEGIN_S, write_events
from tests.support.trainers import finish_trainer, start_trainer, whole_lines

_HANGS_S = 120.0

TRAINING = """
import json, os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
import everstep

run, meet, ends = sys.argv[1], sys.argv[2], sys.argv[5]
rank, steps = int(sys.argv[3]), int(sys.argv[4])
limit = timedelta(seconds=100)
dist.init_process_group(
    "gloo", init_method=f"file://{meet}", rank=rank, world_size=2, timeout=limit
)
torch.manual_seed(1)
net = torch.nn.Linear(4, 2)
net.passed = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD([net.weight, net.bias], lr=0.1)
ckpt = everstep.Checkpointer(run, {"model": model, "optimizer": optimizer}, method="auto")
words = repr(ckpt)
recovery = ckpt.resume()
every = ckpt.stats().interval_steps
found = {"words": words, "resumed": recovery.step, "exact": recovery.exact, "every": every}
found["passed"] = net.passed.tolist()
for step in range(recovery.step, steps):
    model(torch.randn(4, 4)).square().mean().backward()
    if ends == "sparse" and rank == 1 and step == steps - 8:
        for one in (net.weight, net.bias):
            one.grad = one.grad.to_sparse()
    optimizer.step()
    optimizer.zero_grad()
    net.passed.data.add_(1)
    ckpt.step()
found["recoverable"] = ckpt.stats().recoverable_step
print(json.dumps(found), flush=True)
dist.barrier()
if ends == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
ckpt.save()
ckpt.close()
dist.destroy_process_group()
"""


def trained(folder: Path, steps: int, ends: str = "") -> list[dict[str, Any]]:
    meet = folder / f"meet-{steps}"
    run = str(folder / "run")
    words = [(run, str(meet), str(rank), str(steps), ends) for rank in range(2)]
    found = []
    for process in [start_trainer(TRAINING, *each) for each in words]:
        status, out, errors = finish_trainer(process, _HANGS_S)
        assert status == (-signal.SIGKILL if ends == "killed" else 0), errors
        found.append(json.loads(whole_lines(out)[-1]))
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three steps, whose events let the next start log."""
    first = trained(tmp_path, 3)
    assert all(": lazy, every=auto" in one["words"] for one in first)
    shutil.rmtree(tmp_path / "run" / "events")
    events = []
    for number in range(3):
        at_s = BEGIN_S + 100.0 * number
        about = {"method": "lazy", "state_bytes": 12_000, "gradient_bytes": 4_000}
        figures = {"step_s": 0.1, "base_cost_s": 2.0}
        events += [
            Event("started", at_s, 0, 0, 0, about),
            Event("recovery", at_s, 0, 1, 0, {"source": "memory"}),
            Event("log_checked", at_s, 0, 1, 5, {"why_not": ""}),
            Event("progress", at_s + 50.0, 0, 1, 400, figures),
        ]
    for rank in range(2):
        write_events(tmp_path / "run", events, rank=rank)
    return tmp_path


def test_a_log_that_was_chosen_leads_every_rank_to_the_last_step(run: Path) -> None:
    """Also entries that DDP replicates and only marks hold: each rank writes its own."""
    second = trained(run, 6, ends="killed")
    assert all(": logged, every=auto" in one["words"] for one in second)
    assert [one["resumed"] for one in second] == [3, 3]
    intervals = [one["every"] for one in second]
    assert intervals[0] == intervals[1] is not None
    third = trained(run, 7)
    assert [(one["resumed"], one["exact"]) for one in third] == [(6, True)] * 2
    assert [one["passed"] for one in third] == [[6.0, 6.0]] * 2


def test_all_ranks_give_up_the_log_that_one_has_given_up(run: Path) -> None:
    second = trained(run, 20, ends="sparse")
    assert all(": logged, every=auto" in one["words"] for one in second)
    assert len({one["recoverable"] for one in second}) == 1
    assert second[0]["recoverable"] < 20, "no rank logs any more"
    for rank in range(2):
        reasons = [
            e.details["why_not"]
            for e in read_events(run / "run", rank=rank, newest=1)
            if e.kind == "log_checked"
        ]
        assert "is not a plain dense tensor" in "".join(reasons), rank
    third = trained(run, 21)
    assert all(": lazy, every=auto" in one["words"] for one in third)
    assert [one["passed"] for one in third] == [[20.0, 20.0]] * 2
