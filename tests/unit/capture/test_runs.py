"""Runs: copied with nothing in between, and told of in time if somebody waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.capture import batches, lane
from everstep.capture.batches import Batch, Runs
from everstep.capture.cuda import DeviceLane
from everstep.capture.lane import CpuLane, CpuTransfer
from everstep.seams.memory import copy_memory
from everstep.seams.processes import IoThreads
from everstep.testing.emulated_link import EmulatedLink
from tests.support.world import TIMEOUT_S, Gate, opened

SIZE = 4096
COUNT = 6


def several(count: int = COUNT) -> list[Batch]:
    """Batches one behind the other, each filled with its number, from 1."""
    return [
        Batch(n * SIZE, (n + 1) * SIZE, (torch.full((SIZE,), n + 1, dtype=torch.uint8),))
        for n in range(count)
    ]


def block_of(count: int = COUNT) -> torch.Tensor:
    return torch.zeros(count * SIZE, dtype=torch.uint8)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("yields", [False, True])
def test_an_interrupt_while_copies_are_handed_over_ends_no_copies(
    when: str, yields: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were called off are not made, since their memory may be another's by then; all
    that come behind them are."""
    lane = CpuLane()
    submit = IoThreads.submit

    def interrupted(threads: IoThreads, *job: Any) -> Any:
        if when == "after":
            submit(threads, *job)
        raise KeyboardInterrupt

    lost, block = block_of(), block_of()
    go = Gate()
    lane.run(go.wait_at)
    monkeypatch.setattr(IoThreads, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lane.submit(several(), lost, lambda end: None)
    monkeypatch.undo()
    go.open()
    kind = lane.submit_yielding if yields else lane.submit
    assert kind(several(), block, lambda end: None).wait(TIMEOUT_S)
    assert lane.submit(several(), block, lambda end: None).wait(TIMEOUT_S)
    lane.close()
    assert block[::SIZE].tolist() == [1, 2, 3, 4, 5, 6]
    assert not lost.any()


class Copying:
    """Copies of the lane's thread, which a test holds back one by one."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.allowed = 0
        self.begun = 0
        self.fails_at: int | None = None

    def __call__(self, target: int, source: int, size_bytes: int) -> None:
        with self.changed:
            self.begun += 1
            self.changed.notify_all()
            if self.begun == self.fails_at:
                raise MemoryError("made up")
            assert self.changed.wait_for(lambda: self.allowed >= self.begun, TIMEOUT_S)
        copy_memory(target, source, size_bytes)

    def allow(self, count: int) -> None:
        with self.changed:
            self.allowed = count
            self.changed.notify_all()

    def until_begun(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.begun >= count, TIMEOUT_S)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copying]:
    made = Copying()
    monkeypatch.setattr(lane, "copy_memory", made)
    yield made
    made.allow(1 << 30)


@pytest.fixture
def host() -> Iterator[CpuLane]:
    made = CpuLane()
    yield made
    made.close()


def test_who_waits_is_served_in_the_middle_of_a_run(copying: Copying, host: CpuLane) -> None:
    """An update waits for the copies of what it changes, and not for the rest of the run."""
    told: list[int] = []
    block = block_of()
    transfer = host.submit(Runs(several()), block, told.append)
    assert isinstance(transfer, CpuTransfer)
    copying.until_begun(1)
    let_through: list[bool] = []
    update = threading.Thread(target=lambda: let_through.append(transfer.gate(3 * SIZE, TIMEOUT_S)))
    update.start()
    while not transfer.awaited:
        assert update.is_alive()
    copying.allow(3)  # and the fourth stays where it is
    update.join(TIMEOUT_S / 2)
    assert let_through == [True]
    assert copying.begun == 4
    assert block[: 3 * SIZE].view(3, SIZE)[:, -1].tolist() == [1, 2, 3]
    assert not bool(block[3 * SIZE :].any())
    assert told == [SIZE, 2 * SIZE, 3 * SIZE]
    copying.allow(COUNT)
    assert transfer.wait(TIMEOUT_S)
    assert told[-1] == COUNT * SIZE


def test_a_gate_lets_nothing_through_too_early(copying: Copying, host: CpuLane) -> None:
    transfer = host.submit(Runs(several()), block_of(), lambda end: None)
    copying.allow(2)
    copying.until_begun(3)
    assert not transfer.gate(3 * SIZE, 0.05)
    copying.allow(3)
    assert transfer.gate(3 * SIZE, TIMEOUT_S)
    assert not transfer.gate(4 * SIZE, 0.05)


def test_where_nobody_waits_a_run_is_told_of_once(
    host: CpuLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_RUN_BYTES", 4 * SIZE)
    told: list[int] = []
    block = block_of()
    # As the engine's own lane is given them, too.
    own = DeviceLane(host)
    assert own.submit(Runs(several()), block, told.append).wait(TIMEOUT_S)
    assert told == [4 * SIZE, 6 * SIZE]
    assert block.view(COUNT, SIZE)[:, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_batches_that_are_no_runs_are_told_of_one_by_one(host: CpuLane) -> None:
    told: list[int] = []
    assert host.submit(tuple(several()), block_of(), told.append).wait(TIMEOUT_S)
    assert told == [batch.end for batch in several()]


def test_a_slow_link_copies_one_by_one_as_ever() -> None:
    link = EmulatedLink(1e9)
    told: list[int] = []
    try:
        assert link.submit(Runs(several()), block_of(), told.append).wait(TIMEOUT_S)
    finally:
        link.close()
    assert told == [batch.end for batch in several()]


def test_a_copy_that_fails_within_a_run_ends_the_transfer(copying: Copying, host: CpuLane) -> None:
    told: list[int] = []
    copying.fails_at = 3
    copying.allow(COUNT)
    transfer = host.submit(Runs(several()), block_of(), told.append)
    with pytest.raises(MemoryError, match="made up"):
        transfer.wait(TIMEOUT_S)
    assert told == []
    assert transfer.gate(COUNT * SIZE, TIMEOUT_S)  # there is nothing left to wait for


def test_a_lazy_base_is_copied_in_runs(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[tuple[int, int]]] = []
    copy_run = CpuLane.copy_run

    def seen(self: CpuLane, run: Sequence[Batch], *rest: Any) -> None:
        runs.append([batch[:2] for batch in run])
        copy_run(self, run, *rest)

    monkeypatch.setattr(CpuLane, "copy_run", seen)
    model = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.Linear(400, 400))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with opened(run_folder, state, method="lazy") as ckpt:
        model(torch.ones(2, 400)).sum().backward()
        optimizer.step()
        ckpt.step()
        ckpt.save().durable.result(TIMEOUT_S)
    (run,) = runs
    assert len(run) > 6  # 3 times 2 large tensors, and small ones between them
    assert run == sorted(run)


def test_runs_are_as_large_as_they_may_be_and_keep_the_order() -> None:
    large = Batch(2 * SIZE, 40 << 20, (torch.empty(0, dtype=torch.uint8),))
    more = [Batch((40 << 20) + n, (40 << 20) + n + 1, large.sources) for n in range(3)]
    together = Runs([*several(2), large, *more])
    assert [batch for run in together.runs for batch in run] == list(together)
    assert [len(run) for run in together.runs] == [2, 1, 3]
    assert together.runs is together.runs  # planned once
    assert Runs().runs == ()


def test_what_yields_lets_others_go_first_between_two_of_its_copies(
    copying: Copying, host: CpuLane
) -> None:
    """And jobs come behind both."""
    order: list[str] = []
    slow = host.submit_yielding(several(3), block_of(), lambda end: order.append(f"slow {end}"))
    copying.until_begun(1)
    blocks = block_of(), block_of()
    first = host.submit(Runs(several(2)), blocks[0], lambda end: order.append(f"first {end}"))
    job = host.run(lambda: order.append("job"))
    second = host.submit(tuple(several(2)), blocks[1], lambda end: order.append(f"second {end}"))
    copying.allow(1)
    copying.until_begun(2)
    assert not first.complete
    copying.allow(1 << 20)
    for transfer in (slow, first, second):
        assert transfer.wait(TIMEOUT_S)
        assert transfer.complete
    job.result(TIMEOUT_S)
    ends = [f"second {SIZE}", f"second {2 * SIZE}", f"slow {2 * SIZE}", f"slow {3 * SIZE}"]
    assert order == [f"slow {SIZE}", f"first {2 * SIZE}", *ends, "job"]
    assert all(block[: 2 * SIZE].view(2, SIZE)[:, -1].tolist() == [1, 2] for block in blocks)


def test_what_goes_first_and_fails_is_told_to_whoever_waits_for_it(
    copying: Copying, host: CpuLane
) -> None:
    slow = host.submit_yielding(several(3), block_of(), lambda end: None)
    copying.until_begun(1)
    copying.fails_at = 2
    first = host.submit(tuple(several(2)), block_of(), lambda end: None)
    copying.allow(1 << 20)
    with pytest.raises(MemoryError, match="made up"):
        first.wait(TIMEOUT_S)
    assert slow.wait(TIMEOUT_S)
