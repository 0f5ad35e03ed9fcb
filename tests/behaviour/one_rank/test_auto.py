"""``method="auto"`` on real runs: the first start is lazy; later ones follow the events."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.config.method import presets
from everstep.errors import OptionError
from everstep.events import Event, read_events
from tests.support.command import document, invoke
from tests.support.log.eventful import failing_often, write_events


def state(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return {"model": model, "optimizer": optimizer(model.parameters(), lr=0.01)}  # type: ignore[call-arg]


def train(ckpt: everstep.Checkpointer, live: dict[str, Any], steps: int) -> None:
    recovery = ckpt.resume()
    for _ in range(recovery.step, steps):
        live["model"](torch.ones(2, 4)).sum().backward()
        live["optimizer"].step()
        live["optimizer"].zero_grad()
        ckpt.step()


@pytest.fixture
def run(run_folder: Path) -> Path:
    """A run that has trained a few steps, with events of many failures."""
    live = state()
    with everstep.Checkpointer(run_folder, live, method="auto") as ckpt:
        assert "lazy, every=auto" in repr(ckpt)
        train(ckpt, live, 3)
        ckpt.save()
    shutil.rmtree(run_folder / "events")
    write_events(run_folder, failing_often())
    return run_folder


def test_the_next_start_follows_what_was_measured(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = state()
    with everstep.Checkpointer(run, live, method="auto") as ckpt:
        assert repr(ckpt).startswith(f"<Checkpointer of {run}: logged, every=auto")
        train(ckpt, live, 6)
        assert ckpt.stats().interval_steps == 428, "as the earlier ones have measured"
    shown = capsys.readouterr().err
    assert f"{run}: auto: logged: " in shown
    assert "of the time wasted, failures included; stalled" in shown
    started = [event for event in read_events(run) if event.kind == "started"][-1]
    assert started.details["method"] == "logged"
    assert 0 < started.details["predicted_waste"] < 0.1
    # Two starts in a row: the run goes on from the step of the other method.
    live = state()
    with everstep.Checkpointer(run, live, method="auto") as ckpt:
        assert ckpt.resume().step == 6


def test_a_log_goes_to_disk_where_the_keeper_dies_too(run: Path) -> None:
    shutil.rmtree(run / "events")
    events = failing_often()
    for number, event in enumerate(events):
        if event.kind == "recovery":
            about = {**event.details, "source": "disk"}
            events[number] = replace(event, details=about)
        if event.kind == "base_captured":
            durable = {"tier": "disk", "seconds": 0.01}
            events[number] = replace(event, kind="base_durable", details=durable)
    write_events(run, events)
    live = state()
    with everstep.Checkpointer(run, live, method="auto") as ckpt:
        train(ckpt, live, 25)
    assert list((run / "timeline-00002" / "log").iterdir())


def test_an_optimizer_that_cannot_be_replayed_is_not_logged(run: Path) -> None:
    live = state(torch.optim.LBFGS)
    (run / "events").rename(run.parent / "kept")
    shutil.rmtree(run)
    with everstep.Checkpointer(run, live, method="auto") as ckpt:
        ckpt.resume()
        ckpt.step()
    shutil.rmtree(run / "events")
    (run.parent / "kept").rename(run / "events")
    with everstep.Checkpointer(run, live, method="auto") as ckpt:
        assert "lazy" in repr(ckpt)


class OwnSGD(torch.optim.SGD):
    """A class that no exactness matrix has."""


everstep.replay.exactness.declare(OwnSGD, elementwise=True)


def test_a_method_whose_recovery_is_not_exact_is_not_chosen(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sgd(run, OwnSGD)
    with everstep.Checkpointer(run, state(OwnSGD), method="auto") as ckpt:
        assert ": lazy, every=auto" in repr(ckpt)
    assert "a replay of optimizer is not called exact" in capsys.readouterr().err


def test_a_start_checks_if_its_updates_could_be_logged(run_folder: Path) -> None:
    live = state()
    with everstep.Checkpointer(run_folder, live, method="auto") as ckpt:
        train(ckpt, live, 6)
    checked = [event for event in read_events(run_folder) if event.kind == "log_checked"]
    assert [event.details["why_not"] for event in checked] == [""]


def test_sparse_gradients_are_not_logged(run_folder: Path) -> None:
    words = torch.nn.Embedding(4, 2, sparse=True)
    live = {"words": words, "optimizer": torch.optim.SGD(words.parameters(), lr=0.1)}

    def trained(steps: int) -> str:
        with everstep.Checkpointer(run_folder, live, method="auto") as ckpt:
            recovery = ckpt.resume()
            for _ in range(recovery.step, steps):
                words(torch.tensor([1, 2])).sum().backward()
                live["optimizer"].step()  # type: ignore[operator]
                live["optimizer"].zero_grad()
                ckpt.step()
            ckpt.save()
            return repr(ckpt)

    assert ": lazy, every=auto" in trained(6)
    events = list(read_events(run_folder))
    (checked,) = [event for event in events if event.kind == "log_checked"]
    assert "words" in checked.details["why_not"]
    shutil.rmtree(run_folder / "events")
    often = [event for event in failing_often() if event.kind != "log_checked"]
    often.insert(2, replace(checked, unix_s=often[1].unix_s))
    write_events(run_folder, often)
    assert ": lazy, every=auto" in trained(12)


def sgd(run: Path, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> dict[str, Any]:
    """State of a run that was begun with SGD, whose next start logs."""
    live = state(kind)
    (run / "events").rename(run.parent / "kept")
    shutil.rmtree(run)
    with everstep.Checkpointer(run, live, method="auto") as ckpt:
        train(ckpt, live, 3)
        ckpt.save()
    shutil.rmtree(run / "events")
    (run.parent / "kept").rename(run / "events")
    return live


def test_an_update_that_is_refused_ends_the_log_not_the_start(run: Path) -> None:
    """One update in the middle of a start has gradients that a log refuses."""
    live = sgd(run)

    def trained(steps: int) -> str:
        with everstep.Checkpointer(run, live, method="auto") as ckpt:
            shown = repr(ckpt)
            recovery = ckpt.resume()
            for step in range(recovery.step, steps):
                live["model"](torch.ones(2, 4)).sum().backward()
                if step == 8:
                    weight = live["model"].weight
                    weight.grad = weight.grad.to_sparse()
                live["optimizer"].step()
                live["optimizer"].zero_grad()
                ckpt.step()
                if step == 12:
                    assert ckpt.stats().recoverable_step == 9, "a base of the refused step"
                    assert ckpt.stats().saves == 2, "of the start, and of the refused step"
                    assert ": logged (given up: bases alone), every=auto" in repr(ckpt)
            ckpt.save()
        return shown

    with pytest.warns(RuntimeWarning, match="bases alone.*the gradient of model.weight is not a"):
        assert ": logged, every=auto" in trained(14)
    events = list(read_events(run))
    (checked,) = (e for e in events if e.kind == "log_checked" and e.details["why_not"])
    assert checked.step == 8, "the last one that was logged"
    assert not [event for event in events if event.kind == "failure"]
    assert ": lazy, every=auto" in trained(20)
    assert live["model"].weight.isfinite().all()


def copied_slowly() -> list[Event]:
    """Events in which a copy takes eight steps, of a state that leaves no memory for a log."""
    found = []
    for event in failing_often():
        details = dict(event.details)
        if event.kind == "started":
            details |= {"state_bytes": 1e12, "gradient_bytes": 1e11}
        if event.kind == "base_captured":
            details["seconds"] = 0.8
        if event.kind == "progress":
            details["base_cost_s"] = 0.7
        found.append(replace(event, details=details))
    return found


def test_a_refused_update_ends_bases_over_several_steps(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse gradients come only after a base over several steps."""
    # A state of 10 kB is copied within a step, which leaves no reason for parts.
    parts = {**presets, "gockpt_o": replace(presets["gockpt_o"], parts=2)}
    monkeypatch.setattr("everstep.trainer.job.promised.presets", parts)
    live = sgd(run)
    shutil.rmtree(run / "events")
    write_events(run, copied_slowly())

    def trained() -> torch.Tensor:
        with everstep.Checkpointer(run, live, method="auto", every=4) as ckpt:
            assert "gockpt_o, every 4 steps" in repr(ckpt)
            recovery = ckpt.resume()
            for step in range(recovery.step, 40):
                live["model"](torch.ones(2, 4)).sum().backward()
                if step >= 16:
                    weight = live["model"].weight
                    weight.grad = weight.grad.to_sparse()
                live["optimizer"].step()
                live["optimizer"].zero_grad()
                ckpt.step()
            ckpt.wait()
            durable_step = ckpt.stats().durable_step
            assert durable_step is not None
            assert durable_step >= 36
            ckpt.save()
        return torch.clone(live["model"].weight).detach()

    with pytest.warns(RuntimeWarning, match="bases alone.*is not a plain dense tensor"):
        weights = trained()
    live.update(state(torch.optim.SGD))
    with everstep.Checkpointer(run, live, method="auto") as ckpt:
        assert ": lazy, every=auto" in repr(ckpt)
        assert ckpt.resume().step == 40
    assert torch.equal(live["model"].weight, weights)


