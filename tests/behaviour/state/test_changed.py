"""A state dict that changes after construction, and a keeper that meets a bug."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everstep import Checkpointer, KeeperOptions
from everstep.errors import EverstepError, StateError
from everstep.state.training_state import State
from everstep.testing import inspect
from everstep.trainer.attach.keeper import ThreadKeeper


def test_keys_and_objects_are_fixed_plain_values_are_not() -> None:
    values = {"model": torch.nn.Linear(2, 2), "epoch": 0}
    state = State(values)
    values["epoch"] = 5
    state.survey()
    values["late"] = 1
    with pytest.raises(StateError, match="changed since the Checkpointer was made: late"):
        state.survey()
    del values["late"]
    values["model"] = torch.nn.Linear(2, 2)
    with pytest.raises(StateError, match="changed since the Checkpointer was made: model"):
        state.survey()


@pytest.mark.parametrize("bug", [ValueError, SystemExit])
def test_a_bug_in_background_retention_loses_no_later_save(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, bug: type[BaseException]
) -> None:
    reported: list[EverstepError] = []
    state = {"x": torch.zeros(4)}
    in_thread = KeeperOptions(process=False)
    ckpt = Checkpointer(run_folder, state, every=None, on_failure=reported.append, keeper=in_thread)
    ckpt.step()
    ckpt.save().durable.result(30)
    ckpt.wait(30)
    keeper = inspect(ckpt).keeper
    assert isinstance(keeper, ThreadKeeper)

    def broken() -> None:
        raise bug("a bug")

    monkeypatch.setattr(keeper.committer, "retain", broken)
    for _ in range(2):
        ckpt.step()
        ckpt.save().durable.result(30)
    ckpt.close()
    assert ["internal error in retention" in error.message for error in reported] == [True, True]
