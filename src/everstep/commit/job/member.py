"""One rank's part in a timeline of several ranks, as a state machine without I/O.

It takes a base of this rank through :class:`~everstep.commit.base_commit.BaseCommit`, sees to it
that every disk gets the manifest, and follows the watermark. Whoever drives it performs each
:class:`Perform` and reports with :meth:`Member.done`, sends what it asks to be sent, hands over
what arrives, and calls :meth:`Member.tick` every now and then. Messages may be lost, late, doubled
and in any order; nothing but files counts as durable.

Rank 0 asks and tells (:mod:`everstep.commit.job.coordinator`). If it is gone, any rank asks for the
markers itself and writes the manifest to its own disk: what was captured becomes durable
without rank 0, and only reclamation waits for the next start of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.commit.base_commit import Action as CommitAction
from everstep.commit.base_commit import (
    BaseCommit,
    GatherMarkers,
    MarkerDurable,
    MarkersSeen,
    Phase,
    WriteMarker,
)
from everstep.commit.base_commit import Event as CommitEvent
from everstep.commit.deletion import BaseDeletion, DeletionAction, DeletionEvent
from everstep.commit.job.actions import (
    BaseDurable,
    BaseLate,
    BasesSeen,
    Delete,
    Event,
    Fenced,
    GaveUp,
    LookAtBases,
    Out,
    Pace,
    Perform,
    ReadBack,
    ReadBackDone,
    Send,
    WatermarkMoved,
    Withdraw,
    Withdrawn,
)
from everstep.commit.job.cluster import COORDINATOR, Cluster
from everstep.commit.job.messages import (
    DiskProgress,
    GiveUpNotice,
    ManifestAck,
    ManifestNotice,
    MarkerNotice,
    MarkersRequest,
    Message,
    ReadBackReply,
    ReadBackRequest,
    WatermarkAck,
    WatermarkNotice,
)
from everstep.commit.lineage import BaseId, fenced_error
from everstep.commit.retention import Watermark
from everstep.errors import FencedError
from everstep.format.header import ShardIdentity
from everstep.format.records import Manifest, Marker, manifest_of
from everstep.state.layout.replica_digest import describe_mismatch

__all__ = [
    "Member",
    "describe_disagreement",
]


@dataclass(slots=True)
class _InFlight:
    """The base that is being committed."""

    commit: BaseCommit
    markers: dict[int, Marker] = field(default_factory=dict)
    own: Marker | None = None
    waiting: bool = False  # for markers or manifest; nothing of it is being done
    since_s: float | None = None
    repeated_s: float = 0.0
    told_late: bool = False
    moved_s: dict[int, float] = field(default_factory=dict)  # a rank's disk, last, as it said
    given_up: str | None = None


class Member:
    """One rank's part in the commits of one timeline.

    Args:
        timeline: the one that was opened; every message is of its session, or not handed over.
        recovered: what the timeline began with; durable on all ranks.
        kept: of a member that takes the place of one that is lost: this rank's markers of bases of
            the timeline that are on disk. Others may still wait for them.
    """

    def __init__(
        self,
        cluster: Cluster,
        rank: int,
        timeline: int,
        *,
        recovered: BaseId | None = None,
        pace: Pace | None = None,
        kept: Mapping[BaseId, Marker] | None = None,
    ) -> None:
        self.cluster = cluster
        self.rank = rank
        self.timeline = timeline
        self.watermark = Watermark(recovered)
        self.pace = pace or Pace()
        self.fenced: FencedError | None = None
        self.leads = cluster.leader_of(rank) == rank
        self._flight: _InFlight | None = None
        self._queue: list[ShardIdentity] = []
        self._on_disk = dict(kept or {})
        self._begun = set(self._on_disk)
        self._ended = ""
        self._early: dict[BaseId, dict[int, Marker]] = {}
        self._manifests: dict[BaseId, Manifest] = {}
        self._given_up: dict[BaseId, str] = {}
        self._deletions: list[BaseDeletion] = []
        self._of_no_use: tuple[BaseId, ...] = ()  # that ranks cannot read
        self._moving = set[int]()  # ranks whose disks have moved since the last tick

    @property
    def watermark_pending(self) -> bool:
        """Whether a base is committed here of which the watermark is still to be told: whoever
        tells it asks then what this rank's disk holds."""
        newest = max(self._manifests, default=None)
        return newest is not None and (self.watermark.base is None or self.watermark.base < newest)

    # What drivers call.

    def persist(self, identity: ShardIdentity) -> list[Out]:
        """A base of this rank has been captured: its turn comes when the one before is over."""
        if self.fenced:
            return []
        self._begun.add(BaseId(identity.timeline, identity.step))
        self._queue.append(identity)
        return [*self._refuse_early(), *self._begin()]

    def drop(self, base: BaseId, reason: str) -> list[Out]:
        """A base whose turn has not come will not be written after all."""
        left = [
            one for one in self._queue if (one.timeline, one.step) != (base.timeline, base.step)
        ]
        if self.fenced or len(left) == len(self._queue):
            return []
        self._queue = left
        return self._refuse(base, reason)

    def refuse(self, base: BaseId, reason: str) -> list[Out]:
        """A base that was lost with this member's predecessor, before it had a marker."""
        if self.fenced or base in self._begun:
            return []
        return self._refuse(base, reason)

    def end_captures(self, reason: str) -> list[Out]:
        """Nothing more will be captured here: what only others have begun will not exist."""
        if self.fenced:
            return []
        self._ended = reason
        return self._refuse_early()

    def done(self, base: BaseId, event: Event) -> list[Out]:
        """What an action has led to."""
        if self.fenced:
            return []
        try:
            return self._done(base, event)
        except FencedError as error:
            return self.fence_off(error)

    def fence_off(self, error: FencedError) -> list[Out]:
        """Whoever carries out has found that a newer timeline has taken the run over."""
        if self.fenced:
            return []
        self.fenced = error
        return [Fenced(error)]

    def failed(self, base: BaseId, reason: str) -> list[Out]:
        """Files or marker of ``base`` could not be written, and none of them is left: the marker
        is not there, durably. What cannot be withdrawn is not reported here: others wait then,
        and say for whom."""
        flight = self._flight
        if self.fenced or flight is None or flight.commit.base != base:
            return []
        tell: list[Out] = [
            Send(rank, GiveUpNotice(base, reason)) for rank in self.cluster.others(self.rank)
        ]
        return tell + self._give_up(base, reason)

    def receive(self, sender: int, message: Message) -> list[Out]:
        """A message of this session has come from ``sender``."""
        if self.fenced:
            return []
        if isinstance(message, MarkerNotice):
            return self._on_marker(sender, message.marker)
        if isinstance(message, MarkersRequest):
            return self._on_wanted(sender, message.base)
        if isinstance(message, ManifestNotice):
            return self._on_manifest(message.manifest)
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
        """Some time has passed: repeats what may have been lost, takes over, reports."""
        flight = self._flight
        (moving, self._moving) = (self._moving, set())
        if self.fenced or flight is None or not flight.waiting:
            return []
        base = flight.commit.base
        flight.moved_s |= dict.fromkeys(moving, now_s)
        if flight.since_s is None:
            flight.since_s = flight.repeated_s = now_s
            return []
        waited_s = now_s - flight.since_s
        out = []
        if now_s - flight.repeated_s >= self.pace.repeat_s:
            flight.repeated_s = now_s
            out += self._repeat(flight, taking_over=waited_s >= self.pace.take_over_s)
        if waited_s >= self.pace.late_s and not flight.told_late:
            late_s = now_s - self.pace.late_s
            missing = tuple(r for r in range(self.cluster.world) if r not in flight.markers)
            silent = tuple(r for r in missing if flight.moved_s.get(r, late_s) <= late_s)
            # Where none is missing, the manifest is: of those who lead one moves at a time.
            leads = max(flight.moved_s.get(r, late_s) for r in self.cluster.leaders) > late_s
            flight.told_late = bool(silent) or not (missing or leads)
            out += [BaseLate(base, silent)] if flight.told_late else []
        return out

    # Commits.

    def _begin(self) -> list[Out]:
        if self._flight is not None or not self._queue:
            return []
        commit = BaseCommit(self._queue.pop(0), leads=self.leads)
        self._flight = _InFlight(commit, self._early.pop(commit.base, {}))
        self._early = {base: found for base, found in self._early.items() if base > commit.base}
        if commit.base in self._given_up:
            return self._give_up(commit.base, self._given_up[commit.base])
        return [Perform(commit.base, commit.start())]

    def _done(self, base: BaseId, event: Event) -> list[Out]:
        if isinstance(event, ReadBackDone):
            if event.newest > self.timeline:
                gone = f"{base} is gone"
                about = self.timeline, event.newest, gone
                raise fenced_error(*about, step=base.step, rank=self.rank)
            return self._on_read_back(base, event.problem)
        if isinstance(event, BasesSeen):
            return self._on_bases(event)
        if isinstance(event, DeletionEvent):
            deletion = self._deletions[0] if self._deletions else None
            if deletion is not None and deletion.base == base:
                return self._go_on_deleting(deletion, deletion.on(event))
        flight = self._flight
        if flight is None or flight.commit.base != base:
            return []
        if isinstance(event, Withdrawn):
            return self._give_up(base, flight.given_up or "")
        if flight.given_up is not None:
            return [Perform(base, Withdraw())]
        if isinstance(event, MarkersSeen):
            flight.markers |= event.markers
            event = MarkersSeen(flight.markers, event.committed)
        assert isinstance(event, CommitEvent)
        if isinstance(event, MarkerDurable):
            assert flight.own is not None
            flight.markers[self.rank] = flight.own
        return self._go_on(flight, flight.commit.on(event), told=isinstance(event, MarkerDurable))

    def _go_on(
        self, flight: _InFlight, action: CommitAction | None, *, told: bool = False
    ) -> list[Out]:
        if action is None:
            return self._committed(flight)
        flight.waiting = isinstance(action, GatherMarkers)
        if (
            flight.waiting
            and not told
            and (why := describe_disagreement(self.cluster.world, flight.markers))
        ):
            return self._end(flight, why)
        if not flight.waiting:
            if isinstance(action, WriteMarker):
                flight.own = action.marker
            return [Perform(flight.commit.base, action)]
        out: list[Out] = []
        if told and flight.own is not None:  # rank 0's goes to those who may take over
            to = self.cluster.leaders if self.rank == COORDINATOR else (COORDINATOR,)
            out += [Send(rank, MarkerNotice(flight.own)) for rank in to if rank != self.rank]
        if told:  # those who share this disk may be done
            flight.waiting = False
            out.append(Perform(flight.commit.base, action))
        return out

    def _end(self, flight: _InFlight, why: str) -> list[Out]:
        """A base whose markers are all there, and are none of a base: nobody can commit it, so it
        is told before this rank's marker is gone."""
        flight.waiting = False
        flight.given_up = why
        base = flight.commit.base
        others = self.cluster.others(self.rank)
        return [
            *(Send(rank, GiveUpNotice(base, why)) for rank in others),
            Perform(base, Withdraw()),
        ]

    def _feed(self, flight: _InFlight) -> list[Out]:
        """Markers have come by message."""
        flight.waiting = False
        return self._go_on(flight, flight.commit.on(MarkersSeen(flight.markers)))

    def _committed(self, flight: _InFlight) -> list[Out]:
        base = flight.commit.base
        manifest = manifest_of(flight.markers)
        assert manifest is not None, "committed with a marker missing"
        self._manifests[base] = manifest
        while len(self._manifests) > 2:
            del self._manifests[min(self._manifests)]
        self._flight = None
        return [BaseDurable(base), *self._tell_committed(base, manifest), *self._begin()]

    def _tell_committed(self, base: BaseId, manifest: Manifest) -> list[Out]:
        """To rank 0, which goes on with the watermark."""
        return [Send(COORDINATOR, ManifestAck(base))] if self.leads else []

    def _repeat(self, flight: _InFlight, *, taking_over: bool) -> list[Out]:
        base = flight.commit.base
        out = []
        if flight.own is not None and self.rank != COORDINATOR:
            out.append(Send(COORDINATOR, MarkerNotice(flight.own)))
        if taking_over or self.rank == COORDINATOR:
            if taking_over:
                flight.commit.take_over()
            out += [
                Send(rank, MarkersRequest(base))
                for rank in self.cluster.others(self.rank)
                if rank not in flight.markers
            ]
        flight.waiting = False
        return [*out, Perform(base, GatherMarkers())]

    def _on_marker(self, sender: int, marker: Marker) -> list[Out]:
        base = BaseId(marker.timeline, marker.step)
        if marker.rank != sender:
            return []
        if answer := self._known(base):
            return [Send(sender, answer)]
        if why := self._never(base):
            return self._refuse(base, why)
        flight = self._flight
        if flight is None or flight.commit.base != base:
            if base.timeline == self.timeline and base not in self._given_up:
                self._early.setdefault(base, {})[sender] = marker
            return []
        flight.markers[sender] = marker
        return self._feed(flight) if flight.waiting else []

    def _on_wanted(self, sender: int, base: BaseId) -> list[Out]:
        if answer := self._known(base):
            return [Send(sender, answer)]
        if why := self._never(base):
            return self._refuse(base, why)
        flight = self._flight
        if flight is not None and flight.commit.base == base and self.rank in flight.markers:
            return [Send(sender, MarkerNotice(flight.markers[self.rank]))]
        return []

    def _never(self, base: BaseId) -> str:
        """Why this rank will never begin a base that another one has begun; "" if it may, or
        has. There is no marker of it here, so nobody can have committed it."""
        if base.timeline != self.timeline or base in self._begun:
            return ""
        newest = max(self._begun, default=None)
        if newest is not None and base < newest:
            return (
                f"rank {self.rank} has taken a base of step {newest.step}, and none of {base.step}"
            )
        return self._ended

    def _refuse(self, base: BaseId, why: str) -> list[Out]:
        self._given_up[base] = why
        self._early.pop(base, None)
        return [Send(rank, GiveUpNotice(base, why)) for rank in self.cluster.others(self.rank)]

    def _refuse_early(self) -> list[Out]:
        found = [(base, self._never(base)) for base in sorted(self._early)]
        return [out for base, why in found if why for out in self._refuse(base, why)]

    def _known(self, base: BaseId) -> Message | None:
        if base in self._manifests:
            return ManifestNotice(self._manifests[base])
        if base in self._given_up:
            return GiveUpNotice(base, self._given_up[base])
        if base in self._on_disk:
            return MarkerNotice(self._on_disk[base])
        return None

    def _on_manifest(self, manifest: Manifest) -> list[Out]:
        base = BaseId(manifest.timeline, manifest.step)
        if base in self._manifests:
            return self._tell_committed(base, self._manifests[base])
        flight = self._flight
        if flight is None or flight.commit.base != base or flight.own is None:
            return []
        flight.markers |= {marker.rank: marker for marker in manifest.markers}
        if not flight.waiting:
            return []
        if self.leads:
            return self._feed(flight)
        flight.waiting = False
        return [Perform(base, GatherMarkers())]

    def _on_given_up(self, message: GiveUpNotice) -> list[Out]:
        flight = self._flight
        if flight is None or flight.commit.base != message.base:
            if message.base.timeline == self.timeline and message.base not in self._manifests:
                self._given_up.setdefault(message.base, message.reason)
            return []
        if flight.given_up is not None or flight.commit.phase is Phase.COMMITTED:
            return []
        flight.given_up = message.reason
        if not flight.waiting:
            return []  # when what is being done is done
        flight.waiting = False
        return [Perform(message.base, Withdraw())]

    def _give_up(self, base: BaseId, reason: str) -> list[Out]:
        self._given_up[base] = reason
        self._flight = None
        return [GaveUp(base, reason), *self._begin()]

    # Reclamation.

    def _on_read_back(self, base: BaseId, problem: str) -> list[Out]:
        return [Send(COORDINATOR, ReadBackReply(base, problem))]

    def _on_watermark(self, message: WatermarkNotice) -> list[Out]:
        out = self._advance(message.base)
        self._of_no_use = message.damaged
        if self.leads:
            return out + self._delete(message.delete)
        return [*out, *self._keep_watermark(BasesSeen((), {}))]

    def _advance(self, base: BaseId) -> list[Out]:
        if not self.watermark.advance(base):
            return []
        return [WatermarkMoved(base, self.watermark.before)]

    def _delete(self, bases: tuple[BaseId, ...]) -> list[Out]:
        """Deletes from this rank's disk what rank 0 says, but never what is not older than the
        watermark, whoever says so; then looks at what is left."""
        watermark = self.watermark.base
        assert watermark is not None
        if self._deletions:
            return []
        self._deletions = [BaseDeletion(b, self.timeline) for b in bases if b < watermark]
        if not self._deletions:
            return [Perform(watermark, LookAtBases(self._of_no_use))]
        return self._go_on_deleting(self._deletions[0], self._deletions[0].start())

    def _go_on_deleting(self, deletion: BaseDeletion, action: DeletionAction | None) -> list[Out]:
        if action is not None:
            return [Perform(deletion.base, Delete(action))]
        del self._deletions[0]
        if self._deletions:
            return self._go_on_deleting(self._deletions[0], self._deletions[0].start())
        assert self.watermark.base is not None
        return [Perform(self.watermark.base, LookAtBases(self._of_no_use))]

    def _on_bases(self, seen: BasesSeen) -> list[Out]:
        return self._keep_watermark(seen)

    def _keep_watermark(self, seen: BasesSeen) -> list[Out]:
        assert self.watermark.base is not None
        kept = WatermarkAck(self.watermark.base, seen.committed, seen.needed)
        return [Send(COORDINATOR, kept)]


def describe_disagreement(world: int, markers: Mapping[int, Marker]) -> str:
    """Why all markers together are those of no base, and never will be; "" if they are, or
    some are missing."""
    if len(markers) < world or manifest_of(markers) is not None:
        return ""
    by_lsn: dict[int, list[int]] = {}
    for rank, marker in sorted(markers.items()):
        by_lsn.setdefault(marker.lsn, []).append(rank)
    if why := describe_mismatch({rank: marker.common for rank, marker in markers.items()}):
        return (
            f"the ranks differ in what they have in common ({why}), so each leaves to others "
            "what these do not write; give every rank the same state (the DDP wrapper or the "
            "module in it, on all of them), and freeze and train the same layers on each"
        )
    if len(by_lsn) == 1:
        return "the markers of the ranks contradict each other"
    counted = ", ".join(
        f"rank(s) {' '.join(map(str, ranks))}: {lsn}" for lsn, ranks in sorted(by_lsn.items())
    )
    return (
        f"the ranks have counted different numbers of optimizer updates ({counted}); each of "
        "them has to make as many in a step as the others, or leave out as many"
    )
