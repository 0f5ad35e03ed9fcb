"""The keeper process with real trainers: kills on both sides at every named point, takeovers,
forks, restores from memory. Each state is compared bit for bit with that of an uninterrupted
run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from everstep.link.registry import list_keepers
from everstep.seams import failpoints
from tests.support.keeper_process import TRAIN, finish, keepers_gone, start

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("no_keeper_stays")


RESUME = """
ckpt = everstep.Checkpointer(run, state, every=None)
report(ckpt.resume())
ckpt.close()
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Digest of the state after each step of a run that nobody disturbs."""
    run = tmp_path_factory.mktemp("whole") / "run"
    status, said, err = finish(start(run, TRAIN, json.dumps({"method": "lazy", "every": 4})))
    assert status == 0, err
    assert said[-1]["durable"] == 12
    keepers_gone()
    return {line["at"]: line["digest"] for line in said if "at" in line}


def resumed(run: Path, uninterrupted: dict[int, str]) -> dict[str, Any]:
    status, said, err = finish(start(run, RESUME))
    assert status == 0, err
    (recovery,) = said
    if recovery["step"]:
        assert recovery["digest"] == uninterrupted[recovery["step"]], "another state came back"
        assert recovery["exact"]
    return recovery


METHODS = ["lazy", "checkfreq", "async"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_the_same_run(
    method: str, run_folder: Path, uninterrupted: dict[int, str]
) -> None:
    options = json.dumps({"method": method, "every": 4})
    status, said, err = finish(start(run_folder, TRAIN, options))
    assert status == 0, err
    assert {line["at"]: line["digest"] for line in said if "at" in line} == uninterrupted
    assert said[-1]["durable"] == 12
    keepers_gone()
    recovery = resumed(run_folder, uninterrupted)
    assert (recovery["step"], recovery["source"]) == (12, "disk")


KILLS = {
    # where: (newest step that must be back, source) after the second save (step 8) is killed at
    "capture.before_mark": (4, "memory"),
    "capture.before_captured": (4, "memory"),
    "capture.after_captured": (8, "memory"),
}


@pytest.mark.parametrize("point", KILLS)
def test_the_trainer_is_killed(point: str, run_folder: Path, uninterrupted: dict[int, str]) -> None:
    """What had been captured whole is back, from the memory of the keeper."""
    options = json.dumps({"method": "lazy", "every": 4})
    process = start(run_folder, TRAIN, options, EVERSTEP_FAILPOINTS=f"{point}=kill:2")
    status, _, err = finish(process)
    assert status == -signal.SIGKILL, err
    assert len(list_keepers()) == 1, "the keeper outlives the trainer"
    recovery = resumed(run_folder, uninterrupted)
    assert (recovery["step"], recovery["source"]) == KILLS[point]
    keepers_gone()


KEEPER_POINTS = [
    "keeper.after_begin",
    "keeper.before_persist",
    "keeper.after_captured",
    "save.before_write",
    "save.before_header",
    "save.before_rename",
    "save.before_marker",
    "save.before_manifest",
    "save.after_manifest",
    "retain.after_condemn",
    "retain.before_unlink",
]


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(
            p,
            marks=()
            if p in ("keeper.before_persist", "save.before_manifest")
            else pytest.mark.slow,
        )
        for p in KEEPER_POINTS
    ],
)
@pytest.mark.thinned(2)
def test_the_keeper_is_killed(point: str, run_folder: Path, uninterrupted: dict[int, str]) -> None:
    """Training goes on, a new keeper is started, a new base taken."""
    options = json.dumps({"method": "lazy", "every": 2, "keep": 1})
    process = start(run_folder, TRAIN, options, EVERSTEP_FAILPOINTS=f"{point}=kill:2")
    status, said, err = finish(process)
    assert status == 0, err
    assert {line["at"]: line["digest"] for line in said if "at" in line} == uninterrupted
    assert said[-1]["restarts"] == 1, said[-1]
    assert "is gone" in err
    assert said[-1]["durable"] == 12
    keepers_gone()
    assert resumed(run_folder, uninterrupted)["step"] == 12


BOTH = """
from everstep.testing import inspect

options = json.loads(sys.argv[2])
ckpt = everstep.Checkpointer(run, state, on_failure="warn", **options)
ckpt.resume()
for step in range(1, 9):
    train_step()
    ckpt.step()
    if step == 4:
        ckpt.wait()
inspect(ckpt).keeper._reader.join(30)  # ends with the keeper
os.kill(os.getpid(), signal.SIGKILL)
"""


def both_killed(point: str) -> tuple[int, str]:
    """What is back; with its marker there, a base is rolled forward."""
    committed = point in ("save.before_manifest", "save.after_manifest")
    committed = committed or point.startswith("retain.")
    return (8 if committed else 4, "disk")


def test_the_table_in_the_documents_says_the_same() -> None:
    text = (ROOT / "docs" / "FAULTS.md").read_text()
    table = text.split("## Killed at each named point")[1].split("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in table.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row] for row in rows]
    said = {row[0].strip("`"): row[1:] for row in cells}
    whole = {
        **{point: f"trainer {step}, from {source}" for point, (step, source) in KILLS.items()},
        **{p: "both {}, from {}".format(*both_killed(p)) for p in KEEPER_POINTS},
    }
    assert list(said) == [*KILLS, *KEEPER_POINTS]
    for point, (meaning, *backs) in said.items():
        assert meaning in failpoints.FAILPOINTS[point]
        who, back = ("trainer", backs[0]) if backs[0] else ("both", backs[-1])
        assert f"{who} {back.removeprefix('step ')}" == whole[point], point


@pytest.mark.parametrize(
    "point",
    ["keeper.before_persist", *(pytest.param(p, marks=pytest.mark.slow) for p in KEEPER_POINTS)],
)
def test_both_are_killed(point: str, run_folder: Path, uninterrupted: dict[int, str]) -> None:
    """The disk has the base before, or the one that was committed."""
    hit = 1 if point.startswith("retain") else 2
    options = json.dumps({"method": "lazy", "every": 4, "keep": 1})
    process = start(run_folder, BOTH, options, EVERSTEP_FAILPOINTS=f"{point}=kill:{hit}")
    status, _, err = finish(process)
    assert status == -signal.SIGKILL, err
    keepers_gone()  # the last of a dying process is behind the end of its connection
    recovery = resumed(run_folder, uninterrupted)
    assert (recovery["step"], recovery["source"]) == both_killed(point)
