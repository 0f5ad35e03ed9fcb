"""What checkpointing has cost and done."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.keeper.keepers import Keepers
from everstep.keeper.saver import Saver

__all__ = ["Stats", "stats_of"]


@dataclass(frozen=True, slots=True)
class Stats:
    """What checkpointing has cost and done since construction.

    Attributes:
        step: the user's step now.
        durable_step: newest step that is durable, of this timeline; None if none is.
        lag_steps: steps that a crash now would lose; None while nothing is durable.
        saves, committed, failed: bases asked for, durable, failed.
        stall_s: seconds the training thread was held up, by cause: ``"capture"`` (copying
            the state, or beginning to), ``"gate"`` (an update waited for a copy),
            ``"back_pressure"`` (no host memory was free), ``"persist"`` (``sync`` only:
            writing).
        written_bytes: bytes made durable.
        persist_s: seconds spent in making bases durable, in whichever thread.
        host_bytes: host memory that was taken for captured state.
        keeper_cpu_s: processor time of the keeper process.
        keeper_restarts: keeper processes that were lost and replaced.
    """

    step: int
    durable_step: int | None
    lag_steps: int | None
    saves: int
    committed: int
    failed: int
    stall_s: dict[str, float]
    written_bytes: int
    persist_s: float
    host_bytes: int
    keeper_cpu_s: float = 0.0
    keeper_restarts: int = 0


def stats_of(step: int, saver: Saver, keepers: Keepers) -> Stats:
    """What they have done so far."""
    keeper = keepers.stats
    durable = keeper.durable_step
    return Stats(
        step=step,
        durable_step=durable,
        lag_steps=None if durable is None else step - durable,
        saves=saver.saves,
        committed=keeper.committed,
        failed=keeper.failed,
        stall_s=dict(saver.stall_s),
        written_bytes=keeper.written_bytes,
        persist_s=keeper.persist_s,
        host_bytes=keepers.pool.touched_bytes if keepers.pool else 0,
        keeper_cpu_s=keeper.cpu_s,
        keeper_restarts=keepers.restarts,
    )
