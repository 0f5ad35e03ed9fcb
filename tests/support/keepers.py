"""Terms for keepers, and the end of those that a test has started."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from everstep.link.registry import list_keepers
from everstep.options import validate_options
from everstep.seams import Clock, Seams, SystemClock
from everstep.seams.processes.processes import PidWatch
from everstep.state.ranks import RankInfo
from everstep.trainer.attach.terms import KeeperTerms
from tests.support.leftovers import MARK, processes_marked

__all__ = ["end_keepers", "terms_of"]


def terms_of(
    run: Path, *, rank: int = 0, clock: Clock | None = None, timeout_s: float = 20.0
) -> KeeperTerms:
    """Return terms of the keepers of a rank of the run ``id``, with the usual options."""
    given: Any = {"method": "lazy", "every": None, "keep": 1, "budget": None}
    options = validate_options(**given, on_failure="warn", progress_timeout_s=timeout_s)
    seams = Seams(clock=clock or SystemClock())
    return KeeperTerms(options, seams, run, "id", 4096, ranks=RankInfo(rank, rank + 1))


def end_keepers(folder: Path, timeout_s: float = 20.0) -> None:
    """Kills the keepers of all runs in ``folder``, and returns when nothing of them is left.

    One that is ending counts, and one that a killed trainer has only just started: neither is
    registered, so it is processes that are looked for.

    Raises:
        AssertionError: some are there after ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    while found := _keepers_of(folder):
        assert time.monotonic() < deadline_s, f"keepers cannot be killed: {found}"
        for pid in found:
            with PidWatch(pid) as watch:
                if pid in _keepers_of(folder):  # and not another process of that number
                    watch.signal(signal.SIGKILL)
                watch.ended(deadline_s - time.monotonic())
    list_keepers()  # clears away the sockets that they have left


def _keepers_of(folder: Path) -> dict[int, str]:
    found = processes_marked(os.environ[MARK])
    return {pid: command for pid, command in found.items() if f" --run={folder}/" in command}
