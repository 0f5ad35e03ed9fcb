"""Compressed training under DistributedDataParallel: ranks exchange compressed gradients.

A communication hook. Each rank compresses the gradient of each parameter with its own residual
(LowDiff section V-A, Algorithm 1, lines 4 and 5), all ranks gather the sparse gradients of all, and
each adds them up in the order of the ranks. So every rank computes the same numbers in the same
order and gets the same bits, whatever the backend does. The optimizer consumes this mean and the
log records it; it has at most as many elements as all ranks kept together.

An all-gather, not an all-reduce: reducing sparsified but dense tensors would save nothing. A rank
receives ``world * ratio * (4 + itemsize)`` bytes per element, against about ``2 * itemsize`` for a
dense all-reduce: with float32 and a ratio of 1 % this pays up to some 100 ranks. Beyond that,
reduce densely and compress after it (:mod:`everstep.compress.compressor`).

Residuals belong to parameters and not to buckets, because DDP rebuilds the buckets after its first
backward. int8 is not offered: the mean of int8 forms is not an int8 form.

Usage::

    state = DDPCompression(model, ratio=0.01)        # model: DistributedDataParallel
    model.register_comm_hook(state, compressed_mean)
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with types.

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket

from everstep.compress.feedback import (
    ErrorFeedback,
    can_be_compressed,
    compression,
    flat_of,
    refuse_residuals,
)
from everstep.compress.floats import FORMATS, NUMEL_MAX, kept_count, largest_magnitudes, narrowed
from everstep.compress.sparse import Sparse, nonzero_count
from everstep.config import named
from everstep.errors import OptionError, StateError
from everstep.state.ownership import memory_of
from everstep.state.providers.modules import unwrap

# torch 2.13 renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_NOT_FINITE = -1  # instead of a count
# view(dtype) needs an offset that is a multiple of the item size; float64 has the largest.
_ALIGN_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Section:
    """Section of one parameter in a rank's message.

    Attributes:
        name: name of the parameter.
        parameter: the parameter.
        grad: its section of the bucket, in its own strides.
        capacity: maximum number of kept elements; None if it is sent dense.
        begin: start of its values; indices of a sparse gradient are at the same place.
        end: end of its values, exclusive.
    """

    name: str
    parameter: torch.Tensor
    grad: torch.Tensor
    capacity: int | None
    begin: int
    end: int


class DDPCompression:
    """State of :func:`compressed_mean` on one rank.

    Rules for each parameter:

    - A zero gradient sends nothing, and its residual waits: DDP passes zeros to the hook for
      parameters that took no part in a step, and drops the mean of parameters that took part on
      no rank. All ranks have residuals of the same parameters, so the state has the same shape on
      all of them.
    - A non-finite gradient makes the mean NaN on all ranks, which the optimizer or the scaler sees,
      and leaves the rank's residual unchanged. If the optimizer skips such a step, the data of
      other parameters and ranks are lost, as dense gradients would be.
    - Gradients of fewer than ``dense_below`` elements, or without a compressed form, are sent
      dense; the ranks are added up in order here too.

    Operations after the exchange (unscaling, clipping) change the gradients that the optimizer
    consumes, but not the positions of zeros: :meth:`form_of` reads the gradients again and checks
    this.

    Args:
        model: module, wrapped in DDP or not; its parameters' names are the keys of residuals.
        kind: ``"topk"`` or ``"threshold"``.
        ratio: fraction of elements that each rank sends, in (0, 1].
        dense_below: gradients with fewer elements are sent dense.
        error_feedback: add the compression error to the rank's next gradient.
        loss_scale: with a ``GradScaler``, its ``get_scale``: the hook sees scaled gradients, so
            residuals are rescaled (exactly, by powers of two) whenever the scale changes.
        process_group: process group of the DDP module; None: the default group.

    Attributes:
        last: mean of each parameter in the buckets exchanged last, by ``id(parameter)``; None if it
            is dense.

    Raises:
        OptionError: an option is invalid, or a parameter is complex or too large for int32 indices.
    """

    @named("DDPCompression", model=nn.Module, kind=str, dense_below=int, error_feedback=bool)
    def __init__(
        self,
        model: nn.Module,
        *,
        kind: str = "topk",
        ratio: float = 0.01,
        dense_below: int = 1024,
        error_feedback: bool = True,
        loss_scale: Callable[[], float] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        compress = compression(kind, ratio)
        if kind not in ("topk", "threshold"):
            raise OptionError(
                f"ranks cannot exchange {kind!r}: a mean of int8 forms is not an int8 form",
                hint="kind='topk' or 'threshold', or a Compressor after a dense all-reduce",
            )
        if dense_below < 0:
            raise OptionError(f"dense_below must be at least 0, not {dense_below}")
        named = dict(unwrap(model).named_parameters())
        for name, parameter in named.items():
            if parameter.numel() > NUMEL_MAX:
                raise OptionError(
                    f"{name} has {parameter.numel()} elements; the exchange has int32 indices"
                )
            if parameter.is_complex() and parameter.requires_grad:
                # torch passes half of a complex gradient to communication hooks.
                raise OptionError(f"{name} is complex; its gradient cannot be exchanged by a hook")
        self.process_group = process_group
        self.last: dict[int, Sparse | None] = {}
        self._feedback = ErrorFeedback(compress, enabled=error_feedback)
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._parameters = named
        self._ratio = ratio
        self._bound = 1 if kind == "topk" else 2  # of what sampled_threshold may keep
        self._dense_below = dense_below
        self._loss_scale = loss_scale
        self._scale = 1.0

    def form_of(self, parameter: torch.Tensor) -> Sparse | None:
        """Return the exact sparse form of the current ``parameter.grad`` if the last exchange left
        it sparse; None if other positions have been written since.

        Unscaling and clipping multiply every element by one number, which keeps it sparse.
        """
        form = self.last.get(id(parameter))
        if form is None or parameter.grad is None:
            return None
        flat = flat_of(parameter.grad.detach())
        if flat.numel() != form.numel or flat.dtype not in FORMATS:
            return None
        positions = form.positions()
        found = Sparse.of(form.numel, positions, flat[positions])
        return found if nonzero_count(flat) == nonzero_count(found.values) else None

    def has(self, parameter: torch.Tensor) -> bool:
        """Return True if it is one of the model's parameters."""
        return id(parameter) in self._names

    @property
    def residual_bytes(self) -> int:
        """Bytes of the residuals of all parameters that can be compressed."""
        parameters = (p for p in self._parameters.values() if p.requires_grad)
        return self._feedback.size_bytes_for(parameters, self._dense_below)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals (live tensors, flat, row-major) by name, and their loss
        scale.
        """
        return {"residuals": dict(self._feedback.residuals), "loss_scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the residuals of ``state``, which this rank saved.

        Raises:
            MismatchError: the residuals belong to other parameters.
        """
        mismatches = []
        for name, residual in state["residuals"].items():
            parameter = self._parameters.get(name)
            if parameter is None:
                mismatches.append((name, "the model has no such parameter"))
            elif parameter.numel() != residual.numel():
                what = f"saved {residual.numel()} elements, live {parameter.numel()}"
                mismatches.append((name, what))
        refuse_residuals("another model", mismatches)
        self._scale = state["loss_scale"]
        self._feedback.residuals = {
            name: residual.detach().to(self._parameters[name].device, copy=True).view(-1)
            for name, residual in state["residuals"].items()
        }

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Send this rank's gradients of a bucket; the future gives the mean, in the bucket's
        memory.
        """
        buffer: torch.Tensor = bucket.buffer()
        if buffer.layout != torch.strided:
            raise StateError(
                "gradients in sparse layout cannot be exchanged compressed",
                hint="embeddings: sparse=False",
            )
        # Before the gradients are compressed: a gradient and its residual are added in the same
        # scale.
        self._follow_scale()
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        world = dist.get_world_size(group)
        sections = self._sections_of(bucket)
        message = self._message(sections, buffer)
        messages = message.new_empty(world * message.numel())
        work = _all_gather(messages, message, group=group, async_op=True)

        def mean(_: Any) -> torch.Tensor:
            # Grad mode belongs to a thread, and the backend chooses the thread of this callback.
            with torch.no_grad():
                rows = [_Row(row, sections, buffer.dtype) for row in messages.view(world, -1)]
                for number, section in enumerate(sections):
                    self._take_mean(number, section, rows)
            return buffer

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(mean)
        return future

    def _follow_scale(self) -> None:
        scale = self._loss_scale() if self._loss_scale is not None else 1.0
        if scale != self._scale:
            for residual in self._feedback.residuals.values():
                residual.mul_(scale / self._scale)
        self._scale = scale

    def _sections_of(self, bucket: GradBucket) -> list[_Section]:
        sections = []
        begin = 0
        both = [
            (parameter, _in_strides_of(parameter, grad))
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        sparse = [can_be_compressed(grad, self._dense_below) for _, grad in both]
        # Sparse ones first: then indices and values have the same offsets.
        for wanted in (True, False):
            for (parameter, grad), is_sparse in zip(both, sparse, strict=True):
                if is_sparse != wanted:
                    continue
                size = grad.numel()
                capacity = None
                if is_sparse:
                    size = capacity = min(size, self._bound * kept_count(size, self._ratio))
                name = self._names.get(id(parameter))
                if name is None:
                    raise StateError(
                        f"a parameter of shape {list(parameter.shape)} does not belong to the "
                        "model that the state was made for",
                        hint="make DDPCompression(model) for the model that it is registered on",
                    )
                sections.append(_Section(name, parameter, grad, capacity, begin, begin + size))
                begin += size
        return sections

    @torch.no_grad()
    def _message(self, sections: Sequence[_Section], buffer: torch.Tensor) -> torch.Tensor:
        """Encode counts, indices and values as bytes; the length is the same on every rank, as
        all-gather requires.
        """
        # Counts that are not set below stay 0: a zero gradient sends no elements.
        message = buffer.new_zeros(_message_bytes(sections, buffer.dtype), dtype=torch.uint8)
        row = _Row(message, sections, buffer.dtype)
        flats = [flat_of(section.grad) for section in sections]
        largest = largest_magnitudes(flats)
        for number, (section, flat) in enumerate(zip(sections, flats, strict=True)):
            if section.capacity is None:
                row.values[section.begin : section.end] = flat
                continue
            # Also if nothing is compressed here: all ranks have residuals of the same parameters.
            self._feedback.reserve(section.name, flat)
            if not math.isfinite(largest[number]):
                row.counts[number] = _NOT_FINITE
            elif largest[number] > 0:
                form = self._feedback.take(section.name, flat)
                assert isinstance(form, Sparse)
                kept = form.indices.numel()
                # Only non-finite elements are kept beyond the bound, and there are none here.
                assert kept <= section.capacity
                row.counts[number] = kept
                row.indices[section.begin : section.begin + kept] = form.indices
                row.values[section.begin : section.begin + kept] = form.values
        return message

    def _take_mean(self, number: int, section: _Section, rows: "Sequence[_Row]") -> None:
        """Replace a parameter's gradient by the mean over all ranks."""
        dtype = section.grad.dtype
        wide = torch.promote_types(dtype, torch.float32)
        # No form of the previous exchange may remain if this mean is dense or not finite.
        self.last[id(section.parameter)] = None
        if section.capacity is None:
            total = sum(row.values[section.begin : section.end].to(wide) for row in rows)
            assert isinstance(total, torch.Tensor)
            section.grad.copy_(narrowed(total / len(rows), dtype).view(section.grad.shape))
            return
        counts = [int(row.counts[number]) for row in rows]
        # Every rank has the counts of all ranks, so all of them take the same branch.
        if min(counts) < 0:
            section.grad.fill_(torch.nan)
            return
        sent = [
            (row.indices[section.begin : section.begin + kept], row.values[section.begin :][:kept])
            for row, kept in zip(rows, counts, strict=True)
        ]
        # Sorted, as searchsorted() and Sparse require.
        indices = torch.unique(torch.cat([where for where, _ in sent]))
        total = torch.zeros(indices.numel(), dtype=wide, device=indices.device)
        # In the order of the ranks, so that every rank gets the same bits. A rank sends each
        # position once, so the indexed addition loses nothing.
        for where, values in sent:
            places = torch.searchsorted(indices, where)
            total[places] += values.to(wide)
        form = Sparse(section.grad.numel(), indices, narrowed(total / len(rows), dtype))
        section.grad.copy_(form.dense().view(section.grad.shape))
        self.last[id(section.parameter)] = form


