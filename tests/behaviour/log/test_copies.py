"""A run goes on from the log in another tier, where the memory and the disks it was on are lost."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import everstep
from everstep.cli import app
from everstep.commit.job.messages import decode_offer, encode_offer
from everstep.commit.lineage import BaseId
from everstep.errors import OptionError
from everstep.format.names import LOG_DIR
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.process.duties import Duties
from everstep.keeper.ship.courier import CopyPlace, Courier
from everstep.keeper.ship.log_copies import LogCopies
from everstep.restore.fetch import rank_copies, sources
from everstep.restore.fetch.peers import FetchResult, fetch_plan
from everstep.restore.start import rank_restore
from everstep.restore.start import resume as resume_module
from everstep.run.folder import open_timeline
from everstep.seams import PosixFileSystem, ReadFile
from everstep.state.ranks.log_shares import parameter_logged_twice
from everstep.state.training_state import State
from everstep.testing import inspect
from everstep.testing.conformance import walk
from everstep.tiers import options as tier_options
from everstep.tiers.disk_tier import DiskTier
from everstep.tiers.memory import MemoryFile, MemoryTier
from everstep.tiers.options import PeerOptions, TierOptions
from everstep.trainer.checks import refuse_lossy_replicas
from everstep.trainer.job import job as job_module
from tests.support.copying import contents, put, wait_for
from tests.support.log.copies import ON_DISK, copy_log, until
from tests.support.log.every_step import World, opened, run_steps
from tests.support.ranks.copying import Job, store
from tests.support.ranks.logs import die as all_die
from tests.support.ranks.sharding import as_rank, build
from tests.support.ranks.together import resume, train, trained, trainings
from tests.support.serving import die, serving
from tests.support.world import TIMEOUT_S, HookedFileSystem, forget

__all__ = ["store"]  # a fixture

STEPS = 7  # three behind the base of step 4


def trained_with_copies(
    run: Path, copies: Path, *, disk: bool = False, **place: Any
) -> tuple[dict[int, dict[str, bytes]], everstep.Stats]:
    """A run of which nothing but the copies is left; its states, and what was done.

    Args:
        disk: its folder is left, too, with a log in it, one segment for each step.
    """
    options, more = TierOptions(str(copies), **place), ON_DISK if disk else {}

    def took(step: int) -> bool:
        copies = duties.copies
        return bool(copies.bases) and all((one.taken_step or 0) >= step for one in copies.logs)

    def hook(op: str, path: PurePath) -> None:
        """A base lets go of the memory of the steps before it: not before they were taken."""
        of_base = path.is_relative_to(run) and path.parent.parent.name == "base"
        if op == "create" and path.suffix == ".tmp" and of_base:
            assert wait_for(lambda: took(int(path.parent.name)))

    with serving(run, filesystem=HookedFileSystem(hook)) as bench:
        duties = bench.server.duties
        world = World()
        ckpt = opened(run, world, tiers=[options], **more)
        ckpt.resume()
        states: dict[int, dict[str, bytes]] = {}
        for step in range(1, STEPS + 1):
            states |= run_steps(ckpt, world, 1)
            inspect(ckpt).saver.finish_captures()
            assert wait_for(lambda at=step: took(at))  # type: ignore[misc]
        couriers = duties.copies
        writer = duties.writer
        assert writer is not None
        assert wait_for(lambda: not writer.waiting)
        assert wait_for(lambda: not any(one.busy for one in couriers.bases.values()))
        die(ckpt)
        assert wait_for(lambda: all(one.courier.stats.step == STEPS for one in couriers.logs))
        stats = bench.server.duties.writer.stats  # type: ignore[union-attr]
        couriers.add_to(stats)
    if not disk:
        shutil.rmtree(run)
    return states, stats  # type: ignore[return-value]


@pytest.fixture
def again(run_folder: Path) -> Iterator[Any]:
    """Another machine."""
    made: list[everstep.Checkpointer] = []

    def start(copies: Path, **options: Any) -> tuple[World, everstep.Recovery]:
        world = World(seed=9)
        place = TierOptions(str(copies), **options)
        made.append(opened(run_folder, world, tiers=[place]))
        return world, made[-1].resume()

    yield start
    for one in made:
        one.close()
    forget(run_folder)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("log_steps", [1, 2, 100])
def test_without_disk_and_keeper_a_run_is_back_at_its_last_step(
    run_folder: Path, tmp_path: Path, again: Any, log_steps: int
) -> None:
    """However long segments are: when training dies, its keeper copies the rest."""
    copies = tmp_path / "copies"
    states, stats = trained_with_copies(run_folder, copies, log="whole", log_steps=log_steps)
    assert (stats.copied_steps, stats.copy_missed) == (STEPS, 0)  # type: ignore[attr-defined]
    world, recovery = again(copies, log="whole")
    assert (recovery.step, recovery.base_step, recovery.replayed) == (STEPS, 4, 3)
    assert recovery.exact, recovery.evidence
    assert world.snapshot() == states[STEPS]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("where", ["record", "index"])
@pytest.mark.parametrize("log_steps", [1, 2], ids=["same segments", "other segments"])
def test_a_damaged_segment_is_read_in_the_copy(
    run_folder: Path, tmp_path: Path, again: Any, log_steps: int, where: str
) -> None:
    copies = tmp_path / "copies"
    states, _ = trained_with_copies(run_folder, copies, disk=True, log="whole", log_steps=log_steps)
    path = run_folder / "timeline-00001/log/000000000005-000000000006/rank-00000.safetensors"
    _spoil(path, where)
    world, recovery = again(copies, log="whole")
    assert (recovery.step, recovery.base_step, recovery.replayed) == (STEPS, 4, 3)
    assert recovery.exact, recovery.evidence
    assert world.snapshot() == states[STEPS]
    said = "intact in another place" if where == "record" else "index is damaged"
    assert said in str(recovery.skipped)


class Slow(DiskTier):
    """The first marker of a segment does not come before another one is asked for, too."""

    def __init__(self, place: Path) -> None:
        super().__init__(PosixFileSystem(), place)
        self.asked, self.alone = 0, False
        self._two = threading.Event()

    def open(self, name: str) -> ReadFile:
        if "/log/" in name and name.endswith(".done"):
            self.asked += 1
            if self.asked > 1:
                self._two.set()
            self.alone |= not self._two.wait(TIMEOUT_S)
        return super().open(name)


def test_segments_of_a_store_are_looked_at_together(
    run_folder: Path, tmp_path: Path, again: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look waits for a network, and there may be hundreds."""
    copies = tmp_path / "copies"
    trained_with_copies(run_folder, copies, log="whole", log_steps=1)
    tier = Slow(copies)
    monkeypatch.setattr(tier_options, "open_tier", lambda where, files, **_: tier)
    _, recovery = again(copies, log="whole")
    assert recovery.step == STEPS
    assert tier.asked > 1
    assert not tier.alone


