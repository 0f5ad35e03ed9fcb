"""What is trained at all (``requires_grad``) is in no state: whoever goes back is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from tests.support.world import forget


@pytest.mark.parametrize("method", ["lazy", "logged"])
@pytest.mark.parametrize("resumed", [True, False])
def test_who_goes_back_behind_a_change_of_it_is_told(
    method: str, resumed: bool, run_folder: Path
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forget(run_folder)
    with everstep.Checkpointer(
        run_folder,
        {"model": model, "optimizer": optimizer, "best": None},
        method=method,
        every=2,
        keep=9,
        keeper=everstep.KeeperOptions(process=False),
    ) as ckpt:
        if resumed:
            assert ckpt.resume().notes == ()
        for step in range(1, 7):
            if step == 3:
                model[0].requires_grad_(True)
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
        back = ckpt.rewind(2)
        assert (back.step, back.exact) == (2, True)
        assert back.notes == (
            "requires_grad of model.0.bias, model.0.weight was changed since step 0: it is not "
            "part of the state; set it as it was at the restored step",
        )
        assert ckpt.rewind(2).notes == (), "who was told has set it, or will not"
