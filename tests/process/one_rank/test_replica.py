"""The replica in a keeper process of its own: trainer and keeper are killed for good."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.testing import inspect
from tests.support.following import opened, run_steps
from tests.support.log.every_step import World
from tests.support.trainers import run_trainer, whole_lines

SEED = 4711
STEPS = 12

TRAIN = """
import hashlib, os, sys, torch
from everstep.testing import inspect
import everstep
from tests.support.following import until
from tests.support.log.every_step import World

run, method, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
world = World(seed=int(sys.argv[4]))
ckpt = everstep.Checkpointer(run, world.state, method=method, every=3, keep=50)
found = ckpt.resume()
os.environ.pop("EVERSTEP_FAILPOINTS", None)  # keepers that are started later live on
print("resumed", found.step, found.source, found.exact, flush=True)
for step in range(found.step, steps):
    world.train()
    ckpt.step()
    state = sorted(world.snapshot().items())
    print("step", step + 1, hashlib.sha256(repr(state).encode()).hexdigest(), flush=True)
    if step in (1, steps - 1) and inspect(ckpt).options.has_replica:
        there = lambda: inspect(ckpt).keepers.lost or ckpt.stats().replica_step == step + 1
        until(there, "the replica", timeout_s=80.0)  # of a keeper that has to load torch first
if not inspect(ckpt).keepers.lost:
    maps = open(f"/proc/{inspect(ckpt).keeper.pid}/maps").read()
    print("torch", "libtorch" in maps, flush=True)
ckpt.close()
print("restarts", ckpt.stats().keeper_restarts, flush=True)
"""

Said = dict[str, list[list[str]]]


def train(run: Path, seed: int, *, method: str = "lowdiff_plus", failing: str = "") -> Said:
    """Trains in a process of its own; what it said, by its first word."""
    arguments = (str(run), method, str(STEPS), str(seed))
    status, out, err = run_trainer(TRAIN, *arguments, timeout_s=120, EVERSTEP_FAILPOINTS=failing)
    said: Said = {"status": [[str(status)]], "errors": [[err]]}
    for line in whole_lines(out):
        word, *rest = line.split()
        said.setdefault(word, []).append(rest)
    return said


def uninterrupted() -> dict[str, str]:
    """Digest of the state after each step."""
    world, found = World(), {}
    for step in range(1, STEPS + 1):
        world.train()
        found[str(step)] = digest(world)
    return found


def digest(world: World) -> str:
    """Of its state."""
    return hashlib.sha256(repr(sorted(world.snapshot().items())).encode()).hexdigest()


def steps_of(said: Said) -> dict[str, Any]:
    return dict(said.get("step", []))


def check_kills(run: Path, kills: list[int]) -> None:
    """Kills the trainer again and again; every state is that of the uninterrupted run."""
    wanted, last = uninterrupted(), 0
    for number, hit in enumerate([*kills, 0]):
        failing = f"log.after_record=kill:{hit}" if hit else ""
        # Another start would show in every bit, but for one who may begin from scratch.
        said = train(run, 100 + number if last else 1, failing=failing)
        step, source, exact = said["resumed"][0]
        assert int(step) >= last, "no step that was over is lost"
        # Before the first step is over there is nothing to go back to.
        assert source == ("memory" if int(step) else "fresh")
        assert exact == "True"
        assert said["status"] == [["-9" if hit else "0"]], said["errors"]
        found = steps_of(said)
        assert found.items() <= wanted.items(), (kills, number)
        last = max(map(int, found), default=int(step))
        if not hit:
            assert said["torch"] == [["True"]]
            assert last == STEPS


def test_a_trainer_that_is_killed_for_good_loses_no_step(run_folder: Path) -> None:
    check_kills(run_folder, [9])


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(6))
def test_killed_at_random(run_folder: Path, round_: int) -> None:
    draw = random.Random(SEED + round_)
    kills = [draw.randrange(1, 9) for _ in range(3)]
    print(f"seed {SEED + round_}: {kills}")
    check_kills(run_folder, kills)


@pytest.mark.parametrize(
    "place", ["replica.before_apply", pytest.param("replica.after_apply", marks=pytest.mark.slow)]
)
def test_a_keeper_that_is_killed_while_it_applies_is_replaced(run_folder: Path, place: str) -> None:
    said = train(run_folder, 1, failing=f"{place}=kill:2")
    assert said["status"] == [["0"]], said["errors"]
    assert steps_of(said) == uninterrupted()
    assert said["restarts"] == [["1"]]
    world = World(seed=9)
    keeper = everstep.KeeperOptions(process=False)
    with opened(run_folder, world, method="lazy", keeper=keeper) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.source, recovery.exact) == (STEPS, "disk", True)
        assert digest(world) == uninterrupted()[str(STEPS)]


def test_without_a_replica_the_keeper_does_not_load_torch(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world, method="logged") as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        maps = Path(f"/proc/{inspect(ckpt).keeper.pid}/maps").read_text()
        assert "libtorch" not in maps
