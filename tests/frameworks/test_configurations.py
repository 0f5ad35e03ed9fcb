"""Configurations of OmegaConf, which Hydra gives, with its lists and dicts as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

import everstep
from everstep.testing import inspect

TEXT = """
everstep:
  path: ${base}/run
  method: logged
  every: 10min
  log: {to: disk, history: all}
  keeper: {linger_s: 5}
  declared: []
  preempt: {signals: [SIGTERM, SIGUSR1]}
  tiers: ["${base}/copies", {where: "${base}/more", every_s: 60}]
  static: ["model/0.*"]
"""


def test_omegaconf(tmp_path: Path) -> None:
    config = OmegaConf.merge(OmegaConf.create(TEXT), {"base": str(tmp_path)})
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with everstep.Checkpointer.from_config(config.everstep, state) as ckpt:
        ckpt.resume()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ckpt.step()
        options = inspect(ckpt).options
    assert (options.method_name, options.every.seconds) == ("logged", 600)
    assert options.log.history == "all"
    assert (tmp_path / "run" / "run.json").exists()
    assert (tmp_path / "more").exists()