def test_without_a_copy_of_the_log_it_is_back_at_its_base(
    run_folder: Path, tmp_path: Path, again: Any
) -> None:
    states, stats = trained_with_copies(run_folder, tmp_path / "copies")
    assert stats.copied_steps == 0  # type: ignore[attr-defined]
    world, recovery = again(tmp_path / "copies")
    assert (recovery.step, recovery.replayed) == (4, 0)
    assert world.snapshot() == states[4]


def test_from_a_lossy_log_it_is_near_its_last_step_and_says_so(
    run_folder: Path, tmp_path: Path, again: Any
) -> None:
    copies = tmp_path / "copies"
    lossy = {"log": "adaptive", "log_ratio": 0.5}
    states, _ = trained_with_copies(run_folder, copies, **lossy)
    assert not list(copies.glob("timeline-*/log/*")), "under a name of its own"
    world, recovery = again(copies, **lossy)
    assert (recovery.step, recovery.base_step, recovery.replayed) == (STEPS, 4, 3)
    assert not recovery.exact
    assert "lossy" in str(recovery.evidence) or "approximate" in str(recovery.evidence), recovery
    found, wanted, base = world.snapshot(), states[STEPS], states[4]
    assert {key for key in wanted if key in ("rng", "scheduler", "groups", "plain")} <= {
        key for key in wanted if found[key] == wanted[key]
    }, "marks are whole"
    for key in ("0.weight", "3.weight", "4.weight"):
        near, far = _distance(found[key], wanted[key]), _distance(base[key], wanted[key])
        assert 0 < near < 0.2 * far, f"{key}: {near} next to {far}"


