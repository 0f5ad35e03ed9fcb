"""Training that is killed with SIGKILL, and what a new process makes of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError
from everstep.testing.keepers import end_keeper
from everstep_bench.persist.report import Spread
from everstep_bench.persist.show import Display
from everstep_bench.stall.helpers import answer, running
from everstep_bench.step.arms import Recovered
from everstep_bench.step.child import Order
from everstep_bench.step.options import COMPRESSED, NONE, Setting, StepOptions
from everstep_bench.step.ours import missing

__all__ = ["Kill", "Killed", "Kills"]

_MODULE = "everstep_bench.step.child"
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
        """The most that was lost."""
        return max(kill.lost for kill in self.kills)

    def seconds(self) -> Spread | None:
        """From ``resume()`` to its return."""
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
        """Every arm that saves, in its usual setting, so many times."""
        options = self._options
        arms = dict.fromkeys(setting.arm for setting in options.settings())
        names = [arm for arm in arms if arm not in (NONE, COMPRESSED) and missing(arm) is None]
        found = []
        self._display.begin("kills", len(names) * options.kills)
        for name in names if options.kills else ():
            killed = Killed(options.usual(name))
            for _ in range(options.kills):
                self._display.advance(name)
                try:
                    killed.kills.append(self._kill(killed.setting))
                except EverstepError as error:
                    killed.error = f"failed: {error}"
                    break
            found.append(killed)
        return found

    def _kill(self, setting: Setting) -> Kill:
        reference = self._reference(setting)
        folder = self._folder / "killed"
        at = self._random.randint(self._least, self._most)
        into = self._random.random()
        try:
            with self._child(setting, folder) as process:
                steps_s = [_until(process, "step", at)["seconds"] for at in range(1, at + 1)]
                step_s = sorted(steps_s)[len(steps_s) // 2]
                select.select([], [], [], into * step_s)
                process.kill()
                process.wait()
                completed = at + len([e for e in _rest(process) if e["event"] == "step"])
            with self._child(setting, folder) as process:
                resumed = _until(process, "resumed")
                last = _until(process, "finished")
        finally:
            for run in (folder, *_runs_below(folder)):
                end_keeper(run)
            shutil.rmtree(folder, ignore_errors=True)
        described = last["fingerprint"]
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
        alone = replace(
            self._options.usual(COMPRESSED if setting.compresses else NONE), ratio=setting.ratio
        )
        if alone not in self._references:
            with self._child(alone, self._folder / "alone") as process:
                self._references[alone] = _until(process, "finished")["fingerprint"]
        return self._references[alone]

    @contextlib.contextmanager
    def _child(self, setting: Setting, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
        options = self._options
        order = Order(
            setting=setting,
            params=options.params,
            batch=options.batch,
            seed=options.seed,
            free_core=options.free_core,
            folder=str(folder),
            steps=self._most + _AFTER_STEPS,
            parent=os.getpid(),
        )
        with running(_MODULE, order.encode()) as process:
            yield process


def _until(process: subprocess.Popen[bytes], event: str, step: int | None = None) -> Any:
    """Its next word of this kind, which must be of that step."""
    while True:
        found = json.loads(answer(process, "training process"))
        if found["event"] == event:
            if step is not None and found["step"] != step:
                raise EverstepError(f"a training process began with step {found['step']}")
            return found


def _rest(process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """Return the remaining lines of a dead process; a line that the kill cut short is skipped."""
    assert process.stdout is not None
    text = process.stdout.read()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def _runs_below(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
