"""What the commits of several ranks come to, in words for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any

from everstep.commit.job.steps import GaveUp, IsDamaged, IsDurable, IsLate
from everstep.errors import DamageError, DeadlineError, EverstepError, StorageError

__all__ = ["damaged_behind_commit", "why_not_durable"]

_EACH = (
    "every rank calls ckpt.step() at the end of the same steps, and save() and close() there, too"
)
_SILENT = (
    f"they have not taken this base ({_EACH}), or they hang, or have died; everstep ps on their "
    "machine shows their keepers"
)
_GONE = f"they have left training ({_EACH}), or have died: what they have printed says which"


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
    out: IsDurable | GaveUp | IsLate,
    run: PurePath,
    timeout_s: float,
    is_gone: Callable[[int], bool] = lambda rank: False,
) -> EverstepError | None:
    """Why whoever waits for a base waits no longer; None: it is durable.

    Args:
        timeout_s: that other ranks had for their parts.
        is_gone: whether the keeper of a rank was there, and is no more.
    """
    where: dict[str, Any] = {"step": out.base.step, "path": run}
    if isinstance(out, GaveUp):
        return StorageError(
            f"no rank has the base of step {out.base.step}: {out.reason}",
            **where,
            hint="training goes on; the next base is taken as usual",
        )
    if isinstance(out, IsLate):
        silent = _numbers(out.missing) or "that lead on a disk"
        gone = [rank for rank in out.missing if is_gone(rank)]
        left = f"; the keeper(s) of rank(s) {_numbers(gone)} are no longer there" if gone else ""
        return DeadlineError(
            f"rank(s) {silent} have not written their parts of the base of step "
            f"{out.base.step} within {timeout_s:g} s{left}",
            **where,
            hint=_GONE if len(gone) == len(out.missing) > 0 else _SILENT,
        )
    return None


def _numbers(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