def _distance(one: bytes, other: bytes) -> float:
    a, b = (torch.frombuffer(bytearray(data), dtype=torch.float32) for data in (one, other))
    return float((a - b).norm())


def test_the_log_in_a_copy_is_listed(run_folder: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    trained_with_copies(run_folder, copies, log="whole", log_steps=3)
    told = CliRunner().invoke(app, ["ls", str(copies)])
    assert told.exit_code == 0, told.output
    assert "7" in told.output


def test_a_lossy_log_is_listed_measured_and_restored_as_what_it_is(
    run_folder: Path, tmp_path: Path
) -> None:
    copies = tmp_path / "copies"
    trained_with_copies(run_folder, copies, log="adaptive", log_ratio=0.5, log_steps=3)

    def said(*words: str) -> dict[str, Any]:
        told = CliRunner().invoke(app, [*words, "--json"])
        assert told.exit_code == 0, told.output
        found: dict[str, Any] = json.loads(told.stdout)
        return found

    told = CliRunner().invoke(app, ["ls", str(copies)])
    line = re.search(r"steps 2 to 7 by replay \((\d) segments?, (\d) of them lossy", told.output)
    assert line is not None, told.output
    assert line[1] == line[2]
    (timeline,) = said("du", str(copies))["timelines"]
    assert (timeline["log"]["segments"], timeline["other"]["files"]) == (int(line[1]), 0)
    segments = said("verify", str(copies))["segments"]
    assert [one["lossy"] for one in segments] == [True] * int(line[1])
    restored = said("restore", str(copies), "--step", str(STEPS), "--out", str(tmp_path / "out"))
    assert not restored["exact"], restored


@pytest.mark.parametrize("late", [False, True], ids=["", "the last step is still arriving"])
def test_whoever_goes_back_itself_is_not_told_that_another_has_taken_over(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Its keeper finds the new timeline in the place before it hears of it."""
    gate, shut_out, entered = threading.Event(), threading.Event(), threading.Event()
    paused = threading.Event()

    def pause(self: LogCopies) -> None:
        pauses(self)
        paused.set()

    def arrive(self: LogStore, item: Any) -> None:
        if late and (item.head.kind, item.head.step) == ("mark", 3):
            paused.wait(0.5)  # it is a step that was over before
        arrives(self, item)

    def check_late(self: CopyPlace) -> None:
        """The copy of the log waits before it looks at the fence."""
        if threading.current_thread().name == "everstep-log-copy":
            entered.set()
            assert gate.wait(TIMEOUT_S)
        checked(self)

    def fail(self: Courier, *about: Any, **more: Any) -> None:
        failed(self, *about, **more)
        shut_out.set()

    turns = threading.Semaphore(0)

    def pass_on(self: Duties) -> None:
        passed_on(self)
        turns.release()

    def open_slowly(*about: Any, **more: Any) -> int:
        number = opens(*about, **more)
        gate.set()
        assert shut_out.wait(TIMEOUT_S)
        while turns.acquire(blocking=False):
            pass
        for _ in range(3):  # whatever there is to be told has been told by then
            assert turns.acquire(timeout=TIMEOUT_S)
        return number

    failed = Courier.fail
    passed_on = Duties.pass_on
    opens = open_timeline
    checked = CopyPlace.check_fence
    pauses = LogCopies.pause
    arrives = LogStore._digest_record
    with serving(run_folder):
        world = World()
        monkeypatch.setattr(CopyPlace, "check_fence", check_late)
        monkeypatch.setattr(LogCopies, "pause", pause)
        monkeypatch.setattr(LogStore, "_digest_record", arrive)
        place = TierOptions(str(tmp_path / "copies"), log="whole", log_steps=1)
        ckpt = opened(run_folder, world, every=100, tiers=[place])
        ckpt.resume()
        states = run_steps(ckpt, world, 3)
        assert entered.wait(TIMEOUT_S)
        monkeypatch.setattr(Courier, "fail", fail)
        monkeypatch.setattr(Duties, "pass_on", pass_on)
        monkeypatch.setattr(resume_module, "open_timeline", open_slowly)
        assert ckpt.rewind(2).step == 2
        assert world.snapshot() == states[2]
        assert run_steps(ckpt, world, 2)[3] == states[3]
        inspect(ckpt).saver.finish_captures()
        die(ckpt)


# --- Several ranks ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "world", "who"),
    [
        ("ddp", 2, ""),
        ("fsdp", 4, ""),
        ("hsdp", 4, ""),
        ("tp", 2, "optimizer/model.norm."),
        ("fsdp_tp", 4, "optimizer/model.norm."),
    ],
)
def test_a_lossy_log_is_refused_where_replicas_would_part(
    layout: str, world: int, who: str
) -> None:
    """Beside DTensors, other ranks may hold a plain parameter, or one on another mesh, as well."""
    with as_rank(1, world) as info:
        ranks = replace(info, lossy=True)
        values = build(layout, ranks, 3)
        state = State({key: values[key] for key in ("model", "optimizer")}, ranks=ranks)
        found = parameter_logged_twice(state)
        assert bool(found) == bool(who)
        assert found.startswith(who)
        places = [TierOptions("/copies", log="adaptive")]
        if who:
            with pytest.raises(OptionError, match="would differ"):
                refuse_lossy_replicas(state, None, places)
            with pytest.raises(OptionError, match="would differ"):
                refuse_lossy_replicas(state, PeerOptions(log="adaptive"), [])
            with pytest.raises(OptionError, match="would differ"):
                refuse_lossy_replicas(state, None, [], log="adaptive")
        else:
            refuse_lossy_replicas(state, None, places)
            refuse_lossy_replicas(state, None, [], log="adaptive")
        refuse_lossy_replicas(state, PeerOptions(), [TierOptions("/copies", log="whole")])


@pytest.mark.parametrize("lost", [(1,), (0, 1)], ids=["one disk", "both disks"])
def test_ranks_without_disks_are_back_at_the_last_step(
    tmp_path: Path, store: MemoryTier, lost: tuple[int, ...]
) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    until(runs, store, 6, **ON_DISK)
    for rank in lost:
        shutil.rmtree(runs[rank])
    with trainings(*runs, method="logged", every=4, tiers=["/copies"]) as ranks:
        found = resume(ranks)
        for rank, one in enumerate(found):
            assert (one.step, one.replayed, one.exact) == (6, 2, True), one
            assert torch.equal(ranks[rank].weight, trained(rank, 6))
        train(ranks, 2)
        for rank in range(2):
            assert torch.equal(ranks[rank].weight, trained(rank, 8))


def test_one_rank_from_a_lossy_log_makes_all_inexact(tmp_path: Path, store: MemoryTier) -> None:
    """The other has its own, whole, on its disk; it still goes on with a neighbour that is not."""
    runs = [tmp_path / "a", tmp_path / "b"]
    until(runs, store, 6, ratio=0.5, **ON_DISK)
    shutil.rmtree(runs[1])
    with trainings(*runs, method="logged", every=4, tiers=["/copies"]) as ranks:
        found = resume(ranks)
        assert [(one.step, one.replayed, one.exact) for one in found] == [(6, 2, False)] * 2
        assert torch.equal(ranks[0].weight, trained(0, 6))
        assert torch.allclose(ranks[1].weight, trained(1, 6), atol=0.02)
        all_die(ranks)  # or one would wait for the other to save, too


def test_a_damaged_segment_on_a_disk_is_read_in_the_store(
    tmp_path: Path, store: MemoryTier
) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    until(runs, store, 6, **ON_DISK)
    path = runs[1] / "timeline-00001/log/000000000004-000000000005/rank-00001.safetensors"
    _spoil(path, "record")
    with trainings(*runs, method="logged", every=4, tiers=["/copies"]) as ranks:
        found = resume(ranks)
        for rank, one in enumerate(found):
            assert (one.step, one.replayed, one.exact) == (6, 2, True), one
            assert torch.equal(ranks[rank].weight, trained(rank, 6))
        assert "intact in another place" in str(found[1].skipped)
        all_die(ranks)


def _spoil(path: Path, where: str) -> None:
    """Changes a bit of a segment's first record, or of its index, which is last."""
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") if where == "record" else -1] ^= 1
    path.write_bytes(data)


def told_of_choice(say: Any, offer: Any, copies: Any, needs: Any, **more: Any) -> FetchResult:
    """What a rank does before it fetches; there is nothing to fetch."""
    said = say("say what they have", {"offer": encode_offer(offer)})
    choice = fetch_plan([decode_offer(one["offer"]) for one in said], [], needs, more["step"])[1]
    assert choice is not None
    more["extras"].planned(choice)
    return FetchResult([], [])


def test_a_lossy_log_is_looked_at_while_others_fetch(
    tmp_path: Path, store: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes from peers is chosen without it; it is there when the ranks agree."""
    runs = [tmp_path / "a", tmp_path / "b"]
    until(runs, store, 7, ratio=0.9)
    for run in runs:
        shutil.rmtree(run)
    looked, own = threading.Event(), MemoryTier.open

    def noting(self: MemoryTier, name: str) -> Any:
        if "/lossy/" in name:
            looked.set()
        return own(self, name)

    def fetch(
        meeting: Any, clock: Any, say: Any, offer: Any, *about: Any, **more: Any
    ) -> FetchResult:
        assert offer.log == ()
        told_of_choice(say, offer, *about, **more)
        assert looked.wait(TIMEOUT_S), "nobody looks meanwhile"
        return FetchResult([], [])

    restored: list[Any] = []
    restore = rank_restore.RankRestore.restore

    def noted(self: Any, choice: Any) -> Any:
        restored.append(choice.end)
        return restore(self, choice)

    monkeypatch.setattr(MemoryTier, "open", noting)
    monkeypatch.setattr(job_module, "fetch_from_peers", fetch)
    monkeypatch.setattr(rank_restore.RankRestore, "restore", noted)
    with trainings(*runs, method="logged", every=4, tiers=["/copies"]) as ranks:
        for one in ranks:
            inspect(one.ckpt).starter.job.shared.fetches = True
        assert [(one.step, one.exact) for one in resume(ranks)] == [(7, False)] * 2
        all_die(ranks)
    assert restored == [BaseId(1, 7)] * 2, "at the first attempt"


@pytest.mark.parametrize("damaged", [False, True])
def test_of_a_lossy_log_what_is_behind_the_chosen_base_is_read_and_all_of_it_if_that_is_damaged(
    tmp_path: Path, store: MemoryTier, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """Bases of steps 4 and 8 are in the store, and the log of steps 5 to 7, 9 and 10."""
    runs = [tmp_path / "a", tmp_path / "b"]
    with trainings(*runs, method="logged", every=4, tiers=["/copies"]) as ranks:
        resume(ranks)
        for upto, step in ((0, 4), (7, 8)):
            train(ranks, step - upto)
            for one in ranks:
                one.ckpt.wait(20)
            Job(runs, store).copy()
            train(ranks, 7 - step if step == 4 else 2)
            for one in ranks:
                copy_log(one, store, 0.9)
        all_die(ranks)
    for run in runs:
        shutil.rmtree(run)
    if damaged:
        name = "timeline-00001/base/000000000008/rank-00001.safetensors"
        data = bytearray(contents(store)[name])
        data[-1] ^= 1
        put(store, name, bytes(data))
    opened: set[str] = set()
    own = MemoryTier.open

    def noting(self: MemoryTier, name: str) -> Any:
        if "/lossy/" in name:
            opened.add(name.split("/")[2][-2:])
        return own(self, name)

    monkeypatch.setattr(MemoryTier, "open", noting)
    monkeypatch.setattr(
        job_module,
        "fetch_from_peers",
        lambda meeting, clock, say, *about, **more: told_of_choice(say, *about, **more),
    )
    with trainings(*runs, method="logged", every=4, tiers=["/copies"]) as ranks:
        for one in ranks:
            inspect(one.ckpt).starter.job.shared.fetches = True
        found = {(one.step, one.base_step) for one in resume(ranks)}
        all_die(ranks)
    assert found == ({(7, 4)} if damaged else {(10, 8)})
    assert opened == ({"07", "10"} if damaged else {"10"}), "by their last steps"


def test_a_damaged_segment_in_the_store_is_the_end_for_all(
    tmp_path: Path, store: MemoryTier
) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    until(runs, store, 6, **ON_DISK)
    shutil.rmtree(runs[1])
    (name,) = [
        item.name
        for item in walk(store, "timeline-00001/log")
        if item.name.endswith("rank-00001.safetensors")
    ]
    data = bytearray(contents(store)[name])
    data[-1] ^= 1
    store.delete(name)
    store.create(name, bytes(data))
    with trainings(*runs, method="logged", every=4, tiers=["/copies"]) as ranks:
        found = resume(ranks)
        assert [one.step for one in found] == [4, 4]
        assert "damaged" in str(found[0].skipped) + str(found[1].skipped)


class _Reads:
    """Which threads read tensors of segments in a store, and the names of what they read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, str]] = []
        self.ahead = threading.Semaphore(0)
        own = MemoryTier.open

        def noting(tier: MemoryTier, name: str) -> Any:
            file = own(tier, name)
            return _Noted(self, name, file) if "/log/" in name else file

        monkeypatch.setattr(MemoryTier, "open", noting)
        monkeypatch.setattr(rank_copies, "_SMALL_BYTES", 0)  # or a look would read all of them

    def by(self, thread: str) -> list[str]:
        return sorted(name for name, who in self.found if who.startswith(thread))


class _Noted:
    def __init__(self, reads: _Reads, name: str, file: Any) -> None:
        self._reads, self._name, self._file = reads, name, file
        self.size_bytes: int = file.size_bytes
        self.close = file.close

    def read_into(self, buffer: memoryview, offset: int) -> int:
        got = int(self._file.read_into(buffer, offset))
        thread = threading.current_thread().name
        self._reads.found.append((self._name, thread))
        if thread.startswith(AHEAD):
            self._reads.ahead.release()
        return got


AHEAD, REPLAY = "everstep-files-ahead", "everstep-io"


@pytest.mark.parametrize("room", [True, False], ids=["", "no room"])
def test_a_log_comes_from_the_store_while_others_fetch(
    tmp_path: Path, store: MemoryTier, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """Each segment once, and not once more when it is replayed; where there is no room for it, only
    then."""
    runs = [tmp_path / "a", tmp_path / "b"]
    until(runs, store, 6, **ON_DISK)
    for run in runs:
        shutil.rmtree(run)
    reads = _Reads(monkeypatch)
    if not room:
        monkeypatch.setattr(sources, "_LOG_BYTES_MAX", 10)

    def fetch(meeting: Any, clock: Any, say: Any, *about: Any, **more: Any) -> FetchResult:
        told_of_choice(say, *about, **more)
        if room:
            assert reads.ahead.acquire(timeout=TIMEOUT_S), "nothing comes meanwhile"
        return FetchResult([], [])

    monkeypatch.setattr(job_module, "fetch_from_peers", fetch)
    with trainings(*runs, method="logged", every=4, tiers=["/copies"]) as ranks:
        for one in ranks:
            inspect(one.ckpt).starter.job.shared.fetches = True
        assert [(one.step, one.replayed, one.exact) for one in resume(ranks)] == [(6, 2, True)] * 2
        for rank in range(2):
            assert torch.equal(ranks[rank].weight, trained(rank, 6))
        all_die(ranks)
    segments = sorted(
        item.name for item in walk(store, "timeline-00001/log") if "safetensors" in item.name
    )
    assert len(segments) == 2, "of two steps, of each rank"
    assert reads.by(AHEAD) == (segments if room else [])
    assert set(reads.by(REPLAY)) == (set() if room else set(segments))


def test_what_has_come_damaged_is_read_in_the_store(
    tmp_path: Path, store: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    until(runs, store, 6, **ON_DISK)
    shutil.rmtree(runs[1])
    own, unusable = sources.FilesAhead.open, set()

    def spoiling(self: Any, path: PurePath, *, direct: bool = False) -> Any:
        file = own(self, path, direct=direct)
        if LOG_DIR not in path.parts:
            return file
        unusable.add(path.parent.name)
        data = bytearray(file.size_bytes)
        assert file.read_into(memoryview(data), 0) == len(data)
        data[8 + int.from_bytes(data[:8], "little")] ^= 1
        return MemoryFile([memoryview(data)])

    monkeypatch.setattr(sources.FilesAhead, "open", spoiling)
    monkeypatch.setattr(
        job_module,
        "fetch_from_peers",
        lambda meeting, clock, say, *about, **more: told_of_choice(say, *about, **more),
    )
    with trainings(*runs, method="logged", every=4, tiers=["/copies"]) as ranks:
        for one in ranks:
            inspect(one.ckpt).starter.job.shared.fetches = True
        found = resume(ranks)
        assert [(one.step, one.replayed, one.exact) for one in found] == [(6, 2, True)] * 2
        assert torch.equal(ranks[1].weight, trained(1, 6))
        all_die(ranks)
    assert unusable
    assert "intact in another place" in str(found[1].skipped)
