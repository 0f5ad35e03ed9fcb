"""Compressed training under DistributedDataParallel: what is exchanged is compressed.

A communication hook. Each rank compresses the gradient of each parameter with its own residual
(LowDiff section V-A, Algorithm 1, lines 4 and 5), all ranks gather the sparse parts of all, and
each adds them up in the order of the ranks: so every rank computes the same numbers in the same
order, and ends with the same bits, whatever the backend does. That mean is what the optimizer
consumes and what is logged; it has at most as many elements as all ranks kept together.

Gathered and not all-reduced: a reduction of sparsified but dense tensors would save nothing. A
rank receives ``world * ratio * (4 + itemsize)`` bytes for each element, against about
``2 * itemsize`` for a dense all-reduce: with float32 and a ratio of 1 % this pays up to some 100
ranks. Beyond that, reduce densely and compress after it (:mod:`everstep.compress.compressor`).

Residuals belong to parameters and not to buckets, which DDP lays out anew after its first
backward. int8 is not offered: the mean of int8 forms is no int8 form.

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

from everstep.compress.feedback import ErrorFeedback, can_be_compressed, flat_of
from everstep.compress.floats import FORMATS, kept_count, largest_magnitudes, narrowed
from everstep.compress.forms import compression
from everstep.compress.sparse import CHUNK_NUMEL, Sparse, nonzero_count
from everstep.config.given import named
from everstep.errors import MismatchError, OptionError, StateError
from everstep.state.providers.modules import unwrap

__all__ = ["DDPCompression", "compressed_mean"]

# torch 2.13 renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_NOT_FINITE = -1  # in place of a count
_ALIGN_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Part:
    """One parameter's place in what a rank sends.

    Attributes:
        grad: its part of the bucket, in its own strides.
        capacity: how many elements it may keep; None where it is sent dense.
        begin: of its values; indices of a sparse one stand at the same place.
        end: one past them.
    """

    name: str
    parameter: torch.Tensor
    grad: torch.Tensor
    capacity: int | None
    begin: int
    end: int


class DDPCompression:
    """State of :func:`compressed_mean` on one rank.

    What a rank sends of a parameter follows from its own gradient and residual:

    - A gradient of zeros sends nothing, and its residual waits: DDP hands zeros to the hook for
      parameters that took no part, and drops the mean of those that took part on no rank. All ranks
      have residuals of the same parameters, so that no rank's state changes its shape alone.
    - A gradient that is not finite makes the mean NaN on all ranks, for the optimizer or the
      scaler to see, and leaves the rank's residual as it was. What other parameters and ranks
      sent in such a step is lost if the optimizer skips it, as dense gradients would be.
    - Gradients of fewer than ``dense_below`` elements, or without a compressed form, are sent as
      they are; the ranks are added up in order here too.

    What comes after the exchange (unscaling, clipping) changes the gradients that the optimizer
    consumes, but not where they are zero: :meth:`form_of` reads them again, and looks.

    Args:
        model: the module, wrapped in DDP or not; its parameters' names are the keys of residuals.
        kind: ``"topk"`` or ``"threshold"``.
        ratio: the share of elements that each rank sends, in (0, 1].
        dense_below: gradients with fewer elements are sent whole.
        error_feedback: whether what is left out is added to the rank's next gradient.
        loss_scale: with a ``GradScaler``, its ``get_scale``: the hook sees scaled gradients, so
            residuals are scaled again (exactly, by powers of two) whenever the scale changes.
        process_group: that of the DDP module; None: the default group.

    Attributes:
        last: the mean of each parameter of the buckets exchanged last, by ``id(parameter)``;
            None where it is dense.

    Raises:
        OptionError: for options that cannot work, and for parameters that are complex or beyond
            int32 indices.
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
                f"ranks cannot exchange {kind!r}: a mean of int8 forms is none",
                hint="kind='topk' or 'threshold', or a Compressor after a dense all-reduce",
            )
        if dense_below < 0:
            raise OptionError(f"dense_below must be at least 0, not {dense_below}")
        named = dict(unwrap(model).named_parameters())
        for name, parameter in named.items():
            if parameter.numel() > CHUNK_NUMEL:
                raise OptionError(
                    f"{name} has {parameter.numel()} elements; the exchange has int32 indices"
                )
            if parameter.is_complex() and parameter.requires_grad:
                # torch hands half of a complex gradient to communication hooks.
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
        """The form of ``parameter.grad`` as it is now, bit for bit, where the last exchange left it
        sparse; None where it is no longer: something has written to other places of it.

        Unscaling and clipping, which multiply every element by one number, leave it so.
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
        """Whether it is one of the model's parameters."""
        return id(parameter) in self._names

    @property
    def residual_bytes(self) -> int:
        """What residuals take, of all parameters that can be compressed."""
        parameters = (p for p in self._parameters.values() if p.requires_grad)
        return self._feedback.size_bytes_for(parameters, self._dense_below)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals (live tensors, flat, row-major) by name, and their loss scale."""
        return {"residuals": dict(self._feedback.residuals), "loss_scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes copies of the residuals of ``state``, which this rank saved.

        Raises:
            MismatchError: for residuals of other parameters.
        """
        mismatches = []
        for name, residual in state["residuals"].items():
            parameter = self._parameters.get(name)
            if parameter is None:
                mismatches.append((name, "a residual of a parameter that is not in the model"))
            elif parameter.numel() != residual.numel():
                what = f"saved {residual.numel()} elements, live {parameter.numel()}"
                mismatches.append((name, what))
        if mismatches:
            listed = "\n".join(f"  {name}: {what}" for name, what in mismatches)
            raise MismatchError(
                f"residuals of another model:\n{listed}", mismatches=tuple(mismatches)
            )
        self._scale = state["loss_scale"]
        self._feedback.residuals = {
            name: residual.detach().to(self._parameters[name].device, copy=True).view(-1)
            for name, residual in state["residuals"].items()
        }

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Sends this rank's part of a bucket; the future gives the mean, in the bucket's memory."""
        buffer: torch.Tensor = bucket.buffer()
        if buffer.layout != torch.strided:
            raise StateError(
                "gradients in sparse layout cannot be exchanged compressed",
                hint="embeddings: sparse=False",
            )
        self._follow_scale()
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        world = dist.get_world_size(group)
        parts = self._parts(bucket)
        message = self._message(parts, buffer)
        messages = message.new_empty(world * message.numel())
        work = _all_gather(messages, message, group=group, async_op=True)

        def mean(_: Any) -> torch.Tensor:
            with torch.no_grad():
                rows = [_Row(row, parts, buffer.dtype) for row in messages.view(world, -1)]
                for number, part in enumerate(parts):
                    self._take_mean(number, part, rows)
            return buffer

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(mean)
        return future

    def _follow_scale(self) -> None:
        scale = self._loss_scale() if self._loss_scale is not None else 1.0
        if scale != self._scale:
            for residual in self._feedback.residuals.values():
                residual.mul_(scale / self._scale)
        self._scale = scale

    def _parts(self, bucket: GradBucket) -> list[_Part]:
        parts = []
        begin = 0
        both = [
            (parameter, _in_strides_of(parameter, grad))
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        sparse = [can_be_compressed(grad, self._dense_below) for _, grad in both]
        # Sparse ones first: then indices and values stand at the same places.
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
                        f"a parameter {list(parameter.shape)} is not of the model that the state "
                        "was made for",
                        hint="make DDPCompression(model) for the model that it is registered on",
                    )
                parts.append(_Part(name, parameter, grad, capacity, begin, begin + size))
                begin += size
        return parts

    @torch.no_grad()
    def _message(self, parts: Sequence[_Part], buffer: torch.Tensor) -> torch.Tensor:
        """Counts, indices and values as bytes; as long on every rank, whatever was kept."""
        message = buffer.new_zeros(_message_bytes(parts, buffer.dtype), dtype=torch.uint8)
        row = _Row(message, parts, buffer.dtype)
        flats = [flat_of(part.grad) for part in parts]
        largest = largest_magnitudes(flats)
        for number, (part, flat) in enumerate(zip(parts, flats, strict=True)):
            if part.capacity is None:
                row.values[part.begin : part.end] = flat
                continue
            self._feedback.reserve(part.name, flat)
            if not math.isfinite(largest[number]):
                row.counts[number] = _NOT_FINITE
            elif largest[number] > 0:
                form = self._feedback.take(part.name, flat)
                assert isinstance(form, Sparse)
                kept = form.indices.numel()
                assert kept <= part.capacity
                row.counts[number] = kept
                row.indices[part.begin : part.begin + kept] = form.indices
                row.values[part.begin : part.begin + kept] = form.values
        return message

    def _take_mean(self, number: int, part: _Part, rows: "Sequence[_Row]") -> None:
        """Replaces a parameter's gradient by the mean of what all ranks sent of it."""
        dtype = part.grad.dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.last[id(part.parameter)] = None
        if part.capacity is None:
            total = sum(row.values[part.begin : part.end].to(wide) for row in rows)
            assert isinstance(total, torch.Tensor)
            part.grad.copy_(narrowed(total / len(rows), dtype).view(part.grad.shape))
            return
        counts = [int(row.counts[number]) for row in rows]
        if min(counts) < 0:
            part.grad.fill_(torch.nan)
            return
        sent = [
            (row.indices[part.begin : part.begin + kept], row.values[part.begin :][:kept])
            for row, kept in zip(rows, counts, strict=True)
        ]
        indices = torch.unique(torch.cat([where for where, _ in sent]))
        total = torch.zeros(indices.numel(), dtype=wide, device=indices.device)
        for where, values in sent:  # in the order of the ranks; none names a place twice
            places = torch.searchsorted(indices, where)
            total[places] += values.to(wide)
        form = Sparse(
            part.grad.numel(), indices, narrowed(total / len(rows), dtype), (indices.numel(),)
        )
        part.grad.copy_(form.dense().view(part.grad.shape))
        self.last[id(part.parameter)] = form


