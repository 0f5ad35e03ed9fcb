"""everstep itself, by its public interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from everstep.capture.cuda import DeviceLane
from everstep.capture.lane import CpuLane, Lane
from everstep.checkpointer import Checkpointer
from everstep.config.method import Method
from everstep.config.options import Budget, KeeperOptions
from everstep.seams import Seams
from everstep.testing.emulated_link import EmulatedLink
from everstep_bench.harness.children import TIMEOUT_S
from everstep_bench.harness.figures import Role
from everstep_bench.harness.loop import Loop
from everstep_bench.harness.placement import Placement
from everstep_bench.harness.running import LINGER_S, close_run, keepers_of, quiet, take_due
from everstep_bench.options import WAYS, StallOptions
from everstep_bench.stall.arms import CAUSES, Arm, Copied, Copies, Pending, recorded

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
_STAGES = {"staged": 1.0, "half": 0.5}
_ALIGNED_BYTES = 1 << 20  # for the gaps between staged tensors
_GRADIENT_COPIES = 12  # of all gradients: in 24 parts, the most that there are


class Ours(Arm):
    """Saves with one method of everstep; files of reclaimed bases are recycled (``keep=1``).

    Args:
        folder: the run folder is made in it.
        placement: where the keeper runs.
        options: link and device.
    """

    role: Role = "ours"

    def __init__(
        self, name: str, loop: Loop, folder: Path, placement: Placement, options: StallOptions
    ) -> None:
        method, _, variant = name.partition("-")
        detail = _DETAILS[method]
        self._copies: Copies | None = Copies()
        lane: Callable[[], Lane] | None = None
        if options.link_bytes_per_s is not None:
            speed = options.link_bytes_per_s
            detail += f"; EMULATED link of {speed / 1e9:g} GB/s"
            lane = recorded(EmulatedLink, self._copies, speed)
        elif options.device == "cpu":
            host = recorded(CpuLane, self._copies)
            lane = lambda: DeviceLane(host())  # noqa: E731 - as the engine's own
        else:
            self._copies = None  # the engine's own lane does not tell
        self.method: str | Method = method
        self._stage_bytes = 0
        if variant in _STAGES:
            self._stage_bytes = int(_STAGES[variant] * loop.size_bytes) + _ALIGNED_BYTES
            detail += f"; a stage of {_STAGES[variant]:g} times the state on the device"
        elif variant == "held":
            detail += f"; gradients held on the device for up to {_HELD_STEPS} steps"
            self.method = Method(base="multistep", overlap_forward=True, held_steps=_HELD_STEPS)
        super().__init__(name, f'method="{method}", keep=1: {detail}')
        self.captures_in_steps = method in WAYS
        self._loop = loop
        self._run = folder / f"everstep-{name}"
        self._keeper = KeeperOptions(cores=placement.others, linger_s=LINGER_S)
        self.seams = Seams(lane=lane)
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
                method=self.method,
                every=None,
                keep=1,
                budget=Budget(host_bytes=host_bytes, device_bytes=self._stage_bytes),
                keeper=self._keeper,
                seams=self.seams,
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
