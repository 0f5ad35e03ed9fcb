"""The log of ranks of another number, or in another layout: redone by offsets, bit for bit, or
refused with a reason."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.commit.lineage import BaseId
from everstep.errors import AuditError, EverstepError, FormatError, RecoveryError, ReplayError
from everstep.format.log import LogRecord, record_digest
from everstep.format.names import marker_name, shard_name
from everstep.format.writer import ChunkRing
from everstep.restore.fetch import start_channel
from everstep.restore.redo.driver import ReplayDriver, Step
from everstep.restore.redo.live import LiveMemory
from everstep.restore.reshard.replay import replay_resharded
from everstep.restore.start import rank_log
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from everstep.testing import inspect
from tests.support.ranks import relogged
from tests.support.ranks.logs import die, segment
from tests.support.ranks.relaid import STEPS, Job, alone, check, same, trained_on
from tests.support.ranks.relogged import Logs, logged, redone
from tests.support.ranks.replicas import Replica, alike, replicas, resume, until
from tests.support.ranks.replicas import train as train_all
from tests.support.ranks.sharding import STEP, Values, as_rank, build, load

__all__ = ["alike"]

JOBS: list[tuple[Job, Job]] = [
    (("fsdp", 4), ("fsdp", 2)),
    (("fsdp", 2), ("fsdp", 4)),
    (("fsdp", 3), ("fsdp", 2)),
    (("ddp", 2), ("fsdp", 3)),
    (("fsdp", 4), ("ddp", 2)),
    (("hsdp", 4), ("fsdp", 3)),
    (("fsdp", 2), ("hsdp", 4)),
    (("one", 1), ("fsdp", 2)),
    (("fsdp", 2), ("one", 1)),
    (("tp", 2), ("one", 1)),
    (("fsdp", 2), ("ddp", 2)),
    (("ddp", 2), ("fsdp", 2)),
    (("hsdp", 4), ("fsdp", 4)),
    (("fsdp", 4), ("hsdp", 4)),
    (("fsdp", 2), ("tp", 2)),
    (("tp", 4), ("fsdp_tp", 4)),
    (("fsdp_tp", 4), ("ddp", 4)),
]


@pytest.fixture(scope="module")
def ring() -> Iterator[ChunkRing]:
    made = ChunkRing(4, 2)
    yield made
    made.close()


@pytest.mark.thinned(27)
@pytest.mark.parametrize(("wrote", "starts"), JOBS, ids=str)
def test_every_part_is_replayed_bit_for_bit(
    wrote: Job, starts: Job, tmp_path: Path, ring: ChunkRing
) -> None:
    base, logs = logged(tmp_path, *wrote, ring, STEPS)
    layout, world = starts
    for rank in range(world):
        with as_rank(rank, world) as info:
            wanted = trained_on(layout, info)
            for together in (True, False):
                values, restored = redone(base, logs, layout, info, ring, STEPS, together=together)
                assert (restored.replayed, restored.inexact, restored.skipped) == (STEPS, "", [])
                assert same(values, wanted) == [], rank
                assert values["own"] == {"n": STEP + STEPS}, "of the mark, and not of the base"


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "momentum": (partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), True),
    "foreach": (partial(torch.optim.Adam, lr=0.1, foreach=True, amsgrad=True), True),
    "rmsprop": (partial(torch.optim.RMSprop, lr=0.1, centered=True), True),
    "fused": (partial(torch.optim.AdamW, lr=0.1, fused=True), False),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_where_bits_depend_on_the_cut_nothing_is_claimed(
    name: str, tmp_path: Path, ring: ChunkRing
) -> None:
    optimizer, exact = OPTIMIZERS[name]
    base, logs = logged(tmp_path, "fsdp", 3, ring, STEPS, optimizer=optimizer)
    for rank in range(2):
        with as_rank(rank, 2) as info:
            about: Any = (base, logs, "fsdp", info, ring, STEPS)
            values, restored = redone(*about, optimizer=optimizer)
            assert (restored.inexact == "") == exact, restored.inexact
            if exact:
                assert same(values, trained_on("fsdp", info, optimizer)) == []
            else:
                assert "is fused" in restored.inexact


def test_bits_of_updates_do_not_depend_on_where_a_tensor_is_cut() -> None:
    """What is claimed of them: also of long tensors, whose ends go through other code."""
    generator = torch.Generator().manual_seed(1)
    kinds = "SGD Adam AdamW Adagrad RMSprop NAdam RAdam Adamax Adadelta ASGD Rprop".split()
    whole = torch.randn(5003, generator=generator)
    gradients = [torch.randn(5003, generator=generator) for _ in range(3)]

    def after(kind: str, begin: int, end: int, dtype: torch.dtype, foreach: bool) -> torch.Tensor:
        parameter = torch.nn.Parameter(whole[begin:end].to(dtype))
        optimizer = getattr(torch.optim, kind)([parameter], lr=0.03, foreach=foreach)
        for gradient in gradients:
            parameter.grad = gradient[begin:end].to(dtype)
            optimizer.step()
        return parameter.detach()

    for kind in kinds:
        for dtype in (torch.float32, torch.float64):
            for foreach in (False, True):
                every = after(kind, 0, 5003, dtype, foreach)
                for begin, end in ((0, 2501), (2501, 5003), (3, 4999), (1, 8)):
                    part = after(kind, begin, end, dtype, foreach)
                    assert torch.equal(part, every[begin:end]), (kind, dtype, foreach, begin)


def test_only_logs_of_parts_that_meet_are_asked_for(tmp_path: Path, ring: ChunkRing) -> None:
    """Of two ranks in place of four each needs two logs; of the last step all marks are needed."""
    base, logs = logged(tmp_path, "fsdp", 4, ring, STEPS)
    with as_rank(0, 2) as info:
        asked: set[tuple[int, int]] = set()
        redone(base, logs, "fsdp", info, ring, STEPS, asked=asked)
    last = STEP + STEPS
    assert {rank for rank, step in asked if step == last} == {0, 1, 2, 3}
    assert {rank for rank, step in asked if step < last} == {0, 1}


@pytest.mark.parametrize("wrote", [("fsdp", 4), ("ddp", 4)])
def test_no_two_steps_are_in_memory_at_once(
    wrote: Job, tmp_path: Path, ring: ChunkRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor, of ranks of which only the marks are of use, the records of two. What comes from another
    rank lies in one piece of memory."""
    base, logs = logged(tmp_path, *wrote, ring, STEPS)
    pieces: list[weakref.ref[Any]] = []
    there: list[int] = []

    def in_one_piece(
        restored: Any, steps: Any, state: Any, fetch: Any, *about: Any, **more: Any
    ) -> None:
        def fetched(ranks: Sequence[int], timeline: int, step: int) -> dict[int, list[LogRecord]]:
            there.append(sum(piece() is not None for piece in pieces))
            found = {}
            for rank, records in fetch(ranks, timeline, step).items():
                whole = np.concatenate([np.frombuffer(one.data, np.uint8) for one in records])
                ends = np.cumsum([len(one.data) for one in records]).tolist()
                pieces.append(weakref.ref(whole))
                found[rank] = [
                    replace(one, data=whole.data[end - len(one.data) : end])
                    for one, end in zip(records, ends, strict=True)
                ]
                del whole
            return found

        replay_resharded(restored, steps, state, fetched, *about, **more)

    monkeypatch.setattr(relogged, "replay_resharded", in_one_piece)
    with as_rank(0, 2) as info:
        values, restored = redone(base, logs, wrote[0], info, ring, STEPS, together=False)
        assert restored.replayed == STEPS
        assert same(values, trained_on(wrote[0], info)) == []
    asked = {"fsdp": 2, "ddp": 1}[wrote[0]]
    assert len(pieces) == STEPS * asked + 4 - asked
    assert there == [0] * (STEPS + 4 - asked)


