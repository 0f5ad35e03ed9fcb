"""Ranks that are processes, of another number than those that wrote the log, or in another layout:
they come back to its last step, with the tensors that training had there, bit for bit."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.link.registry import kill_keeper, list_keepers
from tests.support.keepers import end_keepers
from tests.support.trainers import Trainer, finish_trainer, start_trainer, whole_lines

pytestmark = pytest.mark.slow

_HANGS_S = 240.0
LAST = 7  # step behind which all ranks die
BASE = 5  # the newest base before that

TRAINING = """
import json, os, signal, sys, warnings
from datetime import timedelta
import torch, torch.distributed as dist
import everstep
from tests.support.ranks.parallel import LAYOUTS

run, meet, layout, rank, world, last, to = sys.argv[1:]
rank, world, last = int(rank), int(world), int(last)
warnings.simplefilter("ignore")
torch.use_deterministic_algorithms(True)
if world > 1:
    limit = timedelta(seconds=200)
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=world, timeout=limit
    )
torch.manual_seed(1)
training = LAYOUTS[layout].build(rank, world)
torch.manual_seed(100 + training.draws)
log = everstep.LogOptions(to="disk", batch_steps=1, lag_steps=0) if to == "disk" else None
given = {} if log is None else {"log": log}

def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())

ckpt = everstep.Checkpointer(
    run, training.values, method="logged", every=5, on_failure="warn", progress_timeout_s=100.0,
    **given,
)
recovery = ckpt.resume()
say(step=recovery.step, whole=training.whole(), replayed=recovery.replayed, exact=recovery.exact,
    timeline=recovery.timeline, skipped=str(recovery.skipped), notes=list(recovery.notes))
for step in range(recovery.step + 1, last + 1):
    training.step()
    ckpt.step()
    if to == "disk" and step in (5, recovery.step + 1):
        ckpt.wait()  # for the base, which is in the keeper's memory first
    say(step=step, whole=training.whole())
if os.environ.get("DIES"):
    if to != "disk":
        ckpt.wait()
    if world > 1:
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
ckpt.close()
if world > 1:
    dist.destroy_process_group()
os._exit(0)
"""

Said = list[list[dict[str, Any]]]


class Runs:
    """Jobs on one run folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run"
        self._folder, self._starts = folder, 0

    def said(self, layout: str, world: int, last: int, *, to: str, dies: bool = False) -> Said:
        """What each rank of a job says that ends behind a step, or dies there."""
        self._starts += 1
        meet = str(self._folder / f"meet-{self._starts}")
        env = {"DIES": "1"} if dies else {}
        ranks: list[Trainer] = [
            start_trainer(
                TRAINING,
                *(str(self.path), meet, layout, str(rank), str(world), str(last), to),
                **env,
            )
            for rank in range(world)
        ]
        ended = [finish_trainer(one, _HANGS_S) for one in ranks]
        wanted = -signal.SIGKILL if dies else 0
        assert [status for status, _, _ in ended] == [wanted] * world, ended
        return [[json.loads(line) for line in whole_lines(out)] for _, out, _ in ended]

    def kill_keepers(self) -> None:
        for info in list_keepers():
            if info.run == str(self.path):
                kill_keeper(info)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    end_keepers(tmp_path)


def at(said: Said, step: int) -> dict[str, str]:
    """Digests of tensors as torch puts them together, at a step, of all ranks."""
    found: dict[str, str] = {}
    for lines in said:
        whole = next(one["whole"] for one in lines if one["step"] == step)
        assert all(found.setdefault(name, digest) == digest for name, digest in whole.items())
    return found


