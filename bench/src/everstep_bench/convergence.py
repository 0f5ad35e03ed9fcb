"""Benchmark: loss of training on compressed gradients, next to dense training (LowDiff section V).

Each arm trains the demo's GPT from the same weights, on the same batches in the same order, as
dense training does; the only difference is what the optimizer consumes. What counts is the loss
over the last steps, in nats per byte, against that of dense training with the same seed; and the
loss on text that no arm has trained on. Several seeds give the scatter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from rich.console import Console
from rich.text import Text
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from everstep.compress.compressor import Compressor
from everstep.errors import OptionError
from everstep.workloads import (
    GPTConfig,
    Training,
    TrainingConfig,
    WarmupCosine,
    WindowLoader,
    stdlib_text,
    training_of,
)
from everstep_bench.persist.report import Spread
from everstep_bench.persist.show import Display
from everstep_bench.stall.loop import seeded_single_thread
from everstep_bench.stall.show import plain_table

__all__ = ["ARMS", "LAST_STEPS", "ConvergenceOptions", "ConvergenceReport", "Learned", "loss_on",
           "present", "run_convergence"]  # fmt: skip

OptimizerName = Literal["AdamW", "SGD"]

_DEMO = GPTConfig(layers=4, width=128, heads=4, context=128)
_TEXT_BYTES = 4 << 20
_UNSEEN_BYTES = 256 << 10
_UNSEEN_BATCHES = 8
LAST_STEPS = 20
"""Losses are means of so many."""

_SGD_LR = 0.3
_WITHOUT = {"error_feedback": False}
ARMS: Mapping[str, dict[str, Any] | None] = {
    "dense": None,
    "int8": {"kind": "int8"},
    "top 10%": {"ratio": 0.1},
    "top 10%, no feedback": {"ratio": 0.1, **_WITHOUT},
    "top 1%": {"ratio": 0.01},
    "top 1%, no feedback": {"ratio": 0.01, **_WITHOUT},
    "threshold 1%": {"kind": "threshold", "ratio": 0.01},
}
_COLUMNS = ("optimizer", "consumes", "loss", "min - max", "to dense", "unseen text", "to dense",
            "MB a step", "of dense")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConvergenceOptions:
    """Options of the benchmark.

    Attributes:
        steps: of each training; the schedule of the learning rate is as long.
        batch: windows in a batch.
        seeds: trainings of each arm.
        optimizers: by which.
        model: which GPT.
    """

    steps: int = 400
    batch: int = 16
    seeds: tuple[int, ...] = (0, 1)
    optimizers: tuple[OptimizerName, ...] = ("AdamW", "SGD")
    model: GPTConfig = _DEMO

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or not self.seeds or not self.optimizers:
            raise OptionError("steps, batch, seeds and optimizers must be at least one")


@dataclass(slots=True)
class Learned:
    """Losses of one arm with one optimizer.

    Attributes:
        losses: means over the last steps, by seed.
        unseen: mean losses on text that was not trained on, by seed.
        step_bytes: of the gradients that one step consumes, as a log holds them.
        dense_bytes: of the same gradients, uncompressed.
    """

    optimizer: OptimizerName
    arm: str
    losses: list[float] = field(default_factory=list)
    unseen: list[float] = field(default_factory=list)
    step_bytes: float = 0.0
    dense_bytes: float = 0.0


@dataclass(slots=True)
class ConvergenceReport:
    """Everything that was found.

    Attributes:
        parameters: of the model.
    """

    options: ConvergenceOptions
    parameters: int
    seconds: float
    learned: list[Learned]

    def behind_dense(self, of: Learned) -> tuple[float, float]:
        """Mean over the seeds of what an arm's losses lack to dense training's: at the end of
        training, and on unseen text, in nats per byte."""
        dense = next(
            one for one in self.learned if (one.optimizer, one.arm) == (of.optimizer, "dense")
        )
        return _mean_difference(of.losses, dense.losses), _mean_difference(of.unseen, dense.unseen)

    def as_json(self) -> dict[str, Any]:
        """Everything, by arm."""
        return {
            "steps": self.options.steps,
            "batch": self.options.batch,
            "seeds": list(self.options.seeds),
            "parameters": self.parameters,
            "torch": str(torch.__version__),
            "seconds": self.seconds,
            "arms": [
                {
                    "optimizer": one.optimizer,
                    "name": one.arm,
                    "losses": one.losses,
                    "unseen_losses": one.unseen,
                    "loss_behind_dense": self.behind_dense(one)[0],
                    "unseen_behind_dense": self.behind_dense(one)[1],
                    "step_bytes": one.step_bytes,
                    "dense_bytes": one.dense_bytes,
                }
                for one in self.learned
            ],
        }


def run_convergence(options: ConvergenceOptions, display: Display) -> ConvergenceReport:
    """Trains every arm with every seed.

    Raises:
        OptionError: the text is too short for one batch.
    """
    begun_s = time.monotonic()
    text = stdlib_text(_TEXT_BYTES + _UNSEEN_BYTES)
    cut = len(text) - min(_UNSEEN_BYTES, len(text) // 4)
    learned: list[Learned] = []
    parameters = 0
    display.begin("training", len(options.optimizers) * len(ARMS) * len(options.seeds))
    for optimizer in options.optimizers:
        for arm, compression in ARMS.items():
            one = Learned(optimizer, arm)
            for seed in options.seeds:
                with seeded_single_thread(seed):
                    training = _training(options, optimizer, seed, text[:cut])
                    parameters = sum(p.numel() for p in training.model.parameters())
                    _train(training, options, compression, one)
                    unseen = loss_on(
                        training, text[cut:], context=options.model.context, batch=options.batch
                    )
                    one.unseen.append(unseen)
                display.advance(f"{optimizer}, {arm}")
            learned.append(one)
    return ConvergenceReport(options, parameters, time.monotonic() - begun_s, learned)


def present(report: ConvergenceReport, console: Console) -> None:
    """The table, for people."""
    options = report.options
    console.print(
        f"GPT of {report.parameters:,} parameters ({options.model.layers} layers, width "
        f"{options.model.width}); {options.steps} steps of {options.batch} x "
        f"{options.model.context} bytes, {len(options.seeds)} seed(s); torch {torch.__version__}; "
        f"{report.seconds:.0f} s",
        soft_wrap=True,
    )
    table = plain_table(_COLUMNS, _COLUMNS[:2])
    for one in report.learned:
        table.add_row(*_cells(report, one))
    console.print(table)
    console.print(
        Text(
            f"loss: nats per byte, mean of the last {LAST_STEPS} steps and of the seeds (a byte "
            "drawn blindly from 256 costs 5.55). to dense: by how much it is worse than dense "
            "training of the same seeds. unseen text: of which no step has seen anything. MB a "
            "step: of the gradients that the optimizer consumes, as a log holds them."
        ),
        soft_wrap=True,
    )


def _training(
    options: ConvergenceOptions, optimizer: OptimizerName, seed: int, text: bytes
) -> Training:
    config = TrainingConfig(steps=options.steps, batch=options.batch, seed=seed)
    training = training_of(options.model, config, text)
    if optimizer == "SGD":
        # The scheduler and the step go by whatever optimizer they are given.
        sgd = torch.optim.SGD(training.model.parameters(), lr=_SGD_LR)
        training.optimizer = sgd  # type: ignore[assignment]
        training.scheduler = LambdaLR(sgd, WarmupCosine(config.warmup_steps, options.steps))
    return training


def _train(
    training: Training,
    options: ConvergenceOptions,
    compression: dict[str, Any] | None,
    learned: Learned,
) -> None:
    compressor = None
    if compression is not None:
        compressor = Compressor(training.optimizer, **compression)
    losses = [training.step() for _ in range(options.steps)]
    learned.losses.append(math.fsum(losses[-LAST_STEPS:]) / len(losses[-LAST_STEPS:]))
    sizes = {id(p): p.numel() * p.element_size() for p in training.model.parameters()}
    learned.dense_bytes = float(sum(sizes.values()))
    forms = {} if compressor is None else compressor.last
    learned.step_bytes = float(
        sum(
            size if (form := forms.get(key)) is None else form.size_bytes
            for key, size in sizes.items()
        )
    )
    if compressor is not None:
        compressor.close()


@torch.no_grad()
def loss_on(training: Training, text: bytes, *, context: int, batch: int) -> float:
    """Mean loss on some of a text, in nats per byte; training is over then."""
    loader = WindowLoader(text, context=context, batch=batch, seed=0)
    training.model.eval()
    losses = []
    for inputs, targets in _batches(loader):
        logits = training.model(inputs)
        losses.append(functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
    return math.fsum(losses) / len(losses)


def _batches(loader: WindowLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(_UNSEEN_BATCHES):
        yield loader.next_batch()


def _mean_difference(these: Sequence[float], those: Sequence[float]) -> float:
    return math.fsum(a - b for a, b in zip(these, those, strict=True)) / len(these)


def _cells(report: ConvergenceReport, one: Learned) -> list[str]:
    loss = Spread.of(one.losses)
    unseen = Spread.of(one.unseen)
    assert loss is not None
    assert unseen is not None
    seen_behind, unseen_behind = report.behind_dense(one)
    mean = math.fsum(one.losses) / len(one.losses)
    return [
        one.optimizer,
        one.arm,
        f"{mean:.3f}",
        f"{loss.low:.3f} - {loss.high:.3f}",
        f"{seen_behind:+.3f}",
        f"{math.fsum(one.unseen) / len(one.unseen):.3f}",
        f"{unseen_behind:+.3f}",
        f"{one.step_bytes / 1e6:.3f}",
        f"{one.step_bytes / one.dense_bytes:.1%}".replace("%", " %"),
    ]