@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
def test_what_does_not_act_element_by_element_is_refused_in_other_parts(
    kind: str, tmp_path: Path, ring: ChunkRing
) -> None:
    if not hasattr(torch.optim, kind):
        pytest.skip(f"no {kind} in this torch")

    def optimizer(parameters: Any) -> Any:
        if kind == "Muon":
            parameters = [p for p in parameters if p.dim() == 2]
        return getattr(torch.optim, kind)(parameters, lr=0.1)

    base, logs = logged(tmp_path, "one", 1, ring, 1, optimizer=optimizer)
    with as_rank(0, 2) as info, pytest.raises(ReplayError, match="element by element"):
        values, _ = redone(base, logs, "fsdp", info, ring, 1, optimizer=_like_adam(optimizer))
        del values


def _like_adam(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The optimizer without a step, which would ask ranks that do not answer."""

    def made(parameters: Any) -> Any:
        optimizer = make(parameters)
        optimizer.step = lambda: None
        return optimizer

    return made


# --- What does not fit together ------------------------------------------------------------


def refused(tmp_path: Path, ring: ChunkRing, spoil: Callable[[Logs], None], match: str) -> None:
    base, logs = logged(tmp_path, "fsdp", 4, ring, STEPS)
    spoil(logs)
    with as_rank(0, 2) as info, pytest.raises(EverstepError, match=match):
        redone(base, logs, "fsdp", info, ring, STEPS)


def test_a_missing_update_is_noticed(tmp_path: Path, ring: ChunkRing) -> None:
    def spoil(logs: Logs) -> None:
        del logs[1, STEP + 2][0]

    refused(tmp_path, ring, spoil, "do not follow")


def test_a_mark_that_counts_other_updates_is_noticed(tmp_path: Path, ring: ChunkRing) -> None:
    def spoil(logs: Logs) -> None:
        update, mark = logs[1, STEP + 2]
        more = replace(update, head=replace(update.head, lsn=STEP + 3))
        late = replace(mark, head=replace(mark.head, lsn=STEP + 3))
        logs[1, STEP + 2] = [update, more, late]

    refused(tmp_path, ring, spoil, "another number of updates")


def test_another_steps_records_are_noticed(tmp_path: Path, ring: ChunkRing) -> None:
    def spoil(logs: Logs) -> None:
        logs[1, STEP + 2] = logs[1, STEP + 1]

    refused(tmp_path, ring, spoil, "has records of other steps")


def test_the_log_of_another_state_is_noticed(tmp_path: Path, ring: ChunkRing) -> None:
    def spoil(logs: Logs) -> None:
        logs[1, STEP + 1] = [
            replace(one, head=replace(one.head, shape="f" * 32)) for one in logs[1, STEP + 1]
        ]

    refused(tmp_path, ring, spoil, "another composition")


def test_the_log_of_another_rank_is_noticed(tmp_path: Path, ring: ChunkRing) -> None:
    """It has the same names, and other parts: its shape says so."""

    def spoil(logs: Logs) -> None:
        logs[1, STEP + 1] = logs[0, STEP + 1]

    refused(tmp_path, ring, spoil, "another composition")


def test_a_part_of_a_gradient_that_is_gone_is_noticed(tmp_path: Path, ring: ChunkRing) -> None:
    base, logs = logged(tmp_path, "fsdp", 4, ring, 1)
    update, mark = logs[1, STEP + 1]
    kept = tuple(p for p in update.layout.placed if "up.weight" not in p.entry.name)
    less = replace(update, layout=replace(update.layout, placed=kept))
    less = replace(less, digest=record_digest(less.data, less.objects))
    logs[1, STEP + 1] = [less, mark]
    with as_rank(0, 2) as info, pytest.raises(FormatError, match="rank 1 has no gradient of"):
        redone(base, logs, "fsdp", info, ring, 1)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("wrote", "starts"), [(("fsdp", 4), 2), (("fsdp", 2), 3), (("ddp", 2), 3)])
def test_what_was_written_past_the_optimizer_is_noticed(
    wrote: Job, starts: int, tmp_path: Path, ring: ChunkRing
) -> None:
    """Marks hold some elements of each rank's parts, which are found again in other parts."""

    def change(values: Values, info: RankInfo) -> None:
        for parameter in values["model"].parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            with torch.no_grad():
                local.add_(1e-3)

    layout = wrote[0]
    base, logs = logged(tmp_path, *wrote, ring, STEPS, change=change)
    for rank in range(starts):
        with (
            as_rank(rank, starts) as info,
            pytest.raises(AuditError, match="outside the optimizer"),
        ):
            redone(base, logs, layout, info, ring, STEPS)


# --- All of it: ranks that train alike -------------------------------------------------------


def came_back(path: Path, world: int, step: int, replayed: int, *, exact: bool = True) -> list[Any]:
    """What all ranks of a job come back to, and that it is what training had; and trains on."""
    with replicas(*((path,) * world)) as ranks:
        found = resume(ranks)
        for one, training in zip(found, ranks, strict=True):
            assert (one.step, one.replayed, one.exact) == (step, replayed, exact), one
            check(training, step)
        train_all(ranks, 3)
        for training in ranks:
            check(training, step + 3)
        die(ranks)
        return found


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("before", "world"), [(2, 3), (4, 2), (3, 2)])
def test_another_number_of_ranks_comes_back_to_the_last_step(
    tmp_path: Path, before: int, world: int
) -> None:
    path = tmp_path / "run"
    until((path,) * before, 6)
    came_back(path, world, 6, 2)
    record = scan_run(PosixFileSystem(), path).timelines[2]
    assert record is not None
    assert (record.parent, record.fork_step, record.base) == (1, 6, (1, 4))
    assert record.exact
    came_back(path, before, 9, 1)  # from a base of step 8, and what this number has logged


