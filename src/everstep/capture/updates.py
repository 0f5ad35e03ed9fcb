"""Hooks on the user's optimizers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch.optim import Optimizer

__all__ = ["UpdateCounter"]


@dataclass(slots=True)
class UpdateCounter:
    """Counts optimizer updates: the LSN.

    A subclass that calls ``super().step()`` fires the hooks twice, one pair within the other;
    a ``step()`` that raises fires the first and not the second. The outermost call that is
    still on the stack tells the two apart.

    Attributes:
        lsn: updates so far, of all optimizers together.
    """

    lsn: int = 0
    handles: list[Any] = field(default_factory=list)
    outermost: FrameType | None = None
    depth: int = 0

    def watch(self, optimizer: Optimizer) -> None:
        """Counts the updates of ``optimizer`` from now on."""
        before = optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(self._after)
        self.handles += [before, after]

    def close(self) -> None:
        """Stops counting."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _before(self, *_: Any) -> None:
        caller = sys._getframe(1)
        if self.outermost is None or not _on_stack(self.outermost, caller):
            self.outermost, self.depth = caller, 0
        self.depth += 1

    def _after(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth <= 0:
            self.outermost, self.depth = None, 0
            self.lsn += 1


def _on_stack(wanted: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None
