"""Several ranks, each of whose keepers follows its log: bases of all are made of what each has."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

import everstep
from everstep import LogOptions
from everstep.errors import DeadlineError, EverstepError, KeeperError
from everstep.format.names import RUN_RECORD
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from everstep.state.ranks.log_shares import LogShare, log_shares
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from everstep.testing import inspect
from everstep.trainer.attach import keepers
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.log import update_inputs
from tests.support.following import until
from tests.support.ranks import replicas as parts
from tests.support.ranks.replicas import Replica as Rank
from tests.support.ranks.replicas import layers, replicas, resume, train, trained
from tests.support.ranks.together import on_all
from tests.support.serving import Bench, serving
from tests.support.serving import die as lose_keeper
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem

alike = parts.alike  # which every test here takes, too
FS = PosixFileSystem()
WORLD = 2
FOLLOWED: dict[str, Any] = {
    "method": "lowdiff_plus",
    "every": 2,
    "keep": 50,
    "log": LogOptions(),
    "on_failure": "raise",
    "keeper": everstep.KeeperOptions(),
}


@pytest.fixture(autouse=True)
def they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers under test are in no registry."""
    monkeypatch.setattr(keepers, "is_there", lambda run, run_id, rank: True)


def folders(tmp_path: Path, shared: bool) -> tuple[Path, ...]:
    """Of one run, on one disk or on several."""
    paths = tuple(tmp_path / ("run" if shared else f"run {rank}") for rank in range(WORLD))
    with serving(paths[0]):
        pass
    for path in paths[1:]:
        path.mkdir(exist_ok=True)
        (path / RUN_RECORD).write_bytes((paths[0] / RUN_RECORD).read_bytes())
    return paths


@contextlib.contextmanager
def kept(
    paths: tuple[Path, ...], filesystems: dict[int, HookedFileSystem] | None = None
) -> Iterator[list[Bench]]:
    """The keepers of all ranks."""
    own = filesystems or {}
    with contextlib.ExitStack() as stack:
        benches = [
            stack.enter_context(serving(path, rank=rank, filesystem=own.get(rank)))
            for rank, path in enumerate(paths)
        ]
        yield benches
        for bench in benches:  # at once: none waits for another
            bench.server.end()


@contextlib.contextmanager
def job(paths: tuple[Path, ...], **options: Any) -> Iterator[list[Rank]]:
    """A start, whose keepers are there."""
    with replicas(*paths, **{**FOLLOWED, **options}) as ranks:
        yield ranks


def die(ranks: list[Rank]) -> None:
    """All at once."""
    for one in ranks:
        lose_keeper(one.ckpt)


def die_at_step_7(paths: tuple[Path, ...], benches: list[Bench]) -> None:
    """All ranks at once; their replicas have applied step 6."""
    with job(paths) as ranks:
        resume(ranks)
        train(ranks, 7)
        wait(ranks)
        until(lambda: all(bench.replicas.step == 6 for bench in benches), "step 6")
        die(ranks)


def captured(ranks: list[Rank]) -> list[int]:
    """How many bases each training process has captured itself."""
    return [inspect(one.ckpt).captured for one in ranks]


def committed(path: Path, timeline: int = 1) -> list[int]:
    found = [b.id for b in scan_run(FS, path).bases if b.status == "committed"]
    return sorted(one.step for one in found if one.timeline == timeline)


def wait(ranks: list[Rank]) -> None:
    on_all(*(lambda one=one: one.ckpt.wait(TIMEOUT_S) for one in ranks))  # type: ignore[misc]


def check(ranks: list[Rank], step: int) -> None:
    """Each has what training had at ``step``, and trains on from there."""
    for one in ranks:
        assert all(map(torch.equal, one.weights, trained(step)))
    train(ranks, 3)
    for one in ranks:
        assert all(map(torch.equal, one.weights, trained(step + 3)))
    wait(ranks)


def read_back(paths: tuple[Path, ...], step: int, *, exact: bool = True) -> None:
    """A base, in a start that has nothing but it, is what training had."""
    with replicas(*paths, **{**FOLLOWED, "method": "sync", "every": None, "log": None}) as ranks:
        found = resume_from(ranks, step)
        for one in found:
            assert (one.step, one.replayed, one.exact) == (step, 0, exact), one
        check(ranks, step)


