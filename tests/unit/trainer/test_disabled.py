"""``EVERSTEP_DISABLE=1``: the same program without checkpoints."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep import cli
from everstep.errors import OptionError, RecoveryError, StateError
from everstep.link.registry import list_keepers
from everstep.restore.start import Recovery

VARIABLE = "EVERSTEP_DISABLE"


@pytest.fixture
def disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


def parts() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 2)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train(
    run: Path, steps: int, state: dict[str, Any], **options: Any
) -> tuple[torch.Tensor, Recovery]:
    with everstep.Checkpointer(run, state, every=2, **options) as ckpt:
        recovery = ckpt.resume()
        for step in range(recovery.step, steps):
            torch.manual_seed(step)
            state["model"](torch.randn(4, 3)).square().sum().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            ckpt.step()
            ckpt.save()
    return state["model"].weight.detach().clone(), recovery


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("method", ["lazy", "logged", "sync"])
def test_a_program_runs_as_without_everstep(
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected, _ = train(tmp_path / "saved", 5, parts(), method=method)
    capsys.readouterr()
    monkeypatch.setenv(VARIABLE, "1")
    keepers = list_keepers()
    handler = signal.getsignal(signal.SIGTERM)
    state = parts()
    places = [str(tmp_path / "copies")]
    with everstep.Checkpointer(tmp_path / "run", state, method=method, preempt=True, tiers=places):
        assert signal.getsignal(signal.SIGTERM) is handler
        optimizer = state["optimizer"]
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert not state["model"]._forward_pre_hooks
        assert list_keepers() == keepers
    capsys.readouterr()
    weight, recovery = train(tmp_path / "run", 5, state, method=method, tiers=places)
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpointing is disabled by EVERSTEP_DISABLE" in line
    assert torch.equal(weight, expected)
    assert (recovery.step, recovery.source, recovery.base_step) == (0, "fresh", None)
    assert "disabled by EVERSTEP_DISABLE" in recovery.notes[0]
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "copies").exists()


def test_a_run_with_a_history_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train(run, 4, parts())
    before = contents(run)
    monkeypatch.setenv(VARIABLE, "1")
    _, recovery = train(run, 3, parts())
    assert recovery.step == 0
    assert contents(run) == before
    monkeypatch.delenv(VARIABLE)
    assert train(run, 4, parts())[1].step == 4


@pytest.mark.usefixtures("disabled")
def test_a_save_does_not_claim_to_be_durable(tmp_path: Path) -> None:
    with everstep.Checkpointer(tmp_path / "run", parts()) as ckpt:
        ckpt.resume()
        ckpt.step()
        save = ckpt.save()
        assert save.disabled
        assert save.staged.result(timeout=0) is None
        assert save.durable.result(timeout=0) == 0
        assert not save.is_durable
        assert not save.is_staged
        assert not save.is_lost
        assert save.step == 1


@pytest.mark.usefixtures("disabled")
def test_all_other_calls_do_nothing(tmp_path: Path) -> None:
    ckpt = everstep.Checkpointer(tmp_path / "run", parts(), preempt=True)
    ckpt.resume()
    ckpt.resume()
    ckpt.before_update()
    ckpt.after_update()
    ckpt.step()
    ckpt.wait(1.0)
    assert not ckpt.preempted
    stats = ckpt.stats()
    assert (stats.step, stats.saves, stats.durable_step) == (1, 0, None)
    assert stats.stall_s["gate"] == 0
    assert "disabled by EVERSTEP_DISABLE; at step 1" in repr(ckpt)
    ckpt.close()
    ckpt.close()
    assert "closed" in repr(ckpt)
    with pytest.raises(StateError, match="closed"):
        ckpt.step()


@pytest.mark.usefixtures("disabled")
def test_a_program_that_fails_fails_with_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), everstep.Checkpointer(tmp_path / "run", parts()) as ckpt:
        ckpt.resume()
        raise ZeroDivisionError


@pytest.mark.usefixtures("disabled")
def test_a_step_that_only_a_base_could_give_is_refused(tmp_path: Path) -> None:
    """A training that went on from its present state would take it for that of the step."""
    with everstep.Checkpointer(tmp_path / "run", parts()) as ckpt:
        with pytest.raises(RecoveryError, match="step 7 cannot be restored") as caught:
            ckpt.resume(7)
        assert caught.value.hint == "unset EVERSTEP_DISABLE"
        ckpt.resume(0)
        ckpt.step()
        for call in (ckpt.resume, lambda: ckpt.rewind(0), lambda: ckpt.rewind(1)):
            with pytest.raises(RecoveryError, match="cannot be restored"):
                call()


@pytest.mark.usefixtures("disabled")
def test_initial_weights_are_loaded(tmp_path: Path) -> None:
    state = parts()
    weights = {"weight": torch.full((2, 3), 7.0), "bias": torch.zeros(2)}
    with everstep.Checkpointer(tmp_path / "run", state) as ckpt:
        recovery = ckpt.resume(initial={"model": weights})
    assert torch.equal(state["model"].weight, weights["weight"])
    assert any("begins with" in note for note in recovery.notes)


@pytest.mark.usefixtures("disabled")
@pytest.mark.parametrize(
    "options",
    [
        {"method": "lasy"},
        {"every": 0},
        {"tiers": ["relative"], "keep": 0},
        {"tiers": "s3://bucket"},
        {"preempt": 3},
        {"declared": "model/*"},
        {"unknown": 1},
    ],
)
def test_options_are_checked(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        everstep.Checkpointer(tmp_path / "run", parts(), **options)


def test_ranks_do_not_meet_and_the_first_one_says_it(
    tmp_path: Path,
    disabled: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    train(tmp_path / "run", 2, parts())
    assert not capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    train(tmp_path / "run", 2, parts())
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_open_checkpointer_of_the_run_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = parts()
    with everstep.Checkpointer(
        tmp_path / "run", state, keeper=everstep.KeeperOptions(process=False)
    ) as ckpt:
        ckpt.resume()
        monkeypatch.setenv(VARIABLE, "1")
        with everstep.Checkpointer(tmp_path / "run", parts()) as other:
            other.resume()
            other.step()
        ckpt.step()
        assert ckpt.save().durable.result(timeout=60) > 0


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_values_that_disable(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with everstep.Checkpointer.from_config({"path": str(tmp_path / "run")}, parts()) as ckpt:
        assert ckpt.save().disabled


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_values_that_do_not(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with everstep.Checkpointer(
        tmp_path / "run", parts(), keeper=everstep.KeeperOptions(process=False)
    ) as ckpt:
        ckpt.resume()
        assert not ckpt.save().disabled


def test_another_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "maybe")
    with pytest.raises(OptionError, match="EVERSTEP_DISABLE='maybe'"):
        everstep.Checkpointer(tmp_path / "run", parts())


@pytest.mark.usefixtures("disabled")
def test_commands_train_with_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """``everstep demo`` and ``everstep bench`` would show nothing without them."""
    monkeypatch.setattr(sys, "argv", ["everstep", "--version"])
    assert cli.main() == 0
    assert VARIABLE not in cli.os.environ
