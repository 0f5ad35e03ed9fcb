"""How a base is made whole that was captured over several steps: what of it the arena holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from everstep.format.log import RecordHead
from everstep.keeper.samples import Samples
from everstep.state.layout import ShardLayout

__all__ = ["Assembly", "PartialUpdate", "assembly_to_wire"]


@dataclass(frozen=True, slots=True)
class PartialUpdate:
    """An update, with the gradients of those parameters only that had been captured before it.

    Attributes:
        layout: of its tensors, at ``offset`` of the arena.
        objects: encoded objects by name.
    """

    head: RecordHead
    layout: ShardLayout
    objects: Mapping[str, bytes]
    offset: int


@dataclass(frozen=True, slots=True)
class Assembly:
    """What brings all parts of a base to its step (GoCkpt 4.3).

    Attributes:
        shape: digest of what the state consists of, as records of a log have it.
        updates: in order.
        samples: of the live state at the last step mark, of entries that were captured before it.
    """

    shape: str
    updates: Sequence[PartialUpdate]
    samples: Sequence[Samples]


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
    yield {"kind": "assemble", "number": number, "shape": assembly.shape, "samples": samples}