def resume_from(ranks: list[Rank], step: int) -> list[everstep.Recovery]:
    return on_all(*(lambda one=one: one.ckpt.resume(step) for one in ranks))  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.thinned(2)
@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
def test_bases_are_those_of_training_and_training_takes_one(tmp_path: Path, shared: bool) -> None:
    paths = folders(tmp_path, shared)
    with kept(paths), job(paths) as ranks:
        resume(ranks)
        train(ranks, 7)
        on_all(*(one.ckpt.close for one in ranks))
        assert captured(ranks) == [1] * WORLD, "the first"
    for path in paths:
        assert committed(path) == [1, 2, 4, 6, 7]
    for step in (2, 4, 6, 7):
        read_back(paths, step)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
def test_killed_ranks_come_back_to_the_last_step_by_their_replicas(
    tmp_path: Path, shared: bool
) -> None:
    """All replicas are frozen at the step on which the ranks agree: nothing is replayed.

    On a shared folder each rank needs the others' shares, too. Their keepers, which are in no
    registry here, cannot be found: a base and the log are restored instead.
    """
    paths = folders(tmp_path, shared)
    source = (6, 1, "disk") if shared else (7, 0, "memory")
    with kept(paths) as benches:
        die_at_step_7(paths, benches)
        for _ in range(2):  # the second time without a base of the new start
            with job(paths) as ranks:
                for one in resume(ranks):
                    assert (one.step, one.exact) == (7, True), one
                    assert (one.base_step, one.replayed, one.source) == source, one
                assert all(map(torch.equal, ranks[0].weights, trained(7)))
                die(ranks)
        with job(paths) as ranks:
            resume(ranks)
            check(ranks, 7)
            assert captured(ranks) == [1] * WORLD
    assert committed(paths[0], 4) == [8, 10]


def test_a_rank_that_lacks_the_last_step_takes_all_back_by_one(tmp_path: Path) -> None:
    """The replica of the other has not applied the step that it alone has."""
    paths = folders(tmp_path, shared=False)
    with kept(paths) as benches:
        with job(paths) as ranks:
            resume(ranks)
            train(ranks, 6)
            wait(ranks)
            train(ranks[:1], 1)
            until(lambda: (benches[0].log.steps or (0, 0))[1] == 7, "step 7 of rank 0")
            until(lambda: benches[0].replicas.step == 6, "step 6")
            die(ranks)
        with job(paths) as ranks:
            for one in resume(ranks):
                assert (one.step, one.base_step, one.replayed) == (6, 6, 0), one
                assert (one.exact, one.source) == (True, "memory"), one
            check(ranks, 6)


@pytest.mark.parametrize("error", [DeadlineError, KeeperError, OSError])
def test_a_replica_that_cannot_be_frozen_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The others are told, and all restore a base and the log."""
    paths = folders(tmp_path, shared=False)
    failed, recall = list[int](), RemoteKeeper.recall

    def fails(self: RemoteKeeper, *about: Any, at: int | None = None, **more: Any) -> Any:
        if at is not None and not failed:
            failed.append(at)
            raise error("as asked")
        return recall(self, *about, at=at, **more)

    with kept(paths) as benches:
        die_at_step_7(paths, benches)
        monkeypatch.setattr(RemoteKeeper, "recall", fails)
        with job(paths) as ranks:
            for one in resume(ranks):
                assert (one.step, one.base_step, one.replayed, one.exact) == (7, 6, 1, True), one


def test_a_rank_whose_replica_has_stopped_captures_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the next base; the other's comes from its replica, and the base is one of both."""
    paths, told = folders(tmp_path, True), list[EverstepError]()
    with kept(paths) as benches, job(paths, on_failure=told.append) as ranks:
        resume(ranks)
        train(ranks, 3)
        wait(ranks)
        stopped = benches[1].replicas.replica
        assert stopped is not None
        with stopped.access.exclusive():
            stopped.stop(EverstepError("as asked"))
        replica_bases = inspect(ranks[1].ckpt).replica
        assert replica_bases is not None
        until(lambda: replica_bases.lost is not None, "the word of it")
        train(ranks, 4)
        wait(ranks)
        assert captured(ranks) == [1, 2]
        die(ranks)
    assert committed(paths[0]) == [1, 2, 4, 6]
    read_back(paths, 4)
    read_back(paths, 6)


