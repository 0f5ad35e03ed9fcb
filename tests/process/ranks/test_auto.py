"""``method="auto"`` on several ranks: rank 0 chooses, and all use the same method."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from everstep.events import Event
from tests.support.log.eventful import BEGIN_S, write_events
from tests.support.trainers import finish_trainer, start_trainer, whole_lines

_HANGS_S = 120.0

TRAINING = """
import json, sys
from datetime import timedelta
import torch, torch.distributed as dist
import everstep

run, meet, rank, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
limit = timedelta(seconds=100)
dist.init_process_group(
    "gloo", init_method=f"file://{meet}", rank=rank, world_size=2, timeout=limit
)
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with everstep.Checkpointer(
    run, {"model": model, "optimizer": optimizer}, method="auto"
) as ckpt:
    words = repr(ckpt)
    recovery = ckpt.resume()
    every = ckpt.stats().interval_steps
    for step in range(recovery.step, steps):
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
    ckpt.save()
print(json.dumps({"words": words, "resumed": recovery.step, "every": every}))
dist.destroy_process_group()
"""


def trained(folder: Path, steps: int) -> list[dict[str, object]]:
    meet = folder / f"meet-{steps}"
    run = str(folder / "run")
    ranks = [start_trainer(TRAINING, run, str(meet), str(rank), str(steps)) for rank in range(2)]
    found = []
    for process in ranks:
        status, out, errors = finish_trainer(process, _HANGS_S)
        assert status == 0, errors
        found.append(json.loads(whole_lines(out)[-1]))
    return found


def test_all_ranks_follow_what_rank_0_has_measured(tmp_path: Path) -> None:
    first = trained(tmp_path, 3)
    assert all(": lazy, every=auto" in str(one["words"]) for one in first)
    shutil.rmtree(tmp_path / "run" / "events")
    events = []
    for number in range(3):
        at_s = BEGIN_S + 100.0 * number
        about = {"method": "lazy", "state_bytes": 12_000, "gradient_bytes": 4_000}
        figures = {"step_s": 0.1, "saves": 5, "stall_s": {"capture": 10.0}}
        events += [
            Event("started", at_s, 0, 0, 0, about),
            Event("recovery", at_s, 0, 1, 0, {"source": "memory"}),
            Event("log_checked", at_s, 0, 1, 5, {"why_not": ""}),
            Event("progress", at_s + 50.0, 0, 1, 400, figures),
        ]
    for rank in range(2):
        write_events(tmp_path / "run", events, rank=rank)
    second = trained(tmp_path, 6)
    assert all(": logged, every=auto" in str(one["words"]) for one in second)
    assert [one["resumed"] for one in second] == [3, 3]
    intervals = [one["every"] for one in second]
    assert intervals[0] == intervals[1] is not None
