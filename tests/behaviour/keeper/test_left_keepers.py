"""Keepers of ranks that this job does not have: looked at where nobody is served by them, and never
taken away from a training process that lives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.config.options import KeeperOptions
from everstep.link import registry
from everstep.link.messages import PROTOCOL
from everstep.link.registry import KeeperInfo
from everstep.restore.reshard.replay import LogsInMemory
from everstep.seams import Seams
from everstep.seams.sockets import close_descriptors
from everstep.testing import inspect
from everstep.trainer.attach import attach as left_keepers
from tests.support.serving import Bench, bench, die, serving
from tests.support.takeover import World, opened, stepped
from tests.support.world import TIMEOUT_S

RANK, ABSENT = 7, 0


@pytest.fixture
def served(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with serving(run_folder) as made:
        info = KeeperInfo(1, str(made.run), made.run_id, ABSENT, "test", PROTOCOL, 0.0)
        monkeypatch.setattr(registry, "list_keepers", lambda: [info])
        yield made


def logged(served: Bench, world: World) -> everstep.Checkpointer:
    """A training process with a base and two steps of a log behind it."""
    ckpt = opened(served.run, world, method="logged", every=10)
    ckpt.resume()
    for _ in range(3):
        stepped(ckpt, world)
    ckpt.wait()
    return ckpt


def left(served: Bench) -> LogsInMemory:
    return left_keepers.orphaned_logs(
        served.run, served.run_id, RANK, [RANK], Seams(), timeout_s=TIMEOUT_S
    )


def test_a_training_process_that_lives_keeps_its_keeper(served: Bench) -> None:
    world = World()
    ckpt = logged(served, world)
    assert left(served).records == {}
    wanted = stepped(ckpt, world)
    assert (ckpt.stats().keeper_restarts, ckpt.stats().failed) == (0, 0)
    die(ckpt)
    other = World(seed=99)
    again = opened(served.run, other, method="logged", every=10)
    assert (again.resume().step, other.snapshot()) == (4, wanted)
    again.close()


def test_a_keeper_that_nobody_is_served_by_is_looked_at_and_left(served: Bench) -> None:
    world = World()
    ckpt = logged(served, world)
    wanted = world.snapshot()
    die(ckpt)
    for _ in range(2):
        steps = {record.head.step for record in left(served).records[ABSENT]}
        assert {2, 3} <= steps
    other = World(seed=99)
    again = opened(served.run, other, method="logged", every=10)
    assert (again.resume().step, other.snapshot()) == (3, wanted)
    again.close()


def test_a_keeper_of_another_version_is_not_ended(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    die(logged(served, World()))
    with monkeypatch.context() as patch:
        patch.setattr("everstep.trainer.attach.attach.PROTOCOL", PROTOCOL + 1)
        assert left(served).records == {}
    assert left(served).records


@pytest.mark.parametrize("gone", [False, True])
def test_it_is_looked_whether_the_training_process_lives(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """Also where the keeper has not noticed yet that it is dead."""
    with bench(run_folder) as b:
        b.trainer().serve()
        guest = b.guest()
        assert b.server.trainer is not None
        monkeypatch.setattr(b.server.trainer.watch, "ended", lambda: gone)
        hello = {"protocol": PROTOCOL, "arena_bytes": 4096, "timeout_s": 1.0, "idle": True}
        guest.send({"kind": "attach", **hello})
        b.turn()
        answer = guest.receive(0.0)
        assert answer is not None
        close_descriptors(answer[1])
        assert answer[0]["kind"] == ("welcome" if gone else "refused")


@pytest.mark.parametrize("options", [{"method": "sync"}, {"keeper": KeeperOptions(process=False)}])
def test_a_start_without_a_keeper_process_takes_what_one_has_left(
    options: dict[str, Any], served: Bench
) -> None:
    """And leaves it there: should that be lost before its first base, the next finds it, too."""
    world = World()
    ckpt = logged(served, world)
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    for _ in range(2):
        other = World(seed=9)
        ckpt = opened(served.run, other, **{"method": "logged", "every": 10, **options})
        recovery = ckpt.resume()
        assert (recovery.step, recovery.source, recovery.exact) == (3, "memory", True)
        assert other.snapshot() == world.snapshot()
        inspect(ckpt).release()
