"""Benchmark: training that is recovered from a log of lossy gradients many times.

TierCheck's experiment 8: failures are injected into a training whose log is adaptive, and its loss
is held against that of a training without failures. Besides the loss, what the paper does not show:
how far each recovered state is from the one that was lost, as a share of what the steps since the
base had changed (*update error*). A failure is ``ckpt.rewind()`` to the very step that training is
at: the base is loaded and the log replayed as after a kill, in the same process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from everstep import Checkpointer
from everstep.compress.forms import INT8_BELOW
from everstep.config.options import Budget, KeeperOptions, LogOptions, Method
from everstep.errors import OptionError
from everstep.workloads import (
    GPTConfig,
    Training,
    TrainingConfig,
    stdlib_text,
    training_of,
)
from everstep.workloads.processes import interruptible
from everstep_bench.convergence import LAST_STEPS, loss_on
from everstep_bench.persist.show import Display
from everstep_bench.persist.workspace import workspace
from everstep_bench.stall.loop import seeded_single_thread
from everstep_bench.stall.show import plain_table

__all__ = ["ARMS", "Approximated", "LossyOptions", "LossyReport", "present", "run_lossy"]

_TEXT_BYTES = 1 << 20
_UNSEEN_BYTES = 128 << 10
_MODEL = GPTConfig(layers=2, width=192, heads=4, context=64)  # large tensors and small ones
_HOST_BYTES = 1 << 30
ARMS: Mapping[str, tuple[str, float] | None] = {
    "none: no failures": None,
    "dense": ("dense", 0.01),
    "adaptive, 10 %": ("adaptive", 0.1),
    "adaptive, 1 %": ("adaptive", 0.01),
}
"""What is trained, by name: the kind of the log, and the share of large gradients in it."""

_COLUMNS = ("log", "recoveries", "steps replayed", "exact", "update error", "worst", "loss",
            "to no failures", "unseen text", "to no failures")  # fmt: skip


@dataclass(frozen=True, slots=True)
class LossyOptions:
    """Options of the benchmark.

    Attributes:
        steps: of each training.
        every: steps from base to base.
        fail_every: steps from failure to failure; where that is a multiple of ``every``, nothing
            is ever replayed.
        batch: windows in a batch.
        seed: of weights and data.
        folder: where bases are written; None: here.
    """

    steps: int = 300
    every: int = 25
    fail_every: int = 24
    batch: int = 8
    seed: int = 0
    model: GPTConfig = _MODEL
    folder: Path | None = None

    def __post_init__(self) -> None:
        if min(self.steps, self.every, self.fail_every, self.batch) < 1:
            raise OptionError("steps, every, fail_every and batch must be at least 1")
        if self.fail_every % self.every == 0:
            raise OptionError(
                f"failures every {self.fail_every} steps come right after bases, every "
                f"{self.every}: nothing would be replayed",
                hint=f"failures every {self.fail_every - 1 or 2} steps",
            )


@dataclass(slots=True)
class Approximated:
    """Result of one arm.

    Attributes:
        losses: of all steps, in nats per byte.
        unseen: on text that was not trained on.
        replayed: steps, of each recovery.
        errors: ``|recovered - lost| / |lost - base|`` over all parameters, of each recovery.
        exact: whether each recovery was said to be exact.
    """

    arm: str
    losses: list[float] = field(default_factory=list)
    unseen: float = math.nan
    replayed: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Mean over the last steps."""
        last = self.losses[-LAST_STEPS:]
        return math.fsum(last) / len(last)


@dataclass(slots=True)
class LossyReport:
    """Everything that was found.

    Attributes:
        parameters: of the model.
        large: of them in tensors that the adaptive log keeps sparse.
    """

    options: LossyOptions
    parameters: int
    large: int
    seconds: float
    arms: list[Approximated]

    def behind(self, of: Approximated) -> tuple[float, float]:
        """By how much an arm's losses are worse than without failures: at the end of training,
        and on unseen text."""
        undisturbed = self.arms[0]
        return of.loss - undisturbed.loss, of.unseen - undisturbed.unseen

    def as_json(self) -> dict[str, Any]:
        """Everything, by arm."""
        options = self.options
        return {
            "steps": options.steps,
            "every": options.every,
            "fail_every": options.fail_every,
            "batch": options.batch,
            "seed": options.seed,
            "parameters": self.parameters,
            "parameters_in_large_tensors": self.large,
            "torch": str(torch.__version__),
            "seconds": self.seconds,
            "arms": [
                {
                    "log": one.arm,
                    "loss": one.loss,
                    "loss_behind": self.behind(one)[0],
                    "unseen_loss": one.unseen,
                    "unseen_behind": self.behind(one)[1],
                    "replayed_steps": one.replayed,
                    "update_errors": one.errors,
                    "exact": one.exact,
                    "losses": one.losses,
                }
                for one in self.arms
            ],
        }


