"""One rank in a timeline of several ranks, as a state machine without I/O.

It takes each base of this rank through :class:`~everstep.commit.base_commit.BaseCommit`, brings the
manifest to every disk, and follows the watermark. Its driver performs each :class:`Perform` and
reports the event with :meth:`Member.done`, sends each :class:`Send`, passes received messages to
:meth:`Member.receive`, and calls :meth:`Member.tick` regularly. Messages may be lost, late,
duplicated and reordered; only files count as durable.

Rank 0 coordinates (:mod:`everstep.commit.job.coordinator`). If it is lost, any rank requests the
markers itself and writes the manifest to its own disk: captured bases become durable without rank
0, and only reclamation waits for the next start of the job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from everstep.commit.base_commit import Action as CommitAction
from everstep.commit.base_commit import (
    BaseCommit,
    BaseDeletion,
    DeletionAction,
    DeletionEvent,
    GatherMarkers,
    MarkerDurable,
    MarkersSeen,
    Phase,
    WriteMarker,
)
from everstep.commit.base_commit import Event as CommitEvent
from everstep.commit.job.messages import (
    COORDINATOR,
    Cluster,
    DiskProgress,
    GiveUpNotice,
    ManifestAck,
    ManifestNotice,
    MarkerNotice,
    MarkersRequest,
    Message,
    ReadBackReply,
    ReadBackRequest,
    Send,
    WatermarkAck,
    WatermarkNotice,
)
from everstep.commit.lineage import BaseId, Branch, fenced_error
from everstep.commit.retention import Watermark
from everstep.errors import FencedError
from everstep.format import Manifest, Marker, ShardIdentity
from everstep.format.message_codec import Stored
from everstep.format.records import manifest_of
from everstep.state.layout.placement import describe_mismatch


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals and timeouts of a rank.

    Attributes:
        repeat_s: seconds between repetitions of an unanswered message.
        take_over_s: seconds without a manifest after which a rank requests the markers itself.
        late_s: seconds without a manifest after which a rank reports the missing ranks.
    """

    repeat_s: float = 1.0
    take_over_s: float = 10.0
    late_s: float = 120.0


# Actions of a driver, besides those of commits and deletions, and the events that answer them.


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Remove this rank's marker of the base durably, then its files; answer with
    :class:`Withdrawn`."""


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Read this rank's files of the base back; answer with :class:`ReadBackDone`."""


