"""Arms: ways to be able to resume from any step, and what each is told.

Training alone, other libraries, and everstep by its public interface: bases each step, and logs
between bases.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import everstep
from everstep.checkpointer import Checkpointer
from everstep.compress import Compressor
from everstep.config.method import Method
from everstep.config.options import Budget, KeeperOptions, LogOptions
from everstep.seams import PosixFileSystem, Seams
from everstep.testing.conformance import walk
from everstep.testing.emulated_link import EmulatedLink
from everstep.tiers.options import is_url, open_tier
from everstep_bench.harness.children import TIMEOUT_S
from everstep_bench.harness.loop import Loop
from everstep_bench.harness.machine import sync_all, sync_file
from everstep_bench.harness.placement import Placement
from everstep_bench.harness.running import close_run, keepers_of
from everstep_bench.options import (
    ADAPTIVE,
    AUTO,
    COMPRESSED,
    IN_FLIGHT,
    NONE,
    STEP_ARMS,
    FrequencyOptions,
    StepOptions,
)
from everstep_bench.stall.arms import Pending

_USES = {
    COMPRESSED: {"ratio"},
    "logged": {"every"},
    IN_FLIGHT: {"every"},
    ADAPTIVE: {"ratio", "every"},
    "lowdiff": {"ratio", "batch_steps", "every"},
    "lowdiff_plus": {"every"},
}
_OTHERS = (NONE, COMPRESSED, "torch.save")
# The others are presets.
_METHODS = {
    ADAPTIVE: Method(base="lazy", log="adaptive"),
    IN_FLIGHT: everstep.presets["logged"],
}


def method_of(arm: str) -> Method | None:
    """Return the method of an arm of everstep; None for all others."""
    return _METHODS.get(arm) or everstep.presets.get(arm)


def recovers_each_step(arm: str) -> bool:
    """Return True if the arm has a log: every step can be gone back to, whatever the interval."""
    method = method_of(arm)
    return method is not None and method.log != "none"


@dataclass(frozen=True, slots=True)
class Setting:
    """An arm, and what it is told: one row of a table.

    Attributes:
        every: steps from one whole state that is saved to the next.
        ratio: the share of a gradient's elements that is kept.
        batch_steps: steps that are written to disk at a time.
        block_steps: steps of a timed block.
        tiers: places in which bases are copied, too; everstep's arms alone can.
        link_bytes_per_s: of an emulated link of everstep's copies; None: there is none.
        log_on_disk: a log is on disk, since no keeper outlives the failure.
        host_bytes: host memory that everstep's copies may take; None: its default.
    """

    arm: str
    every: int
    ratio: float = 1.0
    batch_steps: int = 1
    block_steps: int = 1
    tiers: tuple[str, ...] = ()
    link_bytes_per_s: float | None = None
    log_on_disk: bool = False
    host_bytes: int | None = None

    @property
    def compresses(self) -> bool:
        """True if training consumes compressed gradients."""
        return self.arm in (COMPRESSED, "lowdiff")

    @property
    def is_reference(self) -> bool:
        """True if nothing is saved."""
        return self.arm in (NONE, COMPRESSED)

    def words(self, usual: Setting) -> str:
        """Return the arm, and what it is told otherwise than in its ``usual`` setting."""
        found = [self.arm]
        if self.ratio != usual.ratio:
            found.append(f"ratio {self.ratio:g}")
        if self.batch_steps != usual.batch_steps:
            found.append(f"batch {self.batch_steps}")
        if self.every != usual.every:
            found.append(f"every {self.every}")
        return " ".join(found)


def usual(options: StepOptions, arm: str) -> Setting:
    """Return the default setting of an arm."""
    every = options.every[0] if "every" in _USES.get(arm, ()) else 1
    return Setting(arm, every, options.ratio[0], options.batch_steps[0], options.every[0])


def settings(options: StepOptions) -> list[Setting]:
    """Return all settings, each once, in the order of arms; references first."""
    chosen = {NONE, *(STEP_ARMS if options.arms is None else options.arms)}
    if "lowdiff" in chosen:
        chosen.add(COMPRESSED)
    found: dict[Setting, None] = {}
    for arm in (name for name in STEP_ARMS if name in chosen):
        own = usual(options, arm)
        uses = _USES.get(arm, ())
        found[own] = None
        if "ratio" in uses:
            found |= dict.fromkeys(replace(own, ratio=ratio) for ratio in options.ratio)
        if "batch_steps" in uses:
            found |= dict.fromkeys(replace(own, batch_steps=n) for n in options.batch_steps)
        if "every" in uses:
            found |= dict.fromkeys(replace(own, every=n, block_steps=n) for n in options.every)
    return list(found)


def probed(options: FrequencyOptions, arm: str, every: int, block_steps: int) -> Setting:
    """Return an arm with this interval."""
    tiers = () if arm in _OTHERS else options.tiers
    return Setting(arm, every, options.ratio, options.batch_steps, block_steps, tiers)


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
        from everstep_bench.stall.dcp import single_rank_group, stager

        super().open()
        group = Path(tempfile.mkdtemp(prefix="group-", dir=self._folder))  # not a killed one's
        self._stack.enter_context(single_rank_group(group))
        self._stager = stager()
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
    devices = {"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {}
    return devices | {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, numbers, *rest),
    }


def _set_generators(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    torch.cuda.set_rng_state_all(saved.get("cuda", []))
    random.setstate(saved["python"])
    name, numbers, *rest = saved["numpy"]
    np.random.set_state((name, numbers.numpy().astype(np.uint32), *rest))


LINGER_KILLED_S = 120.0
"""A keeper waits so long for a trainer that takes the place of a killed one."""

_WARM_BASES = 3  # two blocks of memory, and a recycled file
_DETAILS = {
    "sync": "training waits until bases are durable",
    "async": "training waits for copies in host memory, which are written during training",
    "checkfreq": "bases are copied during the next step, and written once they are whole",
    "lazy": "bases are copied during the next step, and written while they arrive",
    "gockpt": "bases are copied in parts over several steps; updates wait for gradients",
    "gockpt_o": "the same; copies of gradients overlap the update and the next forward",
    "logged": "dense gradients in memory, applied at recovery; bases in between",
    IN_FLIGHT: "the same, with LogOptions(in_flight_steps=1); staged on a device",
    ADAPTIVE: "lossy gradients in memory, applied at recovery, not exactly; bases in between",
    "lowdiff": "compressed gradients on disk, {batch_steps} steps at a time; bases in between",
    "lowdiff_plus": "dense gradients applied to the keeper's replica; bases written from there",
    AUTO: "method and interval chosen at each start, from what earlier ones measured",
}


def missing(arm: str) -> str | None:
    """Why this version has no such arm; None if it has."""
    if arm in _DETAILS and arm != AUTO and method_of(arm) is None:
        return f'this version has no preset "{arm}"'
    return None


class Ours(StepArm):
    """A method of everstep, with a keeper process."""

    def __init__(self, setting: Setting, loop: Loop, folder: Path, placement: Placement) -> None:
        super().__init__(setting, loop, folder, placement)
        arm = setting.arm
        self._method = _METHODS.get(arm, arm)
        self.saves_each_step = setting.every == 1
        words = _DETAILS[arm].format(batch_steps=setting.batch_steps)
        told = {ADAPTIVE: 'Method(base="lazy", log="adaptive")', IN_FLIGHT: '"logged"'}.get(
            arm, f'"{arm}"'
        )
        self.detail = f"method={told}, every={setting.every}, keep=1: {words}"
        if setting.tiers:
            self.detail += f"; copies in {', '.join(setting.tiers)}"
        if setting.compresses:
            self.detail += f"; {self.compression}, without error feedback"
        staged = arm == IN_FLIGHT and next(loop.training.model.parameters()).is_cuda
        self._stage_bytes: int | str = "auto" if staged else 0
        self._checkpointer: Checkpointer | None = None
        # Of this block alone: a place holds one run, and is emptied after it.
        name = f"{folder.parent.name}-{folder.name}"
        self._places = [f"{place.rstrip('/')}/{name}" for place in setting.tiers]

    def open(self) -> None:
        """Begins, or goes on with, the run."""
        super().open()
        state: dict[str, Any] = self._loop.training.state()
        if self._compressor is not None:
            state["compressor"] = self._compressor
        for place in self._places:
            if not is_url(place):
                Path(place).mkdir(exist_ok=True)
        self._checkpointer = Checkpointer(
            self._folder,
            state,
            method=self._method,
            every="auto" if self.setting.arm == AUTO else self.setting.every,
            keep=1,
            log=self.log(),
            budget=Budget(host_bytes=self.setting.host_bytes, device_bytes=self._stage_bytes),
            keeper=KeeperOptions(cores=self._placement.others, linger_s=LINGER_KILLED_S),
            tiers=self._places,
            seams=self.seams(),
        )

    def log(self) -> LogOptions | None:
        """Return where its log is, if it has one."""
        setting = self.setting
        if not recovers_each_step(setting.arm):
            return None
        options = LogOptions(in_flight_steps=int(setting.arm == IN_FLIGHT))
        if self._compressor is not None or setting.log_on_disk:
            options = replace(options, to="disk", batch_steps=setting.batch_steps)
        return replace(options, ratio=setting.ratio) if setting.arm == ADAPTIVE else options

    def seams(self) -> Seams:
        """Return the seams of its Checkpointer, with the emulated link if there is one."""
        speed = self.setting.link_bytes_per_s
        lane = None if speed is None else lambda: EmulatedLink(speed)
        # What "auto" chooses from.
        events = PosixFileSystem() if self.setting.arm == AUTO else None
        return Seams(lane=lane, events=events)

    def resume(self) -> Recovered:
        """As a training script does."""
        found = self._run.resume()
        return Recovered(found.step, found.source, found.base_step, found.replayed, found.exact)

    def warm_up(self) -> None:
        """Bases until memory is touched and files are recycled, whatever the interval is."""
        for _ in range(_WARM_BASES):
            self._loop.step()
            self.after_step()
            self._run.save()
            self.settle()

    def after_step(self) -> None:
        """As a training script does after each step."""
        self._run.step()

    def settle(self) -> None:
        """Waits for what was taken, and for retention."""
        self._run.wait(TIMEOUT_S)

    def memory_bytes(self) -> int | None:
        """Bases and records, as the engine counts them."""
        stats = self._run.stats()
        return stats.saves * self._loop.size_bytes + stats.log_bytes

    def processes(self) -> list[int]:
        """The keeper."""
        return keepers_of(self._folder)

    def close(self) -> None:
        """Closes the run, waits until its keeper has ended, after the last copy, and removes its
        copies."""
        if self._checkpointer is not None:
            closing = self._checkpointer
            self._checkpointer = None
            close_run(closing, self.processes(), self.setting.arm)
        for place in self._places:
            empty_place(place, self.seams())
        super().close()

    @property
    def _run(self) -> Checkpointer:
        assert self._checkpointer is not None
        return self._checkpointer


def empty_place(place: str, seams: Seams) -> None:
    """Remove all copies from a place."""
    if not is_url(place):
        shutil.rmtree(place, ignore_errors=True)
        return
    with contextlib.closing(open_tier(place, seams.filesystem, clock=seams.clock)) as tier:
        for item in walk(tier):
            tier.delete(item.name)
