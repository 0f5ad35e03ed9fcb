"""everstep and torch.distributed.checkpoint, so that another process can go on with them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from everstep.config.options import LogOptions
from everstep.seams import Seams
from everstep.testing.emulated_link import EmulatedLink
from everstep_bench.persist.machine import sync_folder
from everstep_bench.stall.arms import TIMEOUT_S, Pending
from everstep_bench.stall.cores import Placement
from everstep_bench.stall.loop import Loop
from everstep_bench.step.arms import Recovered, StepArm, TorchSave, generators, set_generators, tied
from everstep_bench.step.options import NONE, Setting
from everstep_bench.step.ours import Ours

__all__ = ["DcpWarm", "KilledOurs", "make_arm"]

_METADATA = ".metadata"  # DCP writes it last


class KilledOurs(Ours):
    """A method of everstep, whose copies may go through an emulated link.

    Args:
        link_bytes_per_s: of the link; None: there is none.
        log_on_disk: a log is on disk, since no keeper outlives the failure.
    """

    def __init__(
        self,
        setting: Setting,
        loop: Loop,
        folder: Path,
        placement: Placement,
        *,
        link_bytes_per_s: float | None,
        log_on_disk: bool,
    ) -> None:
        super().__init__(setting, loop, folder, placement)
        self._link_bytes_per_s = link_bytes_per_s
        self._log_on_disk = log_on_disk

    def log(self) -> LogOptions | None:
        """On disk, or in memory."""
        if self.setting.arm != "logged" or not self._log_on_disk:
            return super().log()
        return LogOptions(to="disk", batch_steps=self.setting.batch_steps)

    def seams(self) -> Seams:
        """With the link, if there is one."""
        speed = self._link_bytes_per_s
        return Seams() if speed is None else Seams(lane=lambda: EmulatedLink(speed))


class DcpWarm(StepArm):
    """``async_save`` with one stager for all saves; the save before the last goes."""

    detail = "async_save with one stager; + fsync of directories; two are kept"

    def __init__(self, setting: Setting, loop: Loop, folder: Path, placement: Placement) -> None:
        super().__init__(setting, loop, folder, placement)
        self._step = 0
        self._stack = contextlib.ExitStack()
        self._stager: Any = None
        self._pending: Pending | None = None

    def open(self) -> None:
        """Makes a process group of one, and a stager."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        from everstep_bench.stall.dcp import single_rank_group

        self._folder.mkdir(exist_ok=True)
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

    def resume(self) -> Recovered:
        """Loads the newest save that is whole; removes what is not."""
        from torch.distributed.checkpoint import state_dict_loader

        newest = max(self._steps(whole=True), default=0)
        self._step = newest
        for step in self._steps(whole=False):
            self._remove(step)
        if not newest:
            return Recovered(0, "fresh")
        training = self._loop.training
        saved = self._state()
        state_dict_loader.load(saved, checkpoint_id=self._path(newest))
        training.model.load_state_dict(saved["model"] | tied(saved["model"]))
        for name in ("optimizer", "scheduler", "loader"):
            getattr(training, name).load_state_dict(saved[name])
        training.progress.update(saved["progress"])
        set_generators(saved["generators"])
        return Recovered(newest, "disk", newest)

    def after_step(self) -> None:
        """Saves if it is time to, once the save before is done."""
        self._step += 1
        if self._step % self.setting.every:
            return
        from torch.distributed.checkpoint import state_dict_saver

        self.settle()
        path = self._path(self._step)
        response: Any = state_dict_saver.async_save(
            self._state(), checkpoint_id=path, async_stager=self._stager
        )
        future = getattr(response, "upload_completion", response)
        pending = Pending()
        future.add_done_callback(lambda done: sync_folder(path) if not done.exception() else None)
        future.add_done_callback(pending.on_done)
        self._pending = pending
        for step in sorted(self._steps(whole=True))[:-1]:  # the last stays until this one is whole
            self._remove(step)

    def settle(self) -> None:
        """Waits for the save under way."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.wait(TIMEOUT_S)

    def close(self) -> None:
        """Ends stager and group."""
        self.settle()
        self._stack.close()
        super().close()

    def _state(self) -> dict[str, Any]:
        return self._loop.nested() | {"generators": generators()}

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}"

    def _steps(self, *, whole: bool) -> list[int]:
        return [
            int(path.name)
            for path in self._folder.iterdir()
            if path.name.isdecimal() and (path / _METADATA).exists() == whole
        ]

    def _remove(self, step: int) -> None:
        path = self._path(step)
        (path / _METADATA).unlink(missing_ok=True)  # from here on it is not whole
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


def make_arm(
    setting: Setting,
    loop: Loop,
    folder: Path,
    placement: Placement,
    *,
    link_bytes_per_s: float | None,
    log_on_disk: bool,
) -> StepArm:
    """The arm of this setting; nothing is begun."""
    kinds: dict[str, type[StepArm]] = {
        NONE: StepArm,
        "torch.save": TorchSave,
        "dcp-warm": DcpWarm,
    }
    kind = kinds.get(setting.arm)
    if kind is not None:
        return kind(setting, loop, folder, placement)
    return KilledOurs(
        setting,
        loop,
        folder,
        placement,
        link_bytes_per_s=link_bytes_per_s,
        log_on_disk=log_on_disk,
    )
