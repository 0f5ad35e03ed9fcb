"""``python -m everstep_bench.crash.child``: trains with one arm until it is killed.

Started by the benchmark, not by people; knows nothing of failures. It goes on from what its folder
holds, and says each step, with its loss, on standard output once the arm has let it go.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from everstep_bench.step import order as orders

__all__ = ["Order", "main"]


@dataclass(frozen=True, slots=True)
class Order(orders.Order):
    """Order for a child process.

    Attributes:
        link_bytes_per_s: of the emulated link of everstep's copies; None: there is none.
        log_on_disk: a log is on disk, not in memory.
    """

    link_bytes_per_s: float | None
    log_on_disk: bool


def main(arguments: list[str]) -> int:
    """Trains; returns the exit status, if ever.

    Args:
        arguments: an :class:`Order`, encoded.
    """
    order = Order.decode(arguments[0])
    from everstep_bench.crash.arms import make_arm

    with orders.loop_of(order) as (loop, placement):
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
        orders.say("ready")
        recovered = arm.resume()
        placement.spread()
        orders.say("resumed", recovered=asdict(recovered))
        step = recovered.step
        while not order.is_orphaned:
            loop.step()
            arm.after_step()
            step += 1
            orders.say("step", step=step, loss=float(loop.loss).hex())
        return orders.EXIT_ORPHANED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