@dataclass(frozen=True, slots=True)
class LookAtBases:
    """List the bases committed on this rank's disk; answer with :class:`BasesSeen`.

    Attributes:
        damaged: bases known to be damaged, from which nothing can be replayed.
    """

    damaged: tuple[BaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class Delete:
    """One action of the deletion of the base."""

    action: DeletionAction


@dataclass(frozen=True, slots=True)
class Perform:
    """Perform an action for a base, then report its event with :meth:`Member.done`."""

    base: BaseId
    action: CommitAction | Delete | Withdraw | ReadBack | LookAtBases


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """This rank's marker of the base is durably absent."""


@dataclass(frozen=True, slots=True)
class ReadBackDone:
    """Result of a read-back; an empty ``problem`` means that the files are intact.

    Attributes:
        newest: newest timeline of the run, looked up after reading if there is a problem: a newer
            timeline may rightly have deleted the base.
    """

    problem: str = ""
    newest: int = 0


@dataclass(frozen=True, slots=True)
class BasesSeen:
    """Bases committed on this rank's disk, and the forks of timelines.

    Attributes:
        needed: bases without which a logged step on this disk could not be replayed.
    """

    committed: tuple[BaseId, ...]
    branches: Mapping[int, Branch]
    needed: tuple[BaseId, ...] = ()


Event = CommitEvent | DeletionEvent | Withdrawn | ReadBackDone | BasesSeen


@dataclass(frozen=True, slots=True)
class BaseDurable:
    """``base`` is committed on this rank's disk, so the files of every rank are durable."""

    base: BaseId


@dataclass(frozen=True, slots=True)
class GaveUp:
    """``base`` will not exist, because a rank could not write its files."""

    base: BaseId
    reason: str


@dataclass(frozen=True, slots=True)
class BaseLate:
    """``base`` still waits for the markers of the ``missing`` ranks; report it."""

    base: BaseId
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BaseDamaged:
    """``base`` was committed, and ``rank`` found it damaged; report it."""

    base: BaseId
    rank: int
    problem: str


@dataclass(frozen=True, slots=True)
class WatermarkMoved:
    """Everything older than ``base`` may be reclaimed in each tier
    (:mod:`everstep.commit.retention`)."""

    base: BaseId
    before: BaseId | None


@dataclass(frozen=True, slots=True)
class Fenced:
    """A newer timeline has begun: this rank no longer commits or deletes."""

    error: FencedError


Out = Perform | Send | BaseDurable | GaveUp | BaseLate | BaseDamaged | WatermarkMoved | Fenced


@dataclass(frozen=True, slots=True)
class Origin:
    """State that the commits of a timeline start from.

    Attributes:
        recovered: base that the timeline started from; durable on all ranks.
        unread: not all of it was read from the disks, so it does not count as verified.
        unreadable: bases with a manifest that the ranks cannot read completely.
        kept: markers of this rank in this timeline that are on disk, if its member replaces a lost
            one. Other ranks may still wait for them.
    """

    recovered: BaseId | None = None
    unread: bool = False
    unreadable: Collection[BaseId] = ()
    kept: Mapping[BaseId, Marker] = field(default_factory=dict)


@dataclass(slots=True)
class _InFlight:
    """State of the base that is being committed."""

    commit: BaseCommit
    markers: dict[int, Marker] = field(default_factory=dict)
    own: Marker | None = None
    waiting: bool = False  # for markers or manifest; no action is in progress
    since_s: float | None = None
    repeated_s: float = 0.0
    reported_late: bool = False
    progress_s: dict[int, float] = field(default_factory=dict)  # last progress of a rank's disk
    given_up: str | None = None


@dataclass(slots=True)
class _Known:
    """Outcomes of bases, to answer ranks that still wait for them.

    Attributes:
        manifests: manifests of the last two bases that were committed here.
        given_up: bases that will not exist, with the reasons. Kept, so that ranks that missed the
            notice get it as the answer to their next message.
        on_disk: markers of this rank that its predecessor has written.
    """

    on_disk: Mapping[BaseId, Marker]
    manifests: dict[BaseId, Manifest] = field(default_factory=dict)
    given_up: dict[BaseId, str] = field(default_factory=dict)

    def committed(self, base: BaseId, manifest: Manifest) -> None:
        """Remember the manifest of a base."""
        self.manifests[base] = manifest
        while len(self.manifests) > 2:
            del self.manifests[min(self.manifests)]

    def answer(self, base: BaseId) -> Message | None:
        """Return the message for a rank that waits for a base; None if nothing is known of it."""
        if base in self.manifests:
            return ManifestNotice(Stored(self.manifests[base]))
        if base in self.given_up:
            return GiveUpNotice(base, self.given_up[base])
        if base in self.on_disk:
            return MarkerNotice(Stored(self.on_disk[base]))
        return None


class Member:
    """Commits of one rank in one timeline.

    Args:
        timeline: timeline of this session; messages of other sessions are never passed in.
    """

    def __init__(
        self,
        cluster: Cluster,
        rank: int,
        timeline: int,
        origin: Origin,
        *,
        pace: Pace,
    ) -> None:
        self.cluster = cluster
        self.rank = rank
        self.timeline = timeline
        self.watermark = Watermark(origin.recovered)
        self.pace = pace
        self.fenced: FencedError | None = None
        self._flight: _InFlight | None = None
        self._queue: list[ShardIdentity] = []
        self._known = _Known(origin.kept)
        self._begun = set(origin.kept)
        # Why nothing more is captured here; "" while training goes on.
        self._ended = ""
        # Markers that other ranks sent before this rank began the base.
        self._early: dict[BaseId, dict[int, Marker]] = {}
        self._deletions: list[BaseDeletion] = []
        self._damaged_elsewhere: tuple[BaseId, ...] = ()  # bases that ranks cannot read
        self._moving = set[int]()  # ranks whose disks made progress since the last tick

    @property
    def leads(self) -> bool:
        """True if this rank writes manifests and deletes on its disk."""
        return self.cluster.leader_of(self.rank) == self.rank

    @property
    def watermark_pending(self) -> bool:
        """True if a base is committed here that is newer than the watermark.

        The notification of the watermark also asks for the bases on this rank's disk.
        """
        newest = max(self._known.manifests, default=None)
        return newest is not None and (self.watermark.base is None or self.watermark.base < newest)

    # Called by the driver.

    def persist(self, identity: ShardIdentity) -> list[Out]:
        """Queue a captured base of this rank; bases are committed one after the other."""
        if self.fenced:
            return []
        self._begun.add(BaseId(identity.timeline, identity.step))
        self._queue.append(identity)
        # Older bases that only other ranks have begun will not be captured here any more.
        return [*self._refuse_early(), *self._begin()]

    def drop(self, base: BaseId, reason: str) -> list[Out]:
        """Drop a queued base that will not be written after all."""
        left = [
            one for one in self._queue if (one.timeline, one.step) != (base.timeline, base.step)
        ]
        if self.fenced or len(left) == len(self._queue):
            return []
        self._queue = left
        return self._refuse(base, reason)

    def refuse(self, base: BaseId, reason: str) -> list[Out]:
        """Refuse a base that was lost with this member's predecessor before it had a marker."""
        if self.fenced or base in self._begun:
            return []
        return self._refuse(base, reason)

    def end_captures(self, reason: str) -> list[Out]:
        """Refuse all bases that only other ranks have begun: nothing more is captured here."""
        if self.fenced:
            return []
        self._ended = reason
        return self._refuse_early()

    def done(self, base: BaseId, event: Event) -> list[Out]:
        """Process the event that answers an action."""
        if self.fenced:
            return []
        try:
            return self._done(base, event)
        except FencedError as error:
            return self.fence_off(error)

    def fence_off(self, error: FencedError) -> list[Out]:
        """Stop, because the driver has found a newer timeline."""
        if self.fenced:
            return []
        self.fenced = error
        return [Fenced(error)]

    def failed(self, base: BaseId, reason: str) -> list[Out]:
        """Give up a base whose files or marker could not be written.

        To be called only when the marker is durably absent. If a marker cannot be withdrawn, do not
        call
        this: the other ranks then wait, and report this rank as late.
        """
        flight = self._flight
        if self.fenced or flight is None or flight.commit.base != base:
            return []
        return [*self._to_others(GiveUpNotice(base, reason)), *self._give_up(base, reason)]

    def receive(self, sender: int, message: Message) -> list[Out]:
        """Process a message of this session."""
        if self.fenced:
            return []
        if isinstance(message, MarkerNotice):
            return self._on_marker(sender, message.marker.record)
        if isinstance(message, MarkersRequest):
            return self._on_wanted(sender, message.base)
        if isinstance(message, ManifestNotice):
            return self._on_manifest(message.manifest.record)
        if isinstance(message, GiveUpNotice):
            return self._on_given_up(message)
        if isinstance(message, ReadBackRequest):
            return [Perform(message.base, ReadBack())]
        if isinstance(message, WatermarkNotice):
            return self._on_watermark(message)
        if isinstance(message, DiskProgress):
            self._moving.add(sender)
        return []

    def tick(self, now_s: float) -> list[Out]:
        """Advance the clock: repeat messages that may be lost, take over, report late ranks."""
        flight = self._flight
        moving = self._moving
        self._moving = set()
        if self.fenced or flight is None or not flight.waiting:
            return []
        base = flight.commit.base
        flight.progress_s |= dict.fromkeys(moving, now_s)
        # The wait is measured from the first tick at which this rank has nothing left to do itself.
        if flight.since_s is None:
            flight.since_s = flight.repeated_s = now_s
            return []
        waited_s = now_s - flight.since_s
        out = []
        if now_s - flight.repeated_s >= self.pace.repeat_s:
            flight.repeated_s = now_s
            out += self._repeat(flight, taking_over=waited_s >= self.pace.take_over_s)
        if waited_s >= self.pace.late_s and not flight.reported_late:
            late_s = now_s - self.pace.late_s
            missing = tuple(r for r in range(self.cluster.world) if r not in flight.markers)
            # A slow disk that still completes operations is not late (DiskProgress).
            silent = tuple(r for r in missing if flight.progress_s.get(r, late_s) <= late_s)
            # If no marker is missing, the manifest is: then one leader at a time makes progress.
            leads = max(flight.progress_s.get(r, late_s) for r in self.cluster.leaders) > late_s
            flight.reported_late = bool(silent) or not (missing or leads)
            out += [BaseLate(base, silent)] if flight.reported_late else []
        return out

    def _to_others(self, message: Message) -> list[Out]:
        return [Send(rank, message) for rank in self.cluster.others(self.rank)]

    # Commits.

    def _begin(self) -> list[Out]:
        if self._flight is not None or not self._queue:
            return []
        commit = BaseCommit(self._queue.pop(0), leads=self.leads)
        self._flight = _InFlight(commit, self._early.pop(commit.base, {}))
        # Bases are begun in ascending order, so older ones will never be needed.
        self._early = {base: found for base, found in self._early.items() if base > commit.base}
        # Another rank gave it up before: files written now would only have to be withdrawn.
        if (why := self._known.given_up.get(commit.base)) is not None:
            return self._give_up(commit.base, why)
        return [Perform(commit.base, commit.start())]

    def _done(self, base: BaseId, event: Event) -> list[Out]:
        if isinstance(event, ReadBackDone):
            return self._on_read_back_done(base, event)
        if isinstance(event, BasesSeen):
            return self._on_bases(event)
        # FenceSeen answers both machines. The base tells them apart: bases to delete are older than
        # the watermark, and a base in flight is not.
        if isinstance(event, DeletionEvent):
            deletion = self._deletions[0] if self._deletions else None
            if deletion is not None and deletion.base == base:
                return self._go_on_deleting(deletion, deletion.on(event))
        flight = self._flight
        if flight is None or flight.commit.base != base:
            return []
        return self._continue_commit(flight, event)

    def _on_read_back_done(self, base: BaseId, event: ReadBackDone) -> list[Out]:
        # A newer timeline may have deleted the base: that is no damage.
        if event.newest > self.timeline:
            raise fenced_error(
                self.timeline,
                event.newest,
                f"{base} was deleted",
                step=base.step,
                rank=self.rank,
            )
        return self._on_read_back(base, event.problem)

    def _continue_commit(self, flight: _InFlight, event: Event) -> list[Out]:
        base = flight.commit.base
        if isinstance(event, Withdrawn):
            return self._give_up(base, flight.given_up or "")
        if flight.given_up is not None:
            # Another rank gave the base up while an action was in progress here.
            return [Perform(base, Withdraw())]
        if isinstance(event, MarkersSeen):
            # Markers on this disk and those received by message count alike.
            flight.markers |= event.markers
            event = MarkersSeen(flight.markers, event.committed)
        assert isinstance(event, CommitEvent)
        if isinstance(event, MarkerDurable):
            # Only now: a marker must not count before it is durable (I5).
            assert flight.own is not None
            flight.markers[self.rank] = flight.own
        new_marker = isinstance(event, MarkerDurable)
        return self._go_on(flight, flight.commit.on(event), new_marker=new_marker)

    def _go_on(
        self, flight: _InFlight, action: CommitAction | None, *, new_marker: bool = False
    ) -> list[Out]:
        if action is None:
            return self._committed(flight)
        flight.waiting = isinstance(action, GatherMarkers)
        if (
            flight.waiting
            and not new_marker
            and (why := describe_disagreement(self.cluster.world, flight.markers))
        ):
            return self._end(flight, why)
        if not flight.waiting:
            if isinstance(action, WriteMarker):
                flight.own = action.marker
            return [Perform(flight.commit.base, action)]
        out: list[Out] = []
        if new_marker and flight.own is not None:
            # Rank 0 collects the markers; its own goes to the ranks that may take over.
            to = self.cluster.leaders if self.rank == COORDINATOR else (COORDINATOR,)
            own = MarkerNotice(Stored(flight.own))
            out += [Send(rank, own) for rank in to if rank != self.rank]
        if new_marker:  # ranks that share this disk may already have written the manifest
            flight.waiting = False
            out.append(Perform(flight.commit.base, action))
        return out

    def _end(self, flight: _InFlight, why: str) -> list[Out]:
        """Give up a base whose markers are all there and contradict each other.

        No rank can commit it, so the others are notified before this rank's marker is removed.
        """
        flight.waiting = False
        flight.given_up = why
        base = flight.commit.base
        return [*self._to_others(GiveUpNotice(base, why)), Perform(base, Withdraw())]

    def _feed(self, flight: _InFlight) -> list[Out]:
        """Continue after markers have arrived by message."""
        flight.waiting = False
        return self._go_on(flight, flight.commit.on(MarkersSeen(flight.markers)))

    def _committed(self, flight: _InFlight) -> list[Out]:
        base = flight.commit.base
        manifest = manifest_of(flight.markers)
        assert manifest is not None, "committed with a marker missing"
        self._known.committed(base, manifest)
        self._flight = None
        return [BaseDurable(base), *self._tell_committed(base, manifest), *self._begin()]

    def _tell_committed(self, base: BaseId, manifest: Manifest) -> list[Out]:
        """Acknowledge the manifest to rank 0, which moves the watermark."""
        return [Send(COORDINATOR, ManifestAck(base))] if self.leads else []

    def _repeat(self, flight: _InFlight, *, taking_over: bool) -> list[Out]:
        base = flight.commit.base
        out = []
        if flight.own is not None and self.rank != COORDINATOR:
            out.append(Send(COORDINATOR, MarkerNotice(Stored(flight.own))))
        if taking_over or self.rank == COORDINATOR:
            # Harmless if the leader is alive: both write the same bytes.
            if taking_over:
                flight.commit.take_over()
            out += [
                Send(rank, MarkersRequest(base))
                for rank in self.cluster.others(self.rank)
                if rank not in flight.markers
            ]
        flight.waiting = False
        # A rank that shares this disk may have written the manifest meanwhile.
        return [*out, Perform(base, GatherMarkers())]

    def _on_marker(self, sender: int, marker: Marker) -> list[Out]:
        base = BaseId(marker.timeline, marker.step)
        # Only its writer knows that a marker is durable.
        if marker.rank != sender:
            return []
        if answer := self._known.answer(base):
            return [Send(sender, answer)]
        if why := self._never(base):
            return self._refuse(base, why)
        flight = self._flight
        if flight is None or flight.commit.base != base:
            if base.timeline == self.timeline and base not in self._known.given_up:
                self._early.setdefault(base, {})[sender] = marker
            return []
        flight.markers[sender] = marker
        return self._feed(flight) if flight.waiting else []

    def _on_wanted(self, sender: int, base: BaseId) -> list[Out]:
        if answer := self._known.answer(base):
            return [Send(sender, answer)]
        if why := self._never(base):
            return self._refuse(base, why)
        flight = self._flight
        if flight is not None and flight.commit.base == base and self.rank in flight.markers:
            return [Send(sender, MarkerNotice(Stored(flight.markers[self.rank])))]
        return []

    def _never(self, base: BaseId) -> str:
        """Return why this rank will never begin a base that another rank has begun, or "".

        There is no marker of such a base here, so no rank can have committed it.
        """
        if base.timeline != self.timeline or base in self._begun:
            return ""
        newest = max(self._begun, default=None)
        if newest is not None and base < newest:
            return (
                f"rank {self.rank} captured a base of step {newest.step}, but none of {base.step}"
            )
        return self._ended

    def _refuse(self, base: BaseId, why: str) -> list[Out]:
        self._known.given_up[base] = why
        self._early.pop(base, None)
        return self._to_others(GiveUpNotice(base, why))

    def _refuse_early(self) -> list[Out]:
        found = [(base, self._never(base)) for base in sorted(self._early)]
        return [out for base, why in found if why for out in self._refuse(base, why)]

    def _on_manifest(self, manifest: Manifest) -> list[Out]:
        base = BaseId(manifest.timeline, manifest.step)
        if base in self._known.manifests:
            return self._tell_committed(base, self._known.manifests[base])
        flight = self._flight
        if flight is None or flight.commit.base != base or flight.own is None:
            return []
        flight.markers |= {marker.rank: marker for marker in manifest.markers}
        if not flight.waiting:
            return []
        # Only the leader of a disk writes the manifest there; the others look for it.
        if self.leads:
            return self._feed(flight)
        flight.waiting = False
        return [Perform(base, GatherMarkers())]

    def _on_given_up(self, message: GiveUpNotice) -> list[Out]:
        flight = self._flight
        if flight is None or flight.commit.base != message.base:
            # A committed base stays; the notice is late.
            known = self._known
            if message.base.timeline == self.timeline and message.base not in known.manifests:
                known.given_up.setdefault(message.base, message.reason)
            return []
        if flight.given_up is not None or flight.commit.phase is Phase.COMMITTED:
            return []
        flight.given_up = message.reason
        if not flight.waiting:
            return []  # withdrawn when the current action has ended
        flight.waiting = False
        return [Perform(message.base, Withdraw())]

    def _give_up(self, base: BaseId, reason: str) -> list[Out]:
        self._known.given_up[base] = reason
        self._flight = None
        return [GaveUp(base, reason), *self._begin()]

    # Reclamation.

    def _on_read_back(self, base: BaseId, problem: str) -> list[Out]:
        return [Send(COORDINATOR, ReadBackReply(base, problem))]

    def _on_watermark(self, message: WatermarkNotice) -> list[Out]:
        out = self._advance(message.base)
        self._damaged_elsewhere = message.damaged
        if self.leads:
            return out + self._delete(message.delete)
        # The leader of the disk deletes there, and reports its contents.
        return [*out, *self._on_bases(BasesSeen((), {}))]

    def _advance(self, base: BaseId) -> list[Out]:
        if not self.watermark.advance(base):
            return []
        return [WatermarkMoved(base, self.watermark.before)]

    def _delete(self, bases: tuple[BaseId, ...]) -> list[Out]:
        """Delete bases from this rank's disk at rank 0's request, then list the remaining ones.

        Bases not older than the watermark are never deleted, whoever requests it.
        """
        watermark = self.watermark.base
        assert watermark is not None
        # Rank 0 repeats its request until an inventory shows that none of these bases is left.
        if self._deletions:
            return []
        self._deletions = [BaseDeletion(b, self.timeline) for b in bases if b < watermark]
        if not self._deletions:
            return [Perform(watermark, LookAtBases(self._damaged_elsewhere))]
        return self._go_on_deleting(self._deletions[0], self._deletions[0].start())

    def _go_on_deleting(self, deletion: BaseDeletion, action: DeletionAction | None) -> list[Out]:
        if action is not None:
            return [Perform(deletion.base, Delete(action))]
        del self._deletions[0]
        if self._deletions:
            return self._go_on_deleting(self._deletions[0], self._deletions[0].start())
        assert self.watermark.base is not None
        return [Perform(self.watermark.base, LookAtBases(self._damaged_elsewhere))]

    def _on_bases(self, seen: BasesSeen) -> list[Out]:
        """Acknowledge the watermark to rank 0, with the bases on this disk."""
        assert self.watermark.base is not None
        kept = WatermarkAck(self.watermark.base, seen.committed, seen.needed)
        return [Send(COORDINATOR, kept)]


def describe_disagreement(world: int, markers: Mapping[int, Marker]) -> str:
    """Return why complete markers cannot form a base; "" if they do, or if some are missing."""
    if len(markers) < world or manifest_of(markers) is not None:
        return ""
    by_lsn: dict[int, list[int]] = {}
    for rank, marker in sorted(markers.items()):
        by_lsn.setdefault(marker.lsn, []).append(rank)
    if why := describe_mismatch({rank: marker.common for rank, marker in markers.items()}):
        return (
            f"the ranks disagree on the state they have in common ({why}), so each relies on "
            "others to write entries that they do not write; give every rank the same state (the "
            "DDP wrapper on all ranks, or its module on all ranks), and freeze and train the same "
            "layers on each"
        )
    if len(by_lsn) == 1:
        return "the markers of the ranks contradict each other"
    counted = ", ".join(
        f"rank(s) {' '.join(map(str, ranks))}: {lsn}" for lsn, ranks in sorted(by_lsn.items())
    )
    return (
        f"the ranks have counted different numbers of optimizer updates ({counted}); every rank "
        "must make, or skip, the same number of updates in each step"
    )
