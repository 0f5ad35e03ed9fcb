"""The keeper of one Checkpointer: a process or a thread, started anew when it is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from everstep.arena import PAGE_BYTES
from everstep.arena.memory import Arena
from everstep.commit.lineage import BaseId
from everstep.config.options import Options
from everstep.errors import EverstepError, KeeperError, OptionError
from everstep.format.header import ShardIdentity
from everstep.format.writer import ChunkRing
from everstep.keeper.log.log import open_log
from everstep.keeper.persist.local import LocalKeeper
from everstep.keeper.persist.summed import summed
from everstep.link.channel import BackgroundChannel
from everstep.link.keeper_stats import KeeperStats
from everstep.link.messages import identity_to_wire
from everstep.link.pool import CapturePool
from everstep.link.seat import Seat, no_mailbox
from everstep.link.waiting import unless_gone
from everstep.restore.fetch.held import Recalled
from everstep.run.fence import Fence
from everstep.seams import Clock, PosixFileSystem, Seams, SystemClock
from everstep.seams.network.peers import HeldPort, PeerMailbox
from everstep.seams.processes.conditions import Outcome
from everstep.seams.processes.processes import available_cores
from everstep.state.ranks.ranks import ONE_RANK, RankInfo
from everstep.tiers.disk import storage_errors
from everstep.tiers.options import PeerOptions, TierOptions
from everstep.trainer.attach.attach import attach, is_there
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.attach.orphaned_keepers import orphaned_by_move, orphaned_state
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.budget.log_limits import LogLimits

__all__ = [
    "Keepers",
    "ReplacementAttempts",
    "StartingKeeper",
    "release_keeper",
]

_AGAIN_S = 30.0  # to start a keeper may take long, and training waits for it
_SHARE = 4  # one that hangs takes no more than a fifth of training's time


class ReplacementAttempts:
    """When the next one is due.

    Attributes:
        why_not: why the last one came to nothing; None: it did not, or there was none.
        failed: how many came to nothing.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun_s = self._again_s = 0.0
        self.why_not: EverstepError | None = None
        self.failed = 0

    @property
    def is_due(self) -> bool:
        """Whether nothing was tried in vain a short while ago."""
        return self.why_not is None or self._clock.monotonic_s() >= self._again_s

    def begin(self) -> None:
        """One begins."""
        self.why_not, self._begun_s = None, self._clock.monotonic_s()

    def fail(self, why: EverstepError) -> None:
        """It came to nothing."""
        now_s = self._clock.monotonic_s()
        self.why_not = why
        self.failed = self.failed + 1
        self._again_s = now_s + max(_AGAIN_S, _SHARE * (now_s - self._begun_s))


