"""One rank's log when a job of several ranks resumes.

The ranks agree on a step (:mod:`everstep.commit.log_reach`). Each replays its own log, from the
memory of its keeper or from its disk, on its share of the base, up to exactly that step.

Log records that ranks send each other while they resume together.

If each rank recorded a share of updates that all ranks made alike (``docs/design/ranks.md``),
replay needs the
shares of all. Each rank requests those of the others step by step. It answers requests whenever it
checks its mailbox: between steps, and while it loads. Messages of the agreement wait meanwhile.

If another number of ranks wrote the log, each old rank's log is read by one rank, which sends the
records, marks included, in the same way (``docs/design/ranks.md``).
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.commit import BaseId
from everstep.commit.job import Choice, ChunkReply, ChunkRequest
from everstep.commit.log_reach import LogRun, Reach, runs_of, timeline_of
from everstep.errors import (
    DamageError,
    DeadlineError,
    EverstepError,
    FormatError,
    RecoveryError,
)
from everstep.format import TimelineRecord, digest
from everstep.format.log import LogRecord
from everstep.restore.fetch import StartChannel
from everstep.restore.fetch.held import FetchedLog, lay_out_records, records_from_pack
from everstep.restore.fetch.start_channel import CHUNK_BYTES, IncomingBytes
from everstep.restore.load import LoadedBase, Restored
from everstep.restore.log import LogFound, LogReader
from everstep.restore.redo import UnknownClassError, doubt_about
from everstep.restore.reshard import LogsInMemory, ReshardedLogs, replay_resharded
from everstep.restore.start.report import ResumeRequest
from everstep.restore.start.roll_forward import replay as replay_chain
from everstep.restore.start.roll_forward import replayable
from everstep.run import BaseFound, Chain, Inventory, Skipped
from everstep.run.chain import path_of
from everstep.seams import Clock, FileSystem
from everstep.state.layout.entries import PART_OBJECT, shape_digest
from everstep.state.providers import OptimizerProvider
from everstep.state.ranks.log_shares import other_logs_needed

_TICK_S = 0.05
_CACHE_BYTES = 64 << 20
_NUMBER_BYTES = 8
_DIGEST_BYTES = len(digest(b""))


def encode_records(records: Sequence[LogRecord]) -> bytes:
    """Encode one rank's records of a step for another rank.

    The result consists of the total size, the size of the record index, the records and their
    index, and the digest of the index.

    Raises:
        DamageError: a record is damaged.
    """
    for record in records:
        record.verify()
    memory, index_bytes = lay_out_records(records)
    index = digest(memory[memory.nbytes - index_bytes :]).encode("ascii")
    total = 2 * _NUMBER_BYTES + memory.nbytes + _DIGEST_BYTES
    numbers = (total, index_bytes)
    front = b"".join(number.to_bytes(_NUMBER_BYTES, "little") for number in numbers)
    return b"".join([front, memory, index])


def decode_records(data: bytearray, timeline: int) -> list[LogRecord]:
    """Invert :func:`encode_records`, verifying every byte; the records share the memory of
    ``data``.

    Raises:
        DamageError: the bytes are damaged.
        FormatError: the bytes are not records.
    """
    begin = 2 * _NUMBER_BYTES
    end = len(data) - _DIGEST_BYTES
    index_bytes = int.from_bytes(data[_NUMBER_BYTES:begin], "little")
    index_digest = data[end:].decode("ascii", "replace")
    # The size comes from another rank. records_from_pack() compares it with the bytes before use.
    return records_from_pack(timeline, memoryview(data)[begin:end], index_bytes, index_digest)


@dataclass(slots=True)
class _PendingStep:
    """One rank's records of a step while they arrive.

    Attributes:
        reader: rank that sends them.
        incoming: their bytes, which begin with the total size.
        unreadable: that rank cannot read them.
    """

    reader: int
    incoming: IncomingBytes
    unreadable: bool = False

    @property
    def is_complete(self) -> bool:
        return self.unreadable or self.incoming.is_complete


EncodedLog = Callable[[int, int, int], bytes]
"""Returns the records that a rank wrote for a step of a timeline (rank, timeline, step), encoded by
:func:`encode_records`; b"" if they cannot be read here."""


class LogExchange:
    """Sends this rank's log records to other ranks, and fetches theirs.

    Args:
        encoded: log of this rank; None: it has none to send.
    """

    def __init__(self, others: StartChannel, clock: Clock, encoded: EncodedLog | None) -> None:
        self._others = others
        self._clock = clock
        self._encode = encoded
        # Ranks request the chunks of a step one by one, and several ranks the same step.
        self._cache: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()
        self._pending: dict[int, _PendingStep] = {}
        self._wanted = BaseId(0, 0)

    def serve(self) -> None:
        """Answer pending requests of other ranks, and report that this rank is alive."""
        while self._others.attend():
            pass
        self.answer()
        self._others.is_alive()

    def answer(self) -> None:
        """Process the requests and replies that have arrived."""
        while self._others.chunks:
            sender, message = self._others.chunks.popleft()
            if isinstance(message, ChunkRequest):
                self._reply(sender, message)
            elif isinstance(message, ChunkReply):
                self._take(sender, message)

    def fetch(
        self, readers: Mapping[int, int], timeline: int, step: int
    ) -> dict[int, list[LogRecord]]:
        """Fetch the records of a step from other ranks.

        Args:
            readers: by the rank whose records are needed, the rank (not this one) that reads them.

        Raises:
            DamageError: records are damaged or unreadable.
            DeadlineError: a rank does not respond.
            RecoveryError: a rank has failed.
        """
        self._wanted = BaseId(timeline, step)
        now_s = self._clock.monotonic_s()
        self._pending = {
            rank: _PendingStep(reader, IncomingBytes(now_s)) for rank, reader in readers.items()
        }
        self._others.expect(readers.values())
        while missing := [rank for rank, one in self._pending.items() if not one.is_complete]:
            for rank in missing:
                self._request(rank, self._pending[rank])
            self._others.attend(_TICK_S)
            # Ranks fetch from each other at the same time: answering here avoids a deadlock.
            self.answer()
            self._others.is_alive()
            # The rank that reads the records may fail or hang, as in the agreement.
            self._others.raise_failed()
            self._others.check({self._pending[rank].reader for rank in missing})
        received = self._pending
        self._pending = {}
        found = {}
        for rank, one in received.items():
            if one.unreadable:
                whose = "its own log" if one.reader == rank else f"the log of rank {rank}"
                why = f"rank {one.reader} cannot read {whose} for step {step}"
                raise DamageError(why, rank=one.reader)
            try:
                found[rank] = decode_records(one.incoming.data, timeline)
            except (DamageError, FormatError) as error:
                why = f"the log of rank {rank}, step {step}: {error.message}"
                raise DamageError(why, rank=one.reader) from error
        return found

    def _request(self, rank: int, one: _PendingStep) -> None:
        """Request the next bytes; repeat the request if nothing has arrived for long."""
        for offset, size in one.incoming.next_requests(self._clock.monotonic_s()):
            self._others.tell(one.reader, ChunkRequest(self._wanted, rank, offset, size, log=True))

    def _reply(self, sender: int, wanted: ChunkRequest) -> None:
        if not wanted.log:
            return
        if wanted.offset < 0 or not 0 < wanted.size_bytes <= CHUNK_BYTES:
            return
        data = self._encoded(wanted.rank, wanted.base.timeline, wanted.base.step)
        piece = data[wanted.offset : wanted.offset + wanted.size_bytes]
        self._others.tell(
            sender, ChunkReply(wanted.base, wanted.rank, wanted.offset, piece, log=True)
        )

    def _encoded(self, rank: int, timeline: int, step: int) -> bytes:
        """Return the records that this rank reads; b"" if it cannot.

        Ranks request the same steps in chunks, hence the cache.
        """
        key = rank, timeline, step
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        data = b"" if self._encode is None else self._encode(rank, timeline, step)
        # Also b"", so that a step that cannot be read is not tried again for every request.
        self._cache[key] = data
        # The last step stays, however large: otherwise each of its chunks would encode it anew.
        while len(self._cache) > 1 and sum(map(len, self._cache.values())) > _CACHE_BYTES:
            self._cache.popitem(last=False)
        return data

    def _take(self, sender: int, reply: ChunkReply) -> None:
        one = self._pending.get(reply.rank)
        if one is None or not reply.log or one.reader != sender or reply.base != self._wanted:
            return
        incoming = one.incoming
        if not incoming.add(reply.offset, reply.data, self._clock.monotonic_s()):
            return
        # An empty reply at the expected offset is no repetition: the reader has no bytes to send.
        one.unreadable = not reply.data
        if incoming.size_bytes is None and not one.unreadable:
            incoming.size_bytes = int.from_bytes(incoming.data[:_NUMBER_BYTES], "little")


_log = logging.getLogger("everstep")
_FETCH_BYTES_MAX = 256 << 20  # records of other ranks fetched at a time; at least one step


@dataclass(frozen=True, slots=True)
class Redone:
    """Result of replay.

    Attributes:
        unusable: timeline and step that could not be replayed; the state is then unusable.
        sure: the failing step is certain; otherwise it is one of several replayed in one pass.
        inexact: why the state is not exact; "" if it is.
        skipped: unusable records, with the reason.
        notes: in words, everything that could not be restored.
        replay_s: seconds spent.
        relaid: the log belongs to another layout; nothing was replayed.
        touched: the state is no longer that of the base.
    """

    unusable: tuple[int, int] | None = None
    sure: bool = True
    inexact: str = ""
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    replay_s: float = 0.0
    relaid: bool = False
    touched: bool = True


class _Replay:
    """One replay on a base that the ranks have chosen.

    Attributes:
        records: timeline records, by number.
        steps: timeline and step of each step to replay, in order.
        restored: state restored so far.
        skipped: steps that cannot be replayed, with the reason.
    """

    def __init__(
        self,
        choice: Choice,
        run: PurePath,
        loaded: LoadedBase,
        together: bool,
        exchange: LogExchange,
    ) -> None:
        assert choice.base is not None
        assert choice.reach is not None
        self.choice = choice
        self.base = choice.base
        self.reach = choice.reach
        self.together = together
        self.exchange = exchange
        self.records = {record.timeline: record for record in choice.timelines}
        self.path = path_of(self.reach.timeline, self.records)
        self.steps = _steps_of(self.reach, choice.timelines)
        self.skipped: list[Skipped] = []
        found = BaseFound(self.base, run, "committed", choice.manifest, None, ())
        self.restored = Restored(found, loaded, self.base, loaded.marker.lsn)
        self._notes_before = len(loaded.notes)

    def result(self, failed: EverstepError | None) -> Redone:
        """Return the result, given the error if a step failed."""
        restored = self.restored
        reach = self.reach
        noted = () if restored.loaded is None else restored.loaded.notes[self._notes_before :]
        redone = Redone(
            inexact=restored.inexact,
            skipped=(*self.skipped, *restored.skipped),
            notes=tuple(dict.fromkeys(noted)),
        )
        if failed is None and restored.end == reach.end and restored.lsn == reach.lsn:
            return redone
        timeline, step = self.steps[min(restored.replayed, reach.count - 1)]
        if failed is not None:
            why = f"the log cannot be replayed: {failed.message}"
            redone = replace(redone, skipped=(*redone.skipped, Skipped(timeline, step, why)))
        return replace(
            redone,
            unusable=(timeline, step),
            # Of steps replayed in one pass, any may be the one that failed.
            sure=failed is None or not self.together or reach.count == 1,
            touched=failed is not None or restored.replayed > 0,
        )


class RankLog:
    """The log of this rank.

    Args:
        left: records of other ranks in the memory of keepers on this machine.

    Attributes:
        lent: more records, from the memory of other nodes.
        resharded: logs of another number of ranks, or of another layout.
    """

    def __init__(self, request: ResumeRequest, left: LogsInMemory) -> None:
        self._request = request
        self._filesystem = request.seams.filesystem
        self._records = request.recalled.records
        self._rank = request.state.ranks.rank
        self._log = self._reader(LogFound((), ()))
        # The same records for other ranks: their requests arrive while this rank replays its own.
        self._served = self._reader(self._log.found)
        self.resharded = ReshardedLogs(
            self._filesystem,
            self._rank,
            request.state.ranks.world,
            LogsInMemory({**left.records, self._rank: self._records}, left.held),
            request.ring,
            timeout_s=request.timeout_s,
        )
        self._doubt = ""
        self.lent: Sequence[FetchedLog] = ()

    def runs(
        self,
        inventory: Inventory,
        copies: Sequence[tuple[FileSystem, Inventory]] = (),
        bases: Collection[BaseId] = (),
        *,
        lossy: bool = True,
        read_from: Callable[[FileSystem], FileSystem] = lambda files: files,
    ) -> tuple[LogRun, ...]:
        """Scan the log; return the runs of steps that it has.

        Args:
            copies: places with copies of the run, nearest first.
            bases: bases that this rank could start from; of copies only records that lead on from
                these count.
            lossy: include lossy records in copies.
            read_from: returns the file system to read segments of a copy from.

        Raises:
            OSError: a directory cannot be read.
        """
        lent = [record for log in self.lent if log.is_of(inventory) for record in log.records]
        log = LogFound.of(
            self._filesystem,
            inventory,
            self._records,
            rank=self._rank,
            lent=lent,
            copies=copies,
            bases=bases,
            lossy_copies=lossy,
        )
        # Its reads are of the log found before. The other reader is closed at the end of each
        # replay.
        self._served.close()
        self._log = self._reader(log, read_from)
        self._served = self._reader(log, read_from)
        return runs_of(log.index.marks, log.index.updates)

    def in_copies(self, choice: Choice) -> dict[PurePath, tuple[FileSystem, int]]:
        """Return the files of copies that a choice needs, as of the last scan."""
        if choice.reach is None or choice.readers:
            return {}
        return self._log.found.in_copies(_steps_of(choice.reach, choice.timelines))

    def first_of(self, choice: Choice) -> tuple[int, int]:
        """Return timeline and step of the first step to replay."""
        assert choice.reach is not None
        return _steps_of(choice.reach, choice.timelines)[0]

    def timelines(self, inventory: Inventory) -> dict[int, TimelineRecord]:
        """Return the timeline records that came from other nodes, so that all ranks can compare
        them."""
        return {log.record.timeline: log.record for log in self.lent if log.is_of(inventory)}

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Unusable segments."""
        return tuple(dict.fromkeys([*self._log.found.skipped, *self.resharded.skipped]))

    def redo(
        self, choice: Choice, loaded: LoadedBase, *, together: bool, exchange: LogExchange
    ) -> Redone:
        """Replay the log up to the step of ``choice``, on the state restored from its base.

        Args:
            together: replay several steps in one pass.
            exchange: fetches records of other ranks.

        Raises:
            DeadlineError, RecoveryError: another rank does not respond, or has failed.
            MismatchError: in strict mode, this program lacks a function or class that steps need.
        """
        start_s = self._request.seams.clock.monotonic_s()
        replay = _Replay(choice, self._request.run, loaded, together, exchange)
        restored = replay.restored
        if choice.readers:
            failed = self._replay_resharded(replay)
        else:
            restored.loaded = self._with_shape(loaded)
            if self.is_other_layout(restored.loaded, *replay.steps[0]):
                return Redone(relaid=True, touched=False)
            failed = self._replay_own(replay)
        if isinstance(failed, UnknownClassError) and self._request.strict:
            assert restored.end is not None
            raise failed.refused(restored.end.step, self._request.run) from failed
        if failed is not None:
            self._doubt = doubt_about(failed) or self._doubt
        redone = replay.result(failed)
        replay_s = self._request.seams.clock.monotonic_s() - start_s
        return replace(redone, inexact=redone.inexact or self._doubt, replay_s=replay_s)

    def _reader(
        self, log: LogFound, read_from: Callable[[FileSystem], FileSystem] = lambda files: files
    ) -> LogReader:
        request = self._request
        return log.reader(self._filesystem, request.ring, request.timeout_s, read_from)

    def _replay_own(self, replay: _Replay) -> EverstepError | None:
        """Replay this rank's own log; return the error if a step failed."""
        restored = replay.restored
        loaded = restored.loaded
        assert restored.base is not None
        assert loaded is not None
        full_chain = self._log.found.index.follow(replay.base, loaded.marker.lsn, None, replay.path)
        chain = replace(full_chain, steps=full_chain.steps[: replay.reach.count])
        chain = replayable(restored.base, chain, self._request, self._log.found, replay.skipped)
        for slice_ in self._with_shares(chain, restored, replay.exchange):
            try:
                replay_chain(
                    restored,
                    slice_,
                    self._request,
                    self._log,
                    replay.records,
                    replay.together,
                    alive=replay.exchange.serve,
                )
            except EverstepError as error:
                # Failures of other ranks are raised by the iterator, outside of this block: they
                # end the start.
                return error
        return None

    def _replay_resharded(self, replay: _Replay) -> EverstepError | None:
        """Replay the logs of another layout; return the error if a step failed."""

        def fetch(ranks: Sequence[int], timeline: int, step: int) -> dict[int, list[LogRecord]]:
            readers = {
                one.source: one.rank
                for one in replay.choice.readers
                if one.timeline == timeline and one.first <= step <= one.last
            }
            mine = {rank for rank in ranks if readers[rank] == self._rank}
            far = {rank: readers[rank] for rank in ranks if rank not in mine}
            there = replay.exchange.fetch(far, timeline, step) if far else {}
            return there | {rank: self._resharded_records(rank, timeline, step) for rank in mine}

        try:
            replay_resharded(
                replay.restored,
                replay.steps,
                self._request.state,
                fetch,
                replay.records,
                together=replay.together,
                alive=replay.exchange.serve,
            )
        except (DeadlineError, RecoveryError):
            # Another rank has failed or is silent. That is no fault of the log, and a replay from
            # the base again would not help.
            raise
        except EverstepError as error:
            return error
        return None

    def _resharded_records(self, rank: int, timeline: int, step: int) -> list[LogRecord]:
        """Return records of an old rank that this rank reads, verified.

        Raises:
            DamageError: they are unusable.
        """
        try:
            return self.resharded.records(rank, timeline, step)
        except (EverstepError, LookupError) as error:
            why = error.message if isinstance(error, EverstepError) else repr(error)
            raise DamageError(f"the log of rank {rank}, step {step}: {why}") from error

    def close(self) -> None:
        """End serving records to other ranks. Idempotent."""
        self._served.close()
        self.resharded.close()

    def encoded(self, rank: int, timeline: int, step: int) -> bytes:
        """Return the encoded records of a step for another rank; b"" if they cannot be read here.

        These are the updates, and also the mark if they belong to a log of another layout.
        """
        try:
            if self.resharded.has(rank, timeline):
                with contextlib.suppress(LookupError):
                    return encode_records(self.resharded.records(rank, timeline, step))
            if rank != self._rank:
                raise LookupError(f"rank {rank} reads its own log")
            return encode_records(self._served.records_of(timeline, step))
        except (EverstepError, LookupError) as error:
            # The empty reply lets the other rank report the step, and all ranks choose again. An
            # exception would end the replay of this rank.
            _log.warning("step %d of the log of rank %d cannot be sent: %s", step, rank, error)
            return b""

    def _with_shares(
        self, chain: Chain, restored: Restored, exchange: LogExchange
    ) -> Iterator[Chain]:
        """Yield the chain in slices, with the shares of other ranks fetched for each.

        If each rank recorded a share of common updates, a slice is as long as memory for the shares
        allows (``docs/design/ranks.md``).
        """
        shards = self._request.state.ranks.lossy or self._has_shares(chain)
        ranks = other_logs_needed(self._request.state, shards=shards)
        if not ranks:
            yield from (chain,) if chain.steps else ()
            return
        place = 0
        unusable = None
        # Stop as soon as fewer steps were replayed than fetched: a record was damaged.
        while place == restored.replayed < len(chain.steps) and unusable is None:
            parts: dict[tuple[int, int], dict[int, LogRecord]] = {}
            size_bytes = 0
            begin = place
            while place < len(chain.steps) and size_bytes < _FETCH_BYTES_MAX:
                step = chain.steps[place]
                try:
                    found = exchange.fetch({rank: rank for rank in ranks}, *step)
                except DamageError as error:
                    unusable = Skipped(*step, f"log: {error.message}")
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
        # Only now, after the intact steps before it were replayed.
        if unusable is not None:
            restored.skipped.append(unusable)

    def _has_shares(self, chain: Chain) -> bool:
        """Return True if this rank's log has shares of gradients, by the first step of each
        timeline that has an update."""
        decided: set[int] = set()
        for timeline, step in chain.steps:
            if timeline in decided:
                continue
            # Replay reports records that cannot be read.
            with contextlib.suppress(EverstepError, LookupError):
                records = self._served.records_of(timeline, step)
                if any(PART_OBJECT in one.objects for one in records):
                    return True
                if records:
                    decided.add(timeline)
        return False

    def is_other_layout(self, loaded: LoadedBase, timeline: int, step: int) -> bool:
        """Return True if the first step after a base belongs to another layout than this rank
        has now."""
        if loaded.marker.world == 1 or loaded.mismatches:
            return False
        mark = self._log.found.index.marks.get((timeline, step))
        return mark is not None and mark.shape != loaded.shape

    def _with_shape(self, loaded: LoadedBase) -> LoadedBase:
        """Set the shape digest of the restored state.

        The files of a rank's base contain other tensors than its log, so the digest is computed
        from the live state.
        """
        state = self._request.state
        shape = state.survey().shape
        groups = {}
        for key in state.optimizers:
            provider = state.providers[key]
            assert isinstance(provider, OptimizerProvider)
            groups[key] = provider.groups()
        return replace(loaded, shape=shape_digest(shape.entries, shape.aliases, groups))


def _steps_of(reach: Reach, timelines: Iterable[TimelineRecord]) -> list[tuple[int, int]]:
    """Return timelines and steps to replay, in order."""
    path = path_of(reach.timeline, {record.timeline: record for record in timelines})
    numbers = range(reach.step - reach.count + 1, reach.step + 1)
    return [(timeline_of(step, path) or reach.timeline, step) for step in numbers]
