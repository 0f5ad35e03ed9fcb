"""Comparison of both runs, and of each recovery with the evidence.

Three witnesses, independent of each other: the bytes of both final checkpoints, read with the
safetensors library; the live state as each process described it at its end; and every loss computed
on the way, including those computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import safetensors

from everstep.demo.plan import AFTER_CAPTURED, logs
from everstep.demo.report import KillReport
from everstep.errors import FormatError
from everstep.state.layout.entries import DTYPE_BYTES
from everstep.workloads.comparison import Difference

LOST_STEPS_MAX = 1  # with a log: the step in flight


class StoredEntry(NamedTuple):
    """An entry as the safetensors library reads it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read_base(folder: Path) -> dict[str, StoredEntry]:
    """Read all entries of a base's shards, with the safetensors library only.

    Raises:
        FormatError: when there is no shard, or one is no safetensors file.
    """
    entries: dict[str, StoredEntry] = {}
    for path in sorted(folder.glob("rank-*.safetensors")):
        try:
            found = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError as error:
            raise FormatError(f"no safetensors file: {error}", path=path) from error
        for name, view in found:
            entries[name] = StoredEntry(view["dtype"], tuple(view["shape"]), bytes(view["data"]))
    if not entries:
        raise FormatError("a base without entries", path=folder)
    return entries


def compare_entries(
    expected: Mapping[str, StoredEntry], found: Mapping[str, StoredEntry]
) -> list[Difference]:
    """Compare names, dtypes, shapes and bytes of two checkpoints."""
    return [
        Difference("checkpoint", name, _detail(expected.get(name), found.get(name)))
        for name in sorted({*expected, *found})
        if expected.get(name) != found.get(name)
    ]


def _detail(a: StoredEntry | None, b: StoredEntry | None) -> str:
    if a is None or b is None:
        return "only in the " + ("killed" if a is None else "uninterrupted") + " run"
    if (a.dtype, a.shape, len(a.data)) != (b.dtype, b.shape, len(b.data)):
        return f"{a.dtype} {list(a.shape)} != {b.dtype} {list(b.shape)}"
    width = DTYPE_BYTES.get(a.dtype, 1)
    pairs = [(a.data[i : i + width], b.data[i : i + width]) for i in range(0, len(a.data), width)]
    differing = [index for index, (left, right) in enumerate(pairs) if left != right]
    left, right = pairs[differing[0]]
    return (
        f"{len(differing)} of {len(pairs)} elements; element {differing[0]}: "
        f"0x{left[::-1].hex()} != 0x{right[::-1].hex()}"
    )


def broken_promises(kills: Sequence[KillReport], method: str) -> list[Difference]:
    """List the kills after which a committed or captured base did not come back from its place."""
    details = [(number, _broken_promise(report, method)) for number, report in enumerate(kills, 1)]
    return [Difference("recovery", f"kill {number}", text) for number, text in details if text]


def _broken_promise(report: KillReport, method: str) -> str | None:
    left = report.left
    back = f"step {report.recovered} came back, from {report.source}"
    captured = report.kill.where == AFTER_CAPTURED and not logs(method)
    if left.held is None and report.source == "memory":
        return f"{back}, but no keeper had it in memory"
    if logs(method) and report.lost > LOST_STEPS_MAX:
        return f"every step was logged and step {report.reached} was reached, but {back}"
    # Right after a capture, memory is the only certain place of the newest base.
    from_elsewhere = captured and report.source != "memory"
    if left.held is not None and (report.recovered < left.held or from_elsewhere):
        return f"base {left.held} was in the memory of a keeper that survived, but {back}"
    if report.recovered < left.committed:
        return f"base {left.committed} was committed, but {back}"
    if report.recovered > report.reached:
        return f"step {report.reached} was the last, but {back}"
    return None
