"""Training as a loop of timed steps, and its state as peers are given it."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from everstep.errors import UnavailableError
from everstep.workloads import GPTConfig, Training, TrainingConfig, gpt_of, stdlib_text
from everstep.workloads.training import training_of
from everstep_bench.persist.state import flatten
from everstep_bench.stall.device import DeviceClock

__all__ = ["Loop", "Span", "Step", "Workload", "seeded_single_thread"]

_TEXT_BYTES = 1 << 20
_SCHEDULE_STEPS = 1_000_000
_CALIBRATE = 3
_CALIBRATE_ROUNDS = 20_000
_CONTEXT_BATCH = {"cpu": (64, 1), "cuda": (128, 64)}  # short steps, so that a save fills some


class Workload(Protocol):
    """Options of a benchmark that define its training."""

    @property
    def params(self) -> int:
        """Of the model, about."""
        ...

    @property
    def seed(self) -> int:
        """Of weights and data."""
        ...

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        ...

    @property
    def python_heavy(self) -> bool:
        """True if each step includes pure Python work."""
        ...


class Span(NamedTuple):
    """A stretch of time, in seconds of the monotonic clock."""

    begin_s: float
    end_s: float


class Step(NamedTuple):
    """A step of training.

    Attributes:
        hooks: from the first hook before the update to the last: where gates are; None if
            nobody looked.
        forward_end_s: the loss is known, backward begins; None if nobody looked.
        applied: from the first hook after the update to the last: where gradients are waited
            for; None if nobody looked.
        device_s: what the device spent within both: it waits there, and not the thread; None where
            there is none, or nobody looked.
    """

    begin_s: float
    end_s: float
    hooks: Span | None = None
    forward_end_s: float | None = None
    applied: Span | None = None
    device_s: float | None = None


class Loop:
    """Takes steps of a real training run.

    Args:
        options: size, seed, device, whether there is a part of pure Python.
        batch: sequences of a step; None: so few that a save fills some steps.
        dtype: of the parameters, and so of gradients and moments.
        layers: of the model; None: as many as its size wants.

    Attributes:
        training: the run; its optimizer has made its state.
        size_bytes: bytes of all tensors of the state, each counted once.
        tensors: number of them.
        description: the model in words.
        python_part_s: about so long does the part of pure Python take; 0 where there is none.
        loss: before the update of the last step.
    """

    def __init__(
        self,
        options: Workload,
        *,
        batch: int | None = None,
        dtype: torch.dtype = torch.float32,
        layers: int | None = None,
    ) -> None:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise UnavailableError("this torch sees no CUDA device", hint="leave out --device cuda")
        context, usual = _CONTEXT_BATCH[options.device]
        batch = usual if batch is None else batch
        shape: GPTConfig = gpt_of(options.params, context=context, layers=layers)
        config = TrainingConfig(steps=_SCHEDULE_STEPS, batch=batch, seed=options.seed)
        text = stdlib_text(_TEXT_BYTES)
        self.training: Training = training_of(
            shape, config, text, device=options.device, dtype=dtype
        )
        self.loss = self.training.step()  # makes the optimizer's state
        tensors = flatten(self.nested())
        self.tensors = len(tensors)
        self.size_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        self.description = (
            f"GPT of {shape.params:,} parameters ({shape.layers} layers, width {shape.width}) "
            f"with AdamW, {str(dtype).removeprefix('torch.')}, on {options.device}; batches of "
            f"{batch} x {context} bytes"
        )
        self._clock = DeviceClock() if options.device == "cuda" else None
        self._data = text
        self._rounds = 0
        self._hooks: Span | None = None
        self._applied: Span | None = None
        self._forward_end_s: float | None = None
        self.python_part_s = 0.0
        if options.python_heavy:
            self._calibrate()

    def step(self) -> Step:
        """One step; on a device, until it is over there."""
        begin_s = time.monotonic()
        self.loss = self.training.step()  # ends with it on the host, after the update
        if self._rounds:
            _churn(self._data, self._rounds)
        end_s = time.monotonic()
        device_s = None if self._clock is None else self._clock.taken_s()
        return Step(begin_s, end_s, self._hooks, self._forward_end_s, self._applied, device_s)

    def watch_hooks(self) -> None:
        """From now on steps say when forward ended, and when the hooks before and after the
        update ran: all that are there."""
        optimizer = self.training.optimizer
        clock = self._clock
        begin_s = dict.fromkeys(("before", "behind"), 0.0)

        def first(where: str) -> Callable[..., None]:
            def begun(*_: Any) -> None:
                begin_s[where] = time.monotonic()
                if clock is not None:
                    clock.begin()

            return begun

        def gated(*_: Any) -> None:
            self._hooks = Span(begin_s["before"], time.monotonic())
            if clock is not None:
                clock.end()

        def applied(*_: Any) -> None:
            self._applied = Span(begin_s["behind"], time.monotonic())
            if clock is not None:
                clock.end()

        def forward(*_: Any) -> None:
            self._forward_end_s = time.monotonic()

        before: Any = optimizer._optimizer_step_pre_hooks
        behind: Any = optimizer._optimizer_step_post_hooks
        before.move_to_end(optimizer.register_step_pre_hook(first("before")).id, last=False)
        optimizer.register_step_pre_hook(gated)
        behind.move_to_end(optimizer.register_step_post_hook(first("behind")).id, last=False)
        optimizer.register_step_post_hook(applied)
        self.training.model.register_forward_hook(forward)

    def tensors_of_state(self) -> list[torch.Tensor]:
        """All tensors of the state, live."""
        return list(flatten(self.nested()).values())

    @property
    def gradient_bytes(self) -> int:
        """Of all of them, about."""
        return sum(p.numel() * p.element_size() for p in self.training.model.parameters())

    def nested(self) -> dict[str, Any]:
        """State dicts of all parts, live, made anew; the tied head is left out.

        Formats that do not know of shared memory would have to write it twice.
        """
        seen: set[int] = set()
        model = {}
        for name, tensor in self.training.model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                model[name] = tensor
        return {
            "model": model,
            "optimizer": self.training.optimizer.state_dict(),
            "scheduler": self.training.scheduler.state_dict(),
            "loader": self.training.loader.state_dict(),
            "progress": dict(self.training.progress),
        }

    def _calibrate(self) -> None:
        """As much pure Python as the rest of a step takes."""
        step_s = statistics.median(_length(self.step()) for _ in range(_CALIBRATE))
        begin_s = time.monotonic()
        for _ in range(_CALIBRATE):
            _churn(self._data, _CALIBRATE_ROUNDS)
        round_s = (time.monotonic() - begin_s) / (_CALIBRATE * _CALIBRATE_ROUNDS)
        self._rounds = max(1, round(step_s / round_s))
        self.python_part_s = self._rounds * round_s


@contextlib.contextmanager
def seeded_single_thread(seed: int) -> Iterator[None]:
    """All generators seeded; torch computes in the calling thread only."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _churn(data: bytes, rounds: int) -> int:
    """Keep the interpreter busy, as a tokenizer or a metric in plain Python does."""
    state = 0
    size = len(data)
    for number in range(rounds):
        state = (state * 31 + data[number % size]) & 0xFFFFFFFF
    return state


def _length(span: Span | Step) -> float:
    return span.end_s - span.begin_s
