"""What a test run may leave behind: nothing.

Processes are told apart by a mark in their environment, which children inherit however
they detach themselves, so that other runs on the same machine are none of our business.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

__all__ = [
    "MARK",
    "SHARED_MEMORY",
    "processes_left",
    "processes_marked",
    "shared_memory_names",
    "wait_for_exit",
]

MARK = "EVERSTEP_TEST_RUN"
"""The environment variable that holds the id of the test run a process belongs to."""

SHARED_MEMORY = Path("/dev/shm")

_PROC = Path("/proc")
# Servants of Python and torch that stay until the process that started them ends.
_SERVANTS = (b"multiprocessing.resource_tracker", b"_inductor/compile_worker")


def processes_marked(run_id: str) -> dict[int, str]:
    """Living processes of the run ``run_id`` but this one: id and command line."""
    wanted = f"{MARK}={run_id}".encode()
    found = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().rstrip(b"\0")
            parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:  # it has ended, or is somebody else's
            continue
        ours = parent == os.getpid() and any(servant in command for servant in _SERVANTS)
        if int(folder.name) != os.getpid() and not ours:
            found[int(folder.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def wait_for_exit(pid: int, timeout_s: float) -> bool:
    """Whether the process has ended (it need not be a child) within ``timeout_s``."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, timeout_s))
        return bool(ready)
    finally:
        os.close(descriptor)


def processes_left(run_id: str, timeout_s: float) -> dict[int, str]:
    """Processes of the run that are still there after ``timeout_s`` seconds of grace."""
    deadline_s = time.monotonic() + timeout_s
    for pid in processes_marked(run_id):
        wait_for_exit(pid, deadline_s - time.monotonic())
    return processes_marked(run_id)


def shared_memory_names(run_id: str) -> set[str]:
    """Names in /dev/shm, without those that say they belong to another test run."""
    if not SHARED_MEMORY.is_dir():
        return set()
    return {
        path.name
        for path in SHARED_MEMORY.iterdir()
        if not path.name.startswith("everstep-test-") or run_id in path.name
    }
