"""Steps of one rank's log, held in memory for another node.

They are one piece of memory: the data of each record, followed by an index that describes the
records. The index has a digest, and each record has its own, computed when it arrived from
training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from everstep.commit.log_reach import LogRun
from everstep.commit.peer_copies import run_of
from everstep.errors import DamageError, FormatError
from everstep.format.digests import digest
from everstep.format.log import LogRecord, pack_index, records_of_packed
from everstep.format.records import TimelineRecord
from everstep.run.scan import Inventory

_PATH = PurePath("log of a peer")
# Tensors are made over this memory without a copy, so each record is aligned for any dtype.
_ALIGNMENT_BYTES = 64
_OFFSET_BYTES = 8


@dataclass(frozen=True, slots=True)
class PackedSteps:
    """Steps of a log in one piece of memory.

    Attributes:
        run: timeline and steps.
        memory: data of the records, then the index.
        index_bytes: length of the index at the end of ``memory``.
        index_digest: digest of the index.
    """

    run: LogRun
    memory: memoryview
    index_bytes: int
    index_digest: str


@dataclass(frozen=True, slots=True)
class PeerLog:
    """Steps of the log of rank ``source``, whose digests were verified when they arrived.

    Attributes:
        source: rank that recorded them.
        record: their timeline record, in the bytes on its writer's disk (I7).
        steps: the steps.
    """

    source: int
    record: bytes
    steps: PackedSteps


@dataclass(frozen=True, slots=True)
class FetchedLog:
    """Steps of this rank's own log, fetched from the memory of another node.

    Attributes:
        record: their timeline record.
        steps: the steps.
        records: verified records over the memory of ``steps``.
    """

    record: TimelineRecord
    steps: PackedSteps
    records: tuple[LogRecord, ...]

    def is_of(self, inventory: Inventory) -> bool:
        """Return True if this disk has the same timeline under that number, or none (I7)."""
        known = inventory.timelines.get(self.record.timeline)
        return known is None or known == self.record


def pack_steps(records: Sequence[LogRecord]) -> PackedSteps:
    """Copy complete consecutive steps into one piece of memory.

    Raises:
        DamageError: a record changed since it arrived: its memory was reused, or a bit flipped.
        FormatError: the steps are incomplete or not consecutive.
    """
    run = run_of([record.head for record in records])
    memory, index_bytes = lay_out_records(records)
    index = memory[memory.nbytes - index_bytes :]
    found = PackedSteps(run, memory, index_bytes, digest(index))
    # Verifies the copy, not the records: their memory may have been reused during the copying.
    unpack_steps(found)
    return found


def copy_steps(records: Sequence[LogRecord]) -> list[LogRecord]:
    """Copy complete consecutive steps into memory of their own, every byte verified; errors as for
    :func:`pack_steps`."""
    run = run_of([record.head for record in records])
    memory, index_bytes = lay_out_records(records)
    return records_from_pack(run.timeline, memory, index_bytes, digest(memory[-index_bytes:]))


def lay_out_records(records: Sequence[LogRecord]) -> tuple[memoryview, int]:
    """Copy records into one piece of memory; return it and the length of the index at its end."""
    offsets = []
    end = 0
    for record in records:
        offsets.append(end)
        end += -(-record.data.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    places = b"".join(offset.to_bytes(_OFFSET_BYTES, "little") for offset in offsets)
    index = len(offsets).to_bytes(_OFFSET_BYTES, "little") + places + pack_index(records)
    # NumPy copies without holding the GIL; memoryview and bytearray do not, and a bytearray is
    # zeroed
    # first.
    memory = np.empty(end + len(index), np.uint8)
    memory[end:] = np.frombuffer(index, np.uint8)
    # np.empty() does not clear the memory. The gaps are zeroed, as the bytes are sent to another
    # node.
    before = 0
    for record, offset in zip(records, offsets, strict=True):
        memory[before:offset] = 0  # padding
        before = offset + record.data.nbytes
        memory[offset:before] = np.frombuffer(record.data, np.uint8)
    memory[before:end] = 0
    return memory.data, len(index)


def unpack_steps(steps: PackedSteps) -> list[LogRecord]:
    """Return the records over ``steps.memory``, every byte verified.

    Raises:
        DamageError: a digest does not match.
        FormatError: they are no valid records, or other steps than announced, or not consecutive.
    """
    run = steps.run
    found, records = read_pack(run.timeline, steps.memory, steps.index_bytes, steps.index_digest)
    if found != run:
        raise FormatError(f"{_PATH}: the steps differ from the announced ones")
    return records


def read_pack(
    timeline: int, memory: memoryview, index_bytes: int, index_digest: str
) -> tuple[LogRun, list[LogRecord]]:
    """Return the run of steps and their records; see :func:`unpack_steps`."""
    records = records_from_pack(timeline, memory, index_bytes, index_digest)
    return run_of([record.head for record in records]), records


def records_from_pack(
    timeline: int, memory: memoryview, index_bytes: int, index_digest: str
) -> list[LogRecord]:
    """Return the records over ``memory``, every byte verified.

    Raises:
        DamageError: a digest does not match.
        FormatError: they are no valid records.
    """
    if not 0 < index_bytes <= memory.nbytes:
        raise FormatError(f"{_PATH}: no index")
    data = memory[:-index_bytes]
    index = bytes(memory[-index_bytes:])
    if digest(index) != index_digest:
        raise DamageError(f"{_PATH}: the digest of its index does not match", tier="peer")
    count = int.from_bytes(index[:_OFFSET_BYTES], "little")
    begin = (count + 1) * _OFFSET_BYTES
    # The count is not trusted before this check: offsets must lie inside the index.
    if begin > len(index):
        raise FormatError(f"{_PATH}: no index")
    offsets = [
        int.from_bytes(index[at : at + _OFFSET_BYTES], "little")
        for at in range(_OFFSET_BYTES, begin, _OFFSET_BYTES)
    ]
    records = records_of_packed(timeline, index[begin:], data, offsets, _PATH)
    for record in records:
        record.verify()
    return records
