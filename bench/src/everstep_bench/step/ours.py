"""everstep by its public interface: bases each step, and logs between bases."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import everstep
from everstep.checkpointer import Checkpointer
from everstep.config.options import KeeperOptions, LogOptions
from everstep.seams import Seams
from everstep.testing.emulated_link import EmulatedLink
from everstep.tiers.options import is_url, open_tier
from everstep_bench.harness.children import TIMEOUT_S
from everstep_bench.harness.loop import Loop
from everstep_bench.harness.placement import Placement
from everstep_bench.harness.running import close_run, keepers_of
from everstep_bench.step.arms import Recovered, StepArm
from everstep_bench.step.settings import Setting

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
    "lowdiff": "compressed gradients on disk, {batch_steps} steps at a time; bases in between",
    "lowdiff_plus": "dense gradients applied to the keeper's replica; bases written from there",
}


def missing(arm: str) -> str | None:
    """Why this version has no such arm; None if it has."""
    if arm in _DETAILS and arm not in everstep.presets:
        return f'this version has no preset "{arm}"'
    return None


class Ours(StepArm):
    """A method of everstep, by its preset's name, with a keeper process."""

    def __init__(self, setting: Setting, loop: Loop, folder: Path, placement: Placement) -> None:
        super().__init__(setting, loop, folder, placement)
        arm = setting.arm
        self.saves_each_step = setting.every == 1
        words = _DETAILS[arm].format(batch_steps=setting.batch_steps)
        self.detail = f'method="{arm}", every={setting.every}, keep=1: {words}'
        if setting.tiers:
            self.detail += f"; copies in {', '.join(setting.tiers)}"
        if setting.compresses:
            self.detail += f"; {self.compression}, without error feedback"
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
            method=self.setting.arm,
            every=self.setting.every,
            keep=1,
            log=self.log(),
            keeper=KeeperOptions(cores=self._placement.others, linger_s=LINGER_KILLED_S),
            tiers=self._places,
            seams=self.seams(),
        )

    def log(self) -> LogOptions | None:
        """Return where its log is, if it has one."""
        if everstep.presets[self.setting.arm].log == "none":
            return None
        if self._compressor is None and not self.setting.log_on_disk:
            return LogOptions()
        return LogOptions(to="disk", batch_steps=self.setting.batch_steps)

    def seams(self) -> Seams:
        """Return the seams of its Checkpointer, with the emulated link if there is one."""
        speed = self.setting.link_bytes_per_s
        return Seams() if speed is None else Seams(lane=lambda: EmulatedLink(speed))

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
            _empty(place, self.seams())
        super().close()

    @property
    def _run(self) -> Checkpointer:
        assert self._checkpointer is not None
        return self._checkpointer


def _empty(place: str, seams: Seams) -> None:
    if not is_url(place):
        shutil.rmtree(place, ignore_errors=True)
        return
    with contextlib.closing(open_tier(place, seams.filesystem, clock=seams.clock)) as tier:
        for item in tier.walk():
            tier.delete(item.name)