def test_what_one_rank_does_not_give_nobody_waits_for(tmp_path: Path) -> None:
    """Its replica stops with the base that was asked for: the other's part of it ends at once."""
    paths, told = folders(tmp_path, True), list[EverstepError]()
    with kept(paths) as benches, job(paths, on_failure=told.append) as ranks:
        resume(ranks)
        train(ranks, 3)
        wait(ranks)
        stopped = benches[1].replicas.replica
        assert stopped is not None
        with stopped.access.exclusive():  # it does not get there
            train(ranks, 1)
            until(lambda: bool(stopped.requested_steps), "the ask")
            stopped.stop(EverstepError("as asked"))
        with contextlib.suppress(EverstepError):
            wait(ranks)
        assert any("rank 1" in str(e) or "this rank's replica" in str(e) for e in told), told
        train(ranks, 2)
        wait(ranks)
        die(ranks)
    assert committed(paths[0]) == [1, 2, 6]
    read_back(paths, 6)


def test_a_first_base_that_fails_on_one_rank_leaves_nobody_waiting(tmp_path: Path) -> None:
    """Bases that were asked for behind it would be made from it."""
    paths, told = folders(tmp_path, True), list[EverstepError]()
    with (
        slow_disk(1, full=True) as (gate, filesystem),
        kept(paths, {1: filesystem}),
        job(paths, on_failure=told.append) as ranks,
    ):
        resume(ranks)
        train(ranks, 3)  # of step 2 one was asked for
        gate.open()
        wait(ranks)
        train(ranks, 3)
        wait(ranks)
        die(ranks)
    assert committed(paths[0])[-1] == 6
    assert 1 not in committed(paths[0])
    read_back(paths, 6)


def test_what_is_asked_of_a_replica_that_has_stopped_is_refused(tmp_path: Path) -> None:
    """Before training has heard of it: nothing would answer, and close() would wait for ever."""
    paths, told = folders(tmp_path, True), list[EverstepError]()
    with kept(paths) as benches, job(paths, on_failure=told.append) as ranks:
        resume(ranks)
        train(ranks, 3)
        wait(ranks)
        for bench in benches:
            replica = bench.replicas.replica
            assert replica is not None
            with replica.access.exclusive():
                replica.reset()  # as where a state differs
        train(ranks, 1)
        wait(ranks)
        train(ranks, 3)
        on_all(*(one.ckpt.close for one in ranks))
        assert captured(ranks) == [2] * WORLD, "then training takes one"
    assert committed(paths[0]) == [1, 2, 6, 7]
    for step in (2, 6, 7):
        read_back(paths, step)


@contextlib.contextmanager
def slow_disk(step: int, *, full: bool = False) -> Iterator[tuple[Gate, HookedFileSystem]]:
    """One that stops at the files of the base of a step, and perhaps has no room for them."""
    gate = Gate()

    def hook(op: str, path: PurePath) -> None:
        if op == "write" and path.parent.name == f"{step:012d}":
            gate.wait_at()
            if full:
                raise OSError(errno.ENOSPC, "No space left on device")

    try:
        yield gate, HookedFileSystem(hook)
    finally:
        gate.open()


def test_the_log_stays_until_a_base_is_durable_on_all_ranks(tmp_path: Path) -> None:
    """A replica has applied it, and memory is short: all the same. Another rank may come back to a
    step that lies before what this replica has."""
    paths = folders(tmp_path, True)
    with slow_disk(4, full=True) as (gate, filesystem), kept(paths, {1: filesystem}):
        with job(paths) as ranks:
            resume(ranks)
            train(ranks, 4)
            assert gate.reached.wait(TIMEOUT_S)
            recorder = inspect(ranks[0].ckpt).recorder
            assert recorder is not None
            assert recorder.memory.kept_bytes
            # More than half full.
            recorder.memory.bytes_max = recorder.memory.kept_bytes * 5 // 3
            train(ranks, 1)
            assert recorder.stats.holes == 0
            die(ranks)
        gate.open()
        with job(paths) as ranks:
            for one in resume(ranks):
                assert (one.step, one.base_step, one.exact) == (5, 2, True), one
            check(ranks, 5)
            die(ranks)


