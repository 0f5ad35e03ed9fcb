"""Training that is killed with SIGKILL, and what a new process makes of it."""

from __future__ import annotations

import os
import random
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError
from everstep.testing.keepers import end_keeper
from everstep_bench.harness.children import Child
from everstep_bench.harness.display import Display
from everstep_bench.harness.figures import Spread
from everstep_bench.options import COMPRESSED, NONE, StepOptions
from everstep_bench.step.arms import Recovered, Setting, missing, settings, usual
from everstep_bench.step.child import ChildOrder

_AFTER_STEPS = 2  # beyond the last kill: what is resumed has to train on as if nothing had been
_BEGIN_STEPS = 2


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill and what came of it.

    Attributes:
        completed: the last step that training had been let go from.
        into: how much of the next one was over, as a share.
        recovered: what the next process got.
        seconds: from its call of ``resume()`` until that came back.
        step_s: what a step took before the kill, in the middle.
        different: parts of the state that in the end differ from an uninterrupted training's.
        parts: that were compared.
    """

    completed: int
    into: float
    recovered: Recovered
    seconds: float
    step_s: float
    different: int
    parts: int

    @property
    def lost(self) -> int:
        """Steps that were completed and have to be repeated; the one in flight is not among
        them."""
        return max(0, self.completed - self.recovered.step)

    @property
    def identical(self) -> bool:
        """Return True if training ended bit for bit as without a kill."""
        return self.different == 0


@dataclass(slots=True)
class Killed:
    """All kills of an arm.

    Attributes:
        error: why there are no more.
    """

    setting: Setting
    kills: list[Kill] = field(default_factory=list)
    error: str | None = None

    def lost(self) -> int:
        """Return the most that was lost."""
        return max(kill.lost for kill in self.kills)

    def seconds(self) -> Spread | None:
        """Return the seconds from ``resume()`` to its return."""
        return Spread.of([kill.seconds for kill in self.kills])


class Kills:
    """Kills the trainers of arms.

    Args:
        folder: where they write; nothing stays.
    """

    def __init__(self, options: StepOptions, folder: Path, display: Display) -> None:
        self._options = options
        self._folder = folder
        self._display = display
        self._random = random.Random(options.seed)
        self._least = options.every[0] + _BEGIN_STEPS  # a base comes before it, and a log
        self._most = 2 * options.every[0]
        self._references: dict[Setting, dict[str, str]] = {}

    def measure(self) -> list[Killed]:
        """Kill every arm that saves, in its usual setting, so many times."""
        options = self._options
        arms = dict.fromkeys(setting.arm for setting in settings(options))
        names = [arm for arm in arms if arm not in (NONE, COMPRESSED) and missing(arm) is None]
        found = []
        self._display.begin("kills", len(names) * options.kills)
        for name in names if options.kills else ():
            killed = Killed(usual(options, name))
            for _ in range(options.kills):
                self._display.advance(name)
                try:
                    killed.kills.append(self._kill(killed.setting))
                except EverstepError as error:
                    killed.error = f"failed: {error}"
                    break
            found.append(killed)
        return found

    def child(self, setting: Setting, folder: Path) -> Child:
        """Start a training process of an arm."""
        steps = self._most + _AFTER_STEPS
        training = self._options.training()
        order = ChildOrder(os.getpid(), setting, training, str(folder), steps)
        return Child("step.child", order.encode())

    def _kill(self, setting: Setting) -> Kill:
        reference = self._reference(setting)
        folder = self._folder / "killed"
        at = self._random.randint(self._least, self._most)
        into = self._random.random()
        try:
            with self.child(setting, folder) as process:
                process.next("ready")
                process.next("resumed")
                steps_s = [process.next("step", step)["seconds"] for step in range(1, at + 1)]
                step_s = sorted(steps_s)[len(steps_s) // 2]
                # In the middle of a step: what it says meanwhile is read afterwards.
                time.sleep(into * step_s)
                completed = at + sum(word["event"] == "step" for word in process.kill())
            with self.child(setting, folder) as process:
                process.next("ready")
                resumed = process.next("resumed")
                described = _finished(process)
        finally:
            for run in (folder, *_runs_below(folder)):
                end_keeper(run)
            shutil.rmtree(folder, ignore_errors=True)
        names = reference.keys() | described.keys()
        return Kill(
            completed=completed,
            into=into,
            recovered=Recovered(**resumed["recovered"]),
            seconds=resumed["seconds"],
            step_s=step_s,
            different=sum(reference.get(name) != described.get(name) for name in names),
            parts=len(names),
        )

    def _reference(self, setting: Setting) -> dict[str, str]:
        """Return the final state of an uninterrupted training of the same kind."""
        arm = COMPRESSED if setting.compresses else NONE
        alone = replace(usual(self._options, arm), ratio=setting.ratio)
        if alone not in self._references:
            with self.child(alone, self._folder / "alone") as process:
                process.next("ready")
                process.next("resumed")
                self._references[alone] = _finished(process)
        return self._references[alone]


def _finished(process: Child) -> dict[str, str]:
    """Return the state that a process ends with."""
    while True:
        word: Any = process.next()
        if word["event"] == "finished":
            return dict(word["fingerprint"])


def _runs_below(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
