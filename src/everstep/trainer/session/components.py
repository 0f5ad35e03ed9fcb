"""What a Checkpointer is made of, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from everstep.capture.lanes.devices import DeviceLane
from everstep.capture.lanes.lane import CpuLane, Lane
from everstep.capture.updates import UpdateHooks
from everstep.config.options import Options
from everstep.errors import OptionError
from everstep.format.writer import ChunkRing
from everstep.keeper.persist.local import CHUNKS, WRITERS
from everstep.link.channel import BackgroundChannel
from everstep.link.recordable import refuse_optimizers
from everstep.seams import Seams
from everstep.seams.messages import say
from everstep.state.image import State
from everstep.state.ranks.drift import before_update
from everstep.state.ranks.log_parts import left_to_others_bytes, recorded_by_several
from everstep.state.survey.survey import Survey
from everstep.tiers.options import PeerOptions, TierOptions
from everstep.trainer.attach.keeper import Keeper
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
    arena_budget_bytes,
    base_memory_bytes,
    check_multistep_budget,
    gradients_of,
    host_budget_bytes,
    mark_memory_bytes,
    own_budget_bytes,
    peer_bytes,
    peer_log_bytes,
    replica_budget_bytes,
)
from everstep.trainer.budget.log_limits import LogLimits
from everstep.trainer.budget.startup_notice import (
    copies_notice,
    disk_notice,
    marks_notice,
    startup_notice,
)
from everstep.trainer.checks.keeper_replay import (
    require_replayable,
    require_replicable,
    why_inexact,
)
from everstep.trainer.job.job import Job
from everstep.trainer.job.peer_nodes import memory_notice, peer_notice, refuse_single_base_with_peer
from everstep.trainer.log.recorder import Recorder
from everstep.trainer.log.residuals import residual_bytes, tell_of_lost_residuals
from everstep.trainer.multistep.multistep import Multistep
from everstep.trainer.multistep.multistep_plan import taught_bytes
from everstep.trainer.multistep.multistep_ranks import RankMultistep
from everstep.trainer.schedule.scheduled_saver import ScheduledSaver
from everstep.trainer.session.cadence import Cadence
from everstep.trainer.session.replica_bases import ReplicaBases

__all__ = ["Components", "assemble"]


@dataclass(frozen=True, slots=True)
class Components:
    """The parts on the trainer's side.

    Attributes:
        run_id: of the run folder.
        recorder: None without a log.
        replica_bases: None without a replica.
        multistep: None without bases over several steps.
        bounds: what was announced.
    """

    run_id: str
    channel: BackgroundChannel
    ring: ChunkRing
    lane: Lane
    keepers: Keepers
    saver: Saver
    recorder: Recorder | None
    replica_bases: ReplicaBases | None
    multistep: Multistep | None
    updates: UpdateHooks
    cadence: Cadence
    bounds: Bounds

    def start(
        self, keeper: Keeper, timeline: int, exact: bool, step: int, seen: Survey | None = None
    ) -> None:
        """A keeper has come into service.

        Args:
            step: that the state is of.
            seen: the state as it is now, if it has been surveyed.
        """
        pool = self.keepers.pool
        self.saver.start(keeper, pool)
        if self.recorder is not None:
            self.recorder.start(keeper, pool, timeline, exact, step, seen)
        if self.replica_bases is not None:
            self.replica_bases.start(keeper)
        if self.multistep is not None:
            self.multistep.start(keeper, pool, timeline)

    def close(self, *, stay: bool = False) -> None:
        """Lets go of everything.

        Args:
            stay: the keeper holds what it has, as if this process had died.
        """
        self.updates.close()
        if isinstance(self.saver, ScheduledSaver):
            self.saver.close()
        self.lane.close()
        self.keepers.close(stay=stay)
        self.ring.close()


def assemble(
    options: Options,
    run: PurePath,
    open_run: Callable[[], str],
    state: State,
    seams: Seams,
    peers: PeerOptions | None = None,
    places: Sequence[TierOptions] = (),
    job: Job | None = None,
) -> Components:
    """Makes all parts, and says what they will take.

    Args:
        open_run: makes the folder a run; returns its id.
        peers: what was said of the memory of other nodes; None: nothing goes there.
        places: where copies are made.
        job: the ranks that train together; None: this process trains alone.

    Raises:
        OutOfSpaceError: more than a budget allows.
        UnsupportedStateError, OptionError: updates that no log can repeat.
        StorageError: the folder cannot be used.
    """
    if not options.method.in_memory:
        refuse_single_base_with_peer(peers, state.ranks, options.keep)
    shape, is_all = shape_after_first_update(state, state.survey().shape)
    state_bytes = base_memory_bytes(shape)
    plain_bytes = sum(shape.objects_bytes.values())
    gradients = gradients_of(state.optimizers.values())
    if options.logs:
        gradients = gradients[0], gradients[1] - left_to_others_bytes(state)
    host_bytes = host_budget_bytes(options, state_bytes, state.ranks.here)
    mark_bytes = mark_memory_bytes(shape)
    step_bytes = gradients[1] + mark_bytes
    replica_bytes = replica_budget_bytes(options, host_bytes, state_bytes, step_bytes)
    own_bytes = own_budget_bytes(options, host_bytes, state_bytes, peers=bool(state.ranks.nodes))
    left_bytes = host_bytes - replica_bytes - own_bytes
    held_bytes = peer_bytes(peers, state.ranks, left_bytes, state_bytes)
    arena_bytes = arena_budget_bytes(options, left_bytes - held_bytes, state_bytes)
    host_bytes -= left_bytes - held_bytes - arena_bytes
    peer_log: int | None = None
    bounds = bounds_of(
        options,
        shape,
        state.ranks,
        places,
        host_bytes=arena_bytes + replica_bytes + own_bytes,
        peer_bytes=held_bytes,
    )
    if options.logs and peers is not None and peers.log != "none":
        peer_log = peer_log_bytes(state.ranks, held_bytes, bounds.base_bytes)
    left_over = residual_bytes(state) if options.logs else 0
    recorded_bytes = left_over + (0 if options.method.log == "topk" else gradients[1])
    check_disk_budget(
        options,
        run,
        bounds.base_bytes,
        beside=bounds.beside,
        other_bytes=bounds.other_bytes if options.log_on_disk else 0,
        step_bytes=log_step_bytes(shape, recorded_bytes) if options.log_on_disk else 0,
    )
    limits = LogLimits()
    if options.logs:
        limits = LogLimits.of(host_bytes, arena_bytes, state_bytes)
        limits.check(mark_bytes)
    run_id = open_run()
    clock = seams.clock
    channel = BackgroundChannel(
        options.on_failure, clock, progress_timeout_s=options.progress_timeout_s
    )
    ring = ChunkRing(CHUNKS, WRITERS)
    lane: Lane = seams.lane() if seams.lane else DeviceLane(CpuLane())
    keepers = Keepers(
        options, seams, run, run_id, channel, ring, arena_bytes, replica_bytes, state.ranks
    )
    in_memory = options.method.in_memory
    if peers is not None or in_memory:
        keepers.send_to_peer(own_bytes + held_bytes, peers or PeerOptions(), peer_log)
    kind = ScheduledSaver if options.is_scheduled else Saver
    saver = kind(options, run, state, lane, channel, clock)
    recorder = replica_bases = None
    if options.logs:
        refuse_optimizers(state, options.method.log)
        _refuse_lossy_replicas(state, peers, places, options.method.log)
        limits = limits.on_disk(
            options,
            options.keep + bounds.beside,
            bounds.disk_bytes,
            lambda: free_bytes(seams.filesystem, run) // state.ranks.world,
        )
        keepers.log_limits = limits
        recorder = Recorder(options, state, lane, channel, clock, log_bytes_max=limits.memory_bytes)
        recorder.untold.distrust = saver.copy_at_once
        saver.on_torn = recorder.untold.torn
        keepers.on_disk = recorder.on_disk
        keepers.on_everywhere = recorder.rooms.base_everywhere
        recorder.rooms.waits_for_peers = peers is not None and peers.log != "none"
        if options.has_replica:
            require_replicable(state)
            several = state.ranks.world > 1
            timeout_s = options.progress_timeout_s
            replica_bases = ReplicaBases(
                saver, channel, clock, several=several, timeout_s=timeout_s
            )
            recorder.rooms.relieved_to = replica_bases.relieved_to
            recorder.overrun = replica_bases.overrun
    multistep = None
    if options.is_multistep:
        require_replayable(state)
        if job is not None:  # those of what others write stay where they are
            gradients = gradients[0], taught_bytes(state, shape)
        check_multistep_budget(options, host_bytes, state_bytes, gradients[1])
        of_steps = options, run, state, saver, lane, channel, clock
        multistep = Multistep(*of_steps) if job is None else RankMultistep(job, *of_steps)
    updates = UpdateHooks(before_update(state, saver.gate))
    static_bytes = 0 if options.is_multistep else shape.static_bytes
    base_bytes = max(1, shape.size_bytes - static_bytes)
    alone = state.ranks.world == 1
    measured = options, run, saver, keepers, recorder, clock
    cadence = Cadence(*measured, base_bytes=base_bytes, limits=limits, alone=alone)
    tell_of_lost_residuals(state)
    ranks = state.ranks
    whose = str(run) if alone else f"{run}: rank {ranks.rank} of {ranks.world}"
    told = startup_notice(
        options,
        whose,
        shape.size_bytes,
        host_bytes,
        gradients,
        disk_bytes=bounds.disk_bytes,
        memory_bytes=state_bytes,
        plain_bytes=plain_bytes,
        residual_bytes=left_over,
        static_bytes=static_bytes,
        is_all=is_all,
        parks=alone and not in_memory,
    )
    say(told)
    if on_disk := disk_notice(seams.filesystem, run, options, bounds, limits, ranks):
        say(f"everstep: {whose}: {on_disk}")
    if options.logs and (marked := marks_notice(shape, recorded_bytes)):
        say(f"everstep: {whose}: {marked}")
    if places:
        copied = copies_notice(bounds, places, state.ranks.world, recorded_bytes)
        say(f"everstep: {whose}: {copied}")
    if in_memory:
        said = memory_notice(state.ranks, options.method.disk_every, own_bytes)
        say(f"everstep: {whose}: {said}")
    if peers is not None and state.ranks.nodes:
        about = peers, state.ranks, held_bytes, peer_log
        announced = peer_notice(*about, at_once=in_memory)
        say(f"everstep: {whose}: {announced}")
    if options.is_scheduled and not in_memory and (not alone or not keepers.in_process):
        where = "without a keeper process" if alone else "of several ranks"
        why = f"{where} nobody holds captures between bases: none is taken"
        say(f"everstep: {whose}: {why}")
    computes = multistep is not None and not options.leaves_bases_fuzzy
    if (replica_bases is not None or computes) and (why := why_inexact(state)):
        say(f"everstep: {whose}: {why}")
    return Components(
        run_id,
        channel,
        ring,
        lane,
        keepers,
        saver,
        recorder,
        replica_bases,
        multistep,
        updates,
        cadence,
        bounds,
    )


def _refuse_lossy_replicas(
    state: State,
    peers: PeerOptions | None,
    places: Sequence[TierOptions],
    log: str = "dense",
) -> None:
    """Raises:
    OptionError: one rank would go on from lossy gradients, and another from the whole ones of the
        same parameter.
    """
    forms = [place.log for place in places] + ([] if peers is None else [peers.log])
    where = 'log="adaptive" in tiers='
    instead = 'log="whole" in TierOptions and PeerOptions'
    if log == "adaptive" and state.ranks.world > 1:
        forms = [log]
        where = 'log="adaptive"'
        instead = 'log="dense"'
    if "adaptive" in forms and (name := recorded_by_several(state)):
        raise OptionError(
            f"{where}: several ranks hold the same elements of {name}, and each has a log of its "
            "own: behind a lossy one they would part from each other",
            rank=state.ranks.rank,
            hint=f"{instead}; or shard it along every dimension of the mesh",
        )
