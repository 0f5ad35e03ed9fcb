"""Copies of bases of several ranks in another tier: whole or not there, whoever dies when, deleted
by nobody else than rank 0 of the newest timeline, and read where a disk is lost or damaged."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from everstep.commit.lineage import BaseId
from everstep.commit.retention import KeepRules
from everstep.errors import (
    DeadlineError,
    EverstepError,
    FencedError,
    OptionError,
    RecoveryError,
    StorageError,
)
from everstep.format.header import ShardIdentity
from everstep.format.names import CONDEMNED
from everstep.format.records import TimelineRecord
from everstep.keeper.persist import job_committer as commits_module
from everstep.keeper.ship.courier import ROOT, newest_timeline_in
from everstep.keeper.ship.couriers import Couriers
from everstep.link.messages import JobSession, KeeperStats
from everstep.run.scan import scan_run
from everstep.seams import Seams
from everstep.testing.faultytier import FaultyTier, TierFault
from everstep.tiers import options as tier_options
from everstep.tiers.disk_tier import DiskTier
from everstep.tiers.files import TierFileSystem
from everstep.tiers.memory import MemoryTier
from everstep.tiers.retry import RetryingTier
from everstep.trainer.attach.terms import KeeperTerms
from tests.support.copying import FOREVER, Interloper, contents, put, wait_for
from tests.support.ranks import tiers
from tests.support.ranks.copying import FILES, Job, names_in, store, usable
from tests.support.ranks.peer_logs import Log
from tests.support.ranks.tiers import fill, saved, started, up_to
from tests.support.ranks.together import resume, save, train, trained
from tests.support.world import flip

apart = tiers.apart  # the fixture

__all__ = ["store"]  # a fixture

BASE = "timeline-00001/base/{:012d}/"


# --- A copy -----------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
def test_the_copy_is_what_all_ranks_have(tmp_path: Path, shared: bool) -> None:
    names = ("run", "run") if shared else ("a", "b")
    runs = saved(*(tmp_path / name for name in names))
    tier = FaultyTier(inner := MemoryTier())
    job = Job(runs, tier)
    assert job.copy() == BaseId(1, 1)
    local = {
        str(path.relative_to(run)): path.read_bytes()
        for run in runs
        for path in run.rglob("*")
        if path.is_file() and "slots" not in path.parts
    }
    assert contents(inner) == local
    assert usable(inner) == [1]
    last = [line for line in tier.log if " create " in line][-1]
    assert last.endswith("manifest.json")
    assert "timeline.json" in tier.log[-2], "the fence is looked at just before the manifest"
    assert [one.courier.stats.copied for one in (job.leader, *job.followers.values())] == [1, 1]
    assert not job.posted


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("victim", "silent", "late"),
    [(0, False, False), (0, False, True), (1, True, False), (1, False, True), (1, True, True)],
)
def test_a_rank_that_fails_at_any_operation(
    apart: list[Path], victim: int, silent: bool, late: bool
) -> None:
    """From the first fault on its tier is out of reach; what there is then is whole, or is nothing.
    The next start finishes it, and sends no file twice.

    Args:
        silent: it dies, and says nothing.
        late: rank 1 copies its part behind rank 0: it is asked twice.
    """
    count = seen = 0
    while True:
        count += 1
        inner = MemoryTier()
        broken = FaultyTier(inner, [TierFault("unavailable", at=count, count=FOREVER)])
        job = Job(apart, inner, tiers={victim: broken}, lost=int(late))
        job.dies = silent
        try:
            job.copy()
        except (StorageError, DeadlineError):
            seen += 1
            assert usable(inner) in ([], [3])
            names = set(names_in(inner))
            again = FaultyTier(inner)
            Job(apart, again).copy()
            assert usable(inner) == [3]
            sent = {line.split()[2] for line in again.log if " put " in line}
            assert not names & sent
        else:
            break
    assert seen > 6


def test_a_manifest_that_lacks_a_marker_is_not_made_whatever_is_said(apart: list[Path]) -> None:
    tier = MemoryTier()
    job = Job(apart, tier)
    job.followers[1].copy_own_files = lambda manifest: None  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="files of rank 1 are missing"):
        job.copy()
    assert not usable(tier)
    assert BASE.format(3) + "rank-00000.done" in names_in(tier)


def test_a_last_word_that_is_lost_does_no_harm(apart: list[Path]) -> None:
    tier = MemoryTier()
    job = Job(apart, tier)
    job.last_words_are_lost = True
    assert job.copy() == BaseId(1, 3)
    assert usable(tier) == [3]


def test_a_base_that_retention_deletes_meanwhile_is_not_copied(
    apart: list[Path], tmp_path: Path
) -> None:
    runs = up_to(apart, tmp_path, 2)
    tier = MemoryTier()
    folder = runs[1] / BASE.format(2)
    job = Job(runs, tier, before=lambda rank: shutil.rmtree(folder))
    with pytest.raises(StorageError, match="rank 1 could not copy its files"):
        job.copy()
    assert not usable(tier)
    assert [rank for rank, _ in job.posted] == [1], "whose disk it is says so, too"
    # The next base is copied, and what is left of that one goes when a newer one was read back.
    newer = Job(apart, tier, keep=1)
    newer.copy()
    newer.leader.retention.run()
    assert usable(tier) == [3]
    assert BASE.format(2) + "rank-00000.done" in names_in(tier), "nothing was read back so far"
    newer.leader.retention.verified.add(BaseId(1, 3))
    newer.leader.retention.run()
    assert not [name for name in names_in(tier) if name.startswith(BASE.format(2))]
    assert usable(tier) == [3]


def test_a_part_that_went_with_a_replaced_host_is_no_failure(
    apart: list[Path], tmp_path: Path
) -> None:
    """The start before this one saved it; it was resumed from the memory of another node."""
    runs = up_to(apart, tmp_path, 3)
    shutil.rmtree(runs[1] / BASE.format(3))
    tier = MemoryTier()
    job = Job(runs, tier, timeline=2)
    assert job.copy() is None
    assert "No such file" in job.problems()[0], "rank 0 knows why"
    assert not usable(tier)
    assert not job.posted, "nobody who trains hears of it"


def test_what_another_rank_is_at_is_not_swept_away(apart: list[Path], tmp_path: Path) -> None:
    tier = MemoryTier()
    Job(up_to(apart, tmp_path, 2), tier).copy()
    job = Job(apart, tier)
    manifest = scan_run(FILES, apart[0]).bases[-1].manifest
    assert manifest is not None
    job.followers[1].copy_own_files(manifest)
    before = names_in(tier)
    job.leader.retention.verified.add(BaseId(1, 2))
    job.leader.retention.all_ranks_past(BaseId(1, 2))
    job.leader.retention.run()
    assert names_in(tier) == before
    job.copy()
    assert usable(tier) == [2, 3]


def test_a_damaged_part_is_not_copied(apart: list[Path], tmp_path: Path) -> None:
    runs = up_to(apart, tmp_path, 3)
    shard = runs[1] / BASE.format(3) / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    tier = MemoryTier()
    with pytest.raises(StorageError, match="rank 1 could not copy its files"):
        Job(runs, tier).copy()
    assert not usable(tier)


def test_faults_behind_retries_do_no_harm(apart: list[Path]) -> None:
    for seed in range(4):
        inner = MemoryTier()
        tiers = {rank: RetryingTier(FaultyTier.seeded(inner, 10 * seed + rank)) for rank in (0, 1)}
        Job(apart, inner, tiers=tiers).copy()
        assert usable(inner) == [3]


# --- The fence and retention ------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 1])
def test_whoever_is_fenced_off_commits_nothing(apart: list[Path], late: int) -> None:
    """A newer timeline at any moment: either the manifest was there before it, or never comes."""
    manifest = BASE.format(3) + "manifest.json"
    outcomes = set()
    for at in range(1, 60):
        tier = Interloper(inner := MemoryTier())
        tier.at = at
        job = Job(apart, inner, tiers={late: tier})
        try:
            job.copy()
        except (FencedError, StorageError):
            assert manifest not in names_in(inner)
            outcomes.add("fenced")
            continue
        assert manifest in names_in(inner)
        if len(tier.log) < at:
            outcomes.add("before")
            break
        # Between the last look and the manifest, as on any disk.
        assert (late, at) == (0, len(tier.log))
    assert outcomes == {"fenced", "before"}


def three_copies(apart: list[Path], folder: Path) -> dict[str, bytes]:
    tier = MemoryTier()
    for step in (1, 2, 3):
        Job(up_to(apart, folder / str(step), step), tier).copy()
    assert usable(tier) == [1, 2, 3]
    return contents(tier)


def test_retention_by_an_overtaken_rank_0_deletes_nothing(
    apart: list[Path], tmp_path: Path
) -> None:
    """At any moment: the victim is there and not condemned, or its mark was there before the newer
    timeline was, where whoever opened that has seen it."""
    start, mark = three_copies(apart, tmp_path), BASE.format(1) + CONDEMNED
    spared = deleted = 0
    for at in range(1, 400):
        inner, marked = MemoryTier(), list[bool]()
        for name, data in start.items():
            put(inner, name, data)

        class Later(Interloper):
            def begin(
                self, op: Any, name: Any, at: Any = at, inner: Any = inner, marked: Any = marked
            ) -> Any:
                if len(self.log) + 1 == at:
                    marked.append(mark in names_in(inner))
                return super().begin(op, name)

        tier = Later(inner)
        tier.at = at
        try:
            Job(apart, tier).leader.retention.run()
        except FencedError:
            assert set(names_in(inner)) - set(start) == {"timeline-00002/timeline.json"}
            assert contents(inner).items() >= start.items()
            spared += 1
        if len(tier.log) < at:
            break
        if BASE.format(1) + "manifest.json" not in names_in(inner):
            assert marked == [True], "it was deleted, but whoever came could not have known"
            deleted += 1
    assert spared
    assert deleted


def test_retention_that_dies_anywhere_leaves_the_newest(apart: list[Path], tmp_path: Path) -> None:
    start = three_copies(apart, tmp_path)
    stay = {name: data for name, data in start.items() if not name.startswith(BASE.format(1))}
    for at in range(1, 300):
        inner = MemoryTier()
        for name, data in start.items():
            put(inner, name, data)
        dead = FaultyTier(inner, [TierFault("unavailable", at=at, count=FOREVER)])
        try:
            Job(apart, dead).leader.retention.run()
        except StorageError:
            assert contents(inner).items() >= stay.items()
            statuses = {b.id.step: b for b in scan_run(TierFileSystem(inner, ROOT), ROOT).bases}
            if 1 in statuses and statuses[1].is_usable:
                assert contents(inner).items() >= start.items(), "it looks whole, and is not"
            if at % 9 == 0:
                Job(apart, inner).leader.retention.run()
                assert contents(inner) == stay
        else:
            break
    assert at > 20


def test_a_damaged_copy_does_not_count(apart: list[Path], tmp_path: Path) -> None:
    """Of any rank: older copies stay, and it is said."""
    tier = MemoryTier()
    for name, data in three_copies(apart, tmp_path).items():
        put(tier, name, data)
    for step in (2, 3):
        name = BASE.format(step) + "rank-00001.safetensors"
        data = bytearray(contents(tier)[name])
        data[-1] ^= 1
        put(tier, name, bytes(data))
    job = Job(apart, tier, keep=1)
    job.leader.retention.run()
    assert BASE.format(1) + "manifest.json" in names_in(tier)
    assert any("damaged" in str(error) for _, error in job.posted)


def test_rank_0_finishes_what_lacks_only_its_manifest(apart: list[Path], tmp_path: Path) -> None:
    tier = MemoryTier()
    for name, data in three_copies(apart, tmp_path).items():
        put(tier, name, data)
    gone = BASE.format(2) + "manifest.json"
    data = contents(tier)[gone]
    tier.delete(gone)
    Job(apart, tier, keep=3).leader.retention.run()
    assert contents(tier)[gone] == data


# --- Who is waited for ------------------------------------------------------------------


def test_a_follower_waits_for_rank_0_as_long_as_it_may_be_asked(apart: list[Path]) -> None:
    job = Job(apart, MemoryTier())
    follower = job.followers[1]
    assert not follower.busy
    follower.base_durable(BaseId(1, 3))
    follower.expedite()
    assert follower.busy
    job.copy()
    assert not follower.busy
    follower.base_durable(BaseId(1, 3))
    assert not follower.busy, "it was copied before this rank's own keeper heard of it"
    follower.base_durable(BaseId(1, 4))
    assert follower.busy
    job.leader.send_settled(BaseId(1, 4))
    assert not follower.busy
    follower.base_durable(BaseId(1, 5))
    job.dead.add(0)
    assert not follower.busy


class Keeper:
    """The keeper of one rank, as its couriers see it."""

    def __init__(self, keepers: list[Keeper], session: JobSession) -> None:
        self.rank = session.rank
        self._keepers = keepers
        self.session = session
        self.receiver: Any = None
        keepers.append(self)

    def subscribe(self, kind: Any, receiver: Any) -> None:
        self.receiver = receiver

    @property
    def last_receive_s(self) -> float:
        return Seams().clock.monotonic_s()

    def send(self, rank: int, message: Any) -> None:
        self._keepers[rank].receiver(self.rank, message)

    def is_disconnected(self, rank: int) -> bool:
        return False


def test_couriers_of_two_keepers(apart: list[Path], tmp_path: Path) -> None:
    """In their own threads, as keepers drive them: all of them end after the copy."""
    keepers: list[Keeper] = []
    posted: list[EverstepError] = []
    told = [{"where": str(tmp_path / "store"), "keep": 2}]
    couriers = []
    for rank in range(2):
        identity = ShardIdentity("0" * 32, 1, 0, 0, rank, 2, True)
        link: Any = Keeper(keepers, JobSession("session", rank, ("0", "1"), ()))
        one = Couriers(Seams(), apart[rank])
        one.start(
            told, identity, Log().store, posted.append, keep=KeepRules(1), timeout_s=20.0, link=link
        )
        couriers.append(one)
    for one in couriers:
        one.base_durable(BaseId(1, 3))
    assert wait_for(lambda: not sum(one.finish() for one in couriers))
    for one in couriers:
        one.close()
    assert usable(DiskTier(FILES, tmp_path / "store")) == [3]
    for one in couriers:
        stats = KeeperStats()
        one.add_to(stats)
        assert (stats.copied, stats.copied_steps) == (1, 0)
    assert not posted


# --- Resuming ---------------------------------------------------------------------------


def test_a_lost_disk_is_made_good_by_the_copy(
    apart: list[Path], tmp_path: Path, store: MemoryTier
) -> None:
    """The newest base that both ranks can read: one on its disk, the other from the copy."""
    fill(store, apart, tmp_path, 2)
    runs = up_to(apart, tmp_path, 3)
    shutil.rmtree(runs[1])
    with started(*runs, every=1, keep=2) as ranks:
        found = resume(ranks)
        assert [(one.step, one.source) for one in found] == [(2, "disk"), (2, "copy")]
        assert [one.exact for one in found] == [True, True]
        for rank in range(2):
            assert torch.equal(ranks[rank].weight, trained(rank, 2))
        train(ranks, 3)
        for rank in range(2):
            assert torch.equal(ranks[rank].weight, trained(rank, 5))
    with started(*runs) as ranks:
        assert [(one.step, one.source) for one in resume(ranks)] == [(5, "disk")] * 2


def test_all_disks_lost(apart: list[Path], tmp_path: Path, store: MemoryTier) -> None:
    fill(store, apart, tmp_path, 1, 3)
    runs = [tmp_path / "new-a", tmp_path / "new-b"]
    with started(*runs) as ranks:
        found = resume(ranks)
        assert [one.source for one in found] == ["copy", "copy"]
        assert [(one.step, one.timeline) for one in found] == [(3, 2)] * 2
        for rank in range(2):
            assert torch.equal(ranks[rank].weight, trained(rank, 3))
    assert newest_timeline_in(store) == 2
    ids = {scan_run(FILES, run).run for run in (*runs, *apart)}
    assert len(ids) == 1, "a new folder becomes one of the same run"


def test_parts_on_a_disk_and_in_an_unfinished_copy_are_one_base(
    apart: list[Path], tmp_path: Path, store: MemoryTier
) -> None:
    """Rank 1 has copied its part and lost its disk; rank 0 has not copied its own. What is on its
    disk is not swept away while nothing newer is durable."""
    fill(store, apart, tmp_path, 1)
    manifest = scan_run(FILES, apart[1]).bases[-1].manifest
    assert manifest is not None
    Job(apart, store).followers[1].copy_own_files(manifest)
    runs = [up_to(apart, tmp_path, 3)[0], tmp_path / "new-b"]
    for again in range(2):
        with started(*runs) as ranks:
            found = resume(ranks)
            assert [one.step for one in found] == [3, 3], f"start {again}"
            assert [one.source for one in found] == ["disk", "copy"]
            for rank in range(2):
                assert torch.equal(ranks[rank].weight, trained(rank, 3))


def test_a_damaged_copy_is_noticed_and_an_older_base_taken(
    apart: list[Path], tmp_path: Path, store: MemoryTier
) -> None:
    fill(store, apart, tmp_path, 2, 3)
    name = BASE.format(3) + "rank-00001.safetensors"
    data = bytearray(contents(store)[name])
    data[-1] ^= 1
    put(store, name, bytes(data))
    with started(tmp_path / "new-a", tmp_path / "new-b") as ranks:
        found = resume(ranks)
        assert [one.step for one in found] == [2, 2]
        assert any("damaged" in one.reason for one in found[0].skipped)
        for rank in range(2):
            assert torch.equal(ranks[rank].weight, trained(rank, 2))


def test_what_is_damaged_on_a_disk_is_read_from_the_copy(
    apart: list[Path], tmp_path: Path, store: MemoryTier
) -> None:
    fill(store, apart, tmp_path, 3)
    runs = up_to(apart, tmp_path, 3)
    shard = runs[1] / BASE.format(3) / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with started(*runs) as ranks:
        found = resume(ranks)
        assert [one.step for one in found] == [3, 3]
        assert [one.source for one in found] == ["disk", "copy"]
        assert torch.equal(ranks[1].weight, trained(1, 3))


def test_a_copy_without_a_manifest_is_rolled_forward_where_it_is(
    apart: list[Path], tmp_path: Path, store: MemoryTier
) -> None:
    """Rank 0 died between the last marker and the manifest."""
    fill(store, apart, tmp_path, 3)
    name = BASE.format(3) + "manifest.json"
    data = contents(store)[name]
    store.delete(name)
    with started(tmp_path / "new-a", tmp_path / "new-b") as ranks:
        assert [one.step for one in resume(ranks)] == [3, 3]
    assert contents(store)[name] == data


def test_a_condemned_copy_that_is_chosen_is_taken_back(
    apart: list[Path], tmp_path: Path, store: MemoryTier
) -> None:
    fill(store, apart, tmp_path, 3)
    folder = BASE.format(3)
    store.create(folder + CONDEMNED, contents(store)[folder + "manifest.json"])
    with started(tmp_path / "new-a", tmp_path / "new-b") as ranks:
        assert [one.step for one in resume(ranks)] == [3, 3]
    assert folder + CONDEMNED not in names_in(store)
    assert usable(store) == [3]


def test_a_disk_does_not_count_on_what_only_copies_have(
    apart: list[Path], tmp_path: Path, store: MemoryTier
) -> None:
    """What a timeline began with is in the copy alone in part: what is good on the disks stays
    until as many newer bases are good there."""
    fill(store, apart, tmp_path, 3)
    runs = up_to(apart, tmp_path, 3)
    shutil.rmtree(runs[1] / BASE.format(3))
    with started(*runs, every=1, keep=2) as ranks:
        assert [one.source for one in resume(ranks)] == ["disk", "copy"]
        train(ranks, 1)
        on_both = {base.id.step for base in scan_run(FILES, runs[1]).bases}
        assert on_both >= {2, 4}
        train(ranks, 1)
        save(ranks)
    assert {base.id.step for base in scan_run(FILES, runs[1]).bases} >= {4, 5}


def test_two_jobs_that_have_only_the_copies_in_common(
    apart: list[Path], tmp_path: Path, store: MemoryTier
) -> None:
    """They open different timelines, and the older one copies and deletes nothing any more."""
    fill(store, apart, tmp_path, 3)
    first, second = ([tmp_path / f"{job}-{rank}" for rank in "ab"] for job in "12")
    with started(*first, every=1) as old, started(*second, every=1) as new:
        assert [one.timeline for one in resume(old)] == [2, 2]
        assert [one.timeline for one in resume(new)] == [3, 3]
        train(old, 1)
        train(new, 1)
    with pytest.raises(FencedError):
        Job(first, store, 2).copy()
    Job(second, store, 3).copy()
    assert usable(store) == [3, 4]


class Quicker(FaultyTier):
    """Another job takes the number of a timeline just before this one does."""

    def begin(self, op: Any, name: Any) -> Any:
        if op == "create" and name == "timeline-00002/timeline.json":
            record = contents(self._inner)["timeline-00001/timeline.json"]  # type: ignore[arg-type]
            theirs = TimelineRecord.decode(record, PurePath(name))
            theirs = replace(theirs, timeline=2, parent=1, fork_step=3)
            self._inner.create(name, theirs.encode())
        return super().begin(op, name)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
def test_a_number_that_another_job_has_taken_gets_to_no_disk(
    apart: list[Path],
    tmp_path: Path,
    store: MemoryTier,
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
) -> None:
    fill(store, apart, tmp_path, 3)
    monkeypatch.setattr(tier_options, "open_tier", lambda where, files, **_: Quicker(store))
    runs = [tmp_path / name for name in ("new", "new" if shared else "other")]
    with started(*runs, every=1) as ranks:
        assert [one.timeline for one in resume(ranks)] == [3, 3]
        train(ranks, 1)
    for run in runs:
        record = run / "timeline-00002/timeline.json"
        assert (
            not record.exists()
            or record.read_bytes() == contents(store)["timeline-00002/timeline.json"]
        )
    Job(runs, store, 3).copy()
    assert usable(store) == [3, 4]
    with started(*runs) as ranks:
        assert [(one.step, one.timeline) for one in resume(ranks)] == [(4, 4)] * 2


def test_a_place_that_is_another_one_for_each_rank_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = iter([MemoryTier(), MemoryTier()])
    monkeypatch.setattr(tier_options, "open_tier", lambda where, files, **_: next(tiers))
    monkeypatch.setattr(KeeperTerms, "copy_to", lambda self, tiers: None)
    refused = pytest.raises(OptionError, match="rank 1 cannot use the places")
    with refused, started(tmp_path / "a", tmp_path / "b"):
        pass


def test_copies_of_another_run_are_refused(
    apart: list[Path], tmp_path: Path, store: MemoryTier
) -> None:
    fill(store, apart, tmp_path, 3)
    other = saved(tmp_path / "x", tmp_path / "y")
    with pytest.raises(EverstepError, match="another run"), started(*other):
        pass


def test_histories_that_went_apart_are_refused(
    apart: list[Path], tmp_path: Path, store: MemoryTier
) -> None:
    fill(store, apart, tmp_path, 3)
    record = contents(store)["timeline-00001/timeline.json"]
    runs = saved(*(tmp_path / name for name in "xy"))
    for run in runs:
        for path in run.rglob("*.json"):
            if path.name == "run.json":
                path.write_bytes((apart[0] / "run.json").read_bytes())
    assert (runs[0] / "timeline-00001/timeline.json").read_bytes() != record
    with (
        pytest.raises((RecoveryError, DeadlineError)),
        started(*runs, progress_timeout_s=2.0) as ranks,
    ):
        resume(ranks)


def test_retention_rests_on_no_part_that_was_not_read(
    tmp_path: Path, store: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has found its part damaged, and read the copy: older bases stay until a newer one was
    read back."""
    runs = saved(tmp_path / "a", tmp_path / "b", steps=3)
    fill(store, runs, tmp_path, 3)
    flip(runs[1] / BASE.format(3) / "rank-00001.safetensors", -1)
    read = set[BaseId]()
    real = commits_module.verify_rank

    def verify_rank(files: Any, run: Any, base: Any, *rest: Any, **how: Any) -> Any:
        read.add(getattr(base, "id", base))
        return real(files, run, base, *rest, **how)

    monkeypatch.setattr(commits_module, "verify_rank", verify_rank)
    with started(*runs, every=1, keep=2) as ranks:
        found = resume(ranks)
        assert [one.source for one in found] == ["disk", "copy"]
        train(ranks, 1)
    assert not (runs[0] / BASE.format(1)).exists()
    assert BaseId(2, 4) in read, "before anything was deleted"
