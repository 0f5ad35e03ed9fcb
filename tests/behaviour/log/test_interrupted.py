"""Ctrl-C while a record is handed over: its memory has one owner."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from everstep import KeeperOptions
from everstep.testing import inspect
from everstep.trainer.log.kept_records import LogMemory
from tests.support.log.last_mark import Training, resumed, same

STEPS = 12


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("what", ["_copy_now", "_copy.<locals>.job"])
def test_memory_is_given_back_once(what: str, before: bool, run_folder: Path) -> None:
    """It was given back while the record lay in it, for the keeper: the next one took it, too."""
    it = Training()
    ckpt = it.opened(run_folder, keeper=KeeperOptions(process=False))
    ckpt.resume()
    lane, run, armed = inspect(ckpt).lane, inspect(ckpt).lane.run, list[int]()

    def interrupted(job: Callable[[], None]) -> Future[None]:
        hit = bool(armed) and what in getattr(job, "__qualname__", "")
        if hit and before:
            armed.pop()
            raise KeyboardInterrupt
        future: Future[None] = run(job)
        if hit:
            armed.pop()
            raise KeyboardInterrupt
        return future

    lane.run = interrupted  # type: ignore[method-assign]
    hits, wanted = 0, list[Any]()
    for number in range(STEPS):
        if number in (6, 7, 9):
            armed.append(1)
        try:
            it.train()
            ckpt.step()
        except KeyboardInterrupt:
            hits += 1
        it.optimizer.zero_grad()
        wanted = it.seen()
        run(lambda: None).result(60.0)
        assert inspect(ckpt).recorder is not None
        rooms: LogMemory = inspect(ckpt).recorder.memory
        kept = sorted((one.room.offset, one.room.size_bytes) for one in rooms.kept)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(kept))
    assert hits == 3
    pool = inspect(ckpt).keepers.pool
    ckpt.wait()
    it.train()
    ckpt.step()  # behind which nothing is kept that no record needs
    wanted = it.seen()
    ckpt.save()
    ckpt.wait()
    assert not rooms.kept
    assert not pool.lent_bytes
    ckpt.close()
    recovery, found = resumed(run_folder, keeper=KeeperOptions(process=False))
    assert recovery.exact
    assert same(found, wanted)
