"""Protocol of an arm: one way to be able to resume from any step; arms without everstep."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everstep.compress import Compressor
from everstep_bench.stall.cores import Placement
from everstep_bench.stall.files import sync_all
from everstep_bench.stall.loop import Loop
from everstep_bench.step.options import Setting

__all__ = ["Recovered", "StepArm", "TorchSave", "generators", "set_generators", "tied"]

_WARM_UP_STEPS = 4  # from then on memory is touched, and files are recycled


@dataclass(frozen=True, slots=True)
class Recovered:
    """State that a new process recovers.

    Attributes:
        step: that it goes on from; 0 if there was nothing.
        source: where it came from.
        base_step: of the whole state that was read.
        replayed: steps, or differences, that were applied to it.
        exact: what the library claims; None if it claims nothing.
    """

    step: int
    source: str
    base_step: int | None = None
    replayed: int = 0
    exact: bool | None = None


class StepArm:
    """Training alone, or with compressed gradients; what is not overridden saves nothing.

    Args:
        setting: what it is told.
        loop: the training.
        folder: its own, which it makes if it writes.
        placement: where what it starts may run.

    Attributes:
        detail: what exactly it does, in a few words.
        saves_each_step: a block begins in the middle of such saves, not after them.
    """

    detail = "no checkpoint"
    saves_each_step = False

    def __init__(self, setting: Setting, loop: Loop, folder: Path, placement: Placement) -> None:
        self.setting = setting
        self._loop = loop
        self._folder = folder
        self._placement = placement
        self._compressor: Compressor | None = None
        if setting.compresses and setting.is_reference:
            self.detail = f"{self.compression}, no checkpoint"

    @property
    def compression(self) -> str:
        """Compression of gradients."""
        return f"training consumes the top {100 * self.setting.ratio:g} % of each gradient"

    def open(self) -> None:
        """Begins; not timed. What it prints is for nobody.

        Error feedback is left out: what it keeps is as large as a dense gradient, belongs to
        the state, and would have to be recorded in each step (``docs/adr/011``).
        """
        if self.setting.compresses:
            self._compressor = Compressor(
                self._loop.training.optimizer, ratio=self.setting.ratio, error_feedback=False
            )

    def resume(self) -> Recovered:
        """Goes back to where the process before has come to."""
        return Recovered(0, "fresh")

    def warm_up(self) -> None:
        """Trains until nothing is done for the first time; not timed."""
        for _ in range(_WARM_UP_STEPS):
            self._loop.step()
            self.after_step()
        self.settle()

    def after_step(self) -> None:
        """After each step; paid for by training."""

    def settle(self) -> None:
        """Waits until nothing is under way."""

    def memory_bytes(self) -> int | None:
        """Bytes taken into host memory so far; None if that cannot be known."""
        return None

    def processes(self) -> list[int]:
        """Processes of its own that are nobody's children."""
        return []

    def close(self) -> None:
        """Lets go of the training; not timed."""
        if self._compressor is not None:
            self._compressor.close()
            self._compressor = None


class TorchSave(StepArm):
    """``torch.save`` and fsync in training's thread; two files are kept."""

    def __init__(self, setting: Setting, loop: Loop, folder: Path, placement: Placement) -> None:
        super().__init__(setting, loop, folder, placement)
        self.detail = "of all that a resume needs; + fsync of file and folder, in the call"
        self.saves_each_step = setting.every == 1
        self._step = 0

    def open(self) -> None:
        """Makes its folder."""
        self._folder.mkdir(exist_ok=True)

    def resume(self) -> Recovered:
        """Loads the newest file that has its name, which it gets once it is durable."""
        newest = max(self._steps(), default=0)
        self._step = newest
        if not newest:
            return Recovered(0, "fresh")
        saved = torch.load(self._path(newest), weights_only=True)
        training = self._loop.training
        training.model.load_state_dict(saved["model"] | tied(saved["model"]))
        for name in ("optimizer", "scheduler", "loader"):
            getattr(training, name).load_state_dict(saved[name])
        training.progress.update(saved["progress"])
        set_generators(saved["generators"])
        return Recovered(newest, "disk", newest)

    def after_step(self) -> None:
        """Saves if it is time to; the file before the last goes."""
        self._step += 1
        every = self.setting.every
        if self._step % every:
            return
        path = self._path(self._step)
        unfinished = path.with_suffix(".unfinished")
        torch.save(self._loop.nested() | {"generators": generators()}, unfinished)
        sync_all(unfinished)
        unfinished.rename(path)
        sync_all(path)
        self._path(self._step - 2 * every).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}"

    def _steps(self) -> list[int]:
        return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]


def tied(model: dict[str, Any]) -> dict[str, Any]:
    """The head, which shares its weight, as a state dict of the model has it."""
    return {"head.weight": model["tokens.weight"]}


def generators() -> dict[str, Any]:
    """States of all process-wide generators, as tensors and plain data."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numbers = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, numbers, *rest),
    }


def set_generators(saved: dict[str, Any]) -> None:
    """Sets them to what :func:`generators` gave."""
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    name, numbers, *rest = saved["numpy"]
    np.random.set_state((name, numbers.numpy().astype(np.uint32), *rest))
