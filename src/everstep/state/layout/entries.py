"""Entries: the named, typed byte ranges that a state is made of; no torch needed.

The shape digest identifies the structure of a state: a log can be replayed on states with the same
digest.

Reserved names of entries and objects, in bases and in log records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

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
"""safetensors dtypes that everstep writes and reads: the name in torch, and bytes per element."""

DTYPE_BYTES: dict[str, int] = {code: size for code, (_, size) in DTYPE_NAMES.items()}
"""Bytes per element, by safetensors code."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Name, type and place of one tensor (or ``U8`` object) of the state, without its bytes.

    Attributes:
        name: path in the state, ``section/key/...``, unique in a base.
        dtype: safetensors code.
        shape: shape of the bytes that this rank holds.
        global_shape: shape over all ranks; equal to ``shape`` if the tensor is not sharded.
        global_offset: start of this rank's shard in each dimension of ``global_shape``.
        placement: distribution over the ranks: ``"whole"``, or the DTensor placements.
        stride: strides of the live tensor in elements if it was not contiguous; the stored bytes
            are always in row-major order.
        logical_dtype: the torch dtype if safetensors has no code for it, e.g. ``"complex128"``,
            stored as ``F64`` with a last dimension of 2.
        lsn: number of the last redo record applied to it.
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
        """Create an entry of which this rank holds all elements."""
        zeros = (0,) * len(shape)
        return cls(name, dtype, shape, shape, zeros, "whole", stride, logical_dtype, lsn)

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's shard."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def shape_digest(
    entries: Iterable[Entry],
    aliases: Mapping[str, str],
    groups: Mapping[str, Sequence[Sequence[str]]],
) -> str:
    """Return the digest of a state's structure: names, dtypes, shapes and offsets of its tensors,
    and the parameters of each optimizer group.

    Args:
        entries: entries of tensors, without those of objects.
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
    """Combine the shape digests of several ranks.

    Args:
        shapes: digests by rank.
    """
    return shapes[0] if len(shapes) == 1 else xxhash.xxh3_128_hexdigest("\n".join(shapes).encode())


def _place(entry: Entry) -> list[list[int]]:
    """Return global shape and offset of a shard; an empty list for an unsharded tensor."""
    if entry.shape == entry.global_shape:
        return []
    return [list(entry.global_shape), list(entry.global_offset)]


RESERVED = "everstep"
"""First part of the names of everstep's own entries."""


OBJECT_PREFIX = f"{RESERVED}/objects/"
"""Prefix of the entries that hold a section's objects, encoded
(:mod:`everstep.state.values.objects`)."""


OBJECT_BYTES_MAX = 1 << 30
"""Maximum size of a section's encoded objects; larger data belongs in tensors."""


def is_reserved(name: str) -> bool:
    """Return True if the entry is everstep's own, e.g. the state of a random generator."""
    return name.startswith(f"{RESERVED}/")


GRADIENT = "gradient/"
"""Prefix of the gradients in an update record; the parameter's name follows."""

INDICES = "indices/"
VALUES = "values/"
"""Prefixes of a gradient that training consumed in sparse form (:mod:`everstep.compress.sparse`).
"""

INT8 = "int8/"
SCALES = "scales/"
"""Prefixes of a gradient that training consumed in eight bits (:mod:`everstep.compress.quantized`).
"""

HYPER = "hyper"
"""Prefix of hyperparameters that are tensors, in an update record."""

SAMPLE = "everstep/sample/"
"""Prefix of sampled elements of a declared update in a step mark; its pattern, the element width in
bytes and the device follow."""

SPOT = f"{SAMPLE}everstep/"
"""Prefix of sampled elements of the tensors that optimizers replay, in a step mark; their dtype
follows (:mod:`everstep.capture.mark_samples`)."""

UPDATE_OBJECT = "update"
"""Object of an update record: optimizer and hyperparameters."""

PART_OBJECT = "part"
"""Object of an update record that holds only some of the update's gradients; the others are in the
logs of other ranks. The name differs from :data:`UPDATE_OBJECT`, so that a reader without support
for shared logs does not take the record for a complete update."""


RNG_SECTION = f"{RESERVED}/rng"
