"""A rank of a program under torchrun, which is killed, or its keeper, at some steps.

Arguments: a list of :class:`~tests.support.ranks.launched.Kill` as JSON, the program, its
arguments.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from typing import Any

from everstep.checkpointer import Checkpointer
from everstep.testing import inspect


def main() -> None:
    """Run the program of the command line."""
    order, *sys.argv = sys.argv[1:]
    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kills = json.loads(order)
    _arm([kill for kill in kills if kill["start"] == start and rank in kill["ranks"]])
    runpy.run_path(sys.argv[0], run_name="__main__")


def _arm(kills: list[dict[str, Any]]) -> None:
    """Kill this process, or its keeper, at the end of a step, before the step is marked."""
    mark = Checkpointer.step

    def step(ckpt: Checkpointer) -> None:
        for kill in kills:
            if ckpt.stats().step + 1 == kill["step"]:
                pid = inspect(ckpt).keeper.pid if kill["keeper"] else os.getpid()
                os.kill(pid, signal.SIGKILL)
        mark(ckpt)

    Checkpointer.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