def test_weights_that_are_clamped_end_the_log(run: Path) -> None:
    """Writes outside of optimizers need a base in each step, as long as there is a log."""
    live = sgd(run)

    def clamped(steps: int) -> dict[str, torch.Tensor]:
        with everstep.Checkpointer(run, live, method="auto") as ckpt:
            recovery = ckpt.resume()
            for _ in range(recovery.step, steps):
                live["model"](torch.ones(2, 4)).sum().backward()
                live["optimizer"].step()
                with torch.no_grad():
                    live["model"].weight.clamp_(-0.1, 0.1)
                live["optimizer"].zero_grad()
                ckpt.step()
            assert ckpt.stats().saves <= 6
            ckpt.save()
        return {name: value.clone() for name, value in live["model"].state_dict().items()}

    with pytest.warns(RuntimeWarning, match="changed outside its optimizer") as warned:
        trained = clamped(60)
    assert "in 4 of 4 steps" in str(warned[-1].message)
    live.update(state(torch.optim.SGD))
    with everstep.Checkpointer(run, live, method="auto") as ckpt:
        assert ": lazy, every=auto" in repr(ckpt)
        assert ckpt.resume().step == 60
    assert all(torch.equal(live["model"].state_dict()[name], trained[name]) for name in trained)


def test_the_interval_depends_on_who_chooses_the_method(run_folder: Path) -> None:
    for options, shown in (
        ({}, "lazy, every=auto"),
        ({"every": None}, "lazy, on save() only"),
        ({"method": "lazy"}, "lazy, every 100 steps"),
        ({"method": "auto"}, "lazy, every=auto"),
        ({"method": "auto", "every": 100}, "lazy, every 100 steps"),
        ({"method": "auto", "budget": everstep.Budget(overhead=0.01)}, "lazy, every=auto"),
    ):
        ckpt = everstep.Checkpointer(run_folder, state(), **options)  # type: ignore[arg-type]
        assert shown in repr(ckpt)
        ckpt.close()
    with pytest.raises(OptionError, match="needs every='auto'"):
        everstep.Checkpointer(run_folder, state(), every=10, budget=everstep.Budget(overhead=0.01))


