"""Emulated nodes, each with a rank process and a keeper: killed with all that is theirs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from everstep.cli.ps import Status, request_statuses
from everstep.link.registry import kill_keeper, list_keepers
from tests.support.trainers import Trainer, finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S

WORLD, STEPS = 2, 7


TRAINING = """
import hashlib, json, os, signal, sys, time, warnings
import torch, torch.distributed as dist
import everstep
from everstep.tiers.options import PeerOptions

run, rank, meet, world = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
options = {"every": 2, "on_failure": "warn", "progress_timeout_s": 30.0, "method": "lazy"}
options.update(json.loads(sys.argv[5]))
if isinstance(options["method"], dict):
    options["method"] = everstep.Method(**options["method"])
dies = os.environ.get("DIES", "")
warnings.simplefilter("ignore")

def gone(*_):  # as the next collective would
    raise RuntimeError("the other rank is gone")

signal.signal(signal.SIGUSR1, gone)
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
torch.manual_seed(7)
width, rate = options.pop("width", 64), options.pop("bytes_per_s", None)
model = torch.nn.Sequential(
    torch.nn.Linear(32, width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 8)
)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = {"model": model, "optimizer": optimizer}
if options.pop("exchange", False):
    from everstep.compress.ddp import DDPCompression, compressed_mean
    state["hook"] = DDPCompression(model, ratio=0.1, dense_below=100)
    model.register_comm_hook(state["hook"], compressed_mean)
torch.manual_seed(100 + rank)

def digest():
    h = hashlib.sha256()
    for residual in state["hook"].state_dict()["residuals"].values() if "hook" in state else ():
        h.update(residual.numpy().tobytes())
    for p in model.parameters():
        for t in (p.detach(), *optimizer.state.get(p, {}).values()):
            h.update(t.numpy().tobytes())
    h.update(torch.get_rng_state().numpy().tobytes())
    return h.hexdigest()

def say(**what):
    os.write(1, (json.dumps({"rank": rank, **what}) + "\\n").encode())

peers = [PeerOptions(emulated_node=str(rank), bytes_per_s=rate)]
peers = peers if options.pop("peers", True) else []
ckpt = everstep.Checkpointer(run, state, tiers=peers, **options)
recovery = ckpt.resume()
say(resumed=recovery.step, timeline=recovery.timeline, exact=recovery.exact, digest=digest(),
    source=recovery.source, base=recovery.base_step, evidence=recovery.evidence,
    skipped=str(recovery.skipped))
for step in range(recovery.step + 1, 8):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt.step()
    while os.environ.get("VANISHES") and step == 1 and not ckpt.stats().peered:
        time.sleep(0.01)  # nothing can be asked of a peer that has got nothing yet
    while os.environ.get("PEERED") == str(step) and not ckpt.stats().peered:
        time.sleep(0.01)
    say(step=step, digest=digest(), held=ckpt.stats().peer_log_step)
    if f"{rank} {step}" == os.environ.get("VANISHES"):
        from everstep.link.registry import kill_keeper, list_keepers
        for info in list_keepers():
            if info.run == run:
                kill_keeper(info)
        os.kill(os.getpid(), signal.SIGKILL)
    if f"{rank} {step}" == dies:
        ckpt.wait()
        say(waits=True)
        signal.pause()
ckpt.close()
say(committed=ckpt.stats().committed)
"""


class Nodes:
    """A job of two ranks, each on a node of its own: folder, trainer and keeper."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._folder, self.options, self._starts = folder, options, 0

    def run_of(self, node: int) -> Path:
        return self._folder / f"node-{node}" / "run"

    def start(self, dies: str = "", vanishes: str = "", peered: str = "") -> list[Trainer]:
        self._starts += 1
        meet = str(self._folder / f"meet-{self._starts}")
        said = json.dumps(self.options)
        return [
            start_trainer(
                TRAINING,
                str(self.run_of(rank)),
                str(rank),
                meet,
                str(WORLD),
                said,
                DIES=dies.format(rank=rank),
                VANISHES=vanishes,
                PEERED=peered,
            )
            for rank in range(WORLD)
        ]

    def keepers(self) -> dict[int, Any]:
        found = {str(self.run_of(node)): node for node in range(WORLD)}
        return {found[info.run]: info for info in list_keepers() if info.run in found}

    def statuses(self) -> dict[int, Status]:
        infos = self.keepers()
        found = zip(infos, request_statuses(list(infos.values())), strict=True)
        return {node: status for node, status in found if status is not None}

    def copies(self) -> dict[int, tuple[tuple[int, int], ...]]:
        return {node: status.copies for node, status in self.statuses().items()}

    def lose(self, node: int) -> None:
        """Its keeper and its disk; the trainer is dead already."""
        kill_keeper(self.keepers()[node])
        shutil.rmtree(self.run_of(node).parent)


def lines_of(one: Trainer) -> list[dict[str, Any]]:
    status, out, err = finish_trainer(one, TIMEOUT_S)
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


def check(
    said: list[list[dict[str, Any]]], expected: list[dict[int, str]], step: int, *sources: str
) -> None:
    for lines, wanted, source in zip(said, expected, sources, strict=True):
        first = lines[0]
        assert (first["resumed"], first["source"], first["exact"]) == (step, source, True)
        assert first["digest"] == wanted[step]
        found = {one["step"]: one["digest"] for one in lines if "step" in one}
        assert found == {at: wanted[at] for at in range(step + 1, STEPS + 1)}
