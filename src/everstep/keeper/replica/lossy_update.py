"""Approximate copies of the gradients in a log record; see :mod:`everstep.keeper.ship.log_copies`.

Imports torch; imported when the first update is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from everstep.compress.floats import kept_count
from everstep.compress.lossy import lossy_copies
from everstep.errors import FormatError
from everstep.format.log import LogRecord, record_digest
from everstep.link.recordable import lossy_entries, record_layout
from everstep.run.tensors import tensor_of
from everstep.state.layout import GRADIENT, Placed, ShardLayout
from everstep.state.layout.entries import PART_OBJECT, UPDATE_OBJECT
from everstep.state.values.objects import decode, encode
from everstep.state.values.tensors import host_bytes, tensor_entry


def lossy_update(record: LogRecord, ratio: float, int8_below: int) -> LogRecord | None:
    """Return an approximate copy of an update; None if training consumed a compressed gradient in
    it.

    The copy equals the record that training would have made. Exception: if one optimizer has
    gradients of several dtypes, their order may differ, as a dense record sorts them by dtype.

    Raises:
        OptionError, FormatError, DamageError: see :func:`.log_copies.lossy_record`.
    """
    kept_count(1, ratio)
    name, description = _description(record)
    if "compressed" in description:
        return None
    placed = record.layout.placed
    gradients = {
        number: _row_major(record, place)
        for number, place in enumerate(placed)
        if place.entry.name.startswith(GRADIENT)
    }
    copies = lossy_copies(gradients, ratio, int8_below=int8_below)
    compressed: dict[str, Any] = {}
    forms: dict[str, torch.Tensor] = {}
    for number, copy in copies.items():
        bare = placed[number].entry.name.removeprefix(GRADIENT)
        fields = lossy_entries(bare, gradients[number], copy, forms)
        compressed[bare] = {**fields, "stride": placed[number].entry.stride}
    # In the order in which training records them: dense gradients, compressed forms, the rest.
    dense = [placed[number].entry for number in gradients if number not in copies]
    others = [place.entry for number, place in enumerate(placed) if number not in gradients]
    layout = record_layout([*dense, *(tensor_entry(n, t) for n, t in forms.items()), *others])
    data = _gathered(record, layout, forms)
    objects = {
        **record.objects,
        name: encode(_with_compressed(description, compressed), checked=True),
    }
    return LogRecord(record.head, layout, objects, data, record_digest(data, objects))


def _description(record: LogRecord) -> tuple[str, dict[str, Any]]:
    """Return the name and the decoded object that describes the update."""
    for name in (PART_OBJECT, UPDATE_OBJECT):
        if name in record.objects:
            description = decode(record.objects[name])
            if isinstance(description, dict):
                return name, description
    raise FormatError(f"{record.head} is not the record of an update")


def _row_major(record: LogRecord, place: Placed) -> torch.Tensor:
    """Return a gradient in the order in which the record stores it, regardless of its strides."""
    return tensor_of(record, replace(place, entry=replace(place.entry, stride=None)))


def _with_compressed(
    description: Mapping[str, Any], compressed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the new description; keys in the order in which training writes them."""
    if not compressed:
        return dict(description)
    found = {key: value for key, value in description.items() if key != "shared"}
    found |= {"compressed": dict(compressed), "lossy": True}
    return found | ({"shared": description["shared"]} if "shared" in description else {})


def _gathered(
    record: LogRecord, layout: ShardLayout, forms: Mapping[str, torch.Tensor]
) -> memoryview:
    """Return the data of the new record, in memory of its own."""
    begins = {place.entry.name: place.begin for place in record.layout.placed}
    # Not a bytearray: zeroing and filling it would hold the GIL and stall other threads.
    data = np.empty(layout.size_bytes, np.uint8)
    for place in layout.placed:
        size_bytes = place.end - place.begin
        if not size_bytes:
            continue
        form = forms.get(place.entry.name)
        begin = begins.get(place.entry.name, 0)
        source = record.data[begin : begin + size_bytes] if form is None else host_bytes(form)
        data[place.begin : place.end] = np.frombuffer(source, np.uint8)
    return data.data
