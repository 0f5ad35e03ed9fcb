"""``LogOptions(replay="fast")``: torch's fused kernels, whatever training ran. Tried on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from everstep.options import LogOptions
from everstep.replay import engine
from tests.support.logged import World, opened, train
from tests.support.replays import assert_same_bits, record, replayer_at


@pytest.fixture(autouse=True)
def fused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_FUSED_DEVICES", ("cpu",))
    monkeypatch.setattr(engine, "BLOCKS_PAY_ELEMENTS", 1 << 40)  # whole tensors


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"), [(SGD, {"lr": 0.1, "momentum": 0.9}), (Adam, {}), (AdamW, {})]
)
def test_fused_kernels_come_close(kind: Any, options: dict[str, Any], fast: bool) -> None:
    run = record(lambda groups: kind(groups, **options), late=False)
    replayer, base = replayer_at(run, 3, fast=fast)
    counters = [values.get("step") for values in replayer.state.values()]
    replayer.apply(run.updates[3:])
    assert replayer.exact.exact == (not fast)
    if not fast:
        assert_same_bits(base.tensors, run.moments[-1].tensors)
    torch.testing.assert_close(base.tensors, run.moments[-1].tensors, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(replayer.state, run.moments[-1].state, rtol=1e-5, atol=1e-6)
    # Training goes on with its own kernels and counters.
    assert not any(group["fused"] for group in replayer.optimizer.param_groups)
    now = [values.get("step") for values in replayer.state.values()]
    assert all(one is other for one, other in zip(counters, now, strict=True))


def test_state_is_made_by_the_kernels_of_training() -> None:
    run = record(lambda groups: AdamW(groups), late=False)
    replayer, base = replayer_at(run, 0, fast=True)
    replayer.apply(run.updates[:1])
    assert replayer.exact.exact
    assert_same_bits(base.tensors, run.moments[1].tensors)


@pytest.mark.parametrize("wanted", ["exact", "fast"])
def test_a_recovery_says_so(wanted: str, run_folder: Path) -> None:
    """And what descends from it is inexact for ever."""
    states = train(run_folder, World(), 7)
    log = LogOptions(to="disk", batch_steps=2, history="all", replay=wanted)
    world = World(seed=9)
    with opened(run_folder, world, log=log) as ckpt:
        recovery = ckpt.resume(step=6)
        assert (recovery.step, recovery.replayed) == (6, 2)
        assert recovery.exact == (wanted == "exact")
        assert not recovery.exact or world.snapshot() == states[6]
        assert ("fused kernels" in recovery.evidence) == (not recovery.exact)
        world.train()
        ckpt.step()
    with opened(run_folder, World(seed=10)) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.replayed) == (7, 0)
        assert recovery.exact == (wanted == "exact")
