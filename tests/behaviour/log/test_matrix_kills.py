"""The exactness matrix, end to end: trainings with a log are killed, resumed, and trained on;
every bit of every entry is that of a training that nobody disturbed (I8, I9)."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.testing import inspect
from tests.conftest import SEED
from tests.support.keepers import end_keepers
from tests.support.log.late import opened
from tests.support.matrix import CASES, LOOPS, MOMENTS, STEPS, Case, Loop, Said, World, workers
from tests.support.serving import Bench, die, serving

Runner = Callable[..., tuple[int, Said]]


def draws(*parts: str) -> random.Random:
    """The same for the same parts, in every process."""
    return random.Random(f"{SEED} {' '.join(parts)}")


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def states_of(case: Case, loop: Loop) -> list[dict[str, str]]:
    """After each step of a training that nobody disturbs."""
    world = World(case, loop)
    found: list[dict[str, str]] = [{}]
    for _ in range(STEPS):
        world.train()
        found.append(world.snapshot())
    return found


def differing(found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    return sorted(n for n in {*found, *wanted} if found.get(n) != wanted.get(n))


@pytest.mark.thinned(9)
@pytest.mark.parametrize("zeroed", ["", " zeroed"])
@pytest.mark.parametrize("name", CASES)
def test_every_row_in_a_training_with_every_trap(name: str, zeroed: str, served: Bench) -> None:
    """The trainer's end is simulated here: its keeper sees no difference.

    Gradients that are zeroed in place update what is frozen, too; so will they behind the kill.
    """
    case, loop = CASES[name], LOOPS[f"all{zeroed}"]
    wanted = states_of(case, loop)
    last = draws(name + zeroed).randint(2, STEPS - 1)
    world = World(case, loop)
    ckpt = opened(served.run, world)
    ckpt.resume()
    for _ in range(last):
        world.train()
        ckpt.step()
    inspect(ckpt).saver.finish_captures()
    world.train()  # the step in flight
    die(ckpt)
    other = World(case, loop, seed=9)
    ckpt = opened(served.run, other)
    recovery = ckpt.resume()
    assert differing(other.snapshot(), wanted[last]) == []
    assert (recovery.step, recovery.exact) == (last, True), recovery
    assert recovery.replayed == last - (recovery.base_step or 0)
    for step in range(last + 1, STEPS + 1):
        other.train()
        ckpt.step()
        assert differing(other.snapshot(), wanted[step]) == [], step
    ckpt.close()


# --- Real processes, really killed ------------------------------------------------------


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with workers(tmp_path_factory.mktemp("matrix") / "errors") as run:
        yield run


@pytest.fixture(autouse=True)
def no_keeper_stays(tmp_path: Path) -> Iterator[None]:
    yield
    end_keepers(tmp_path)


def killed(run: Path, runner: Runner, loop: str, case: str | None, times: int) -> None:
    """Kills a training, once or several times in a row, at random moments; and then lets it end.

    Every state, after each step and right after each resume, is that of an undisturbed training.
    """
    job = {"case": case, "loop": loop}
    status, said = runner(**job, seed=1)
    assert (status, len(said)) == (0, STEPS)
    wanted = {line["step"]: line["parts"] for line in said}
    rng = draws(str(case), loop)
    steps = sorted(rng.sample(range(3, STEPS + 1, 2), times))
    kills = [(rng.choice(MOMENTS), step, rng.randrange(len(CASES))) for step in steps]
    print(f"seed {SEED}, killed at {kills}")
    reached = 0
    for number, kill in enumerate([*kills, None]):
        status, said = runner(**job, run=str(run), seed=1 + number, kill=kill)
        assert status == (0 if kill is None else -signal.SIGKILL)
        first, *lines = said
        if reached:
            # Steps that were over are never lost; what is in flight may be there all the same.
            assert first["resumed"] in (reached, reached + 1), (first["skipped"], first)
            assert differing(first["parts"], wanted[first["resumed"]]) == []
            assert first["exact"], first["evidence"]
        for line in lines:
            assert differing(line["parts"], wanted[line["step"]]) == [], line["step"]
        reached = max([first["resumed"], *(line["step"] for line in lines)])
    assert reached == STEPS


QUICK = "AdamW-fused"


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c == QUICK else pytest.mark.slow) for c in CASES]
)
def test_every_row_is_killed(case: str, run_folder: Path, runner: Runner) -> None:
    """With every trap in its training."""
    killed(run_folder, runner, "all zeroed", case, 2 if case == QUICK else 1)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_all_rows_are_killed_together(loop: str, run_folder: Path, runner: Runner) -> None:
    """The cross product: every row with each trap alone, all rows in one training."""
    killed(run_folder, runner, loop, None, 3)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("log.before_rename", marks=pytest.mark.slow),
        pytest.param("log.before_marker", marks=pytest.mark.slow),
        "retain.before_segment",
    ],
)
def test_killed_while_the_log_on_disk_changes(point: str, run_folder: Path, runner: Runner) -> None:
    """Trainer and keeper at once: what is on disk is all that is left."""
    job = {"case": "AdamW-for-loop", "loop": "all"}
    _, said = runner(**job, seed=1)
    wanted = {line["step"]: line["parts"] for line in said}
    status, said = runner(**job, run=str(run_folder), seed=1, on_disk=point)
    assert status == -signal.SIGKILL
    status, said = runner(**job, run=str(run_folder), seed=2, on_disk="")
    assert status == 0
    first, *lines = said
    assert first["exact"], first["evidence"]
    assert first["resumed"] >= 1
    assert differing(first["parts"], wanted[first["resumed"]]) == []
    for line in lines:
        assert differing(line["parts"], wanted[line["step"]]) == [], line["step"]
    assert [first["resumed"], *(line["step"] for line in lines)][-1] == STEPS
