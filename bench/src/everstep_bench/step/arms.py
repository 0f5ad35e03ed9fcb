"""Arms: ways to be able to resume from any step; those without everstep."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everstep.compress import Compressor
from everstep_bench.harness.loop import Loop
from everstep_bench.harness.machine import sync_all, sync_file
from everstep_bench.harness.placement import Placement
from everstep_bench.stall.arms import Pending
from everstep_bench.step.settings import Setting

_WARM_UP_STEPS = 4  # from then on memory is touched, and files are recycled
_METADATA = ".metadata"  # DCP writes it last


@dataclass(frozen=True, slots=True)
class Recovered:
    """State that a new process recovers.

    Attributes:
        step: that it goes on from; 0 if there was nothing.
        source: where it came from.
        base_step: of the whole state that was read.
        replayed: steps that were applied to it.
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
        """Begin; not timed. What it prints is for nobody.

        Error feedback is left out: what it keeps is as large as a dense gradient, belongs to
        the state, and would have to be recorded in each step (``docs/adr/011``).
        """
        if self.setting.compresses:
            self._compressor = Compressor(
                self._loop.training.optimizer, ratio=self.setting.ratio, error_feedback=False
            )

    def resume(self) -> Recovered:
        """Go back to where the process before has come to."""
        return Recovered(0, "fresh")

    def warm_up(self) -> None:
        """Train until nothing is done for the first time; not timed."""
        for _ in range(_WARM_UP_STEPS):
            self._loop.step()
            self.after_step()
        self.settle()

    def after_step(self) -> None:
        """After each step; paid for by training."""

    def settle(self) -> None:
        """Wait until nothing is under way."""

    def memory_bytes(self) -> int | None:
        """Return the bytes taken into host memory so far; None if that cannot be known."""
        return None

    def processes(self) -> list[int]:
        """Return processes of its own that are nobody's children."""
        return []

    def close(self) -> None:
        """Let go of the training; not timed."""
        if self._compressor is not None:
            self._compressor.close()
            self._compressor = None


class _Saver(StepArm):
    """A library that writes whole states, each under the number of its step.

    Attributes:
        kept: whole ones, after a save has been made or begun.
    """

    kept = 2

    def __init__(self, setting: Setting, loop: Loop, folder: Path, placement: Placement) -> None:
        super().__init__(setting, loop, folder, placement)
        self.saves_each_step = setting.every == 1
        self._step = 0

    def open(self) -> None:
        """Make its folder."""
        self._folder.mkdir(exist_ok=True)

    def resume(self) -> Recovered:
        """Load the newest save that is whole; remove what is not."""
        for path in self._folder.iterdir():
            if path.name.isdecimal() and not self.is_whole(path):
                shutil.rmtree(path)
        newest = max(self._steps(), default=0)
        self._step = newest
        if not newest:
            return Recovered(0, "fresh")
        saved = self.load(self._path(newest))
        training = self._loop.training
        # The head shares its weight with the tokens, and was left out.
        head = {"head.weight": saved["model"]["tokens.weight"]}
        training.model.load_state_dict(saved["model"] | head)
        for name in ("optimizer", "scheduler", "loader"):
            getattr(training, name).load_state_dict(saved[name])
        training.progress.update(saved["progress"])
        _set_generators(saved["generators"])
        return Recovered(newest, "disk", newest)

    def after_step(self) -> None:
        """Save if it is time to; the save before the last goes."""
        self._step += 1
        if self._step % self.setting.every:
            return
        self.settle()
        self.save(self._path(self._step))
        for step in sorted(self._steps())[: -self.kept]:
            self.remove(self._path(step))

    def save(self, path: Path) -> None:
        """Save, or begin to."""
        raise NotImplementedError

    def load(self, path: Path) -> dict[str, Any]:
        """Return what was saved."""
        raise NotImplementedError

    def is_whole(self, path: Path) -> bool:
        """Return True if a save is complete."""
        return True

    def remove(self, path: Path) -> None:
        """Remove a save."""
        path.unlink()

    def state(self) -> dict[str, Any]:
        """Return all that a resume needs."""
        return self._loop.nested() | {"generators": _generators()}

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}"

    def _steps(self) -> list[int]:
        return [
            int(path.name)
            for path in self._folder.iterdir()
            if path.name.isdecimal() and self.is_whole(path)
        ]


class TorchSave(_Saver):
    """``torch.save`` and fsync in training's thread."""

    detail = "of all that a resume needs; + fsync of file and folder, in the call"

    def save(self, path: Path) -> None:
        """Save; the file gets its name once it is durable."""
        unfinished = path.with_suffix(".unfinished")
        torch.save(self.state(), unfinished)
        sync_all(unfinished)
        unfinished.rename(path)
        sync_all(path)

    def load(self, path: Path) -> dict[str, Any]:
        """Load a file."""
        found: dict[str, Any] = torch.load(path, weights_only=True)
        return found


class DcpWarm(_Saver):
    """``async_save`` with one stager for all saves."""

    detail = "async_save with one stager; + fsync of directories; two are kept"
    kept = 1  # until the one that has begun is whole

    def __init__(self, setting: Setting, loop: Loop, folder: Path, placement: Placement) -> None:
        super().__init__(setting, loop, folder, placement)
        self._stack = contextlib.ExitStack()
        self._stager: Any = None
        self._pending: Pending | None = None

    def open(self) -> None:
        """Make a process group of one, and a stager."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        from everstep_bench.stall.dcp import single_rank_group

        super().open()
        group = Path(tempfile.mkdtemp(prefix="group-", dir=self._folder))  # not a killed one's
        self._stack.enter_context(single_rank_group(group))
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._stack.callback(self._stager.close)

    def save(self, path: Path) -> None:
        """Begin a save."""
        from torch.distributed.checkpoint import state_dict_saver

        response: Any = state_dict_saver.async_save(
            self.state(), checkpoint_id=path, async_stager=self._stager
        )
        future = getattr(response, "upload_completion", response)
        self._pending = Pending()
        future.add_done_callback(lambda done: sync_file(path) if not done.exception() else None)
        future.add_done_callback(self._pending.on_done)

    def load(self, path: Path) -> dict[str, Any]:
        """Load into the live state."""
        from torch.distributed.checkpoint import state_dict_loader

        found = self.state()
        state_dict_loader.load(found, checkpoint_id=path)
        return found

    def is_whole(self, path: Path) -> bool:
        """Return True if DCP has come to the end."""
        return (path / _METADATA).exists()

    def remove(self, path: Path) -> None:
        """Remove a save, from whose first moment on it is not whole."""
        (path / _METADATA).unlink()
        shutil.rmtree(path)

    def settle(self) -> None:
        """Wait for the save under way."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.wait()

    def close(self) -> None:
        """End stager and group."""
        self.settle()
        self._stack.close()
        super().close()


def _generators() -> dict[str, Any]:
    """Return the states of all process-wide generators, as tensors and plain data."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numbers = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, numbers, *rest),
    }


def _set_generators(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    name, numbers, *rest = saved["numpy"]
    np.random.set_state((name, numbers.numpy().astype(np.uint32), *rest))
