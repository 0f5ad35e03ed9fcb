"""Makes lossy copies of the gradients in a log record; see :mod:`everstep.keeper.ship.lossy_log`.

The only part of that which needs torch; imported when there is an update.
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
from everstep.state.layout.names import GRADIENT, PART_OBJECT, UPDATE_OBJECT
from everstep.state.layout.shards import Placed, ShardLayout
from everstep.state.values.objects import decode, encode
from everstep.state.values.tensors import host_bytes, tensor_entry

__all__ = ["lossy_update"]


def lossy_update(record: LogRecord, ratio: float, int8_below: int) -> LogRecord | None:
    """A lossy copy of an update; None: training consumed a gradient of it compressed.

    As training would have recorded it. (Where one optimizer has gradients of several dtypes, they
    may follow each other in another order: a dense record has them by dtype.)

    Raises:
        OptionError, FormatError, DamageError: see :func:`.lossy_log.lossy_record`.
    """
    kept_count(1, ratio)
    name, about = _about(record)
    if "compressed" in about:
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
    # In the order of training: gradients that are dense, then forms, then all else.
    dense = [placed[number].entry for number in gradients if number not in copies]
    others = [place.entry for number, place in enumerate(placed) if number not in gradients]
    layout = record_layout([*dense, *(tensor_entry(n, t) for n, t in forms.items()), *others])
    data = _gathered(record, layout, forms)
    objects = {**record.objects, name: encode(_told(about, compressed), checked=True)}
    return LogRecord(record.head, layout, objects, data, record_digest(data, objects))


def _about(record: LogRecord) -> tuple[str, dict[str, Any]]:
    """What a record says of its update, and under which name."""
    for name in (PART_OBJECT, UPDATE_OBJECT):
        if name in record.objects:
            about = decode(record.objects[name])
            if isinstance(about, dict):
                return name, about
    raise FormatError(f"{record.head} is no record of an update")


def _row_major(record: LogRecord, place: Placed) -> torch.Tensor:
    """A gradient as it lies in the record, whatever strides it had."""
    return tensor_of(record, replace(place, entry=replace(place.entry, stride=None)))


def _told(about: Mapping[str, Any], compressed: Mapping[str, Any]) -> dict[str, Any]:
    """What the record says now; keys in the order in which training tells them."""
    if not compressed:
        return dict(about)
    found = {key: value for key, value in about.items() if key != "shared"}
    found |= {"compressed": dict(compressed), "lossy": True}
    return found | ({"shared": about["shared"]} if "shared" in about else {})


def _gathered(
    record: LogRecord, layout: ShardLayout, forms: Mapping[str, torch.Tensor]
) -> memoryview:
    """The data of the new record, in memory of its own."""
    begins = {place.entry.name: place.begin for place in record.layout.placed}
    data = np.empty(layout.size_bytes, np.uint8)  # which other threads are not held up by
    for place in layout.placed:
        size_bytes = place.end - place.begin
        if not size_bytes:
            continue
        form = forms.get(place.entry.name)
        begin = begins.get(place.entry.name, 0)
        source = record.data[begin : begin + size_bytes] if form is None else host_bytes(form)
        data[place.begin : place.end] = np.frombuffer(source, np.uint8)
    return data.data
