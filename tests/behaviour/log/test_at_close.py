"""What the log in memory has is not let go by a ``close()`` behind something that went wrong."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpointer import Checkpointer
from everstep.config.options import LogOptions
from everstep.errors import (
    EverstepError,
    RecoveryError,
    StateError,
    StorageError,
    UnsupportedStateError,
)
from everstep.format.names import base_dir, shard_name
from everstep.link.registry import list_keepers
from everstep.restore.start.report import Recovery, ResumeRequest
from everstep.restore.start.resume import resume
from everstep.trainer.session import start as starts
from tests.support.keepers import end_keepers
from tests.support.log.last_mark import Training, resumed, same
from tests.support.logged import invoke
from tests.support.serving import die

STEPS = 7


def train(it: Training, ckpt: Any, steps: int) -> list[Any]:
    for _ in range(steps):
        it.train()
        ckpt.step()
    return it.seen()


def in_the_way(run: Path, step: int) -> Path:
    """From now on no base of this step can be written."""
    found = Path(base_dir(run, 1, step) / shard_name(0))
    found.mkdir(parents=True)
    return found


def comes_back(run: Path, step: int, wanted: list[Any]) -> Recovery:
    recovery, found = resumed(run)
    assert (recovery.step, recovery.exact) == (step, True)
    assert same(found, wanted)
    assert str(run) not in [keeper.run for keeper in list_keepers()]
    return recovery


@pytest.mark.thinned(3)
@pytest.mark.parametrize("again", [None, STEPS - 1, STEPS])
@pytest.mark.parametrize("leaves", ["close", "raise"])
def test_a_resume_that_was_interrupted(
    leaves: str,
    again: int | None,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The state in memory is that of no step, so there is no last base."""
    it = Training()

    def interrupted(request: ResumeRequest, known: Any) -> Any:
        def touch() -> None:
            request.on_touch()
            raise KeyboardInterrupt

        return resume(dataclasses.replace(request, on_touch=touch), known)

    with contextlib.ExitStack() as stack, pytest.raises(KeyboardInterrupt):
        ckpt = it.opened(run_folder)
        if leaves == "close":
            stack.callback(ckpt.close)
        else:
            stack.push(ckpt)
        ckpt.resume()
        wanted = train(it, ckpt, STEPS)
        monkeypatch.setattr(starts, "resume", interrupted)
        ckpt.resume(again)
    monkeypatch.setattr(starts, "resume", resume)
    assert "the keeper" in (said := capfd.readouterr().err)
    assert "for a while; a resume() within that time restores them" in said
    comes_back(run_folder, STEPS, wanted)


@pytest.mark.parametrize("policy", ["warn", "function", "raise"])
def test_a_last_base_of_which_somebody_else_has_heard(
    policy: str, run_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    it, heard = Training(), list[EverstepError]()
    how: dict[str, Any] = {"warn": "warn", "function": heard.append, "raise": "raise"}
    ckpt = it.opened(run_folder, on_failure=how[policy])
    ckpt.resume()
    wanted = train(it, ckpt, STEPS)
    ckpt.wait()
    stone = in_the_way(run_folder, STEPS)
    with contextlib.ExitStack() as stack:
        if policy == "raise":
            stack.enter_context(pytest.raises(StorageError))
        elif policy == "warn":
            stack.enter_context(pytest.warns(RuntimeWarning, match="base"))
        ckpt.close()
    assert len(heard) == (policy == "function")
    assert "for a while; a resume() within that time restores them" in capfd.readouterr().err
    stone.rmdir()
    comes_back(run_folder, STEPS, wanted)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("step", [5, STEPS])
@pytest.mark.parametrize("mended", [True, False])
def test_a_base_whose_failure_was_raised_before(mended: bool, step: int, run_folder: Path) -> None:
    """``close()`` takes another, and if that fails as well, the keeper stays."""
    it = Training()
    ckpt = it.opened(run_folder)
    ckpt.resume()
    train(it, ckpt, 2)
    ckpt.wait()
    stone = in_the_way(run_folder, step)
    wanted = train(it, ckpt, step - 2)
    ckpt.save()
    with pytest.raises(StorageError):
        ckpt.wait()
    if mended:
        stone.rmdir()
        ckpt.close()
    else:
        with pytest.raises(StorageError):
            ckpt.close()
        stone.rmdir()
    comes_back(run_folder, step, wanted)


@pytest.mark.parametrize("to", ["memory", "disk"])
def test_stop_does_not_end_the_keeper_of_a_killed_process(to: str, run_folder: Path) -> None:
    it = Training()
    options: dict[str, Any] = {"log": LogOptions(to=to)}  # type: ignore[arg-type]
    ckpt = it.opened(run_folder, **options)
    ckpt.resume()
    wanted = train(it, ckpt, STEPS)
    ckpt.wait()
    die(ckpt)
    result = invoke("stop", run_folder)
    assert result.exit_code == (3 if to == "memory" else 0)
    assert (f"the steps up to {STEPS}" in result.stdout) == (to == "memory")
    recovery, found = resumed(run_folder, **options)
    assert (recovery.step, recovery.exact) == (STEPS, True)
    assert same(found, wanted)


def test_what_was_undone_is_not_kept(run_folder: Path) -> None:
    """Nor does a keeper stay without need: training went back, and has a base of that."""
    it = Training()
    ckpt = it.opened(run_folder)
    ckpt.resume()
    train(it, ckpt, STEPS)
    ckpt.rewind(6)
    wanted = it.seen()
    ckpt.close()
    assert comes_back(run_folder, 6, wanted).source == "disk"


def test_a_resume_that_fails_leaves_the_log_where_it_is(run_folder: Path) -> None:
    it = Training()
    ckpt = it.opened(run_folder)
    ckpt.resume()
    wanted = train(it, ckpt, STEPS)
    with pytest.raises(RecoveryError):
        ckpt.rewind(99)
    ckpt.close()
    assert comes_back(run_folder, STEPS, wanted).source == "disk"


def test_where_resume_was_forgotten_that_is_what_is_said(run_folder: Path) -> None:
    """Not that there is no keeper to be closed."""
    it = Training()
    with it.opened(run_folder) as ckpt:
        ckpt.resume()
        wanted = train(it, ckpt, STEPS)
    for leaves in ("with", "close"):
        it = Training()
        it.train()
        with pytest.raises(StateError, match="resume"), contextlib.ExitStack() as stack:
            ckpt = it.opened(run_folder)
            if leaves == "with":
                stack.enter_context(ckpt)
            else:
                stack.callback(ckpt.close)
            ckpt.step()
    comes_back(run_folder, STEPS, wanted)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["sync", "lazy", "logged"])
