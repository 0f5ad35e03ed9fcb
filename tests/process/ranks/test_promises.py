"""A promise that a node may die: its steps are in the memory of the other one before training goes
on. Nodes are emulated (:mod:`tests.support.ranks.nodes`)."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.keepers import end_keepers
from tests.support.ranks.nodes import WORLD, Nodes, lines_of
from tests.support.trainers import finish_trainer
from tests.support.world import TIMEOUT_S

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("node", range(WORLD))
@pytest.mark.parametrize(("most", "method"), [(1, None), (3, None), (4, "lazy")])
def test_a_node_is_gone(most: int, method: str | None, node: int, tmp_path: Path) -> None:
    """Its keeper and its trainer end at once, and the disk with them."""
    promise = {"lose_at_most": f"{most} steps", "even_if": "node"}
    nodes = Nodes(tmp_path, method=method, every=4, **promise)
    ranks = nodes.start(vanishes=f"{node} 6")
    status, out, err = finish_trainer(ranks[node], TIMEOUT_S)
    assert status == -signal.SIGKILL, err
    assert "promised: at most" in err or node != 0
    ranks[1 - node].kill()
    _, others_out, _ = finish_trainer(ranks[1 - node], TIMEOUT_S)
    shutil.rmtree(nodes.run_of(node).parent)
    said = [lines_of(one) for one in nodes.start()]
    step = said[0][0]["resumed"]
    assert 6 - (most - 1) <= step <= 6
    for rank, text in ((node, out), (1 - node, others_out)):
        known = {
            one["step"]: one["digest"]
            for one in map(json.loads, text.splitlines())
            if "step" in one
        }
        first = said[rank][0]
        assert (first["resumed"], first["exact"]) == (step, True)
        assert known.get(step, first["digest"]) == first["digest"]
    end_keepers(tmp_path)
