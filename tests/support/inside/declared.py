"""Declarations of optimizers that last only as long as a part of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from everstep.replay import exactness


@contextmanager
def declared(kind: type[Optimizer]) -> Iterator[None]:
    """An optimizer class is declared elementwise meanwhile."""
    exactness.declare(kind, elementwise=True)
    try:
        yield
    finally:
        exactness._DECLARED.pop(exactness.kind_name(kind))
