"""Chooses the participants of a method and builds them, after the budgets were checked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.capture import Lane, UpdateHooks
from everstep.capture.cuda import DeviceLane
from everstep.capture.lane import CpuLane
from everstep.config import Options
from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
from everstep.link import BackgroundChannel
from everstep.seams import Clock
from everstep.state.ranks import refuse_divergent_updates
from everstep.state.training_state import State
from everstep.tiers import PeerOptions
from everstep.trainer.attach.keeper import Service
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.attach.terms import KeeperTerms
from everstep.trainer.base import Saver
from everstep.trainer.budget import check_multistep_budget, free_bytes
from everstep.trainer.checks import (
    FirstBatches,
    refuse_lossy_replicas,
    refuse_method,
    warn_of_unsaved_residuals,
)
from everstep.trainer.job import RunPlace, refuse_single_base_with_peer
from everstep.trainer.log import LoggableUpdates, NonFiniteCheck, Recorder
from everstep.trainer.multistep import MultistepDriver, replayable_gradient_bytes, window_end
from everstep.trainer.participant import BaseSource, Participant, TrainingContext
from everstep.trainer.refusals import Refusals
from everstep.trainer.schedule import GivenPlan, ScheduledSaver, given_plan
from everstep.trainer.session.cadence import Cadence
from everstep.trainer.session.footprint import Footprint, print_footprint
from everstep.trainer.session.promise import safe_steps
from everstep.trainer.session.replica_bases import ReplicaBases
from everstep.trainer.session.run_events import RunEvents


@dataclass(frozen=True, slots=True)
class Components:
    """Components of the training process.

    Attributes:
        run_id: id of the run folder.
        source: participant that bases are requested from.
        participants: all participants, in the order in which they handle a step mark: the log
            first, the interval after everything that it measures.
        events: emits the events of this rank.
        refusals: what becomes of updates that the method cannot repeat.
        nonfinite: check of recorded gradients; None without a log.
        footprint: expected sizes, and the limits that were announced.
    """

    options: Options
    run: PurePath
    run_id: str
    state: State
    channel: BackgroundChannel
    ring: ChunkRing
    lane: Lane
    keepers: Keepers
    saver: Saver
    source: BaseSource
    participants: Sequence[Participant]
    events: RunEvents
    updates: UpdateHooks
    cadence: Cadence
    refusals: Refusals
    nonfinite: NonFiniteCheck | None
    footprint: Footprint

    @property
    def reads_marks(self) -> bool:
        """True if a participant needs a survey of the state at each step mark."""
        return any(one.reads_marks for one in self.participants)

    def start(self, service: Service) -> None:
        """Begin to use a keeper."""
        # The saver before the log: the memory of the old keeper is released first.
        for participant in reversed(self.participants):
            participant.start(service)

    def close(self, *, stay: bool = False) -> None:
        """Release all components.

        Args:
            stay: True to leave the keeper with its memory, as if this process had crashed.
        """
        # In this order: hooks must not use the lane, and the lane copies into the keeper's memory.
        # If one raises an error, the rest is closed all the same: its threads hold memory.
        if stay:
            self.events.leave()
        with contextlib.ExitStack() as rest:
            rest.callback(self.events.stream.close)
            rest.callback(self.ring.close)
            rest.callback(self.keepers.close, stay=stay)
            rest.callback(self.lane.close)
            for participant in reversed(self.participants):
                rest.callback(participant.close)
            rest.callback(self.updates.close)


def build_components(options: Options, place: RunPlace, state: State) -> Components:
    """Build all components, and print the lines of the start.

    Raises:
        OutOfSpaceError: A budget is too small.
        UnsupportedStateError, OptionError: The log or a replica cannot repeat some updates.
        StorageError: The folder cannot be used.
    """
    run = place.run
    seams = place.seams
    peers = place.peers
    refuse_single_base_with_peer(peers, state.ranks, options)
    footprint = Footprint.of(options, place, state)
    memory = footprint.memory
    limits = footprint.limits
    given = given_plan(options.method.plan, seams.filesystem, state)
    refuse_method(options, state)
    # After the budgets were checked: a start that they refuse leaves no run folder.
    run_id = place.open_run()
    footprint = _agreed(footprint, options, place)
    events = RunEvents(options, seams, run, state.ranks.rank)
    channel = _channel(options, seams.clock, events)
    ring = ChunkRing(CHUNKS, WRITERS)
    lane: Lane = seams.lane() if seams.lane else DeviceLane(CpuLane(), options.budget.device_bytes)
    # Filled below. The keepers and the saver hold this very list.
    participants: list[Participant] = []
    terms = KeeperTerms(
        options, seams, run, run_id, memory.arena_bytes, memory.replica_bytes, state.ranks
    )
    keepers = Keepers(terms, channel, ring, participants)
    if peers is not None or options.method.in_memory:
        _send_to_peers(terms, peers or PeerOptions(), footprint)
    refusals = Refusals(channel, None if options.auto is None else events.log_checked)
    context = TrainingContext(options, run, state, lane, channel, seams.clock, refusals)
    source: BaseSource = (saver := _saver_of(context, participants, given, footprint))
    recorder = None
    if options.logs:
        refuse_lossy_replicas(state, peers, place.tiers, options.method.log)
        limits = limits.on_disk(
            options,
            options.keep.bases_max + footprint.bounds.beside,
            footprint.bounds.disk_bytes,
            lambda: free_bytes(seams.filesystem, run) // state.ranks.world,
        )
        terms.log_limits = limits
        replica = None
        if options.has_replica:
            source = replica = ReplicaBases(context, saver)
        recorder = Recorder(context, saver, log_bytes_max=limits.memory_bytes, replica=replica)
        recorder.memory.waits_for_peers = peers is not None and peers.log != "none"
        participants += [recorder] if replica is None else [recorder, replica]
    if options.is_multistep:
        footprint = _with_window(footprint, options, place, state)
        log = None if recorder is None else recorder.memory
        source = MultistepDriver(context, saver, window_end(place.job), log)
        participants.append(source)
    cadence = Cadence(
        context,
        saver,
        keepers,
        recorder,
        base_bytes=max(1, footprint.shape.size_bytes - footprint.static_bytes),
        limits=limits,
    )
    safe, gate = safe_steps(context, keepers, saver, recorder, participants, place)
    participants += [saver, cadence, safe, *gate, *_checks(options, state, events), events]
    components = Components(
        options=options,
        run=run,
        run_id=run_id,
        state=state,
        channel=channel,
        ring=ring,
        lane=lane,
        keepers=keepers,
        saver=saver,
        source=source,
        participants=participants,
        events=events,
        updates=UpdateHooks(refuse_divergent_updates(state, saver.gate)),
        cadence=cadence,
        refusals=refusals,
        nonfinite=None if recorder is None else recorder.nonfinite,
        footprint=footprint,
    )
    warn_of_unsaved_residuals(state)
    print_footprint(footprint, options, place, state, limits, in_process=terms.in_process)
    events.follow(keepers, participants, safe, state.ranks.world, footprint)
    return components


def _send_to_peers(terms: KeeperTerms, peers: PeerOptions, footprint: Footprint) -> None:
    memory = footprint.memory
    terms.send_to_peer(memory.own_bytes + memory.peer_bytes, peers, footprint.peer_log_bytes)


def _checks(options: Options, state: State, events: RunEvents) -> list[Participant]:
    found: list[Participant] = [FirstBatches(state)]
    if options.auto is not None and not options.logs:
        found.append(LoggableUpdates(state, events.log_checked, options.auto.why_not_logged))
    return found


def _channel(options: Options, clock: Clock, events: RunEvents) -> BackgroundChannel:
    timeout_s = options.progress_timeout_s
    return BackgroundChannel(
        options.on_failure, clock, progress_timeout_s=timeout_s, events=events.stream
    )


def _agreed(footprint: Footprint, options: Options, place: RunPlace) -> Footprint:
    """Return the footprint with the decision of all ranks whether captures between bases are kept:
    one that a rank lacks is of no use to the others.

    Raises:
        DeadlineError: another rank does not construct its Checkpointer.
    """
    if place.job is None or not options.is_scheduled:
        return footprint
    votes = place.job.exchange("plan the memory of captures", {"parks": footprint.parks})
    return replace(footprint, parks=all(vote["parks"] for vote in votes))


def _with_window(
    footprint: Footprint, options: Options, place: RunPlace, state: State
) -> Footprint:
    """Return the footprint with the gradients that a multi-step base copies.

    Raises:
        OutOfSpaceError: A base in a fixed number of parts does not fit.
    """
    if options.logs:  # which has the gradients
        return footprint
    elements, gradient_bytes = footprint.gradients
    if place.job is not None:  # gradients of entries that other ranks write are not copied
        gradient_bytes = replayable_gradient_bytes(state, footprint.shape)
    host_bytes = footprint.memory.host_bytes
    check_multistep_budget(options, host_bytes, footprint.state_bytes, gradient_bytes)
    return replace(footprint, gradients=(elements, gradient_bytes))


def _saver_of(
    context: TrainingContext,
    participants: Sequence[Participant],
    given: GivenPlan | None,
    footprint: Footprint,
) -> Saver:
    if context.options.is_scheduled:
        return ScheduledSaver(context, participants, given, parks=footprint.parks)
    return Saver(context, participants)