@pytest.mark.thinned(2)
@pytest.mark.parametrize("before", [2, 3])
def test_one_process_alone_goes_on_from_the_last_step_of_all(tmp_path: Path, before: int) -> None:
    path = tmp_path / "run"
    until((path,) * before, 6)
    for step, replayed in ((6, 2), (9, 1)):  # then behind its own base of step 8
        with alone(path) as (one,):
            found = one.ckpt.resume()
            assert (found.step, found.replayed, found.exact) == (step, replayed, True), found
            check(one, step)
            one.train(3)
            check(one, step + 3)
            die([one])
    record = scan_run(PosixFileSystem(), path).timelines[2]
    assert record is not None
    assert (record.parent, record.fork_step, record.base, record.world) == (1, 6, (1, 4), 1)
    came_back(path, before, 12, 0, exact=False)  # one process had no generators for a second one


def test_its_first_step_waits_for_a_base(tmp_path: Path) -> None:
    """Its own log leads on from no base of several ranks."""
    path = tmp_path / "run"
    until((path, path), 6)
    with alone(path) as (one,):
        one.ckpt.resume()
        recorder = inspect(one.ckpt).recorder
        assert recorder is not None
        assert recorder.reachable_step is None
        one.train(1)
        die([one])
    bases = [base.id for base in scan_run(PosixFileSystem(), path).bases]
    assert BaseId(2, 7) in bases


