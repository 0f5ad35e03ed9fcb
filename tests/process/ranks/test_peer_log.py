"""The log in the memory of another node, with real processes: nodes are emulated, each a folder
and a group of processes on this machine, which are killed together."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.keepers import end_keepers
from tests.support.ranks.nodes import STEPS, WORLD, Nodes, check, lines_of
from tests.support.trainers import Trainer, finish_trainer
from tests.support.world import TIMEOUT_S

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Bases at the first step of a start, and every fourth."""
    made = Nodes(tmp_path, method="logged", every=4)
    yield made
    end_keepers(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    """Digests of each rank, by step, of a training that nobody disturbed."""
    alone = Nodes(tmp_path_factory.mktemp("undisturbed"), method="sync", peers=False)
    said = [lines_of(one) for one in alone.start()]
    return [{one["step"]: one["digest"] for one in lines if "step" in one} for lines in said]


def until_held(nodes: Nodes, base: int, step: int) -> None:
    """Each keeper holds the other rank's base, and its log up to a step."""
    deadline_s, pause = time.monotonic() + TIMEOUT_S, threading.Event()
    wanted = {node: (((1 - node, base),), ((1 - node, step),)) for node in range(WORLD)}
    while (found := held(nodes)) != wanted:
        assert time.monotonic() < deadline_s, found
        pause.wait(0.2)


def held(nodes: Nodes) -> dict[int, Any]:
    return {node: (one.copies, one.logs) for node, one in nodes.statuses().items()}


def kill(ranks: list[Trainer]) -> None:
    for rank, one in enumerate(ranks):
        one.kill()
        status, _, err = finish_trainer(one, TIMEOUT_S)
        assert status == -signal.SIGKILL
        said = "EMULATED" in err, "for their logs" in err
        assert said == (rank == 0,) * 2, "one rank speaks for all"


@pytest.mark.parametrize("node", range(WORLD))
def test_a_lost_node_costs_no_step_that_its_peer_had_heard_of(
    nodes: Nodes, expected: list[dict[int, str]], node: int
) -> None:
    ranks = nodes.start("{rank} 7")
    until_held(nodes, 4, 7)
    kill(ranks)
    nodes.lose(node)
    said = [lines_of(one) for one in nodes.start()]
    sources = ["memory", "memory"]
    sources[node] = "peer"
    check(said, expected, 7, *sources)
    # The lost node's memory and disk are gone: only its peer has the steps after the base.
    assert [lines[0]["base"] for lines in said] == [4, 4]


@pytest.mark.parametrize("node", range(WORLD))
def test_a_node_that_is_gone_in_mid_training_costs_what_its_peer_had_not_heard_of(
    nodes: Nodes, expected: list[dict[int, str]], node: int
) -> None:
    """Its keeper and its trainer end at once, with what was on its way, and the disk with them."""
    ranks = nodes.start(vanishes=f"{node} 6")
    status, out, err = finish_trainer(ranks[node], TIMEOUT_S)
    assert status == -signal.SIGKILL, err
    last = json.loads(out.splitlines()[-1])
    other = ranks[1 - node]
    other.kill()  # it waits for the other, or has ended by that
    finish_trainer(other, TIMEOUT_S)
    shutil.rmtree(nodes.run_of(node).parent)
    said = [lines_of(one) for one in nodes.start()]
    step = said[0][0]["resumed"]
    assert last["step"] == 6
    assert max(last["held"] or 0, 1) <= step <= 6, "no less than it was told that the peer holds"
    for lines, wanted in zip(said, expected, strict=True):
        assert (lines[0]["resumed"], lines[0]["exact"]) == (step, True)
        assert lines[0]["digest"] == wanted[step]
        found = {one["step"]: one["digest"] for one in lines if "step" in one}
        assert found == {at: wanted[at] for at in range(step + 1, STEPS + 1)}
    if step < 6:
        assert f"the log of rank {node} ends before" in said[0][0]["skipped"]


@pytest.mark.parametrize("node", range(WORLD))
def test_compressed_gradients_and_residuals_come_from_the_peer_too(
    nodes: Nodes, tmp_path: Path, node: int
) -> None:
    (tmp_path / "undisturbed").mkdir()
    alone = Nodes(tmp_path / "undisturbed", method="sync", peers=False, exchange=True)
    said = [lines_of(one) for one in alone.start()]
    expected = [{one["step"]: one["digest"] for one in lines if "step" in one} for lines in said]
    nodes.options |= {"method": "lowdiff", "exchange": True}
    ranks = nodes.start("{rank} 7")
    until_held(nodes, 4, 7)
    kill(ranks)
    nodes.lose(node)
    sources = ["memory", "memory"]
    sources[node] = "peer"
    check([lines_of(one) for one in nodes.start()], expected, 7, *sources)
