"""``method="checkflow"`` with a keeper process and trainers that are killed for good, anywhere in a
step: what comes back is the newest whole capture, to the bit, and training goes on as if nothing
had happened."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

import everstep
from everstep.seams.processes.processes import process_ended
from everstep.testing import inspect
from everstep.trainer.attach.remote import RemoteKeeper
from tests.support.lost_keepers import noticed
from tests.support.scheduled import Loop
from tests.support.trainers import run_trainer, whole_lines
from tests.support.world import TIMEOUT_S, inventory_of

SEED = 60203
STEPS = 12
EVERY = 5

TRAIN = """
import hashlib, os, signal, sys, torch
import everstep
from everstep.testing.emulated_link import EmulatedLink
from everstep.seams import Seams
from tests.support.scheduled import Loop

run, kind, steps, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
loop, ticks = Loop(kind), 0

def tick(*_):
    global ticks
    ticks += 1
    if ticks == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

for module in loop.model:
    module.register_forward_pre_hook(tick)
for parameter in loop.model.parameters():
    parameter.register_post_accumulate_grad_hook(tick)
for optimizer in loop.optimizers.values():
    optimizer.register_step_post_hook(tick)
seams = Seams(lane=lambda: EmulatedLink(10e6))
every = int(sys.argv[5])
ckpt = everstep.Checkpointer(run, loop.state, method="checkflow", every=every, seams=seams)
found = ckpt.resume()
os.environ.pop("EVERSTEP_FAILPOINTS", None)

def digest():
    return hashlib.sha256(repr(loop.snapshot()).encode()).hexdigest()

print("resumed", found.step, found.source, found.exact, digest(), flush=True)
for step in range(found.step, steps):
    loop.train(step + 1)
    print("step", step + 1, digest(), flush=True)
    tick()
    ckpt.step()
    print("mark", step + 1, flush=True)
    tick()
ckpt.close()
print("ticks", ticks, flush=True)
print("durable", ckpt.stats().durable_step, ckpt.stats().committed, flush=True)
"""

Said = dict[str, list[list[str]]]


def train(run: Path, kind: str, *, kill_at: int = 0, failing: str = "") -> tuple[int, Said]:
    """Trains in a process of its own; what it said, by its first word."""
    arguments = (str(run), kind, str(STEPS), str(kill_at), str(EVERY))
    status, out, err = run_trainer(TRAIN, *arguments, timeout_s=120, EVERSTEP_FAILPOINTS=failing)
    assert status in (0, -signal.SIGKILL), err
    said: Said = {}
    for line in whole_lines(out):
        word, *rest = line.split()
        said.setdefault(word, []).append(rest)
    return status, said


@pytest.fixture(scope="module", params=["plain", "inside"])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[int, str], int]:
    """What an uninterrupted run is like after each step, and how often its clock ticks."""
    status, said = train(tmp_path_factory.mktemp("whole") / "run", request.param)
    assert status == 0
    assert said["durable"] == [[str(STEPS), "3"]]  # 5, 10, and 12 at the end
    return request.param, {int(n): sha for n, sha in said["step"]}, int(said["ticks"][0][0])


def check_resumed(run: Path, kind: str, killed: Said, digests: dict[int, str]) -> int:
    """Resumes and trains on to the end; the step that it began with."""
    marks = [int(number) for (number,) in killed.get("mark", [["0"]])]
    status, said = train(run, kind)
    assert status == 0
    ((step, source, exact, sha),) = said["resumed"]
    assert int(step) >= max(marks) - 2, (step, marks)
    if int(step):
        assert sha == digests[int(step)]
        assert exact == "True"
        assert source == "memory" or int(step) % EVERY == 0
    assert {int(n): sha for n, sha in said["step"]} == {
        number: sha for number, sha in digests.items() if number > int(step)
    }
    return int(step)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("case", range(2))
def test_killed_anywhere_in_a_step(
    case: int, whole: tuple[str, dict[int, str], int], run_folder: Path
) -> None:
    kind, digests, ticks = whole
    kill_at = random.Random(f"{SEED} {kind} {case}").randrange(ticks // STEPS * 3, ticks)
    print(f"seed {SEED}, case {case}: killed at tick {kill_at} of {ticks}")
    status, killed = train(run_folder, kind, kill_at=kill_at)
    assert status == -signal.SIGKILL
    assert check_resumed(run_folder, kind, killed, digests) > 0


@pytest.mark.thinned(3)
@pytest.mark.parametrize("whole", ["plain"], indirect=True)
@pytest.mark.parametrize(
    "failing",
    [
        "capture.before_mark=kill:7",
        "capture.before_captured=kill:7",
        "capture.after_captured=kill:7",
    ],
)
def test_killed_at_each_point_of_a_capture(
    failing: str, whole: tuple[str, dict[int, str], int], run_folder: Path
) -> None:
    kind, digests, _ = whole
    status, killed = train(run_folder, kind, failing=failing)
    assert status == -signal.SIGKILL
    step = check_resumed(run_folder, kind, killed, digests)
    # At its mark the capture before it may still leave, from duplicates.
    expected = {"before_mark": (5, 6), "before_captured": (6,), "after_captured": (7,)}
    assert step in expected[failing.removeprefix("capture.").removesuffix("=kill:7")]


def test_the_keeper_is_killed(run_folder: Path) -> None:
    """What was parked is gone with it; training goes on, and the next step is made durable."""
    loop, snapshots = Loop(), {}
    with everstep.Checkpointer(
        run_folder, loop.state, method="checkflow", every=EVERY, keep=50, on_failure="warn"
    ) as ckpt:
        ckpt.resume()
        for step in range(1, 10):
            loop.train(step)
            snapshots[step] = loop.snapshot()
            if step == 7:
                keeper = inspect(ckpt).keepers.current
                assert isinstance(keeper, RemoteKeeper)
                os.kill(keeper.pid, signal.SIGKILL)
                assert process_ended(keeper.pid, TIMEOUT_S)
                noticed(ckpt)
                with pytest.warns(RuntimeWarning, match="is gone"):
                    ckpt.step()
            else:
                ckpt.step()
        ckpt.wait()
        assert ckpt.stats().keeper_restarts == 1
    found = {base.id.step for base in inventory_of(run_folder).bases}
    assert {7, 9} <= found  # 5 may not have been written yet
    other = Loop(seed=50)
    with everstep.Checkpointer(run_folder, other.state, method="checkflow", every=None) as ckpt:
        for step in (9, 7):
            ckpt.resume(step)
            assert other.snapshot() == snapshots[step]