def test_it_goes_back_to_a_step_of_several(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 7)
    with alone(path) as (one,):
        found = one.ckpt.resume(6)
        assert (found.step, found.replayed) == (6, 2)
        check(one, 6)
        die([one])
    with alone(path) as (one,), pytest.raises(RecoveryError, match="step 7"):
        one.ckpt.resume(7)  # turned away from


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hole_in_one_log_ends_it_for_one_process_too(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "run"
    until((path, path), 7)
    (segment(path, 6) / marker_name(rank)).unlink()
    with alone(path) as (one,):
        found = one.ckpt.resume()
        assert (found.step, found.replayed) == (5, 1)
        assert f"the log of rank {rank} of 2 that wrote it ends before" in str(found.skipped)
        check(one, 5)
        die([one])


@pytest.mark.slow
def test_one_process_reads_the_logs_of_all_from_a_copy(tmp_path: Path) -> None:
    """Its own folder is new, and has the run and its timelines before anything is trained."""
    path, copy = tmp_path / "run", tmp_path / "copy"
    until((path, path), 6)
    shutil.copytree(path, copy)
    with alone(tmp_path / "other", tiers=[copy], keeper=None, method="logged") as (one,):
        found = one.ckpt.resume()
        assert (found.step, found.replayed, found.source) == (6, 2, "copy")
        check(one, 6)
        one.train(2)
    mine, theirs = (scan_run(PosixFileSystem(), p) for p in (tmp_path / "other", path))
    assert mine.run == theirs.run
    assert mine.timelines[1] == theirs.timelines[1]


def test_the_first_step_behind_it_waits_for_a_base(tmp_path: Path) -> None:
    """What is logged from now on leads on from no base of the ranks before."""
    path = tmp_path / "run"
    until((path, path), 6)
    for world, leads in ((2, True), (3, False)):
        with replicas(*((path,) * world)) as ranks:
            resume(ranks)
            for one in ranks:
                recorder = inspect(one.ckpt).recorder
                assert recorder is not None
                assert (recorder.reachable_step is not None) == leads
            train_all(ranks, 1)
            die(ranks)


def test_parts_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rank_log, start_channel):
        monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    monkeypatch.setattr(start_channel, "_IN_FLIGHT_MAX", 2)
    monkeypatch.setattr(rank_log, "_CACHE_BYTES", 1)
    path = tmp_path / "run"
    until((path, path), 7)
    came_back(path, 3, 7, 3)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hole_in_one_log_ends_it_for_all(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "run"
    until((path, path), 7)
    (segment(path, 6) / marker_name(rank)).unlink()
    for one in came_back(path, 3, 5, 1):
        assert f"the log of rank {rank} of 2 that wrote it ends before" in str(one.skipped)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_takes_all_to_the_step_before(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "run"
    until((path, path), 7)
    shard = next(p for p in segment(path, 6).iterdir() if p.name == shard_name(rank))
    data = bytearray(shard.read_bytes())
    values = [torch.full((4,), 0.6 + number).numpy().tobytes() for number in range(6)]
    at = max(data.find(value) for value in values)
    assert at > 0
    data[at] ^= 1
    shard.write_bytes(data)
    came_back(path, 3, 5, 1)


@pytest.mark.slow
def test_what_the_job_has_turned_away_from_stays_out(tmp_path: Path) -> None:
    """Two ranks had a step 7, of which one is lost; three went on from step 6, to another one."""
    path = tmp_path / "run"
    until((path, path), 7)
    (segment(path, 7) / marker_name(1)).unlink()
    came_back(path, 3, 6, 2)
    for one in came_back(path, 2, 9, 1):
        assert one.timeline == 3
    inventory = scan_run(PosixFileSystem(), path)
    assert [(r.parent, r.fork_step) for r in inventory.timelines.values() if r is not None] == [
        (None, 0),
        (1, 6),
        (2, 9),
    ]


def test_a_step_can_be_gone_back_to(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 7)
    with replicas(path, path, path) as ranks:
        for one, training in zip(_back(ranks, 6), ranks, strict=True):
            assert (one.step, one.replayed) == (6, 2)
            check(training, 6)
        die(ranks)


def _back(ranks: list[Replica], step: int) -> list[Any]:
    from tests.support.ranks.together import on_all

    return on_all(*(partial(one.ckpt.resume, step) for one in ranks))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("world", [2, 4, 5])
def test_as_many_ranks_replay_their_own_parts(world: int, tmp_path: Path, ring: ChunkRing) -> None:
    """Some of which are empty: what an optimizer keeps of these is in marks, and is there."""
    base, logs = logged(tmp_path, "fsdp", world, ring, STEPS)
    for rank in range(world):
        with as_rank(rank, world) as info:
            values, wanted = build("fsdp", info, 9), trained_on("fsdp", info)
            state = State(values, ranks=info)
            load(base, state, ring)
            redo = ReplayDriver(LiveMemory(state))
            for step in range(STEP + 1, STEP + 1 + STEPS):
                update, mark = logs[rank, step]
                redo.step(Step.of([update], mark))
            assert redo.finish() == []
            assert same(values, wanted) == [], rank