def test_a_log_that_is_half_full_asks_the_replica(tmp_path: Path) -> None:
    paths = folders(tmp_path, True)
    with kept(paths), job(paths, every=None) as ranks:
        resume(ranks)
        train(ranks, 4)
        wait(ranks)
        recorder = inspect(ranks[1].ckpt).recorder
        assert recorder is not None
        recorder.memory.bytes_max = recorder.memory.kept_bytes * 4
        train(ranks, 8)
        wait(ranks)
        assert recorder.stats.holes == 0
        assert captured(ranks) == [1] * WORLD
        die(ranks)
    assert committed(paths[0]) == [1, 11]
    read_back(paths, 11)


def test_training_waits_where_two_bases_are_asked_for(tmp_path: Path) -> None:
    paths = folders(tmp_path, True)
    with slow_disk(2) as (gate, filesystem), kept(paths, {1: filesystem}), job(paths) as ranks:
        resume(ranks)
        train(ranks, 5)
        assert gate.reached.wait(TIMEOUT_S)
        there = threading.Event()

        def on() -> None:
            train(ranks, 1)
            there.set()

        thread = threading.Thread(target=on)
        thread.start()
        until(lambda: all(one.ckpt.stats().replica_step is not None for one in ranks), "replicas")
        assert not there.wait(0.2)
        gate.open()
        thread.join(TIMEOUT_S)
        assert there.is_set()
        wait(ranks)
        stalled = [one.ckpt.stats().stall_s["back_pressure"] for one in ranks]
        assert all(seconds > 0 for seconds in stalled)
        die(ranks)
    assert committed(paths[0]) == [1, 2, 4, 6]
    read_back(paths, 4)


def test_a_base_behind_one_that_training_has_captured_is_written(tmp_path: Path) -> None:
    """The replica has it by the time that the one before is durable, and goes on from there."""
    paths = folders(tmp_path, True)
    with (
        slow_disk(4) as (gate, filesystem),
        kept(paths, {1: filesystem}) as benches,
        job(paths) as ranks,
    ):
        resume(ranks)
        train(ranks, 3)
        wait(ranks)
        for one in ranks:
            assert inspect(one.ckpt).replica is not None
            inspect(one.ckpt).replica.expected = False
        train(ranks, 3)
        replicas_of = [bench.replicas.replica for bench in benches]
        until(lambda: all(r is not None and r.is_frozen for r in replicas_of), "step 6")
        gate.open()
        wait(ranks)
        assert captured(ranks) == [2] * WORLD
        train(ranks, 2)
        wait(ranks)
        die(ranks)
    assert committed(paths[0]) == [1, 2, 4, 6, 8]
    for step in (4, 6, 8):
        read_back(paths, step)


def test_a_save_at_the_step_of_a_captured_base_is_that_base(tmp_path: Path) -> None:
    """No replica has that step yet: asked for it, one rank's would refuse it to all of them."""
    paths = folders(tmp_path, True)
    with (
        slow_disk(1) as (gate, filesystem),
        kept(paths, {1: filesystem}),
        job(paths) as ranks,
    ):
        resume(ranks)
        train(ranks, 1)  # takes the first base
        saves = on_all(*(one.ckpt.save for one in ranks))
        gate.open()
        wait(ranks)
        assert [save.durable.result(TIMEOUT_S) > 0 for save in saves] == [True] * WORLD
        assert on_all(*(one.ckpt.save for one in ranks)) == saves
        die(ranks)
    assert committed(paths[0]) == [1]
    read_back(paths, 1)


def test_a_base_is_exact_if_all_of_it_is(tmp_path: Path) -> None:
    """What one rank's replica cannot vouch for, the base does not claim (I9)."""
    paths = folders(tmp_path, True)
    with kept(paths) as benches, job(paths) as ranks:
        resume(ranks)
        train(ranks, 3)
        wait(ranks)
        replica = benches[1].replicas.replica
        assert replica is not None
        with replica.access.exclusive():
            replica._now.state.why = "as asked"
        train(ranks, 1)
        wait(ranks)
        die(ranks)
    read_back(paths, 2)
    read_back(paths, 4, exact=False)


