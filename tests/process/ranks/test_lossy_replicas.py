"""Ranks that hold the same shards, of which some have lost all but the lossy copy of their log: the
replicas are equal after the recovery, and stay so."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.link.registry import kill_keeper, list_keepers
from tests.support.keepers import end_keepers
from tests.support.ranks.parallel import MORE
from tests.support.trainers import finish_trainer, start_trainer, whole_lines

pytestmark = pytest.mark.slow

_HANGS_S = 240.0
LAST = 7  # step after which all ranks die
BASE = 5  # the newest base before that

TRAINING = """
import hashlib, json, os, signal, sys, time, warnings
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place
import everstep
from tests.support.ranks.parallel import MORE

run, copies, meet, layout, rank, world, last = sys.argv[1:]
rank, world, last = int(rank), int(world), int(last)
warnings.simplefilter("ignore")
torch.use_deterministic_algorithms(True)
limit = timedelta(seconds=200)
dist.init_process_group(
    "gloo", init_method=f"file://{meet}", rank=rank, world_size=world, timeout=limit
)
torch.manual_seed(1)
training = MORE[layout].build(rank, world)
torch.manual_seed(100 + training.draws)

def shards():
    found = {}
    for name, tensor in training.tensors().items():
        if any(own in name for own in ("running", "num_batches")):  # each rank's own
            continue
        at = "whole"
        if hasattr(tensor, "to_local"):
            at = place(tensor.shape, tensor.device_mesh, tensor.placements)
            tensor = tensor.to_local()
        digest = hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
        found[f"{name} {at}"] = digest
    return found

method = everstep.Method(log="dense", apply=os.environ.get("APPLY", "recovery"))
ckpt = everstep.Checkpointer(
    run, training.values, method=method, every=5, on_failure="warn", progress_timeout_s=100.0,
    tiers=[everstep.TierOptions(copies, log="adaptive", log_steps=1)],
)
recovery = ckpt.resume()

def say(**what):
    about = {**what, "shards": shards(), "whole": training.whole()}
    os.write(1, (json.dumps(about) + "\\n").encode())

say(step=recovery.step, replayed=recovery.replayed, exact=recovery.exact)
for step in range(recovery.step + 1, last + 1):
    training.step()
    ckpt.step()
    if step == 5:
        ckpt.wait()  # for the base, and its copy
    say(step=step)
if os.environ.get("DIES"):
    for _ in range(600):  # for the copies of the log
        stats = ckpt.stats()
        if stats.copied_steps + stats.copy_log_missed == last:
            break
        time.sleep(0.1)
    else:
        sys.exit(f"the log was not copied: {stats}")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
ckpt.close()
dist.destroy_process_group()
os._exit(0)
"""

Said = list[list[dict[str, Any]]]


@pytest.fixture
def job_folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    end_keepers(tmp_path)


def said(
    folder: Path, layout: str, last: int, *, dies: bool = False, apply: str = "recovery"
) -> Said:
    """Return what each rank of a job says that ends after a step, or dies there."""
    world = MORE[layout].ranks
    meet = str(folder / f"meet-{len(list(folder.glob('meet-*')))}")
    paths = str(folder / "run"), str(folder / "copies"), meet
    env = {"APPLY": apply} | ({"DIES": "1"} if dies else {})
    ranks = [
        start_trainer(TRAINING, *paths, layout, str(rank), str(world), str(last), **env)
        for rank in range(world)
    ]
    ended = [finish_trainer(one, _HANGS_S) for one in ranks]
    wanted = -signal.SIGKILL if dies else 0
    assert [status for status, _, _ in ended] == [wanted] * world, ended
    return [[json.loads(line) for line in whole_lines(out)] for _, out, _ in ended]


def shards_at(lines_of_ranks: Said, step: int) -> dict[str, str]:
    """Return the digests of all shards after a step, which are equal on all ranks that have one."""
    found: dict[str, str] = {}
    for rank, lines in enumerate(lines_of_ranks):
        own = next(one["shards"] for one in lines if one["step"] == step)
        for name, digest in own.items():
            assert found.setdefault(name, digest) == digest, f"rank {rank}: {name} has parted"
    return found


@pytest.mark.parametrize("layout", ["ddp", "hsdp", "tp_lines", "fsdp_tp_lines"])
@pytest.mark.parametrize("lost", ["the last", "all"])
def test_replicas_are_equal_after_a_lossy_recovery(
    job_folder: Path, layout: str, lost: str
) -> None:
    before = said(job_folder, layout, LAST, dies=True)
    run = str(job_folder / "run")
    keepers = sorted((one for one in list_keepers() if one.run == run), key=lambda one: one.rank)
    for info in keepers if lost == "all" else keepers[-1:]:
        kill_keeper(info)
    after = said(job_folder, layout, LAST + 2)
    first = [lines[0] for lines in after]
    assert {(one["step"], one["replayed"]) for one in first} == {(LAST, LAST - BASE)}
    assert not any(one["exact"] for one in first)
    assert shards_at(after, LAST).keys() == shards_at(before, LAST).keys()
    assert shards_at(after, LAST) != shards_at(before, LAST)
    shards_at(after, LAST + 2)


def test_a_replica_follows_beside_a_lossy_copy(job_folder: Path) -> None:
    """Both import torch in threads of the keeper, and neither waits for the other."""
    said(job_folder, "hsdp", LAST, dies=True, apply="replica")
    end_keepers(job_folder)
    after = said(job_folder, "hsdp", LAST + 1, apply="replica")
    assert {lines[0]["step"] for lines in after} == {LAST}
    shards_at(after, LAST + 1)


@pytest.mark.parametrize(("layout", "other"), [("hsdp", "fsdp"), ("fsdp_tp_lines", "tp_lines")])
def test_another_layout_replays_the_same_lossy_log(
    job_folder: Path, layout: str, other: str
) -> None:
    """One rank's log has the gradients of a shard, and ranks of the other layout find them."""
    said(job_folder, layout, LAST, dies=True)
    end_keepers(job_folder)
    copied = job_folder / "copied"
    for name in ("run", "copies"):
        shutil.copytree(job_folder / name, copied / name)
    found = []
    for folder, ranks in ((job_folder, layout), (copied, other)):
        first = [lines[0] for lines in said(folder, ranks, LAST)]
        assert {(one["step"], one["replayed"]) for one in first} == {(LAST, LAST - BASE)}
        assert not any(one["exact"] for one in first)
        found += [one["whole"] for one in first]
    assert all(one == found[0] for one in found)
