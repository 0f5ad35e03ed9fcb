"""Reads a base into host memory: the beginning of a state without the program that trained it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from everstep.errors import FormatError, RecoveryError, UnavailableError
from everstep.format.header import ShardHeader
from everstep.format.reader import read_body
from everstep.format.records import TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.restore.load.load import contents, rank_contents
from everstep.restore.offline.offline import OfflineState
from everstep.restore.offline.whole import make_offline_whole
from everstep.restore.redo.conditions import conditions
from everstep.run.open_base import OpenBase
from everstep.run.scan import BaseFound
from everstep.run.shape import shape_of_base
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.machine import memory_available_bytes
from everstep.seams.progress import ProgressSink, silent
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_PREFIX
from everstep.state.layout.shards import Placed, overlaps
from everstep.state.values.tensors import empty_like_entry, host_bytes

__all__ = ["load_offline", "read_fuzzy"]


def load_offline(
    filesystem: FileSystem,
    base: BaseFound,
    run: str | None,
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink = silent,
    threads: int = 1,
    training_threads: int | None = None,
    trained: TimelineRecord | None = None,
    wanted: Callable[[str], bool] | None = None,
) -> OfflineState:
    """Reads a base into host memory, every byte verified; one over several steps is made whole.

    Args:
        run: id of the run that it must belong to.
        threads, training_threads: see :class:`OfflineState`.
        trained: the record of its timeline: where its updates were computed.
        wanted: says by name which tensors to read; nothing can be replayed on the others then.
            None: all of them, as where some have to be made whole.

    Raises:
        DamageError, FormatError: with what is wrong.
        ReplayError, UnsupportedStateError: its parts cannot be made whole.
        RecoveryError: it was saved by several ranks.
        UnavailableError: there is not enough memory.
        OSError: it cannot be read.
    """
    if base.manifest is None:
        raise FormatError(f"{base.id} is {base.status}: {base.problem}", path=base.path)
    marker = base.manifest.markers[0]
    if marker.run != run:
        raise FormatError(f"{base.path} belongs to another run", path=base.path)
    if marker.world != 1:
        raise RecoveryError(
            f"it was saved by {marker.world} ranks", step=marker.step, path=base.path
        )
    opened = OpenBase.open(filesystem, base, rank=0)
    try:
        trees, _ = contents(opened)
        if opened.redo is not None:
            about: dict[str, Any] = {"timeout_s": timeout_s, "progress": progress}
            return read_fuzzy(opened, ring, trained, threads, **about)[0]
        return _read(
            opened,
            trees,
            ring,
            timeout_s=timeout_s,
            progress=progress,
            threads=threads,
            training_threads=training_threads,
            wanted=wanted,
        )
    finally:
        opened.close()


def read_fuzzy(
    opened: OpenBase,
    ring: ChunkRing,
    trained: TimelineRecord | None,
    threads: int,
    *,
    timeout_s: float,
    progress: ProgressSink,
) -> tuple[OfflineState, int]:
    """Reads the files of one rank of a base over several steps, and makes them whole.

    Args:
        opened: with a redo file.

    Returns:
        What they hold; and how many updates some of it had not seen.

    Raises:
        DamageError, FormatError, UnavailableError, ReplayError, UnsupportedStateError, OSError: as
            of :func:`load_offline`.
    """
    training_threads, elsewhere = conditions([trained])
    about: dict[str, Any] = {"timeout_s": timeout_s, "progress": progress}
    held: dict[str, Any] = {"threads": threads, "training_threads": training_threads}
    state = _read(opened, rank_contents(opened)[0], ring, **about, **held)
    return state, make_offline_whole(opened, state, ring, elsewhere, **about)


def _read(
    opened: OpenBase,
    trees: Mapping[str, Any],
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink,
    threads: int,
    training_threads: int | None,
    wanted: Callable[[str], bool] | None = None,
) -> OfflineState:
    """What one rank's files hold, as it lies there."""
    free_bytes = memory_available_bytes()
    first = opened.shards[0][3]
    chosen = [_chosen(header, wanted) for _, _, header, _ in opened.shards]
    need_bytes = 0
    for (_, _, header, _), some in zip(opened.shards, chosen, strict=True):
        places = map(header.placed.__getitem__, some)
        need_bytes += sum(place.end - place.begin for place in places)
    if need_bytes > free_bytes:
        raise UnavailableError(
            f"the base of step {opened.marker.step} takes {need_bytes} bytes of memory; "
            f"{free_bytes} are left",
            path=first.parent,
        )
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, Entry] = {}
    objects: dict[str, bytearray] = {}
    aliases: dict[str, str] = {}
    for (file, record, header, path), some in zip(opened.shards, chosen, strict=True):
        aliases.update(header.aliases)
        targets: dict[str, memoryview] = {}
        placed = [header.placed[index] for index in some]
        for place in placed:
            name = place.entry.name
            if name.startswith(OBJECT_PREFIX):
                objects[name] = bytearray(place.end - place.begin)
                targets[name] = memoryview(objects[name])
                continue
            entries[name], tensors[name] = place.entry, empty_like_entry(place.entry)
            targets[name] = host_bytes(tensors[name])
        read_body(
            file,
            header,
            record,
            path,
            ring,
            timeout_s=timeout_s,
            progress=progress,
            sink=_into(placed, targets),
            wanted=None if wanted is None else some,
        )
    return OfflineState(
        opened.marker,
        entries,
        tensors,
        aliases,
        {name: bytes(data) for name, data in objects.items()},
        trees,
        shape_of_base(opened.placed(), aliases, trees),
        threads=threads,
        training_threads=training_threads,
    )


def _chosen(header: ShardHeader, wanted: Callable[[str], bool] | None) -> Sequence[int]:
    """Return which entries of a file to read: all objects, and the tensors that are wanted under
    any of their names."""
    if wanted is None:
        return range(len(header.placed))
    names: dict[str, list[str]] = {}
    for other, name in header.aliases.items():
        names.setdefault(name, []).append(other)
    return [
        index
        for index, name in enumerate(place.entry.name for place in header.placed)
        if name.startswith(OBJECT_PREFIX) or any(map(wanted, (name, *names.get(name, ()))))
    ]


def _into(
    entries: Sequence[Placed], targets: Mapping[str, memoryview]
) -> Callable[[int, memoryview], None]:
    """Puts the bytes of a body where they belong."""
    placed = [place for place in entries if place.end > place.begin]
    ends = [place.end for place in placed]

    def put(begin: int, piece: memoryview) -> None:
        for place, start, stop in overlaps(placed, ends, begin, piece.nbytes):
            target = targets[place.entry.name]
            target[start - place.begin : stop - place.begin] = piece[start - begin : stop - begin]

    return put
