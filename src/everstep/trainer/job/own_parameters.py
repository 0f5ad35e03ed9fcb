"""Agree which parameters each rank saves by itself (:mod:`everstep.state.ranks.ddp`).

DistributedDataParallel does not reduce the gradients of parameters that were frozen when it was
made. If a rank trains them later, their values differ between ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.state.ranks.ddp import RankLocalParameters

__all__ = ["apply_own_parameters", "own_parameters_message", "warn_of_different_layers"]

_LISTED = 3  # names in a warning

_log = logging.getLogger("everstep")


def own_parameters_message(apart: RankLocalParameters) -> dict[str, Any]:
    """Return this rank's message: names of its own parameters, and whether any are unreduced."""
    return {"own": apart.names(), "parts": not apart.is_empty}


def apply_own_parameters(
    apart: RankLocalParameters, messages: Sequence[Mapping[str, Any]]
) -> tuple[bool, bool]:
    """Apply the messages of all ranks to this rank.

    Returns:
        True if any rank has parameters that DDP does not reduce, and True if the messages have
        changed this rank's set of own parameters.
    """
    changed = apart.agree(name for message in messages for name in message["own"])
    return any(message["parts"] for message in messages), changed


def warn_of_different_layers(messages: Sequence[Mapping[str, Any]], step: int) -> None:
    """Warn if ranks train different layers, which DDP cannot detect."""
    each = [set(message["own"]) for message in messages]
    if different := sorted(set.union(*each) - set.intersection(*each)):
        names = ", ".join(different[:_LISTED]) + (", ..." if len(different) > _LISTED else "")
        ranks = ", ".join(str(rank) for rank, own in enumerate(each) if own & set(different))
        _log.warning(
            "everstep: until step %d rank(s) %s trained, or changed, %d parameter(s) that the "
            "others did not (%s), and that DistributedDataParallel does not reduce, as they were "
            "frozen when it was made: from now on each rank saves its own",
            step,
            ranks,
            len(different),
            names,
        )
