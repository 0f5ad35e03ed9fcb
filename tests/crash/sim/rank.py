"""One simulated process: all that one rank of one start of a job does, by the real code.

The machines of :mod:`everstep.commit` decide; :mod:`everstep.restore.fetch.rank_copies` and
:mod:`everstep.keeper.persist.rank_disk` carry out; only training itself, and the bytes of the
state, are made up here. A process does one thing at a time, and each takes its time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from everstep.commit.base_commit import Condemn, DeleteFiles, FilesDeleted, WriteFiles, WriteMarker
from everstep.commit.job.agreement import (
    Agreement,
    Demand,
    Go,
    InventorySeen,
    Opened,
    OpenTimeline,
    RanksSilent,
    Refuse,
    Restore,
    Restored,
    TakeInventory,
)
from everstep.commit.job.coordinator import Coordinator
from everstep.commit.job.member import (
    BaseDamaged,
    BaseDurable,
    BaseLate,
    Delete,
    Event,
    Fenced,
    GaveUp,
    Member,
    Origin,
    Pace,
    Perform,
    WatermarkMoved,
)
from everstep.commit.job.messages import (
    COORDINATOR,
    Envelope,
    Message,
    Send,
    accept,
    encode_message,
)
from everstep.commit.job.offers import Choice, Needs, Source, all_ranks
from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError, FencedError
from everstep.format.digests import digest
from everstep.format.header import ShardIdentity
from everstep.format.names import DELETING, base_dir, marker_name, shard_name
from everstep.format.reader import read_record_bytes
from everstep.format.records import FileRecord, Manifest, Marker, TimelineRecord
from everstep.keeper.persist.rank_disk import RankDisk
from everstep.restore.fetch.rank_copies import offer_of, open_on_disk
from everstep.run.scan import scan_run
from everstep.tiers.durable_files import ensure_dir, ensure_dirs, write_durably
from tests.crash.sim.faults import SimulatedCrash
from tests.crash.sim.host import ProcessDisk
from tests.crash.sim.truth import RUN, Contents

if TYPE_CHECKING:
    from tests.crash.sim.cluster import SimCluster
    from tests.crash.sim.job import Job

__all__ = ["PACE", "SimRank"]

PACE = Pace(repeat_s=1.0, take_over_s=4.0, late_s=30.0)
_RETRY_S = 1.0
_COPIES_MAX = 2  # bases in memory: the one that is durable, and the one under way


class SimRank:
    """A rank of a job, on a node.

    Attributes:
        memory: bases in this process's memory.
        restored: what it has restored at the start.
    """

    def __init__(self, cluster: SimCluster, job: Job, rank: int, node: int) -> None:
        self.cluster = cluster
        self.job = job
        self.rank = rank
        self.node = node
        self.name = f"{job.session}.{rank}"
        self.alive = True
        self.asleep_until_s = 0.0
        self.disk = ProcessDisk(cluster.disk_of(node), node, self._between)
        self.memory: dict[BaseId, tuple[Marker, bytes]] = {}
        self.restored: list[Contents] = []
        self.member: Member | None = None
        self.damaged: list[tuple[BaseId, int]] = []
        self._rate = cluster.rng.choice((0.5, 0.9, 1.0, 1.1, 2.0))
        self._offset_s = cluster.rng.uniform(0, 1e6)
        self._todo: deque[Any] = deque()
        self._busy = False
        self._spare: BaseId | None = None
        self._files = RankDisk(self.disk, RUN, rank, self, unique=self.name)
        world = len(job.nodes)
        self.agreement = Agreement(
            rank,
            world,
            Demand(step=job.asked, needs=self._needs(), fetch=cluster.plan.fetch),
            record_of=self._record_of,
            silent_s=30.0,
        )

    def start(self) -> None:
        """Begins to agree with the others."""
        self._absorb(self.agreement.start())
        self.cluster.later(self.cluster.rng.uniform(0, 0.5), self._tick)

    def die(self, why: str) -> None:
        """Ends at once, with what is in its memory."""
        if self.alive:
            self.alive = False
            self.disk.dead = True
            self.cluster.note(self.name, f"dies: {why}")

    def hear(self, data: bytes) -> None:
        """A message has arrived."""
        if not self.alive:
            return
        if self.cluster.now_s < self.asleep_until_s:
            self.cluster.later(self._sleeps_s(), lambda: self.hear(data))
            return
        envelope = accept(data, self.job.session)
        if envelope is None:
            return
        self._absorb(self.agreement.receive(envelope.sender, envelope.message))
        if self.member is not None:
            self._absorb(self.member.receive(envelope.sender, envelope.message))

    def capture(self, base: BaseId, contents: Contents) -> None:
        """Training has reached a base: it is in memory now."""
        assert self.member is not None
        identity = ShardIdentity(
            "run", base.timeline, base.step, base.step, self.rank, len(self.job.nodes), True
        )
        data = contents.encode()
        file = FileRecord(shard_name(self.rank), len(data), 0, digest(b""), digest(data))
        self.memory[base] = (Marker.of(identity, (file,)), data)
        self._absorb(self.member.persist(identity))

    @property
    def is_full(self) -> bool:
        """True if there is no space for one more base: training waits (I10)."""
        return len(self.memory) >= _COPIES_MAX

    # The loop.

    def _absorb(self, outs: Iterable[Any]) -> None:
        for out in outs:
            if isinstance(out, Send | Send):
                self._send(out.rank, out.message)
            elif isinstance(out, Perform | TakeInventory | Restore | OpenTimeline):
                self._todo.append(out)
            else:
                self._report(out)
        self._pump()

    def _pump(self) -> None:
        if self._todo and not self._busy and self.alive:
            self._busy = True
            self.cluster.later(self.cluster.takes_s(), self._perform)

    def _perform(self) -> None:
        if not self.alive:
            return
        if self.cluster.now_s < self.asleep_until_s:
            self.cluster.later(self._sleeps_s(), self._perform)
            return
        todo = self._todo.popleft()
        if _is_condemning(todo) and self.cluster.faults.falls_asleep(self, todo.base.step):
            self._todo.appendleft(todo)
            self.cluster.later(self._sleeps_s(), self._perform)
            return
        self.cluster.note(self.name, _in_words(todo))
        try:
            self._do(todo)
        except SimulatedCrash as crash:
            self.die(str(crash))
            return
        except FencedError as error:
            assert self.member is not None
            self._absorb(self.member.fence_off(error))
        except (OSError, EverstepError) as error:
            self.cluster.note(self.name, f"  fails: {error}")
            if not self._gave_up(todo, error):
                self._busy = False
                self._todo.appendleft(todo)
                self.cluster.later(_RETRY_S, self._pump)
                return
        self._busy = False
        self._pump()

    def _do(self, todo: Any) -> None:
        if isinstance(todo, Perform):
            assert self.member is not None
            if self.member.fenced is None:
                self._absorb(self.member.done(todo.base, self._perform_do(todo)))
        elif isinstance(todo, TakeInventory):
            inventory = scan_run(self.disk, RUN)
            disk = self.disk.disk.name
            offer = offer_of(self.disk, inventory, self.rank, disk, self.held())
            self._absorb(self.agreement.done(InventorySeen(offer)))
        elif isinstance(todo, Restore):
            self._absorb(self.agreement.done(Restored(self._restore(todo.choice))))
        else:
            assert isinstance(todo, OpenTimeline)
            ours = open_on_disk(self.disk, RUN, todo.record, todo.choice, self.name)
            self._absorb(self.agreement.done(Opened(ours)))

    def _perform_do(self, todo: Perform) -> Event:
        """Whatever is removed is reported, also by a process that dies within."""
        if not (isinstance(todo.action, Delete) and isinstance(todo.action.action, DeleteFiles)):
            return self._files.perform(todo)
        marked = base_dir(RUN, todo.base.timeline, todo.base.step) / DELETING
        event: Event | None = None
        try:
            event = self._files.perform(todo)
            return event
        finally:
            dying = event is None and str(marked) in self.disk.disk.fs.paths()
            if dying or isinstance(event, FilesDeleted):
                self.cluster.on_deleted(self, todo.base)

    def _gave_up(self, todo: Any, error: Exception) -> bool:
        """Return True if a base is abandoned because its files could not be written."""
        if not isinstance(todo, Perform) or not isinstance(todo.action, WriteFiles | WriteMarker):
            return False
        assert self.member is not None
        try:
            self._files.withdraw(todo.base)
        except SimulatedCrash as crash:
            self.die(str(crash))
            return True
        except OSError:
            return False
        self._absorb(self.member.failed(todo.base, str(error)))
        return True

    def _tick(self) -> None:
        if not self.alive:
            return
        if self.cluster.now_s >= self.asleep_until_s:
            now_s = self.cluster.now_s * self._rate + self._offset_s
            self._absorb(self.agreement.tick(now_s))
            if self.member is not None:
                self._absorb(self.member.tick(now_s))
        self.cluster.later(self.cluster.rng.uniform(0.4, 0.9), self._tick)

    def _between(self) -> None:
        self.cluster.run_others(self)

    def _sleeps_s(self) -> float:
        return self.asleep_until_s - self.cluster.now_s + self.cluster.rng.uniform(0, 0.1)

    def _send(self, rank: int, message: Message) -> None:
        data = encode_message(Envelope(self.job.session, self.rank, message))
        self.cluster.send(self, rank, data)

    # What machines report.

    def _report(self, out: Any) -> None:
        self.cluster.note(self.name, _in_words(out))
        if isinstance(out, Go):
            self._go(out)
        elif isinstance(out, Refuse):
            self.cluster.on_refused(self, out.reason)
        elif isinstance(out, BaseDurable):
            self.cluster.on_durable(self, out.base)
        elif isinstance(out, WatermarkMoved):
            self.cluster.on_watermark(self, out.base)
            for base in [one for one in self.memory if one < out.base]:
                del self.memory[base]
        elif isinstance(out, GaveUp):
            self.memory.pop(out.base, None)
        elif isinstance(out, BaseDamaged):
            self.cluster.on_damaged(self, out.base, out.rank)
        else:
            assert isinstance(out, Fenced | BaseLate | RanksSilent)

    def _go(self, go: Go) -> None:
        layout = self.job.layout
        recovered = go.choice.base if go.choice.durable else None
        if self.rank == COORDINATOR:
            self.member = Coordinator(
                layout,
                go.timeline,
                Origin(recovered, unreadable=go.choice.unreadable),
                keep=self.cluster.plan.keep,
                pace=PACE,
            )
        else:
            self.member = Member(layout, self.rank, go.timeline, Origin(recovered), pace=PACE)
        self.cluster.on_go(self, go.timeline, go.choice)
        self._spare = None if go.choice.durable else go.choice.base
        if self.member.leads:
            self.cluster.later(self.cluster.takes_s(), self._sweep)

    def _sweep(self) -> None:
        """Removes what older timelines have left unfinished on this disk."""
        if not self.alive:
            return
        assert self.member is not None
        self.cluster.note(self.name, "sweeps up")
        try:
            self._files.sweep(self.member.timeline, spare=self._spare)
        except SimulatedCrash as crash:
            self.die(str(crash))
        except FencedError as error:
            self._absorb(self.member.fence_off(error))
        except (OSError, EverstepError) as error:
            self.cluster.note(self.name, f"sweeping fails: {error}")

    # What stands for the state.

    def held(self) -> list[tuple[Marker, str]]:
        """Return the bases in the memory of this node's processes."""
        here = [p for p in self.cluster.processes if p.alive and p.node == self.node]
        return [(marker, "memory") for p in here for marker, _ in p.memory.values()]

    def _needs(self) -> Needs:
        if self.cluster.plan.fetch:
            return all_ranks
        world = len(self.job.nodes)

        def needs(rank: int, manifest: Manifest) -> Iterable[int]:
            return (rank,) if len(manifest.markers) == world else range(len(manifest.markers))

        return needs  # type: ignore[return-value]

    def _record_of(self, choice: Choice, number: int) -> TimelineRecord:
        key = f"{self.job.session}/{number}"
        parent = self.restored[0].timeline if choice.base is not None else None
        self.cluster.on_opening(self.job, key, number, parent, choice)
        return TimelineRecord(
            run="run",
            timeline=number,
            parent=None if choice.base is None else choice.base.timeline,
            fork_step=0 if choice.base is None else choice.base.step,
            exact=True,
            world=len(self.job.nodes),
            fingerprint={"session": self.job.session},
            created_unix_s=float(int(self.cluster.now_s)),
        )

    def _restore(self, choice: Choice) -> tuple[tuple[int, Source], ...]:
        self.restored = []
        damaged = []
        if choice.base is None or choice.manifest is None:
            return ()
        for rank in self._needs()(self.rank, choice.manifest):
            (file,) = choice.manifest.markers[rank].files
            data = None
            for source in choice.sources[rank]:
                if not self.cluster.plan.fetch and source.rank != self.rank:
                    continue
                data = self.fetch(choice.base, rank, source)
                if data is not None and digest(data) == file.digest:
                    break
                damaged.append((rank, source))
                data = None
            if data is not None:
                self.restored.append(Contents.decode(data))
        missing = len(self.restored) < len(list(self._needs()(self.rank, choice.manifest)))
        return tuple(damaged) if missing else ()

    def fetch(self, base: BaseId, rank: int, source: Source) -> bytes | None:
        """Reads a piece where another rank (or this one) can read it."""
        other = self.job.ranks[source.rank]
        if source.tier == "memory":
            for process in self.cluster.processes:
                if process.alive and process.node == other.node and base in process.memory:
                    marker, data = process.memory[base]
                    if marker.rank == rank:
                        return data
            return None
        path = base_dir(RUN, base.timeline, base.step) / shard_name(rank)
        try:
            return other.disk.disk.fs.read_bytes(path)
        except OSError:
            return None

    def write_shards(self, base: BaseId) -> tuple[FileRecord, ...]:
        marker, data = self.memory[base]
        directory = base_dir(RUN, base.timeline, base.step)
        ensure_dirs(self.disk, directory.parent)
        ensure_dir(self.disk, directory.parent)
        ensure_dir(self.disk, directory)
        write_durably(self.disk, directory / shard_name(self.rank), data)
        return marker.files

    def read_shards(self, base: BaseId) -> str:
        directory = base_dir(RUN, base.timeline, base.step)
        try:
            path = directory / marker_name(self.rank)
            marker = Marker.decode(read_record_bytes(self.disk, path), path)
            (file,) = marker.files
            data = read_record_bytes(self.disk, directory / file.name)
        except (OSError, EverstepError) as error:
            return str(error)
        if digest(data) != file.digest:
            return f"{file.name} is damaged"
        self.job.read.setdefault((base.timeline, base.step), set()).add(self.rank)
        return ""


def _is_condemning(todo: Any) -> bool:
    return (
        isinstance(todo, Perform)
        and isinstance(todo.action, Delete)
        and isinstance(todo.action.action, Condemn)
    )


def _in_words(what: Any) -> str:
    if isinstance(what, Perform):
        return f"{what.base}: {_in_words(what.action)}"
    if isinstance(what, Restore | Go):
        return f"{type(what).__name__} {what.choice.base or 'afresh'}"
    if isinstance(what, OpenTimeline):
        return f"opens timeline {what.record.timeline} behind {what.choice.base}"
    if isinstance(what, BaseDurable | WatermarkMoved | GaveUp | BaseDamaged | BaseLate):
        return f"{type(what).__name__} {what.base}"
    if hasattr(what, "action"):
        return f"{type(what).__name__} {type(what.action).__name__}"
    return type(what).__name__ if not isinstance(what, Refuse) else f"Refuse: {what.reason}"
