"""Replicas of several ranks are frozen at one step, which each of them can reach."""

from __future__ import annotations

import pytest

from everstep.restore.fetch import ReplicaReach, common_step


@pytest.mark.parametrize(
    ("replicas", "step"),
    [
        ([ReplicaReach(1, 6, 7), ReplicaReach(1, 5, 7)], 7),
        ([ReplicaReach(1, 6, 7), ReplicaReach(1, 5, 6)], 6),
        # It cannot go back.
        ([ReplicaReach(1, 7, 7), ReplicaReach(1, 5, 6)], None),
        ([ReplicaReach(1, 6, 7), None], None),
        ([ReplicaReach(1, 6, 7), ReplicaReach(2, 6, 7)], None),
    ],
)
def test_the_newest_step_that_all_reach(
    replicas: list[ReplicaReach | None], step: int | None
) -> None:
    assert common_step(replicas) == step
