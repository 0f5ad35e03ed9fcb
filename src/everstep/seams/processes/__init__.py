"""Processes, threads and signals: start, watch and end them.

``processes``  start a detached process, watch a process by PID, limits, processor cores; low-
               priority child processes that end with their parent; folder for sockets and locks
``threads``    I/O threads that keep working at interpreter exit; conditions and futures that are
               safe against Ctrl-C
``signals``    note SIGTERM and similar signals for a main loop
"""

from everstep.seams.processes.processes import (
    RUNTIME_DIR_VARIABLE,
    Child,
    Ended,
    PidWatch,
    available_cores,
)
from everstep.seams.processes.threads import Condition, IoThreads, Outcome, wait_all, wait_done

__all__ = [
    "RUNTIME_DIR_VARIABLE",
    "Child",
    "Condition",
    "Ended",
    "IoThreads",
    "Outcome",
    "PidWatch",
    "available_cores",
    "wait_all",
    "wait_done",
]
