"""Bases over several steps with a keeper process of its own: trainer and keeper are killed for
good, at every point of a window."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.trainers import run_trainer, whole_lines
from tests.unit.test_log import World

STEPS = 10

TRAIN = """
import hashlib, os, sys
import everstep
from tests.unit.test_log import World

run, steps = sys.argv[1], int(sys.argv[2])
world = World(seed=int(sys.argv[3]))
method = everstep.Method(
    base="multistep", parts=3, overlap_forward=sys.argv[4] == "True", rebuild=sys.argv[5]
)
ckpt = everstep.Checkpointer(run, world.state, method=method, every=3, keep=50)
found = ckpt.resume()
os.environ.pop("EVERSTEP_FAILPOINTS", None)  # keepers that are started later live on
def digest():
    return hashlib.sha256(repr(sorted(world.snapshot().items())).encode()).hexdigest()
print("resumed", found.step, found.source, found.exact, digest(), flush=True)
for step in range(found.step, steps):
    world.train()
    ckpt.step()
    print("step", step + 1, digest(), flush=True)
ckpt.close()
print("restarts", ckpt.stats().keeper_restarts, flush=True)
"""

Said = dict[str, list[list[str]]]


def train(
    run: Path, seed: int, *, overlap: bool, failing: str = "", rebuild: str = "keeper"
) -> Said:
    """Trains in a process of its own; what it said, by its first word."""
    arguments = (str(run), str(STEPS), str(seed), str(overlap), rebuild)
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
        state = sorted(world.snapshot().items())
        found[str(step)] = hashlib.sha256(repr(state).encode()).hexdigest()
    return found


def check_end(run: Path, *, overlap: bool, at: set[str], rebuild: str = "keeper") -> None:
    """A new process goes on from where the run is, and ends where training would have."""
    said, wanted = train(run, 9, overlap=overlap, rebuild=rebuild), uninterrupted()
    assert said["status"] == [["0"]], said["errors"]
    step, _, exact, digest = said["resumed"][0]
    assert step in at
    assert exact == "True"
    if step != "0":
        assert digest == wanted[step]
        assert dict(said.get("step", [])).items() <= wanted.items()


@pytest.mark.parametrize(
    ("place", "at"),
    [
        pytest.param("window.after_part=kill:2", {"0"}, marks=pytest.mark.slow),
        pytest.param("window.after_part=kill:3", {"5"}, marks=pytest.mark.slow),
        ("window.before_assemble=kill:2", {"5"}),
        pytest.param("window.after_assemble=kill:2", {"8"}, marks=pytest.mark.slow),
        pytest.param("capture.before_mark=kill:2", {"5"}, marks=pytest.mark.slow),
        pytest.param("capture.after_captured=kill:1", {"5"}, marks=pytest.mark.slow),
    ],
)
def test_a_trainer_that_is_killed_in_a_window(run_folder: Path, place: str, at: set[str]) -> None:
    """Bases of steps 5 and 8; the state is that of the newest whole one."""
    said = train(run_folder, 1, overlap=False, failing=place)
    assert said["status"] == [["-9"]], said["errors"]
    assert dict(said["step"]).items() <= uninterrupted().items()
    check_end(run_folder, overlap=False, at=at)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "at"),
    [
        ("window.after_part=kill:3", {"5"}),
        ("window.before_assemble=kill:2", {"5"}),
        ("window.after_assemble=kill:2", {"8"}),
        ("capture.after_captured=kill:1", {"5"}),
    ],
)
def test_a_trainer_that_is_killed_where_recovery_makes_it_whole(
    run_folder: Path, place: str, at: set[str]
) -> None:
    said = train(run_folder, 1, overlap=True, failing=place, rebuild="recovery")
    assert said["status"] == [["-9"]], said["errors"]
    assert dict(said["step"]).items() <= uninterrupted().items()
    check_end(run_folder, overlap=True, at=at, rebuild="recovery")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["rebuild.before", "rebuild.after", "save.before_marker"])
def test_a_keeper_that_is_killed_where_recovery_makes_it_whole(
    run_folder: Path, place: str
) -> None:
    said = train(run_folder, 1, overlap=True, failing=f"{place}=kill:1", rebuild="recovery")
    assert said["status"] == [["0"]], said["errors"]
    assert dict(said["step"]) == uninterrupted()
    assert said["restarts"] == [["1"]]
    check_end(run_folder, overlap=True, at={str(STEPS)}, rebuild="recovery")


@pytest.mark.parametrize(
    "place",
    [
        "rebuild.before=kill:1",
        pytest.param("rebuild.after=kill:1", marks=pytest.mark.slow),
        pytest.param("keeper.before_persist=kill:1", marks=pytest.mark.slow),
    ],
)
def test_a_keeper_that_is_killed_is_replaced_and_a_base_taken(run_folder: Path, place: str) -> None:
    said = train(run_folder, 1, overlap=True, failing=place)
    assert said["status"] == [["0"]], said["errors"]
    assert dict(said["step"]) == uninterrupted()
    assert said["restarts"] == [["1"]]
    check_end(run_folder, overlap=True, at={str(STEPS)})
