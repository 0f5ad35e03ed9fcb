"""Back to a step that had another optimizer: of a base with ``strict=False``, never half-way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import MismatchError, RecoveryError
from everstep.options import LogOptions
from tests.support.world import forget


def bits(*of: Any) -> list[bytes]:
    return [t.detach().numpy().tobytes() for one in of for t in one.state_dict().values()]


def test_a_step_of_the_log_before_a_group_was_added(run_folder: Path) -> None:
    """The log leads on from a whole state alone: that is asked before anything is touched."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    forget(run_folder)
    log = LogOptions(to="disk", batch_steps=1, history="all")
    with everstep.Checkpointer(
        run_folder,
        {"model": model, "optimizer": optimizer},
        method="logged",
        every=4,
        log=log,
        keeper=everstep.KeeperOptions(process=False),
    ) as ckpt:
        ckpt.resume()
        at: dict[int, list[bytes]] = {}

        def train(step: int) -> None:
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
            ckpt.step()
            at[step] = bits(model)

        for step in range(1, 9):
            if step == 6:
                optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.001})
            train(step)
        ckpt.wait()
        with pytest.raises(MismatchError):
            ckpt.rewind(3)
        with pytest.raises(RecoveryError) as caught:
            ckpt.resume(3, strict=False)
        said = str(caught.value)
        assert "no base and no log after one leads to step 3" in said
        assert "the log after it belongs to a state of another composition" in said
        assert "optimizer/param_groups: saved 1 groups, live 2" in said
        assert "damaged" not in said
        assert "strict=False can restore steps of bases only: 1, 4, " in str(caught.value.hint)
        assert bits(model) == at[8]
        train(9)  # and training goes on
        found = ckpt.resume(4, strict=False)
        assert (found.step, found.exact) == (4, False)
        assert bits(model) == at[4]
