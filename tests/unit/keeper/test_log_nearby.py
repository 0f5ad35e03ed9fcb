"""Whoever reads the log step by step looks at the records that it takes, and not at all of them:
a replica that is behind would fall further behind the longer the log is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import pytest

from everstep.keeper.log.log_store import LogStore
from tests.support.ranks.peer_logs import Log

STEPS = 600


class Counted(list[Any]):
    """Counts the records that are taken out of it."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__(items)
        self.looks = 0

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        self.looks += len(range(len(self))[place]) if isinstance(place, slice) else 1
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[Any]:
        for place in range(len(self)):
            yield self[place]


@pytest.fixture(scope="module")
def store() -> LogStore:
    log = Log()
    for step in range(1, STEPS + 1):
        log.step(step)
    return log.store


@pytest.mark.parametrize("step", [0, 1, STEPS // 2, STEPS - 2, STEPS])
def test_the_next_steps_of_a_long_log(step: int, store: LogStore) -> None:
    records = store.records()
    lsn = max((r.head.lsn for r in records if r.head.step <= step), default=0)
    wanted = list(range(step + 1, min(step + 4, STEPS) + 1))

    def of_replica() -> list[int]:
        return [one.mark.head.step for one in store.steps_after(step, lsn, 4)]

    def of_peer() -> list[int]:
        number = sum(record.head.step <= step for record in records)
        size_bytes = sum(r.size_bytes for r in records if r.head.step in wanted)
        found, _ = store.steps_from(number, 0, size_bytes)
        return [record.head.step for record in found if record.head.kind == "mark"]

    read: Callable[[], list[int]]
    for read in (of_replica, of_peer):
        store.stored = counted = Counted(store.stored)
        assert read() == wanted
        assert counted.looks < 60
    store.stored = counted = Counted(store.stored)
    assert store.steps == (1, STEPS)
    assert counted.looks < 10
