"""``python -m everstep_bench.step.child``: trains with one arm, until it is killed or has finished.

Started by the benchmark, not by people; knows nothing of kills. It goes on from what its folder
holds, says each step on standard output once the arm has let it go, and describes the state in
the end.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from everstep_bench.step import order as orders

__all__ = ["Order", "main"]


@dataclass(frozen=True, slots=True)
class Order(orders.Order):
    """Order for a child process.

    Attributes:
        steps: it trains up to this one.
    """

    steps: int


def main(arguments: list[str]) -> int:
    """Trains; returns the exit status.

    Args:
        arguments: an :class:`Order`, encoded.
    """
    order = Order.decode(arguments[0])
    from everstep.workloads.fingerprint import fingerprint
    from everstep_bench.step.rounds import make_arm

    with orders.loop_of(order) as (loop, placement):
        arm = make_arm(order.setting, loop, Path(order.folder), placement)
        arm.open()
        placement.spread()
        begin_s = time.monotonic()
        recovered = arm.resume()
        seconds = time.monotonic() - begin_s
        orders.say("resumed", seconds=seconds, recovered=asdict(recovered))
        for step in range(recovered.step + 1, order.steps + 1):
            if order.is_orphaned:
                return orders.EXIT_ORPHANED
            begin_s = time.monotonic()
            loop.step()
            arm.after_step()
            orders.say("step", step=step, seconds=time.monotonic() - begin_s)
        orders.say("finished", fingerprint=fingerprint(loop.training))
        arm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
