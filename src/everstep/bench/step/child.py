"""``python -m everstep.bench.step.child``: trains with one arm, until it is killed or has finished.

Started by the benchmark, not by people; knows nothing of kills. It goes on from what its folder
holds, says each step on standard output once the arm has let it go, and describes the state in
the end.
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
        steps: it trains up to this one.
        parent: process to live and die with.
    """

    setting: Setting
    params: int
    batch: int
    seed: int
    free_core: bool
    folder: str
    steps: int
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
    """Trains; returns the exit status.

    Args:
        arguments: an :class:`Order`, encoded.
    """
    order = Order.decode(arguments[0])
    from everstep.bench.demo.fingerprint import fingerprint
    from everstep.bench.stall.cores import Placement
    from everstep.bench.stall.loop import Loop
    from everstep.bench.stall.running import quiet
    from everstep.bench.step.rounds import make_arm
    from everstep.bench.workloads import make_deterministic

    make_deterministic(order.seed)
    placement = Placement(free_core=order.free_core)
    with quiet(), placement.pinned():
        loop = Loop(order, batch=order.batch)
        arm = make_arm(order.setting, loop, Path(order.folder), placement)
        arm.open()
        placement.spread()
        begin_s = time.monotonic()
        recovered = arm.resume()
        _say("resumed", seconds=time.monotonic() - begin_s, recovered=asdict(recovered))
        for step in range(recovered.step + 1, order.steps + 1):
            if os.getppid() != order.parent:
                return EXIT_ORPHANED
            begin_s = time.monotonic()
            loop.step()
            arm.after_step()
            _say("step", step=step, seconds=time.monotonic() - begin_s)
        _say("finished", fingerprint=fingerprint(loop.training))
        arm.close()
    return 0


def _say(event: str, **fields: Any) -> None:
    # One write, in the kernel's hands when it returns: a kill right after cannot take it back.
    os.write(sys.stdout.fileno(), json.dumps({"event": event, **fields}).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
