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
from typing import Any

import torch
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from everstep.compress.compressor import Compressor
from everstep.workloads import (
    GPTConfig,
    Training,
    TrainingConfig,
    WarmupCosine,
    WindowLoader,
    stdlib_text,
    training_of,
)
from everstep_bench.harness.display import Display
from everstep_bench.harness.figures import Spread, picked
from everstep_bench.harness.loop import seeded_single_thread
from everstep_bench.harness.report import Findings, Table, mb, number, range_of
from everstep_bench.options import ConvergenceOptions

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


@dataclass(slots=True)
class Learned:
    """Losses of one arm with one optimizer.

    Attributes:
        losses: means over the last steps, by seed.
        unseen: mean losses on text that was not trained on, by seed.
        step_bytes: of the gradients that one step consumes, as a log holds them.
        dense_bytes: of the same gradients, uncompressed.
    """

    optimizer: str
    arm: str
    losses: list[float] = field(default_factory=list)
    unseen: list[float] = field(default_factory=list)
    step_bytes: float = 0.0
    dense_bytes: float = 0.0


@dataclass
class ConvergenceReport(Findings):
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

    def lines(self) -> Iterator[str]:
        """Yield what was trained."""
        options = self.options
        model = options.model or _DEMO
        yield (
            f"GPT of {self.parameters:,} parameters ({model.layers} layers, width {model.width}); "
            f"{options.steps} steps of {options.batch} x {model.context} bytes, "
            f"{len(options.seeds)} seed(s); torch {torch.__version__}; {self.seconds:.0f} s"
        )

    def tables(self) -> Iterator[Table]:
        """Yield the table."""
        yield Table("Losses", _COLUMNS, map(self._cells, self.learned), _COLUMNS[:2])

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            f"loss: nats per byte, mean of the last {LAST_STEPS} steps and of the seeds (a byte "
            "drawn blindly from 256 costs 5.55). to dense: by how much it is worse than dense "
            "training of the same seeds. unseen text: of which no step has seen anything. MB a "
            "step: of the gradients that the optimizer consumes, as a log holds them."
        )

    def figures(self) -> dict[str, Any]:
        """Return everything, by arm."""
        return {
            **picked(self.options, "steps batch seeds"),
            **picked(self, "parameters seconds"),
            "torch": str(torch.__version__),
            "arms": [
                {
                    **picked(one, "optimizer losses step_bytes dense_bytes"),
                    "name": one.arm,
                    "unseen_losses": one.unseen,
                    "loss_behind_dense": self.behind_dense(one)[0],
                    "unseen_behind_dense": self.behind_dense(one)[1],
                }
                for one in self.learned
            ],
        }

    def _cells(self, one: Learned) -> list[str]:
        seen_behind, unseen_behind = self.behind_dense(one)
        return [
            one.optimizer,
            one.arm,
            number(math.fsum(one.losses) / len(one.losses), 3),
            range_of(Spread.of(one.losses), 3),
            f"{seen_behind:+.3f}",
            number(math.fsum(one.unseen) / len(one.unseen), 3),
            f"{unseen_behind:+.3f}",
            mb(one.step_bytes, 3),
            f"{100 * one.step_bytes / one.dense_bytes:.1f} %",
        ]


def run_convergence(options: ConvergenceOptions, display: Display) -> ConvergenceReport:
    """Trains every arm with every seed.

    Raises:
        OptionError: the text is too short for one batch.
    """
    begun_s = time.monotonic()
    model = options.model or _DEMO
    seen, unseen = texts(_TEXT_BYTES, _UNSEEN_BYTES)
    learned: list[Learned] = []
    parameters = 0
    display.begin("training", len(options.optimizers) * len(ARMS) * len(options.seeds))
    for optimizer in options.optimizers:
        for arm, compression in ARMS.items():
            one = Learned(optimizer, arm)
            for seed in options.seeds:
                with seeded_single_thread(seed):
                    training = _training(options, optimizer, seed, seen)
                    parameters = sum(p.numel() for p in training.model.parameters())
                    _train(training, options, compression, one)
                    one.unseen.append(
                        loss_on(training, unseen, context=model.context, batch=options.batch)
                    )
                display.advance(f"{optimizer}, {arm}")
            learned.append(one)
    return ConvergenceReport(options, parameters, time.monotonic() - begun_s, learned)


def texts(seen_bytes: int, unseen_bytes: int) -> tuple[bytes, bytes]:
    """Return text to train on, and text that no step sees."""
    text = stdlib_text(seen_bytes + unseen_bytes)
    cut = len(text) - min(unseen_bytes, len(text) // 4)
    return text[:cut], text[cut:]


def _training(options: ConvergenceOptions, optimizer: str, seed: int, text: bytes) -> Training:
    config = TrainingConfig(steps=options.steps, batch=options.batch, seed=seed)
    training = training_of(options.model or _DEMO, config, text)
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
    for _ in range(_UNSEEN_BATCHES):
        inputs, targets = loader.next_batch()
        logits = training.model(inputs)
        losses.append(functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
    return math.fsum(losses) / len(losses)


def _mean_difference(these: Sequence[float], those: Sequence[float]) -> float:
    return math.fsum(a - b for a, b in zip(these, those, strict=True)) / len(these)
