"""Exchange, between the ranks of a DDP, which parameters are each rank's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.state.ranks.ddp import RankLocalParameters

__all__ = ["heard_apart", "said_apart", "tell_of_parted"]

_LISTED = 3

_log = logging.getLogger("everstep")


def said_apart(apart: RankLocalParameters) -> dict[str, Any]:
    """What a rank says."""
    return {"own": apart.names(), "parts": not apart.is_empty}


def heard_apart(apart: RankLocalParameters, said: Sequence[Mapping[str, Any]]) -> tuple[bool, bool]:
    """Goes by what all ranks have said: whether one of them has any that DDP does not reduce, and
    whether that was news to this one."""
    news = apart.agree(name for one in said for name in one["own"])
    return any(one["parts"] for one in said), news


def tell_of_parted(said: Sequence[Mapping[str, Any]], step: int) -> None:
    """Ranks train different layers, which DDP cannot know."""
    each = [set(one["own"]) for one in said]
    if parted := sorted(set.union(*each) - set.intersection(*each)):
        names = ", ".join(parted[:_LISTED]) + (", ..." if len(parted) > _LISTED else "")
        ranks = ", ".join(str(rank) for rank, own in enumerate(each) if own & set(parted))
        _log.warning(
            "everstep: until step %d rank(s) %s trained, or changed, %d parameter(s) that the "
            "others did not (%s), and that DistributedDataParallel does not reduce, as they were "
            "frozen when it was made: from now on each rank saves its own",
            step,
            ranks,
            len(parted),
            names,
        )
