"""A bench from its start to its facts: signals, scratch folder, machine, cores, generators."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.workloads.processes import interruptible
from everstep_bench.harness import machine as machines
from everstep_bench.harness.display import Display
from everstep_bench.harness.loop import seeded_single_thread
from everstep_bench.harness.machine import Machine, refuse_without_room, workspace
from everstep_bench.harness.placement import Placement
from everstep_bench.harness.report import Facts
from everstep_bench.harness.turns import Turns


@dataclass(slots=True)
class Session:
    """One run of a bench.

    Attributes:
        options: of the bench; seed, and where they have one, whether a core is free.
        folder: of its own, removed at the end.
        signals: received so far.
        begin_s: on the monotonic clock.
        pinned: whether training was kept on a core.
    """

    options: Any
    display: Display
    folder: Path
    machine: Machine
    placement: Placement
    signals: Sequence[int]
    begin_s: float
    pinned: bool = False

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Train here until the end of the block: seeded, one thread, on a core of its own.

        Child processes that have cores of their own are started outside: they inherit these.
        """
        self.pinned = True
        with seeded_single_thread(self.options.seed), self.placement.pinned():
            yield

    def turns(self) -> Turns:
        """Return the rounds of this run."""
        return Turns(self.display, self.options.seed, self.signals)

    def refuse_without_room(self, *, disk_bytes: float, memory_bytes: float, hint: str) -> None:
        """Look before anything is written.

        Raises:
            OutOfSpaceError: disk or memory would not do.
        """
        refuse_without_room(
            self.machine,
            self.folder,
            disk_bytes=int(disk_bytes),
            memory_bytes=int(memory_bytes),
            hint=hint,
        )

    def facts(self, size_bytes: int, tensors: int, workload: str) -> Facts:
        """Return the facts of the run, which is over.

        Args:
            size_bytes: of all tensors of the state.
            workload: the model in words.
        """
        return Facts(
            machine=self.machine,
            folder=str(self.folder.parent),
            size_bytes=size_bytes,
            tensors=tensors,
            workload=workload,
            free_core=self.placement.free if self.pinned else None,
            load_after=os.getloadavg()[0],
            seconds=time.monotonic() - self.begin_s,
        )


@contextlib.contextmanager
def session(options: Any, display: Display) -> Iterator[Session]:
    """Begin a run; whatever happens, everything that it has written is removed.

    Raises:
        OptionError: there is no folder to write in.
        PermissionDeniedError: it may not be written.
    """
    begin_s = time.monotonic()
    with interruptible() as signals, workspace(options.folder) as folder:
        placement = Placement(free_core=getattr(options, "free_core", True))
        facts = machines.look_at(folder)
        yield Session(options, display, folder, facts, placement, signals, begin_s)
