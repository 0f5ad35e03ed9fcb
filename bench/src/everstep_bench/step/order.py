"""Order for a process that trains with one arm, and its answers."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from everstep_bench.step.options import Setting

if TYPE_CHECKING:
    from everstep_bench.stall.cores import Placement
    from everstep_bench.stall.loop import Loop

__all__ = ["EXIT_ORPHANED", "Order", "loop_of", "say"]

_Order = TypeVar("_Order", bound="Order")

EXIT_ORPHANED = 70
"""Whoever it lives and dies with is gone."""


@dataclass(frozen=True, slots=True)
class Order:
    """Order common to all such processes.

    Attributes:
        folder: of the arm, the same for all of its processes.
        parent: process to live and die with.
    """

    setting: Setting
    params: int
    batch: int
    seed: int
    free_core: bool
    folder: str
    parent: int

    device = "cpu"
    python_heavy = False

    def encode(self) -> str:
        """As an argument."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls: type[_Order], text: str) -> _Order:
        """From an argument."""
        fields = json.loads(text)
        setting = fields["setting"]
        setting["tiers"] = tuple(setting["tiers"])
        return cls(**fields | {"setting": Setting(**setting)})

    @property
    def is_orphaned(self) -> bool:
        """Return True if the process that gave the order has ended."""
        return os.getppid() != self.parent


@contextmanager
def loop_of(order: Order) -> Iterator[tuple[Loop, Placement]]:
    """The training, and where it runs."""
    from everstep.workloads import make_deterministic
    from everstep_bench.stall.cores import Placement
    from everstep_bench.stall.loop import Loop
    from everstep_bench.stall.running import quiet

    make_deterministic(order.seed)
    placement = Placement(free_core=order.free_core)
    with quiet(), placement.pinned():
        yield Loop(order, batch=order.batch), placement


def say(event: str, **fields: Any) -> None:
    """Tells the benchmark, with the time on the clock that processes of one machine share."""
    # One write, in the kernel's hands when it returns: a kill right after cannot take it back.
    text = json.dumps({"event": event, "at_s": time.monotonic(), **fields})
    os.write(sys.stdout.fileno(), text.encode() + b"\n")
