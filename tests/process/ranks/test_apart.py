"""Ranks that are processes, under DDP itself: a layer that was frozen when it was made."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.keepers import end_keepers
from tests.support.trainers import finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S

LIFE = """
import hashlib, json, os, sys
import torch, torch.distributed as dist
import everstep

folder, meet, who, *numbers = sys.argv[1:]
rank, life = map(int, numbers)
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
model[0].requires_grad_(False)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
ckpt = everstep.Checkpointer(folder, {"model": ddp, "optimizer": optimizer}, every=2)

def say(**what):
    h = hashlib.sha256()
    for p in model.parameters():
        h.update(p.detach().numpy().tobytes())
    os.write(1, (json.dumps({**what, "digest": h.hexdigest()}) + "\\n").encode())

def train(*steps, freed):
    for step in steps:
        model[0].requires_grad_(freed)
        torch.manual_seed(10 * step + rank)
        ddp(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()

found = ckpt.resume()
say(step=found.step, exact=found.exact)
if life == 0:
    train(1, 2, freed=False)
    train(3, 4, freed=str(rank) in who)
train(*range(5 + 2 * life, 7 + 2 * life), freed=False)
ckpt.close()
say(step=ckpt.stats().durable_step)
dist.destroy_process_group()
os._exit(0)
"""


def ranks_of(folder: Path, who: str, life: int) -> list[list[dict[str, Any]]]:
    """What each rank says: of what it resumed, and of its end.

    Args:
        who: ranks that train the layer in steps 3 and 4 of the first life.
    """
    about = str(folder / "run"), str(folder / f"meet {life}"), who
    ranks = [start_trainer(LIFE, *about, str(rank), str(life)) for rank in range(2)]
    ended = [finish_trainer(one, 6 * TIMEOUT_S) for one in ranks]
    assert [status for status, _, _ in ended] == [0, 0], ended
    return [[json.loads(line) for line in out.splitlines()] for _, out, _ in ended]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("who", ["0", "1", "01"])
def test_each_rank_comes_back_to_what_it_has_trained(tmp_path: Path, who: str) -> None:
    try:
        lives = [ranks_of(tmp_path, who, life) for life in range(3)]
    finally:
        end_keepers(tmp_path)
    for before, behind in itertools.pairwise(lives):
        for (_, end), (begin, _) in zip(before, behind, strict=True):
            assert begin == {**end, "exact": True}, "every bit"
    assert [life[0][1]["step"] for life in lives] == [6, 8, 10]
    assert lives[0][0][1]["digest"] != lives[0][1][1]["digest"]
