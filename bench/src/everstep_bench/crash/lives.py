"""Training that is killed again and again, and goes on from what is left."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import DeadlineError, EverstepError
from everstep.link.registry import kill_keeper, list_keepers
from everstep.seams.processes.processes import process_ended
from everstep.testing.keepers import end_keeper
from everstep_bench.crash.child import Order
from everstep_bench.crash.options import CrashOptions
from everstep_bench.stall.arms import TIMEOUT_S
from everstep_bench.stall.helpers import running
from everstep_bench.step.arms import Recovered
from everstep_bench.step.options import Setting

__all__ = ["Life", "Lives", "Losses", "lived"]

_MODULE = "everstep_bench.crash.child"
_GONE_S = 10.0
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Life:
    """A training process from its first ``resume()`` until it was killed.

    Attributes:
        recovered: what it went on from.
        load_s: seconds until that was there.
        seconds: all of it.
        reached: the last step that it was let go from.
    """

    recovered: Recovered
    load_s: float
    seconds: float
    reached: int

    @property
    def steps(self) -> int:
        """That it has trained."""
        return self.reached - self.recovered.step


@dataclass(slots=True)
class Lives:
    """All processes of an arm, one after the other.

    Attributes:
        every: steps from save to save.
        error: why there are no more.
    """

    arm: str
    every: int
    lives: list[Life] = field(default_factory=list)
    error: str | None = None

    @property
    def seconds(self) -> float:
        """Of training and resuming; starts of processes are left out."""
        return sum(life.seconds for life in self.lives)

    @property
    def reached(self) -> int:
        """The step that it has come to: what is left of all that was trained."""
        return self.lives[-1].reached

    @property
    def steps_per_s(self) -> float:
        """Useful ones."""
        return self.reached / self.seconds

    def lost(self) -> list[int]:
        """Steps that each failure has cost: they were completed, and have to be repeated."""
        pairs = zip(self.lives, self.lives[1:], strict=False)
        return [before.reached - after.recovered.step for before, after in pairs]

    def loads_s(self) -> list[float]:
        """Seconds of each resume after a failure."""
        return [life.load_s for life in self.lives[1:]]


@dataclass(slots=True)
class Losses:
    """The loss of each step, by whoever was there first; all others must have the same.

    Attributes:
        again: steps that were trained once more.
        different: of these, those whose loss differed: ``(arm, step)``.
    """

    known: dict[int, str] = field(default_factory=dict)
    again: int = 0
    different: list[tuple[str, int]] = field(default_factory=list)

    def see(self, arm: str, step: int, loss: str) -> None:
        """A process has trained a step."""
        if step not in self.known:
            self.known[step] = loss
            return
        self.again += 1
        if self.known[step] != loss:
            self.different.append((arm, step))


def lived(
    options: CrashOptions,
    setting: Setting,
    folder: Path,
    lifetimes: Sequence[float],
    losses: Losses,
    *,
    name: str | None = None,
    steps_min: int = 0,
) -> Lives:
    """Trains with an arm; nothing of it remains, neither processes nor files.

    Args:
        folder: its own, which it makes.
        lifetimes: seconds of each process; all but the last end in a failure.
        name: of the arm, where it is not that of the setting.
        steps_min: steps that each process is let train, however long they take.
    """
    order = Order(
        setting=setting,
        params=options.params,
        batch=options.batch,
        seed=options.seed,
        free_core=options.free_core,
        folder=str(folder),
        link_bytes_per_s=options.link_bytes_per_s,
        log_on_disk=not options.spare_keeper,
        parent=os.getpid(),
    )
    found = Lives(name or setting.arm, setting.every)
    try:
        for number, seconds in enumerate(lifetimes, start=1):
            found.lives.append(_live(order, found.arm, seconds, losses, steps_min))
            if number < len(lifetimes) and not options.spare_keeper:
                _kill_keepers(folder)
    except EverstepError as error:
        found.error = f"failed: {error}"
    finally:
        end_keeper(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _live(order: Order, arm: str, lifetime_s: float, losses: Losses, steps_min: int) -> Life:
    """One process, killed so long after it was ready."""

    def seen(words: Iterable[dict[str, Any]], reached: int) -> int:
        for word in words:
            if word["step"] != reached + 1:
                raise EverstepError(f"a training process went from {reached} to {word['step']}")
            reached = word["step"]
            losses.see(arm, reached, word["loss"])
        return reached

    with running(_MODULE, order.encode()) as process:
        said = _Said(process)
        begin_s = said.next("ready")["at_s"]
        resumed = said.next("resumed")
        recovered = Recovered(**resumed["recovered"])
        reached = seen(said.until(begin_s + lifetime_s), recovered.step)
        while reached < recovered.step + steps_min:
            reached = seen([said.next("step")], reached)
        process.kill()
        killed_s = time.monotonic()
        process.wait()
        reached = seen(said.rest(), reached)
    return Life(recovered, resumed["at_s"] - begin_s, killed_s - begin_s, reached)


class _Said:
    """Lines that a process has reported."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._process = process
        self._descriptor = process.stdout.fileno()
        self._read = b""
        self._ended = False

    def next(self, event: str) -> dict[str, Any]:
        """Its next word, which must be this one.

        Raises:
            EverstepError: it has ended, or says something else.
            DeadlineError: it hangs.
        """
        for word in self.until(time.monotonic() + TIMEOUT_S):
            if word["event"] != event:
                raise EverstepError(f"a training process says {word['event']!r}, not {event!r}")
            return word
        raise DeadlineError(f"a training process has said nothing for {TIMEOUT_S:g} s")

    def until(self, end_s: float) -> Iterator[dict[str, Any]]:
        """Its words until a moment of the monotonic clock.

        Raises:
            EverstepError: it has ended.
        """
        while True:
            yield from self._lines()
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            if select.select([self._descriptor], [], [], left_s)[0]:
                self._take()
            if self._ended:
                raise EverstepError(
                    f"a training process has ended: exit status {self._process.wait(_GONE_S)}",
                    hint="what it said is above; too much for this machine?",
                )

    def rest(self) -> Iterator[dict[str, Any]]:
        """Return the remaining lines of a dead process, without one that the kill cut short."""
        while not self._ended:
            self._take()
        yield from self._lines()

    def _take(self) -> None:
        found = os.read(self._descriptor, _READ_BYTES)
        self._read += found
        self._ended = not found

    def _lines(self) -> Iterator[dict[str, Any]]:
        while b"\n" in self._read:
            line, self._read = self._read.split(b"\n", 1)
            yield json.loads(line)


def _kill_keepers(run: Path) -> None:
    """Kill the keepers, and with them the bases in their memory."""
    name = str(run.resolve())
    for info in list_keepers():
        if info.run == name and kill_keeper(info) and not process_ended(info.pid, _GONE_S):
            raise EverstepError(f"the keeper (process {info.pid}) of {run} goes on")
