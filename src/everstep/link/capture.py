"""A base on its way through host memory: what the trainer fills and the keeper writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from everstep.arena.memory import Arena
from everstep.errors import DeadlineError, EverstepError
from everstep.format.log import SegmentBody
from everstep.format.plan import BasePlan, ShardPlan
from everstep.format.writer import Written
from everstep.link.save import Save
from everstep.seams.files.filesystem import DIRECT_ALIGNMENT_BYTES
from everstep.seams.memory import copy_view
from everstep.seams.processes.conditions import Condition
from everstep.state.layout.shards import Body, Seen, pieces

__all__ = ["ArenaBody", "Capture", "Incoming", "RedoFile", "shard_offsets"]

_LOOK_AGAIN_S = 0.001


def shard_offsets(plan: BasePlan) -> tuple[tuple[int, ...], int]:
    """Where the tensors of each shard begin in a base's block of memory, and its size; each
    begins at a page, so that the memory mirrors the files."""
    offsets = []
    position = 0
    for shard in plan.shards:
        offsets.append(position)
        size = shard.layout.size_bytes
        position += -(-size // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES
    return tuple(offsets), position


@dataclass(frozen=True, slots=True, eq=False)
class RedoFile:
    """One more file of a base whose parts are of different updates: what brings them to its step.

    Attributes:
        parts: what of its body lies where in the arena, as ``(offset, size)``, or else itself; in
            the order of the file, without the objects.
    """

    plan: ShardPlan
    body: SegmentBody
    parts: tuple[tuple[int, int] | bytes, ...]


@dataclass(eq=False, slots=True)
class Capture:
    """A base under way.

    Attributes:
        number: names it between trainer and keeper.
        layout: names its layout between them.
        offset: of its block in the arena; as long as the plan says.
        word: the arena's progress word that tells how much of the block is there.
        stream: write chunks while later ones are still being captured.
        incoming: what the keeper waits for.
        on_end: called when the keeper no longer writes the base.
        written: its files, once it is durable.
        begun: whether a keeper has taken it on, and will call ``on_end``.
        withdrawn: whoever asked for it no longer wants it.
        users: who still needs the block: those who fill it, and those who write it.
        arena: that its block is in; None: the training process's.
        assembling: all of it has arrived, and it is being made whole (:mod:`.rebuilds`).
        made: set when it has been, or never will be.
        redo: what whoever restores it makes it whole with; None: it is.
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
        """All of its files; those of its block, which :attr:`plan` has, come first."""
        if self.redo is None:
            return self.plan
        return replace(self.plan, shards=(*self.plan.shards, self.redo.plan))

    @property
    def durable(self) -> bool:
        """Whether the base is committed."""
        future = self.save.durable
        save = self.save
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
        """Whether it stays in memory once it is whole, until a newer one is."""
        return self.save.parked

    def bodies(self, arena: Arena) -> list[Body]:
        """One body per file, over the memory of ``arena``."""
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
    """Tells the keeper what of a capture has arrived.

    Args:
        progress: bytes of the block that are there.
        timeout_s: so long without progress counts as hung.
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
        """All tensors are there, and these are the objects; of no effect once it is lost."""
        with self._changed:
            if self._lost is None:
                self._objects = objects
            self._changed.notify_all()

    def lose(self, error: EverstepError) -> None:
        """The rest will never come; of no effect once it has come."""
        with self._changed:
            if self._objects is None and self._lost is None:
                self._lost = error
            self._changed.notify_all()

    def wait_for(self, end: int) -> None:
        """Returns when bytes ``[0, end)`` of the block are there.

        Raises:
            EverstepError: they will never be.
            DeadlineError: nothing came for the stated time.
        """
        self._wait(lambda: self._progress() >= end or self._objects is not None)

    def objects(self) -> Mapping[str, bytes]:
        """The objects, when everything is there.

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
                self._changed.wait(_LOOK_AGAIN_S)  # the progress word wakes nobody
                waited_s += _LOOK_AGAIN_S
                now = self._progress()
                if now != seen:
                    waited_s = 0.0
                    seen = now
                if waited_s > self._timeout_s:
                    raise DeadlineError(
                        f"a capture has made no progress for {self._timeout_s:g} s",
                        hint="the training process hangs, or is stopped",
                    )


class ArenaBody:
    """The body of a shard in a block that mirrors it, followed by objects.

    Args:
        memory: whole pages; the first ``tensors_bytes`` are the tensors.
        begin: of ``memory`` in the block whose progress ``incoming`` tells.
    """

    def __init__(
        self,
        memory: memoryview,
        tensors_bytes: int,
        begin: int,
        incoming: Incoming,
        *,
        has_objects: bool,
    ) -> None:
        self._memory = memory
        self._tensors_bytes = tensors_bytes
        self._begin = begin
        self._incoming = incoming
        self._has_objects = has_objects

    def held(self, begin: int, end: int) -> memoryview | None:
        if end > self._memory.nbytes or (self._has_objects and end > self._tensors_bytes):
            return None
        self._incoming.wait_for(self._begin + min(end, self._tensors_bytes))
        return self._memory[begin:end]

    def fill(self, begin: int, chunk: memoryview, seen: Seen) -> None:
        end = begin + chunk.nbytes
        self._incoming.wait_for(self._begin + min(end, self._tensors_bytes))
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
                    copy_view(copied, live)
                    seen(copied)
            first += part.nbytes

    def objects_bytes(self) -> Mapping[str, int]:
        if not self._has_objects:
            return {}
        return {name: len(data) for name, data in self._incoming.objects().items()}

    def _parts(self) -> Iterator[memoryview]:
        yield self._memory[: self._tensors_bytes]
        if self._has_objects:
            yield from (memoryview(data) for data in self._incoming.objects().values())
