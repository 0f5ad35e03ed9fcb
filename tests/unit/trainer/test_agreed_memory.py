"""Several ranks resume from the memory of their keepers only where all of them can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from everstep.commit import BaseId
from everstep.trainer.job import memory


def message(replica: Any, held: Any, captures: Any = ()) -> dict[str, Any]:
    return {"replica": replica, "held": held, "captures": list(captures), "shared": False}


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
        marker = SimpleNamespace(exact=True)

    class Keeper:
        def hold_at(self, agreed: BaseId) -> Any:
            assert agreed == BaseId(1, 7)
            return Frozen()

    def exchange(purpose: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [mine, {"held": other}]

    request = cast("Any", object())
    found = [message([1, 6, 7], None), message([1, 5, 7], None)]
    assert (
        memory.with_memory(request, cast("Any", Keeper()), exchange, found, "run", 0, [0, 1])
        is request
    )


@pytest.mark.parametrize(
    ("captures", "agreed"),
    [
        ([[[1, 4], [1, 5], [1, 6]], [[1, 3], [1, 4], [1, 5]]], BaseId(1, 5)),
        # The capture of an earlier timeline, until all have one of this.
        ([[[1, 4], [2, 5]], [[1, 4]]], BaseId(1, 4)),
        ([[[1, 5], [1, 6]], [[1, 4]]], None),
        ([[[1, 4]], []], None),
        # Already the newest of all: nothing is to be given up.
        ([[[1, 4], [1, 5]], [[1, 5]]], None),
    ],
)
def test_the_capture_that_ranks_resume(captures: list[Any], agreed: BaseId | None) -> None:
    asked: list[BaseId] = []

    class Keeper:
        def hold_at(self, agreed: BaseId) -> Any:
            asked.append(agreed)

    found = [message(None, None, mine) for mine in captures]
    request = cast("Any", object())
    keeper = cast("Any", Keeper())
    memory.with_memory(request, keeper, lambda purpose, mine: [mine] * 2, found, "run", 0, [0, 1])
    assert asked == ([] if agreed is None else [agreed])
