"""Trainings in which something other than an optimizer writes to its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.options import LogOptions
from tests.support.world import forget


@contextmanager
def opened(run: Path, world: Any, **options: Any) -> Iterator[everstep.Checkpointer]:
    forget(run)
    options = {
        "method": everstep.Method(base="lazy", log="dense"),
        "log": LogOptions(to="disk", batch_steps=1, audit=False),
        "keeper": everstep.KeeperOptions(process=False),
        "every": None,
        "keep": 50,
    } | options
    with everstep.Checkpointer(run, world.state, **options) as ckpt:
        yield ckpt


@contextmanager
def said_once() -> Iterator[None]:
    with pytest.warns(RuntimeWarning) as said:
        yield
    (only,) = [str(one.message) for one in said]
    assert "was changed" in only
    assert "each such step costs a complete copy" in only
    assert "before_update()" in only
