"""A keeper that keeps nothing: registers, answers ``status`` and ``stop``, misbehaves on demand.

Run as a program by the tests of starting, finding and stopping keepers; the rest of this
module starts it and ends it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from everstep.link.registry import KeeperInfo, Registration, find_keeper
from everstep.link.spawn import SpawnOptions, begin, connect
from everstep.link.wire import Connection, accept
from everstep.seams.processes.processes import PidWatch, portable_environment

__all__ = ["PROGRAM", "STATUS", "TIMEOUT_S", "end", "info_of", "planned", "running", "started"]

TIMEOUT_S = 20.0

PROGRAM = (sys.executable, os.path.abspath(__file__))

_PLAN = "EVERSTEP_FAKE_KEEPER"
_LIFE_S = 60.0  # whatever happens to the test that started it

STATUS: dict[str, Any] = {
    "kind": "status",
    "trainer": None,
    "held": [10],
    "writing": [],
    "durable_step": 10,
    "idle_s": 35.0,
    "ends_in_s": 565.0,
    "arena_bytes": 3 << 30,
    "log_step": None,
    "copies": [],
    "logs": [],
}


def info_of(options: SpawnOptions, pid: int | None = None) -> KeeperInfo:
    """What a keeper of these options says of itself."""
    return KeeperInfo(
        pid or os.getpid(), options.run, options.run_id, options.rank, "0.0.1", 1, 1.7e9
    )


# --- The program ------------------------------------------------------------------------


def main() -> int:
    """Serves until it is told to stop, or its time is over."""
    plan = json.loads(os.environ.get(_PLAN, "{}"))
    if plan.get("fails"):
        print(plan["fails"], file=sys.stderr)
        return 3
    options = begin(sys.argv[1:])
    if plan.get("dies"):
        print(plan["dies"], file=sys.stderr)
        return 3
    if plan.get("never_listens"):
        print(plan["never_listens"], flush=True)
        threading.Event().wait(_LIFE_S)
        return 0
    if "sees" in plan:  # what the process was given, for the test to judge
        Path(plan["sees"]).write_text(json.dumps(_surroundings()))
    registration = Registration.acquire(options.key, info_of(options))
    if registration is None:
        print("another keeper serves this run already")
        return 0
    listener = registration.listen()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    try:
        while _serve(selector, listener, plan):
            pass
    finally:
        listener.close()
        registration.release()
    return 0


def _serve(selector: selectors.BaseSelector, listener: Any, plan: Mapping[str, Any]) -> bool:
    """One round; False when it has been stopped."""
    ready = selector.select(_LIFE_S)
    if not ready:
        return False
    for key, _ in ready:
        if key.fileobj is listener:
            connection = accept(listener, 0.0)
            if connection is not None and not plan.get("deaf"):
                selector.register(connection, selectors.EVENT_READ)
            elif connection is not None:
                _ignored.append(connection)
        elif not _answer(selector, key.fileobj, plan):
            return False
    return True


_ignored: list[Connection] = []


def _answer(selector: selectors.BaseSelector, connection: Any, plan: Mapping[str, Any]) -> bool:
    received = connection.receive(TIMEOUT_S)
    if received is None:
        selector.unregister(connection)
        connection.close()
        return True
    kind = received[0]["kind"]
    if kind == "status":
        connection.send({**STATUS, **plan.get("status", {})})
    elif kind == "attach" and "attach" in plan:
        connection.send({"kind": "refused", "error": plan["attach"]})
    elif kind == "stop" and "stop" in plan:
        connection.send(plan["stop"])
    elif kind == "stop":
        connection.send({"kind": "stopping"})
        return False
    return True


def _surroundings() -> dict[str, Any]:
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "group": os.getpgrp(),
        "cwd": os.getcwd(),
        "descriptors": descriptors,
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "cores": sorted(os.sched_getaffinity(0)),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "ignores_term": signal.getsignal(signal.SIGTERM) is signal.SIG_IGN,
        "umask": os.umask(0o077),
        "torch": "torch" in sys.modules,
    }


# --- Starting it ------------------------------------------------------------------------


@contextlib.contextmanager
def planned(**plan: Any) -> Iterator[None]:
    """Keepers that are started in the block behave so."""
    os.environ[_PLAN] = json.dumps(plan)
    try:
        yield
    finally:
        del os.environ[_PLAN]


@contextlib.contextmanager
def running(options: SpawnOptions, **plan: Any) -> Iterator[subprocess.Popen[bytes]]:
    """One that is our child, and listens; ended with the block."""
    with planned(**plan):
        process = subprocess.Popen(
            [*PROGRAM, *options.arguments()],
            env=portable_environment(),  # a test may have changed the directory
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    try:
        connect(options.key, timeout_s=TIMEOUT_S).close()
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


@contextlib.contextmanager
def started(options: SpawnOptions) -> Iterator[None]:
    """Whatever keeper of these options comes to life in the block is ended with it."""
    try:
        yield
    finally:
        deadline_s = time.monotonic() + TIMEOUT_S
        while (info := find_keeper(options.key)) is not None:
            end(info.pid)
            assert time.monotonic() < deadline_s


def end(pid: int) -> None:
    """Kills a process that we have started, and waits until it is gone."""
    with PidWatch(pid) as watch:
        watch.signal(signal.SIGKILL)
        assert watch.ended(TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
