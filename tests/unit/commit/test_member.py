"""The part of each rank in a timeline of several: markers, manifests, watermark, retention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from everstep.commit.base_commit import (
    AlreadyDeleted,
    BaseCommit,
    CheckFence,
    Condemn,
    Condemned,
    DeleteFiles,
    FenceSeen,
    FilesDeleted,
    FilesDurable,
    GatherMarkers,
    ManifestDurable,
    MarkerDurable,
    MarkersSeen,
    WriteFiles,
    WriteManifest,
    WriteMarker,
)
from everstep.commit.job.coordinator import Coordinator
from everstep.commit.job.member import (
    BaseDamaged,
    BaseDurable,
    BaseLate,
    BasesSeen,
    Delete,
    Fenced,
    GaveUp,
    LookAtBases,
    Member,
    Origin,
    Pace,
    Perform,
    ReadBack,
    ReadBackDone,
    WatermarkMoved,
    Withdraw,
    Withdrawn,
)
from everstep.commit.job.messages import (
    COORDINATOR,
    Cluster,
    DiskProgress,
    ManifestNotice,
    MarkerNotice,
    Message,
    Send,
    WatermarkNotice,
)
from everstep.commit.lineage import BaseId, Branch
from everstep.commit.retention import Watermark
from everstep.format.header import ShardIdentity
from everstep.format.message_codec import Stored
from everstep.format.names import shard_name
from everstep.format.records import FileRecord, Marker
from everstep.state.layout.placement import ReplicaDigest

PACE = Pace(repeat_s=1.0, take_over_s=4.0, late_s=20.0)


@dataclass
class Room:
    """Ranks whose messages arrive at once, and whose disks are sets.

    Attributes:
        mute: ranks that are dead: they hear and do nothing.
        lost: which messages get lost.
        broken: ranks whose files cannot be written.
        bad: ranks whose files are damaged when read back.
        needed: by disk: bases that the logs there need.
        spared: bases that stay at any age.
        said: what ranks reported.
    """

    disks: tuple[str, ...]
    keep: int = 1
    timeline: int = 1
    fence: int = 1
    mute: set[int] = field(default_factory=set)
    lost: Callable[[Message], bool] = lambda message: False
    broken: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    needed: dict[str, set[BaseId]] = field(default_factory=dict)
    spared: set[BaseId] = field(default_factory=set)
    said: list[tuple[int, Any]] = field(default_factory=list)
    did: list[tuple[int, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        cluster = Cluster(self.disks)
        self.markers: dict[str, dict[BaseId, dict[int, Marker]]] = {d: {} for d in self.disks}
        self.manifests: dict[str, dict[BaseId, Any]] = {d: {} for d in self.disks}
        self.members: list[Member] = [
            Coordinator(
                cluster,
                self.timeline,
                Origin(),
                keep=self.keep,
                pace=PACE,
                spared=lambda: self.spared,
            )
            if rank == COORDINATOR
            else Member(cluster, rank, self.timeline, Origin(), pace=PACE)
            for rank in range(cluster.world)
        ]

    def save(self, step: int, ranks: Iterable[int] | None = None) -> None:
        world = len(self.disks)
        for rank in range(world) if ranks is None else ranks:
            identity = ShardIdentity("run", self.timeline, step, step, rank, world, True)
            self.absorb(rank, self.members[rank].persist(identity))

    def tick(self, seconds: int) -> None:
        for now_s in range(seconds + 1):
            for rank, one in enumerate(self.members):
                if rank not in self.mute:
                    self.absorb(rank, one.tick(float(now_s)))

    def absorb(self, rank: int, outs: Iterable[Any]) -> None:
        for out in outs:
            if isinstance(out, Send):
                if out.rank not in self.mute and not self.lost(out.message):
                    self.absorb(out.rank, self.members[out.rank].receive(rank, out.message))
            elif isinstance(out, Perform):
                self.did.append((rank, out.action))
                if isinstance(out.action, WriteFiles) and rank in self.broken:
                    self.absorb(rank, self.members[rank].failed(out.base, "no space left"))
                else:
                    event = self.perform(rank, out)
                    self.absorb(rank, self.members[rank].done(out.base, event))
            else:
                self.said.append((rank, out))

    def perform(self, rank: int, do: Perform) -> Any:
        disk, base, action = self.disks[rank], do.base, do.action
        markers = self.markers[disk].setdefault(base, {})
        if isinstance(action, Delete):
            if isinstance(action.action, CheckFence):
                return FenceSeen(self.fence)
            if isinstance(action.action, Condemn):
                gone = self.manifests[disk].pop(base, None) is None
                return AlreadyDeleted(self.fence) if gone else Condemned()
            assert isinstance(action.action, DeleteFiles)
            return FilesDeleted()
        if isinstance(action, WriteMarker):
            markers[rank] = action.marker
            return MarkerDurable()
        if isinstance(action, GatherMarkers):
            return MarkersSeen(dict(markers), base in self.manifests[disk])
        if isinstance(action, WriteManifest):
            self.manifests[disk][base] = action.manifest
            markers.update({marker.rank: marker for marker in action.manifest.markers})
            return ManifestDurable()
        if isinstance(action, Withdraw):
            markers.pop(rank, None)
            return Withdrawn()
        if isinstance(action, ReadBack):
            return ReadBackDone("damaged" if rank in self.bad else "")
        if isinstance(action, LookAtBases):
            there, bad = tuple(self.manifests[disk]), set(action.damaged)
            needed = tuple(sorted(self.needed.get(disk, set()).intersection(there) - bad))
            return BasesSeen(there, {1: Branch(1, None, 0)}, needed)
        if isinstance(action, WriteFiles):
            return FilesDurable((FileRecord(shard_name(rank), 96, 0, "0" * 32, "a" * 32),))
        return FenceSeen(self.fence)

    def reports(self, kind: type) -> list[tuple[int, Any]]:
        return [(rank, out) for rank, out in self.said if isinstance(out, kind)]


LAYOUTS = [("one",) * 3, ("a", "b", "c"), ("a", "a", "b", "b"), ("one",)]


@pytest.mark.parametrize("disks", LAYOUTS)
def test_every_disk_gets_the_manifest_and_then_the_watermark_moves(disks: tuple[str, ...]) -> None:
    room = Room(disks)
    room.save(10)
    room.tick(3)
    assert all(BaseId(1, 10) in room.manifests[disk] for disk in disks)
    assert sorted(rank for rank, _ in room.reports(BaseDurable)) == list(range(len(disks)))
    moved = room.reports(WatermarkMoved)
    assert sorted(rank for rank, _ in moved) == list(range(len(disks)))
    assert {out for _, out in moved} == {WatermarkMoved(BaseId(1, 10), None)}


@pytest.mark.parametrize("disks", LAYOUTS)
def test_older_bases_go_when_a_newer_one_was_read_back_by_all(disks: tuple[str, ...]) -> None:
    room = Room(disks, keep=1)
    for step in (10, 20, 30):
        room.save(step)
        room.tick(3)
    assert all(list(room.manifests[disk]) == [BaseId(1, 30)] for disk in disks)
    read = [rank for rank, action in room.did if isinstance(action, ReadBack)]
    assert set(read) == set(range(len(disks)))


def test_what_peers_have_stays_until_they_have_a_newer_one() -> None:
    room = Room(("a", "b"), keep=2, spared={BaseId(1, 10)})
    for step in (10, 20, 30, 40):
        room.save(step)
        room.tick(3)
    for disk in "ab":
        assert set(room.manifests[disk]) == {BaseId(1, 10), BaseId(1, 40)}
    room.spared.clear()
    room.save(50)
    room.tick(3)
    for disk in "ab":
        assert set(room.manifests[disk]) == {BaseId(1, 40), BaseId(1, 50)}


@pytest.mark.parametrize("disk", ["a", "b"])
def test_what_the_log_on_any_disk_needs_stays_on_all(disk: str) -> None:
    room = Room(("a", "b", "b"), keep=1, needed={disk: {BaseId(1, 20)}})
    for step in (10, 20, 30, 40):
        room.save(step)
        room.tick(3)
    for each in "ab":
        assert set(room.manifests[each]) == {BaseId(1, 20), BaseId(1, 40)}
    room.needed.clear()
    room.save(50)
    room.tick(3)
    for each in "ab":
        assert set(room.manifests[each]) == {BaseId(1, 50)}


def test_each_disk_is_asked_again_what_it_needs_beside_a_damaged_base() -> None:
    """Of two bases that would do the log needs the newer one, and says so; as that turns out to be
    damaged on another rank, the older one has to stay."""
    room = Room(("a", "b"), keep=1)
    perform, either, bad = room.perform, {BaseId(1, 10), BaseId(1, 20)}, BaseId(1, 20)

    def performed(rank: int, do: Perform) -> Any:
        if isinstance(do.action, ReadBack):
            return ReadBackDone("damaged" if (rank, do.base) == (0, bad) else "")
        event = perform(rank, do)
        if isinstance(do.action, LookAtBases) and rank == 1:
            good = either.intersection(event.committed).difference(do.action.damaged)
            return BasesSeen(event.committed, event.branches, (max(good),))
        return event

    room.perform = performed  # type: ignore[method-assign]
    for step in (10, 20):
        room.save(step)
        room.tick(3)
    assert (1, LookAtBases((bad,))) in room.did
    room.save(30)
    room.tick(3)
    for disk in "ab":
        assert set(room.manifests[disk]) == {BaseId(1, 10), BaseId(1, 30)}


def test_what_one_rank_finds_damaged_is_not_what_stays() -> None:
    room = Room(("a", "b"), keep=1)
    room.save(10)
    room.tick(3)
    room.bad = {1}
    room.save(20)
    room.tick(3)
    assert BaseId(1, 10) in room.manifests["a"], "the last good one stays"
    assert (0, BaseDamaged(BaseId(1, 20), 1, "damaged")) in room.said


def late_after(room: Room, rank: int, moving: Callable[[float], Iterable[int]]) -> float | None:
    """When ``rank`` reports that others are late; ``moving``: whose disks move at a time."""
    for now_s in range(100):
        for other in moving(float(now_s)):
            room.absorb(rank, room.members[rank].receive(other, DiskProgress()))
        room.absorb(rank, room.members[rank].tick(float(now_s)))
        if room.reports(BaseLate):
            return float(now_s)
    return None


@pytest.mark.parametrize("disks", [("one",) * 3, ("a", "b", "c")])
def test_a_rank_whose_disk_moves_is_not_late(disks: tuple[str, ...]) -> None:
    room = Room(disks, mute={1, 2})
    room.save(10, [0])
    assert late_after(room, 0, lambda now_s: (1, 2)) is None
    room = Room(disks, mute={1, 2})
    room.save(10, [0])
    assert late_after(room, 0, lambda now_s: (1,)) == 20.0
    assert room.reports(BaseLate) == [(0, BaseLate(BaseId(1, 10), (2,)))], "only who is silent"
    room = Room(disks, mute={1, 2})
    room.save(10, [0])
    assert late_after(room, 0, lambda now_s: (1, 2) if now_s <= 50 else (2,)) == 70.0
    assert room.reports(BaseLate) == [(0, BaseLate(BaseId(1, 10), (1,)))]


@pytest.mark.parametrize("until_s", [50, 100])
def test_the_manifest_is_waited_for_as_long_as_the_disk_of_who_leads_moves(
    until_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All markers are there, and rank 0 writes the manifest, slowly."""
    other = Room(("one",) * 2, mute={1})
    other.save(10, [0])
    room = Room(("one",) * 2, mute={0})
    room.save(10, [1])
    monkeypatch.setattr(BaseCommit, "take_over", lambda self: None)
    notice = MarkerNotice(Stored(other.markers["one"][BaseId(1, 10)][0]))
    room.absorb(1, room.members[1].receive(0, notice))
    perform = room.perform
    room.perform = lambda rank, do: (  # type: ignore[method-assign]
        MarkersSeen({}) if isinstance(do.action, GatherMarkers) else perform(rank, do)
    )
    late_s = late_after(room, 1, lambda now_s: (0,) if now_s <= until_s else ())
    assert late_s == (70.0 if until_s == 50 else None)
    if late_s is not None:
        assert room.reports(BaseLate) == [(1, BaseLate(BaseId(1, 10), ()))]


