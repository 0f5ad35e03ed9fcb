"""Bases that live in memory, with real processes: nodes are emulated, and killed with all that is
on them. None of these bases is on a disk, so what comes back comes from memory."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.link.registry import list_keepers
from everstep.run.scan import scan_run
from everstep.seams.posix import PosixFileSystem
from tests.support.keepers import end_keepers
from tests.support.ranks.nodes import STEPS, TRAINING, WORLD, Nodes, check, lines_of
from tests.support.trainers import Trainer, finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, method="gemini")
    yield made
    end_keepers(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    """Digests of each rank, by step, of a training that nobody disturbed."""
    alone = Nodes(tmp_path_factory.mktemp("undisturbed"), method="sync", peers=False)
    said = [lines_of(one) for one in alone.start()]
    return [{one["step"]: one["digest"] for one in lines if "step" in one} for lines in said]


PLANNED = {"base": "scheduled", "tiers": ["memory", "peer", "disk"], "disk_every": 20}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own folders", "one folder", "another node is lost"])
def test_captures_of_every_step_live_in_memory(
    tmp_path: Path, expected: list[dict[int, str]], kind: str
) -> None:
    """By a plan, on several ranks: no step is lost, and none is on a disk."""
    folder, peers = OneFolder if kind == "one folder" else Nodes, kind == "another node is lost"
    made = folder(tmp_path, method=PLANNED, every=1, peers=peers)
    sources = ["peer" if kind == "one folder" else "memory"] * WORLD
    try:
        ranks = made.start("{rank} 5")
        for one in ranks:
            until_waiting(one)
        if peers:
            until_held(made, 5)
        for one in ranks:
            one.kill()
            finish_trainer(one, TIMEOUT_S)
        assert bases_on_disk(made, 0) == []
        if peers:
            made.lose(1)
            sources[1] = "peer"
        check([lines_of(one) for one in made.start()], expected, 5, *sources)
        # The one of the first step, and at the end the last one, which was in memory already.
        assert bases_on_disk(made, 0) == [6, STEPS]
        first = [lines_of(one)[0] for one in made.start()]
        assert [(one["resumed"], one["source"]) for one in first] == [(STEPS, "disk")] * WORLD
        assert [one["digest"] for one in first] == [steps[STEPS] for steps in expected]
    finally:
        end_keepers(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 4])
def test_ranks_that_are_killed_in_the_middle_of_it_agree_on_a_step(
    tmp_path: Path, expected: list[dict[int, str]], after: int
) -> None:
    """One of them may be a step ahead, and its capture whole; the newest is that of all."""
    made = Nodes(tmp_path, method=PLANNED, every=1, peers=False)
    try:
        ranks = made.start()
        assert any(json.loads(line).get("step") == after for line in ranks[0].stdout)
        for one in ranks:
            one.kill()
            finish_trainer(one, TIMEOUT_S)
        said = [lines_of(one) for one in made.start()]
        step = said[0][0]["resumed"]
        assert step >= after - 2
        check(said, expected, step, *(lines[0]["source"] for lines in said))
    finally:
        end_keepers(tmp_path)


def until_held(nodes: Nodes, step: int) -> None:
    """Each keeper holds both ranks' base of ``step``."""
    deadline_s, pause = time.monotonic() + TIMEOUT_S, threading.Event()
    wanted = dict.fromkeys(range(WORLD), ((0, step), (1, step)))
    while nodes.copies() != wanted:
        assert time.monotonic() < deadline_s, nodes.copies()
        pause.wait(0.2)


def until_waiting(one: Trainer) -> None:
    """It has no more to do, and all that it took is where it is to be."""
    assert any("waits" in line for line in one.stdout), finish_trainer(one, TIMEOUT_S)[2]


def bases_on_disk(nodes: Nodes, node: int) -> list[int]:
    inventory = scan_run(PosixFileSystem(), nodes.run_of(node))
    return sorted(base.id.step for base in inventory.bases)


def killed_at_5(nodes: Nodes) -> None:
    ranks = nodes.start("{rank} 5")
    until_held(nodes, 4)
    said = []
    for one in ranks:
        one.kill()
        status, _, err = finish_trainer(one, TIMEOUT_S)
        assert status == -signal.SIGKILL
        said.append("bases live in the memory of keepers" in err)
    assert said == [True, False]  # rank 0 speaks for all
    assert [bases_on_disk(nodes, node) for node in range(WORLD)] == [[], []]


