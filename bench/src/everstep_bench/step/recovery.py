"""Speed of replay, and the time until a killed training is back.

Replay alone: million parameters times steps in a second, beside torch's own operator over blocks
of tensors, and beside what memory gives. Recovery: a training is killed with
SIGKILL, another process calls ``resume()``, and what comes out of it is compared bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from everstep.errors import EverstepError
from everstep.replay.engine import Replayer, ReplayOptions
from everstep.replay.updates import Update
from everstep.testing.keepers import end_keeper
from everstep.workloads import GPT, gpt_of
from everstep_bench.harness.children import Child
from everstep_bench.harness.figures import picked
from everstep_bench.options import Training
from everstep_bench.step.recovered import RecoveryOrder

BLOCKED = "torch, blocks"
EVERSTEP = "everstep"
"""The ways: torch's fused operator over 256k elements and all steps at a time; ours."""

_BLOCK_ELEMENTS = 256 * 1024
_COPY_ELEMENTS = 64 << 20
_HYPERPARAMETERS: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 1e-2,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}
_STATE_BYTES = 24  # three float32 tensors, read and written; bfloat16, read
_GRADIENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """Replay of fused AdamW on the CPU, float32 with bfloat16 gradients.

    Attributes:
        params: of the model.
        steps: of the log, replayed at once.
        seconds: of each round, by way and threads.
        copy_bytes_per_s: what a copy reads and writes, by threads; the best round.
    """

    params: int
    steps: int
    seconds: Mapping[tuple[str, int], tuple[float, ...]]
    copy_bytes_per_s: Mapping[int, float]

    def speed(self, way: str, threads: int) -> float:
        """Return parameters times steps in a second; the best round, since the machine has
        neighbours."""
        return self.params * self.steps / min(self.seconds[way, threads])

    def ratio(self, threads: int) -> float:
        """Return our speed by torch's: the median of the rounds, each compared with itself."""
        mine, other = (self.seconds[way, threads] for way in (EVERSTEP, BLOCKED))
        return statistics.median(b / a for a, b in zip(mine, other, strict=True))

    def of_bandwidth(self, threads: int) -> float:
        """Return the share of a copy's bandwidth that replay takes at least: the state is read and
        written once for all steps, and each gradient read."""
        moved_bytes = _STATE_BYTES / self.steps + _GRADIENT_BYTES
        return self.speed(EVERSTEP, threads) * moved_bytes / self.copy_bytes_per_s[threads]

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        rows = [
            {
                "way": way,
                "threads": threads,
                "parameter_steps_per_s": self.speed(way, threads),
                "seconds": seconds,
            }
            for (way, threads), seconds in self.seconds.items()
        ]
        return {
            "params": self.params,
            "steps": self.steps,
            "rows": rows,
            "copy_bytes_per_s": {str(n): rate for n, rate in self.copy_bytes_per_s.items()},
            "to_torch_blocks": {str(n): self.ratio(n) for n in self.copy_bytes_per_s},
            "of_bandwidth": {str(n): self.of_bandwidth(n) for n in self.copy_bytes_per_s},
        }


def measure_replay(
    *,
    params: int = 16_000_000,
    steps: int = 5,
    repeats: int = 5,
    threads: Sequence[int] = (1, 2),
    seed: int = 0,
) -> ReplayFigures:
    """Time both ways in turns, on the tensors of a GPT; none is checked for what it computes.

    Args:
        params: of the model, about.
        steps: at least 1.
        repeats: rounds.
        threads: Python's, each with one of torch's.
    """
    shapes = _shapes(params)
    ways = {way: _Way(way, shapes, steps, seed) for way in (BLOCKED, EVERSTEP)}
    seconds: dict[tuple[str, int], list[float]] = {}
    copies: dict[int, list[float]] = {}
    before = torch.get_num_threads()
    try:
        for _ in range(repeats):
            for count in threads:
                copies.setdefault(count, []).append(_copy_s(count))
                for way, measured in ways.items():
                    seconds.setdefault((way, count), []).append(measured.run(count))
    finally:
        torch.set_num_threads(before)
    copied_bytes = 2 * 4 * _COPY_ELEMENTS
    return ReplayFigures(
        sum(shape.numel() for shape in shapes.values()),
        steps,
        {key: tuple(rounds) for key, rounds in seconds.items()},
        {count: copied_bytes / min(rounds) for count, rounds in copies.items()},
    )


