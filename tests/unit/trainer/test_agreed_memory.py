"""Several ranks resume from the memory of their keepers only where all of them can."""

from __future__ import annotations

from typing import Any, cast

import pytest

from everstep.commit import BaseId
from everstep.trainer.job import memory


def message(replica: Any, held: Any) -> dict[str, Any]:
    return {"replica": replica, "held": held, "shared": False}


@pytest.mark.parametrize(
    ("found", "agreed"),
    [
        ([message([1, 6, 7], None), message([1, 5, 7], None)], BaseId(1, 7)),
        ([message([1, 6, 7], [1, 6]), message([1, 5, 7], [1, 5])], BaseId(1, 7)),
        # A later base that only memory has, if on one rank only.
        ([message([1, 6, 7], None), message([1, 5, 7], [1, 20])], None),
        ([message([1, 6, 7], None), message(None, None)], None),
    ],
)
def test_the_step_at_which_replicas_are_frozen(
    found: list[dict[str, Any]], agreed: BaseId | None
) -> None:
    assert memory._agreed(found) == agreed


@pytest.mark.parametrize("other", [None, [1, 6], [2, 7]])
def test_replicas_that_are_not_all_of_that_step_are_not_used(other: Any) -> None:
    class Frozen:
        id = BaseId(1, 7)

    class Keeper:
        def freeze_replica(self, step: int) -> Any:
            assert step == 7
            return Frozen()

    def exchange(purpose: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [mine, {"held": other}]

    request = cast("Any", object())
    found = [message([1, 6, 7], None), message([1, 5, 7], None)]
    assert (
        memory.with_memory(request, cast("Any", Keeper()), exchange, found, "run", 0, [0, 1])
        is request
    )
