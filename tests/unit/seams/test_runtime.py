"""No I/O bypasses the seam: a whole life of a run on a simulated disk, watched by the interpreter.

The tidy tests read the sources; this one listens to Python's audit events, which see every
open, rename, removal and directory listing of this process, whoever calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import pytest

from everstep import Checkpointer
from everstep.run.scan import scan_run
from everstep.seams import ManualClock, PosixFileSystem, Seams
from tests.crash.sim.filesystem import SimFileSystem
from tests.crash.sim.training import TinyTraining

FILE_EVENTS = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rmdir", "os.rename", "os.remove")
FILE_EVENTS += ("os.link", "os.symlink", "os.truncate", "os.chmod", "shutil.", "tempfile.", "mmap.")
MACHINE = ("/proc/meminfo", "/sys/fs/cgroup/")  # seams/machine.py asks how much memory there is

_heard: list[str] | None = None


def _listen(event: str, args: tuple[Any, ...]) -> None:
    if _heard is not None and event.startswith(FILE_EVENTS):
        path = str(args[0]) if args else ""
        anonymous = event.startswith("mmap.") and args and args[0] == -1
        if not path.startswith(MACHINE) and not path.endswith((".py", ".pyc")) and not anonymous:
            _heard.append(f"{event} {args}")


sys.addaudithook(_listen)  # cannot be removed; deaf outside of these tests


@pytest.fixture
def heard() -> Iterator[list[str]]:
    global _heard
    _heard = []
    yield _heard
    _heard = None


def live(seams: Seams, run: str, method: str) -> None:
    """Saves, recycles, deletes, resumes, verifies."""
    training = TinyTraining(1)
    with Checkpointer(run, training.state, method=method, every=1, keep=1, seams=seams) as ckpt:
        ckpt.resume()
        for _ in range(3):
            training.train_step()
            ckpt.step()
    again = TinyTraining(2)
    with Checkpointer(run, again.state, method=method, every=1, keep=1, seams=seams) as ckpt:
        assert ckpt.resume().step == 3
    assert scan_run(seams.filesystem, PurePath(run)).bases


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["sync", "async"])
def test_nothing_bypasses_the_seam(heard: list[str], method: str) -> None:
    live(Seams(SimFileSystem(), ManualClock()), "/run", "sync")  # imports what is imported late
    heard.clear()
    live(Seams(SimFileSystem(), ManualClock()), "/run", method)
    assert heard == []


def test_the_listener_is_not_deaf(heard: list[str], tmp_path: PurePath) -> None:
    live(Seams(PosixFileSystem(), ManualClock()), str(tmp_path / "run"), "sync")
    events = {line.split()[0] for line in heard}
    assert {"open", "os.mkdir", "os.rename", "os.remove", "os.scandir"} <= events
