"""``python -m everstep_bench.stall.writer``: one more process that flushes when it is told.

Stands for another rank of a job on the same machine. Started by the benchmark, not by people:
reads a word from standard input, saves through a run of its own, answers with the seconds it
took; ends with its standard input.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Serves until standard input ends; returns the exit status.

    Args:
        arguments: the run folder, and about how many bytes to save.
    """
    import torch

    from everstep.checkpointer import Checkpointer
    from everstep_bench.persist.state import SIZE_BYTES_MIN, BenchState

    run = Path(arguments[0])
    size_bytes = max(SIZE_BYTES_MIN, int(arguments[1]))
    torch.set_num_threads(1)
    state = BenchState(size_bytes, seed=0)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        checkpointer = Checkpointer(run, state.parts(), method="sync", every=1, keep=1)
    with checkpointer:
        print(state.size_bytes, flush=True)
        for _ in sys.stdin:
            begin_s = time.monotonic()
            checkpointer.step()
            print(time.monotonic() - begin_s, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