@pytest.mark.slow
def test_killed_trainers_come_back_from_their_keepers(
    nodes: Nodes, expected: list[dict[int, str]]
) -> None:
    killed_at_5(nodes)
    check([lines_of(one) for one in nodes.start()], expected, 4, "memory", "memory")
    assert [bases_on_disk(nodes, node) for node in range(WORLD)] == [[5, STEPS], [5, STEPS]]


@pytest.mark.slow
@pytest.mark.parametrize("node", range(WORLD))
def test_a_lost_node_comes_back_from_the_memory_of_the_next(
    nodes: Nodes, expected: list[dict[int, str]], node: int
) -> None:
    killed_at_5(nodes)
    nodes.lose(node)
    sources = ["memory", "memory"]
    sources[node] = "peer"
    check([lines_of(one) for one in nodes.start()], expected, 4, *sources)


@pytest.mark.slow
def test_a_node_is_lost_again_after_its_state_came_from_its_peer(
    nodes: Nodes, expected: list[dict[int, str]]
) -> None:
    """What was restored from memory is on the disks one step later, and the ring is whole again."""
    killed_at_5(nodes)
    nodes.lose(1)
    ranks = nodes.start("{rank} 6")
    until_held(nodes, 6)
    for one in ranks:
        one.kill()
        finish_trainer(one, TIMEOUT_S)
    assert bases_on_disk(nodes, 0) == [5]
    nodes.lose(0)
    check([lines_of(one) for one in nodes.start()], expected, 6, "peer", "memory")


class OneFolder(Nodes):
    """What the ranks have in common each writes a part of."""

    def run_of(self, node: int) -> Path:
        return super().run_of(0)

    def keepers(self) -> dict[int, Any]:
        here = [info for info in list_keepers() if info.run == str(self.run_of(0))]
        return {info.rank: info for info in here}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "source"),
    [(Nodes, "memory"), (OneFolder, "peer")],
    ids=["own folders", "one folder"],
)
def test_without_another_node_it_survives_trainers_and_says_so(
    tmp_path: Path, expected: list[dict[int, str]], kind: type[Nodes], source: str
) -> None:
    made = kind(tmp_path, method="gemini", peers=False)
    try:
        ranks = made.start("{rank} 5")
        said = []
        for one in ranks:
            until_waiting(one)
            one.kill()
            said.append("NOT a lost node" in finish_trainer(one, TIMEOUT_S)[2])
        assert said == [True, False]  # rank 0 speaks for all
        check([lines_of(one) for one in made.start()], expected, 4, source, source)
    finally:
        end_keepers(tmp_path)


ALONE = (
    TRAINING.replace("dist.init_process_group", "0 and dist.init_process_group")
    .replace("torch.nn.parallel.DistributedDataParallel(model)", "model")
    .replace("torch.manual_seed(100 + rank)", "torch.manual_seed(100)")
)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gemini", PLANNED], ids=["lazy", "by a plan"])
def test_a_process_alone_comes_back_from_its_keeper(tmp_path: Path, method: Any) -> None:
    def start(folder: str, dies: str = "", **options: Any) -> Trainer:
        said = json.dumps({"peers": False, **options})
        return start_trainer(ALONE, str(tmp_path / folder), "0", "", "1", said, DIES=dies)

    quiet = lines_of(start("undisturbed", method="sync"))
    wanted = [{one["step"]: one["digest"] for one in quiet if "step" in one}]
    killed = start("run", dies="0 5", method=method)
    try:
        until_waiting(killed)
        killed.kill()
        assert "NOT a lost node" in finish_trainer(killed, TIMEOUT_S)[2]
        again = start("run", method=method)
        check([lines_of(again)], wanted, 4, "memory")
    finally:
        end_keepers(tmp_path)
    inventory = scan_run(PosixFileSystem(), tmp_path / "run")
    assert sorted(base.id.step for base in inventory.bases) == [5, STEPS]


@pytest.mark.slow
def test_one_process_comes_back_from_what_one_keeper_holds_of_both(
    nodes: Nodes, expected: list[dict[int, str]]
) -> None:
    """Two nodes were, one of them is left, and no base is on its disk."""
    killed_at_5(nodes)
    said = json.dumps({"peers": False, "method": "gemini"})
    alone = start_trainer(ALONE, str(nodes.run_of(0)), "0", "", "1", said)
    first, *_ = lines_of(alone)
    assert (first["resumed"], first["source"]) == (4, "memory")
    assert first["digest"] == expected[0][4]
