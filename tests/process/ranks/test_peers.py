"""Copies in the memory of another node, with real processes: nodes are emulated, each a folder and
a group of processes on this machine, which are killed together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.ps import Status, ask_statuses
from everstep.link.registry import kill_keeper, list_keepers
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from tests.process.ranks.test_rank_tiers import wait_for
from tests.support.keepers import end_keepers
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
        found = zip(infos, ask_statuses(list(infos.values())), strict=True)
        return {node: status for node, status in found if status is not None}

    def copies(self) -> dict[int, tuple[tuple[int, int], ...]]:
        return {node: status.copies for node, status in self.statuses().items()}

    def lose(self, node: int) -> None:
        """Its keeper and its disk; the trainer is dead already."""
        kill_keeper(self.keepers()[node])
        shutil.rmtree(self.run_of(node).parent)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    end_keepers(tmp_path)


def lines_of(one: Trainer) -> list[dict[str, Any]]:
    status, out, err = finish_trainer(one, TIMEOUT_S)
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


def until_copied(nodes: Nodes, step: int) -> None:
    """Each keeper holds the other rank's base of ``step``, and no other."""
    deadline_s, pause = time.monotonic() + TIMEOUT_S, threading.Event()
    wanted = {0: ((1, step),), 1: ((0, step),)}
    while nodes.copies() != wanted:
        assert time.monotonic() < deadline_s, nodes.copies()
        pause.wait(0.2)


def killed_at_5(nodes: Nodes) -> None:
    """All trainers are killed behind step 5; base 4 is in the memory of both peers."""
    ranks = nodes.start("{rank} 5")
    until_copied(nodes, 4)
    for one in ranks:
        one.kill()
        status, _, err = finish_trainer(one, TIMEOUT_S)
        assert status == -signal.SIGKILL
        assert "EMULATED" in err


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    """Digests of each rank, by step, of a training that nobody disturbed."""
    alone = Nodes(tmp_path_factory.mktemp("undisturbed"), method="sync", peers=False)
    said = [lines_of(one) for one in alone.start()]
    return [{one["step"]: one["digest"] for one in lines if "step" in one} for lines in said]


def check(
    said: list[list[dict[str, Any]]], expected: list[dict[int, str]], step: int, *sources: str
) -> None:
    for lines, wanted, source in zip(said, expected, sources, strict=True):
        first = lines[0]
        assert (first["resumed"], first["source"], first["exact"]) == (step, source, True)
        assert first["digest"] == wanted[step]
        found = {one["step"]: one["digest"] for one in lines if "step" in one}
        assert found == {at: wanted[at] for at in range(step + 1, STEPS + 1)}


@pytest.mark.slow
@pytest.mark.parametrize("node", range(WORLD))
def test_a_lost_node_comes_back_from_the_memory_of_the_next(
    nodes: Nodes, expected: list[dict[int, str]], node: int
) -> None:
    killed_at_5(nodes)
    nodes.lose(node)
    sources = ["memory", "memory"]
    sources[node] = "peer"
    check([lines_of(one) for one in nodes.start()], expected, 4, *sources)


@pytest.mark.slow
def test_both_keepers_gone_leaves_the_disks(nodes: Nodes, expected: list[dict[int, str]]) -> None:
    killed_at_5(nodes)
    for info in nodes.keepers().values():
        kill_keeper(info)
    check([lines_of(one) for one in nodes.start()], expected, 4, "disk", "disk")


@pytest.mark.slow
def test_a_node_is_lost_again_after_its_state_came_from_its_peer(
    nodes: Nodes, expected: list[dict[int, str]]
) -> None:
    """What was lost with the node is in its peer's memory again, and the ring is whole again."""
    killed_at_5(nodes)
    nodes.lose(1)
    ranks = nodes.start("{rank} 6")
    until_copied(nodes, 6)
    for one in ranks:
        one.kill()
        finish_trainer(one, TIMEOUT_S)
    nodes.lose(0)
    check([lines_of(one) for one in nodes.start()], expected, 6, "peer", "memory")


@pytest.mark.slow
def test_who_ends_because_a_node_is_lost_leaves_what_it_held_for_it(
    nodes: Nodes, expected: list[dict[int, str]]
) -> None:
    """Its next collective raises, nobody catches that, and Python ends as it does."""
    ranks = nodes.start("{rank} 5")
    until_copied(nodes, 4)
    ranks[0].kill()
    finish_trainer(ranks[0], TIMEOUT_S)
    nodes.lose(0)
    os.kill(ranks[1].pid, signal.SIGUSR1)
    status, _, err = finish_trainer(ranks[1], TIMEOUT_S)
    assert status == 1
    assert "the other rank is gone" in err
    check([lines_of(one) for one in nodes.start()], expected, 4, "peer", "memory")


@pytest.mark.slow
@pytest.mark.parametrize("node", range(WORLD))
def test_what_a_slow_peer_holds_is_what_the_disks_keep(nodes: Nodes, node: int) -> None:
    """Two newer bases are durable everywhere by the time that the next one is half way to the
    peers: a lost node still has its part of one that the other has, too."""
    # Some ten seconds for a base.
    nodes.options.update({"width": 8000, "bytes_per_s": 400_000, "keep": 2})
    ranks = nodes.start("{rank} 7", peered="3")
    wait_for(lambda: on_disk(nodes) >= {4, 6}, "the bases of steps 4 and 6")
    wait_for(lambda: nodes.copies() == {0: ((1, 2),), 1: ((0, 2),)}, "copies of that of step 2")
    threading.Event().wait(1.0)  # nothing more is deleted
    digests = []
    for one in ranks:
        one.kill()
        said = [json.loads(line) for line in finish_trainer(one, TIMEOUT_S)[1].splitlines()]
        digests.append(next(line["digest"] for line in said if line.get("step") == 2))
    assert nodes.copies() == {0: ((1, 2),), 1: ((0, 2),)}, "it was not slow"
    assert on_disk(nodes) == {2, 4, 6}
    nodes.lose(node)
    for rank, one in enumerate(nodes.start()):
        first = lines_of(one)[0]
        assert (first["resumed"], first["digest"], first["exact"]) == (2, digests[rank], True)
        assert "the files of rank" in first["skipped"]


def on_disk(nodes: Nodes) -> set[int]:
    """Steps of bases that both disks have."""
    found = [scan_run(PosixFileSystem(), nodes.run_of(node)).bases for node in range(WORLD)]
    steps = [{base.id.step for base in one if base.status == "committed"} for one in found]
    return set.intersection(*steps)