def run_lossy(options: LossyOptions, display: Display) -> LossyReport:
    """Trains every arm, from the same weights and on the same batches.

    Raises:
        OptionError: the text is too short for one batch, or the folder is not there.
    """
    begun_s = time.monotonic()
    text = stdlib_text(_TEXT_BYTES + _UNSEEN_BYTES)
    cut = len(text) - min(_UNSEEN_BYTES, len(text) // 4)
    arms: list[Approximated] = []
    sizes: list[int] = []
    display.begin("training", len(ARMS))
    with interruptible(), workspace(options.folder) as folder:
        for number, (name, log) in enumerate(ARMS.items()):
            one = Approximated(name)
            with seeded_single_thread(options.seed):
                config = TrainingConfig(steps=options.steps, batch=options.batch, seed=options.seed)
                training = training_of(options.model, config, text[:cut])
                sizes = [p.numel() for p in training.model.parameters()]
                if log is None:
                    one.losses = [training.step() for _ in range(options.steps)]
                else:
                    _train(training, options, log, folder / str(number), one)
                one.unseen = loss_on(
                    training, text[cut:], context=options.model.context, batch=options.batch
                )
            arms.append(one)
            display.advance(name)
    large = sum(size for size in sizes if size >= INT8_BELOW)
    return LossyReport(options, sum(sizes), large, time.monotonic() - begun_s, arms)


def _train(
    training: Training,
    options: LossyOptions,
    log: tuple[str, float],
    run: Path,
    found: Approximated,
) -> None:
    kind, ratio = log
    with Checkpointer(
        run,
        training.state(),
        method=Method(base="lazy", log=kind),
        every=options.every,
        keep=1,
        budget=Budget(host_bytes=_HOST_BYTES),
        log=LogOptions(ratio=ratio),
        keeper=KeeperOptions(process=False),
    ) as ckpt:
        ckpt.resume()
        base = _parameters(training)
        for step in range(1, options.steps + 1):
            found.losses.append(training.step())
            ckpt.step()
            if step % options.every == 0 or step == 1:  # the first step of a log has a base, too
                ckpt.wait()
                base = _parameters(training)
            if step % options.fail_every == 0:
                _fail(training, ckpt, step, base, found)


def _fail(
    training: Training, ckpt: Checkpointer, step: int, base: torch.Tensor, found: Approximated
) -> None:
    lost = _parameters(training)
    recovery = ckpt.rewind(step)
    error = (_parameters(training) - lost).norm() / (lost - base).norm()
    found.replayed.append(recovery.replayed)
    found.errors.append(float(error) if recovery.replayed else 0.0)
    found.exact.append(recovery.exact)


def _parameters(training: Training) -> torch.Tensor:
    """All of them, in one row of float64."""
    rows = [p.detach().reshape(-1) for p in training.model.parameters()]
    return torch.cat(rows).to(torch.float64)


def present(report: LossyReport, console: Console) -> None:
    """The table, for people."""
    options = report.options
    console.print(
        f"GPT of {report.parameters:,} parameters, {report.large / report.parameters:.0%} of them "
        f"in tensors of {INT8_BELOW:,} elements and more; AdamW, {options.steps} steps of "
        f"{options.batch} x {options.model.context} bytes, a base every {options.every}, a failure "
        f"every {options.fail_every}; torch {torch.__version__}; {report.seconds:.0f} s",
        soft_wrap=True,
    )
    table = plain_table(_COLUMNS, _COLUMNS[:1])
    for one in report.arms:
        loss_behind, unseen_behind = report.behind(one)
        failed = bool(one.errors)
        table.add_row(
            one.arm,
            str(len(one.errors)) if failed else "",
            f"{math.fsum(one.replayed) / len(one.replayed):.1f}" if failed else "",
            f"{sum(one.exact)} of {len(one.exact)}" if failed else "",
            f"{math.fsum(one.errors) / len(one.errors):.4f}" if failed else "",
            f"{max(one.errors):.4f}" if failed else "",
            f"{one.loss:.3f}",
            f"{loss_behind:+.3f}",
            f"{one.unseen:.3f}",
            f"{unseen_behind:+.3f}",
        )
    console.print(table)
    console.print(
        Text(
            "update error: distance of the recovered parameters from those that were lost, as a "
            "share of what the steps since the base had changed; mean and worst. A failure is a "
            "rewind to the step that training is at. loss: nats per byte, mean of the last "
            f"{LAST_STEPS} steps; one seed."
        ),
        soft_wrap=True,
    )