@pytest.mark.parametrize("disks", LAYOUTS[:3])
def test_no_manifest_while_a_marker_is_missing(disks: tuple[str, ...]) -> None:
    room = Room(disks)
    room.save(10, range(len(disks) - 1))
    room.tick(19)
    assert not any(room.manifests.values())
    assert not room.reports(BaseLate)
    room.tick(21)
    assert (0, BaseLate(BaseId(1, 10), (len(disks) - 1,))) in room.said


@pytest.mark.parametrize("disks", LAYOUTS[:3])
def test_any_rank_takes_over_when_rank_0_is_gone(disks: tuple[str, ...]) -> None:
    """Rank 0 dies when its marker is durable: the others finish the base on their disks."""
    room = Room(disks)
    perform = room.perform

    def dying(rank: int, do: Perform) -> Any:
        if rank == 0 and isinstance(do.action, GatherMarkers):
            room.mute.add(0)
            room.members[0].done = lambda base, event: []  # type: ignore[method-assign]
        return perform(rank, do)

    room.perform = dying  # type: ignore[method-assign]
    room.save(10)
    room.tick(10)
    reached = {disk for disk in disks if BaseId(1, 10) in room.manifests[disk]}
    assert reached == set(disks[1:])
    assert {rank for rank, _ in room.reports(BaseDurable)} == set(range(1, len(disks)))
    assert not room.reports(WatermarkMoved), "nothing is deleted without rank 0"