def compressed_mean(
    state: DDPCompression, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Communication hook of DDP: ``model.register_comm_hook(state, compressed_mean)``.

    Raises:
        StateError: gradients have sparse layout.
    """
    return state.exchange(bucket)


def _in_strides_of(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient of a bucket in its real strides.

    DDP lays it out in the parameter's strides if these are dense, but passes it to hooks as if it
    were in row-major order.
    """
    memory = memory_of(parameter)
    if memory is not None and memory.is_dense:
        return grad.as_strided(parameter.shape, parameter.stride(), grad.storage_offset())
    return grad.view(parameter.shape)


class _Row:
    """Views of one rank's message."""

    def __init__(
        self, message: torch.Tensor, sections: Sequence[_Section], dtype: torch.dtype
    ) -> None:
        counts_end, values_begin, values = _offsets(sections)
        self.counts = message[:counts_end].view(torch.int32)
        self.indices = message[counts_end:values_begin].view(torch.int32)
        self.values = message[values_begin : values_begin + values * dtype.itemsize].view(dtype)


def _offsets(sections: Sequence[_Section]) -> tuple[int, int, int]:
    """Return the byte offsets of indices and values in a message, and the number of values."""
    counts_end = _aligned(4 * len(sections))
    kept = sum(section.capacity or 0 for section in sections)
    return counts_end, counts_end + _aligned(4 * kept), max(section.end for section in sections)


def _message_bytes(sections: Sequence[_Section], dtype: torch.dtype) -> int:
    _, values_begin, values = _offsets(sections)
    return values_begin + _aligned(values * dtype.itemsize)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
