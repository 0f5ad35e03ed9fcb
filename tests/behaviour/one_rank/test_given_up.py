"""A log that ``method="auto"`` has chosen, in a loop that no log suits."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.events import Event, read_events
from everstep.testing import inspect
from tests.support.log.eventful import failing_often, write_events

pytestmark = pytest.mark.filterwarnings("ignore:.*records no gradients any more")

Loop = Callable[[int], None]
SPARSE = 8  # the step whose gradients a log refuses


class Training:
    """A small training, whose run has events that let the next start log.

    Args:
        kind: makes the optimizer of the parameters.
        options: of each Checkpointer.
    """

    def __init__(self, run: Path, events: list[Event] | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.run = run
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self._events = events
        self._options = options

    def begin(self) -> None:
        """Train the first start, and replace its events."""
        self.train(3)
        shutil.rmtree(self.run / "events")
        write_events(self.run, self._events or failing_often())

    def update(self, step: int) -> None:
        """Make one update; that of :data:`SPARSE` is one that a log refuses."""
        self.model(torch.randn(8, 4)).sum().backward()
        if step == SPARSE:
            weight = self.model[0].weight
            weight.grad = weight.grad.to_sparse()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def open(self, **options: Any) -> everstep.Checkpointer:
        return everstep.Checkpointer(self.run, self.state, **{**self._options, **options})

    def train(self, steps: int, update: Loop | None = None, **options: Any) -> str:
        """Train to a step, and save it; return the settings of the start."""
        with self.open(**options) as ckpt:
            shown = repr(ckpt)
            recovery = ckpt.resume()
            for step in range(recovery.step, steps):
                (update or self.update)(step)
                ckpt.step()
            ckpt.save()
        return shown


@pytest.fixture
def training(run_folder: Path) -> Training:
    found = Training(run_folder)
    found.begin()
    return found


def test_weights_that_were_swapped_in_are_not_called_exact(training: Training) -> None:
    """The log no longer sees writes to weights after it was given up: nobody may rely on it."""
    with training.open() as ckpt:
        assert ": logged" in repr(ckpt)
        for step in range(ckpt.resume().step, 12):
            training.update(step)
            ckpt.step()
        assert inspect(ckpt).recorder.is_over
        try:
            with torch.no_grad():
                training.model[0].weight.fill_(7.0)
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            ckpt.save()
    with training.open(method="lazy") as ckpt:
        assert not ckpt.resume().exact


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_save_in_a_signal_handler_is_no_error(training: Training, gives_up: bool) -> None:
    taken = []
    before = signal.getsignal(signal.SIGUSR1)

    class Kick(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            signal.raise_signal(signal.SIGUSR1)
            return x

    with training.open() as ckpt:
        assert ": logged" in repr(ckpt)
        signal.signal(signal.SIGUSR1, lambda *_: taken.append(ckpt.save()))
        try:
            for step in range(ckpt.resume().step, 7):
                training.update(SPARSE if gives_up and step == 4 else step)
                ckpt.step()
            Kick()(training.model(torch.randn(8, 4)))
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert [save.step for save in taken] == [7]


def test_an_optimizer_whose_state_dict_encodes_is_not_logged(run_folder: Path) -> None:
    training = Training(run_folder)

    def halved(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        values = state["state"].items()
        half = {key: {name: one.half() for name, one in each.items()} for key, each in values}
        return {**state, "state": half}

    training.optimizer.register_state_dict_post_hook(halved)
    training.begin()
    assert ": logged" in training.train(6)
    checked = [e for e in read_events(run_folder) if e.kind == "log_checked"]
    assert "encodes the optimizer's state" in checked[-1].details["why_not"]
    assert ": lazy" in training.train(9)
    # A start without a log finds it out by itself.
    shutil.rmtree(run_folder / "events")
    training.train(20)
    checked = [e for e in read_events(run_folder) if e.kind == "log_checked"]
    assert "encodes the optimizer's state" in checked[-1].details["why_not"]


def test_a_declared_update_that_is_not_announced_ends_the_log(run_folder: Path) -> None:
    average = torch.nn.Linear(4, 4)

    @torch.no_grad()
    def follow() -> None:
        for mine, theirs in zip(average.parameters(), training.model[0].parameters(), strict=True):
            mine.lerp_(theirs, 0.1)

    def update(step: int) -> None:
        training.update(step)
        follow()  # without before_update() and after_update()

    training = Training(run_folder, declared={"average/*": follow})
    training.state["average"] = average
    training.begin()
    assert ": logged" in training.train(7, update)
    checked = [e for e in read_events(run_folder) if e.kind == "log_checked"]
    assert "its update was not announced" in checked[-1].details["why_not"]
    assert ": lazy" in training.train(9, update)


def test_a_base_that_fails_after_the_end_of_the_log_is_taken_again(training: Training) -> None:
    failures: list[Exception] = []
    with training.open(every=1000, on_failure=failures.append) as ckpt:
        assert ": logged" in repr(ckpt)
        refused = SPARSE + 1
        for step in range(ckpt.resume().step + 1, 40):
            place = training.run / f"timeline-00002/base/{step:012d}"
            if step == refused:
                ckpt.wait()
                place.touch()  # no base can be written there
            training.update(step - 1)
            ckpt.step()
            if step == refused:
                ckpt.wait()
        ckpt.wait()
        assert any(isinstance(one, everstep.errors.StorageError) for one in failures)
        durable_step = ckpt.stats().durable_step
        assert durable_step is not None
        assert durable_step > refused


def test_records_of_a_log_on_disk_are_written_and_released(run_folder: Path) -> None:
    events = []
    for event in failing_often():
        details = dict(event.details)
        if event.kind == "recovery":
            details["source"] = "disk"
        if event.kind == "base_captured":
            event = replace(event, kind="base_durable")
            details |= {"tier": "disk", "seconds": 0.01}
        events.append(replace(event, details=details))
    training = Training(run_folder, events)
    training.begin()
    with training.open(every=100) as ckpt:
        assert ": logged" in repr(ckpt)
        for step in range(ckpt.resume().step, SPARSE + 1):
            training.update(step)
            ckpt.step()
        for step in range(5):
            training.update(step)
            ckpt.step()
        ckpt.wait()
        assert inspect(ckpt).recorder.is_over
        assert not inspect(ckpt).recorder.memory.kept


def test_a_reason_outlives_the_events_that_are_read(training: Training) -> None:
    training.train(12)
    training.train(14)
    newest = [e for e in read_events(training.run, newest=1) if e.kind == "log_checked"]
    assert "is not a plain dense tensor" in newest[-1].details["why_not"]
