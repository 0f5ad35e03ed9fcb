"""A run with ``every="auto"`` on a clock that is set by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

from everstep.config.options import Prediction
from everstep.link.messages import KeeperStats
from everstep.link.save import Save
from everstep.options import Options, validate_options
from everstep.plan.interval import Costs
from everstep.seams import ManualClock
from everstep.trainer.budget import LogLimits
from everstep.trainer.log.kept_records import DiskLog
from everstep.trainer.log.recorder import RecorderStats
from everstep.trainer.participant import TrainingContext
from everstep.trainer.session.cadence import REPLAY_SHARE, Cadence

RUN = PurePath("/run")


MB = 1_000_000


def options_of(method: str = "lazy", **changes: Any) -> Options:
    fixed: dict[str, Any] = {"method": method, "every": "auto", "keep": 3, "budget": None}
    return validate_options(**{**fixed, "on_failure": "raise", "progress_timeout_s": 5, **changes})


class Run:
    """A Cadence that is fed figures, as if a training process and its keeper had made them.

    Attributes:
        bases: steps at which it found a base due.
    """

    def __init__(
        self,
        method: str = "lazy",
        *,
        memory_bytes: int = 1 << 40,
        alone: bool = True,
        limits: LogLimits | None = None,
        auto: Prediction | None = None,
        **changes: Any,
    ):
        self.options = replace(options_of(method, **changes), auto=auto)
        self.clock = ManualClock()
        parks = self.options.is_scheduled and alone
        self.saver: Any = SimpleNamespace(saves=0, base_stall_s=0.0, last_save_s=0.0, parks=parks)
        self.stats = KeeperStats()
        self.keepers: Any = SimpleNamespace(stats=self.stats)
        self.recorder: Any = None
        self.told: list[bool] = []
        if self.options.logs:
            disk = DiskLog(self.options, channel=None)  # type: ignore[arg-type]
            disk.start(SimpleNamespace(log_to_disk=self.told.append))  # type: ignore[arg-type]
            memory = SimpleNamespace(bytes_max=memory_bytes, taken_bytes=0)
            self.recorder = SimpleNamespace(
                stats=RecorderStats(), disk=disk, memory=memory, is_over=False, stop_disk=disk.stop
            )
        state: Any = SimpleNamespace(ranks=SimpleNamespace(rank=0, world=1 if alone else 2))
        nothing: Any = None
        context = TrainingContext(self.options, RUN, state, nothing, nothing, self.clock, nothing)
        self.cadence = Cadence(
            context,
            self.saver,
            self.keepers,
            self.recorder,
            base_bytes=MB,
            limits=limits or LogLimits(),
        )
        self.step = 0
        self.bases: list[int] = []

    def train(self, steps: int, **figures: Any) -> None:
        """Steps, with a base wherever one is due: durable at once, and paid in the next step."""
        for _ in range(steps):
            self.over(**figures)
            if self.cadence.due(self.step):
                self.base(**figures)

    def over(self, *, step_s: float = 0.5, log_bytes: int = 1000, **_: Any) -> None:
        """A step is."""
        self.step += 1
        self.clock.advance(step_s)
        if self.recorder is not None:
            self.recorder.stats.marks += 1
            self.recorder.stats.record_bytes += log_bytes
            self.recorder.memory.taken_bytes += log_bytes
            self.stats.log_bytes += log_bytes if self.recorder.disk.on else 0
        self.mark()

    def mark(self) -> None:
        """A step mark is, of which the cadence reads nothing."""
        nothing: Any = None
        self.cadence.mark(nothing)

    def base(
        self, *, base_bytes: int = MB, persist_s: float = 3.0, cost_s: float = 2.0, **_: Any
    ) -> None:
        self.bases.append(self.step)
        self.saver.saves += 1
        self.saver.last_save_s = self.clock.monotonic_s()
        save = Save(self.step, 1)
        self.cadence.base_requested(self.step)
        self.cadence.base_taken(save)
        if self.recorder is not None:
            self.recorder.disk.base_taken(save, self.step, leads=True)
        self.stats.committed += 1
        self.stats.persist_s += persist_s
        self.stats.written_bytes += base_bytes
        self.saver.base_stall_s += cost_s
        self.clock.advance(cost_s)
        save.durable.set_result(base_bytes)

    def costs(self, **changes: Any) -> Costs:
        """The figures of :meth:`train`, as the model takes them."""
        figures: dict[str, Any] = {
            "state_bytes": MB,
            "write_bytes_per_s": MB / 3.0,
            "replay_s": 0.5 * REPLAY_SHARE,
            "mtbf_s": self.cadence.figures()["mtbf_s"],
            "step_s": 0.5,
            "base_cost_s": 2.0,
        }
        return Costs(**{**figures, **changes})
