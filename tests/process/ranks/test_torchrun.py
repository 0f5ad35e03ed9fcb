"""Programs under ``torchrun --max-restarts``: killed, started again by torchrun, and trained to the
same bits as without a kill; docs/integrations/torchrun.md."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.keepers import end_keepers
from tests.support.ranks.launched import REPAIRED, WORLD, Kill, Launched, launch

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "torchrun_parallel.py"
PAGE = ROOT / "docs" / "integrations" / "torchrun.md"
STEPS = 160
KILLS = (
    Kill(30, (1,), keeper=True),
    Kill(110, (1,)),
    Kill(140, (0, 1), start=1),
)
SPREAD = {"ddp": "DDP", "fsdp2": "`fully_shard`", "zero": "`ZeroRedundancyOptimizer`"}
SPREAD["tensor_parallel"] = "`parallelize_module`"
BEGINS = r"rank {}, pid \d+: begins at step (\d+) \(\w+\)"


@pytest.fixture(autouse=True)
def no_keeper_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    end_keepers(tmp_path_factory.getbasetemp())


def changed() -> tuple[str, str]:
    """The script of the page before and after its diff."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    lines = [(line[:1], line[1:]) for line in diff.splitlines()]
    before, after = ("\n".join(text for sign, text in lines if sign != no) for no in "+-")
    return before, after


def test_the_diff_of_the_page_has_three_lines() -> None:
    before, after = (text.splitlines() for text in changed())
    assert len(set(after) - set(before)) == 3
    assert len(after) - len(before) == 2, "two are new, one is changed"


@pytest.mark.slow
def test_the_script_of_the_page_is_killed_and_ends_with_the_weights_of_the_plain_one(
    tmp_path: Path,
) -> None:
    found = []
    for name, script, kills in zip(
        ("plain", "killed"), changed(), ((), (Kill(50, (1,)),)), strict=True
    ):
        folder = tmp_path / name
        folder.mkdir()
        program = folder / "train.py"
        program.write_text(script)
        launched = launch(program, kills=kills, logs=folder / "logs", folder=folder)
        assert launched.status == 0, launched
        assert len(launched.stdout) == 1 + len(kills)
        found.append([torch.load(folder / f"weights-{rank}.pt") for rank in range(WORLD)])
    for plain, other in zip(*found, strict=True):
        assert plain.keys() == other.keys()
        assert all(torch.equal(plain[name], other[name]) for name in plain)


def begun(launched: Launched) -> list[int]:
    """The step at which all ranks began, for each start of them by torchrun."""
    assert launched.status == 0, launched
    starts = []
    for start in launched.stdout:
        lines = [re.fullmatch(BEGINS.format(rank), said[0]) for rank, said in enumerate(start)]
        assert all(lines), launched
        (step,) = {int(line[1]) for line in lines if line}
        starts.append(step)
    return starts


def weights(launched: Launched) -> str:
    """The digest that all ranks have printed at the end."""
    (digest,) = {said[-1].partition(": weights ")[2] for said in launched.stdout[-1]}
    return digest


def costs() -> dict[str, list[str]]:
    """The table of the page: steps that each kill costs, by the way a training is spread."""
    _, _, rest = PAGE.read_text().partition("\n| spread by |")
    rows = [line.strip("| ").split(" | ") for line in rest.split("\n\n")[0].splitlines()[2:]]
    return {name: cells for name, *cells in rows}


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREAD)
def test_the_example_comes_back_from_each_kill(tmp_path: Path, spread: str) -> None:
    found = []
    for name, kills in (("whole", ()), ("killed", KILLS)):
        folder = tmp_path / name
        arguments = spread, str(folder / "run"), str(STEPS)
        found.append(launch(EXAMPLE, *arguments, kills=kills, logs=folder / "logs"))
    whole, killed = found
    assert begun(whole) == [0]
    assert "everstep: --max-restarts" not in str(killed)
    # The lost keeper has caused no start.
    first, after_one, after_all = begun(killed)
    assert first == 0
    assert "the keeper (process " in "\n".join(killed.stderr[0][1])
    assert weights(killed) == weights(whole) != ""
    _, one, everyone = KILLS
    lost = [one.step - after_one, everyone.step - after_all]
    assert max(lost) <= 1, "the unfinished step"
    assert costs()[SPREAD[spread]] == [str(steps) for steps in (*lost, 0)]


MEETING = """
import os, sys
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # the backend "fake"
from everstep.seams.group import store_survives_restarts

store, rank, world = next(dist.rendezvous("env://"))
dist.init_process_group("fake", store=store, rank=rank, world_size=world)
print(store_survives_restarts(), store.check([f"left by {rank}"]))
store.set(f"left by {rank}", "")
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
if rank == 0:
    store.wait([f"end {start}"])  # it may serve the store
else:
    store.wait(["left by 0"])
    store.set(f"end {start}", "")
    sys.exit(start == "0")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "kept"), [("of rank 0", False), ("shared", True), ("static", True)]
)
def test_the_store_is_kept_where_everstep_says_so(tmp_path: Path, store: str, kept: bool) -> None:
    """If a new torch no longer keeps it, the test fails here, and the warning has to learn of it.

    Restarted ranks of gloo come back in a kept store only if each happens to write its address
    before any other rank looks for it.
    """
    program = tmp_path / "meeting.py"
    program.write_text(MEETING)
    env = {} if store == "shared" else REPAIRED
    options = ("--master-port", free_port()) if store == "static" else ("--standalone",)
    launched = launch(program, env=env, options=options, logs=tmp_path / "logs")
    assert launched.status == 0, launched
    assert launched.stdout == [[[f"{kept} False"]] * WORLD, [[f"{kept} {kept}"]] * WORLD], launched


def free_port() -> str:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
