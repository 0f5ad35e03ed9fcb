"""Hosts that do not come back, with real ranks, keepers and kills: two neighbours in the ring of
nodes at once, and half of all hosts. What is left is enough, nobody claims more, and it is said."""

from __future__ import annotations

import json
import shutil
import signal
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.ps import request_statuses
from everstep.keeper.ship.courier import ROOT
from everstep.link.registry import kill_keeper, list_keepers
from everstep.run.scan import scan_run
from everstep.run.segments import scan_log
from everstep.seams import PosixFileSystem
from everstep.tiers.files import TierFileSystem
from everstep.tiers.options import open_tier
from tests.support.keepers import end_keepers
from tests.support.ranks.tier_processes import wait_for
from tests.support.trainers import Trainer, finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S

pytestmark = pytest.mark.slow

STEPS = 7

TRAINING = """
import hashlib, json, os, signal, sys, warnings
import torch, torch.distributed as dist
import everstep
from everstep.tiers.options import PeerOptions, TierOptions

run, options, kind = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
rank, meet, world = int(sys.argv[4]), sys.argv[5], int(sys.argv[6])
warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(32, 65), torch.nn.LayerNorm(65), torch.nn.Linear(65, 8))
if kind in ("fsdp", "hsdp"):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    sides, names = (world,), ("shard",)
    if kind == "hsdp":
        sides, names = (2, world // 2), ("replicate", "shard")
    fully_shard(model, mesh=init_device_mesh("cpu", sides, mesh_dim_names=names))
else:  # buckets as in the first step: see test_together_processes
    model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(100 + rank)  # each rank has data of its own

def tensors():
    for p in model.parameters():
        yield from (p.detach(), *optimizer.state.get(p, {}).values())

def digest(found):
    h = hashlib.sha256()
    for t in found:
        h.update(t.contiguous().numpy().tobytes())
    return h.hexdigest()

def say(**what):
    mine = [t.to_local() if hasattr(t, "to_local") else t for t in tensors()]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors()]
    digests = {"digest": digest([*mine, torch.get_rng_state()]), "whole": digest(whole)}
    os.write(1, (json.dumps({"rank": rank, **digests, **what}) + "\\n").encode())

peers = [PeerOptions(emulated_node=str(rank))] if options.pop("peers", False) else []
places = options.get("tiers", [])
if options.pop("copies_log", False):
    places = [TierOptions(place, log="whole") for place in places]
options["tiers"] = [*peers, *places]
options = {"every": 4, "on_failure": "warn", "progress_timeout_s": 30.0, **options}
ckpt = everstep.Checkpointer(run, {"model": model, "optimizer": optimizer}, **options)
recovery = ckpt.resume()
say(resumed=recovery.step, base=recovery.base_step, replayed=recovery.replayed,
    skipped=str(recovery.skipped), source=recovery.source)
for step in range(recovery.step + 1, 8):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt.step()
    say(step=step)
    if os.environ.get("PAUSES") == str(step):
        ckpt.wait()
        open(f"{run}.there", "w").close()
        signal.pause()
ckpt.close()
"""