class StartingKeeper:
    """Attaches to a keeper in a thread of its own.

    Where there was none, a start of the job waits for the new one only when a timeline is to be
    opened: nothing that is restored is in its memory.

    Args:
        attach: starts it, and waits for it.
    """

    def __init__(self, attach: Callable[[], RemoteKeeper]) -> None:
        self._attach = attach
        self._found = Outcome[RemoteKeeper]()
        self._thread = threading.Thread(
            target=self._start, name="everstep-keeper-start", daemon=True
        )
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it is there, or has failed."""
        return self._found.done()

    def wait(self) -> RemoteKeeper:
        """The keeper, once it is there; what attaching to it has raised, if it failed."""
        return self._found.result()

    def _start(self) -> None:
        try:
            self._found.set_result(self._attach())
        except BaseException as error:  # raised where it is waited for
            self._found.set_exception(error)


_log = logging.getLogger("everstep")


class Keepers:
    """Holds the keeper in service, and the memory that captures go through.

    Args:
        arena_bytes: host memory for captures, at most; taken as it is needed.
        replica_bytes: likewise, for a replica.

    Raises:
        OptionError: a replica, without a process to hold it.

    Attributes:
        current: in service; None before the first timeline.
        pool: None for ``sync``.
        restarts: how often a keeper process was lost and replaced.
        attempts: to do so.
        on_disk: told up to which number records of the log are on disk, in any thread.
        log_limits: of the log.
        on_everywhere: told the step of each base that is whole with all peers, in any thread.
        peer_log_step: the newest step of this timeline whose log this rank's peer holds, as the
            keeper last said.
    """

    def __init__(
        self,
        options: Options,
        seams: Seams,
        run: PurePath,
        run_id: str,
        channel: BackgroundChannel,
        ring: ChunkRing,
        arena_bytes: int,
        replica_bytes: int = 0,
        info: RankInfo = ONE_RANK,
    ) -> None:
        self._options = options
        self._seams = seams
        self._run = run
        self._run_id = run_id
        self._channel = channel
        self._ring = ring
        self._arena_bytes = max(PAGE_BYTES, arena_bytes // PAGE_BYTES * PAGE_BYTES)
        self._replica_bytes = replica_bytes
        self._info = info
        self._seat: Seat | None = None
        self._fence: Fence | None = None  # since the timeline was opened, whichever keeper it has
        self._mailbox: PeerMailbox | None = None
        self._port: HeldPort | None = None  # of the keeper process's mailbox
        self._remote: RemoteKeeper | None = None
        self._starting: StartingKeeper | None = None
        self._listens_at: tuple[str, int] | None = None  # told already, to be opened by that one
        self._before = KeeperStats()  # of keepers that are no longer in service
        self.attempts = ReplacementAttempts(seams.clock)
        self.current: Keeper | None = None
        self.pool: CapturePool | None = None
        self.restarts = 0
        self.on_disk: Callable[[int], None] = lambda number: None
        self.on_everywhere: Callable[[int], None] = lambda step: None
        self.peer_log_step: int | None = None
        self.log_limits = LogLimits()
        self._tiers: list[dict[str, Any]] = []
        self._peers: dict[str, Any] | None = None
        # A keeper process has a world of its own: it cannot see a simulated one.
        seen = type(seams.filesystem) is PosixFileSystem and type(seams.clock) is SystemClock
        self._may_be_kept = sys.platform == "linux" and seen
        in_process = options.method.base != "sync" and options.keeper.process
        self.in_process = in_process and self._may_be_kept
        for needed, what, instead in (
            (options.is_multistep, "base='multistep' needs", "base='lazy'"),
            (options.method.in_memory, "bases that live in memory need", "method='lazy'"),
            (options.has_replica, "apply='replica' needs", "apply='recovery'"),
        ):
            if needed and not self.in_process:
                raise OptionError(
                    f"{what} a keeper that is a process of its own",
                    hint=f"KeeperOptions(process=True), on Linux; or {instead}",
                )

    def copy_to(self, tiers: Sequence[TierOptions]) -> None:
        """From the next keeper on, bases are copied to these places.

        Raises:
            OptionError: there is no process to copy them.
        """
        if tiers and not self.in_process:
            raise OptionError(
                "tiers= needs a keeper that is a process of its own: it makes the copies",
                hint="KeeperOptions(process=True), on Linux; and another method than 'sync'",
            )
        self._tiers = [dataclasses.asdict(tier.of_rank(self._info.world)) for tier in tiers]

    def send_to_peer(
        self, bound_bytes: int, peers: PeerOptions, log_bytes: int | None = None
    ) -> None:
        """From the next keeper on, bases are sent to the memory of another node, and the log.

        Args:
            bound_bytes: of the copies that are held here for other ranks.
            log_bytes: of these, for their logs; None: no rank has a log that is sent.

        Raises:
            OptionError: there is no process to send and to hold them.
        """
        if not self.in_process:
            raise OptionError(
                'tiers=["peer"] needs a keeper that is a process of its own: it outlives training',
                hint="KeeperOptions(process=True), on Linux; and another method than 'sync'",
            )
        self._peers = {
            "bound_bytes": bound_bytes - (log_bytes or 0),
            "log_bytes": log_bytes or 0,
            "sends_log": log_bytes is not None,
            "log": {k: getattr(peers, k) for k in ("log", "log_ratio", "log_int8_below")},
            "bytes_per_s": peers.bytes_per_s,
            "holds": self._options.method.in_memory,
        }

    def _on_peered(self, base: int | None, step: int | None) -> None:
        """The peers hold a base, or this rank's peer its log up to a step."""
        if base is not None:
            self.on_everywhere(base)
        if step is not None:
            self.peer_log_step = step

    @property
    def stats(self) -> KeeperStats:
        """Of all keepers together."""
        return self._before if self.current is None else summed(self._before, self.current.stats)

    def open(self, *, beside: bool = False) -> None:
        """Attaches to a keeper process, or makes the memory for one that is a thread.

        Args:
            beside: where there is none, a new one may be started beside what comes next, up to
                :meth:`ready`: it has nothing in memory that could be restored.

        Raises:
            KeeperError, OutOfSpaceError
        """
        self.ready()
        if self.in_process:
            if self._remote is None or self._remote.lost is not None:
                if beside and not is_there(self._run, self._run_id, self._info.rank):
                    self._remote = None
                    self._starting = StartingKeeper(self._attach)
                else:
                    self._attached(self._attach())
        elif self._options.method.base != "sync" and self.pool is None:
            self.pool = CapturePool(Arena.anonymous(self._arena_bytes))

    def ready(self) -> None:
        """Waits for a keeper that is being started beside; raises as :meth:`open`."""
        starting = self._starting
        if starting is None:
            return
        try:
            self._attached(starting.wait())
        finally:
            if starting.over:  # else this was interrupted
                self._starting = None
        if self._listens_at is not None:
            self.listen(*self._listens_at)

    def _attached(self, remote: RemoteKeeper) -> None:
        self._remote = remote
        remote.on_disk = lambda number: self.on_disk(number)
        remote.on_peered = self._on_peered
        remote.copies = {"tiers": self._tiers, "peers": self._peers}
        self.pool = CapturePool(remote.arena, lambda: remote.lost)
        self.pool.moves = lambda: (remote.moves, remote.log_moves)

    def recall_leftovers(self, *, own: bool = False) -> Recalled:
        """What an earlier training process captured last, if its keeper still has it. What it
        had not written yet is durable, or has failed, when this returns.

        A keeper that is lost on the way (killed; or serving another process: one that resumes,
        too, or the one before, which still runs) leaves what is on disk.

        Args:
            own: what this very process has captured, too.

        Raises:
            DeadlineError: the keeper gets nowhere.
        """
        found = self._left_here(own=own)
        if own or found.base is not None or found.records or not self._may_be_kept:
            return found
        whose = self._run, self._run_id, self._info.rank
        timeout_s = self._options.progress_timeout_s
        moved = orphaned_by_move(*whose, self._seams, timeout_s=timeout_s)
        return found if moved.base is None and not moved.records else moved

    def _left_here(self, *, own: bool) -> Recalled:
        """As :meth:`recall_leftovers`, by the keeper that knows the run's folder where it is now."""
        remote = self._remote
        timeout_s = self._options.progress_timeout_s
        if remote is None:
            store = self.current.records if isinstance(self.current, LocalKeeper) else None
            if not own and self._may_be_kept:
                whose = self._run, self._run_id, self._info.rank
                return orphaned_state(*whose, self._seams, timeout_s=timeout_s)
            if not own or store is None:
                return Recalled()
            store.flush()  # now: it is fenced off as soon as there is a new timeline
            store.settle(timeout_s)
            return Recalled(None, tuple(store.records()))
        try:
            remote.settle(timeout_s)
            recalled = remote.recall(timeout_s, own=own)
            recalled = recalled.of_history(self._seams.filesystem, self._run)
            # Whoever empties the folder and begins another run there wants none of these.
            mine = tuple(copy for copy in recalled.copies if copy.marker.run == self._run_id)
            return dataclasses.replace(recalled, copies=mine)
        except KeeperError:
            if remote.lost is None:
                raise
            _log.warning("%s", remote.lost)
            return Recalled(missed=is_there(self._run, self._run_id, self._info.rank))

    def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Opens the keeper's mailbox for those of other ranks; returns its address.

        Args:
            port: 0: any that is free. A keeper process has one that this process holds, as other
                ranks will look for its successor there: between the two, the system would give
                it to anybody.

        Raises:
            KeeperError: it cannot.
        """
        try:
            if self._remote is not None or self._starting is not None:
                if not port:
                    self._hold(HeldPort(host))
                    assert self._port is not None
                    port = self._port.number
                self._listens_at = host, port
                if self._remote is None:
                    return self._listens_at
                return host, self._remote.listen(host, port, self._options.progress_timeout_s)
            if self._mailbox is not None:
                self._mailbox.close()
            self._mailbox = PeerMailbox(host, port)
        except OSError as error:
            raise no_mailbox(host, port, error) from error
        return self._mailbox.address

    def _hold(self, port: HeldPort | None) -> None:
        """In the place of the one that was held."""
        before = self._port
        self._port = port
        if before is not None:
            before.close()

    def serve(
        self,
        timeline: int,
        verified: BaseId | None = None,
        seat: Seat | None = None,
        *,
        opened: bool = True,
    ) -> Keeper:
        """From now on bases are of ``timeline``.

        Args:
            verified: a base on disk that has just been read and found whole.
            seat: of this rank among several.
            opened: it is new, and not what another keeper has served that is gone.
        """
        self.ready()
        if self._remote is None and self.current is not None:
            self.current.close()
        if opened:
            self._fence = Fence(self._seams.filesystem, self._run, timeline)
            self._channel.took_over(timeline)
            self.attempts.why_not = None
        self._seat = seat
        self.peer_log_step = None
        self._before = self.stats
        if opened:  # else what is durable stays so
            self._before.durable_step = None
        if self._remote is not None:
            if not self._options.logs:  # else a log may still need it
                self._remote.forget_all()
            self._remote.copies["identity"] = identity_to_wire(self._identity(timeline))
            self._remote.serve(
                timeline,
                keep=self._options.keep,
                verified=verified,
                log=self._log_message(),
                history=self._options.log.history,
                replica=self._replica_message(),
                rebuild=self._rebuild_message(),
                seat=None if seat is None else seat.to_wire(),
            )
            self.current = self._remote
            return self._remote
        mailbox = self._mailbox
        self._mailbox = None
        keeper = LocalKeeper(
            self._seams,
            self._run,
            timeline,
            self._channel,
            self._ring,
            self.pool.arena if self.pool is not None else None,
            keep=self._options.keep,
            verified=verified,
            timeout_s=self._options.progress_timeout_s,
            history=self._options.log.history,
            seat=seat,
            mailbox=mailbox,
        )
        if self.pool is not None:
            self.pool.moves = lambda: (keeper.moves, keeper.log_moves)
        keeper.sweep()
        if self._options.logs and self.pool is not None:
            keeper.log_of_run = keeper.records = open_log(
                self._seams,
                self._run,
                self._ring,
                self.pool.arena,
                self._log_message(),
                self._identity(timeline),
                self._channel.post,
                lambda number: self.on_disk(number),
                timeout_s=self._options.progress_timeout_s,
            )
        self.current = keeper
        return keeper

    def _identity(self, timeline: int) -> ShardIdentity:
        """Of this rank; steps and LSNs come with each segment."""
        return ShardIdentity(self._run_id, timeline, 0, 0, self._info.rank, self._info.world, True)

    def _log_message(self) -> dict[str, Any] | None:
        if not self._options.logs or not self._options.log.on_disk:
            return None
        return {
            **self.log_limits.batch_to_wire(self._options),
            "audit": self._options.audits and self._info.near is None,
        }

    @property
    def replica_step(self) -> int | None:
        """Of the state that the keeper's replica has, as it last said; None: there is none."""
        return self.current.replica_step if isinstance(self.current, RemoteKeeper) else None

    @property
    def host_bytes(self) -> int:
        """Host memory that was taken: for captures and the log, plain data included, and for a
        replica."""
        replica_bytes = self.current.replica_bytes if isinstance(self.current, RemoteKeeper) else 0
        return replica_bytes + (self.pool.taken_bytes if self.pool else 0)

    def _rebuild_message(self) -> dict[str, Any] | None:
        """How bases that are captured over several steps are made whole; None: there are none."""
        if not self._options.is_multistep:
            return None
        return {"threads": self._threads, "warm": not self._options.leaves_bases_fuzzy}

    def _replica_message(self) -> dict[str, Any] | None:
        if not self._options.has_replica:
            return None
        return {"size_bytes": self._replica_bytes, "threads": self._threads}

    @property
    def _threads(self) -> int:
        """With which a keeper replays."""
        cores = self._options.keeper.cores
        # Where it shares the cores with training, and other ranks, it leaves some to them.
        return len(cores) if cores else max(1, len(available_cores()) // 2 // self._info.here)

    @property
    def lost(self) -> EverstepError | None:
        """Why the keeper that was in service is gone, if it is."""
        return self.current.lost if isinstance(self.current, RemoteKeeper) else None

    @property
    def unavailable(self) -> bool:
        """Whether nobody is there: it could not be replaced, when that was last tried, or what took
        its place is gone, too."""
        return self.attempts.why_not is not None or self.lost is not None

    def replace_if_lost(
        self, timeline: int, again: int | None = None, *, insist: bool = False
    ) -> bool:
        """Replaces a keeper process that is gone; says so. True if one was replaced. Other ranks
        are told which bases were lost: not that of step ``again``, which may be taken now.

        Args:
            insist: tries at once, however short ago it was in vain: there may be no next time.

        Raises:
            EverstepError: why it could not be, by the policy: FencedError when it has gone over
                to another training process, KeeperError when no new one could be started.
        """
        if not isinstance(self.current, RemoteKeeper):
            return False
        if self.current.lost is None:
            self.current.look()
            return False
        attempts = self.attempts
        if insist or attempts.is_due:
            attempts.begin()
            try:
                self._replace(timeline, again)
                return True
            except EverstepError as error:
                attempts.fail(error)
        elif self._options.on_failure != "raise":
            return False  # it has been told, and is again at each attempt
        assert attempts.why_not is not None
        self._channel.post(attempts.why_not)
        self._channel.check()
        return False

    def _replace(self, timeline: int, again: int | None) -> None:
        lost = self.lost
        seat = self._seat
        steps = () if self._remote is None else tuple(sorted(self._remote.lost_steps - {again}))
        assert self._fence is not None, "a keeper is replaced that has served nothing"
        with storage_errors("look for newer timelines", self._run):
            self._fence.check()
        self.open()
        assert self._remote is not None
        with unless_gone(self._remote):  # the next call sees to that
            self._remote.settle(self._options.progress_timeout_s)  # it may still write what we took
            if seat is not None:  # where the other ranks look for it
                self.listen(*seat.peers[seat.rank])
        self.restarts += 1
        again_there = seat and dataclasses.replace(seat, again=True, lost=steps)
        self.serve(timeline, seat=again_there, opened=False)
        _log.warning("%s", lost)
        warnings.warn(f"everstep: {lost}", RuntimeWarning, stacklevel=6)
        if callable(self._options.on_failure) and lost is not None:
            self._options.on_failure(lost)

    def close(self, *, stay: bool = False) -> None:
        """Lets the keeper go; what it was given, it finishes.

        Args:
            stay: a keeper process holds what it has in memory, as if this process had died.
        """
        with contextlib.suppress(EverstepError):
            self.ready()
        if self.current is not None:
            self._before = self.stats
            release_keeper(self.current, stay=stay)
        if self._remote is not None and self._remote is not self.current:
            self._remote.close(stay=stay)
        if self._mailbox is not None:
            self._mailbox.close()
        self._hold(None)
        self.current = self._remote = self._mailbox = None
        if self.pool is not None:
            self.pool.close()

    def _attach(self) -> RemoteKeeper:
        whose = (self._run, self._run_id, self._info.rank)
        options = self._options
        about = *whose, self._arena_bytes, options.keeper, self._channel, self._seams.clock
        return attach(*about, timeout_s=options.progress_timeout_s)


def release_keeper(keeper: Keeper, *, stay: bool) -> None:
    """Closes a keeper; a process is to ``stay``, or not, with what it has in memory."""
    if isinstance(keeper, RemoteKeeper):
        keeper.close(stay=stay)
    else:
        keeper.close()