def test_an_interval_that_is_given_stays(run_folder: Path) -> None:
    ckpt = everstep.Checkpointer(run_folder, state(), method="auto", every=7)
    assert "lazy, every 7 steps" in repr(ckpt)
    ckpt.close()


def test_a_promise_decides_instead(run_folder: Path) -> None:
    ckpt = everstep.Checkpointer(run_folder, state(), method="auto", lose_at_most="1 step")
    assert "logged" in repr(ckpt)
    ckpt.close()


def test_log_options_are_refused(run_folder: Path) -> None:
    with pytest.raises(OptionError, match="exclude each other"):
        everstep.Checkpointer(
            run_folder, state(), method="auto", log=everstep.LogOptions(to="disk")
        )


def test_the_choice_on_one_screen(run: Path) -> None:
    shown = invoke("plan", "auto", run, columns=160).output
    lines = shown.splitlines()
    assert lines[0].startswith("logged: ")
    rows = [line.split("  ")[0] for line in lines[2:5]]
    assert rows == ["logged, in memory", "lazy", "gockpt_o"]
    assert "a copy takes less than a step" in shown
    assert "with 3 failures: a step 100 ms" in shown
    found = document("plan", "auto", run)
    assert found["method"] == "logged"
    assert found["measured"]["failures"] == 3
    assert found["candidates"][2]["wasted"] is None


def test_nothing_was_measured_yet(run_folder: Path) -> None:
    everstep.Checkpointer(run_folder, state()).close()
    assert "too little was measured yet" in invoke("plan", "auto", run_folder).output
