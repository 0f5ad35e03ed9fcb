"""torchtitan's checkpoint component, which calls ``torch.distributed.checkpoint``.

torchtitan has many requirements, and holds some of them to old releases. Its checkpoint component
needs ``pip install --no-deps torchtitan tyro docstring_parser``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import everstep
from tests.frameworks.kills import train

pytestmark = pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs torchtitan")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_two_ranks_are_killed(mode: str, tmp_path: Path) -> None:
    whole = train("titan_checkpoint", tmp_path / "whole", env={"MODE": mode}, ranks=2)
    killed = train("titan_checkpoint", tmp_path / "killed", (5, 8), {"MODE": mode}, ranks=2)
    steps = [one["step"] for one in killed.recoveries]
    assert steps == [0, 4, 8] or (mode == "async" and steps[0] == 0 and all(steps[1:]))
    assert killed.steps == whole.steps
    assert killed.final == whole.final
    folder = tmp_path / "killed" / "run" / "checkpoint"
    kept = {one.name for one in folder.iterdir()}
    assert kept >= {"step-10", "step-11"}
    assert not kept & {"step-2", "step-4"}
    assert everstep.load(folder / "step-11").step == 11
