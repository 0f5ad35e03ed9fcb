"""Builds the components of the training process, and prints what they will take.

:func:`build_components` computes and checks the budgets, opens the run folder, makes the
components, and prints the lines of the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from everstep.capture.lanes.devices import DeviceLane
from everstep.capture.lanes.lane import CpuLane, Lane
from everstep.capture.update_hooks import UpdateHooks
from everstep.config.options import Options
from everstep.errors import OptionError
from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
from everstep.link.channel import BackgroundChannel
from everstep.link.recordable import refuse_optimizers
from everstep.seams.clock import Clock
from everstep.seams.stderr import print_line
from everstep.state.ranks.ddp import refuse_divergent_updates
from everstep.state.ranks.log_shares import bytes_logged_elsewhere, parameter_logged_twice
from everstep.state.survey.survey import Shape
from everstep.state.training_state import State
from everstep.tiers.options import PeerOptions, TierOptions
from everstep.trainer.attach.keeper import Service
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.base.saver import Saver
from everstep.trainer.budget.disk import (
    Bounds,
    bounds_of,
    check_disk_budget,
    free_bytes,
    log_step_bytes,
)
from everstep.trainer.budget.first_update import shape_after_first_update
from everstep.trainer.budget.host_memory import (
    MemoryPlan,
    base_memory_bytes,
    check_multistep_budget,
    gradients_of,
    mark_memory_bytes,
    peer_log_bytes,
    plan_memory,
)
from everstep.trainer.budget.log_limits import LogLimits
from everstep.trainer.budget.startup_notice import (
    copies_notice,
    disk_notice,
    marks_notice,
    startup_notice,
)
from everstep.trainer.checks.first_batches import FirstBatches
from everstep.trainer.checks.keeper_replay import (
    require_replayable,
    require_replicable,
    why_inexact,
)
from everstep.trainer.job.peer_nodes import memory_notice, peer_notice, refuse_single_base_with_peer
from everstep.trainer.job.place import RunPlace
from everstep.trainer.log.nonfinite import NonFiniteCheck
from everstep.trainer.log.recorder import Recorder
from everstep.trainer.log.residuals import residual_bytes, warn_of_unsaved_residuals
from everstep.trainer.multistep.driver import MultistepDriver
from everstep.trainer.multistep.ending import window_end
from everstep.trainer.multistep.plan import replayable_gradient_bytes
from everstep.trainer.participant import BaseSource, Participant
from everstep.trainer.schedule.saver import ScheduledSaver
from everstep.trainer.session.cadence import Cadence
from everstep.trainer.session.replica_bases import ReplicaBases
from everstep.trainer.session.stats import RecoverableSteps

__all__ = ["Components", "build_components"]


@dataclass(frozen=True, slots=True)
class Components:
    """Components of the training process.

    Attributes:
        run_id: id of the run folder.
        source: participant that bases are requested from.
        participants: all participants, in the order in which they handle a step mark: the log
            first, the interval after everything that it measures.
        nonfinite: check of recorded gradients; None without a log.
        bounds: announced upper bounds.
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
    updates: UpdateHooks
    cadence: Cadence
    nonfinite: NonFiniteCheck | None
    bounds: Bounds

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
        self.updates.close()
        for participant in self.participants:
            participant.close()
        self.lane.close()
        self.keepers.close(stay=stay)
        self.ring.close()


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Expected sizes of the state of this rank, after the first update of each optimizer.

    Attributes:
        shape: expected shape.
        is_complete: False if an optimizer may create further state that cannot be predicted.
        state_bytes: host memory of a base.
        plain_bytes: bytes of plain data.
        gradients: number of parameter elements, and bytes of the gradients of a step.
        mark_bytes: host memory of a step mark.
        residual_bytes: bytes of error feedback in each step mark.
    """

    shape: Shape
    is_complete: bool
    state_bytes: int
    plain_bytes: int
    gradients: tuple[int, int]
    mark_bytes: int
    residual_bytes: int

    @classmethod
    def of(cls, state: State, options: Options) -> _Sizes:
        """Measure the state and predict the entries that optimizers will add."""
        shape, is_complete = shape_after_first_update(state, state.survey().shape)
        elements, gradient_bytes = gradients_of(state.optimizers.values())
        if options.logs:
            gradient_bytes -= bytes_logged_elsewhere(state)
        return cls(
            shape=shape,
            is_complete=is_complete,
            state_bytes=base_memory_bytes(shape),
            plain_bytes=sum(shape.objects_bytes.values()),
            gradients=(elements, gradient_bytes),
            mark_bytes=mark_memory_bytes(shape),
            residual_bytes=residual_bytes(state) if options.logs else 0,
        )

    def recorded_bytes(self, options: Options) -> int:
        """Return the bytes that a log records in each step; compressed gradients count as 0."""
        return self.residual_bytes + (0 if options.method.log == "topk" else self.gradients[1])


@dataclass(frozen=True, slots=True)
class _Plan:
    """Sizes and limits, computed and checked before the run folder is opened.

    Attributes:
        sizes: expected sizes of the state.
        memory: shares of the host memory.
        bounds: upper bounds for all places.
        limits: limits of the log, as far as they follow from host memory.
        peer_log_bytes: memory here for logs of other ranks; None if no log is sent to peers.
    """

    sizes: _Sizes
    memory: MemoryPlan
    bounds: Bounds
    limits: LogLimits
    peer_log_bytes: int | None

    @classmethod
    def of(
        cls,
        options: Options,
        run: PurePath,
        state: State,
        peers: PeerOptions | None,
        places: Sequence[TierOptions],
    ) -> _Plan:
        """Compute all sizes and check the budgets.

        Raises:
            OutOfSpaceError: A budget is too small.
        """
        sizes = _Sizes.of(state, options)
        memory = plan_memory(
            options,
            state.ranks,
            peers,
            state_bytes=sizes.state_bytes,
            step_bytes=sizes.gradients[1] + sizes.mark_bytes,
        )
        bounds = bounds_of(
            options,
            sizes.shape,
            state.ranks,
            places,
            host_bytes=memory.arena_bytes + memory.replica_bytes + memory.own_bytes,
            peer_bytes=memory.peer_bytes,
        )
        on_disk = options.log_on_disk
        recorded_bytes = sizes.recorded_bytes(options)
        check_disk_budget(
            options,
            run,
            bounds.base_bytes,
            beside=bounds.beside,
            other_bytes=bounds.other_bytes if on_disk else 0,
            step_bytes=log_step_bytes(sizes.shape, recorded_bytes) if on_disk else 0,
        )
        limits = LogLimits()
        if options.logs:
            limits = LogLimits.of(memory.host_bytes, memory.arena_bytes, sizes.state_bytes)
            limits.check(sizes.mark_bytes)
        peer_log = None
        if options.logs and peers is not None and peers.log != "none":
            peer_log = peer_log_bytes(state.ranks, memory.peer_bytes, bounds.base_bytes)
        return cls(sizes, memory, bounds, limits, peer_log)


def build_components(options: Options, place: RunPlace, state: State) -> Components:
    """Build all components, and print the lines of the start.

    Raises:
        OutOfSpaceError: A budget is too small.
        UnsupportedStateError, OptionError: The log or a replica cannot repeat some updates.
        StorageError: The folder cannot be used.
    """
    run = place.run
    seams = place.seams
    job = place.job
    peers = place.peers
    places = place.tiers
    if not options.method.in_memory:
        refuse_single_base_with_peer(peers, state.ranks, options.keep)
    plan = _Plan.of(options, run, state, peers, places)
    memory = plan.memory
    limits = plan.limits
    run_id = place.open_run()
    clock = seams.clock
    channel = BackgroundChannel(
        options.on_failure, clock, progress_timeout_s=options.progress_timeout_s
    )
    ring = ChunkRing(CHUNKS, WRITERS)
    lane: Lane = seams.lane() if seams.lane else DeviceLane(CpuLane())
    participants: list[Participant] = []
    keepers = Keepers(
        options,
        seams,
        run,
        run_id,
        channel,
        ring,
        memory.arena_bytes,
        memory.replica_bytes,
        state.ranks,
        participants,
    )
    if peers is not None or options.method.in_memory:
        keepers.send_to_peer(
            memory.own_bytes + memory.peer_bytes, peers or PeerOptions(), plan.peer_log_bytes
        )
    kind = ScheduledSaver if options.is_scheduled else Saver
    saver = kind(options, run, state, lane, channel, clock, participants)
    source: BaseSource = saver
    recorder = None
    if options.logs:
        refuse_optimizers(state, options.method.log)
        _refuse_lossy_replicas(state, peers, places, options.method.log)
        limits = limits.on_disk(
            options,
            options.keep + plan.bounds.beside,
            plan.bounds.disk_bytes,
            lambda: free_bytes(seams.filesystem, run) // state.ranks.world,
        )
        keepers.log_limits = limits
        replica = None
        if options.has_replica:
            source = replica = _make_replica_bases(state, options, saver, channel, clock)
        recorder = Recorder(
            options,
            run,
            state,
            lane,
            channel,
            clock,
            saver=saver,
            log_bytes_max=limits.memory_bytes,
            replica=replica,
        )
        recorder.memory.waits_for_peers = peers is not None and peers.log != "none"
        participants += [recorder] if replica is None else [recorder, replica]
    gradients = plan.sizes.gradients
    if options.is_multistep:
        require_replayable(state)
        if job is not None:  # gradients of entries that other ranks write are not copied
            gradients = gradients[0], replayable_gradient_bytes(state, plan.sizes.shape)
        check_multistep_budget(options, memory.host_bytes, plan.sizes.state_bytes, gradients[1])
        source = multistep = MultistepDriver(
            options, state, saver, lane, channel, clock, window_end(job)
        )
        participants.append(multistep)
    cadence = Cadence(
        options,
        run,
        saver,
        keepers,
        recorder,
        clock,
        base_bytes=max(1, plan.sizes.shape.size_bytes - _static_bytes(options, plan)),
        limits=limits,
        alone=state.ranks.world == 1,
    )
    participants += [saver, cadence, RecoverableSteps(keepers, participants), FirstBatches(state)]
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
        updates=UpdateHooks(refuse_divergent_updates(state, saver.gate)),
        cadence=cadence,
        nonfinite=None if recorder is None else recorder.nonfinite,
        bounds=plan.bounds,
    )
    warn_of_unsaved_residuals(state)
    ranks = state.ranks
    name = str(run) if ranks.world == 1 else f"{run}: rank {ranks.rank} of {ranks.world}"
    print_line(_first_notice(options, name, state, plan, gradients))
    if on_disk := disk_notice(seams.filesystem, run, options, plan.bounds, limits, ranks):
        print_line(f"everstep: {name}: {on_disk}")
    for notice in _further_notices(options, state, plan, components, peers, places):
        print_line(f"everstep: {name}: {notice}")
    return components


def _static_bytes(options: Options, plan: _Plan) -> int:
    """Return the bytes of static entries that bases link to; multi-step bases do not link."""
    return 0 if options.is_multistep else plan.sizes.shape.static_bytes


def _first_notice(
    options: Options, name: str, state: State, plan: _Plan, gradients: tuple[int, int]
) -> str:
    return startup_notice(
        options,
        name,
        plan.sizes.shape.size_bytes,
        plan.memory.host_bytes,
        gradients,
        disk_bytes=plan.bounds.disk_bytes,
        memory_bytes=plan.sizes.state_bytes,
        plain_bytes=plan.sizes.plain_bytes,
        residual_bytes=plan.sizes.residual_bytes,
        static_bytes=_static_bytes(options, plan),
        is_all=plan.sizes.is_complete,
        parks=state.ranks.world == 1 and not options.method.in_memory,
    )


def _further_notices(
    options: Options,
    state: State,
    plan: _Plan,
    components: Components,
    peers: PeerOptions | None,
    places: Sequence[TierOptions],
) -> Iterator[str]:
    """Yield the lines of the start about the log, copies, peers, and the method's restrictions."""
    ranks = state.ranks
    in_memory = options.method.in_memory
    recorded_bytes = plan.sizes.recorded_bytes(options)
    if options.logs and (marked := marks_notice(plan.sizes.shape, recorded_bytes)):
        yield marked
    if places:
        yield copies_notice(plan.bounds, places, ranks.world, recorded_bytes)
    if in_memory:
        yield memory_notice(ranks, options.method.disk_every, plan.memory.own_bytes)
    if peers is not None and ranks.nodes:
        yield peer_notice(
            peers, ranks, plan.memory.peer_bytes, plan.peer_log_bytes, at_once=in_memory
        )
    alone = ranks.world == 1
    if options.is_scheduled and not in_memory and not (alone and components.keepers.in_process):
        where = "without a keeper process" if alone else "with several ranks"
        yield f"{where}, captures between bases are not kept: none is taken"
    computes = options.is_multistep and not options.leaves_bases_fuzzy
    if (options.has_replica or computes) and (why := why_inexact(state)):
        yield why


