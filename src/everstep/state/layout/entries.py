"""Entries: the named, typed byte ranges that a state is made of; no torch needed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

__all__ = [
    "DTYPE_BYTES",
    "DTYPE_NAMES",
    "Entry",
    "shape_digest",
    "shape_of_all",
]

DTYPE_NAMES: dict[str, tuple[str, int]] = {
    # safetensors code: (torch attribute, bytes per element)
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
"""Every safetensors dtype that everstep writes and reads: torch's name for it, and bytes per
element."""

DTYPE_BYTES: dict[str, int] = {code: size for code, (_, size) in DTYPE_NAMES.items()}
"""Bytes per element, by safetensors code."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One named tensor (or ``U8`` object) of the state, without its bytes.

    Attributes:
        name: path in the state, ``section/key/...``, unique in a base.
        dtype: safetensors code.
        shape: shape of the bytes held by this rank.
        global_shape: shape over all ranks; equal to ``shape`` where it is not sharded.
        global_offset: where this rank's part begins in each dimension of ``global_shape``.
        placement: how it lies over the ranks: ``"whole"``, or the DTensor placements.
        stride: the live tensor's strides in elements where it was not contiguous; the
            stored bytes are always in row-major order.
        logical_dtype: the torch dtype where safetensors has no code for it, e.g.
            ``"complex128"``, stored as ``F64`` with a last dimension of 2.
        lsn: number of the last redo record applied to it .
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    placement: str = "whole"
    stride: tuple[int, ...] | None = None
    logical_dtype: str | None = None
    lsn: int = 0

    @classmethod
    def whole(
        cls,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        *,
        stride: tuple[int, ...] | None = None,
        logical_dtype: str | None = None,
        lsn: int = 0,
    ) -> Entry:
        """An entry of which this rank holds everything."""
        zeros = (0,) * len(shape)
        return cls(name, dtype, shape, shape, zeros, "whole", stride, logical_dtype, lsn)

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's part."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def shape_digest(
    entries: Iterable[Entry],
    aliases: Mapping[str, str],
    groups: Mapping[str, Sequence[Sequence[str]]],
) -> str:
    """The digest of names, dtypes and shapes of all tensors, of which part of a larger one each
    is, and of who optimizes what.

    Args:
        entries: of tensors; those of objects left out.
        aliases: ``other name -> entry name``.
        groups: names of the parameters of each group, by optimizer.
    """
    listed = sorted(
        [e.name, e.dtype, list(e.shape), e.logical_dtype or "", *_place(e)] for e in entries
    )
    plain = [
        listed,
        sorted(aliases.items()),
        sorted((k, list(map(list, v))) for k, v in groups.items()),
    ]
    text = json.dumps(plain, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def shape_of_all(shapes: Sequence[str]) -> str:
    """What the states of several ranks consist of, together.

    Args:
        shapes: by rank.
    """
    return shapes[0] if len(shapes) == 1 else xxhash.xxh3_128_hexdigest("\n".join(shapes).encode())


def _place(entry: Entry) -> list[list[int]]:
    """Which part of a tensor an entry is; nothing where it is all of it."""
    if entry.shape == entry.global_shape:
        return []
    return [list(entry.global_shape), list(entry.global_offset)]
