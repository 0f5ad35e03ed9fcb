"""Events of a real run: in the run folder, by ``on_event=``, and after a kill."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.events import Event, read_events
from tests.support.following import until
from tests.support.trainers import finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S


def training(run: Path, steps: int, *, copies: int = 0, **options: Any) -> everstep.Stats:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with everstep.Checkpointer(run, state, every=5, **options) as ckpt:
        recovery = ckpt.resume()
        for _ in range(recovery.step, steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
        ckpt.wait()
        until(lambda: ckpt.stats().copies >= copies, "the copies")
        return ckpt.stats()


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def of_kind(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


def test_the_life_of_a_run_is_told(run_folder: Path) -> None:
    told: list[Event] = []
    stats = training(run_folder, 10, on_event=told.append)
    assert kinds(told)[:3] == ["started", "keeper", "recovery"]
    assert kinds(told)[-2:] == ["progress", "closed"]
    for step in (5, 10):
        one = [event.kind for event in told if event.step == step and "base" in event.kind]
        assert one == ["base_begun", "base_captured", "base_durable"]
    durable = of_kind(told, "base_durable")[-1]
    assert durable.details["tier"] == "disk"
    assert durable.details["size_bytes"] > 0
    last = of_kind(told, "progress")[-1]
    assert last.step == 10
    assert last.details["durable_step"] == 10
    assert last.details["committed"] == stats.committed == 2
    assert last.details["stall_s"].keys() == stats.stall_s.keys()
    recovery = of_kind(told, "recovery")[0]
    assert (recovery.step, recovery.details["source"], recovery.timeline) == (0, "fresh", 1)
    logged = read_events(run_folder)
    assert [(one.kind, one.step, one.details) for one in logged] == [
        (one.kind, one.step, one.details) for one in told
    ]


def test_a_log_tells_how_far_it_leads(run_folder: Path) -> None:
    told: list[Event] = []
    log = everstep.LogOptions(to="disk", lag_steps=0)
    training(run_folder, 13, method="logged", log=log, on_event=told.append)
    logged = [event.step for event in of_kind(told, "log_durable")]
    assert logged[-1] == 13
    assert logged == sorted(logged)


def test_copies_are_told_with_their_place(run_folder: Path, tmp_path: Path) -> None:
    told: list[Event] = []
    copies = str(tmp_path / "copies")
    training(run_folder, 5, copies=1, tiers=[copies], on_event=told.append)
    assert [event.details["tier"] for event in of_kind(told, "base_durable")] == ["disk", copies]
    assert of_kind(told, "progress")[-1].details["recoverable_from"] == {copies: 5}


def test_a_listener_that_fails_or_hangs_does_not_disturb_training(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.events.stream._CLOSE_S", 0.05)
    free = threading.Event()

    def fails(event: Event) -> None:
        raise KeyError(event.kind)

    def hangs(event: Event) -> None:
        free.wait(TIMEOUT_S)

    stats = training(run_folder, 10, on_event=[fails, hangs])
    free.set()
    assert stats.committed == 2
    assert kinds(read_events(run_folder))[-1] == "closed"


def test_failures_are_told(run_folder: Path) -> None:
    told: list[Event] = []
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    state: dict[str, Any] = {"model": model}
    seen: list[Exception] = []
    with everstep.Checkpointer(
        run_folder, state, every=None, on_event=told.append, on_failure=seen.append
    ) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.save().durable.result(TIMEOUT_S)
        # The manifest cannot be created where a directory has its name.
        (run_folder / "timeline-00001/base/000000000002/manifest.json").mkdir(parents=True)
        ckpt.step()
        ckpt.save()
        ckpt.wait()
        ckpt.step()
    failed = of_kind(told, "failure")
    assert [event.details["message"] for event in failed] == [str(error) for error in seen]
    assert of_kind(told, "base_failed")[0].step == 2


def durable_steps(run: Path) -> list[int]:
    return [event.step for event in of_kind(read_events(run), "base_durable")]


KILLED = """
import os, signal, sys, torch, everstep
run = sys.argv[1]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer}
with everstep.Checkpointer(run, state, every=4, method="logged") as ckpt:
    recovery = ckpt.resume()
    print(recovery.step, flush=True)
    for step in range(recovery.step, 10):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        ckpt.step()
        if step == 6 and not recovery.step:
            ckpt.wait()
            print("killed next", flush=True)
            sys.stdin.read()
"""


def test_a_kill_leaves_the_events_before_it(run_folder: Path) -> None:
    trainer = start_trainer(KILLED, str(run_folder))
    lines = [trainer.stdout.readline().strip() for _ in range(2)]
    assert lines == ["0", "killed next"]
    until(lambda: durable_steps(run_folder) == [1, 4], "the events of the bases")
    os.kill(trainer.pid, signal.SIGKILL)
    finish_trainer(trainer, TIMEOUT_S)
    trainer = start_trainer(KILLED, str(run_folder))
    status, out, errors = finish_trainer(trainer, TIMEOUT_S)
    assert (status, out) == (0, "7\n"), errors
    events = read_events(run_folder)
    first = [event for event in events if event.timeline in (0, 1) and event.kind != "started"]
    assert kinds(first)[:3] == ["keeper", "recovery", "base_begun"]
    second = of_kind([event for event in events if event.timeline == 2], "recovery")[0]
    assert (second.step, second.details["source"]) == (7, "memory")
    assert second.details["exact"]
    assert events[-1].kind == "closed"
