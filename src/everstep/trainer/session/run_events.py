"""Emits the events of a run: bases, logs, recoveries, keepers, progress (``docs/EVENTS.md``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import PurePath
from typing import Any

from everstep.config import Options
from everstep.events import EventLog, EventStream
from everstep.link import Save
from everstep.restore.start import Recovery
from everstep.seams import Seams
from everstep.seams.fingerprint import process_name
from everstep.seams.progress import log_or_print
from everstep.tiers.options import PEER
from everstep.trainer.attach.keeper import Service
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.participant import Participant
from everstep.trainer.session.footprint import Footprint
from everstep.trainer.session.recoverable import RecoverableSteps
from everstep.trainer.session.stats import Stats, stats_of
from everstep.version import __version__

PROGRESS_S = 2.0
"""Seconds between two events of progress, at first."""
_PROGRESS_COUNT = 2000  # events of progress in each e-fold of a long run
_PROGRESS_MOST_S = 60.0

FIGURES = (
    "durable_step",
    "recoverable_step",
    "recoverable_from",
    "replica_step",
    "interval_steps",
    "step_s",
    "base_cost_s",
    "mtbf_s",
    "stall_s",
    "saves",
    "committed",
    "failed",
    "copies",
    "peered",
    "peered_bytes",
    "held",
    "written_bytes",
    "copied_bytes",
    "log_bytes",
    "log_written_bytes",
    "host_bytes",
    "keeper_cpu_s",
    "keeper_restarts",
    "forecast_bytes_per_day",
)
"""Fields of :class:`~everstep.trainer.session.stats.Stats` in an event of progress."""


class RunEvents(Participant):
    """Emit an event for each change of the bases and the log of this rank.

    Attributes:
        stream: the events.
    """

    def __init__(self, options: Options, seams: Seams, run: PurePath, rank: int) -> None:
        log = [] if seams.events is None else [EventLog(seams.events, run, rank)]
        self.stream = EventStream(seams.clock, rank, [*log, *options.on_event])
        self._options = options
        self._rank = rank
        self._clock = seams.clock
        self._recoverable: RecoverableSteps | None = None
        self._figures: Callable[[int], Stats] | None = None
        self._step = 0
        self._begun_s = seams.clock.monotonic_s()
        self._progress_s = self._begun_s
        self._service: Service | None = None
        self._newest: Save | None = None
        self._by_error = False

    def follow(
        self,
        keepers: Keepers,
        participants: Sequence[Participant],
        recoverable: RecoverableSteps,
        world: int,
        footprint: Footprint,
    ) -> None:
        """Emit the start, and from now on progress.

        Args:
            participants: all participants, for their figures.
            recoverable: newest steps that survive; it comes before this one in ``participants``.
            world: number of ranks.
            footprint: expected sizes.
        """
        self._recoverable = recoverable
        self._figures = partial(stats_of, keepers=keepers, participants=participants)
        options = self._options
        self._emit(
            "started",
            method=options.method_name,
            every=options.every.in_words,
            promise=None if options.promise is None else options.promise.in_words,
            predicted_waste=None if options.auto is None else options.auto.wasted,
            state_bytes=footprint.state_bytes,
            gradient_bytes=footprint.gradients[1],
            world=world,
            process=process_name(),
            version=__version__,
        )

    def start(self, service: Service) -> None:
        """Emit a keeper that has come into service."""
        self.stream.timeline = service.timeline
        before = self._service
        lost = None
        if before is not None and before.keeper is not service.keeper:
            lost = None if before.keeper.lost is None else str(before.keeper.lost)
        if before is None or before.keeper is not service.keeper:
            self._emit("keeper", pid=service.keeper.pid, lost=lost)
        self._service = service
        self._step = service.step

    def recovered(self, recovery: Recovery) -> None:
        """Emit the result of a resume."""
        self._step = recovery.step
        self._emit(
            "recovery",
            source=recovery.source,
            exact=recovery.exact,
            evidence=recovery.evidence,
            base_step=recovery.base_step,
            replayed=recovery.replayed,
            seconds=recovery.seconds,
            load_s=recovery.load_s,
            replay_s=recovery.replay_s,
            size_bytes=recovery.size_bytes,
            notes=list(recovery.notes),
        )

    def base_taken(self, save: Save) -> None:
        """Emit the beginning of a base; its capture and its end follow."""
        # A base that is asked for again is the same one; one taken in place of a failed one is not.
        if self._newest is save:
            return
        self._newest = save
        if not self.stream.has_listeners:
            return
        begun_s = self._clock.monotonic_s()
        self.stream.emit("base_begun", save.step)
        save.staged.add_done_callback(partial(self._captured, save.step, begun_s))
        save.durable.add_done_callback(partial(self._durable, save, begun_s))

    def _captured(self, step: int, begun_s: float, future: Future[None]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.stream.emit("base_captured", step, seconds=self._since(begun_s))

    def _durable(self, save: Save, begun_s: float, future: Future[int]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            words = {"error": type(error).__name__, "message": str(error)}
            self.stream.emit("base_failed", save.step, **words)
            return
        tier = "memory" if save.in_memory else "disk"
        size_bytes = future.result()
        seconds = self._since(begun_s)
        self.stream.emit(
            "base_durable", save.step, tier=tier, seconds=seconds, size_bytes=size_bytes
        )

    def log_on_disk(self, number: int) -> None:
        """Emit the step that the log on disk leads to. Any thread."""
        step = None if self._recoverable is None else self._recoverable.durable_step
        if number > 0 and step is not None:
            self.stream.emit("log_durable", step, tier="disk")

    def log_checked(self, why_not: str) -> None:
        """Emit the reason why updates cannot be logged; empty if they can."""
        self._emit("log_checked", why_not=why_not)

    def base_everywhere(self, step: int) -> None:
        """Emit a base that is in the memory of other nodes. Any thread."""
        self.stream.emit("base_durable", step, tier=PEER)

    def copied(self, place: int, base: int | None, step: int | None) -> None:
        """Emit a base, or a part of the log, that is in a place for copies. Any thread."""
        if self._recoverable is None:
            return
        tier = self._recoverable.name_of(place)
        if base is not None:
            self.stream.emit("base_durable", base, tier=tier)
        if step is not None:
            self.stream.emit("log_durable", step, tier=tier)

    def replica_stopped(self, why: str, for_good: bool) -> None:
        """Emit the end of the keeper's replica. Any thread."""
        self._emit("replica_stopped", message=why, for_good=for_good)

    def step_done(self, step: int) -> None:
        """Emit progress, if it is due."""
        self._step = step
        now_s = self._clock.monotonic_s()
        # Rarer in a long run, so that its event log stays small.
        every_s = (now_s - self._begun_s) / _PROGRESS_COUNT
        every_s = min(_PROGRESS_MOST_S, max(PROGRESS_S, every_s))
        if now_s - self._progress_s >= every_s:
            self._progress_s = now_s
            self._progress()

    def _progress(self) -> None:
        if self._figures is None or not self.stream.has_listeners:
            return
        stats = self._figures(self._step)
        figures = {name: getattr(stats, name) for name in FIGURES}
        self._emit("progress", **figures)

    def leave(self) -> None:
        """Note that an error has ended training."""
        self._by_error = True

    def close(self) -> None:
        """Emit the last figures; print the prediction of ``method="auto"`` next to them."""
        self._progress()
        self._emit("closed", by_error=self._by_error)
        seconds = self._clock.monotonic_s() - self._begun_s
        auto = self._options.auto
        if self._figures is None or auto is None or auto.wasted is None or seconds <= 0:
            return
        stalled = sum(self._figures(self._step).stall_s.values()) / seconds
        log_or_print(
            f"auto: {self._options.method_name}: predicted {auto.wasted:.2%} of "
            f"the time wasted, failures included; stalled {stalled:.2%} in this start",
            level=logging.INFO if self._rank == 0 else logging.DEBUG,
        )

    def _emit(self, kind: str, **details: Any) -> None:
        self.stream.emit(kind, self._step, **details)

    def _since(self, begun_s: float) -> float:
        return round(self._clock.monotonic_s() - begun_s, 6)
