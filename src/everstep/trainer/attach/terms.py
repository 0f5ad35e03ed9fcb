"""Terms on which a keeper works for one rank: where, with how much memory, and what it is told.

They are the same for each keeper of the rank, whether it is a process or a thread.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from everstep.arena import PAGE_BYTES
from everstep.config import Options
from everstep.errors import OptionError
from everstep.format import ShardIdentity
from everstep.link.messages import identity_to_wire
from everstep.seams import PosixFileSystem, Seams, SystemClock
from everstep.seams.processes import available_cores
from everstep.state.ranks import ONE_RANK, RankInfo
from everstep.tiers import PeerOptions, TierOptions
from everstep.trainer.budget import LogLimits


class KeeperTerms:
    """Terms of the keepers of one rank.

    Args:
        arena_bytes: maximum host memory for captures. It is allocated when it is used.
        replica_bytes: maximum host memory for a replica.

    Raises:
        OptionError: The method needs a keeper process, which the options or the platform exclude.

    Attributes:
        may_be_kept: a keeper process can be started here, and may stay after this process.
        in_process: the keeper is a separate process.
        log_limits: limits of the log.
    """

    def __init__(
        self,
        options: Options,
        seams: Seams,
        run: PurePath,
        run_id: str,
        arena_bytes: int,
        replica_bytes: int = 0,
        ranks: RankInfo = ONE_RANK,
    ) -> None:
        self.options = options
        self.seams = seams
        self.run = run
        self.run_id = run_id
        self.ranks = ranks
        # Rounded down, so that the arena stays within the budget.
        self.arena_bytes = max(PAGE_BYTES, arena_bytes // PAGE_BYTES * PAGE_BYTES)
        self.replica_bytes = replica_bytes
        self.log_limits = LogLimits()
        self._tiers: list[dict[str, Any]] = []
        self._peers: dict[str, Any] | None = None
        # A keeper process cannot see a simulated file system or clock.
        real = type(seams.filesystem) is PosixFileSystem and type(seams.clock) is SystemClock
        self.may_be_kept = sys.platform == "linux" and real
        in_process = options.method.base != "sync" and options.keeper.process
        self.in_process = in_process and self.may_be_kept
        for needed, feature, instead in (
            (options.is_multistep, "base='multistep' needs", "base='lazy'"),
            (options.method.in_memory, "bases that live in memory need", "method='lazy'"),
            (options.has_replica, "apply='replica' needs", "apply='recovery'"),
        ):
            if needed and not self.in_process:
                raise OptionError(
                    f"{feature} a separate keeper process",
                    hint=f"KeeperOptions(process=True), on Linux; or {instead}",
                )

    @property
    def timeout_s(self) -> float:
        """Seconds without progress after which an operation counts as hung."""
        return self.options.progress_timeout_s

    def copy_to(self, tiers: Sequence[TierOptions]) -> None:
        """Let keepers copy bases to these places, beginning with the next timeline.

        Raises:
            OptionError: There is no keeper process to make the copies.
        """
        if tiers and not self.in_process:
            raise OptionError(
                "tiers= needs a separate keeper process, which makes the copies",
                hint="KeeperOptions(process=True), on Linux; and another method than 'sync'",
            )
        self._tiers = [dataclasses.asdict(tier) for tier in tiers]

    def send_to_peer(
        self, bound_bytes: int, peers: PeerOptions, log_bytes: int | None = None
    ) -> None:
        """Let keepers send bases and log to the memory of another node from the next one on.

        Args:
            bound_bytes: memory here for copies of other ranks.
            log_bytes: share of it for their logs; None if no rank sends its log.

        Raises:
            OptionError: There is no keeper process to send and hold copies.
        """
        if not self.in_process:
            raise OptionError(
                'tiers=["peer"] needs a separate keeper process, which outlives training',
                hint="KeeperOptions(process=True), on Linux; and another method than 'sync'",
            )
        self._peers = {
            "bound_bytes": bound_bytes - (log_bytes or 0),
            "log_bytes": log_bytes or 0,
            "sends_log": log_bytes is not None,
            "log": {k: getattr(peers, k) for k in ("log", "log_ratio", "log_int8_below")},
            "bytes_per_s": peers.bytes_per_s,
            "holds": self.options.method.in_memory,
        }

    def identity(self, timeline: int) -> ShardIdentity:
        """Return the identity of this rank; each segment adds its step and LSN."""
        return ShardIdentity(self.run_id, timeline, 0, 0, self.ranks.rank, self.ranks.world, True)

    def copies(self, timeline: int) -> Mapping[str, Any]:
        """Return the fields of a message about copies of the bases and the log."""
        identity = identity_to_wire(self.identity(timeline))
        return {"tiers": self._tiers, "peers": self._peers, "identity": identity}

    def log(self) -> dict[str, Any] | None:
        """Return how the log is written to disk; None if it is not."""
        if not self.options.logs or not self.options.log.on_disk:
            return None
        return {
            **self.log_limits.batch_to_wire(self.options),
            # On separate disks no rank sees a complete base.
            "audit": self.options.audits and self.ranks.near is None,
        }

    def rebuild(self) -> dict[str, Any] | None:
        """Return how multi-step bases are completed; None for other methods."""
        if not self.options.is_multistep:
            return None
        return {"threads": self._threads, "warm": not self.options.leaves_bases_fuzzy}

    def replica(self) -> dict[str, Any] | None:
        """Return the limits of the replica; None without one."""
        if not self.options.has_replica:
            return None
        return {"size_bytes": self.replica_bytes, "threads": self._threads}

    @property
    def _threads(self) -> int:
        """Number of threads for replay in the keeper."""
        cores = self.options.keeper.cores
        # Without cores of its own, it shares them with training and with other ranks.
        return len(cores) if cores else max(1, len(available_cores()) // 2 // self.ranks.here)
