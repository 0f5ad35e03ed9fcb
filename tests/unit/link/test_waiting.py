"""The time that whoever waits for bases has given."""

from __future__ import annotations

import pytest

from everstep.errors import DeadlineError
from everstep.seams.clock import ManualClock
from everstep.trainer.attach.requests import WaitDeadline


def test_nobody_waits_longer_than_was_given() -> None:
    clock = ManualClock()
    patience = WaitDeadline(clock, 1.0)
    usual_s = patience.poll_s
    assert 0 < usual_s < 1.0
    clock.advance(1.0 - usual_s / 4)
    assert patience.poll_s == pytest.approx(usual_s / 4)
    assert not patience.is_over(1)
    clock.advance(5.0)
    assert patience.poll_s == 0.0
    assert patience.is_over(0), "everything is durable"
    with pytest.raises(DeadlineError, match=r"2 base\(s\) are not durable after 6 s"):
        patience.is_over(2)


def test_at_once() -> None:
    patience = WaitDeadline(ManualClock(), 0.0)
    assert (patience.poll_s, patience.is_over(0)) == (0.0, True)
    with pytest.raises(DeadlineError, match=r"1 base\(s\)"):
        patience.is_over(1)


def test_as_long_as_it_takes() -> None:
    clock = ManualClock()
    patience = WaitDeadline(clock, None)
    clock.advance(1e6)
    assert patience.poll_s > 0
    assert not patience.is_over(3)
