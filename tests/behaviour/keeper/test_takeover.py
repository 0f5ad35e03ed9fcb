"""Training processes that come, go, fail and come back, and a keeper that does: whatever they
do to each other, what is restored is the state of the step that it claims."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest

import everstep
from everstep.commit.lineage import BaseId
from everstep.errors import (
    FencedError,
    MismatchError,
    StateError,
    StorageError,
)
from everstep.link.wire import error_to_wire
from everstep.run.folder import open_timeline
from everstep.seams import Seams
from everstep.testing import inspect
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.attach.remote import RemoteKeeper
from tests.support.lost_keepers import cut, remote_of
from tests.support.serving import Bench, die, serving
from tests.support.takeover import World, opened, stepped, until
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem, inventory_of

RELOST = "now serves process|is gone"


def restored(run: Path, step: int | None = None) -> tuple[everstep.Recovery, list[bytes]]:
    """What a new process gets."""
    world = World(seed=99)
    ckpt = opened(run, world, method="sync")
    recovery = ckpt.resume(step)
    found = world.snapshot()
    ckpt.close()
    return recovery, found


def full(op: str, path: PurePath) -> None:
    if op == "create" and str(path).endswith(".safetensors.tmp"):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


def saved_and_killed(
    served: Bench, world: World, *, gate: Gate | None = None, **options: Any
) -> list[bytes]:
    """A base of step 1 that was captured whole, by a process that is gone; its keeper writes
    it when the gate opens."""
    ckpt = opened(served.run, world, **options)
    ckpt.resume()
    wanted = stepped(ckpt, world)
    if gate is not None:
        until(lambda: served.server.duties.writer is not None)
        assert served.server.duties.writer is not None
        served.server.duties.writer.queue(gate.wait_at)
    save = ckpt.save()
    inspect(ckpt).saver.finish_captures()
    if gate is None:
        save.durable.result(TIMEOUT_S)
    die(ckpt)
    # Whoever is there still writes over the memory of what has failed: it is held only then.
    until(lambda: served.server.trainer is None)
    return wanted


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


@pytest.fixture
def disk() -> Iterator[HookedFileSystem]:
    """The keeper's disk, where there is one to be broken."""
    made = HookedFileSystem()
    yield made
    made.hook = lambda op, path: None


@pytest.fixture
def served_on(run_folder: Path, disk: HookedFileSystem) -> Iterator[Bench]:
    with serving(run_folder, filesystem=disk) as made:
        yield made
        disk.hook = lambda op, path: None


# --- Restored from memory ---------------------------------------------------------------


@pytest.mark.parametrize("method", ["lazy", "async", "checkfreq"])
def test_it_comes_back_from_memory(served: Bench, method: str) -> None:
    world = World()
    wanted = saved_and_killed(served, world, method=method)
    other = World(seed=99)
    ckpt = opened(served.run, other, method=method)
    recovery = ckpt.resume()
    assert (recovery.step, recovery.source, recovery.exact) == (1, "memory", True)
    assert other.snapshot() == wanted
    then = stepped(ckpt, other)
    ckpt.save()
    ckpt.close()
    assert restored(served.run)[1] == then


