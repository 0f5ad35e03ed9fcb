"""Ranks that are processes, with a log each: started, killed, resumed."""

from __future__ import annotations

import json
import signal
from functools import cache
from pathlib import Path
from typing import Any

from everstep.link.registry import kill_keeper, list_keepers
from tests.support.ranks.processes import Job, check
from tests.support.trainers import Trainer, finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S

TRAINING = """
import copy, hashlib, json, os, signal, sys, warnings
import torch, torch.distributed as dist
import everstep
from everstep.testing import inspect

run, options, kind = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
rank, meet, world = int(sys.argv[4]), sys.argv[5], int(sys.argv[6])
to = options.pop("to", "memory")
if to != "memory":
    lag_steps = 0 if to == "disk" else None
    options["log"] = everstep.LogOptions(to="disk", batch_steps=1, lag_steps=lag_steps)
warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 65), torch.nn.LayerNorm(65), torch.nn.Dropout(0.5), torch.nn.Linear(65, 8),
)
model[1].bias.requires_grad_(False)  # frozen: no optimizer replays it
if kind.startswith("fsdp"):
    from torch.distributed.fsdp import fully_shard
    fully_shard(model)
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
trained = [p for p in model.parameters() if p.requires_grad]
if kind.startswith("zero"):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    optimizer = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=0.01)
else:
    optimizer = torch.optim.AdamW(trained, lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
hook = None
if kind == "ddp, exchange":
    from everstep.compress.ddp import DDPCompression, compressed_mean
    hook = DDPCompression(model, ratio=0.1, dense_below=100)
    model.register_comm_hook(hook, compressed_mean)
elif "compressor" in kind:
    hook = everstep.compress.Compressor(optimizer, ratio=0.1, dense_below=100)
average, declared = None, {}
if "declared" in kind:
    average = copy.deepcopy(model.module[3]).requires_grad_(False)

    @torch.no_grad()
    def follow():
        for mean, p in zip(average.parameters(), model.module[3].parameters()):
            mean.lerp_(p, 0.1)

    declared = {"average/*": follow}
torch.manual_seed(100 + rank)  # each rank has data and noise of its own

def parts():
    yield from () if average is None else average.parameters()
    for p in model.parameters():
        moments = getattr(optimizer, "optim", optimizer).state.get(p, {})  # of ZeRO, this rank's
        for t in (p.detach(), *moments.values()):
            yield t.to_local() if hasattr(t, "to_local") else t

def digest(*others):
    h = hashlib.sha256()
    kept = hook.state_dict()["residuals"].values() if hook is not None and others else ()
    kept = [t.to_local() if hasattr(t, "to_local") else t for t in kept]
    for t in (*parts(), *others, *kept):
        h.update(t.detach().contiguous().numpy().tobytes())
    return h.hexdigest()

def say(**what):
    os.write(1, (json.dumps({"rank": rank, **what}) + "\\n").encode())

state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
state |= {} if hook is None else {"hook": hook}
state |= {} if average is None else {"average": average}
options = {"on_failure": "warn", "progress_timeout_s": 30.0, "declared": declared, **options}
ckpt = everstep.Checkpointer(run, state, **options)
recovery = ckpt.resume()
os.environ.pop("EVERSTEP_FAILPOINTS", None)  # keepers that are started later live on
say(resumed=recovery.step, timeline=recovery.timeline, exact=recovery.exact, shared=digest(),
    digest=digest(torch.get_rng_state()), base=recovery.base_step,
    replayed=recovery.replayed, source=recovery.source, skipped=str(recovery.skipped))
for step in range(recovery.step + 1, 8):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if average is not None:
        ckpt.before_update()
        follow()
        ckpt.after_update("average/*")
    ckpt.step()
    say(step=step, digest=digest(torch.get_rng_state()), shared=digest())
    if os.environ.get("DIES") == str(step):
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("RAISES") == str(step):
        raise RuntimeError("as asked")
ckpt.close()
say(committed=ckpt.stats().committed)
"""


class LogJob(Job):
    """A job of ranks with a log each."""

    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        super().__init__(folder, **{"method": "logged", "every": 5, **options})
        self.kind = kind

    def start(self, *environments: dict[str, str]) -> list[Trainer]:
        self._starts += 1
        meet = str(self._folder / f"meet-{self._starts}")
        found = environments or ({},) * self.world
        about = str(self.run), json.dumps(self.options), self.kind
        return [
            start_trainer(TRAINING, *about, str(rank), meet, str(self.world), **found[rank])
            for rank in range(self.world)
        ]

    def until_all_die(self, step: int) -> None:
        for one in self.start(*({"DIES": str(step)},) * self.world):
            status, _, err = finish_trainer(one, TIMEOUT_S)
            assert status == -signal.SIGKILL, err

    def kill_keepers(self) -> None:
        for info in list_keepers():
            if info.run == str(self.run):
                kill_keeper(info)


@cache
def undisturbed(kind: str, folder: Path) -> list[dict[int, str]]:
    said = LogJob(folder, kind, method="sync").to_the_end()
    return [{one["step"]: one["digest"] for one in lines if "step" in one} for lines in said]


def came_back(job: LogJob, expected: list[dict[int, str]]) -> int:
    """The step to which all ranks came back, to go on from it bit for bit."""
    said = job.to_the_end()
    if job.kind.startswith("ddp"):
        for line in zip(*said, strict=True):
            assert len({one.get("shared") for one in line}) == 1, "replicas are the same everywhere"
    return check(said, expected)[0]
