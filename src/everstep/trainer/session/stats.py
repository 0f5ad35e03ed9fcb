"""Costs and results of checkpointing (``ckpt.stats()``)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.multistep import MultistepReport
from everstep.trainer.participant import Participant
from everstep.trainer.schedule import ScheduleStats

_LINE_CHARS = 100


@dataclass(frozen=True, slots=True, repr=False)
class Stats:
    """Costs and results of checkpointing since construction.

    Attributes:
        step: current step.
        durable_step: newest step on disk, from a base or from the log on disk. It can be restored
            even if keeper and training process are lost, as with their machine. None if unknown.
        lag_steps: steps that would be lost then, ``step - durable_step``; None if unknown.
        recoverable_step: newest step that can be restored if only this process dies: on disk, or in
            the keeper's memory (a base, or the log after one). None if unknown. With several
            ranks, according to this rank.
        recoverable_from: newest step that can be restored exactly from each place of ``tiers=``
            alone, by its name (``"peer"`` for the memory of other nodes). A place without a base of
            this process is missing.
        saves: bases requested.
        committed: bases that became durable, without copies in other tiers.
        failed: bases that failed, without copies in other tiers, and failed attempts to replace a
            lost keeper.
        held: bases that are complete in the memory of keepers only.
        stall_s: seconds that the training thread was delayed, by cause: ``"capture"`` (copying the
            state or starting a copy; at the start of a log, until the keeper has the complete
            base), ``"gate"`` (an update waited for a copy), ``"gradients"`` (training waited for
            copies of gradients; only with multi-step bases), ``"back_pressure"`` (no host memory
            was free), ``"persist"`` (writing; only with ``sync``), ``"keeper"`` (a lost keeper was
            replaced), ``"log"`` (a step was recorded, or an update waited for the copy of its
            gradients; only with a log), ``"promise"`` (a step was not safe yet; only with
            ``lose_at_most``).
        written_bytes: bytes made durable.
        linked_bytes: bytes of static entries that bases link to instead of writing them again. With
            ``static=`` it stays 0 if the file system does not support hard links.
        persist_s: seconds spent on making bases durable, in any thread.
        host_bytes: host memory in use for captured state, the log (both with their plain data) and
            a replica.
        keeper_cpu_s: processor time of the keeper process in seconds.
        keeper_restarts: number of lost keeper processes that were replaced.
        replica_step: step of the keeper's replica; None without one.
        copies: copies of bases made in other tiers.
        copied_bytes: bytes of these copies.
        copied_steps: steps of the log copied to other tiers, of this rank and timeline.
        copied_log_bytes: bytes of these steps.
        copy_log_missed: steps of the log that will never be copied, because the link was too slow
            and their memory was needed.
        peered: bases sent completely to the memory of another node.
        peered_bytes: bytes of these bases.
        peers_passed_over: bases that were not sent, because the next base came too soon for the
            link.
        peer_log_step: newest step of this timeline whose log is in the memory of another node; None
            without one. The steps from there to ``step`` are lost with this node.
        peer_log_missed: steps of the log that will never be in the memory of another node. The
            steps after them are of no use there until the next base.
        multistep: statistics of multi-step bases; None for other methods.
        log_bytes: bytes of the gradient log recorded in host memory.
        log_written_bytes: bytes of the log written to disk.
        log_batch_steps: number of steps in the next segment of the log; None without one.
        log_steps_in_memory: steps that should have been written with the log but stayed in memory,
            because of the daily write budget, or from a failed segment to the next base.
        log_holes: updates that could not be recorded. A base is taken after each.
        interval_steps: steps between two bases; None if given in seconds or not known yet.
        step_s: seconds of a step without the cost of bases; None before the first.
        base_cost_s: seconds of training that a base costs, as estimated: the stall, and what the
            steps beside it take longer; None before the first.
        mtbf_s: estimated seconds of training between two failures (``every="auto"``).
        schedule: plans of captures and their results; None for other methods.
        forecast_bytes_per_day: bytes that bases and log write to disk in a day at the current
            pace; None if not known yet.
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
    linked_bytes: int = 0
    keeper_cpu_s: float = 0.0
    keeper_restarts: int = 0
    replica_step: int | None = None
    copies: int = 0
    copied_bytes: int = 0
    copied_steps: int = 0
    copied_log_bytes: int = 0
    copy_log_missed: int = 0
    peered: int = 0
    peered_bytes: int = 0
    peers_passed_over: int = 0
    held: int = 0
    peer_log_step: int | None = None
    peer_log_missed: int = 0
    multistep: MultistepReport | None = None
    log_bytes: int = 0
    log_written_bytes: int = 0
    log_batch_steps: int | None = None
    log_steps_in_memory: int = 0
    log_holes: int = 0
    interval_steps: int | None = None
    step_s: float | None = None
    base_cost_s: float | None = None
    mtbf_s: float | None = None
    forecast_bytes_per_day: float | None = None
    schedule: ScheduleStats | None = None
    recoverable_step: int | None = None
    recoverable_from: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Show the fields that are not zero, empty or unknown."""
        return "\n".join(textwrap.wrap(_shown(self), _LINE_CHARS, subsequent_indent="    "))


def _shown(value: Any) -> str:
    if is_dataclass(value):
        named = {one.name: getattr(value, one.name) for one in fields(value)}
        shown = {name: one for name, one in named.items() if name == "step" or one}
        inside = ", ".join(f"{name}={_shown(one)}" for name, one in shown.items())
        return f"{type(value).__name__}({inside})"
    if isinstance(value, tuple):  # of each of the last steps
        return f"<{len(value)}>"
    if isinstance(value, dict):
        if any(map(is_dataclass, value.values())):  # of each tensor
            return f"<{len(value)}>"
        pairs = (f"{key!r}: {_shown(one)}" for key, one in value.items() if one)
        return f"{{{', '.join(pairs)}}}"
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


def stats_of(step: int, keepers: Keepers, participants: Sequence[Participant]) -> Stats:
    """Collect the statistics of the keeper and of all participants."""
    keeper = keepers.stats
    figures: dict[str, Any] = {}
    for participant in participants:
        figures |= participant.figures()
    durable = figures["durable_step"]
    return Stats(
        step=step,
        lag_steps=None if durable is None else step - durable,
        committed=keeper.committed,
        failed=keeper.failed + keepers.attempts.failed,
        written_bytes=keeper.written_bytes,
        linked_bytes=keeper.linked_bytes,
        persist_s=keeper.persist_s,
        host_bytes=keepers.host_bytes,
        keeper_cpu_s=keeper.cpu_s,
        keeper_restarts=keepers.attempts.replaced,
        replica_step=keepers.replica_step,
        copies=keeper.copied,
        copied_bytes=keeper.copied_bytes,
        copied_steps=keeper.copied_steps,
        copied_log_bytes=keeper.copied_log_bytes,
        copy_log_missed=keeper.copy_missed,
        peered=keeper.peered,
        peered_bytes=keeper.peered_bytes,
        peers_passed_over=keeper.peers_passed_over,
        held=keeper.held,
        peer_log_step=keepers.peer_log_step,
        peer_log_missed=keeper.peer_missed,
        log_written_bytes=keeper.log_bytes,
        log_batch_steps=keeper.log_batch_steps or None,
        **figures,
    )