def test_a_base_that_a_rank_cannot_write_is_given_up_by_all() -> None:
    room = Room(("a", "b", "c"))
    room.broken = {1}
    room.save(10)
    room.tick(3)
    assert {rank for rank, out in room.reports(GaveUp)} == {0, 1, 2}
    assert not any(markers.get(BaseId(1, 10)) for markers in room.markers.values())
    room.broken = set()
    room.save(20)
    room.tick(3)
    assert len(room.reports(BaseDurable)) == 3, "the next one is not in the way of it"


@pytest.mark.parametrize("disks", LAYOUTS[:3])
@pytest.mark.parametrize("lossy", [False, True], ids=["all is heard", "giving up is not heard"])
def test_ranks_that_made_other_updates_give_up_at_once(disks: tuple[str, ...], lossy: bool) -> None:
    """A scaler that skips on one rank: their markers are those of no base, and never will be."""
    room = Room(disks)
    for rank in range(len(disks)):
        identity = ShardIdentity("run", 1, 10, 10 - (rank == 1), rank, len(disks), True)
        room.lost = lambda message: lossy and type(message).__name__ == "GiveUpNotice"
        room.absorb(rank, room.members[rank].persist(identity))
    room.lost = lambda message: False
    room.tick(6)
    assert not any(room.manifests.values())
    gave_up = room.reports(GaveUp)
    assert {rank for rank, _ in gave_up} == set(range(len(disks)))
    assert all("rank(s) 1: 9, rank(s) 0" in out.reason for _, out in gave_up)
    assert not any(markers.get(BaseId(1, 10)) for markers in room.markers.values())
    room.save(20)
    room.tick(3)
    assert {rank for rank, _ in room.reports(BaseDurable)} == set(range(len(disks)))