def test_a_link_in_the_place_of_a_base_is_not_followed(method: str, run_folder: Path) -> None:
    """No reader does: it would be called durable, and be in nobody's run."""
    outside = run_folder.parent / "outside"
    outside.mkdir()
    it = Training()
    ckpt = Checkpointer(run_folder, {"model": it.model, "optimizer": it.optimizer}, method=method)
    ckpt.resume()
    train(it, ckpt, 2)
    ckpt.save()
    ckpt.wait()
    Path(base_dir(run_folder, 1, 3)).symlink_to(outside)
    train(it, ckpt, 1)
    with pytest.raises(StorageError, match="is a link"):
        ckpt.save().durable.result(60.0)
        ckpt.wait()
    assert list(outside.iterdir()) == []
    Path(base_dir(run_folder, 1, 3)).unlink()
    with contextlib.suppress(StorageError):
        ckpt.wait()
    ckpt.save()
    ckpt.close()
    again = Training()
    parts = {"model": again.model, "optimizer": again.optimizer}
    with Checkpointer(run_folder, parts, method=method) as other:
        assert other.resume().step == 3


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", ["lazy", "logged", "gemini", "gockpt"])
def test_a_state_that_cannot_be_stored_is_told_by_the_policy(method: str, run_folder: Path) -> None:
    """Of whatever method; and the log goes on behind a base of one that can."""
    it, heard = Training(), list[EverstepError]()
    state: dict[str, Any] = {"model": it.model, "optimizer": it.optimizer, "best": None}
    made: dict[str, Any] = {"method": method, "every": 2}
    with Checkpointer(run_folder, state, on_failure=heard.append, **made) as ckpt:
        ckpt.resume()
        train(it, ckpt, 3)
        state["best"] = object()
        train(it, ckpt, 1)
        assert {type(error) for error in heard} == {UnsupportedStateError}
        state["best"] = 0.5
        del heard[:]
        train(it, ckpt, 3)
        ckpt.save()
        assert not heard
    wanted, again = it.seen(), Training()
    parts: dict[str, Any] = {"model": again.model, "optimizer": again.optimizer, "best": None}
    with Checkpointer(run_folder, parts, **made) as other:
        found = other.resume()
        assert (found.step, found.exact, parts["best"]) == (STEPS, True, 0.5)
        again.data = it.data
        assert same(again.seen(), wanted)
    strict = Training()
    state = {"model": strict.model, "optimizer": strict.optimizer, "best": None}
    with Checkpointer(run_folder.parent / "raises", state, **made) as ckpt:
        ckpt.resume()
        train(strict, ckpt, 1)
        state["best"] = object()
        with pytest.raises(UnsupportedStateError):
            train(strict, ckpt, 1)
        state["best"] = 1
    end_keepers(run_folder.parent)  # one stays with the log of a step that nobody could store
