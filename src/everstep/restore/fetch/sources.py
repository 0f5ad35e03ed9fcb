"""From where each rank's files of a base are read: the cheapest place first, and on to the next
where what is there is damaged or gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeVar

from everstep.commit.job.offers import Source
from everstep.commit.lineage import BaseId
from everstep.commit.retention import COPY_TIERS
from everstep.errors import DamageError, FormatError, NewerFormatError, RecoveryError
from everstep.format.names import parse_marker, parse_shard
from everstep.restore.fetch.held import HeldBase
from everstep.restore.load.saved_ranks import HoleError
from everstep.seams.files.filesystem import FileSystem

__all__ = [
    "Place",
    "Places",
    "RankBack",
    "RankRead",
    "failed_rank",
    "read_from_places",
    "source_name",
]


@dataclass(frozen=True, slots=True)
class Place:
    """A place where one rank's files of a base are.

    Attributes:
        source: as the offer that it was chosen from names it.
        files: read from there; or what is in memory.
        name: of the place: two ranks that say the same read the same files; "": nobody knows.
    """

    source: Source
    files: HeldBase | FileSystem
    name: str = ""


@dataclass(frozen=True, slots=True)
class RankRead:
    """What one rank has read of a base, from one tier.

    Attributes:
        rank: of the job that resumes.
        source: ``"memory"``, ``"peer"`` (another node: its keeper's memory, or its disk),
            ``"disk"``, ``"copy"`` or ``"object"``.
        size_bytes: bytes verified, whichever rank of its node has read them.
    """

    rank: int
    source: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RankBack:
    """How one rank has come back.

    Attributes:
        rank: of the job that resumes.
        source: of its base; ``"fresh"``: there was nothing to restore.
        size_bytes: bytes that it has read, of all that :class:`RankRead` counts.
        load_s, replay_s: seconds that reading the base, and replaying the log, took it.
        replayed: steps of the log.
        exact: what it has restored by itself is bit for bit what training had; where it is not,
            the whole job is not (:attr:`everstep.Recovery.exact`).
    """

    rank: int
    source: str
    size_bytes: int
    load_s: float
    replay_s: float
    replayed: int
    exact: bool


class Places:
    """What is left to read from.

    Args:
        places: by the rank that wrote the files, the cheapest first.
    """

    def __init__(self, places: Mapping[int, Sequence[Place]]) -> None:
        self._left = {rank: list(found) for rank, found in places.items()}
        self.damaged: list[tuple[int, Source]] = []

    @property
    def readable(self) -> tuple[int, ...]:
        """Ranks whose files can be read somewhere."""
        return tuple(rank for rank, left in sorted(self._left.items()) if left)

    def pick(self, ranks: Sequence[int]) -> dict[int, Place] | None:
        """The cheapest place of each; None: of one of them there is none any more."""
        if not all(self._left.get(rank) for rank in ranks):
            return None
        return {rank: self._left[rank][0] for rank in ranks}

    def failed(self, tried: Mapping[int, Place], rank: int | None) -> None:
        """What was picked could not be read.

        Args:
            rank: whose files; None: nobody can say.
        """
        for each, place in tried.items():
            if rank in (None, each) or rank not in tried:
                left = self._left[each]
                left.remove(place)
                if not any(other.source == place.source for other in left):
                    self.damaged.append((each, place.source))


def source_name(tiers: set[str]) -> str:
    """What a resume calls the places that it read from. Never "disk" where a copy was among them:
    that would vouch for what this rank's own disk holds."""
    copies = [tier for tier in reversed(COPY_TIERS) if tier in tiers]
    if copies:
        return copies[0]
    if "peer" in tiers:
        return "peer"
    return "memory" if "memory" in tiers else "disk"


def failed_rank(error: Exception) -> int | None:
    """Whose files an error is about, where it says so."""
    rank = getattr(error, "rank", None)
    path = getattr(error, "path", None) or getattr(error, "filename", None)
    if rank is not None or path is None:
        return rank
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
    """What ``use`` gives, and the places that it was given; None: files are damaged, or do not fit
    each other, and ``places`` says which.

    Args:
        wanted: ranks whose files are needed; where that is not enough, all that can be read.
        rank: that reads.
        failed: told of files that cannot be used, in words.

    Raises:
        RecoveryError: files are needed that are not here.
        NewerFormatError: they are whole, and not ours to pass over.
    """
    while (picked := places.pick(wanted)) is not None:
        try:
            return use(picked), picked
        except (HoleError, RecoveryError) as error:
            # Ranks wrote to other disks then: what they had in common others have, too.
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
    if not places.damaged:  # or the others would take this rank's state for that of the base
        missing = ", ".join(str(r) for r in wanted if r not in places.readable)
        raise RecoveryError(
            f"rank {rank} was told to restore {base}, and has not offered the files of rank(s) "
            f"{missing}, which it needs",
            rank=rank,
            path=run,
            hint="the ranks do not hold the same kinds of state; please report this",
        )
    return None