def compressed_mean(
    state: DDPCompression, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: ``model.register_comm_hook(state, compressed_mean)``.

    Raises:
        StateError: for gradients in sparse layout.
    """
    return state.exchange(bucket)


def _in_strides_of(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A gradient in a bucket as it is meant.

    DDP lays it out in the parameter's strides where these are dense, but hands it to hooks as
    if it were in row-major order.
    """
    if _is_dense(parameter):
        return grad.as_strided(parameter.shape, parameter.stride(), grad.storage_offset())
    return grad.view(parameter.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a range of memory, each one place."""
    filled = 1
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    for step, length in sorted(side for side in sides if side[1] != 1):
        if step != filled:
            return False
        filled *= length
    return True


class _Row:
    """Views of one rank's message."""

    def __init__(self, message: torch.Tensor, parts: Sequence[_Part], dtype: torch.dtype) -> None:
        counts_end, values_begin, values = _sections(parts)
        self.counts = message[:counts_end].view(torch.int32)
        self.indices = message[counts_end:values_begin].view(torch.int32)
        self.values = message[values_begin : values_begin + values * dtype.itemsize].view(dtype)


def _sections(parts: Sequence[_Part]) -> tuple[int, int, int]:
    """Byte offsets of indices and values in a message, and the number of values."""
    counts_end = _aligned(4 * len(parts))
    kept = sum(part.capacity or 0 for part in parts)
    return counts_end, counts_end + _aligned(4 * kept), max(part.end for part in parts)


def _message_bytes(parts: Sequence[_Part], dtype: torch.dtype) -> int:
    _, values_begin, values = _sections(parts)
    return values_begin + _aligned(values * dtype.itemsize)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
