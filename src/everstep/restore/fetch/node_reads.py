"""Files of a base that several ranks of one node need are read once on that node.

Which ranks share a node they say when they start; what each of them needs all can tell
(:data:`everstep.commit.job.offers.Needs`). So each knows which files it has in common with a
neighbour,
and reads those through the memory that they share (:mod:`.node_window`), if it reads them from the
same place. Headers and what only one rank needs are read as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from everstep.commit.job.offers import Needs
from everstep.errors import EverstepError
from everstep.format.digests import digest
from everstep.format.records import Manifest
from everstep.restore.fetch.held import HeldBase
from everstep.restore.fetch.node_window import CELL_BYTES, RANKS_MAX, NodeWindow
from everstep.restore.fetch.sources import Place
from everstep.run.open_base import OpenBase
from everstep.run.scan import BaseFound
from everstep.seams.clock import Clock
from everstep.seams.files.claims import namespaces
from everstep.seams.files.filesystem import DIRECT_ALIGNMENT_BYTES, ReadFile
from everstep.seams.machine import launcher, machine_name

__all__ = ["NodeReads", "NodeStart", "shared_memory_name"]

_log = logging.getLogger("everstep")
_WAIT_S_MAX = 5.0


def shared_memory_name(node: str) -> str:
    """What two ranks say alike if they can share memory and are to be of one node; "" if this one
    cannot. Two launchers on one machine (torchrun's ``GROUP_RANK``) are two nodes.

    Args:
        node: what is said of the node anyway; perhaps it is an emulated one.
    """
    seen = namespaces()
    return f"{machine_name()} {seen} {launcher()} {node}" if seen else ""


class NodeStart:
    """The ranks of this node at a start of their job.

    Args:
        names: by rank: what its node is called; "" where it shares with nobody.
        local: this rank's disk is one of its node: there each rank reads for itself.
        timeout_s: within which a transfer has to end; of that a quarter at most is for waiting.
    """

    def __init__(
        self, rank: int, names: Sequence[str], clock: Clock, *, local: bool, timeout_s: float
    ) -> None:
        alike = [other for other, name in enumerate(names) if name and name == names[rank]]
        self._ranks = alike[:RANKS_MAX]
        self._rank = rank
        self._clock = clock
        self._local = local
        self._wait_s = min(_WAIT_S_MAX, timeout_s / 4)
        self._window: NodeWindow | None = None

    def offer(self, name: str) -> tuple[int, str] | None:
        """What this rank tells the others: a descriptor, if it is the one that makes the memory.

        Args:
            name: of this rank at this start; of at most 32 characters.
        """
        if len(self._ranks) < 2 or self._ranks[0] != self._rank:
            return None
        try:
            self._window = NodeWindow.create(name, len(self._ranks), self._clock, self._wait_s)
        except EverstepError as error:
            _log.debug("each rank of this node reads for itself: %s", error)
            return None
        return self._window.fd, name

    def join(self, said: Sequence[Mapping[str, Any]], needs: Needs) -> NodeReads | None:
        """What all have told; None: this rank reads for itself.

        Args:
            said: by rank: ``"pid"``, and ``"window"`` as from :meth:`offer`.
        """
        if len(self._ranks) < 2 or self._rank not in self._ranks:
            return None
        first = said[self._ranks[0]]
        if first["window"] is None:
            return None
        if self._window is None:
            (fd, name) = first["window"]
            place = self._ranks.index(self._rank)
            about = name, int(first["pid"]), int(fd), place, len(self._ranks)
            try:
                self._window = NodeWindow.join(*about, self._clock, self._wait_s)
            except EverstepError as error:
                _log.debug("this rank reads for itself: %s", error)
                return None
        return NodeReads(self._window, self._ranks, needs, local=self._local)

    def close(self) -> None:
        """Lets go of the memory; called when this rank has restored. Idempotent."""
        if self._window is not None:
            self._window.close()


class NodeReads:
    """One rank's reads through the memory of its node.

    Args:
        ranks: of this node.
        needs: which ranks' files a rank reads.
        local: what is on this rank's disk is not read through it.
    """

    def __init__(
        self, window: NodeWindow, ranks: Sequence[int], needs: Needs, *, local: bool
    ) -> None:
        self._window = window
        self._ranks = ranks
        self._needs = needs
        self._local = local
        self._cells: dict[str, int] = {}
        self._common: set[int] = set()

    def wants(self, number: int, manifest: Manifest) -> int:
        """How many ranks of this node read the files of rank ``number``."""
        return sum(number in self._needs(rank, manifest) for rank in self._ranks)

    def begin(self, base: BaseFound, places: Mapping[int, Place]) -> bool:
        """A base is going to be read from these places.

        Returns:
            Whether any of it may come from other ranks, or go to them.
        """
        manifest = base.manifest
        assert manifest is not None
        wanted = [set(self._needs(rank, manifest)) for rank in self._ranks]
        self._common = {
            number
            for number, place in places.items()
            if place.name
            and not isinstance(place.files, HeldBase)
            and not (self._local and place.source.tier == "disk")
            and sum(number in one for one in wanted) > 1
        }
        self._cells = {}
        cells = 0
        for marker in manifest.markers:
            for record in marker.files:
                self._cells[record.name] = cells
                cells += -(-record.length // CELL_BYTES)
        if not self._common:
            self._window.end()
            return False
        self._window.begin()
        return True

    def share(self, opened: OpenBase, place: Place) -> None:
        """The files of a rank are read through the memory, if another rank here needs them."""
        if opened.marker.rank in self._common:
            opened.shards = [
                (self._file(file, place, path, header.room_bytes), record, header, path)
                for file, record, header, path in opened.shards
            ]

    def end(self) -> None:
        """Nothing more is read of it."""
        self._window.end()

    def _file(self, file: ReadFile, place: Place, path: PurePath, body_at: int) -> ReadFile:
        source = bytes.fromhex(digest(f"{place.source.tier} {place.name} {path}".encode()))
        return _NodeFile(file, self._window, source, body_at, self._cells[path.name])


class _NodeFile:
    """A file whose body is read in cells.

    Args:
        body_at: where the body begins.
        first: number of its first cell.
    """

    def __init__(
        self, file: ReadFile, window: NodeWindow, source: bytes, body_at: int, first: int
    ) -> None:
        self._file = file
        self._window = window
        self._source = source
        self._body_at = body_at
        self._first = first

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        begin = offset - self._body_at
        # What is not in pages is an object of a few bytes, and this rank's own.
        if begin < 0 or begin % DIRECT_ALIGNMENT_BYTES or buffer.nbytes % DIRECT_ALIGNMENT_BYTES:
            return self._file.read_into(buffer, offset)
        done = 0
        while done < buffer.nbytes:
            cell, at = divmod(begin + done, CELL_BYTES)
            part = buffer[done : done + CELL_BYTES - at]
            there = min(part.nbytes, self.size_bytes - offset - done)
            if there <= 0:
                break
            got = self._part(cell, at, part, there, offset + done)
            done += got
            if got < part.nbytes:
                break
        return done

    def close(self) -> None:
        self._file.close()

    def _part(self, cell: int, at: int, part: memoryview, there: int, offset: int) -> int:
        return self._window.take(
            self._first + cell,
            self._source,
            at,
            part,
            there,
            lambda buffer: self._file.read_into(buffer, offset),
        )
