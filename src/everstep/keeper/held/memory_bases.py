"""Bases of this rank that live in memory: that of its keeper, and that of the next node's keeper.

A base is copied out of the arena into memory of its own, compared with its digests, and then sent
to the peer like a durable one. At most two exist: the newest that is complete on all ranks (I10),
and the next one, which is in flight. The next capture waits for that one, and training for the next
capture, as in GEMINI (TierCheck, section 2.3). A base in memory counts for a resume only if all
ranks can read their shards (I7).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import PurePath

from everstep.commit import BaseId
from everstep.errors import DeadlineError, StateError
from everstep.format import BasePlan, Marker, timeline_dir
from everstep.format.names import TIMELINE_RECORD
from everstep.format.reader import read_record_bytes
from everstep.format.writer import Written, digest_shard
from everstep.keeper.held.peer_stores import PeerBaseStore
from everstep.seams import Clock, FileSystem
from everstep.seams.progress import ProgressSink
from everstep.state.layout import Body
from everstep.state.layout.shards import Seen
from everstep.tiers import storage_errors

_PIECE_BYTES = 1 << 20
_LOOK_AGAIN_S = 0.02
_LATE = 3
"""Multiple of the deadline: longer than the two deadlines after which rank 0 gives up a round."""

IsPast = Callable[[BaseId], bool]
"""Returns True if a base is complete on all ranks, or never will be."""


class MemoryBases:
    """Holds the bases of this rank that live in memory.

    Args:
        run: the run folder, which has the record of the timeline.
        store: holds the bases, within its bound.
        is_past: returns True if a base is complete on all ranks, or never will be; None for a
            single process.
        whole: receives each base that is complete here.
        timeout_s: seconds without progress after which other ranks are no longer waited for.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        store: PeerBaseStore,
        clock: Clock,
        is_past: IsPast | None,
        whole: Callable[[BaseId], None],
        *,
        timeout_s: float,
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._clock = clock
        self._store = store
        self._is_past = is_past
        self._whole = whole
        self._timeout_s = timeout_s
        self._last: BaseId | None = None
        self._released = threading.Event()

    def release(self) -> None:
        """Stop waiting for other ranks: the next start of the job has begun."""
        self._released.set()

    def hold(
        self,
        plan: BasePlan,
        bodies: Sequence[Body],
        progress: ProgressSink,
        audit: Callable[[BasePlan, Sequence[Written]], None],
    ) -> tuple[Written, ...]:
        """Copy a base into the memory of this keeper and compare its digests.

        Args:
            audit: raises AuditError for a base that is not the state of its step.

        Raises:
            AuditError: the base is not the state of its step.
            OutOfSpaceError: it does not fit into the bound.
            DamageError: its bytes changed while they were copied.
            DeadlineError: other ranks have not finished the previous base.
            StateError: another start of the job has begun.
        """
        identity = plan.identity
        base = BaseId(identity.timeline, identity.step)
        watched = [_Watched(body, progress) for body in bodies]
        pairs = list(zip(plan.shards, watched, strict=True))
        written = tuple(digest_shard(shard, identity, body) for shard, body in pairs)
        # Before the copy: a base that fails the audit must not replace a good one in memory.
        audit(plan, written)
        marker = Marker.of(identity, tuple(shard.record for shard in written))
        with storage_errors("read the record of the timeline", self._run, step=base.step):
            path = timeline_dir(self._run, base.timeline) / TIMELINE_RECORD
            # The copy carries the record of its timeline, so that a node without the run folder can
            # restore it.
            record = read_record_bytes(self._filesystem, path)
        # After digesting, before copying: two bases fit into the bound, a third one only when the
        # previous is complete everywhere.
        self._wait_for_previous(base, progress)

        def fill(memory: memoryview) -> None:
            begin = 0
            for shard, body in zip(written, watched, strict=True):
                header = shard.header
                end = begin + shard.record.length
                memory[begin : begin + len(header)] = header
                begin += len(header)
                # In pieces: each one counts as progress, so that a large base is not taken for a
                # hang.
                for at in range(begin, end, _PIECE_BYTES):
                    piece = memory[at : min(end, at + _PIECE_BYTES)]
                    body.fill(at - begin, piece, lambda seen: None)
                begin = end

        # Verifies the digests of the copy: the arena may have been overwritten while it was read.
        self._store.keep(marker, record, fill)
        # Only a base that is held is waited for: one that failed never gets complete anywhere.
        self._last = base
        # A single process has no round with other ranks: its base is complete at once.
        if self._is_past is None:
            self._store.passed(base)
        self._whole(base)
        return written

    def _wait_for_previous(self, base: BaseId, progress: ProgressSink) -> None:
        """Wait until the previous base is complete on all ranks, which frees the one before it."""
        last = self._last
        is_past = self._is_past
        if last is None or is_past is None:
            return
        since_s = self._clock.running_s()
        while not is_past(last):
            # Polled: rank 0 decides a round in another thread, which knows nothing of this wait.
            if self._released.wait(_LOOK_AGAIN_S):
                raise StateError(
                    "the next start of the job began before the base was held in memory",
                    step=base.step,
                )
            # Waiting for other ranks must not count as a hang of this base.
            progress.advance(0)
            # Only time in which this process runs counts: a suspended machine must not fail the
            # base.
            if self._clock.running_s() - since_s > _LATE * self._timeout_s:
                raise DeadlineError(
                    f"the base of step {last.step} is not complete on all ranks yet",
                    step=base.step,
                    tier="memory",
                    hint="another rank's keeper hangs or has ended: see the output of its rank",
                )


class _Watched:
    """Body that reports how far it was read."""

    def __init__(self, body: Body, progress: ProgressSink) -> None:
        self._body = body
        self._progress = progress
        self.objects_bytes = body.objects_bytes
        self.held = body.held

    def fill(self, begin: int, chunk: memoryview, seen: Seen) -> None:
        """Fill a chunk like the body, and report it as progress."""
        self._body.fill(begin, chunk, seen)
        self._progress.advance(chunk.nbytes)
