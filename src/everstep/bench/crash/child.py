"""``python -m everstep.bench.crash.child``: trains with one arm until it is killed.

Started by the benchmark, not by people; knows nothing of failures. It goes on from what its folder
holds, and says each step, with its loss, on standard output once the arm has let it go.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everstep.bench.step.options import Setting

__all__ = ["EXIT_ORPHANED", "Order", "main"]

EXIT_ORPHANED = 70


@dataclass(frozen=True, slots=True)
class Order:
    """What a child does.

    Attributes:
        folder: of the arm, the same for all of its children.
        link_bytes_per_s: of the emulated link of everstep's copies; None: there is none.
        log_on_disk: a log is on disk, not in memory.
        parent: process to live and die with.
    """

    setting: Setting
    params: int
    batch: int
    seed: int
    free_core: bool
    folder: str
    link_bytes_per_s: float | None
    log_on_disk: bool
    parent: int

    device = "cpu"
    python_heavy = False

    def encode(self) -> str:
        """As an argument."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Order:
        """From an argument."""
        fields = json.loads(text)
        return cls(**fields | {"setting": Setting(**fields["setting"])})


def main(arguments: list[str]) -> int:
    """Trains; returns the exit status, if ever.

    Args:
        arguments: an :class:`Order`, encoded.
    """
    order = Order.decode(arguments[0])
    from everstep.bench.crash.arms import make_arm
    from everstep.bench.stall.cores import Placement
    from everstep.bench.stall.loop import Loop
    from everstep.bench.stall.running import quiet
    from everstep.bench.workloads import make_deterministic

    make_deterministic(order.seed)
    placement = Placement(free_core=order.free_core)
    with quiet(), placement.pinned():
        loop = Loop(order, batch=order.batch)
        arm = make_arm(
            order.setting,
            loop,
            Path(order.folder),
            placement,
            link_bytes_per_s=order.link_bytes_per_s,
            log_on_disk=order.log_on_disk,
        )
        arm.open()
        placement.spread()
        _say("ready")
        recovered = arm.resume()
        placement.spread()
        _say("resumed", recovered=asdict(recovered))
        step = recovered.step
        while os.getppid() == order.parent:
            loop.step()
            arm.after_step()
            step += 1
            _say("step", step=step, loss=float(loop.loss).hex())
        return EXIT_ORPHANED


def _say(event: str, **fields: Any) -> None:
    # One write, in the kernel's hands when it returns: a kill right after cannot take it back.
    # Processes of one machine share the clock.
    text = json.dumps({"event": event, "at_s": time.monotonic(), **fields})
    os.write(sys.stdout.fileno(), text.encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
