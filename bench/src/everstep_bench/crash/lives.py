"""Training that is killed again and again, and goes on from what is left."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError
from everstep.link.registry import kill_keeper, list_keepers
from everstep.seams.processes.processes import process_ended
from everstep.testing.keepers import end_keeper
from everstep_bench.harness.children import Child
from everstep_bench.options import CrashOptions
from everstep_bench.step.arms import Recovered
from everstep_bench.step.child import ChildOrder
from everstep_bench.step.settings import Setting

_GONE_S = 10.0


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
    order = ChildOrder(os.getpid(), setting, options.training(), str(folder))
    found = Lives(name or setting.arm, setting.every)
    try:
        for number, seconds in enumerate(lifetimes, start=1):
            found.lives.append(_live(order, found.arm, seconds, losses, steps_min))
            if number < len(lifetimes):
                _kill_keepers(folder)
    except EverstepError as error:
        found.error = f"failed: {error}"
    finally:
        end_keeper(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _live(order: ChildOrder, arm: str, lifetime_s: float, losses: Losses, steps_min: int) -> Life:
    """Let one process live, killed so long after it was ready."""

    def seen(words: Iterable[dict[str, Any]], reached: int) -> int:
        for word in words:
            if word["step"] != reached + 1:
                raise EverstepError(f"a training process went from {reached} to {word['step']}")
            reached = word["step"]
            losses.see(arm, reached, word["loss"])
        return reached

    with Child("step.child", order.encode()) as process:
        begin_s = process.next("ready")["at_s"]
        resumed = process.next("resumed")
        recovered = Recovered(**resumed["recovered"])
        reached = seen(process.until(begin_s + lifetime_s), recovered.step)
        while reached < recovered.step + steps_min:
            reached = seen([process.next("step")], reached)
        killed_s = time.monotonic()
        reached = seen(process.kill(), reached)
    return Life(recovered, resumed["at_s"] - begin_s, killed_s - begin_s, reached)


def _kill_keepers(run: Path) -> None:
    """Kill the keepers, and with them the bases in their memory."""
    name = str(run.resolve())
    for info in list_keepers():
        if info.run == name and kill_keeper(info) and not process_ended(info.pid, _GONE_S):
            raise EverstepError(f"the keeper (process {info.pid}) of {run} goes on")
