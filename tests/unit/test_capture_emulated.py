"""The emulated link: as slow as it says."""

from __future__ import annotations

import pytest
import torch

from everstep.capture import emulated
from everstep.capture.batches import Batch
from everstep.capture.emulated import EmulatedLink

MB = 1_000_000
TIMEOUT_S = 60.0


class Time:
    """Passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.naps_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.naps_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(emulated, "time", made)
    return made


def batch_of(begin: int, end: int) -> Batch:
    return Batch(begin, end, (torch.full((end - begin,), 7, dtype=torch.uint8),))


def test_a_copy_takes_as_long_as_its_bytes(clock: Time) -> None:
    link, block = EmulatedLink(10 * MB), torch.zeros(3 * MB, dtype=torch.uint8)
    told: list[tuple[int, float]] = []
    batches = [batch_of(0, MB), batch_of(MB, 3 * MB)]
    transfer = link.submit(batches, block, lambda end: told.append((end, clock.now_s - 100.0)))
    assert transfer.wait(TIMEOUT_S)
    link.close()
    assert told == [(MB, pytest.approx(0.1)), (3 * MB, pytest.approx(0.3))]
    assert block.eq(7).all()
