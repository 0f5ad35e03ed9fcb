"""What the commits of several ranks come to, in words for people."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from everstep.commit.steps import GaveUp, IsDamaged, IsDurable, IsLate
from everstep.errors import DamageError, DeadlineError, EverstepError, StorageError

__all__ = ["damaged_behind_commit", "why_not_durable"]


def damaged_behind_commit(out: IsDamaged, run: PurePath) -> DamageError:
    """Of a base that was read back before older ones were to be deleted."""
    return DamageError(
        f"{out.base} was committed, but read back it is damaged: {out.problem}; "
        "older bases are kept",
        step=out.base.step,
        rank=out.rank,
        path=run,
        hint="the disk or memory of the rank's machine may be failing",
    )


def why_not_durable(
    out: IsDurable | GaveUp | IsLate, run: PurePath, timeout_s: float
) -> EverstepError | None:
    """Why whoever waits for a base waits no longer; None: it is durable.

    Args:
        timeout_s: that other ranks had for their parts.
    """
    where: dict[str, Any] = {"step": out.base.step, "path": run}
    if isinstance(out, GaveUp):
        return StorageError(
            f"no rank has the base of step {out.base.step}: {out.reason}",
            **where,
            hint="training goes on; the next base is taken as usual",
        )
    if isinstance(out, IsLate):
        silent = ", ".join(map(str, out.missing)) or "that lead on a disk"
        return DeadlineError(
            f"rank(s) {silent} have not written their parts of the base of step "
            f"{out.base.step} within {timeout_s:g} s",
            **where,
            hint="they have died or hang; everstep ps on their machine shows their keepers",
        )
    return None
