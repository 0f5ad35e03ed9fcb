"""Compressed training with a log of what it consumes (LowDiff): small, and exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.filesize import decimal

import everstep
from everstep.compress.compressor import Compressor
from everstep.errors import OptionError
from everstep.testing import inspect
from tests.support.log.every_step import World, opened, run_steps
from tests.support.serving import Bench, die, serving


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def compressed(seed: int, **options: Any) -> World:
    world = World(seed=seed)
    options = {"ratio": 0.1, "dense_below": 30} | options
    world.state["compressor"] = Compressor(world.optimizer, **options)
    return world


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", ["topk", "threshold", "int8", "adaptive"])
@pytest.mark.parametrize("feedback", [True, False])
def test_a_killed_trainer_goes_on_as_if_nothing_had_been(
    served: Bench, kind: str, feedback: bool
) -> None:
    """Residuals of error feedback are state: with them, the steps that follow are the same."""
    world = compressed(1, kind=kind, error_feedback=feedback)
    ckpt = opened(served.run, world, every=100, method="lowdiff")
    ckpt.resume()
    states = run_steps(ckpt, world, 6)
    inspect(ckpt).saver.finish_captures()
    rng = torch.get_rng_state()
    die(ckpt)
    further = []
    for _ in range(3):  # as it would have gone on
        world.train()
        further.append(world.snapshot())
    torch.set_rng_state(rng)
    other = compressed(9, kind=kind, error_feedback=feedback)
    again = opened(served.run, other, method="lowdiff")
    recovery = again.resume()
    assert (recovery.step, recovery.replayed, recovery.exact) == (6, 5, True)
    assert other.snapshot() == states[6]
    assert [state for _, state in sorted(run_steps(again, other, 3).items())] == further
    again.close()


@pytest.mark.parametrize("method", ["logged", "lowdiff"])
def test_another_default_device_makes_no_difference(method: str, served: Bench) -> None:
    """``torch.set_default_device("cuda")``, of a training in host memory: what replay makes for
    itself lies there, too."""
    away = torch.device("meta")
    world, states = compressed(1), {}
    with away:
        ckpt = opened(served.run, world, every=100, method=method)
        ckpt.resume()
    for step in range(1, 7):
        world.train()
        with away:
            ckpt.step()
        states[step] = world.snapshot()
    with away:
        inspect(ckpt).saver.finish_captures()
        die(ckpt)
    other = compressed(9)
    with away:
        again = opened(served.run, other, method=method)
        recovery = again.resume()
        assert (recovery.step, recovery.replayed, recovery.exact) == (6, 5, True)
        again.close()
    assert other.snapshot() == states[6]


def test_without_error_feedback_the_log_is_small(run_folder: Path) -> None:
    sizes = {}
    for name, world, method in (
        ("dense", World(), "logged"),
        ("topk", compressed(1, ratio=0.02, error_feedback=False), "lowdiff"),
    ):
        with opened(run_folder / name, world, method=method, every=100) as ckpt:
            ckpt.resume()
            run_steps(ckpt, world, 2)
            before = inspect(ckpt).recorder.stats.record_bytes
            run_steps(ckpt, world, 1)
            sizes[name] = inspect(ckpt).recorder.stats.record_bytes - before
    rng = 5056 + 5157 + 2000  # of torch and Python, and objects: the same in both
    assert sizes["topk"] - rng < (sizes["dense"] - rng) / 2, sizes


@pytest.mark.parametrize("feedback", [True, False])
def test_the_start_says_what_residuals_take(
    run_folder: Path, capsys: pytest.CaptureFixture[str], feedback: bool
) -> None:
    world = compressed(1, error_feedback=feedback)
    with opened(run_folder, world, method="lowdiff", every=100) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 1)
        kept = world.state["compressor"].state_dict()["residuals"].values()
    took = sum(residual.nbytes for residual in kept)
    assert (took > 0) == feedback
    said = f"compressed gradients and {decimal(took)} of residuals and "
    told = capsys.readouterr().err
    assert (said in told) == feedback
    assert ("residuals" in told) == feedback


@pytest.mark.thinned(2)
@pytest.mark.parametrize("what", ["a kept element", "an element that was left out", "a sign"])
def test_a_gradient_changed_behind_the_compressor_is_not_recorded(
    run_folder: Path, what: str
) -> None:
    world = compressed(1)
    with opened(run_folder, world, method="lowdiff", every=100, on_failure="warn") as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)

        def spoil(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            flat = world.model[0].weight.grad.view(-1)
            kept = bool(what == "a kept element")
            at = int(torch.nonzero((flat != 0) == kept)[0])
            flat[at] = -0.0 if what == "a sign" else flat[at] * 2 + 1e-3

        handle = world.optimizer.register_step_pre_hook(spoil)
        with pytest.warns(RuntimeWarning, match="was changed after it was compressed"):
            run_steps(ckpt, world, 2)
        handle.remove()
        assert inspect(ckpt).recorder.stats.holes > 0


def test_gradients_are_looked_at_only_where_somebody_could_have_changed_them(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = compressed(1)
    looks = []
    check = type(world.state["compressor"]).check
    monkeypatch.setattr(
        type(world.state["compressor"]), "check", lambda self: (looks.append(1), check(self))
    )
    first = world.optimizer.register_step_pre_hook(lambda *_: None)
    assert not world.state["compressor"].is_last, "no recorder looks on"
    with opened(run_folder, world, method="lowdiff", every=100) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        looks.clear()
        first.remove()
        run_steps(ckpt, world, 2)
        assert looks == []
        assert world.state["compressor"].is_last
        later = world.optimizer.register_step_pre_hook(lambda *_: None)
        run_steps(ckpt, world, 2)
        assert not world.state["compressor"].is_last
        assert len(looks) == 2
        later.remove()


@pytest.mark.parametrize("feedback", [True, False])
def test_residuals_that_are_in_no_part_of_the_state_are_said(
    run_folder: Path, caplog: pytest.LogCaptureFixture, feedback: bool
) -> None:
    world = compressed(1, error_feedback=feedback)
    with opened(run_folder / "saved", world, method="logged"):
        assert "residuals" not in caplog.text
        assert "is not in the state" not in caplog.text
    del world.state["compressor"]
    with opened(run_folder / "lost", world, method="logged"):
        said = "a Compressor compresses gradients of 'optimizer', which is not in the state"
        assert (said in caplog.text) == feedback


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_one_process_exchanges_with_nobody_and_logs_what_it_would_have_sent(
    run_folder: Path, one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    from everstep.compress.ddp import DDPCompression, compressed_mean

    def made(seed: int) -> World:
        world = World(seed=seed)
        ddp = torch.nn.parallel.DistributedDataParallel(world.model)
        hook = DDPCompression(ddp, ratio=0.1, dense_below=30)
        ddp.register_comm_hook(hook, compressed_mean)
        world.model = world.state["model"] = ddp
        world.state["hook"] = hook
        return world

    world = made(1)
    disk = everstep.LogOptions(to="disk", batch_steps=1, lag_steps=0)
    with opened(run_folder, world, method="lowdiff", every=100, log=disk) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 5)
        kept = {n: r.clone() for n, r in world.state["hook"].state_dict()["residuals"].items()}
        assert kept
    assert "is not in the state" not in caplog.text
    other = made(9)
    with opened(run_folder, other, method="lowdiff", log=disk) as ckpt:
        recovery = ckpt.resume(4)
        assert (recovery.step, recovery.replayed, recovery.exact) == (4, 3, True)
        assert other.snapshot() == states[4]
        run_steps(ckpt, other, 1)
        assert other.snapshot() == states[5]
        again = other.state["hook"].state_dict()["residuals"]
        assert all(torch.equal(again[name], residual) for name, residual in kept.items())
    del other.state["hook"]
    with opened(run_folder.parent / "lost", other, method="logged"):
        assert "a DDPCompression compresses gradients of 'model'" in caplog.text


def test_lowdiff_needs_a_compressor(run_folder: Path) -> None:
    with pytest.raises(OptionError, match=r"no Compressor of \['optimizer'\]"):
        opened(run_folder, World(), method="lowdiff")
    other = World()
    world = World()
    world.state["compressor"] = Compressor(other.optimizer)
    with pytest.raises(OptionError, match="not in the state"):
        opened(run_folder, world, method="lowdiff")
    assert everstep.presets["lowdiff"].log == "topk"
