"""Hooks on the user's optimizers: they count updates, and hold each back at the gate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch.optim import Optimizer

__all__ = ["UpdateHooks"]


@dataclass(slots=True)
class UpdateHooks:
    """Counts optimizer updates: the LSN; and asks the gate before each.

    A subclass that calls ``super().step()`` fires the hooks twice, one pair within the other;
    a ``step()`` that raises fires the first and not the second. The outermost call that is
    still on the stack tells the two apart.

    Attributes:
        gate: called with the key of the optimizer before it updates anything (I1).
        lsn: updates so far, of all optimizers together.
    """

    gate: Callable[[str], None]
    lsn: int = 0
    handles: list[Any] = field(default_factory=list)
    outermost: FrameType | None = None
    depth: int = 0

    def watch(self, key: str, optimizer: Optimizer) -> None:
        """Counts and gates the updates of ``optimizer`` from now on."""

        def before(*_: Any) -> None:
            caller = sys._getframe(1)
            if self.outermost is None or not _on_stack(self.outermost, caller):
                self.outermost, self.depth = caller, 0
            self.depth += 1
            self.gate(key)

        first = optimizer.register_step_pre_hook(before)
        # Before all other hooks of this optimizer: one of them may change parameters.
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(first.id, last=False)
        self.handles += [first, optimizer.register_step_post_hook(self._after)]

    def updated(self) -> None:
        """An update that went past every optimizer is over."""
        self.lsn += 1

    def close(self) -> None:
        """Stops counting."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _after(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth <= 0:
            self.outermost, self.depth = None, 0
            self.lsn += 1


def _on_stack(wanted: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None
