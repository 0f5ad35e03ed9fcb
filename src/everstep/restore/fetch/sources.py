"""Places of each rank's files of a base: the cheapest first, and the next one where files are
damaged or missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeVar

from everstep.commit import COPY_TIERS, BaseId
from everstep.commit.job import Source
from everstep.errors import DamageError, FormatError, NewerFormatError, RecoveryError
from everstep.format.names import parse_marker, parse_shard
from everstep.restore.fetch.held import HeldBase
from everstep.restore.load.saved_ranks import HoleError
from everstep.seams import FileSystem


@dataclass(frozen=True, slots=True)
class Place:
    """Place with one rank's files of a base.

    Attributes:
        source: source named in the offer.
        files: file system to read from, or a base in memory.
        name: equal on two ranks that read the same files; "" if unknown.
    """

    source: Source
    files: HeldBase | FileSystem
    name: str = ""


@dataclass(frozen=True, slots=True)
class RankRead:
    """Bytes of a base that one rank read from one tier.

    Attributes:
        rank: rank of the resuming job.
        source: ``"memory"``, ``"peer"`` (another node: its keeper's memory, or its disk),
            ``"disk"``,
            ``"copy"`` or ``"object"``.
        size_bytes: verified bytes, whichever rank of its node read them.
    """

    rank: int
    source: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RankBack:
    """Recovery of one rank.

    Attributes:
        rank: rank of the resuming job.
        source: source of its base; ``"fresh"`` if there was nothing to restore.
        size_bytes: bytes that it read, as counted by :class:`RankRead`.
        load_s, replay_s: seconds for reading the base, and for replaying the log.
        replayed: steps of the log.
        exact: the state that this rank restored is bit for bit that of training; if it is False
            for one
            rank, it is for the job (:attr:`everstep.Recovery.exact`).
    """

    rank: int
    source: str
    size_bytes: int
    load_s: float
    replay_s: float
    replayed: int
    exact: bool


class Places:
    """Places that have not failed yet.

    Args:
        places: by the rank that wrote the files, cheapest first.
    """

    def __init__(self, places: Mapping[int, Sequence[Place]]) -> None:
        self._left = {rank: list(found) for rank, found in places.items()}
        self.damaged: list[tuple[int, Source]] = []

    @property
    def readable(self) -> tuple[int, ...]:
        """Ranks whose files can be read somewhere."""
        return tuple(rank for rank, left in sorted(self._left.items()) if left)

    def pick(self, ranks: Sequence[int]) -> dict[int, Place] | None:
        """Return the cheapest place of each rank; None if one of them has none left."""
        if not all(self._left.get(rank) for rank in ranks):
            return None
        return {rank: self._left[rank][0] for rank in ranks}

    def failed(self, tried: Mapping[int, Place], rank: int | None) -> None:
        """Drop places that could not be read.

        Args:
            tried: places that were picked.
            rank: rank whose files failed; None if unknown.
        """
        for each, place in tried.items():
            # An error that names none of the picked ranks may be due to any of them, so all are
            # dropped.
            if rank in (None, each) or rank not in tried:
                left = self._left[each]
                left.remove(place)
                # Several directories may be one source. It is reported only when none of them is
                # left.
                if not any(other.source == place.source for other in left):
                    self.damaged.append((each, place.source))


def source_name(tiers: set[str]) -> str:
    """Name the source of a resume. It is never "disk" if a copy was used: that would vouch for the
    contents of this rank's disk."""
    # The most expensive copy that was read names the source.
    copies = [tier for tier in reversed(COPY_TIERS) if tier in tiers]
    if copies:
        return copies[0]
    if "peer" in tiers:
        return "peer"
    return "memory" if "memory" in tiers else "disk"


def failed_rank(error: Exception) -> int | None:
    """Return the rank whose files an error is about, if it names one."""
    rank = getattr(error, "rank", None)
    path = getattr(error, "path", None) or getattr(error, "filename", None)
    if rank is not None or path is None:
        return rank
    # An OSError has no rank, but the name of its file contains it.
    name = PurePath(str(path)).name
    shard = parse_shard(name)
    return parse_marker(name) if shard is None else shard[0]


_log = logging.getLogger("everstep")
_T = TypeVar("_T")


def read_from_places(
    places: Places,
    wanted: Sequence[int],
    use: Callable[[Mapping[int, Place]], _T],
    *,
    base: BaseId,
    rank: int,
    run: PurePath,
    failed: Callable[[str], None],
) -> tuple[_T, Mapping[int, Place]] | None:
    """Call ``use`` with the cheapest places; on damage repeat with the next ones. Return its result
    and these places; None if files are damaged or inconsistent (see ``places.damaged``).

    Args:
        places: places to read from; failed ones are dropped.
        wanted: ranks whose files are needed; if they do not suffice, all readable ones are used.
        use: loads the base from the picked places.
        base: base to read.
        rank: this rank.
        run: run folder, for errors.
        failed: called with the description of unusable files.

    Raises:
        RecoveryError: needed files are missing.
        NewerFormatError: the files were written by a newer everstep, and must not be skipped.
    """
    # Each pass drops a place, or extends ``wanted`` to all readable ranks, so the loop ends.
    while (picked := places.pick(wanted)) is not None:
        try:
            return use(picked), picked
        except (HoleError, RecoveryError) as error:
            # Ranks wrote to other disks then: entries that they shared may be in other ranks'
            # files.
            if set(wanted) >= set(places.readable):
                if isinstance(error, RecoveryError):
                    raise
                failed(f"{base}: {error.message}")
                places.failed(picked, None)
            wanted = places.readable or wanted
        except NewerFormatError:
            raise
        except (DamageError, FormatError, OSError) as error:
            where = ", ".join(sorted({place.source.tier for place in picked.values()}))
            _log.warning("%s could not be restored from %s: %s", base, where, error)
            failed(f"{base}, from {where}: {error}")
            places.failed(picked, failed_rank(error))
    # Nothing is damaged, so the offer was wrong: the other ranks must not continue with this state.
    if not places.damaged:
        missing = ", ".join(str(r) for r in wanted if r not in places.readable)
        raise RecoveryError(
            f"rank {rank} was chosen to restore {base} but needs the files of rank(s) {missing}, "
            "which it did not offer",
            rank=rank,
            path=run,
            hint="the ranks hold different kinds of state; please report this",
        )
    return None
