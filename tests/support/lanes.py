"""A lane whose copies a test holds back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from everstep.capture.batches import Batch
from everstep.capture.lane import CpuLane, CpuTransfer, Progress
from tests.support.world import Gate

__all__ = ["HeldLane", "gives_up_soon", "held"]


class HeldLane(CpuLane):
    """A lane whose thread waits at a gate before each copy, or run of copies."""

    gate = Gate()

    def copy_batch(self, batch: Batch, block: torch.Tensor) -> None:
        self.gate.wait_at()
        super().copy_batch(batch, block)

    def copy_run(
        self, run: Sequence[Batch], block: torch.Tensor, transfer: CpuTransfer, tell: Progress
    ) -> None:
        self.gate.wait_at()
        super().copy_run(run, block, transfer, tell)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Copies wait until the test lets them go."""
    monkeypatch.setattr(HeldLane, "gate", Gate())
    monkeypatch.setattr("everstep.trainer.session.components.CpuLane", HeldLane)
    yield HeldLane.gate
    HeldLane.gate.open()


def gives_up_soon(monkeypatch: pytest.MonkeyPatch, given_s: float) -> None:
    """Training waits no longer than a moment for copies, where it would wait for ``given_s``; and
    nothing else has so little time, as on a busy machine that may not be enough."""
    gate = CpuTransfer.gate

    def soon(self: CpuTransfer, end: int, timeout_s: float) -> bool:
        assert 0 < timeout_s <= given_s
        return gate(self, end, 0.05)

    monkeypatch.setattr(CpuTransfer, "gate", soon)
