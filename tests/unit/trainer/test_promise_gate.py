"""The gate of a promise asks for a base where a step would wait in vain for one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.config.promise import Promise
from everstep.link import Save
from everstep.seams import ManualClock
from everstep.trainer.participant import RestoredState
from everstep.trainer.session.promise import PromiseGate


def gate_of(holder: str, safe: int | None) -> Any:
    promise = Promise(4, None, "power", holder)
    clock = ManualClock()
    context: Any = SimpleNamespace(options=SimpleNamespace(promise=promise), clock=clock)
    parts: Any = SimpleNamespace()
    recoverable: Any = SimpleNamespace(step=safe, durable_step=safe, step_in=lambda names: safe)
    return PromiseGate(context, parts, parts, recoverable), clock


def restored(step: int) -> RestoredState:
    base = SimpleNamespace(step=step) if step else None
    resumed: Any = SimpleNamespace(step=step, base=base)
    return RestoredState(resumed, step or None, None, True, False)


@pytest.mark.parametrize(
    ("holder", "step", "safe", "needs"),
    [
        ("disk", 0, None, False),  # a fresh run: nothing is lost
        ("disk", 7, 7, False),
        ("disk", 7, None, True),  # restored from memory
        ("keeper", 7, None, True),
        ("store", 0, None, True),
        ("peer", 7, None, True),
    ],
)
def test_a_base_is_due_where_nothing_is_safe(
    holder: str, step: int, safe: int | None, needs: bool
) -> None:
    gate, _ = gate_of(holder, safe)
    gate.start(None)
    gate.restored(restored(step))
    assert gate.needs_base == needs
    gate.base_taken(Save(step + 1, 1))
    assert not gate.needs_base


def test_a_new_keeper_holds_nothing_of_the_training() -> None:
    gate, clock = gate_of("keeper", 9)
    gate.start(None)
    gate.restored(restored(0))
    for step in (1, 2):
        gate.step_done(step)
        clock.advance(1.0)
    assert not gate.needs_base
    gate.start(None)
    assert gate.needs_base