def go_on(runs: Runs, before: Said, layout: str, world: int, step: int, replayed: int) -> Said:
    """Another job goes on from a step, with the tensors that the first had there; and once more,
    from what it has logged itself."""
    said = runs.said(layout, world, step + 2, to="disk", dies=True)
    for lines in said:
        first = lines[0]
        assert (first["step"], first["replayed"]) == (step, replayed), first["skipped"]
    assert at(said, step) == at(before, step)
    runs.kill_keepers()
    again = runs.said(layout, world, step + 3, to="disk")
    assert [lines[0]["step"] for lines in again] == [step + 2] * world, again[0][0]
    assert at(again, step + 2) == at(said, step + 2)
    return said


@pytest.mark.parametrize(
    ("layout", "ranks", "other", "world"),
    [
        ("ddp", 4, "ddp", 2),
        ("ddp", 2, "ddp", 3),
        ("fsdp", 4, "fsdp", 2),
        ("fsdp", 2, "fsdp", 4),
        ("fsdp", 3, "fsdp", 2),
        ("ddp", 2, "fsdp", 4),
        ("fsdp", 4, "ddp", 2),
        ("hsdp", 4, "fsdp", 3),
        ("one", 1, "fsdp", 2),
        ("one", 1, "ddp", 2),
        ("ddp", 2, "one", 1),
        ("fsdp", 3, "one", 1),
        ("zero", 2, "zero", 3),
        ("zero", 3, "one", 1),
        ("fsdp", 4, "ddp", 4),  # from here on as many ranks, in another layout
        ("ddp", 2, "fsdp", 2),
        ("hsdp", 4, "fsdp", 4),
        ("dp_tp", 4, "fsdp", 4),
        ("zero", 2, "ddp", 2),
        ("fsdp", 2, "zero", 2),
    ],
)
def test_a_job_of_another_size_or_layout_comes_back_to_the_last_step(
    runs: Runs, layout: str, ranks: int, other: str, world: int
) -> None:
    before = runs.said(layout, ranks, LAST, to="disk", dies=True)
    runs.kill_keepers()
    go_on(runs, before, other, world, LAST, LAST - BASE)


@pytest.mark.parametrize(("ranks", "world"), [(4, 2), (2, 3)])
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_a_log_in_the_memory_of_keepers_leads_on(
    runs: Runs, layout: str, ranks: int, world: int
) -> None:
    """Also of those that serve no rank any more; they keep it until the ranks that go on have a
    base of their own."""
    before = runs.said(layout, ranks, LAST, to="memory", dies=True)
    for _ in range(2):  # the first of them has taken no base yet
        said = runs.said(layout, world, LAST, to="memory", dies=True)
        for lines in said:
            first = lines[0]
            assert (first["step"], first["replayed"]) == (LAST, LAST - BASE), first["skipped"]
        assert at(said, LAST) == at(before, LAST)


@pytest.mark.parametrize(("layout", "other"), [("fsdp", "ddp"), ("ddp", "fsdp")])
def test_a_log_of_another_layout_in_the_memory_of_keepers_leads_on(
    runs: Runs, layout: str, other: str
) -> None:
    before = runs.said(layout, 2, LAST, to="memory", dies=True)
    for _ in range(2):  # the first of them has taken no base yet
        said = runs.said(other, 2, LAST, to="memory", dies=True)
        for lines in said:
            first = lines[0]
            assert (first["step"], first["replayed"]) == (LAST, LAST - BASE), first["skipped"]
        assert at(said, LAST) == at(before, LAST)


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_one_process_goes_on_from_what_keepers_of_several_hold(runs: Runs, layout: str) -> None:
    before = runs.said(layout, 2, LAST, to="memory", dies=True)
    for _ in range(2):
        ((first, *_),) = said = runs.said("one", 1, LAST, to="memory", dies=True)
        assert (first["step"], first["replayed"]) == (LAST, LAST - BASE), first["skipped"]
        assert at(said, LAST) == at(before, LAST)


def test_what_each_rank_of_zero_updates_is_replayed_and_handed_to_the_others(runs: Runs) -> None:
    before = runs.said("zero", 2, LAST, to="memory", dies=True)
    go_on(runs, before, "zero", 2, LAST, LAST - BASE)
