"""How a base is made whole that was captured over several steps: what of it the arena holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from everstep.format.log import RecordHead, layout_from_index, layout_to_index
from everstep.link.samples import Samples
from everstep.state.layout.shards import ShardLayout

__all__ = ["Assembly", "FuzzyParts", "PartialUpdate", "assembly_from_wire", "assembly_to_wire"]


@dataclass(frozen=True, slots=True)
class PartialUpdate:
    """An update, with the gradients of those parameters only that had been captured before it.

    Attributes:
        layout: of its tensors, at ``offset`` of the arena.
        objects: encoded objects by name; none of an update that concerns nothing captured.
    """

    head: RecordHead
    layout: ShardLayout
    objects: Mapping[str, bytes]
    offset: int


@dataclass(frozen=True, slots=True)
class FuzzyParts:
    """A base that is written as it was captured, and made whole by whoever restores it.

    Attributes:
        seen: of each part but the last, the last update that it has seen, and its entries.
        layout: of what the last step mark holds for replay: hyperparameters that are tensors, and
            elements of what was captured before it.
        data: these tensors.
    """

    seen: Sequence[tuple[int, Collection[str]]]
    layout: ShardLayout
    data: bytes


@dataclass(frozen=True, slots=True)
class Assembly:
    """What brings all parts of a base to its step (GoCkpt 4.3).

    Attributes:
        shape: digest of what the state consists of, as records of a log have it.
        updates: in order; with ``fuzzy``, every one since the first part was captured.
        samples: of the live state at the last step mark, of entries that were captured before it.
        fuzzy: None: the keeper makes it whole.
    """

    shape: str
    updates: Sequence[PartialUpdate]
    samples: Sequence[Samples]
    fuzzy: FuzzyParts | None = None


def assembly_to_wire(
    number: int, assembly: Assembly, layout_number: Callable[[ShardLayout], int]
) -> Iterator[dict[str, Any]]:
    """The messages that tell a keeper of it, in their order.

    Args:
        number: of the capture.
        layout_number: names a layout, of which the keeper has been told by then.
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
    yield {
        "kind": "assemble",
        "number": number,
        "shape": assembly.shape,
        "samples": samples,
        "fuzzy": left,
    }


def assembly_from_wire(message: Mapping[str, Any], updates: Sequence[PartialUpdate]) -> Assembly:
    """The inverse, of the last of these messages.

    Args:
        updates: of those before.

    Raises:
        FormatError: for what is no layout.
    """
    samples = tuple(Samples(*some) for some in message["samples"])
    left = message["fuzzy"]
    fuzzy = None
    if left is not None:
        seen = [(lsn, names) for lsn, names in left["seen"]]
        fuzzy = FuzzyParts(seen, layout_from_index(left["layout"]), left["data"])
    return Assembly(message["shape"], updates, samples, fuzzy)
