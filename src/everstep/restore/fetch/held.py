"""Base, log records and copies in the memory of a keeper that outlived its training process.

Copy of one rank's files of a base, held in memory for another node.

Steps of one rank's log, held in memory for another node.

They are one piece of memory: the data of each record, followed by an index that describes the
records. The index has a digest, and each record has its own, computed when it arrived from
training.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

import numpy as np

from everstep.commit import BaseId
from everstep.commit.log_reach import LogRun
from everstep.commit.peer_copies import run_of
from everstep.errors import DamageError, FormatError
from everstep.format import FileRecord, Marker, TimelineRecord, digest
from everstep.format.digests import Digester, digest_of_file
from everstep.format.log import LogRecord, pack_index, records_of_packed
from everstep.format.reader import OpenShard, read_header
from everstep.run import Inventory, OpenBase
from everstep.run.fence import timeline_bytes
from everstep.run.open_base import check_identity
from everstep.seams import FileSystem, ReadFile
from everstep.tiers import MemoryFile

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
        return inventory.timelines.get(self.record.timeline) in (None, self.record)


def pack_steps(records: Sequence[LogRecord]) -> PackedSteps:
    """Copy complete consecutive steps into one piece of memory.

    Raises:
        DamageError: a record changed since it arrived: its memory was reused, or a bit flipped.
        FormatError: the steps are incomplete or not consecutive.
    """
    found = _packed(records)
    # Verifies the copy, not the records: their memory may have been reused during the copying.
    unpack_steps(found)
    return found


def copy_steps(records: Sequence[LogRecord]) -> list[LogRecord]:
    """Copy complete consecutive steps into memory of their own, every byte verified; errors as for
    :func:`pack_steps`."""
    return unpack_steps(_packed(records))


def _packed(records: Sequence[LogRecord]) -> PackedSteps:
    run = run_of([record.head for record in records])
    memory, index_bytes = lay_out_records(records)
    return PackedSteps(run, memory, index_bytes, digest(memory[memory.nbytes - index_bytes :]))


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


_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """Complete copy whose digests were verified when it arrived.

    Attributes:
        marker: marker of the rank's files.
        record: timeline record of the base, in the bytes on its writer's disk: a number alone does
            not
            identify a timeline (I7).
        memory: contents of the files, one after the other.
    """

    marker: Marker
    record: bytes
    memory: memoryview

    @property
    def timeline(self) -> TimelineRecord:
        """Decoded timeline record."""
        return TimelineRecord.decode(self.record, PurePath("copy"))


def size_of(marker: Marker) -> int:
    """Return the total length of all files of a rank."""
    return sum(record.length for record in marker.files)


def files_over(marker: Marker, memory: memoryview) -> tuple[tuple[MemoryFile, FileRecord], ...]:
    """Return the files of a marker, which are stored one after the other in ``memory``."""
    found = []
    begin = 0
    for record in marker.files:
        found.append((MemoryFile([memory[begin : begin + record.length]]), record))
        begin += record.length
    return tuple(found)


def check_files(marker: Marker, memory: memoryview) -> None:
    """Verify every byte against the digests of the marker.

    Raises:
        DamageError, FormatError: the bytes differ.
    """
    begin = 0
    for file, record in files_over(marker, memory):
        path = PurePath("peer") / record.name
        header = check_identity(read_header(file, record, path), marker, path)
        digester = Digester(header.placed)
        for at in range(record.header_length, record.length, _CHUNK_BYTES):
            end = min(record.length, at + _CHUNK_BYTES)
            digester.update(memory[begin + at : begin + end])
        found = digester.digests
        # The digest of a file covers those of its header and entries (``adr/002``), so no second
        # pass over the bytes is needed.
        intact = digest_of_file(record.header_digest, found) == record.digest
        if found != list(header.digests) or not intact:
            raise DamageError(
                f"{path}: its digests do not match",
                step=marker.step,
                rank=marker.rank,
                tier="peer",
                path=path,
            )
        begin += record.length


_log = logging.getLogger("everstep")


@dataclass(frozen=True, slots=True)
class HeldBase:
    """Complete base, mostly in memory; verified while it is read, like one on disk.

    Attributes:
        marker: marker that is, or would be, on disk.
        files: files, each with its record.
        durable: the base is on disk as well.
    """

    marker: Marker
    files: tuple[tuple[ReadFile, FileRecord], ...]
    durable: bool

    @property
    def id(self) -> BaseId:
        return BaseId(self.marker.timeline, self.marker.step)

    @classmethod
    def of_copy(cls, marker: Marker, memory: memoryview) -> HeldBase:
        """Wrap the files of a copy, which are stored one after the other in ``memory``."""
        return cls(marker, files_over(marker, memory), durable=False)

    def open(self) -> OpenBase:
        """Open the base for reading.

        Raises:
            DamageError, FormatError: a header is damaged or invalid.
        """
        opened = OpenBase(self.marker)
        for file, record in self.files:
            path = PurePath("memory") / record.name
            header = check_identity(read_header(file, record, path), self.marker, path)
            opened.shards.append(OpenShard(file, record, header, path))
        opened.split_redo_file()
        return opened


@dataclass(frozen=True, slots=True)
class ReplicaReach:
    """Steps that the replica of one of several ranks has, and can get from its log.

    Attributes:
        timeline: timeline of its state.
        step: step of its state. It can only go forward.
        newest: newest complete step of its log.
    """

    timeline: int
    step: int
    newest: int


def common_step(replicas: Sequence[ReplicaReach | None]) -> int | None:
    """Return the newest step that the replicas of all ranks can reach; None: there is none.

    Args:
        replicas: by rank; None: the rank has none.
    """
    found = [replica for replica in replicas if replica is not None]
    if len(found) < len(replicas) or len({replica.timeline for replica in found}) != 1:
        return None
    step = min(replica.newest for replica in found)
    return step if max(replica.step for replica in found) <= step else None


@dataclass(frozen=True, slots=True)
class KeeperContents:
    """Contents of a keeper's memory.

    Attributes:
        base: newest complete base.
        records: records of the log, in the order in which they were made.
        copies: copies held for other ranks, and bases of this rank that live in memory only.
        logs: steps of other ranks' logs.
        served: bytes of ``timeline.json`` when the keeper began to serve each timeline.
        replica: the steps of its replica, if the rank is one of several.
        captures: all complete captures, of which ``base`` is the newest.
        nearby: bases in the memory of the keepers of other ranks of this machine.
        missed: True if the keeper could not be queried, since it serves another process now.
    """

    base: HeldBase | None = None
    records: tuple[LogRecord, ...] = field(default=())
    copies: tuple[PeerCopy, ...] = ()
    logs: tuple[PeerLog, ...] = ()
    served: Mapping[int, bytes] = field(default_factory=dict)
    replica: ReplicaReach | None = None
    captures: tuple[BaseId, ...] = ()
    nearby: tuple[HeldBase, ...] = ()
    missed: bool = False

    def of_history(self, filesystem: FileSystem, run: PurePath) -> KeeperContents:
        """Return the contents without those of another history.

        If the folder was put back to an earlier state and training continued from there without
        this keeper, the same timeline numbers were opened again. A base of one history with the log
        of the other would be a state that never existed.
        """

        def is_other(number: int, record: bytes) -> bool:
            # A record that is missing or cannot be read (None) does not prove another history.
            return timeline_bytes(filesystem, run, number) not in (None, record)

        # Each copy carries the record of its timeline: the keeper need not have served it.
        copies = tuple(
            copy for copy in self.copies if not is_other(copy.marker.timeline, copy.record)
        )
        mine = replace(self, copies=copies)
        others = [number for number, record in self.served.items() if is_other(number, record)]
        if not others:
            return mine
        # Later timelines of the keeper descend from this one, even if their numbers are still free
        # in this folder.
        first = min(others)
        _log.warning(
            "%s: the keeper's steps of timeline %d and later are ignored: another process "
            "opened that timeline again in this folder",
            run,
            first,
        )
        base = None if self.base is None or self.base.id.timeline >= first else self.base
        records = tuple(record for record in self.records if record.head.timeline < first)
        replica = None if self.replica is None or self.replica.timeline >= first else self.replica
        captures = tuple(capture for capture in self.captures if capture.timeline < first)
        return replace(mine, base=base, records=records, replica=replica, captures=captures)

    @property
    def newest(self) -> HeldBase | None:
        """Newest base for a process that trains alone, including bases that live in memory only."""
        copies = [HeldBase.of_copy(copy.marker, copy.memory) for copy in self.copies]
        bases = [*copies, *([] if self.base is None else [self.base])]
        return max(bases, key=lambda base: base.id, default=None)
