"""Bases over several steps with a keeper process of its own: trainer and keeper are killed for
good, at every point of a window."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.following import steps_on_disk
from tests.support.log.every_step import World
from tests.support.trainers import run_trainer, whole_lines

STEPS = 10

TRAIN = """
import hashlib, os, signal, sys
import everstep
from everstep.testing import inspect
from tests.support.log.every_step import World

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
    if step + 1 == 5 and found.step < 5:  # its first base is with the keeper, whatever comes now
        inspect(ckpt).multistep.last.staged.exception(60)
    if step + 1 == 5 and sys.argv[6]:  # a base has ended here, and its keeper dies of it
        error = inspect(ckpt).multistep.last.durable.exception(60)
        print("lost", type(error).__name__, flush=True)
    elif step + 1 == 6 and sys.argv[6] == "window":
        assert inspect(ckpt).multistep.window
        os.kill(inspect(ckpt).keeper.pid, signal.SIGKILL)
        inspect(ckpt).keeper._reader.join(60)
        print("lost", type(inspect(ckpt).keeper.lost).__name__, flush=True)
ckpt.close()
print("restarts", ckpt.stats().keeper_restarts, flush=True)
"""

Said = dict[str, list[list[str]]]


def train(
    run: Path,
    seed: int,
    *,
    overlap: bool,
    failing: str = "",
    rebuild: str = "keeper",
    loses: str = "",
) -> Said:
    """Trains in a process of its own; what it said, by its first word.

    Args:
        loses: it waits until it has heard what became of its first base (``"base"``), and, if
            that has not killed its keeper, kills it in the window behind it (``"window"``): when
            it hears of that decides at which step the next base begins.
    """
    arguments = (str(run), str(STEPS), str(seed), str(overlap), rebuild, loses)
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
    check_lost_keeper(run_folder, failing=f"{place}=kill:1", rebuild="recovery")


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    ["rebuild.before=kill:1", "rebuild.after=kill:1", "keeper.before_persist=kill:1"],
)
def test_a_keeper_that_is_killed_is_replaced_and_a_base_taken(run_folder: Path, place: str) -> None:
    check_lost_keeper(run_folder, failing=place)


@pytest.mark.slow
@pytest.mark.parametrize("rebuild", ["keeper", "recovery"])
def test_a_keeper_that_is_killed_within_a_window(run_folder: Path, rebuild: str) -> None:
    """The base of steps 6 to 8 is gone with it; another begins at once, and ends where one is due
    (step 9): it is the newest, as none is due behind it."""
    check_lost_keeper(run_folder, rebuild=rebuild, loses="window", bases=[5, 9])


def check_lost_keeper(
    run: Path,
    *,
    failing: str = "",
    rebuild: str = "keeper",
    loses: str = "base",
    bases: Sequence[int] = (8, 10),
) -> None:
    """Without the base that was lost with it, of step 5, there are those of steps 8 and 10: one is
    due at step 6, and at 9 the next, which ends with training."""
    about: dict[str, Any] = {"overlap": True, "rebuild": rebuild}
    said = train(run, 1, failing=failing, loses=loses, **about)
    assert said["status"] == [["0"]], said["errors"]
    assert said["lost"][-1] == ["KeeperError"]
    assert len(said["lost"]) == (2 if loses == "window" else 1)
    assert dict(said["step"]) == uninterrupted()
    assert said["restarts"] == [["1"]]
    assert steps_on_disk(run) == list(bases)
    check_end(run, at={str(bases[-1])}, **about)
