"""Files of entries that never change: written once, then linked to by later bases (``adr/050``).

No declaration is taken on trust: the entries of each base are digested, and it links to a file
of an older one only where that has the same entries with the same digests.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.errors import DamageError, EverstepError
from everstep.format.header import ShardHeader, ShardIdentity, decode_header
from everstep.format.plan import ShardPlan
from everstep.format.reader import read_body, read_header
from everstep.format.records import FileRecord
from everstep.format.writer import ChunkRing, Written, digest_shard
from everstep.run.opened import OpenBase
from everstep.run.scan import scan_run
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.progress import ProgressSink
from everstep.state.layout.shards import Body, ShardLayout, at_lsn
from everstep.tiers.disk import remove_if_there, temporary

__all__ = ["StaticFiles"]

_log = logging.getLogger("everstep.keeper")


@dataclass(frozen=True, slots=True)
class _Source:
    """A file that can be linked to."""

    path: PurePath
    record: FileRecord
    header: ShardHeader

    def has_layout_of(self, shard: ShardPlan, identity: ShardIdentity) -> bool:
        """Return whether it is what would be written for a shard, but for base and digests."""
        mine = self.header.identity
        theirs = shard.identity_in(identity)
        theirs = replace(theirs, timeline=mine.timeline, step=mine.step, lsn=mine.lsn)
        theirs = replace(theirs, common=(), inexact="")  # of markers only
        return (
            mine == theirs
            and self.header.room_bytes == shard.room_bytes
            and self.header.aliases == shard.aliases
            and at_lsn(ShardLayout(self.header.placed), 0) == at_lsn(shard.layout, 0)
        )


class StaticFiles:
    """One rank's static files in a run folder, whose bytes are known to be good.

    Attributes:
        refused: why the file system gave no second name to a file, when it last refused; "" if it
            never has.
    """

    def __init__(
        self, filesystem: FileSystem, run: PurePath, ring: ChunkRing, *, timeout_s: float
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._ring = ring
        self._timeout_s = timeout_s
        self._sources: list[_Source] = []
        self.refused = ""

    def may_link(self, shard: ShardPlan, identity: ShardIdentity) -> bool:
        """Return whether a shard is likely to take no room."""
        return any(source.has_layout_of(shard, identity) for source in self._sources)

    def link(
        self,
        shard: ShardPlan,
        identity: ShardIdentity,
        body: Body,
        target: PurePath,
        progress: ProgressSink,
    ) -> Written | None:
        """Give a file that has the bytes of ``body`` the name ``target``, which is durable once the
        directory is synced.

        Returns:
            None where there is no such file, or the file system refuses the link: the shard has to
            be written.

        Raises:
            OSError: what the file system said to anything but the link.
        """
        digested: Written | None = None
        for source in self._candidates(shard, identity):
            digested = digested or digest_shard(shard, identity, body, progress)
            if tuple(digested.digests.values()) != source.header.digests:
                continue
            if source not in self._sources and not self._is_good(source, progress):
                continue
            header = self._link(source, target)
            if header is None:
                continue
            record = replace(source.record, name=shard.name)
            return Written(record, header, digested.digests, linked=True)
        return None

    def remember(self, path: PurePath, written: Written) -> None:
        """Later bases may link to a static file that this process has written, or linked to."""
        header = decode_header(written.header, written.record.length, path)
        others = [one for one in self._sources if one.path.name != path.name]
        self._sources = [*others, _Source(path, written.record, header)]

    def forget(self) -> None:
        """Something on the disk is damaged: files are read again before they are linked to."""
        self._sources.clear()

    def _link(self, source: _Source, target: PurePath) -> bytes | None:
        """Return the header of the file that has the name now."""
        filesystem = self._filesystem
        staged = temporary(target)
        remove_if_there(filesystem, staged)
        try:
            filesystem.link(source.path, staged)
        except OSError as error:
            if error.errno == errno.ENOENT:  # its base was given up, or deleted
                self._drop(source)
            else:
                self._say_refused(source.path, error)
            return None
        # Read under its new name: now that it has two nobody recycles it (``tiers/slots``).
        try:
            header = _header_bytes(filesystem, staged, source.record)
        except (OSError, EverstepError):
            self._drop(source)
            remove_if_there(filesystem, staged)
            return None
        filesystem.rename(staged, target)
        remove_if_there(filesystem, staged)  # where target was the same file, both names stay
        return header

    def _drop(self, source: _Source) -> None:
        self._sources = [one for one in self._sources if one is not source]

    def _candidates(self, shard: ShardPlan, identity: ShardIdentity) -> Iterator[_Source]:
        """Yield files that may have the bytes of a shard: those of this process; where it has none,
        or no more, those in the folder, newest base first."""
        yield from (one for one in list(self._sources) if one.has_layout_of(shard, identity))
        if not self.may_link(shard, identity):
            yield from (
                one for one in self._on_disk(identity) if one.has_layout_of(shard, identity)
            )

    def _on_disk(self, identity: ShardIdentity) -> Iterator[_Source]:
        bases = scan_run(self._filesystem, self._run).bases
        for base in sorted(bases, key=lambda base: base.id, reverse=True):
            if base.status != "committed" or base.manifest is None:
                continue
            if len(base.manifest.markers) != identity.world:
                continue
            with contextlib.suppress(OSError, EverstepError):  # then it is not linked to
                opened = OpenBase.open(self._filesystem, base, identity.rank)
                opened.close()
                for _, record, header, path in opened.shards:
                    if header.identity.static:
                        yield _Source(path, record, header)

    def _is_good(self, source: _Source, progress: ProgressSink) -> bool:
        """Read all of a file that another process has written: whoever restored its base may have
        read a copy of it."""
        try:
            file = self._filesystem.open(source.path, direct=True)
            try:
                read_body(
                    file,
                    source.header,
                    source.record,
                    source.path,
                    self._ring,
                    timeout_s=self._timeout_s,
                    progress=progress,
                )
            finally:
                file.close()
        except (OSError, DamageError) as error:
            _log.warning("%s is not linked to: %s", source.path, error)
            return False
        return True

    def _say_refused(self, path: PurePath, error: OSError) -> None:
        if not self.refused:
            _log.warning(
                "%s: the file system refuses hard links (%s): static entries are written again",
                path,
                error.strerror or error,
            )
        self.refused = error.strerror or str(error)


def _header_bytes(filesystem: FileSystem, path: PurePath, record: FileRecord) -> bytes:
    file = filesystem.open(path)
    try:
        read_header(file, record, path)
        data = bytearray(record.header_length)
        file.read_into(memoryview(data), 0)
        return bytes(data)
    finally:
        file.close()
