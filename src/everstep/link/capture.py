"""A base in shared host memory: the trainer fills it, the keeper writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from everstep.arena import Arena
from everstep.errors import DeadlineError, EverstepError
from everstep.format import BasePlan
from everstep.format.header import ShardPlan
from everstep.format.log import SegmentBody
from everstep.format.writer import Written
from everstep.link.save import Save
from everstep.seams.filesystem import DIRECT_ALIGNMENT_BYTES
from everstep.seams.memory import copy_view
from everstep.seams.processes import Condition
from everstep.state.layout import Body
from everstep.state.layout.shards import Seen, pieces

_LOOK_AGAIN_S = 0.001


def shard_offsets(plan: BasePlan) -> tuple[tuple[int, ...], int]:
    """Return the offset of each shard's tensors in a base's block, and the size of the block, in
    bytes.

    Each shard begins at a page, so that the memory mirrors the files and is written without copies.
    """
    offsets = []
    position = 0
    for shard in plan.shards:
        offsets.append(position)
        size = shard.layout.size_bytes
        position += -(-size // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES
    return tuple(offsets), position


@dataclass(frozen=True, slots=True, eq=False)
class RedoFile:
    """Additional file of a base whose parts have seen different updates: it brings them to one
    step.

    Attributes:
        plan: plan of the file.
        body: body of the file.
        parts: pieces of the body in the order of the file, without the objects: each an
            ``(offset, size)`` in the arena, or the bytes themselves.
    """

    plan: ShardPlan
    body: SegmentBody
    parts: tuple[tuple[int, int] | bytes, ...]


@dataclass(eq=False, slots=True)
class Capture:
    """A base in progress.

    Attributes:
        number: number of the capture, shared by trainer and keeper.
        layout: number of its layout, likewise.
        plan: plan of its files.
        save: handle that the user waits on.
        offset: offset of its block in the arena, in bytes.
        word: index of the progress word that counts the bytes of the block that have arrived.
        stream: True if chunks are written while later ones are still being captured.
        incoming: lets the keeper wait for data.
        on_end: called when the keeper no longer writes the base.
        written: its files, once it is durable.
        begun: True if a keeper has taken it on, and will call ``on_end``.
        withdrawn: True if the requester no longer wants it.
        users: number of users of the block: the one that fills it and the one that writes it.
        arena: arena of its block; None for the arena of the training process.
        assembling: True while all data has arrived and the base is being rebuilt
            (:mod:`.rebuilds`).
        made: set when the rebuild has ended, with or without success.
        redo: file that completes the base when it is restored; None if it is complete.
    """

    number: int
    layout: int
    plan: BasePlan
    save: Save
    offset: int
    word: int
    stream: bool
    incoming: Incoming
    on_end: Callable[[Capture], None]
    written: tuple[Written, ...] = ()
    begun: bool = False
    withdrawn: bool = False
    users: int = 2
    arena: Arena | None = None
    assembling: bool = False
    made: threading.Event = field(default_factory=threading.Event)
    redo: RedoFile | None = None

    @property
    def files(self) -> BasePlan:
        """Plan with all files; those of the block, which :attr:`plan` describes, come first."""
        if self.redo is None:
            return self.plan
        return replace(self.plan, shards=(*self.plan.shards, self.redo.plan))

    @property
    def durable(self) -> bool:
        """True if the base is committed on disk."""
        future = self.save.durable
        save = self.save
        # ``durable`` of a base in memory means that keepers hold it, not that a disk does.
        over = future.done() and not future.cancelled() and not save.in_memory
        return over and future.exception() is None

    @property
    def step(self) -> int:
        return self.plan.identity.step

    @property
    def timeline(self) -> int:
        return self.plan.identity.timeline

    @property
    def parked(self) -> bool:
        """True if it stays in memory only, until a newer capture is complete."""
        return self.save.parked

    def bodies(self, arena: Arena) -> list[Body]:
        """Return one body per file, over the memory of ``arena``."""
        offsets, size = shard_offsets(self.plan)
        ends = (*offsets[1:], size)
        objects_in = self.plan.objects_in
        bodies: list[Body] = [
            ArenaBody(
                arena.view[self.offset + begin : self.offset + end],
                shard.layout.size_bytes,
                begin,
                self.incoming,
                has_objects=shard is objects_in,
            )
            for shard, begin, end in zip(self.plan.shards, offsets, ends, strict=True)
        ]
        return bodies if self.redo is None else [*bodies, self.redo.body]


class Incoming:
    """Lets the keeper wait for the data of a capture.

    Args:
        progress: returns the number of bytes of the block that have arrived.
        timeout_s: seconds without progress after which the capture counts as hung.
    """

    def __init__(self, progress: Callable[[], int], *, timeout_s: float) -> None:
        self._progress = progress
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._objects: Mapping[str, bytes] | None = None
        self._lost: EverstepError | None = None

    @property
    def complete(self) -> bool:
        return self._objects is not None

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def arrived(self, objects: Mapping[str, bytes]) -> None:
        """Record that all tensors and these objects have arrived; no effect on a lost capture."""
        with self._changed:
            # The first of arrived() and lose() wins: a capture that was given up must not become
            # durable.
            if self._lost is None:
                self._objects = objects
            self._changed.notify_all()

    def lose(self, error: EverstepError) -> None:
        """Record that the rest will never arrive; no effect on a complete capture."""
        with self._changed:
            # Complete data is not given up: the base survives the trainer from that moment on.
            if self._objects is None and self._lost is None:
                self._lost = error
            self._changed.notify_all()

    def wait_for(self, end: int) -> None:
        """Wait until the bytes ``[0, end)`` of the block have arrived.

        Raises:
            EverstepError: they will never arrive.
            DeadlineError: no byte arrived for ``timeout_s`` seconds.
        """
        self._wait(lambda: self._progress() >= end or self._objects is not None)

    def objects(self) -> Mapping[str, bytes]:
        """Wait until everything has arrived, and return the objects.

        Raises:
            EverstepError, DeadlineError: as for :meth:`wait_for`.
        """
        self._wait(lambda: self._objects is not None)
        assert self._objects is not None
        return self._objects

    def _wait(self, there: Callable[[], bool]) -> None:
        waited_s = 0.0
        seen = self._progress()
        with self._changed:
            while not there():
                if self._lost is not None:
                    raise self._lost
                # Polled: the other process advances a word in shared memory, which wakes no
                # thread here.
                self._changed.wait(_LOOK_AGAIN_S)
                # Slices are added up instead of reading a clock: time in which this process was
                # stopped must not count as a hang of the other one.
                waited_s += _LOOK_AGAIN_S
                now = self._progress()
                # Any progress restarts the deadline: a slow copy is no hang.
                if now != seen:
                    waited_s = 0.0
                    seen = now
                if waited_s > self._timeout_s:
                    raise DeadlineError(
                        f"a capture has made no progress for {self._timeout_s:g} s",
                        hint="the training process hangs or is stopped",
                    )


@dataclass(eq=False, slots=True)
class ArenaBody:
    """Body of a shard in a block of memory that mirrors its file; the objects follow.

    Attributes:
        memory: whole pages; the first ``tensors_bytes`` hold the tensors.
        tensors_bytes: size of the tensors in bytes.
        begin: offset of ``memory`` in the block whose progress ``incoming`` counts.
        incoming: lets the writer wait for data.
        has_objects: True if the objects belong to this shard.
    """

    memory: memoryview
    tensors_bytes: int
    begin: int
    incoming: Incoming
    has_objects: bool

    def held(self, begin: int, end: int) -> memoryview | None:
        # Objects lie outside of the block, and the last page may exceed it: such ranges need a
        # copy.
        if end > self.memory.nbytes or (self.has_objects and end > self.tensors_bytes):
            return None
        # The memory is handed to the disk without a copy, so the bytes must have arrived before.
        self.incoming.wait_for(self.begin + min(end, self.tensors_bytes))
        return self.memory[begin:end]

    def fill(self, begin: int, chunk: memoryview, seen: Seen) -> None:
        end = begin + chunk.nbytes
        # Only up to the tensors: padding and objects are not copied into the block, and the
        # progress word never counts them.
        self.incoming.wait_for(self.begin + min(end, self.tensors_bytes))
        first = 0
        for part in self._parts():
            start = max(begin, first)
            stop = min(end, first + part.nbytes)
            if start < stop:
                source = part[start - first : stop - first]
                target = chunk[start - begin :]
                for live, copied in zip(
                    pieces(source), pieces(target[: stop - start]), strict=True
                ):
                    # The copy is digested, not the source: the digest must be that of the bytes
                    # that are written, even if the source changes meanwhile.
                    copy_view(copied, live)
                    seen(copied)
            first += part.nbytes

    def objects_bytes(self) -> Mapping[str, int]:
        if not self.has_objects:
            return {}
        return {name: len(data) for name, data in self.incoming.objects().items()}

    def _parts(self) -> Iterator[memoryview]:
        yield self.memory[: self.tensors_bytes]
        if self.has_objects:
            yield from (memoryview(data) for data in self.incoming.objects().values())
