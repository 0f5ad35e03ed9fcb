"""What checkpointing has cost and done."""

from __future__ import annotations

import textwrap
from collections import deque
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from everstep.link.save import Save
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base.saver import Saver
from everstep.trainer.log.recorder import Recorder
from everstep.trainer.multistep.multistep import Multistep
from everstep.trainer.multistep.multistep_stats import MultistepReport
from everstep.trainer.schedule.schedule_stats import ScheduleStats
from everstep.trainer.schedule.scheduled_saver import ScheduledSaver
from everstep.trainer.session.cadence import Cadence

__all__ = [
    "RecoverableSteps",
    "Stats",
    "stats_of",
]

_LINE_CHARS = 100


@dataclass(frozen=True, slots=True, repr=False)
class Stats:
    """What checkpointing has cost and done since construction.

    Attributes:
        step: the user's step now.
        durable_step: newest step that is on disk: of a whole base, or of the log on disk after one.
            It is what comes back if keeper and training process are both gone, as with their
            machine; None while none is known.
        lag_steps: steps that this would lose: ``step - durable_step``; None while that is None.
        recoverable_step: newest step that comes back if this process alone dies now: on disk, or in
            its keeper's memory (a base, or the log after one). ``step - recoverable_step`` is what
            that would lose; None while none is known. Of several ranks as far as this one knows.
        saves, committed, failed: bases asked for, durable, failed (not copies in other tiers);
            ``failed`` counts attempts to replace a lost keeper that came to nothing, too.
        held: bases that live in the memory of keepers only, and were whole there.
        stall_s: seconds the training thread was held up, by cause: ``"capture"`` (copying the
            state, or beginning to; where a log begins, until the keeper has all of the base),
            ``"gate"`` (an update waited for a copy), ``"gradients"`` (training waited for copies
            of gradients; only with bases over several steps), ``"back_pressure"`` (no host memory
            was free), ``"persist"`` (``sync`` only: writing), ``"keeper"`` (a keeper that was
            lost was replaced).
        written_bytes: bytes made durable.
        linked_bytes: bytes of static entries that bases link to instead of writing them again; with
            ``static=`` it stays 0 where the file system refuses hard links.
        persist_s: seconds spent in making bases durable, in whichever thread.
        host_bytes: host memory that was taken for captured state, the log (both with their plain
            data) and a replica.
        keeper_cpu_s: processor time of the keeper process.
        keeper_restarts: keeper processes that were lost and replaced.
        replica_step: step of the state that the keeper's replica has; None while none follows.
        copies, copied_bytes: copies of bases that were made in other tiers.
        copied_steps, copied_log_bytes: steps of the log that were copied there, of one rank and
            timeline; and as how much.
        copy_log_missed: steps of the log that will not be: they were let go before, as the link is
            too slow for them.
        peered, peered_bytes: bases that were sent whole to the memory of another node.
        peers_passed_over: bases that were not, because the next ones came too soon for the link.
        peer_log_step: newest step of this timeline whose log the memory of another node holds;
            None: of none. What lies between it and ``step`` is what a lost node may cost.
        peer_log_missed: steps of the log that will not get there; those behind them, up to the next
            base, are of no use there.
        multistep: bases over several steps; None for methods without them.
        log_bytes: bytes that the gradient log has taken into host memory.
        log_written_bytes: bytes of the log that were written to disk.
        log_batch_steps: steps of the segment of the log that is written next; None: none is.
        log_steps_in_memory: steps that should have gone to disk with the log, and stayed in
            memory: for the daily write budget, or from a segment that could not be written to the
            next base.
        log_holes: updates that could not be recorded; behind each a base is taken.
        interval_steps: from base to base; None where it is a time, or not known yet.
        step_s: seconds of a step without what bases add; None before there was one.
        mtbf_s: seconds of training between two failures, as ``every="auto"`` believes.
        schedule: plans of captures, and what became of them; None for other methods.
        forecast_bytes_per_day: what bases and log write to disk in a day at this pace; None
            as long as that is not known.
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
    mtbf_s: float | None = None
    forecast_bytes_per_day: float | None = None
    schedule: ScheduleStats | None = None
    recoverable_step: int | None = None

    def __repr__(self) -> str:
        """Show what there is to tell: nothing that is zero, empty or not known."""
        return "\n".join(textwrap.wrap(_shown(self), _LINE_CHARS, subsequent_indent="    "))


def _shown(value: Any) -> str:
    if is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        told = {name: one for name, one in named.items() if name == "step" or one}
        inside = ", ".join(f"{name}={_shown(one)}" for name, one in told.items())
        return f"{type(value).__name__}({inside})"
    if isinstance(value, tuple):  # of each of the last steps
        return f"<{len(value)}>"
    if isinstance(value, dict):
        if any(map(is_dataclass, value.values())):  # of each tensor
            return f"<{len(value)}>"
        pairs = (f"{key!r}: {_shown(one)}" for key, one in value.items() if one)
        return f"{{{', '.join(pairs)}}}"
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


def stats_of(
    step: int,
    saver: Saver,
    keepers: Keepers,
    recorder: Recorder | None,
    cadence: Cadence,
    multistep: Multistep | None,
    recoverable: RecoverableSteps,
) -> Stats:
    """What they have done so far."""
    keeper = keepers.stats
    forecast = cadence.forecast
    durable = recoverable.durable_step
    return Stats(
        step=step,
        durable_step=durable,
        lag_steps=None if durable is None else step - durable,
        recoverable_step=recoverable.step,
        saves=saver.saves,
        committed=keeper.committed,
        failed=keeper.failed + keepers.attempts.failed,
        stall_s=dict(saver.stall_s),
        written_bytes=keeper.written_bytes,
        linked_bytes=keeper.linked_bytes,
        persist_s=keeper.persist_s,
        host_bytes=keepers.host_bytes,
        keeper_cpu_s=keeper.cpu_s,
        keeper_restarts=keepers.restarts,
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
        multistep=None if multistep is None else multistep.stats.report(),
        log_bytes=0 if recorder is None else recorder.stats.record_bytes,
        log_written_bytes=keeper.log_bytes,
        log_batch_steps=keeper.log_batch_steps or None,
        log_steps_in_memory=0 if recorder is None else recorder.disk.steps_in_memory,
        log_holes=0 if recorder is None else recorder.stats.holes,
        interval_steps=cadence.interval_steps,
        step_s=cadence.step_s,
        mtbf_s=cadence.mtbf_s,
        forecast_bytes_per_day=None if forecast is None else forecast.total_bytes,
        schedule=saver.scheduler.stats() if isinstance(saver, ScheduledSaver) else None,
    )


_RECENT = 4  # one is being copied; those before it are whole, or have failed


class RecoverableSteps:
    """Answers what the death of the training process, or of its machine, would cost now."""

    def __init__(self, keepers: Keepers, saver: Saver, recorder: Recorder | None) -> None:
        self._keepers = keepers
        self._saver = saver
        self._recorder = recorder
        self._recent: deque[tuple[Keeper | None, Save]] = deque(maxlen=_RECENT)
        self._restored_from: int | None = None

    def restored(self, durable_step: int | None) -> None:
        """The state was restored; what was captured of the timeline before is another history.

        Args:
            durable_step: of the base that it was restored from; None: it is on no disk, or there
                was none.
        """
        self._restored_from = durable_step
        self._recent.clear()

    def taken(self, save: Save) -> None:
        """A base was captured, or the keeper was asked for one."""
        self._recent.append((self._keepers.current, save))

    @property
    def durable_step(self) -> int | None:
        """The newest step that is on disk; None: none is known."""
        on_disk = None if self._recorder is None else self._recorder.disk.step
        return _newest(self._restored_from, self._keepers.stats.durable_step, on_disk)

    @property
    def step(self) -> int | None:
        """The newest step that is left if this process alone dies now: on disk, or in the memory of
        its keeper; None: none is known."""
        keeper = self._keepers.current
        durable_step = self.durable_step
        if not isinstance(keeper, RemoteKeeper) or keeper.lost is not None:
            return durable_step  # a keeper that is a thread of this process dies with it
        led = None if self._recorder is None else self._recorder.led_step
        parked = self._saver.parked_step if isinstance(self._saver, ScheduledSaver) else None
        whole = [
            save.step for held_by, save in self._recent if held_by is keeper and _is_whole(save)
        ]
        return _newest(durable_step, led, parked, *whole)


def _is_whole(save: Save) -> bool:
    staged = save.staged
    return staged.done() and not staged.cancelled() and not staged.exception() and not save.is_lost


def _newest(*steps: int | None) -> int | None:
    return max((step for step in steps if step is not None), default=None)
