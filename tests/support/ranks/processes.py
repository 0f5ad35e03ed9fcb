"""Ranks that are processes, with keepers that are processes: started, killed, resumed."""

from __future__ import annotations

import json
import signal
from functools import cache
from pathlib import Path
from typing import Any

from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from tests.support.trainers import Trainer, finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S

WORLD, STEPS = 2, 7


TRAINING = """
import hashlib, json, os, signal, sys, time, warnings
from concurrent import futures
import torch, torch.distributed as dist
from everstep.testing import inspect
import everstep
from everstep.link.registry import list_keepers

run, options = sys.argv[1], json.loads(sys.argv[2])
options = {"every": 2, "on_failure": "warn", "progress_timeout_s": 30.0, **options}
warnings.simplefilter("ignore")
if len(sys.argv) > 3:
    rank, meet, world = int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.5),
    torch.nn.Linear(64, 8),
)
# Buckets are made anew behind the first step of a process: with more than two ranks, gradients are
# summed in another order then, and no start has the bits of another one.
fixed = dist.get_world_size() > 2
model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=fixed)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(100 + rank)  # each rank has data and noise of its own

def shared():  # what all ranks have in common
    h = hashlib.sha256()
    for p in model.parameters():
        for t in (p.detach(), *optimizer.state.get(p, {}).values()):
            h.update(t.numpy().tobytes())
    return h.hexdigest()

def digest():
    h = hashlib.sha256()
    for t in model.module.state_dict().values():
        h.update(t.numpy().tobytes())
    for p in model.parameters():
        for t in optimizer.state.get(p, {}).values():
            h.update(t.numpy().tobytes())
    h.update(torch.get_rng_state().numpy().tobytes())
    return h.hexdigest()

def say(**what):
    os.write(1, (json.dumps({"rank": rank, **what}) + "\\n").encode())  # ranks may share it

ckpt = everstep.Checkpointer(run, {"model": model, "optimizer": optimizer}, **options)
recovery = ckpt.resume()
deadly = os.environ.pop("EVERSTEP_FAILPOINTS", "")  # keepers that are started later live on
armed = {info.pid for info in list_keepers() if (info.run, info.rank) == (run, rank)}
say(resumed=recovery.step, timeline=recovery.timeline, exact=recovery.exact, digest=digest(),
    shared=shared(), notes=recovery.notes, source=recovery.source)
for step in range(recovery.step + 1, 8):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt.step()
    say(step=step, digest=digest(), shared=shared())
    dies = os.environ.get("DIES", "")
    if first and os.environ.get("ENDS", dies).endswith(f" {step}"):
        # Is with the keepers of all ranks, whatever time they took.
        last = inspect(ckpt).saver._last
        if last is not None:
            futures.wait([last.staged], 60)
        dist.barrier()
    if first and dies == f"{rank} {step}":
        deadline_s = time.monotonic() + 60
        while deadly and armed & {info.pid for info in list_keepers()}:  # first it, then this
            assert time.monotonic() < deadline_s, "the keeper lives on"
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
ckpt.close()
say(committed=ckpt.stats().committed)
"""


class Job:
    """One start of the job after the other, on one run folder."""

    def __init__(self, folder: Path, *, world: int = WORLD, **options: Any) -> None:
        self.run = folder / "run"
        self.world = world
        self._folder, self.options, self._starts = folder, options, 0

    def start(self, *environments: dict[str, str]) -> list[Trainer]:
        self._starts += 1
        meet = str(self._folder / f"meet-{self._starts}")
        found = environments or ({},) * self.world
        about = str(self.run), json.dumps(self.options)
        return [
            start_trainer(TRAINING, *about, str(rank), meet, str(self.world), **found[rank])
            for rank in range(self.world)
        ]

    def to_the_end(self) -> list[list[dict[str, Any]]]:
        """What each rank says in a start that nobody disturbs."""
        ranks = self.start()
        said = []
        for one in ranks:
            status, out, err = finish_trainer(one, TIMEOUT_S)
            assert status == 0, err
            said.append([json.loads(line) for line in out.splitlines()])
        return said

    def until_one_dies(self, *environments: dict[str, str]) -> list[str]:
        """As a launcher does: when one rank has died, all are killed; what they said."""
        dying = next(rank for rank, env in enumerate(environments) if env)
        ends = {"ENDS": environments[dying].get("DIES", "")}
        ranks = self.start(*[{**ends, **environment} for environment in environments])
        status, _, err = finish_trainer(ranks[dying], TIMEOUT_S)
        assert status == -signal.SIGKILL, err
        said = []
        for rank, one in enumerate(ranks):
            if rank != dying:
                one.kill()
                said.append(finish_trainer(one, TIMEOUT_S)[2])
        return said

    def statuses(self) -> dict[tuple[int, int], str]:
        bases = scan_run(PosixFileSystem(), self.run).bases
        return {(base.id.timeline, base.id.step): base.status for base in bases}


@cache
def undisturbed(folder: Path) -> list[dict[int, str]]:
    """Digests of each rank, by step."""
    said = Job(folder, method="sync").to_the_end()
    return [{one["step"]: one["digest"] for one in lines if "step" in one} for lines in said]


def check(said: list[list[dict[str, Any]]], expected: list[dict[int, str]]) -> tuple[int, int]:
    """All ranks have resumed the same step, exactly, and ended as if nothing had been; returns
    step and timeline."""
    resumed = {(lines[0]["resumed"], lines[0]["timeline"]) for lines in said}
    assert len(resumed) == 1, resumed
    step, timeline = resumed.pop()
    for lines, wanted in zip(said, expected, strict=True):
        if step:
            assert lines[0]["digest"] == wanted[step]
        assert lines[0]["exact"]
        found = {one["step"]: one["digest"] for one in lines if "step" in one}
        assert found == {at: wanted[at] for at in range(step + 1, STEPS + 1)}
    return step, timeline