@pytest.mark.parametrize("disks", LAYOUTS[:3])
def test_parts_that_do_not_fit_together_are_given_up_at_once(disks: tuple[str, ...]) -> None:
    """Ranks that were given other states: each leaves to others what these do not write."""
    room, world = Room(disks), len(disks)
    common = ReplicaDigest(f"0-{world - 1}", "model", 4, "a" * 32)
    for rank in range(world):
        said = () if rank == 1 else (common,)
        identity = ShardIdentity("run", 1, 10, 10, rank, world, True, common=said)
        room.absorb(rank, room.members[rank].persist(identity))
    room.tick(6)
    assert not any(room.manifests.values())
    gave_up = room.reports(GaveUp)
    assert {rank for rank, _ in gave_up} == set(range(world))
    assert all("'model'" in out.reason and "rank(s) 1: none" in out.reason for _, out in gave_up)
    assert not any(markers.get(BaseId(1, 10)) for markers in room.markers.values())
    room.save(20)
    room.tick(3)
    assert {rank for rank, _ in room.reports(BaseDurable)} == set(range(world))


def test_a_rank_that_missed_the_news_gives_up_too() -> None:
    room = Room(("a", "b", "c"))
    room.broken = {2}
    room.lost = lambda message: type(message).__name__ == "GiveUpNotice"
    room.save(10)
    room.lost = lambda message: False
    room.tick(3)
    assert {rank for rank, out in room.reports(GaveUp)} == {0, 1, 2}


