"""A bench from its start to its facts: signals, scratch folder, machine, cores, generators.

All arms take turns in rounds, so that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from everstep.errors import OutOfSpaceError
from everstep.workloads.processes import interruptible
from everstep_bench.harness import machine as machines
from everstep_bench.harness.display import Display
from everstep_bench.harness.figures import Row
from everstep_bench.harness.loop import seeded_single_thread
from everstep_bench.harness.machine import Machine, workspace
from everstep_bench.harness.placement import Placement
from everstep_bench.harness.report import Facts

_Row = TypeVar("_Row", bound=Row[Any])


class Turns:
    """Draws the order of arms, and notes in its row what a peer fails with.

    Args:
        seed: of the orders.
        signals: received so far; after one nothing is an arm's own failure.
    """

    def __init__(self, display: Display, seed: int, signals: Sequence[int] = ()) -> None:
        self.display = display
        self._random = random.Random(seed)
        self._signals = signals

    def rounds(
        self,
        what: str,
        rows: Sequence[_Row],
        repeats: int,
        *,
        warm_up: bool = True,
        times: Callable[[_Row], int] = lambda row: 1,
    ) -> Iterator[tuple[int, Iterator[_Row]]]:
        """Yield the number of each round, and its rows in their order; those that failed are left
        out.

        Args:
            warm_up: begin with a round 0, which does not count.
            times: how often an arm comes in each round.
        """
        for number in range(0 if warm_up else 1, repeats + 1):
            order = [row for row in rows if row.error is None for _ in range(times(row))]
            self._random.shuffle(order)
            name = f"round {number} of {repeats}" if number else "warming up"
            self.display.begin(f"{what}, {name}" if what else name, len(order))
            gc.collect()
            yield number, self._each(order)

    def _each(self, order: Sequence[_Row]) -> Iterator[_Row]:
        for row in order:
            self.display.advance(row.name)
            if row.error is None:
                yield row

    @contextlib.contextmanager
    def may_fail(self, row: Row[Any]) -> Iterator[None]:
        """Report a library that does not work on this machine in its row; ours must work."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # DCP's own is no Exception
            # A library may have made an error of its own of a signal.
            if row.role != "peer" or self._signals:
                raise
            row.error = in_a_line(error)


def in_a_line(error: BaseException) -> str:
    """Return the error of a library, which may bring the traceback of another process along."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return f"{type(error).__name__}: {text}"


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

        Args:
            hint: what takes less.

        Raises:
            OutOfSpaceError: disk or memory would not do.
        """
        machine = self.machine
        if machine.free_bytes < disk_bytes:
            raise OutOfSpaceError(
                f"the benchmark writes up to {disk_bytes / 2**30:.1f} GiB at a time, "
                f"{machine.free_bytes / 2**30:.1f} GiB are free",
                tier="disk",
                path=self.folder.parent,
                hint=f"{hint}, or --dir on another file system",
            )
        if machine.memory_available_bytes < memory_bytes:
            raise OutOfSpaceError(
                f"the benchmark takes up to {memory_bytes / 2**30:.1f} GiB of memory, "
                f"{machine.memory_available_bytes / 2**30:.1f} GiB are available",
                tier="memory",
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
