"""Read files that several ranks of a node need once on that node.

At a start each rank announces its node. All ranks can compute which files each of them needs
(:data:`everstep.commit.job.offers.Needs`), so each knows which files it shares with a neighbour. It
reads those through shared memory (:mod:`.node_window`), if both read them from the same place.
Headers and files that one rank needs are read as usual.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from everstep.commit.job.offers import Needs
from everstep.errors import EverstepError
from everstep.format.digests import digest
from everstep.format.records import Manifest
from everstep.restore.fetch.node_window import CELL_BYTES, RANKS_MAX, NodeWindow
from everstep.restore.fetch.sources import Place
from everstep.run.open_base import OpenBase
from everstep.run.scan import BaseFound
from everstep.seams.clock import Clock
from everstep.seams.files.filesystem import DIRECT_ALIGNMENT_BYTES, ReadFile

_log = logging.getLogger("everstep")
_WAIT_S_MAX = 5.0


class NodeStart:
    """Ranks of this node at a start of their job.

    Args:
        rank: this rank.
        names: name of each rank's node, by rank.
        clock: source of time.
        local: this rank's disk is local to its node: files on it are not shared.
        timeout_s: time limit of a transfer; at most a quarter of it is spent waiting.
    """

    def __init__(
        self, rank: int, names: Sequence[str], clock: Clock, *, local: bool, timeout_s: float
    ) -> None:
        # The window has RANKS_MAX progress words. Any further ranks read by themselves.
        same_node = [other for other, name in enumerate(names) if name == names[rank]]
        self._ranks = same_node[:RANKS_MAX]
        self._rank = rank
        self._clock = clock
        self._local = local
        # The wait is part of a read with that time limit. It must end well before, or a slow
        # neighbour would be reported as hung storage.
        self._wait_s = min(_WAIT_S_MAX, timeout_s / 4)
        self._window: NodeWindow | None = None

    def offer(self, name: str) -> tuple[str, int, int] | None:
        """Return name, process and descriptor to announce, if this rank creates the memory;
        otherwise None.

        Args:
            name: name of this start, at most 32 characters.
        """
        if len(self._ranks) < 2 or self._ranks[0] != self._rank:
            return None
        try:
            self._window = NodeWindow.create(name, len(self._ranks), self._clock, self._wait_s)
        except EverstepError as error:
            # Sharing only saves reads. Without the memory each rank reads by itself.
            _log.debug("ranks of this node do not share reads: %s", error)
            return None
        return name, os.getpid(), self._window.fd

    def join(self, announced: Sequence[Mapping[str, Any]], needs: Needs) -> NodeReads | None:
        """Join the memory of the node; None if this rank does not share reads.

        Args:
            announced: by rank: ``"window"`` as from :meth:`offer`.
            needs: which ranks' files a rank reads.
        """
        if len(self._ranks) < 2 or self._rank not in self._ranks:
            return None
        window = announced[self._ranks[0]]["window"]
        if window is None:
            return None
        if self._window is None:
            name, pid, fd = window
            place = self._ranks.index(self._rank)
            count = len(self._ranks)
            try:
                self._window = NodeWindow.join(
                    name, int(pid), int(fd), place, count, self._clock, self._wait_s
                )
            except EverstepError as error:
                # The other ranks wait for a place only while it is claimed, so this rank delays
                # none of them.
                _log.debug("this rank does not share reads: %s", error)
                return None
        return NodeReads(self._window, self._ranks, needs, local=self._local)

    def close(self) -> None:
        """Release the memory, after this rank has restored. Idempotent."""
        if self._window is not None:
            self._window.close()


class NodeReads:
    """One rank's reads through the memory of its node.

    Args:
        window: shared memory.
        ranks: ranks of this node.
        needs: which ranks' files a rank reads.
        local: files on this rank's disk are not shared.
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

    def needs_alone(self, rank: int, manifest: Manifest) -> Collection[int]:
        """Return the ranks whose files this rank reads, and no other rank of its node."""
        return [one for one in self._needs(rank, manifest) if self._readers(one, manifest) < 2]

    def begin(self, base: BaseFound, places: Mapping[int, Place]) -> bool:
        """Prepare to read a base from these places.

        Returns:
            True if some of it may be exchanged with other ranks.
        """
        manifest = base.manifest
        assert manifest is not None
        # Without a name, ranks cannot tell that they read the same files. Files on a local disk are
        # left out because reading them costs less than waiting for each other.
        self._common = {
            number
            for number, place in places.items()
            if place.name
            and not (self._local and place.source.tier == "disk")
            and self._readers(number, manifest) > 1
        }
        self._cells = {}
        cells = 0
        # All files are counted, including those that are not shared: the numbers of the cells must
        # be equal on all ranks.
        for marker in manifest.markers:
            for record in marker.files:
                self._cells[record.name] = cells
                cells += -(-record.length // CELL_BYTES)
        if not self._common:
            # Without this the other ranks would keep their cells for this one until they give up
            # waiting.
            self._window.end()
            return False
        self._window.begin()
        return True

    def share(self, opened: OpenBase, place: Place) -> None:
        """Read the files of a rank through the memory, if another rank of this node needs them."""
        if opened.marker.rank in self._common:
            opened.shards = [
                (self._file(file, place, path, header.room_bytes), record, header, path)
                for file, record, header, path in opened.shards
            ]

    def end(self) -> None:
        """Announce that this rank reads nothing more of the base."""
        self._window.end()

    def _readers(self, number: int, manifest: Manifest) -> int:
        """Return how many ranks of this node read the files of rank ``number``."""
        return sum(number in self._needs(rank, manifest) for rank in self._ranks)

    def _file(self, file: ReadFile, place: Place, path: PurePath, body_at: int) -> ReadFile:
        # The place is part of the name, as a copy elsewhere may be damaged while this one is
        # intact.
        source = bytes.fromhex(digest(f"{place.source.tier} {place.name} {path}".encode()))
        return _NodeFile(file, self._window, source, body_at, self._cells[path.name])


class _NodeFile:
    """File whose body is read in cells.

    Args:
        body_at: offset of the body.
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
        # Unaligned reads are of small objects, which no other rank needs.
        if begin < 0 or begin % DIRECT_ALIGNMENT_BYTES or buffer.nbytes % DIRECT_ALIGNMENT_BYTES:
            return self._file.read_into(buffer, offset)
        done = 0
        while done < buffer.nbytes:
            cell, at = divmod(begin + done, CELL_BYTES)
            chunk = buffer[done : done + CELL_BYTES - at]
            # Buffers are padded to full pages, which may reach beyond the end of the file.
            available = min(chunk.nbytes, self.size_bytes - offset - done)
            if available <= 0:
                break
            got = self._read_chunk(cell, at, chunk, available, offset + done)
            done += got
            if got < chunk.nbytes:
                break
        return done

    def close(self) -> None:
        self._file.close()

    def _read_chunk(
        self, cell: int, at: int, chunk: memoryview, available: int, offset: int
    ) -> int:
        return self._window.take(
            self._first + cell,
            self._source,
            at,
            chunk,
            available,
            lambda buffer: self._file.read_into(buffer, offset),
        )