def test_it_is_settled_before_it_is_fenced_off(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that is still being written becomes durable before the new timeline is opened."""
    gate = Gate()
    wanted = saved_and_killed(served, World(), gate=gate)
    before(monkeypatch, RemoteKeeper, "settle", gate.open)
    other = World(seed=99)
    ckpt = opened(served.run, other)
    recovery = ckpt.resume()
    assert (recovery.step, recovery.source) == (1, "memory")
    assert other.snapshot() == wanted
    ckpt.close()
    assert restored(served.run)[1] == wanted


def before(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, action: Callable[[], Any]
) -> None:
    """``action`` happens once, before the method is called for the first time."""
    method, actions = getattr(kind, name), [action]

    def call(*args: Any, **options: Any) -> Any:
        if actions:
            actions.pop()()
        return method(*args, **options)

    monkeypatch.setattr(kind, name, call)


def test_what_the_disk_refused_is_taken_again(
    served_on: Bench, disk: HookedFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    wanted = saved_and_killed(served_on, World(), gate=gate)
    disk.hook = full
    gate.open()
    other = World(seed=99)
    ckpt = opened(served_on.run, other)
    # Another process does something meanwhile: it has to choose, and read, once more.
    answers = [False]
    monkeypatch.setattr(
        "everstep.restore.start.resume._Start._still_holds",
        lambda *_: answers.pop() if answers else True,
    )
    recovery = ckpt.resume()
    assert (recovery.step, recovery.source, recovery.exact) == (1, "memory", True)
    assert recovery.skipped == ()
    assert other.snapshot() == wanted
    disk.hook = lambda op, path: None
    then = stepped(ckpt, other)  # every=None: but what came back is on no disk
    ckpt.close()
    recovery, found = restored(served_on.run)
    assert (recovery.step, found) == (2, then)


@pytest.mark.parametrize("durable", [True, False])
def test_damaged_memory_is_noticed(
    served_on: Bench, disk: HookedFileSystem, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit: from the disk, if it is there; else the base before. Never as it is."""
    world = World()
    ckpt = opened(served_on.run, world)
    ckpt.resume()
    first = stepped(ckpt, world)
    ckpt.save().durable.result(TIMEOUT_S)
    die(ckpt)
    gate = Gate()
    world.state["plain"]["seen"] = 7
    ckpt = opened(served_on.run, world)
    ckpt.resume()
    until(lambda: served_on.served == 2)
    assert served_on.server.duties.writer is not None
    served_on.server.duties.writer.queue(gate.wait_at)
    second = stepped(ckpt, world)
    ckpt.save()
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    if not durable:
        disk.hook = full
    gate.open()

    recall = RemoteKeeper.recall

    def damaged(self: RemoteKeeper, timeout_s: float, **options: Any) -> Any:
        found = recall(self, timeout_s, **options)
        held = found.base
        assert held is not None
        assert held.durable is durable
        (file, _), *_ = held.files
        file.parts[1][1000] ^= 1
        return found

    monkeypatch.setattr(RemoteKeeper, "recall", damaged)
    other = World(seed=99)
    ckpt = opened(served_on.run, other)
    recovery = ckpt.resume()
    disk.hook = lambda op, path: None
    assert recovery.source == "disk"
    assert (recovery.step, other.snapshot()) == ((2, second) if durable else (1, first))
    if not durable:
        assert "damaged" in recovery.skipped[0].reason
    ckpt.close()


def test_without_resume_nothing_is_started_over(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No base is on disk yet, but the keeper has one."""
    gate = Gate()
    saved_and_killed(served, World(), gate=gate)
    before(monkeypatch, RemoteKeeper, "settle", gate.open)
    ckpt = opened(served.run, World())
    with pytest.raises(StateError, match=r"has 1 base.* and resume\(\) was not called"):
        ckpt.step()
    ckpt.resume()
    ckpt.close()


# --- Two at once ------------------------------------------------------------------------


def test_one_that_fails_to_take_over_disturbs_nobody(served: Bench) -> None:
    world = World()
    first = opened(served.run, world)
    first.resume()
    stepped(first, world)
    first.save().durable.result(TIMEOUT_S)
    second = opened(served.run, World(width=31))
    with pytest.raises(MismatchError):
        second.resume()
    until(lambda: inspect(first).keepers.lost is not None)
    with pytest.warns(RuntimeWarning, match=RELOST):
        stepped(first, world)
    wanted = stepped(first, world)
    first.save().durable.result(TIMEOUT_S)
    lost = remote_of(second)
    until(lambda: lost.lost is not None)
    with pytest.raises(MismatchError):
        second.resume()  # it tries again, and replaces the first one again
    second.close()
    until(lambda: inspect(first).keepers.lost is not None)
    with pytest.warns(RuntimeWarning, match=RELOST):
        wanted = stepped(first, world)
    first.save().durable.result(TIMEOUT_S)
    first.close()
    recovery, found = restored(served.run)
    assert (recovery.step, recovery.timeline, found) == (4, 2, wanted)


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_one_that_takes_over_fences_the_other_off(served: Bench, policy: Any) -> None:
    world, other = World(), World(seed=99)
    first = opened(served.run, world, keep=1, on_failure=policy)
    first.resume()
    wanted = stepped(first, world)
    first.save().durable.result(TIMEOUT_S)
    second = opened(served.run, other, keep=1)
    assert second.resume().step == 1
    assert other.snapshot() == wanted
    until(lambda: inspect(first).keepers.lost is not None)
    for _ in range(3):  # again and again: it may not go on unnoticed
        if policy == "raise":
            with pytest.raises(FencedError, match="timeline 2 has taken the run over"):
                stepped(first, world)
        else:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                stepped(first, world)
            assert len([w for w in said if "timeline 2" in str(w.message)]) <= 1
    wanted = stepped(second, other)
    second.save().durable.result(TIMEOUT_S)
    if policy == "raise":
        with pytest.raises(FencedError):
            first.close()  # and it comes to an end
    else:
        with pytest.warns(RuntimeWarning, match="timeline 2 has taken the run over"):
            first.close()
    stepped(second, other)
    second.close()
    assert served.committed() == {(2, 2)}
    assert restored(served.run)[1] == wanted


def test_one_that_takes_it_back_hears_no_more_of_the_time_before(served: Bench) -> None:
    """Neither why it could not go on, when its keeper is lost once more."""
    world = World()
    first = opened(served.run, world)
    first.resume()
    stepped(first, world)
    first.save().durable.result(TIMEOUT_S)
    second = opened(served.run, World(seed=99))
    second.resume()
    until(lambda: inspect(first).keepers.lost is not None)
    with pytest.raises(FencedError):
        stepped(first, world)
    assert first.resume().timeline == 3
    stepped(first, world)
    cut(first)
    with pytest.warns(RuntimeWarning, match=r"process \d+\) is gone"):
        wanted = stepped(first, world)
    first.save().durable.result(TIMEOUT_S)
    first.close()
    with pytest.raises(FencedError):
        second.close()
    recovery, found = restored(served.run)
    assert (recovery.step, recovery.timeline, found) == (3, 4, wanted)


def test_what_a_keeper_says_of_a_timeline_that_is_over(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fenced off by another machine: the keeper, which has served both timelines, says which one
    it means; and what is late is no error of the present one."""
    said = list[dict[str, Any]]()
    hear = RemoteKeeper.handle

    def noted(self: RemoteKeeper, message: dict[str, Any], fds: list[int]) -> None:
        said.extend([message] if message["kind"] == "error" else [])
        hear(self, message, fds)

    monkeypatch.setattr(RemoteKeeper, "handle", noted)
    world = World()
    first = opened(served.run, world)
    first.resume()
    stepped(first, world)
    first.save().durable.result(TIMEOUT_S)
    keeper = served.server.duties.writer
    assert keeper is not None
    until(lambda: not keeper.waiting)  # cleaning up is over, too
    inventory = inventory_of(served.run)
    open_timeline(Seams(), PurePath(served.run), inventory, parent=BaseId(1, 1), exact=True)
    stepped(first, world)
    with pytest.raises(FencedError):  # of save(), if that has heard of it before it returns
        first.save().durable.result(TIMEOUT_S)
    assert first.resume().timeline == 3
    assert {message["of_timeline"] for message in said} == {1}
    remote = inspect(first).keepers.current
    assert isinstance(remote, RemoteKeeper)
    hear(remote, said[0], [])
    stepped(first, world)
    for other in ({"of_timeline": 3}, {"error": error_to_wire(StorageError("full"))}):
        hear(remote, said[0] | other, [])
        with pytest.raises((FencedError, StorageError)):
            stepped(first, world)
    first.close()


@pytest.mark.parametrize("at", ["settle", "recall", "serve"])
def test_the_older_one_does_not_keep_the_newer_one_out(
    served: Bench, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It attaches again in the middle of the other's resume; the new timeline decides."""
    world, other = World(), World(seed=99)
    first = opened(served.run, world, on_failure="warn")
    first.resume()
    states = {1: stepped(first, world)}
    first.save().durable.result(TIMEOUT_S)
    second = opened(served.run, other, on_failure="warn")

    def again() -> None:
        remote = inspect(first).keepers.current
        assert isinstance(remote, RemoteKeeper)
        until(lambda: remote.lost is not None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            states[2] = stepped(first, world)  # and takes a base again: its keeper was gone
        mine = remote_of(second)
        if at == "serve":  # the new timeline is there: it may not
            assert mine.lost is None
        else:
            until(lambda: mine.lost is not None)

    before(monkeypatch, Keepers if at == "serve" else RemoteKeeper, at, again)
    recovery = second.resume()
    rng = 1 if at == "serve" else 0  # the generator is one for both: the older one used it again
    assert other.snapshot()[: -rng or None] == states[recovery.step][: -rng or None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = stepped(second, other)
        second.save().durable.result(TIMEOUT_S)
        for _ in range(3):
            stepped(first, world)
            wanted = stepped(second, other)
        steps = recovery.step + 4
        assert inspect(second).keepers.lost is None, "they take it away from each other for ever"
        first.close()
    second.save()
    second.close()
    recovery, found = restored(served.run)
    assert (recovery.step, found) == (steps, wanted)
