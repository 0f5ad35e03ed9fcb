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
    "left_behind",
    "processes_left",
    "processes_marked",
    "shared_memory_names",
    "wait_for_exit",
]

MARK = "EVERSTEP_TEST_RUN"
"""The environment variable that holds the id of the test run a process belongs to."""

SHARED_MEMORY = Path("/dev/shm")

_PROC = Path("/proc")
# Servants of Python, torch and the tests that stay until the process that started them ends.
_SERVANTS = (
    b"multiprocessing.resource_tracker",
    b"_inductor/compile_worker",
    b"from tests.support.trainers",
)


def processes_marked(run_id: str) -> dict[int, str]:
    """Living processes of the run ``run_id`` but this one: id and command line.

    Those of the processes that share the tests of a run, whose ids are ``run_id.name``, too.
    """
    wanted = f"{MARK}={run_id}".encode()
    found = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            marks = (folder / "environ").read_bytes().split(b"\0")
            if not any(mark == wanted or mark.startswith(wanted + b".") for mark in marks):
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


def left_behind(
    run_id: str, runtime_dir: Path, *, before: set[str] | None, timeout_s: float = 10.0
) -> list[str]:
    """What a test run leaves that is over: a line for people for each kind of thing.

    Args:
        runtime_dir: where its keepers register.
        before: names that were in /dev/shm when it began; None: only names that say that they
            are this run's count.
        timeout_s: until when processes may still end.
    """
    found = []
    processes = processes_left(run_id, timeout_s)
    # Behind them: a keeper removes its own as it ends.
    sockets = sorted(path.name for path in runtime_dir.rglob("*.sock"))
    names = shared_memory_names(run_id)
    names = {name for name in names if run_id in name} if before is None else names - before
    if processes:
        found.append(f"the test run left processes: {processes}")
    if sockets:
        found.append(f"keepers left {sockets}")
    if names:
        found.append(f"the test run left names under {SHARED_MEMORY}: {sorted(names)}")
    return found
