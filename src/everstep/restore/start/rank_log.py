"""One rank's log when a job of several ranks starts: how far it leads, and what it gives.

The ranks agree on the step (:mod:`everstep.commit.logs`); each of them replays its own log, in its
keeper's memory or on its disk, behind its own part of the base, up to exactly that step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from everstep.commit.job.offers import Choice
from everstep.commit.lineage import BaseId
from everstep.commit.logs import LogRun, Path, Reach, runs_of, timeline_of
from everstep.errors import (
    AuditError,
    DamageError,
    DeadlineError,
    EverstepError,
    RecoveryError,
)
from everstep.format.log import LogRecord
from everstep.format.records import TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.restore.fetch.peer_log import LentLog
from everstep.restore.fetch.sources import Place, RankRead
from everstep.restore.load.load import LoadedBase
from everstep.restore.load.restored import Restored
from everstep.restore.log.log_found import LogFound
from everstep.restore.redo.unknown import UnknownClassError
from everstep.restore.reshard.logs import LogsInMemory, ReshardedLogs
from everstep.restore.start.log_exchange import LogExchange, encode_records
from everstep.restore.start.rank_loader import read_layout
from everstep.restore.start.resume import Resumed
from everstep.restore.start.roll_forward import Loader, replay, replayable
from everstep.run.candidates import Skipped
from everstep.run.chain import Chain, path_of
from everstep.run.scan import BaseFound, Inventory
from everstep.run.segments import SegmentFound
from everstep.seams import FileSystem, Seams
from everstep.state.layout.entries import shape_digest
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.ranks.log_shares import other_logs_needed
from everstep.state.training_state import State

__all__ = ["RankLog", "Redone"]

_log = logging.getLogger("everstep")
_PARTS_BYTES_MAX = 256 << 20  # of other ranks' logs at a time; of one step in any case


@dataclass(frozen=True, slots=True)
class Redone:
    """What replay has given.

    Attributes:
        spoilt: timeline and step that could not be redone: the state is not what was asked for.
        sure: it is that step, and not one of several that were redone at once.
        relaid: the log is of another layout than this rank has now; nothing was replayed.
        touched: the state is not that of the base any more.
        inexact: why it is not bit for bit what training had; "" if it is.
        skipped: what could not be used, and why.
        notes: what could not be taken back, in words.
    """

    spoilt: tuple[int, int] | None = None
    sure: bool = True
    inexact: str = ""
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    replay_s: float = 0.0
    relaid: bool = False
    touched: bool = True


class RankLog:
    """The log of this rank.

    Args:
        state: what is restored.
        records: in the memory of its keeper.
        left: what keepers on this machine have of other ranks' logs.
        strict: registered functions that are needed must be there.

    Attributes:
        lent: more of it, from the memory of other nodes.
    """

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        state: State,
        ring: ChunkRing,
        records: Sequence[LogRecord],
        *,
        strict: bool,
        timeout_s: float,
        left: LogsInMemory | None = None,
    ) -> None:
        self._seams = seams
        self._run = run
        self._records = records
        self._rank = state.ranks.rank
        self._loader = Loader(seams, state, ring, None, strict, timeout_s, lambda: None)
        self._log = LogFound((), ())
        self._lent_out = self._log.clone()
        left = left or LogsInMemory({})
        memory = LogsInMemory({**left.records, self._rank: records}, left.held)
        about = self._rank, state.ranks.world, memory, ring
        self._old = ReshardedLogs(seams.filesystem, *about, timeout_s=timeout_s)
        self._doubt = ""
        self.lent: Sequence[LentLog] = ()

    def runs(
        self,
        inventory: Inventory,
        copies: Sequence[tuple[FileSystem, Inventory]] = (),
        bases: Collection[BaseId] = (),
        *,
        lossy: bool = True,
        read_from: Callable[[FileSystem], FileSystem] = lambda files: files,
    ) -> tuple[LogRun, ...]:
        """What there is of it now.

        Args:
            copies: places that have copies of the run, nearest first.
            bases: that this rank could begin with; of copies only what leads on from there counts.
            lossy: look at what copies have lossy gradients of, too.
            read_from: where to read what was found in a copy.

        Raises:
            OSError: a directory cannot be read.
        """
        filesystem = self._seams.filesystem
        lent = [record for log in self.lent if log.is_of(inventory) for record in log.records]
        about = filesystem, inventory, self._records
        more: dict[str, Any] = {"lent": lent, "copies": copies, "bases": bases}
        more["read_from"] = read_from
        self._log = LogFound.of(*about, rank=self._rank, lossy_copies=lossy, **more)
        self._lent_out.close()
        self._lent_out = self._log.clone()
        return runs_of(self._log.index.marks, self._log.index.updates)

    def others(
        self,
        inventory: Inventory,
        copies: Sequence[tuple[FileSystem, Inventory]] = (),
        bases: Collection[BaseId] = (),
        *,
        near: Sequence[int],
        relaid: bool,
    ) -> dict[int, tuple[LogRun, ...]]:
        """What this rank reads of the logs of another number of ranks, or of another layout
        (:meth:`.ReshardedLogs.look`)."""
        return self._old.look(inventory, copies, bases, near=near, relaid=relaid)

    def in_copies(self, choice: Choice) -> Iterator[SegmentFound]:
        """Segments of copies that a choice leads through, of those that the last look has found."""
        if choice.reach is None or choice.readers:
            return iter(())
        return self._log.in_copies(_steps_of(choice.reach, choice.timelines))

    def first_of(self, choice: Choice) -> tuple[int, int]:
        """Timeline and step of the first that is redone."""
        assert choice.reach is not None
        return _steps_of(choice.reach, choice.timelines)[0]

    def with_layout(
        self, loaded: LoadedBase, base: BaseFound, places: Mapping[int, Place]
    ) -> LoadedBase:
        """A base that another layout has saved, with who had what."""
        optimizers = self._loader.state.optimizers
        return replace(loaded, layout=read_layout(base, places, optimizers))

    def timelines(self, inventory: Inventory) -> dict[int, TimelineRecord]:
        """Records of what has come from other nodes, so that all see whether they mean the same."""
        return {log.record.timeline: log.record for log in self.lent if log.is_of(inventory)}

    def with_lent(self, resumed: Resumed, choice: Choice) -> Resumed:
        """Says which of the steps that were replayed have come from other nodes."""
        reach = choice.reach
        base = choice.base
        if reach is None or base is None or not self.lent:
            return resumed
        steps = {
            step
            for log in self.lent
            for step in range(log.steps.run.first, log.steps.run.last + 1)
            if base.step < step <= reach.step
        }
        size_bytes = sum(log.steps.memory.nbytes for log in self.lent)
        read = RankRead(self._rank, "peer", size_bytes)
        return replace(resumed, lent=len(steps), reads=(*resumed.reads, read))

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Segments that cannot be used."""
        return tuple(dict.fromkeys([*self._log.skipped, *self._old.skipped]))

    def redo(
        self, choice: Choice, loaded: LoadedBase, *, together: bool, post: LogExchange
    ) -> Redone:
        """Brings the state, which was restored from the base of ``choice``, to its step.

        Args:
            together: several steps in one pass.
            post: gets other ranks' parts of the log.

        Raises:
            DeadlineError, RecoveryError: another rank is silent, or has failed.
            MismatchError: nothing may be left out, and this program lacks what steps of it need.
        """
        reach = choice.reach
        base = choice.base
        assert reach is not None
        assert base is not None
        clock = self._seams.clock
        start_s = clock.monotonic_s()
        records = {record.timeline: record for record in choice.timelines}
        path = path_of(reach.timeline, records)
        found = BaseFound(base, self._run, "committed", choice.manifest, None, ())
        restored = Restored(found, loaded, base, loaded.marker.lsn)
        if not choice.readers:
            restored.loaded = self._with_shape(loaded)
            if self._is_relaid(restored.loaded, timeline_of(base.step + 1, path), base.step + 1):
                return Redone(relaid=True, touched=False)
        skipped: list[Skipped] = []
        redo = self._redo_of_others if choice.readers else self._redo_own
        failed = redo(choice, reach, path, restored, skipped, records, together, post)
        if isinstance(failed, UnknownClassError) and self._loader.strict:
            assert restored.end is not None
            raise failed.refused(restored.end.step, self._run) from failed
        if isinstance(failed, AuditError):  # how long before, samples cannot tell
            self._doubt = f"step {failed.step} differs from training, and perhaps steps before it"
        noted = () if restored.loaded is None else restored.loaded.notes[len(loaded.notes) :]
        notes = tuple(dict.fromkeys(noted))
        inexact = restored.inexact or self._doubt
        skipped = [*skipped, *restored.skipped]
        replay_s = clock.monotonic_s() - start_s
        touched = failed is not None or restored.replayed > 0
        there = restored.end == reach.end and restored.lsn == reach.lsn
        if failed is None and there:
            return Redone(None, True, inexact, tuple(skipped), notes, replay_s)
        step = base.step + 1 + min(restored.replayed, reach.count - 1)
        timeline = timeline_of(step, path) or reach.timeline
        if failed is not None:
            why = f"log: cannot be replayed: {failed.message}"
            skipped.append(Skipped(timeline, step, why))
        sure = failed is None or not together or reach.count == 1
        about = sure, inexact, tuple(skipped), notes, replay_s
        return Redone((timeline, step), *about, touched=touched)

    def _redo_own(
        self,
        choice: Choice,
        reach: Reach,
        path: Path,
        restored: Restored,
        skipped: list[Skipped],
        records: Mapping[int, TimelineRecord],
        together: bool,
        post: LogExchange,
    ) -> EverstepError | None:
        """By this rank's own log; returns why a step could not be redone."""
        found = restored.base
        base = choice.base
        loaded = restored.loaded
        assert found is not None
        assert base is not None
        assert loaded is not None
        whole = self._log.index.follow(base, loaded.marker.lsn, None, path)
        chain = replace(whole, steps=whole.steps[: reach.count])
        chain = replayable(found, chain, self._loader, self._log, skipped)
        for cut in self._in_reach(chain, restored, post):
            try:
                about = self._loader, self._log, records, together, post.attend
                replay(restored, cut, *about)
            except EverstepError as error:
                return error
        return None

    def _redo_of_others(
        self,
        choice: Choice,
        reach: Reach,
        path: Path,
        restored: Restored,
        skipped: list[Skipped],
        records: Mapping[int, TimelineRecord],
        together: bool,
        post: LogExchange,
    ) -> EverstepError | None:
        """By the logs of another number of ranks, or of another layout; returns why a step could
        not be redone."""
        # Only now: most jobs start with as many ranks as before.
        from everstep.restore.reshard.replay import replay_resharded

        steps = _steps_of(reach, records.values())

        def fetch(ranks: Sequence[int], timeline: int, step: int) -> dict[int, list[LogRecord]]:
            readers = {
                one.source: one.rank
                for one in choice.readers
                if one.timeline == timeline and one.first <= step <= one.last
            }
            mine = {rank for rank in ranks if readers[rank] == self._rank}
            far = {rank: readers[rank] for rank in ranks if rank not in mine}
            there = post.parts(far, timeline, step) if far else {}
            return there | {rank: self._of_old(rank, timeline, step) for rank in mine}

        state = self._loader.state
        about = restored, steps, state, fetch, records
        try:
            replay_resharded(*about, together=together, alive=post.attend)
        except (DeadlineError, RecoveryError):
            raise
        except EverstepError as error:
            return error
        return None

    def _of_old(self, rank: int, timeline: int, step: int) -> list[LogRecord]:
        """What this rank reads of a log of another number of ranks, verified.

        Raises:
            DamageError: it cannot be used.
        """
        try:
            return self._old.records(rank, timeline, step)
        except (EverstepError, LookupError) as error:
            why = error.message if isinstance(error, EverstepError) else repr(error)
            raise DamageError(f"the log of rank {rank} of step {step}: {why}") from error

    def close(self) -> None:
        """Nobody asks for a part of it any more. Idempotent."""
        self._lent_out.close()
        self._old.close()

    def part(self, rank: int, timeline: int, step: int) -> bytes:
        """The updates of a step of a rank's log, for another rank, with the mark where another
        number of ranks has written it, or another layout; b"" where they cannot be read here."""
        loader = self._loader
        about = loader.seams.filesystem, loader.ring, loader.timeout_s
        try:
            if self._old.has(rank, timeline):
                with contextlib.suppress(LookupError):
                    return encode_records(self._old.records(rank, timeline, step))
            if rank != self._rank:
                raise LookupError(f"rank {rank} reads its own log")
            return encode_records(self._lent_out.records_of(timeline, step, *about))
        except (EverstepError, LookupError) as error:
            _log.warning("step %d of rank %d's log cannot be handed out: %s", step, rank, error)
            return b""

    def _in_reach(self, chain: Chain, restored: Restored, post: LogExchange) -> Iterator[Chain]:
        """The chain, piece by piece: where each rank has recorded a part of what all consumed
        alike, as many steps as memory for the others' parts allows (``docs/design/ranks.md``)."""
        ranks = other_logs_needed(self._loader.state)
        if not ranks:
            yield from (chain,) if chain.steps else ()
            return
        place = 0
        spoilt = None
        while place == restored.replayed < len(chain.steps) and spoilt is None:
            parts: dict[tuple[int, int], dict[int, LogRecord]] = {}
            size_bytes = 0
            begin = place
            while place < len(chain.steps) and size_bytes < _PARTS_BYTES_MAX:
                try:
                    found = post.parts({rank: rank for rank in ranks}, *chain.steps[place])
                except DamageError as error:
                    spoilt = Skipped(*chain.steps[place], f"log: {error.message}")
                    break
                for rank, records in found.items():
                    for record in (one for one in records if one.head.kind == "update"):
                        head = record.head
                        parts.setdefault((head.timeline, head.lsn), {})[rank] = record
                        size_bytes += record.size_bytes
                place += 1
            self._log.parts = parts
            if place > begin:
                yield replace(chain, steps=chain.steps[begin:place])
        self._log.parts = {}
        if spoilt is not None:
            restored.skipped.append(spoilt)

    def _is_relaid(self, loaded: LoadedBase, timeline: int | None, step: int) -> bool:
        """Whether the first step behind a base is of other parts than this rank has now."""
        if timeline is None or loaded.marker.world == 1 or loaded.mismatches:
            return False
        mark = self._log.index.marks.get((timeline, step))
        return mark is not None and mark.shape != loaded.shape

    def _with_shape(self, loaded: LoadedBase) -> LoadedBase:
        """What the state consists of, now that it is restored: several ranks' bases have other
        parts in their files than each of them in its log."""
        state = self._loader.state
        shape = state.survey().shape
        groups = {}
        for key in state.optimizers:
            provider = state.providers[key]
            assert isinstance(provider, OptimizerProvider)
            groups[key] = provider.groups()
        return replace(loaded, shape=shape_digest(shape.entries, shape.aliases, groups))


def _steps_of(reach: Reach, timelines: Iterable[TimelineRecord]) -> list[tuple[int, int]]:
    """Timelines and steps that are redone, in order."""
    path = path_of(reach.timeline, {record.timeline: record for record in timelines})
    numbers = range(reach.step - reach.count + 1, reach.step + 1)
    return [(timeline_of(step, path) or reach.timeline, step) for step in numbers]
