"""What the keeper is told of captures, and when: behind the training thread's back, yet before
anything depends on it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.arena import Arena
from everstep.capture.batches import Batch
from everstep.capture.lane import CpuLane
from everstep.errors import EverstepError
from everstep.link.wire import Connection
from everstep.seams import SystemClock
from everstep.testing import inspect
from tests.support.lanes import gives_up_soon
from tests.support.world import TIMEOUT_S, Gate, opened

Event = tuple[str, Any]


class Journal:
    """What happens to captures in the training process, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        self.begins: list[dict[str, Any]] = []
        self.tellers: set[str] = set()
        send, progress, mark = Connection.send, Arena.set_progress, CpuLane.copy_now

        def sending(connection: Connection, message: dict[str, Any], *fds: Any) -> None:
            self.events.append((message["kind"], message.get("number")))
            if message["kind"] in ("layout", "begin"):
                self.tellers.add(threading.current_thread().name)
            if message["kind"] == "begin":
                self.begins.append(message)
            send(connection, message, *fds)

        def setting(arena: Arena, index: int, value: int) -> None:
            if value:
                self.events.append(("progress", None))
            progress(arena, index, value)

        def marking(lane: CpuLane, batches: Sequence[Batch], block: torch.Tensor) -> None:
            self.events.append(("mark", None))
            mark(lane, batches, block)

        monkeypatch.setattr(Connection, "send", sending)
        monkeypatch.setattr(Arena, "set_progress", setting)
        monkeypatch.setattr(CpuLane, "copy_now", marking)

    def at(self, *event: Any) -> int:
        """Where an event is; the first of its kind."""
        return self.events.index((event[0], event[1] if len(event) > 1 else None))


def training() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40))
    optimizer = torch.optim.Adam(model.parameters())
    update(model, optimizer)
    return model, optimizer, {"model": model, "optimizer": optimizer}


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()


def test_the_keeper_hears_of_a_capture_before_any_of_it_is_there(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not from the training thread, which has better things to do."""
    _, _, state = training()
    journal = Journal(monkeypatch)
    with opened(run_folder, state, method="lazy", clock=SystemClock()) as ckpt:
        ckpt.step()
        ckpt.save().durable.result(TIMEOUT_S)
    assert journal.at("layout", 1) < journal.at("begin", 1) < journal.at("progress")
    assert journal.at("progress") < journal.at("captured", 1)
    assert threading.current_thread().name not in journal.tellers


def test_what_was_abandoned_before_is_never_begun(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the keeper would wait for bytes that nobody sends."""
    model, optimizer, state = training()
    journal, gate = Journal(monkeypatch), Gate()
    options: dict[str, Any] = {"progress_timeout_s": TIMEOUT_S, "on_failure": lambda error: None}
    with opened(run_folder, state, method="lazy", clock=SystemClock(), **options) as ckpt:
        ckpt.step()
        inspect(ckpt).lane.run(gate.wait_at)
        assert gate.reached.wait(TIMEOUT_S)
        save = ckpt.save()
        with monkeypatch.context() as impatient:
            gives_up_soon(impatient, TIMEOUT_S)
            update(model, optimizer)  # overtakes the copy
        gate.open()
        assert isinstance(save.durable.exception(TIMEOUT_S), EverstepError)
        ckpt.step()
        ckpt.save().durable.result(TIMEOUT_S)
    assert ("abandon", 1) in journal.events
    assert [message["number"] for message in journal.begins] == [2]


def test_the_keeper_forgets_a_base_before_its_memory_is_written_again(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that its owner has no more interest in: a trainer that is killed in between would
    leave half of the next state under the old one's name."""
    _, _, state = training()
    journal = Journal(monkeypatch)
    with opened(run_folder, state, method="lazy", clock=SystemClock()) as ckpt:
        ckpt.step()
        save = ckpt.save()
        assert save.durable.cancel()
        ckpt.wait()
        first = len(journal.events)
        ckpt.step()
        ckpt.save().durable.result(TIMEOUT_S)
    one, other = journal.begins
    assert one["offset"] == other["offset"], "the same memory"
    assert journal.at("forget", 1) < journal.events.index(("mark", None), first)
