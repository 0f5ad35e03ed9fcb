"""Operators that DistributedDataParallel adds to the step of one rank, without other ranks or data.

The real wrapper needs a process group, and data to agree on its buckets, so it is traced only where
it runs. Here its operators are issued as it issues them from its third step on. At the beginning of
forward, buffers are broadcast. After each gradient is computed, it is scaled into its bucket; a
full bucket is all-reduced, in the order of buckets. After backward, buckets are copied back to the
gradients. Buckets are assigned by torch's own function, in the order of gradients in the first
step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from everstep.errors import OptionError, UnavailableError

_BUCKETS_BYTES = (1 << 20, 25 << 20)

_Launch = Callable[[str, Sequence[Tensor], int], None]


class Buckets:
    """Averaging of a model's gradients over ranks (see :func:`.trace_training`).

    Args:
        model: the model, not wrapped.
        ranks: number of ranks, at least 2.
        bucket_bytes: ``bucket_cap_mb`` of DistributedDataParallel, in bytes. None: its default, a
            first bucket of 1 MiB and others of 25 MiB.
        views: ``gradient_as_bucket_view`` of DistributedDataParallel.

    Raises:
        OptionError: fewer than 2 ranks.
        UnavailableError: torch was built without torch.distributed.
    """

    warm_up_steps = 2

    def __init__(
        self,
        model: nn.Module,
        ranks: int,
        *,
        bucket_bytes: int | None = None,
        views: bool = False,
    ) -> None:
        if ranks < 2:
            raise OptionError(f"{ranks} ranks have nothing to reduce", hint="at least 2 ranks")
        if not torch.distributed.is_available():
            raise UnavailableError("this torch has no torch.distributed, which cuts the buckets")
        self._model = model
        self._ranks = ranks
        self._views = views
        self._limits = list(_BUCKETS_BYTES) if bucket_bytes is None else [bucket_bytes]
        self._came: list[nn.Parameter] = []
        self._buckets: list[_Bucket] = []
        self._of: dict[Tensor, _Bucket] = {}
        self._next = 0
        self._begun = False
        self._launch: _Launch = _nothing

    def attach(self, launch: _Launch) -> Callable[[], None]:
        """Register the hooks; return a function that removes them."""
        self._launch = launch
        with ExitStack() as stack:
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    stack.callback(register(self._ready).remove)
            # Reached only if all hooks were registered: otherwise the stack removes those that
            # were.
            return stack.pop_all().close

    def forward(self) -> None:
        """Broadcast the buffers of the first rank."""
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._model.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            sent: deque[tuple[Tensor, list[Tensor]]] = deque()
            for buffers in by_dtype.values():
                flat = buffers[0].view(-1)  # a single buffer is not copied
                if len(buffers) > 1:
                    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                self._launch("c10d::broadcast_", [flat], self._ranks)
                sent.append((flat, buffers))
                del flat  # so that each is freed as soon as it is copied back
            while sent:
                _copy_back(*sent.popleft())

    def _finish(self) -> None:
        """Wait for all buckets and copy them back to the gradients; runs within backward."""
        self._begun = False
        if not self._buckets:
            self._cut()
            return
        if self._views:
            return  # the gradients are the buckets
        for bucket in self._buckets:
            for parameter, place in zip(bucket.parameters, bucket.places, strict=True):
                assert parameter.grad is not None
                with torch.no_grad():
                    parameter.grad.copy_(bucket.memory[place].view_as(parameter))

    def _cut(self) -> None:
        cut: Any = torch.distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
        found, _ = cut(self._came, self._limits, [False] * len(self._came))
        self._buckets = [_Bucket([self._came[number] for number in numbers]) for numbers in found]
        self._of = {p: bucket for bucket in self._buckets for p in bucket.parameters}

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._begun:
            self._begun = True
            engine: Any = torch.autograd.Variable._execution_engine
            # Runs when this backward is complete, as the callback of DDP does.
            engine.queue_callback(self._finish)
        if not self._buckets:
            self._came.append(parameter)
            return
        bucket = self._of[parameter]
        gradient = parameter.grad
        assert gradient is not None
        place = bucket.places[bucket.number_of(parameter)]
        view = bucket.memory[place].view_as(parameter)
        with torch.no_grad():
            torch.mul(gradient, 1 / self._ranks, out=view)
        if self._views:
            parameter.grad = view
        bucket.missing -= 1
        # In the order of buckets: all ranks must issue the same collectives in the same order.
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._launch("c10d::allreduce_", [self._buckets[self._next].memory], self._ranks)
            self._next += 1


class _Bucket:
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self.places = []
        position = 0
        for parameter in parameters:
            self.places.append(slice(position, position + parameter.numel()))
            position += parameter.numel()
        self.memory = torch.empty(position, dtype=parameters[0].dtype, device=parameters[0].device)

    def number_of(self, parameter: nn.Parameter) -> int:
        return next(n for n, one in enumerate(self.parameters) if one is parameter)


def _copy_back(flat: Tensor, buffers: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))


def _nothing(name: str, tensors: Sequence[Tensor], ranks: int) -> None:
    pass
