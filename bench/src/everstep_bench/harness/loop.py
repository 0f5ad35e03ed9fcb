"""Training as a loop of timed steps, and its state as peers are given it.

On a CUDA device also waits for copies, and the bandwidth of its link.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from everstep.errors import UnavailableError
from everstep.workloads import GPT, GPTConfig, Training, TrainingConfig, gpt_of, stdlib_text
from everstep.workloads.training import training_of
from everstep_bench.options import StallOptions
from everstep_bench.options import Training as TrainingOptions

_cuda: Any = torch.cuda  # its constructors have no annotations

_LINK_BYTES = 1 << 30


class DeviceClock:
    """Time on the device's current stream between pairs of moments: whatever was enqueued in
    between, waiting for other streams above all."""

    def __init__(self) -> None:
        self._begun: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """The first moment of a pair."""
        self._begun = moment()

    def end(self) -> None:
        """The second."""
        if self._begun is not None:
            self._pairs.append((self._begun, moment()))
            self._begun = None

    def taken_s(self) -> float:
        """Seconds between the pairs since this was last asked; the device has come so far."""
        pairs = self._pairs
        self._pairs = []
        taken_ms: float = sum(begun.elapsed_time(ended) for begun, ended in pairs)
        return taken_ms / 1e3


class PinnedLink:
    """A plain copy from the device into pinned memory: as fast as its link is."""

    def __init__(self) -> None:
        self._source = torch.ones(_LINK_BYTES, dtype=torch.uint8, device="cuda")
        self._target = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        self.bytes_per_s()  # warm

    def bytes_per_s(self) -> float:
        """Of one copy, while nothing else is going on."""
        torch.cuda.synchronize()
        begun = moment()
        self._target.copy_(self._source, non_blocking=True)
        ended = moment()
        ended.synchronize()
        taken_ms: float = begun.elapsed_time(ended)
        return 1e3 * _LINK_BYTES / taken_ms


def moment() -> Any:
    """An event of the current stream, which says when."""
    event = _cuda.Event(enable_timing=True)
    event.record()
    return event


_TEXT_BYTES = 1 << 20
_SCHEDULE_STEPS = 1_000_000
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CONTEXT_BATCH = {"cpu": (64, 1), "cuda": (128, 64)}  # short steps, so that a save fills some


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
        options: size, seed, device, batch, dtype, layers.
        wrap: makes of the model what is trained; None for the model itself.

    Attributes:
        training: the run; its optimizer has made its state.
        size_bytes: bytes of all tensors of the state, each counted once.
        tensors: number of them.
        description: the model in words.
        loss: before the update of the last step.
    """

    def __init__(
        self,
        options: StallOptions | TrainingOptions,
        wrap: Callable[[GPT], GPT] | None = None,
    ) -> None:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise UnavailableError("this torch sees no CUDA device", hint="leave out --device cuda")
        context, usual = _CONTEXT_BATCH[options.device]
        batch = usual if options.batch is None else options.batch
        shape: GPTConfig = gpt_of(options.params, context=context, layers=options.layers)
        config = TrainingConfig(steps=_SCHEDULE_STEPS, batch=batch, seed=options.seed)
        text = stdlib_text(_TEXT_BYTES)
        self.training: Training = training_of(
            shape,
            config,
            text,
            device=options.device,
            dtype=_DTYPES[options.dtype],
            wrap=wrap or (lambda model: model),
        )
        self.loss = self.training.step()  # makes the optimizer's state
        tensors = flatten(self.nested())
        self.tensors = len(tensors)
        self.size_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        self.description = (
            f"GPT of {shape.params:,} parameters ({shape.layers} layers, width {shape.width}) "
            f"with AdamW, {options.dtype}, on {options.device}; batches of {batch} x {context} "
            "bytes"
        )
        self._clock = DeviceClock() if options.device == "cuda" else None
        self._hooks: Span | None = None
        self._applied: Span | None = None
        self._forward_end_s: float | None = None

    def step(self) -> Step:
        """One step; on a device, until it is over there."""
        begin_s = time.monotonic()
        self.loss = self.training.step()  # ends with it on the host, after the update
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
        # It changes nothing. Otherwise a base over several steps in progress would be abandoned.
        gated.looks_on = True  # type: ignore[attr-defined]
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
        """Return the state dicts of all parts, live, made anew; the tied head is left out."""
        return {
            "model": untied(self.training.model),
            "optimizer": self.training.optimizer.state_dict(),
            "scheduler": self.training.scheduler.state_dict(),
            "loader": self.training.loader.state_dict(),
            "progress": dict(self.training.progress),
        }


def untied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model, live, each tensor once.

    Formats that do not know of shared memory would have to write a tied head twice.
    """
    found = {
        tensor.data_ptr(): (name, tensor) for name, tensor in reversed(model.state_dict().items())
    }
    return dict(reversed(found.values()))


def flatten(nested: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors in nested dictionaries, by dotted path."""
    return dict(_leaves("", nested))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), item)


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
