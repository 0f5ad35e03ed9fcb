"""Ranks that are processes, with a log each: killed anywhere, they come back to the last step that
all of them had, and end with the same bits as a training that nobody disturbed."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from everstep.link.registry import kill_keeper, list_keepers
from tests.process.ranks.test_together import STEPS, WORLD, Job, check
from tests.support.keepers import end_keepers
from tests.support.trainers import Trainer, finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S

pytestmark = pytest.mark.slow

TRAINING = """
import copy, hashlib, json, os, signal, sys, warnings
import torch, torch.distributed as dist
import everstep

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
    digest=digest(torch.get_rng_state()), base=recovery.base_step, skipped=str(recovery.skipped))
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
        self._kind = kind

    def start(self, *environments: dict[str, str]) -> list[Trainer]:
        self._starts += 1
        meet = str(self._folder / f"meet-{self._starts}")
        found = environments or ({},) * self.world
        about = str(self.run), json.dumps(self._options), self._kind
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


Made = list[LogJob]


@pytest.fixture
def made() -> Iterator[Made]:
    """Jobs, whose keepers end with the test."""
    jobs: Made = []
    yield jobs
    for job in jobs:
        end_keepers(job.run.parent)


@cache
def undisturbed(kind: str, folder: Path) -> list[dict[int, str]]:
    said = LogJob(folder, kind, method="sync").to_the_end()
    return [{one["step"]: one["digest"] for one in lines if "step" in one} for lines in said]


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(kind: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    return undisturbed(kind, tmp_path_factory.mktemp("undisturbed"))


def came_back(job: LogJob, expected: list[dict[int, str]]) -> int:
    """The step to which all ranks came back, to go on from it bit for bit."""
    said = job.to_the_end()
    if job._kind.startswith("ddp"):
        for line in zip(*said, strict=True):
            assert len({one.get("shared") for one in line}) == 1, "replicas are the same everywhere"
    return check(said, expected)[0]


@pytest.mark.parametrize("to", ["memory", "disk"])
def test_all_ranks_are_killed_behind_a_step(
    tmp_path: Path, made: Made, kind: str, expected: list[dict[int, str]], to: str
) -> None:
    made.append(job := LogJob(tmp_path, kind, to=to))
    job.until_all_die(4)
    if to == "disk":
        job.kill_keepers()
    assert came_back(job, expected) == 4


@pytest.mark.parametrize("seed", range(4))
def test_one_rank_is_killed_behind_a_step(
    tmp_path: Path, made: Made, kind: str, expected: list[dict[int, str]], seed: int
) -> None:
    made.append(job := LogJob(tmp_path, kind, to=random.Random(seed).choice(["memory", "disk"])))
    rank, step = seed % WORLD, random.Random(seed).randrange(2, STEPS)
    job.until_one_dies(*({"DIES": str(step)} if r == rank else {} for r in range(WORLD)))
    assert came_back(job, expected) in (step - 1, step), "at most the step in flight is lost"


def test_a_rank_raises_and_the_others_logs_stay(
    tmp_path: Path, made: Made, kind: str, expected: list[dict[int, str]]
) -> None:
    """An exception ends each of them, without a base of all: their keepers hold the logs."""
    made.append(job := LogJob(tmp_path, kind))
    for one in job.start(*({"RAISES": "4"},) * WORLD):
        status, _, err = finish_trainer(one, TIMEOUT_S)
        assert status == 1
        assert "as asked" in err
    assert came_back(job, expected) == 4


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize(
    ("point", "least"),
    [
        ("log.before_record=kill:8", 3),
        ("log.after_record=kill:8", 3),
        ("capture.before_captured=kill:2", 4),
        ("resume.before_timeline=kill:1", 0),
    ],
)
def test_a_rank_dies_at_a_named_point(
    tmp_path: Path,
    made: Made,
    kind: str,
    expected: list[dict[int, str]],
    point: str,
    least: int,
    rank: int,
) -> None:
    made.append(job := LogJob(tmp_path, kind))
    deadly = {"EVERSTEP_FAILPOINTS": point}
    job.until_one_dies(*(deadly if number == rank else {} for number in range(WORLD)))
    step = came_back(job, expected)
    assert step >= least, "at most the step in flight is lost"


def test_the_log_of_the_last_start_stays_until_a_base_of_all_is_there(
    tmp_path: Path, made: Made, kind: str, expected: list[dict[int, str]]
) -> None:
    """The first base of the second start is whole in one keeper, and never in the other."""
    made.append(job := LogJob(tmp_path, kind))
    job.until_all_die(4)
    job.until_one_dies({}, {"EVERSTEP_FAILPOINTS": "capture.before_captured=kill:1"})
    assert came_back(job, expected) >= 4


@pytest.mark.parametrize("point", ["log.before_rename", "log.before_marker"])
def test_a_keeper_dies_while_it_writes_the_log_and_its_rank_with_it(
    tmp_path: Path, made: Made, kind: str, expected: list[dict[int, str]], point: str
) -> None:
    """The third segment, that of step 3: its rank has up to step 2, if the base of step 1 was
    durable by then."""
    made.append(job := LogJob(tmp_path, kind, to="disk, behind"))
    deadly = {"EVERSTEP_FAILPOINTS": f"{point}=kill:3", "DIES": "4"}
    job.until_one_dies({}, deadly)
    assert came_back(job, expected) in (0, 1, 2)


def test_a_rank_that_has_lost_its_keeper_too_takes_all_back_to_the_base(
    tmp_path: Path, made: Made, kind: str, expected: list[dict[int, str]]
) -> None:
    made.append(job := LogJob(tmp_path, kind))
    job.until_all_die(4)
    waited, left = threading.Event(), int(TIMEOUT_S / 0.02)
    while "committed" not in job.statuses().values():  # its keepers finish the first base
        assert left, job.statuses()
        left -= 1
        waited.wait(0.02)
    for info in list_keepers():
        if info.run == str(job.run) and info.rank == 1:
            kill_keeper(info)
    assert came_back(job, expected) == 1


@pytest.mark.parametrize("to", ["memory", "disk"])
@pytest.mark.parametrize("how", ["ddp, exchange", "ddp, compressor", "fsdp, compressor"])
def test_compressed_training_is_killed_behind_a_step_and_in_one(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    made: Made,
    how: str,
    to: str,
) -> None:
    """Its residuals come back with the rest, to each rank its own."""
    expected = undisturbed(how, tmp_path_factory.mktemp("undisturbed"))
    made.append(job := LogJob(tmp_path, how, to=to, method="lowdiff"))
    job.until_all_die(4)
    if to == "disk":
        job.kill_keepers()
    job.until_one_dies({}, {"EVERSTEP_FAILPOINTS": "log.before_record=kill:4"})
    assert came_back(job, expected) >= 4


@pytest.mark.parametrize("kind", ["zero, declared", "ddp, declared"])
def test_what_a_registered_function_has_updated_comes_back(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, made: Made, kind: str
) -> None:
    """It reads parameters, of which a rank of ZeRO has the others' only when replay is over."""
    expected = undisturbed(kind, tmp_path_factory.mktemp("undisturbed"))
    made.append(job := LogJob(tmp_path, kind))
    job.until_all_die(4)
    assert came_back(job, expected) == 4