def _make_replica_bases(
    state: State,
    options: Options,
    saver: Saver,
    channel: BackgroundChannel,
    clock: Clock,
) -> ReplicaBases:
    """Make the requests to a replica that follows the log.

    Raises:
        UnsupportedStateError: A replica cannot follow some updates.
    """
    require_replicable(state)
    return ReplicaBases(
        state,
        saver,
        channel,
        clock,
        several=state.ranks.world > 1,
        timeout_s=options.progress_timeout_s,
    )


def _refuse_lossy_replicas(
    state: State,
    peers: PeerOptions | None,
    places: Sequence[TierOptions],
    log: str = "dense",
) -> None:
    """Refuse lossy logs of parameters that several ranks hold.

    After a recovery, one rank would continue from lossy gradients and another from exact gradients
    of the same parameter.

    Raises:
        OptionError: Several ranks record the same elements, and their log is lossy.
    """
    forms = [place.log for place in places] + ([] if peers is None else [peers.log])
    where = 'log="adaptive" in tiers='
    instead = 'log="whole" in TierOptions and PeerOptions'
    if log == "adaptive" and state.ranks.world > 1:
        forms = [log]
        where = 'log="adaptive"'
        instead = 'log="dense"'
    if "adaptive" in forms and (name := parameter_logged_twice(state)):
        raise OptionError(
            f"{where}: several ranks hold the same elements of {name}, and each has its own log: "
            "after a replay of a lossy log their values would differ",
            rank=state.ranks.rank,
            hint=f"{instead}; or shard it along every dimension of the mesh",
        )