class _Way:
    """State and gradients of its own, and one way to bring them together."""

    def __init__(self, way: str, shapes: Mapping[str, torch.Size], steps: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self._way = way
        self._tensors = {n: torch.randn(shape, generator=drawn) for n, shape in shapes.items()}
        self._state = {
            name: {
                "step": torch.tensor(1000.0),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.full_like(tensor, 1e-4),
            }
            for name, tensor in self._tensors.items()
        }
        self._gradients = [
            {n: torch.randn(s, generator=drawn).mul_(1e-3).bfloat16() for n, s in shapes.items()}
            for _ in range(steps)
        ]
        self._lsn = 0

    def run(self, threads: int) -> float:
        """Replay all steps once; return the seconds."""
        torch.set_num_threads(1)
        if self._way == EVERSTEP:
            return self._everstep(threads)
        run = self._blocks(threads)
        begin_s = time.perf_counter()
        run()
        return time.perf_counter() - begin_s

    def _everstep(self, threads: int) -> float:
        optimizer = AdamW(list(self._tensors.values()), lr=1e-3, fused=True)
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        replayer = Replayer(
            AdamW,
            [list(self._tensors)],
            self._tensors,
            self._state,
            [group],
            ReplayOptions(threads, 1),
        )
        updates = []
        for gradients in self._gradients:
            self._lsn += 1
            updates.append(Update(self._lsn, "optimizer", (group,), gradients))
        replayer.apply([])  # the self-test is not part of the speed
        begin_s = time.perf_counter()
        replayer.apply(updates)
        return time.perf_counter() - begin_s

    def _blocks(self, threads: int) -> Callable[[], None]:
        """As the limit of this machine was measured: no checks, no hyperparameters, no names."""
        lines = [
            (
                tensor.view(-1),
                self._state[name]["exp_avg"].view(-1),
                self._state[name]["exp_avg_sq"].view(-1),
                [gradients[name].view(-1) for gradients in self._gradients],
            )
            for name, tensor in self._tensors.items()
        ]
        blocks = deque(
            (number, begin)
            for number, (line, *_) in enumerate(lines)
            for begin in range(0, line.numel(), _BLOCK_ELEMENTS)
        )

        def work() -> None:
            scratch = torch.empty(_BLOCK_ELEMENTS)
            with contextlib.suppress(IndexError), torch.no_grad():
                while True:
                    number, begin = blocks.popleft()
                    tensor, mean, square, gradients = lines[number]
                    part = slice(begin, min(begin + _BLOCK_ELEMENTS, tensor.numel()))
                    parts = [[tensor[part]], [mean[part]], [square[part]]]
                    step = torch.tensor(1000.0)
                    for gradient in gradients:
                        wide = scratch[: part.stop - part.start].copy_(gradient[part])
                        step += 1
                        torch._fused_adamw_(
                            parts[0], [wide], parts[1], parts[2], [], [step], **_HYPERPARAMETERS
                        )

        def run() -> None:
            others = [threading.Thread(target=work) for _ in range(threads - 1)]
            for thread in others:
                thread.start()
            work()
            for thread in others:
                thread.join()

        return run


def _copy_s(threads: int) -> float:
    """Seconds that a copy from memory to memory takes, in memory that is there."""
    torch.set_num_threads(threads)
    source = torch.zeros(_COPY_ELEMENTS)
    target = torch.zeros(_COPY_ELEMENTS)
    begin_s = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begin_s


def _shapes(params: int) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = GPT(gpt_of(params))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


# --- After a kill -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecoveryFigures:
    """A training that was killed, and is back.

    Attributes:
        to: where its log was: ``"memory"``, with a keeper that has outlived it, or ``"disk"``,
            with none.
        state_bytes: of all tensors.
        log_bytes: of the gradients of all steps.
        steps: that were lost from the process, and replayed.
        resume_s: from the call of ``resume()`` in a new process until it came back.
        load_s: of a second resume in the same process: reading and restoring the base.
        replay_s: of that, too: reading, checking and replaying the log.
        training_s: these steps in training, without a log.
        source: of the base: ``"memory"`` or ``"disk"``.
        exact: what ``resume()`` claimed.
        identical: whether it is so: every tensor, number and generator, bit for bit.
        fused: AdamW is one kernel, in training and in replay; otherwise as torch runs it by
            default, operator by operator.
    """

    to: str
    params: int
    state_bytes: int
    log_bytes: int
    steps: int
    resume_s: float
    load_s: float
    replay_s: float
    training_s: float
    source: str
    exact: bool
    identical: bool
    fused: bool = False

    @property
    def variant(self) -> str:
        """Of AdamW."""
        return "fused" if self.fused else "for-loop"

    @property
    def steps_per_s(self) -> float:
        """Replayed, reading included."""
        return self.steps / self.replay_s

    @property
    def parameter_steps_per_s(self) -> float:
        """Likewise."""
        return self.steps_per_s * self.params

    @property
    def faster_than_training(self) -> float:
        """Return the ratio."""
        return self.training_s / self.replay_s

    def as_json(self) -> dict[str, Any]:
        """All figures as plain data."""
        derived = picked(self, "steps_per_s parameter_steps_per_s faster_than_training")
        return asdict(self) | derived


def measure_recovery(
    folder: Path,
    options: Training,
    *,
    steps: int = 5,
    to: str = "memory",
    threads: int = 1,
    fused: bool = False,
) -> RecoveryFigures:
    """Train with a dense log, kill, resume in a new process. Nothing stays in ``folder``.

    Args:
        folder: exists.
        options: size, batch and seed of the training; the state takes 12 bytes for each parameter.
        steps: after the base.
        to: ``"memory"``: the keeper is there. ``"disk"``: it has ended, too.
        threads: of torch, in both processes.
        fused: AdamW as one kernel; otherwise as torch runs it by default.

    Raises:
        EverstepError: a process ended, or hangs.
    """
    run = folder / "run"
    order = RecoveryOrder(os.getpid(), options, str(run), steps, to, threads, fused).encode()
    try:
        with Child("step.recovered", "train", order) as process:
            trained = process.next("trained")
            process.kill()
        if to == "disk":
            end_keeper(run)
        with Child("step.recovered", "resume", order) as process:
            resumed = process.next("resumed")
            process.kill()
    finally:
        end_keeper(run)
        shutil.rmtree(run, ignore_errors=True)
    if resumed["step"] != steps or resumed["replayed"] != steps:
        raise EverstepError(
            f"a resume gave step {resumed['step']} with {resumed['replayed']} steps replayed, "
            f"not {steps}",
            path=run,
        )
    found = trained | resumed
    names = "params state_bytes log_bytes training_s resume_s load_s replay_s source exact".split()
    return RecoveryFigures(
        to=to,
        steps=steps,
        fused=fused,
        identical=resumed["fingerprint"] == trained["fingerprint"],
        **{name: found[name] for name in names},
    )
