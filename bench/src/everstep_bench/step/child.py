"""``python -m everstep_bench.step.child``: trains with one arm, until it is killed or has finished.

Started by the benchmark, not by people; knows nothing of kills. It goes on from what its folder
holds, says each step, with its loss, once the arm has let it go, and describes the state in the
end.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from everstep_bench.harness.children import EXIT_ORPHANED, Order, say
from everstep_bench.options import Training
from everstep_bench.step.arms import Setting


@dataclass(frozen=True)
class ChildOrder(Order):
    """Order for a training process.

    Attributes:
        folder: of the arm, the same for all of its processes.
        steps: it trains up to this one; None: until it is killed.
    """

    setting: Setting
    options: Training
    folder: str
    steps: int | None = None


def main(arguments: list[str]) -> int:
    """Train; return the exit status.

    Args:
        arguments: an order, encoded.
    """
    order = ChildOrder.decode(arguments[0])
    from everstep.workloads import make_deterministic
    from everstep.workloads.comparison import fingerprint
    from everstep_bench.harness.loop import Loop
    from everstep_bench.harness.placement import Placement
    from everstep_bench.harness.running import quiet
    from everstep_bench.step.rounds import make_arm

    make_deterministic(order.options.seed)
    placement = Placement(free_core=order.options.free_core)
    with quiet(), placement.pinned():
        loop = Loop(order.options)
        arm = make_arm(order.setting, loop, Path(order.folder), placement)
        arm.open()
        placement.spread()
        say("ready")
        begin_s = time.monotonic()
        recovered = arm.resume()
        seconds = time.monotonic() - begin_s
        placement.spread()
        say("resumed", seconds=seconds, recovered=asdict(recovered))
        step = recovered.step
        while order.steps is None or step < order.steps:
            if order.is_orphaned:
                return EXIT_ORPHANED
            begin_s = time.monotonic()
            loop.step()
            arm.after_step()
            step += 1
            seconds = time.monotonic() - begin_s
            say("step", step=step, seconds=seconds, loss=float(loop.loss).hex())
        say("finished", fingerprint=fingerprint(loop.training))
        arm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