@pytest.mark.parametrize(
    "name", ["ManifestNotice", "ManifestAck", "WatermarkNotice", "MarkerNotice"]
)
def test_each_message_may_be_lost_once(name: str) -> None:
    room = Room(("a", "b", "c"), keep=1)
    seen: set[str] = set()

    def lost(message: Message) -> bool:
        kind = type(message).__name__
        first = kind not in seen
        seen.add(kind)
        return first and kind == name

    room.lost = lost
    for step in (10, 20):
        room.save(step)
        room.tick(4)
    assert all(list(room.manifests[disk]) == [BaseId(1, 20)] for disk in "abc")


def test_a_newer_timeline_fences_every_rank_off() -> None:
    room = Room(("a", "b"))
    room.fence = 2
    room.save(10)
    room.tick(3)
    assert {rank for rank, _ in room.reports(Fenced)} == {0, 1}
    assert not any(room.manifests.values())
    assert room.members[1].receive(0, WatermarkNotice(BaseId(1, 10), (BaseId(1, 5),))) == []


def test_nothing_that_is_not_older_than_the_watermark_is_deleted_whoever_says_so() -> None:
    room = Room(("a", "b"))
    room.save(10)
    room.tick(2)
    told = WatermarkNotice(BaseId(1, 10), (BaseId(1, 10), BaseId(1, 20), BaseId(2, 1)))
    outs = room.members[1].receive(0, told)
    assert [out.action for out in outs if isinstance(out, Perform)] == [LookAtBases()]


def test_news_that_come_late_change_nothing() -> None:
    room = Room(("a", "b"))
    for step in (10, 20):
        room.save(step)
        room.tick(2)
    before = list(room.said)
    room.absorb(1, room.members[1].receive(0, WatermarkNotice(BaseId(1, 10), ())))
    assert room.said == before
    assert room.members[1].watermark.base == BaseId(1, 20)
    room.absorb(
        1, room.members[1].receive(0, ManifestNotice(Stored(room.manifests["a"][BaseId(1, 20)])))
    )
    assert room.said == before


def test_the_watermark_only_moves_forward() -> None:
    watermark = Watermark(BaseId(1, 40))
    assert not watermark.advance(BaseId(1, 40))
    assert not watermark.advance(BaseId(1, 30))
    assert watermark.advance(BaseId(2, 10)), "a newer timeline, whatever the number of the step"
    assert (watermark.base, watermark.before) == (BaseId(2, 10), BaseId(1, 40))
