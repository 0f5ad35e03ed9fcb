"""The largest model, times steps in a second, that the keeper's replica keeps up with.

The trainer does nothing but update: over and over the same gradients, as fast as its optimizer
can. Behind the last update a base of that very step is asked for, which the replica has when it
has applied everything. What a base alone takes is taken off.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everstep.config.options import Budget
from everstep.errors import EverstepError
from everstep_bench.stall.arms import TIMEOUT_S
from everstep_bench.stall.cores import Placement
from everstep_bench.stall.loop import Loop
from everstep_bench.stall.running import quiet
from everstep_bench.step.options import Setting
from everstep_bench.step.ours import Ours

__all__ = ["ReplicaRate", "log_bytes_of", "measure_rate"]

_UPDATES_MAX = 40
_UPDATES_MIN = 3
_LOG_BYTES_MAX = 2 << 30  # of gradients that wait
_GRADIENT_BYTES = 4
_BEHIND = 1.1  # times what a base alone takes: nothing was waiting


@dataclass(frozen=True, slots=True)
class ReplicaRate:
    """Figures of a replica.

    Attributes:
        params: of the model.
        updates: that it was given, one after the other.
        given_s: in which the trainer made them.
        applied_s: from the first update until the last was applied.
        kept_up: whether none was waiting when the last was made: then it may be faster still.
    """

    params: int
    updates: int
    given_s: float
    applied_s: float
    kept_up: bool

    @property
    def parameter_steps_per_s(self) -> float:
        """At which it keeps up."""
        return self.params * self.updates / self.applied_s

    def as_json(self) -> dict[str, Any]:
        """All figures as plain data."""
        return {**asdict(self), "parameter_steps_per_s": self.parameter_steps_per_s}


def log_bytes_of(params: int) -> int:
    """Bytes of gradients that may be waiting for the replica, at most."""
    return _updates_of(params) * _GRADIENT_BYTES * params


def _updates_of(params: int) -> int:
    count = _LOG_BYTES_MAX // (_GRADIENT_BYTES * params)
    return max(_UPDATES_MIN, min(_UPDATES_MAX, count))


class _Updates(Ours):
    """``lowdiff_plus`` under nothing but updates."""

    def open(self) -> None:
        """With room for all gradients in the log, so that a slow replica is only slow."""
        params = self._loop.training.model.config.params
        self._updates = _updates_of(params)
        arena_bytes = 2 * self._loop.size_bytes + 2 * log_bytes_of(params)
        self._budget = Budget(host_bytes=2 * arena_bytes)  # a half of it is the replica's
        super().open()

    def measure(self) -> ReplicaRate:
        """After a warm-up.

        Raises:
            EverstepError: the replica has stopped.
        """
        training = self._loop.training
        updates = self._updates
        params = training.model.config.params
        for parameter in training.model.parameters():
            parameter.grad = parameter.detach() * 1e-3
        try:
            base_s = min(self._base_s(1) for _ in range(2))
            begin_s = time.monotonic()
            behind_s = self._base_s(updates)
            whole_s = time.monotonic() - begin_s
        finally:
            training.optimizer.zero_grad()
        return ReplicaRate(
            params=params,
            updates=updates,
            given_s=whole_s - behind_s,
            applied_s=max(whole_s - base_s, 1e-9),
            kept_up=behind_s <= _BEHIND * base_s,
        )

    def _base_s(self, updates: int) -> float:
        """Updates, then a base; seconds from the last update until it is durable."""
        for _ in range(updates):
            self._loop.training.optimizer.step()
            self.after_step()
        begin_s = time.monotonic()
        self._run.save().durable.result(TIMEOUT_S)
        if self._run.stats().failed:
            raise EverstepError("the replica has stopped")
        return time.monotonic() - begin_s


def measure_rate(loop: Loop, folder: Path, placement: Placement) -> ReplicaRate:
    """Of a replica of this training; nothing stays in ``folder``, which is made.

    Raises:
        EverstepError: the replica has stopped.
    """
    arm = _Updates(Setting("lowdiff_plus", 10**6, 1.0, 1, 1), loop, folder, placement)
    with quiet():
        try:
            arm.open()
            placement.spread()
            arm.warm_up()
            return arm.measure()
        finally:
            arm.close()
            if folder.exists():
                shutil.rmtree(folder)
