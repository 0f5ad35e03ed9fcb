"""Ranks that are processes: bases by time and by cost, and gradients that are not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everstep.trainer.session.cadence import FIRST_STEPS
from tests.support.keepers import end_keepers
from tests.support.ranks.trainings import Run, compare, run, steps_of
from tests.support.trainers import finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S

__all__ = ["run"]

LAST = FIRST_STEPS + 5
BAD = 4

WATCHED = """
import hashlib, json, os, sys, warnings
import torch, torch.distributed as dist
from everstep.testing import inspect
import everstep
from everstep.errors import NonFiniteError
from everstep.state.ranks.log_shares import log_shares

folder, meet, layout, *numbers = sys.argv[1:]
rank, recorder, bad = map(int, numbers)
warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 24), torch.nn.Linear(24, 24), torch.nn.Linear(24, 8),
)
if layout == "fsdp":
    from torch.distributed.fsdp import fully_shard
    fully_shard(model)
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def digest():
    h = hashlib.sha256()
    for p in model.parameters():
        for t in (p.detach(), *optimizer.state[p].values()):
            h.update(local(t).contiguous().numpy().tobytes())
    return h.hexdigest()

def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def train(batch, unusable=None):
    torch.manual_seed(10 * batch + rank)
    model(torch.randn(16, 32)).square().mean().backward()
    if unusable is not None:
        local(unusable.grad).view(-1)[0] = torch.nan
    optimizer.step()
    optimizer.zero_grad()
    if ckpt is not None:
        ckpt.step()

ckpt = None
if recorder >= 0:
    state = {"model": model, "optimizer": optimizer}
    log = everstep.LogOptions(watch=True)
    ckpt = everstep.Checkpointer(folder, state, method="logged", every=4, log=log)
    ckpt.resume()
for batch in range(1, 9):
    if batch != bad:
        train(batch)
    elif ckpt is not None:
        unusable = None
        if layout == "fsdp":  # the part that one rank has, and nobody else
            unusable = next(model.parameters()) if rank == recorder else None
        else:  # all have the same gradient, and one looks at it
            parts = log_shares(inspect(ckpt).state)["optimizer"]
            named = dict(inspect(ckpt).state.providers["optimizer"].named())
            unusable = next(p for name, p in named.items() if parts[name].owner == recorder)
        try:
            train(batch, unusable)
        except NonFiniteError as error:
            say(step=error.step, rank=error.rank)
        else:
            say(step=None)
        found = ckpt.rewind(bad - 1)
        say(rewound=found.step, exact=found.exact)
say(digest=digest())
if ckpt is not None:
    ckpt.close()
    say(durable=ckpt.stats().durable_step)
dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"method": "checkfreq", "every": 2}, 2),
        ({"method": "checkflow", "every": 2}, LAST - 4),
        ({"method": "checkflow", "every": "auto"}, LAST - 4),
        ({"method": "lazy", "every": "0.001s"}, 3),
        ({"method": "async", "every": "auto"}, FIRST_STEPS + 1),
        ({"method": "logged", "every": "auto"}, LAST - 2),
    ],
    ids=str,
)
def test_ranks_are_killed_and_resumed(run: Run, options: dict[str, Any], least: int) -> None:
    wanted = steps_of(run.to_the_end("ddp", None, last=LAST))
    dies = {"DIES": f"1 {LAST - 1} before_update"}
    assert compare(run.killed("ddp", options, 1, LAST, {}, dies), wanted) == 0
    said = run.to_the_end("ddp", options, last=LAST)
    step = compare(said, wanted)
    assert least <= step < LAST
    captured = options["method"] == "checkflow" or options["every"] != 2
    assert captured or step % 2 == 0, "a base that was due"
    assert all(LAST in steps for steps in steps_of(said))


def watched(folder: Path, layout: str, recorder: int) -> list[list[dict[str, Any]]]:
    """What each rank says.

    Args:
        recorder: the rank that sees it; -1: training without a Checkpointer or that batch.
    """
    about = str(folder / "run"), str(folder / f"meet {recorder}"), layout
    numbers = str(recorder), str(BAD)
    ranks = [start_trainer(WATCHED, *about, str(rank), *numbers) for rank in range(2)]
    ended = [finish_trainer(one, 6 * TIMEOUT_S) for one in ranks]
    assert [status for status, _, _ in ended] == [0, 0], ended
    return [[json.loads(line) for line in out.splitlines()] for _, out, _ in ended]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_what_one_rank_sees_ends_the_step_of_all(tmp_path: Path, layout: str, rank: int) -> None:
    """Training goes on from the step before, to the bits of one that never had that batch."""
    try:
        said = watched(tmp_path, layout, rank)
    finally:
        end_keepers(tmp_path)
    wanted = watched(tmp_path, layout, -1)
    for lines, others in zip(said, wanted, strict=True):
        assert lines[0] == {"step": BAD, "rank": rank}
        assert lines[1] == {"rewound": BAD - 1, "exact": True}
        assert lines[2] == others[0], "every bit"
        assert lines[3] == {"durable": 7}
