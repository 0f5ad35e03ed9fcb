"""Batches: small tensors copied together, large ones in pieces.

A loop over thousands of small tensors costs more interpreter time than the copies themselves (and
in a thread it takes the interpreter lock away from training). So adjacent tensors are packed by one
``torch.cat``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from everstep.state.layout import Placed, ShardLayout
from everstep.state.values.tensors import byte_view

_SMALL_BYTES = 256 << 10
_PACK_BYTES_MAX = 8 << 20
_PIECE_BYTES = 32 << 20  # smaller pieces would take the interpreter lock more often
_RUN_BYTES = _PIECE_BYTES


class Batch(NamedTuple):
    """Bytes ``[begin, end)`` of a block of memory, and the tensors they come from.

    Attributes:
        sources: flat ``uint8`` views whose bytes are consecutive, without holes.
        rearranged: instead of ``sources``, one tensor whose elements are not in row-major order.
    """

    begin: int
    end: int
    sources: tuple[torch.Tensor, ...]
    rearranged: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin

    @property
    def first(self) -> torch.Tensor:
        """The first tensor; all of them are on one device."""
        return self.sources[0] if self.rearranged is None else self.rearranged


def plan_batches(
    layout: ShardLayout,
    tensors: Mapping[str, torch.Tensor],
    chosen: Collection[str],
    *,
    offset: int = 0,
) -> list[Batch]:
    """Return batches that copy the ``chosen`` entries to their places in the file.

    Args:
        offset: offset of the body in the block of memory.
    """
    batches: list[Batch] = []
    packed: list[torch.Tensor] = []
    begin = end = 0

    def flush() -> None:
        if packed:
            batches.append(Batch(offset + begin, offset + end, tuple(packed)))
            packed.clear()

    for place in layout.placed:
        name = place.entry.name
        size = place.end - place.begin
        if size == 0 or name not in chosen:
            continue
        tensor = tensors[name]
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        small = size < _SMALL_BYTES
        if packed and (
            place.begin != end
            or place.end - begin > _PACK_BYTES_MAX
            # torch.cat() works within one device only.
            or tensor.device != packed[0].device
        ):
            flush()
        if plain and small:
            if not packed:
                begin = place.begin
            packed.append(byte_view(tensor))
            end = place.end
            continue
        flush()
        batches += _large(place, tensor, plain, offset)
    flush()
    return batches


class Chunks(Sequence[Batch]):
    """Batches cut into chunks, lazily and on each iteration, so that urgent copies wait only for a
    chunk.

    The copying thread does the cutting, so training does not wait for it. Batches on a device are
    not cut: copies on a stream are not overtaken in any case, and each takes time to enqueue.

    Args:
        chunk_bytes: maximum size of a chunk, at least 1. Rows of a tensor with rearranged elements
            are not cut.

    Attributes:
        whole: the uncut batches.
    """

    def __init__(self, batches: Sequence[Batch], chunk_bytes: int) -> None:
        self.whole = tuple(batches)
        self._chunk_bytes = chunk_bytes

    def cut_in(self, chunk_bytes: int) -> Chunks:
        """Return the same batches in chunks of another size."""
        return self if chunk_bytes == self._chunk_bytes else Chunks(self.whole, chunk_bytes)

    @property
    def end(self) -> int:
        """End of the last batch; 0 if there is none."""
        return self.whole[-1].end if self.whole else 0

    def __iter__(self) -> Iterator[Batch]:
        chunk_bytes = self._chunk_bytes
        for batch in self.whole:
            if batch.size_bytes <= chunk_bytes or batch.first.device.type != "cpu":
                yield batch
            elif batch.rearranged is not None:
                yield from _rows(batch, batch.rearranged, chunk_bytes)
            else:
                yield from _pieces(batch, chunk_bytes)

    def __bool__(self) -> bool:
        return bool(self.whole)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class Runs(tuple[Batch, ...]):
    """Batches whose completion need not be reported one by one.

    A thread copies a run of them with hardly any work in between. After each copy it would take the
    interpreter lock, and training stands still while it holds that lock to report progress.

    Attributes:
        split: data that a lane caches about the batches.
    """

    split: object = None

    @functools.cached_property
    def runs(self) -> tuple[tuple[Batch, ...], ...]:
        """All batches in order, in as few runs as their size allows; a large batch is a run of its
        own."""
        runs: list[list[Batch]] = []
        begin = 0
        for batch in self:
            if not runs or batch.end - begin > _RUN_BYTES:
                runs.append([])
                begin = batch.begin
            runs[-1].append(batch)
        return tuple(map(tuple, runs))


def run_batch(batch: Batch, block: torch.Tensor) -> None:
    """Copy a batch into ``block`` (flat ``uint8``, in host memory)."""
    target = block[batch.begin : batch.end]
    if batch.rearranged is not None:
        tensor = batch.rearranged
        if tensor.is_complex():  # as pairs, which need not begin at a multiple of the complex size
            tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
        target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    elif len(batch.sources) == 1:
        target.copy_(batch.sources[0])
    elif batch.sources[0].device == target.device:
        # The sizes agree exactly: otherwise torch.cat() would resize `target`, a view of the block.
        torch.cat(batch.sources, out=target)
    else:  # a device without a lane of its own; torch.cat works only within one device
        target.copy_(torch.cat(batch.sources))


def _pieces(batch: Batch, chunk_bytes: int) -> Iterator[Batch]:
    """Yield pieces of a batch: small tensors stay packed, large ones are cut."""
    packed: list[torch.Tensor] = []
    begin = end = batch.begin
    for source in batch.sources:
        size = source.numel()
        for at in range(0, size, chunk_bytes):
            length = min(chunk_bytes, size - at)
            if packed and end - begin + length > chunk_bytes:
                yield Batch(begin, end, tuple(packed))
                packed = []
                begin = end
            packed.append(source if length == size else source[at : at + length])
            end += length
    yield Batch(begin, end, tuple(packed))


def _rows(batch: Batch, tensor: torch.Tensor, chunk_bytes: int) -> Iterator[Batch]:
    """Yield runs of rows of the first dimension, which are consecutive in the file."""
    if tensor.dim() == 0:
        yield batch
        return
    # Never 0: tensors without bytes are in no batch.
    row_bytes = batch.size_bytes // tensor.shape[0]
    at = batch.begin
    for rows in torch.split(tensor, max(1, chunk_bytes // row_bytes)):
        end = at + rows.shape[0] * row_bytes
        yield Batch(at, end, (), rows)
        at = end


def _large(place: Placed, tensor: torch.Tensor, plain: bool, offset: int) -> list[Batch]:
    if not plain:
        return [Batch(offset + place.begin, offset + place.end, (), tensor)]
    flat = byte_view(tensor)
    if flat.numel() <= _PIECE_BYTES:
        return [Batch(offset + place.begin, offset + place.end, (flat,))]
    return [
        Batch(
            offset + place.begin + at,
            min(offset + place.end, offset + place.begin + at + _PIECE_BYTES),
            (flat[at : at + _PIECE_BYTES],),
        )
        for at in range(0, flat.numel(), _PIECE_BYTES)
    ]