def test_a_part_of_the_wrong_rank_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs that are split otherwise than bases: replicas stop, what they have made is no base."""
    paths, told = folders(tmp_path, True), list[EverstepError]()
    as_bases = update_inputs.log_shares

    def swapped(*about: Any) -> dict[str, dict[str, LogShare]]:
        found = as_bases(*about)
        return {
            key: {n: replace(p, owner=WORLD - 1 - p.owner) for n, p in named.items()}
            for key, named in found.items()
        }

    monkeypatch.setattr(update_inputs, "log_shares", swapped)
    with kept(paths), job(paths, on_failure=told.append) as ranks:
        resume(ranks)
        train(ranks, 5)
        wait(ranks)
        die(ranks)
    assert any("is in another rank's log" in str(error) for error in told), told
    for step in committed(paths[0]):
        read_back(paths, step)


@pytest.mark.parametrize("near", [None, (0, 1), (1,)])
def test_who_writes_a_parameter_records_its_gradients(near: tuple[int, ...] | None) -> None:
    """Four ranks on one disk, two, or one of its own."""
    states, world = [], 4
    for rank in near or range(world):
        model = layers(tuple(range(world)))
        model[1].weight.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        info = RankInfo(rank, world, near=near, followed=True)
        states.append(State({"m": model, "o": optimizer}, ranks=info))
    written = list[str]()
    for state in states:
        shape = state.survey().shape
        mine = {entry.name.removeprefix("m/") for entry in shape.entries}
        names = {n.removeprefix("m."): n for n in dict(layers(None).named_parameters())}
        parts = log_shares(state).get("o", {})
        for name in names:
            part = parts.get(f"m.{name}")
            assert (part is None) == (near == (1,))
            owns = part is None or part.owner == state.ranks.rank
            assert owns == (name in mine), name
            written += [name] if owns else []
    assert sorted(written) == sorted(names), "each once on a disk"
    owners = {part.owner for part in log_shares(states[0]).get("o", {}).values()}
    assert len(owners) in (0, len(states))


@pytest.mark.slow
def test_parameters_without_a_gradient_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some steps, in others they have one: no part of an update is missing for that."""

    def some(model: torch.nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
        for number, parameter in enumerate(model.parameters()):
            value = torch.full_like(parameter, 0.1 * (at + 1) + number)
            parameter.grad = value if at == 0 or (at + number) % 3 else None
        optimizer.step()

    monkeypatch.setattr(parts, "take", some)
    paths = folders(tmp_path, True)
    with kept(paths), job(paths) as ranks:
        resume(ranks)
        train(ranks, 7)
        wait(ranks)
        assert captured(ranks) == [1] * WORLD
        die(ranks)
    for step in (2, 4, 6):
        read_back(paths, step)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "options",
    [
        {"log": LogOptions(to="disk", batch_steps=1, audit=True)},
        {"log": LogOptions(watch=True)},
        {"every": "0.2s"},
        {"every": "auto"},
    ],
    ids=["log on disk, audited", "watched", "a time", "auto"],
)
def test_with_what_else_several_ranks_can_do(tmp_path: Path, options: dict[str, Any]) -> None:
    paths, told = folders(tmp_path, True), list[EverstepError]()
    with kept(paths), job(paths, on_failure=told.append, **options) as ranks:
        resume(ranks)
        train(ranks, 15)
        on_all(*(one.ckpt.close for one in ranks))
        assert captured(ranks) == [1] * WORLD
    assert told == []
    assert committed(paths[0])[-1] == 15
    read_back(paths, 15)


def test_ranks_go_back_behind_a_base_of_their_replicas(tmp_path: Path) -> None:
    paths = folders(tmp_path, True)
    with kept(paths), job(paths, every=4) as ranks:
        resume(ranks)
        train(ranks, 7)
        for one in resume_from(ranks, 6):
            assert (one.step, one.base_step, one.replayed, one.exact) == (6, 4, 2, True), one
        for rank in ranks:
            rank.state["data"]["step"] = 6
        check(ranks, 6)
        assert captured(ranks) == [2] * WORLD, "the first of each timeline"
        die(ranks)
    assert committed(paths[0], 2) == [7, 8]
    read_back(paths, 8)
