"""Copies in the memory of another node, with real processes: nodes are emulated, each a folder and
a group of processes on this machine, which are killed together."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.link.registry import kill_keeper
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from tests.support.keepers import end_keepers
from tests.support.ranks.nodes import WORLD, Nodes, check, lines_of
from tests.support.ranks.tier_processes import wait_for
from tests.support.trainers import finish_trainer
from tests.support.world import TIMEOUT_S


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    end_keepers(tmp_path)


def until_copied(nodes: Nodes, step: int) -> None:
    """Each keeper holds the other rank's base of ``step``, and no other."""
    deadline_s, pause = time.monotonic() + TIMEOUT_S, threading.Event()
    wanted = {0: ((1, step),), 1: ((0, step),)}
    while nodes.copies() != wanted:
        assert time.monotonic() < deadline_s, nodes.copies()
        pause.wait(0.2)


def killed_at_5(nodes: Nodes) -> None:
    """All trainers are killed behind step 5; base 4 is in the memory of both peers."""
    ranks = nodes.start("{rank} 5")
    until_copied(nodes, 4)
    for rank, one in enumerate(ranks):
        one.kill()
        status, _, err = finish_trainer(one, TIMEOUT_S)
        assert status == -signal.SIGKILL
        assert ("EMULATED" in err) == (rank == 0), "one rank speaks for all"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    """Digests of each rank, by step, of a training that nobody disturbed."""
    alone = Nodes(tmp_path_factory.mktemp("undisturbed"), method="sync", peers=False)
    said = [lines_of(one) for one in alone.start()]
    return [{one["step"]: one["digest"] for one in lines if "step" in one} for lines in said]


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
def test_both_keepers_gone_leaves_the_disks(nodes: Nodes, expected: list[dict[int, str]]) -> None:
    killed_at_5(nodes)
    for info in nodes.keepers().values():
        kill_keeper(info)
    check([lines_of(one) for one in nodes.start()], expected, 4, "disk", "disk")


@pytest.mark.slow
def test_a_node_is_lost_again_after_its_state_came_from_its_peer(
    nodes: Nodes, expected: list[dict[int, str]]
) -> None:
    """What was lost with the node is in its peer's memory again, and the ring is whole again."""
    killed_at_5(nodes)
    nodes.lose(1)
    ranks = nodes.start("{rank} 6")
    until_copied(nodes, 6)
    for one in ranks:
        one.kill()
        finish_trainer(one, TIMEOUT_S)
    nodes.lose(0)
    check([lines_of(one) for one in nodes.start()], expected, 6, "peer", "memory")


@pytest.mark.slow
def test_who_ends_because_a_node_is_lost_leaves_what_it_held_for_it(
    nodes: Nodes, expected: list[dict[int, str]]
) -> None:
    """Its next collective raises, nobody catches that, and Python ends as it does."""
    ranks = nodes.start("{rank} 5")
    until_copied(nodes, 4)
    ranks[0].kill()
    finish_trainer(ranks[0], TIMEOUT_S)
    nodes.lose(0)
    os.kill(ranks[1].pid, signal.SIGUSR1)
    status, _, err = finish_trainer(ranks[1], TIMEOUT_S)
    assert status == 1
    assert "the other rank is gone" in err
    check([lines_of(one) for one in nodes.start()], expected, 4, "peer", "memory")


@pytest.mark.slow
@pytest.mark.parametrize("node", range(WORLD))
def test_what_a_slow_peer_holds_is_what_the_disks_keep(nodes: Nodes, node: int) -> None:
    """Two newer bases are durable everywhere by the time that the next one is half way to the
    peers: a lost node still has its part of one that the other has, too."""
    # Some ten seconds for a base.
    nodes.options.update({"width": 8000, "bytes_per_s": 400_000, "keep": 2})
    ranks = nodes.start("{rank} 7", peered="3")
    wait_for(lambda: on_disk(nodes) >= {4, 6}, "the bases of steps 4 and 6")
    wait_for(lambda: nodes.copies() == {0: ((1, 2),), 1: ((0, 2),)}, "copies of that of step 2")
    threading.Event().wait(1.0)  # nothing more is deleted
    digests = []
    for one in ranks:
        one.kill()
        said = [json.loads(line) for line in finish_trainer(one, TIMEOUT_S)[1].splitlines()]
        digests.append(next(line["digest"] for line in said if line.get("step") == 2))
    assert nodes.copies() == {0: ((1, 2),), 1: ((0, 2),)}, "it was not slow"
    assert on_disk(nodes) == {2, 4, 6}
    nodes.lose(node)
    for rank, one in enumerate(nodes.start()):
        first = lines_of(one)[0]
        assert (first["resumed"], first["digest"], first["exact"]) == (2, digests[rank], True)
        assert "the files of rank" in first["skipped"]


def on_disk(nodes: Nodes) -> set[int]:
    """Steps of bases that both disks have."""
    found = [scan_run(PosixFileSystem(), nodes.run_of(node)).bases for node in range(WORLD)]
    steps = [{base.id.step for base in one if base.status == "committed"} for one in found]
    return set.intersection(*steps)
