"""``Checkpointer.from_config``: the same Checkpointer as from arguments in a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep.commit.retention import KeepRules
from everstep.errors import OptionError
from everstep.options import Every, LogOptions, Preemption
from everstep.testing import inspect
from everstep.tiers import PeerOptions, TierOptions
from everstep.trainer.session.calls import arguments_of


def state() -> dict[str, Any]:
    model = torch.nn.Linear(2, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def test_a_configuration_is_the_arguments(tmp_path: Path) -> None:
    config = {
        "path": str(tmp_path / "run"),
        "method": "logged",
        "every": {"steps": 7},
        "keep": np.int64(2),
        "log": {"to": "disk", "batch_steps": 2},
        "keeper": {"linger_s": 5, "threads": 2},
        "budget": {"host_bytes": 10**9},
        "tiers": [{"where": str(tmp_path / "copies"), "every_s": 5}],
    }
    with everstep.Checkpointer.from_config(config, state()) as made:
        mine = inspect(made).options
    with everstep.Checkpointer(
        tmp_path / "run",
        state(),
        method="logged",
        every=Every(steps=7),
        keep=2,
        log=LogOptions(to="disk", batch_steps=2),
        keeper=everstep.KeeperOptions(linger_s=5, threads=2),
        budget=everstep.Budget(host_bytes=10**9),
        tiers=[TierOptions(str(tmp_path / "copies"), every_s=5)],
    ) as made:
        assert inspect(made).options == mine


def test_each_kind_of_option() -> None:
    found = arguments_of(
        {
            "path": "runs/a",
            "method": {"base": "lazy", "log": "dense"},
            "preempt": {"signals": ["SIGTERM", "SIGUSR1"]},
            "tiers": ["s3://bucket/run", {"peer": {"log": "whole"}}, {"where": "/copies"}],
        }
    )
    assert found == {
        "path": "runs/a",
        "method": everstep.Method(base="lazy", log="dense"),
        "preempt": Preemption(signals=("SIGTERM", "SIGUSR1")),
        "tiers": ["s3://bucket/run", PeerOptions(log="whole"), TierOptions("/copies")],
    }


def test_the_environment_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_DIR", "elsewhere")
    monkeypatch.setenv("EVERSTEP_METHOD", "gockpt")
    monkeypatch.setenv("EVERSTEP_EVERY", "50")
    monkeypatch.setenv("EVERSTEP_KEEP", "9")
    found = arguments_of({"path": "runs/a", "every": "10min"})
    assert found == {"path": "elsewhere", "method": "gockpt", "every": 50, "keep": 9}
    monkeypatch.setenv("EVERSTEP_EVERY", "2h")
    assert arguments_of({})["every"] == "2h"


def test_arguments_replace_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVERSTEP_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("EVERSTEP_KEEP", "9")
    keeper = everstep.KeeperOptions(process=False)
    with everstep.Checkpointer.from_config({}, state(), keep=4, keeper=keeper) as made:
        assert inspect(made).options.keep == KeepRules(4)
    assert (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "has no path"),
        ({"path": "a", "methd": "lazy"}, "no option 'methd'"),
        ({"path": "a", "log": {"two": "disk"}}, "LogOptions has no option 'two'"),
        ({"path": "a", "every": {"steps": "seven"}}, "every='seven'"),
        ({"path": "a", "tiers": [{"peer": {}, "where": "b"}]}, "no option 'where'"),
        ({"path": "a", "tiers": [{"every_s": 3}]}, "TierOptions"),
    ],
)
def test_bad_configurations(config: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        arguments_of(config)


@pytest.mark.parametrize("make", [list, str, lambda: None])
def test_what_is_no_mapping(make: Callable[[], Any]) -> None:
    with pytest.raises(OptionError, match="must be a mapping"):
        arguments_of(make())