class Hosts:
    """A job with one rank on each host, which has a disk of its own; all of them see the copies."""

    def __init__(self, folder: Path, world: int, kind: str, **options: Any) -> None:
        self._folder, self._world, self._kind = folder, world, kind
        self.store = str(folder / "store")
        self.hosts = list(range(world))  # by rank: where it starts
        self._options = {"method": "logged", "tiers": [self.store], **options}

    def run(self, host: int) -> str:
        return str(self._folder / f"host{host}" / "run")

    def start(self, world: int, **environment: str) -> list[Trainer]:
        meet = str(self._folder / f"meet-{uuid.uuid4().hex}")
        found = []
        for rank in range(world):
            run = self.run(self.hosts[rank])
            Path(run).parent.mkdir(parents=True, exist_ok=True)
            words = run, json.dumps(self._options), self._kind, str(rank), meet
            found.append(start_trainer(TRAINING, *words, str(world), **environment))
        return found

    def to_the_end(self, world: int | None = None) -> list[list[dict[str, Any]]]:
        said = []
        for one in self.start(world or self._world):
            status, out, err = finish_trainer(one, 2 * TIMEOUT_S)
            assert status == 0, err
            said.append([json.loads(line) for line in out.splitlines()])
        return said

    def until_killed(self, step: int, base: int) -> None:
        """All trainers are killed behind a step, when a base is in the copies, and, where there
        are peers, it and the log up to that step in the memory of each."""
        ranks = self.start(self._world, PAUSES=str(step))
        there = [Path(f"{self.run(host)}.there") for host in range(self._world)]
        wait_for(lambda: all(one.exists() for one in there), "the step")
        wait_for(lambda: base in self._durable(), "the copy, or the base on each disk")
        if self._options.get("peers"):
            wait_for(lambda: self._peers_hold(base, step), "copies and logs")
        for one in ranks:
            one.kill()
            assert finish_trainer(one, TIMEOUT_S)[0] == -signal.SIGKILL

    def lose(self, *hosts: int) -> None:
        """Hosts with all that is on them."""
        for host in hosts:
            if (keeper := self.keepers().get(self.run(host))) is not None:
                kill_keeper(keeper)
            shutil.rmtree(Path(self.run(host)).parent)

    def keepers(self) -> dict[str, Any]:
        mine = {self.run(host) for host in range(self._world)}
        return {info.run: info for info in list_keepers() if info.run in mine}

    def _peers_hold(self, base: int, step: int) -> bool:
        found = self.keepers()
        statuses = {run: request_statuses([info])[0] for run, info in found.items()}
        for host in range(self._world):
            source, status = (host - 1) % self._world, statuses.get(self.run(host))
            wanted = ((source, base),), ((source, step),)
            if status is None or (status.copies, status.logs) != wanted:
                return False
        return True

    def copied_log(self, step: int) -> bool:
        """Whether the copies have the log of every rank up to a step."""
        files = TierFileSystem(open_tier(self.store, PosixFileSystem()), ROOT)
        found = (scan_log(files, ROOT, [1], rank=rank) for rank in range(self._world))
        return all(any(one.last >= step for one in segments) for segments in found)

    def kill_keepers(self) -> None:
        for keeper in self.keepers().values():
            kill_keeper(keeper)

    def _durable(self) -> set[int]:
        """Steps of bases that are in the copies; without these, of those on every disk."""
        if self._options["tiers"]:
            return set(self._copied())
        runs = [Path(self.run(host)) for host in range(self._world)]
        found = [scan_run(PosixFileSystem(), run).bases for run in runs]
        return set.intersection(
            *({one.id.step for one in bases if one.status == "committed"} for bases in found)
        )

    def _copied(self) -> list[int]:
        files = TierFileSystem(open_tier(self.store, PosixFileSystem()), ROOT)
        return [one.id.step for one in scan_run(files, ROOT).bases if one.status == "committed"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    end_keepers(tmp_path)


@cache
def undisturbed(folder: Path, world: int, kind: str) -> list[dict[int, dict[str, Any]]]:
    """What each rank says of each step."""
    said = Hosts(folder, world, kind, method="sync", tiers=[]).to_the_end()
    return [{one["step"]: one for one in lines if "step" in one} for lines in said]


@pytest.mark.parametrize(
    ("lost", "step"), [((0, 1), 4), ((1, 2), 4), ((0,), 6)], ids=["0 and 1", "1 and 2", "one"]
)
def test_two_neighbours_in_the_ring_are_lost_at_once(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, lost: tuple[int, ...], step: int
) -> None:
    """Of the first of the two nobody has the log any more, nor its base: that is in the durable
    tier. All go back to it, in the same bits; one node alone costs nothing."""
    expected = undisturbed(tmp_path_factory.getbasetemp() / "neighbours", 3, "ddp")
    job = Hosts(folder, 3, "ddp", peers=True)
    job.until_killed(6, 4)
    job.lose(*lost)
    said = job.to_the_end()
    for rank, lines in enumerate(said):
        assert (lines[0]["resumed"], lines[0]["base"]) == (step, 4)
        assert lines[0]["digest"] == expected[rank][step]["digest"]
        found = {one["step"]: one["digest"] for one in lines if "step" in one}
        assert found == {at: expected[rank][at]["digest"] for at in range(step + 1, STEPS + 1)}
        if len(lost) == 2:
            assert f"the log of rank {lost[0]} ends before" in lines[0]["skipped"]
    sources = {rank: lines[0]["source"] for rank, lines in enumerate(said)}
    if len(lost) == 2:
        assert sources == dict.fromkeys(range(3), "memory") | {lost[0]: "copy", lost[1]: "peer"}
    else:
        assert sources == {0: "peer", 1: "memory", 2: "memory"}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_half_of_the_hosts_are_gone(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """Two of four ranks go on with what all four had. Of two logs nobody has anything, which is
    said, and what comes back is the newest base in the copies."""
    expected = undisturbed(tmp_path_factory.getbasetemp() / f"half-{kind}", 4, kind)
    job = Hosts(folder, 4, kind)
    job.until_killed(6, 4)
    job.lose(2, 3)
    said = job.to_the_end(2)
    for lines in said:
        assert (lines[0]["resumed"], lines[0]["base"], lines[0]["replayed"]) == (4, 4, 0)
        assert lines[0]["whole"] == expected[0][4]["whole"]
        assert "the log of rank 2 of 4 that wrote it ends before" in lines[0]["skipped"]
        assert [one["step"] for one in lines if "step" in one] == [5, 6, 7]
    assert said[0][-1]["whole"] == said[1][-1]["whole"], "they train on together"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_half_of_the_hosts_are_gone_and_copies_have_the_log(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """Two of four ranks go on from the last step that all four had copied."""
    expected = undisturbed(tmp_path_factory.getbasetemp() / f"half-{kind}", 4, kind)
    job = Hosts(folder, 4, kind, copies_log=True)
    job.until_killed(6, 4)
    wait_for(lambda: job.copied_log(6), "the log")
    job.kill_keepers()
    job.lose(2, 3)
    for lines in job.to_the_end(2):
        assert (lines[0]["resumed"], lines[0]["base"], lines[0]["replayed"]) == (6, 4, 2)
        assert lines[0]["whole"] == expected[0][6]["whole"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_of_three_hosts_is_gone_for_good_and_its_peer_has_the_log(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    expected = undisturbed(tmp_path_factory.getbasetemp() / f"third-{kind}", 3, kind)
    job = Hosts(folder, 3, kind, peers=True)
    job.until_killed(6, 4)
    job.lose(2)
    for lines in job.to_the_end(2):
        assert (lines[0]["resumed"], lines[0]["replayed"]) == (6, 2), lines[0]["skipped"]
        assert lines[0]["whole"] == expected[0][6]["whole"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_hosts_are_numbered_in_another_order(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """Nobody has a copy, and what each rank needs is on the disk of another host now: it comes from
    there, and all go on with the bits of a training that nobody disturbed."""
    expected = undisturbed(tmp_path_factory.getbasetemp() / f"third-{kind}", 3, kind)
    job = Hosts(folder, 3, kind, method="lazy", tiers=[])
    job.until_killed(6, 4)
    job.kill_keepers()
    job.hosts = [1, 2, 0]
    for rank, lines in enumerate(job.to_the_end()):
        assert lines[0]["resumed"] == 4
        assert lines[0]["source"] == "peer"
        assert lines[0]["digest"] == expected[rank][4]["digest"]
        found = {one["step"]: one["digest"] for one in lines if "step" in one}
        assert found == {at: expected[rank][at]["digest"] for at in (5, 6, 7)}


def test_a_lost_host_takes_what_is_left_of_replicas(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It was replaced by one with an empty disk, and there are neither copies nor peers."""
    expected = undisturbed(tmp_path_factory.getbasetemp() / "third-ddp", 3, "ddp")
    job = Hosts(folder, 3, "ddp", method="lazy", tiers=[])
    job.until_killed(6, 4)
    job.kill_keepers()
    job.lose(1)
    said = job.to_the_end()
    for lines in said:
        assert lines[0]["resumed"] == 4
        assert lines[0]["whole"] == expected[0][4]["whole"]
        assert [one["step"] for one in lines if "step" in one] == [5, 6, 7]
    assert [lines[0]["source"] for lines in said] == ["disk", "peer", "disk"]
    assert len({lines[-1]["whole"] for lines in said}) == 1, "they train on together"


@pytest.mark.parametrize("lost", [0, 3])
def test_a_lost_host_takes_its_shard_from_who_has_it_too(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, lost: int
) -> None:
    """Shards are replicated over two hosts each: only one of the others has what it needs."""
    expected = undisturbed(tmp_path_factory.getbasetemp() / "four-hsdp", 4, "hsdp")
    job = Hosts(folder, 4, "hsdp", method="lazy", tiers=[])
    job.until_killed(6, 4)
    job.kill_keepers()
    job.lose(lost)
    said = job.to_the_end()
    for rank, lines in enumerate(said):
        assert lines[0]["resumed"] == 4
        assert lines[0]["whole"] == expected[rank][4]["whole"]
        assert lines[0]["source"] == ("peer" if rank == lost else "disk")
    assert len({lines[-1]["whole"] for lines in said}) == 1, "they train on together"


def test_a_lost_shard_is_nobody_elses(folder: Path) -> None:
    """Of a state that is spread, what only the lost host had is gone, and nobody makes it up."""
    job = Hosts(folder, 2, "fsdp", method="lazy", tiers=[])
    job.until_killed(6, 4)
    job.kill_keepers()
    job.lose(1)
    for one in job.start(2):
        status, out, err = finish_trainer(one, 2 * TIMEOUT_S)
        assert status != 0
        assert not out
        assert "the files of rank 1" in err or "files of rank(s) 1" in err, err


def test_a_disk_is_gone_and_the_keeper_beside_it_lives(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What it holds in memory is all that is left of that host's part, and it is enough."""
    expected = undisturbed(tmp_path_factory.getbasetemp() / "two-fsdp", 2, "fsdp")
    job = Hosts(folder, 2, "fsdp", method="lazy", tiers=[])
    job.until_killed(6, 4)
    shutil.rmtree(job.run(1))
    for rank, lines in enumerate(job.to_the_end()):
        assert lines[0]["resumed"] == 4
        assert lines[0]["source"] == "memory"
        found = {one["step"]: one["digest"] for one in lines if "step" in one}
        assert found == {at: expected[rank][at]["digest"] for at in (5, 6, 7)}
