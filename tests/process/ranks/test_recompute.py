"""Gradients of sampled steps are computed twice on several ranks: on all, at the same steps, and as
often as any of them needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.trainers import finish_trainer, start_trainer, whole_lines

_HANGS_S = 120.0

TRAINING = """
import hashlib, json, sys, warnings
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import everstep

run, meet, layout, rank, fault = sys.argv[1:]
rank = int(rank)
limit = timedelta(seconds=100)
dist.init_process_group(
    "gloo", init_method=f"file://{meet}", rank=rank, world_size=2, timeout=limit
)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
wrapped = torch.nn.parallel.DistributedDataParallel(model) if layout == "ddp" else model
if layout == "fsdp2":
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
computed = 0

def compute(batch):
    global computed
    wrapped(batch).square().mean().backward()
    computed += 1
    if fault == "local" and computed == 3 and rank == 1:
        gradient = next(model.parameters()).grad
        gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        gradient.view(-1).view(torch.int32)[1] ^= 1

seen = []
with everstep.Checkpointer(
    run, {"model": wrapped, "optimizer": optimizer}, every=None, on_failure=seen.append
) as ckpt:
    ckpt.resume()
    for step in range(3):
        batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        ckpt.audited(lambda: compute(batch), fraction=1.0)
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
digest = hashlib.sha256()
for parameter in model.parameters():
    value = parameter.detach()
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    digest.update(value.numpy().tobytes())
errors = [[error.step, error.rank, str(error)] for error in seen]
print(json.dumps({"computed": computed, "errors": errors, "digest": digest.hexdigest()}))
dist.destroy_process_group()
"""


def trained(folder: Path, layout: str, fault: str) -> list[dict[str, object]]:
    folder.mkdir()
    run, meet = str(folder / "run"), str(folder / "meet")
    ranks = [start_trainer(TRAINING, run, meet, layout, str(rank), fault) for rank in range(2)]
    found = []
    for process in ranks:
        status, out, errors = finish_trainer(process, _HANGS_S)
        assert status == 0, errors
        found.append(json.loads(whole_lines(out)[-1]))
    return found


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_the_rank_that_computed_wrongly_is_named(tmp_path: Path, layout: str) -> None:
    right = trained(tmp_path / "right", layout, "none")
    assert [one["computed"] for one in right] == [6, 6]
    assert [one["errors"] for one in right] == [[], []]
    wrong = trained(tmp_path / "wrong", layout, "local")
    # Both ranks compute a third time: the collective calls of the backward need both.
    assert [one["computed"] for one in wrong] == [7, 7]
    assert wrong[0]["errors"] == []
    errors = wrong[1]["errors"]
    assert isinstance(errors, list)
    ((step, rank, text),) = errors
    assert (step, rank) == (2, 1)
    assert "model/" in text
    digests = {str(one["digest"]) for one in [*right, *wrong]}
    assert len(digests) == 1
