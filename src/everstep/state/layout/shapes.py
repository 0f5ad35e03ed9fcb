"""What a state consists of, in one digest: a log fits the states that have the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import xxhash

from everstep.state.layout.entries import Entry

__all__ = ["shape_digest", "shape_of_all"]


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
