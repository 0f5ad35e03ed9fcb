"""everstep itself, by its public interface, and with one mechanism taken away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import torch

from everstep.capture.lanes.batches import Batch
from everstep.capture.lanes.devices import DeviceLane
from everstep.capture.lanes.lane import CpuLane, Lane, Progress, Transfer
from everstep.checkpointer import Checkpointer
from everstep.config.method import Method
from everstep.config.options import Budget, KeeperOptions
from everstep.errors import UnavailableError
from everstep.seams import PosixFileSystem, ReadFile, Seams, WriteFile
from everstep.testing.emulated_link import EmulatedLink
from everstep_bench.stall.arms import CAUSES, TIMEOUT_S, Arm, Pending, Role
from everstep_bench.stall.cores import Placement
from everstep_bench.stall.loop import Loop
from everstep_bench.stall.recording import Copied, Copies, recorded
from everstep_bench.stall.running import LINGER_S, close_run, keepers_of, quiet, take_due

__all__ = ["Buffered", "Ours", "ours_arm"]

_COPIES = 2  # the last durable one stays until a newer one is captured
_SLACK_BYTES = 64 << 20
_DETAILS = {
    "sync": "training waits until the base is durable",
    "async": "training waits for a copy in host memory",
    "checkfreq": "the copy during the next step, written once it is whole",
    "lazy": "the copy during the next step, written while it arrives",
    "gockpt": "the copy in parts over several steps; updates wait for copies of gradients",
    "gockpt_o": "the same; copies of gradients overlap the update and the next forward",
}
_HELD_STEPS = 8  # the most that there may be
_MULTISTEP = ("gockpt", "gockpt_o")
_GRADIENT_COPIES = 12  # of all gradients: in 24 parts, the most that there are


class Buffered(PosixFileSystem):
    """The real file system without O_DIRECT: everything goes through the page cache."""

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        """Creates a file for buffered writes."""
        return super().create(path, direct=False)

    def reuse(self, path: PurePath, *, direct: bool = False) -> WriteFile | None:
        """Opens a file for buffered overwriting."""
        return super().reuse(path, direct=False)

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        """Opens a file for buffered reads."""
        return super().open(path, direct=False)


if TYPE_CHECKING:
    _Base = CpuLane
else:
    _Base = object


class _Unpacking(_Base):
    """Copies small tensors one by one instead of packed together."""

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        super().copy_now(_unpacked(batches), block)

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        return super().submit(_unpacked(batches), block, progress)


class _Unpacked(_Unpacking, CpuLane):
    pass


class _UnpackedLink(_Unpacking, EmulatedLink):
    pass


class Ours(Arm):
    """Saves with one method of everstep; files of reclaimed bases are recycled (``keep=1``).

    Args:
        run: the run folder.
        placement: where the keeper runs.
        process: a keeper process; False: a thread of the trainer.
        filesystem: a replaced seam, which a keeper process would not see.
        lane: what copies; None: the engine's own.
        copies: what ``lane`` has copied, if it tells.
        one_core: the keeper, too, on training's core.
        held_steps: of ``gockpt_o``.
    """

    role: Role = "ours"

    def __init__(
        self,
        name: str,
        method: str,
        detail: str,
        loop: Loop,
        run: Path,
        placement: Placement,
        *,
        process: bool = True,
        filesystem: PosixFileSystem | None = None,
        lane: Callable[[], Lane] | None = None,
        copies: Copies | None = None,
        one_core: bool = False,
        held_steps: int = 1,
    ) -> None:
        super().__init__(name, f'method="{method}", keep=1: {detail}')
        self.one_core = one_core
        self.captures_in_steps = method in _MULTISTEP
        self._method: str | Method = method
        if held_steps > 1:
            assert method == "gockpt_o"
            self._method = Method(base="multistep", overlap_forward=True, held_steps=held_steps)
        self._loop = loop
        self._run = run
        cores = (placement.training,) if one_core else placement.others
        self._keeper = KeeperOptions(
            process=process, cores=cores if process else None, linger_s=LINGER_S
        )
        self._seams = Seams(filesystem=filesystem or PosixFileSystem(), lane=lane)
        self._copies = copies
        self._checkpointer: Checkpointer | None = None

    def open(self) -> None:
        """Begins the run."""
        host_bytes = _COPIES * self._loop.size_bytes + _SLACK_BYTES
        if self.captures_in_steps:
            host_bytes += _GRADIENT_COPIES * self._loop.gradient_bytes
        with quiet():
            self._checkpointer = Checkpointer(
                self._run,
                self._loop.training.state(),
                method=self._method,
                every=None,
                keep=1,
                budget=Budget(host_bytes=host_bytes),
                keeper=self._keeper,
                seams=self._seams,
            )

    def prepare(self) -> None:
        """Forgets what was copied."""
        if self._copies is not None:
            self._copies.begin(self._loop.tensors_of_state())

    def save(self) -> Pending:
        """Ends a step and takes a base of it; or begins one that takes several.

        That one is begun as if it were due: ``save()`` is for a base of this very step.
        """
        assert self._checkpointer is not None
        pending = Pending()
        self._checkpointer.step()
        take = take_due if self.captures_in_steps else Checkpointer.save
        save = take(self._checkpointer)
        save.staged.add_done_callback(pending.on_staged)
        save.durable.add_done_callback(pending.on_done)
        return pending

    def after_step(self) -> None:
        """As a training script does after each step."""
        assert self._checkpointer is not None
        self._checkpointer.step()

    def settle(self, pending: Pending) -> float:
        """Waits for the retention that follows a commit, too; nothing is left unsynced."""
        assert self._checkpointer is not None
        pending.wait()
        with quiet():
            self._checkpointer.wait(TIMEOUT_S)
        return 0.0

    def stalls(self) -> dict[str, float]:
        """As the engine counts them."""
        assert self._checkpointer is not None
        stall_s = self._checkpointer.stats().stall_s  # no keeper is lost here
        return {cause: stall_s.get(cause, 0.0) for cause in CAUSES}

    def persist_s(self) -> float | None:
        """As the engine counts it."""
        assert self._checkpointer is not None
        return self._checkpointer.stats().persist_s

    def copies(self) -> tuple[Copied, ...]:
        """As its lane tells."""
        return () if self._copies is None else self._copies.found()

    def processes(self) -> list[int]:
        """The keeper, if it is a process."""
        return keepers_of(self._run)

    def close(self) -> None:
        """Closes the run, and waits until its keeper has ended."""
        if self._checkpointer is not None:
            close_run(self._checkpointer, self.processes(), self.name)


def ours_arm(
    name: str,
    loop: Loop,
    folder: Path,
    placement: Placement,
    *,
    device: str,
    link_bytes_per_s: float | None,
) -> Arm:
    """The arm of this name.

    Raises:
        UnavailableError: it makes no sense on this device.
    """
    method = name.split("-", 1)[0]
    detail = _DETAILS[method]
    run = folder / f"everstep-{name}"
    copies = Copies()
    if link_bytes_per_s is not None:
        detail += f"; EMULATED link of {link_bytes_per_s / 1e9:g} GB/s"

    def made(what: str, kind: type[CpuLane] | None = None, **choices: object) -> Ours:
        lane: Callable[[], Lane] | None = None
        if link_bytes_per_s is not None:
            lane = recorded(kind or EmulatedLink, copies, link_bytes_per_s)
        elif device == "cpu":
            host = recorded(kind or CpuLane, copies)
            lane = lambda: DeviceLane(host())  # noqa: E731 - as the engine's own
        return Ours(
            name, method, what, loop, run, placement,
            lane=lane, copies=None if lane is None else copies, **choices,  # type: ignore[arg-type]
        )  # fmt: skip

    if name == "lazy-thread":
        return made(f"{detail}; the keeper is a thread", process=False)
    if name == "lazy-buffered":
        what = f"{detail}; the keeper is a thread, no O_DIRECT"
        return made(what, process=False, filesystem=Buffered())
    if name == "gockpt_o-held":
        what = f"{detail}; gradients held on the device for up to {_HELD_STEPS} steps"
        return made(what, held_steps=_HELD_STEPS)
    if name == "lazy-one-core":
        return made(f"{detail}; everything on training's core", one_core=True)
    if name == "lazy-unpacked":
        if device != "cpu":
            raise UnavailableError("small tensors are unpacked on the CPU only")
        what = f"{detail}; small tensors are copied one by one"
        return made(what, _Unpacked if link_bytes_per_s is None else _UnpackedLink)
    return made(detail)


def _unpacked(batches: Sequence[Batch]) -> list[Batch]:
    single: list[Batch] = []
    for batch in batches:
        begin = batch.begin
        for source in batch.sources:
            single.append(Batch(begin, begin + source.numel(), (source,)))
            begin = single[-1].end
        if batch.rearranged is not None:
            single.append(batch)
    return single
