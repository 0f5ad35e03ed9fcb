"""Data that brings a multi-step capture to one step: updates, samples, and parts to merge on
load.

Samples of the live state, to verify a state that a keeper has computed (I8).

A replica follows the log alone, and so does not see changes made without the optimizer. Therefore
the training process reads a few elements of each tensor that no step mark holds whenever it
requests a base, and the keeper compares them. No torch is needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from everstep.errors import AuditError, FormatError
from everstep.format import BasePlan
from everstep.format.log import RecordHead, layout_from_index, layout_to_index
from everstep.link.capture import shard_offsets
from everstep.link.messages import from_plain, to_plain
from everstep.state.layout import ShardLayout


@dataclass(frozen=True, slots=True)
class Samples:
    """Sampled elements of one width.

    Attributes:
        width_bytes: bytes per element: 1, 2, 4 or 8.
        where: positions in a base's block, in elements (int64).
        values: the elements.
    """

    width_bytes: int
    where: bytes
    values: bytes


def check_samples(
    samples: Sequence[Samples], plan: BasePlan, memory: memoryview, step: int
) -> None:
    """Compare a base in memory with samples of the live state.

    Args:
        plan: plan of a base of this layout.
        memory: block of the base.
        step: step of the state.

    Raises:
        AuditError: the base differs; the message names an entry.
        FormatError: the samples do not fit the layout.
    """
    for some in samples:
        kind = np.dtype(f"i{some.width_bytes}")
        # Compared as integers: NaNs and signed zeros must be equal bit for bit.
        whole = np.frombuffer(memory[: memory.nbytes // kind.itemsize * kind.itemsize], kind)
        where = np.frombuffer(some.where, np.int64)
        values = np.frombuffer(some.values, kind)
        inside = (where >= 0) & (where < whole.size)
        # Checked first: a position outside of the block would raise an unrelated error.
        if where.size != values.size or not inside.all():
            raise FormatError("samples that lie outside of the state")
        differs = np.flatnonzero(whole[where] != values)
        if differs.size:
            at = int(where[differs[0]]) * kind.itemsize
            raise AuditError(
                f"{_entry_at(plan, at)!r} differs from the replayed log: code other than the "
                "optimizer writes to it",
                step=step,
                hint="call before_update() and after_update() around updates that bypass "
                "optimizer.step() (CUDA graphs, for example)",
            )


def _entry_at(plan: BasePlan, position: int) -> str:
    """Return the name of the entry at a byte of the block."""
    for shard, offset in zip(plan.shards, shard_offsets(plan)[0], strict=True):
        for place in shard.layout.placed:
            if offset + place.begin <= position < offset + place.end:
                return place.entry.name
    return "?"


@dataclass(frozen=True, slots=True)
class PartialUpdate:
    """One update in the arena: with the gradients of only those parameters that had been captured
    before it, or, if it is a record of the log, of all.

    Attributes:
        head: head of its log record.
        layout: layout of its tensors, at ``offset`` of the arena.
        objects: encoded objects by name; empty if the update concerns nothing captured.
        offset: byte offset in the arena.
    """

    head: RecordHead
    layout: ShardLayout
    objects: Mapping[str, bytes]
    offset: int


@dataclass(frozen=True, slots=True)
class FuzzyParts:
    """Data for a base that is written as captured and completed by the process that restores it.

    Attributes:
        seen: for each part but the last, the last update that it has seen, and the names of its
            entries.
        layout: layout of the tensors of the last step mark: hyperparameters, and elements of
            entries captured before it.
        data: bytes of these tensors.
    """

    seen: Sequence[tuple[int, Collection[str]]]
    layout: ShardLayout
    data: bytes


@dataclass(frozen=True, slots=True)
class Assembly:
    """Everything that brings all parts of a base to its step (GoCkpt 4.3).

    Attributes:
        shape: digest of the state's structure, as in log records.
        updates: updates in order; with ``fuzzy``, all since the first part was captured.
        samples: elements of the live state at the last step mark, of entries captured before it.
        fuzzy: data for the process that restores the base; None if the keeper rebuilds it.
        captured: if the updates are records of the log, with the gradients of all parameters: of
            each part the last update it has seen, and the names of its parameters by the key of
            their optimizer. A parameter needs the later updates only.
    """

    shape: str
    updates: Sequence[PartialUpdate]
    samples: Sequence[Samples]
    fuzzy: FuzzyParts | None = None
    captured: Sequence[tuple[int, Mapping[str, Collection[str]]]] | None = None


def assembly_to_wire(
    number: int, assembly: Assembly, layout_number: Callable[[ShardLayout], int]
) -> Iterator[dict[str, Any]]:
    """Yield the messages that describe an assembly, in order.

    Args:
        number: number of the capture.
        layout_number: returns the number of a layout, after sending the layout to the keeper.
    """
    for update in assembly.updates:
        yield {
            "kind": "redo",
            "number": number,
            "head": astuple(update.head),
            "layout": layout_number(update.layout),
            "objects": dict(update.objects),
            "offset": update.offset,
        }
    fuzzy = None
    if assembly.fuzzy is not None:
        fuzzy = {
            "seen": to_plain(assembly.fuzzy.seen),
            "layout": layout_to_index(assembly.fuzzy.layout),
            "data": assembly.fuzzy.data,
        }
    # The last message: it makes the keeper take the updates received before and start to rebuild.
    yield {
        "kind": "assemble",
        "number": number,
        "shape": assembly.shape,
        "samples": to_plain(assembly.samples),
        "fuzzy": fuzzy,
        "captured": to_plain(assembly.captured),
    }


def assembly_from_wire(message: Mapping[str, Any], updates: Sequence[PartialUpdate]) -> Assembly:
    """Decode the last of the messages of :func:`assembly_to_wire`.

    Args:
        updates: updates from the messages before.

    Raises:
        KeeperError: the message has invalid fields.
        FormatError: the layout of the fuzzy parts is impossible.
    """
    samples = from_plain(message["samples"], tuple[Samples, ...])
    sent = message["fuzzy"]
    fuzzy = None
    if sent is not None:
        seen = from_plain(sent["seen"], list[tuple[int, list[str]]])
        fuzzy = FuzzyParts(seen, layout_from_index(sent["layout"]), sent["data"])
    captured = from_plain(message["captured"], list[tuple[int, dict[str, list[str]]]] | None)
    return Assembly(message["shape"], updates, samples, fuzzy, captured)
