"""The comparison of the run that was killed with the run that was not.

Three witnesses, none of which relies on another: the bytes of both final checkpoints, read
with the safetensors library; the live state as each process described it at its end; and
every loss that was computed on the way, those computed twice included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors

from everstep.errors import FormatError
from everstep.state.layout.entries import DTYPE_BYTES
from everstep.state.values.objects import decode

__all__ = [
    "Difference",
    "StoredEntry",
    "Verdict",
    "compare_entries",
    "compare_fingerprints",
    "compare_losses",
    "read_base",
]

_OBJECTS = "everstep/objects/"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same.

    Attributes:
        witness: ``"checkpoint"``, ``"live state"`` or ``"loss"``.
        name: entry, path or step.
        detail: uninterrupted against killed.
    """

    witness: str
    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry as the safetensors library reads it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was compared and what differs.

    Attributes:
        compared: how many of each kind, in words for people.
        differences: everything that differs, checkpoint entries first.
    """

    compared: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        """Whether not one bit differs."""
        return not self.differences


def read_base(folder: Path) -> dict[str, StoredEntry]:
    """All entries of a base's shards, read with the safetensors library alone.

    Raises:
        FormatError: when there is no shard, one is no safetensors file, or two hold the
            same entry.
    """
    entries: dict[str, StoredEntry] = {}
    for path in sorted(folder.glob("rank-*.safetensors")):
        try:
            found = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError as error:
            raise FormatError(f"no safetensors file: {error}", path=path) from error
        for name, view in found:
            if name in entries:
                raise FormatError(f"entry {name!r} is there twice", path=path)
            entries[name] = StoredEntry(view["dtype"], tuple(view["shape"]), bytes(view["data"]))
    if not entries:
        raise FormatError("a base without entries", path=folder)
    return entries


def compare_entries(
    expected: Mapping[str, StoredEntry], found: Mapping[str, StoredEntry]
) -> list[Difference]:
    """Names, dtypes, shapes and bytes of two checkpoints."""
    differences = []
    for name in sorted({*expected, *found}):
        detail = _entry_detail(name, expected.get(name), found.get(name))
        if detail is not None:
            differences.append(Difference("checkpoint", name, detail))
    return differences


def compare_fingerprints(expected: Mapping[str, str], found: Mapping[str, str]) -> list[Difference]:
    """The live states of two processes, as they described them."""
    return [
        Difference("live state", path, f"{expected.get(path)} != {found.get(path)}")
        for path in sorted({*expected, *found})
        if expected.get(path) != found.get(path)
    ]


def compare_losses(
    steps: int,
    expected: Sequence[tuple[int, str]],
    found: Sequence[Sequence[tuple[int, str]]],
) -> list[Difference]:
    """Every loss of a run against every time that the other run computed it.

    Args:
        steps: both runs must have computed every step in ``1 .. steps``, ends included.
        expected: ``(step, loss in hexadecimal)`` of the uninterrupted run.
        found: the same of each process of the other run; steps may come twice.
    """
    reference = dict(expected)
    differences = []
    if [step for step, _ in expected] != list(range(1, steps + 1)):
        detail = f"{len(expected)} losses for {steps} steps, or not in order"
        differences.append(Difference("loss", "uninterrupted run", detail))
    seen: set[int] = set()
    for start, losses in enumerate(found, 1):
        for step, loss in losses:
            seen.add(step)
            if reference.get(step) != loss:
                detail = f"{_readable(reference.get(step))} != {_readable(loss)} (start {start})"
                differences.append(Difference("loss", f"step {step}", detail))
    missing = [step for step in range(1, steps + 1) if step not in seen]
    if missing:
        detail = f"{len(missing)} steps were never computed, the first is {missing[0]}"
        differences.append(Difference("loss", "killed run", detail))
    return differences


def _entry_detail(name: str, a: StoredEntry | None, b: StoredEntry | None) -> str | None:
    if a is None or b is None:
        return "only in the " + ("killed" if a is None else "uninterrupted") + " run"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} != {b.dtype} {list(b.shape)}"
    if a.data == b.data:
        return None
    if name.startswith(_OBJECTS):
        return _object_detail(a.data, b.data)
    width = DTYPE_BYTES.get(a.dtype, 1)
    pairs = [(a.data[i : i + width], b.data[i : i + width]) for i in range(0, len(a.data), width)]
    differing = [index for index, (left, right) in enumerate(pairs) if left != right]
    left, right = pairs[differing[0]]
    return (
        f"{len(differing)} of {len(pairs)} elements; element {differing[0]}: "
        f"0x{left[::-1].hex()} != 0x{right[::-1].hex()}"
    )


def _object_detail(a: bytes, b: bytes) -> str:
    try:
        return _first_leaf("", decode(a), decode(b)) or "same values, other bytes"
    except FormatError as error:
        return f"cannot be decoded: {error.message}"


def _first_leaf(path: str, a: object, b: object) -> str | None:
    """Where two object trees differ first, in words; None where they do not."""
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        parts = [(key, a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        parts = [(index, *pair) for index, pair in enumerate(zip(a, b, strict=True))]
    else:
        left = repr(a)
        right = repr(b)
        return None if left == right else f"{path or 'value'}: {left[:60]} != {right[:60]}"
    found = (_first_leaf(f"{path}/{key}", left, right) for key, left, right in parts)
    return next((text for text in found if text is not None), None)


def _readable(loss: str | None) -> str:
    return "none" if loss is None else f"{float.fromhex(loss):.9g} [{loss}]"
