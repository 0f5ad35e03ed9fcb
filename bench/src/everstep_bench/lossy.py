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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from everstep import Checkpointer
from everstep.compress.feedback import INT8_BELOW
from everstep.config.method import Method
from everstep.config.options import Budget, KeeperOptions, LogOptions
from everstep.workloads import GPTConfig, Training, TrainingConfig, training_of
from everstep.workloads.processes import interruptible
from everstep_bench.convergence import LAST_STEPS, loss_on, texts
from everstep_bench.harness.display import Display
from everstep_bench.harness.figures import picked
from everstep_bench.harness.loop import seeded_single_thread
from everstep_bench.harness.machine import workspace
from everstep_bench.harness.report import Findings, Table
from everstep_bench.options import LossyOptions

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


@dataclass
class LossyReport(Findings):
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

    def lines(self) -> Iterator[str]:
        """Yield what was trained."""
        options = self.options
        model = options.model or _MODEL
        yield (
            f"GPT of {self.parameters:,} parameters, {self.large / self.parameters:.0%} of them in "
            f"tensors of {INT8_BELOW:,} elements and more; AdamW, {options.steps} steps of "
            f"{options.batch} x {model.context} bytes, a base every {options.every}, a failure "
            f"every {options.fail_every}; torch {torch.__version__}; {self.seconds:.0f} s"
        )

    def tables(self) -> Iterator[Table]:
        """Yield the table."""
        yield Table("Recoveries and losses", _COLUMNS, map(self._cells, self.arms), _COLUMNS[:1])

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            "update error: distance of the recovered parameters from those that were lost, as a "
            "share of what the steps since the base had changed; mean and worst. A failure is a "
            "rewind to the step that training is at. loss: nats per byte, mean of the last "
            f"{LAST_STEPS} steps; one seed."
        )

    def figures(self) -> dict[str, Any]:
        """Return everything, by arm."""
        return {
            **picked(self.options, "steps every fail_every batch seed"),
            **picked(self, "parameters seconds"),
            "parameters_in_large_tensors": self.large,
            "torch": str(torch.__version__),
            "arms": [
                {
                    **picked(one, "loss exact losses"),
                    "log": one.arm,
                    "loss_behind": self.behind(one)[0],
                    "unseen_loss": one.unseen,
                    "unseen_behind": self.behind(one)[1],
                    "replayed_steps": one.replayed,
                    "update_errors": one.errors,
                }
                for one in self.arms
            ],
        }

    def _cells(self, one: Approximated) -> list[str]:
        loss_behind, unseen_behind = self.behind(one)
        failed = ["", "", "", "", ""]
        if one.errors:
            count = len(one.errors)
            failed = [
                str(count),
                f"{math.fsum(one.replayed) / count:.1f}",
                f"{sum(one.exact)} of {count}",
                f"{math.fsum(one.errors) / count:.4f}",
                f"{max(one.errors):.4f}",
            ]
        losses = [f"{one.loss:.3f}", f"{loss_behind:+.3f}", f"{one.unseen:.3f}"]
        return [one.arm, *failed, *losses, f"{unseen_behind:+.3f}"]


def run_lossy(options: LossyOptions, display: Display) -> LossyReport:
    """Trains every arm, from the same weights and on the same batches.

    Raises:
        OptionError: the text is too short for one batch, or the folder is not there.
    """
    begun_s = time.monotonic()
    model = options.model or _MODEL
    seen, unseen = texts(_TEXT_BYTES, _UNSEEN_BYTES)
    arms: list[Approximated] = []
    sizes: list[int] = []
    display.begin("training", len(ARMS))
    with interruptible(), workspace(options.folder) as folder:
        for number, (name, log) in enumerate(ARMS.items()):
            one = Approximated(name)
            with seeded_single_thread(options.seed):
                config = TrainingConfig(steps=options.steps, batch=options.batch, seed=options.seed)
                training = training_of(model, config, seen)
                sizes = [p.numel() for p in training.model.parameters()]
                if log is None:
                    one.losses = [training.step() for _ in range(options.steps)]
                else:
                    _train(training, options, log, folder / str(number), one)
                one.unseen = loss_on(training, unseen, context=model.context, batch=options.batch)
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
