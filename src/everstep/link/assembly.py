"""Data that brings a multi-step capture to one step: updates, samples, and parts to merge on
load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from everstep.format.log import RecordHead, layout_from_index, layout_to_index
from everstep.link.samples import Samples
from everstep.state.layout.shards import ShardLayout


@dataclass(frozen=True, slots=True)
class PartialUpdate:
    """One update, with the gradients of only those parameters that had been captured before it.

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
    """

    shape: str
    updates: Sequence[PartialUpdate]
    samples: Sequence[Samples]
    fuzzy: FuzzyParts | None = None


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
    samples = [[some.width_bytes, some.where, some.values] for some in assembly.samples]
    fuzzy = assembly.fuzzy
    left = None
    if fuzzy is not None:
        seen = [[lsn, sorted(names)] for lsn, names in fuzzy.seen]
        left = {"seen": seen, "layout": layout_to_index(fuzzy.layout), "data": fuzzy.data}
    # The last message: it makes the keeper take the updates received before and start to rebuild.
    yield {
        "kind": "assemble",
        "number": number,
        "shape": assembly.shape,
        "samples": samples,
        "fuzzy": left,
    }


def assembly_from_wire(message: Mapping[str, Any], updates: Sequence[PartialUpdate]) -> Assembly:
    """Decode the last of the messages of :func:`assembly_to_wire`.

    Args:
        updates: updates from the messages before.

    Raises:
        FormatError: the message holds an invalid layout.
    """
    samples = tuple(Samples(*some) for some in message["samples"])
    left = message["fuzzy"]
    fuzzy = None
    if left is not None:
        seen = [(lsn, names) for lsn, names in left["seen"]]
        fuzzy = FuzzyParts(seen, layout_from_index(left["layout"]), left["data"])
    return Assembly(message["shape"], updates, samples, fuzzy)
