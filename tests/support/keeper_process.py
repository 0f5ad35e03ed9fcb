"""Trainer processes with a keeper process: start, finish, wait until the keepers end."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from everstep.link.registry import list_keepers
from everstep.seams.processes.processes import process_ended
from tests.support.trainers import Popen, Trainer, finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S

PRELUDE = """
import hashlib, json, os, signal, sys, threading, warnings
import torch
import everstep
from everstep.seams import failpoints
run = sys.argv[1]
torch.manual_seed(7)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 64)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = {"model": model, "optimizer": optimizer}

def train_step():
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def digest():
    h = hashlib.sha256()
    for t in model.state_dict().values():
        h.update(t.numpy().tobytes())
    for p in model.parameters():
        for t in optimizer.state.get(p, {}).values():
            h.update(t.numpy().tobytes())
    h.update(torch.get_rng_state().numpy().tobytes())
    return h.hexdigest()

def say(**what):
    print(json.dumps(what), flush=True)

def report(recovery):
    say(step=recovery.step, source=recovery.source, exact=recovery.exact, digest=digest(),
        notes=list(recovery.notes))
"""


TRAIN = """
options = json.loads(sys.argv[2])
ckpt = everstep.Checkpointer(run, state, on_failure="warn", **options)
report(ckpt.resume())
os.environ.pop("EVERSTEP_FAILPOINTS", None)  # keepers that are started later live on
digests = {}
for step in range(1, 13):
    train_step()
    digests[step] = digest()
    say(at=step, digest=digests[step])
    ckpt.step()
ckpt.close()
stats = ckpt.stats()
say(durable=stats.durable_step, restarts=stats.keeper_restarts, stall=stats.stall_s)
"""


def start(run: Path, body: str, *arguments: str, **environment: str) -> Trainer:
    return start_trainer(PRELUDE + textwrap.dedent(body), str(run), *arguments, **environment)


def finish(process: Popen | Trainer) -> tuple[int, list[dict[str, Any]], str]:
    status, out, err = finish_trainer(process, 3 * TIMEOUT_S)
    return status, [json.loads(line) for line in out.splitlines()], err


def keepers_gone() -> None:
    for keeper in list_keepers():
        assert process_ended(keeper.pid, TIMEOUT_S), f"keeper {keeper.pid} stays"
