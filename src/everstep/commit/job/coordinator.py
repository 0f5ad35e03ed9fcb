"""Rank 0 in a timeline of several ranks, as a state machine without I/O.

In addition to committing its own bases, it

1. sends each manifest to all ranks until every disk has it; then the watermark moves;
2. collects the bases on all disks and plans retention over all of them;
3. has a base read back by all ranks before anything is deleted (``adr/005``);
4. sends the list of bases to delete until no disk holds them.

Its state is lost with the process, without harm: each disk reports its own contents, and the next
start of the job begins at 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from everstep.commit.job.member import (
    BaseDamaged,
    BasesSeen,
    Member,
    Origin,
    Out,
    Pace,
    Perform,
    ReadBack,
)
from everstep.commit.job.messages import (
    COORDINATOR,
    Cluster,
    ManifestAck,
    ManifestNotice,
    Message,
    ReadBackReply,
    ReadBackRequest,
    Send,
    WatermarkAck,
    WatermarkNotice,
)
from everstep.commit.lineage import BaseId, Branch
from everstep.commit.retention import plan_retention
from everstep.format import Manifest
from everstep.format.message_codec import Stored


class Coordinator(Member):
    """Rank 0 of a timeline.

    Args:
        keep: number of bases to keep, at least 1.
        spared: returns bases that stay on the disks at any age; called before each deletion.
    """

    def __init__(
        self,
        cluster: Cluster,
        timeline: int,
        origin: Origin,
        *,
        keep: int,
        pace: Pace,
        spared: Callable[[], Iterable[BaseId]] = tuple,
    ) -> None:
        super().__init__(cluster, COORDINATOR, timeline, origin, pace=pace)
        self._keep = keep
        self._spared = spared
        self.verified: set[BaseId] = set()
        if origin.recovered is not None and not origin.unread:
            self.verified.add(origin.recovered)
        self.damaged: set[BaseId] = set(origin.unreadable)
        self._acknowledged: dict[BaseId, set[int]] = {}  # leaders that have the manifest
        self._sent: dict[BaseId, Manifest] = {}  # manifests that some disk may not have yet
        self._knows: set[int] = {COORDINATOR}  # ranks that acknowledged the watermark
        self._held: dict[int, tuple[BaseId, ...]] = {}  # by leader, since the last notification
        self._needed: dict[int, tuple[BaseId, ...]] = {}  # likewise
        self._branches: Mapping[int, Branch] = {}
        self._to_delete: tuple[BaseId, ...] = ()
        self._reading: BaseId | None = None
        self._read: dict[int, str] = {}
        self._repeated_s = 0.0

    @property
    def is_settled(self) -> bool:
        """True if no notification, read-back or deletion is pending on any rank."""
        return not self._deletions and not self.awaited

    @property
    def awaited(self) -> set[int]:
        """Ranks with a pending acknowledgement or reply, including this one."""
        leaders = set(self.cluster.leaders)
        found = {rank for rank in leaders if self._owes(rank)}
        for acknowledged in self._acknowledged.values():
            found |= leaders - acknowledged
        if self._reading is not None:
            found |= set(range(self.cluster.world)) - self._read.keys()
        return found

    def receive(self, sender: int, message: Message) -> list[Out]:
        """Process a message of this session."""
        if self.fenced:
            return []
        if isinstance(message, ManifestAck):
            return self._on_kept(sender, message.base)
        if isinstance(message, ReadBackReply):
            return self._on_read(sender, message.base, message.problem)
        if isinstance(message, WatermarkAck):
            return self._on_watermark_kept(sender, message)
        return super().receive(sender, message)

    def tick(self, now_s: float) -> list[Out]:
        """Advance the clock: repeat messages that may be lost, take over, report late ranks."""
        out = super().tick(now_s)
        if self.fenced or now_s - self._repeated_s < self.pace.repeat_s:
            return out
        self._repeated_s = now_s
        for base, acknowledged in self._acknowledged.items():
            missing = [rank for rank in self.cluster.leaders if rank not in acknowledged]
            out += [Send(rank, ManifestNotice(Stored(self._sent[base]))) for rank in missing]
        if self._reading is not None:
            missing = [r for r in self.cluster.others(self.rank) if r not in self._read]
            out += [Send(rank, ReadBackRequest(self._reading)) for rank in missing]
        # Not during a read-back: its result decides which bases to delete.
        if self.watermark.base is not None and self._reading is None:
            silent = set(range(self.cluster.world)) - self._knows
            silent |= {rank for rank in self.cluster.leaders if self._owes(rank)}
            out += [Send(rank, self._watermark_notice()) for rank in sorted(silent - {self.rank})]
        return out

    def _watermark_notice(self) -> WatermarkNotice:
        assert self.watermark.base is not None
        return WatermarkNotice(self.watermark.base, self._to_delete, tuple(sorted(self.damaged)))

    def _owes(self, leader: int) -> bool:
        """Return True if the last inventory of a disk is missing or still lists bases to delete."""
        held = self._held.get(leader)
        if held is None:
            return self.rank in self._held  # the notification was sent; no reply yet
        return any(base in held for base in self._to_delete)

    # The watermark.

    def _tell_committed(self, base: BaseId, manifest: Manifest) -> list[Out]:
        # The watermark has passed this base, so no rank needs its manifest.
        if self.watermark.base is not None and base <= self.watermark.base:
            return []
        self._sent[base] = manifest
        self._acknowledged.setdefault(base, set()).add(self.rank)
        return self._to_others(ManifestNotice(Stored(manifest))) + self._moved(base)

    def _on_kept(self, sender: int, base: BaseId) -> list[Out]:
        if base not in self._acknowledged:
            return []
        self._acknowledged[base].add(sender)
        return self._moved(base)

    def _moved(self, base: BaseId) -> list[Out]:
        # The watermark moves only when the manifest is on every disk: a rank that starts alone
        # afterwards finds the base, so older ones may be deleted.
        if not self._acknowledged[base].issuperset(self.cluster.leaders):
            return []
        # Acknowledgements of older bases no longer matter: a newer base is on every disk.
        for done in [other for other in self._acknowledged if other <= base]:
            del self._acknowledged[done], self._sent[done]
        out = self._advance(base)
        # Inventories and read-backs for the previous watermark are out of date.
        self._knows = {self.rank}
        self._held = {}
        self._to_delete = ()
        self._reading = None
        return out + self._tell_watermark()

    def _tell_watermark(self) -> list[Out]:
        notice = self._watermark_notice()
        self._damaged_elsewhere = notice.damaged
        return self._to_others(notice) + self._delete(self._to_delete)

    def _on_bases(self, seen: BasesSeen) -> list[Out]:
        self._branches = seen.branches
        return self._on_held(self.rank, seen.committed, seen.needed)

    def _on_watermark_kept(self, sender: int, message: WatermarkAck) -> list[Out]:
        # An answer to an older notice may list bases that were deleted since.
        if message.base != self.watermark.base:
            return []
        self._knows.add(sender)
        # The leader of a disk reports what is on it, for all ranks that share it.
        if sender not in self.cluster.leaders:
            return []
        return self._on_held(sender, message.held, message.needed)

    # Retention.

    def _on_held(
        self, leader: int, held: tuple[BaseId, ...], needed: tuple[BaseId, ...]
    ) -> list[Out]:
        self._held[leader] = held
        self._needed[leader] = needed
        # Planned only with the inventories of all disks, after earlier deletions are finished.
        if self._reading is not None or self._held.keys() < set(self.cluster.leaders):
            return []
        if any(self._owes(rank) for rank in self.cluster.leaders):
            return []
        return self._plan()

    def _plan(self) -> list[Out]:
        watermark = self.watermark.base
        assert watermark is not None
        # Newer bases are not on every disk yet, so they must not count as kept.
        everything = {base for held in self._held.values() for base in held if base <= watermark}
        plan = plan_retention(
            sorted(everything),
            self._branches,
            keep=self._keep,
            verified=self.verified,
            damaged=self.damaged,
            spared=set(self._spared()),
            needed={base for needed in self._needed.values() for base in needed},
        )
        if plan.verify is not None:
            return self._read_back(plan.verify)
        # The plan may contain the watermark, if that is damaged. Members never delete it, so a
        # request for it would never be fulfilled.
        delete = tuple(base for base in plan.delete if base < watermark)
        if not delete:
            return []
        self._to_delete = delete
        return self._tell_watermark()

    def _read_back(self, base: BaseId) -> list[Out]:
        if base.timeline != self.timeline:
            # Written by ranks of an earlier start, which may have been others: no rank of this one
            # can vouch for its files, so nothing is deleted until a new base is verified.
            return []
        self._reading = base
        self._read = {}
        return [*self._to_others(ReadBackRequest(base)), Perform(base, ReadBack())]

    def _on_read_back(self, base: BaseId, problem: str) -> list[Out]:
        return self._on_read(self.rank, base, problem)

    def _on_read(self, sender: int, base: BaseId, problem: str) -> list[Out]:
        if base != self._reading:
            return []
        self._read[sender] = problem
        if len(self._read) < self.cluster.world:
            return []
        self._reading = None
        found = [(rank, text) for rank, text in sorted(self._read.items()) if text]
        (self.damaged if found else self.verified).add(base)
        if not found:
            return self._plan()
        # The disks computed the bases needed by logs before this damage was known: ask them again.
        self._held = {}
        self._to_delete = ()
        return [*(BaseDamaged(base, rank, text) for rank, text in found), *self._tell_watermark()]
