"""Does something with the files of a base, from the cheapest places where they can be read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TypeVar

from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, FormatError, NewerFormatError, RecoveryError
from everstep.restore.fetch.sources import Place, Places, rank_of
from everstep.restore.load.saved_ranks import HoleError

__all__ = ["with_files"]

_log = logging.getLogger("everstep")
_T = TypeVar("_T")


def with_files(
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
            places.failed(picked, rank_of(error))
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
