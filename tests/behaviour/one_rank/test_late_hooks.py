"""A hook that is registered in mid-training comes behind those of everstep in its first step: what
it does to gradients, or to parameters, is in no record of that step, and so there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep import Checkpointer, KeeperOptions, LogOptions

LATE, STEPS = 4, 6


def trained(run: Path, hooked: Any) -> tuple[nn.Module, Checkpointer]:
    torch.manual_seed(1)
    table = nn.Embedding(1000, 64)  # samples of it are looked at, and not of each row
    optimizer = torch.optim.Adam(table.parameters(), 0.01)
    log, keeper = LogOptions(to="disk", batch_steps=1), KeeperOptions(process=False)
    state = {"m": table, "o": optimizer}
    ckpt = Checkpointer(run, state, method="logged", every=1000, log=log, keeper=keeper)
    ckpt.resume()
    if hooked is None:
        return table, ckpt
    for step in range(1, STEPS + 1):
        if step == LATE:
            optimizer.register_step_pre_hook(hooked(table))
        rows = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(step))
        rows[0] = 3

        def closure(rows: torch.Tensor = rows) -> Any:
            optimizer.zero_grad()
            loss = (table(rows) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure) if hooked is closures else (closure(), optimizer.step())
        ckpt.step()
    assert ckpt.stats().log_holes == 1
    ckpt.close()
    return table, ckpt


def closures(table: nn.Embedding) -> Any:
    """Wraps the closure: row 3 is frozen from now on."""

    def hook(optimizer: Any, args: Any, options: Any) -> Any:
        def outer() -> Any:
            loss = args[1]()
            table.weight.grad[3] = 0  # type: ignore[index]
            return loss

        return (args[0], outer), options

    return hook


def parameters(table: nn.Embedding) -> Any:
    """Writes to a parameter, once, which the update reads then."""
    rows = [3]

    def hook(*_: Any) -> None:
        with torch.no_grad():
            table.weight[rows].zero_()
        rows.clear()

    return hook


@pytest.mark.thinned(4)
@pytest.mark.parametrize("hooked", [closures, parameters])
@pytest.mark.parametrize("step", [LATE, STEPS])
def test_its_first_step_has_no_record(hooked: Any, step: int, tmp_path: Path) -> None:
    """A base is taken of it, and the log goes on behind it."""
    run = tmp_path / "run"
    table, _ = trained(run, hooked)
    again, ckpt = trained(run, None)
    with ckpt:
        recovery = ckpt.resume(step)
        assert recovery.exact
        if step == STEPS:
            assert torch.equal(again.weight, table.weight)
        elif hooked is parameters:
            assert recovery.base_step == LATE
