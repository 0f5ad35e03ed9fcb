"""The keeper's background audit: what it finds is written beside the base, told to the trainer, and
part of the evidence of a resume; and it is in nobody's way."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest

import everstep
from everstep.commit.lineage import BaseId
from everstep.errors import AuditError, EverstepError
from everstep.format.names import AUDIT_RECORD, base_dir
from everstep.format.records import AuditRecord, TimelineRecord
from everstep.keeper.process import auditor as auditor_module
from everstep.keeper.process.auditor import CPU_SHARE, Auditor
from everstep.options import LogOptions
from everstep.restore.offline import audit as audit_module
from everstep.restore.offline.audit import audit_newest
from everstep.run.folder import open_timeline
from everstep.run.scan import Inventory, scan_run
from everstep.run.verify import audit_of, describe_audit
from everstep.seams import FileSystem, ManualClock, PosixFileSystem, Seams, SystemClock
from everstep.seams.processes.processes import Ended
from everstep.state.values.tensors import byte_view
from tests.support.logged import (
    World,
    document,
    edit_base,
    invoke,
    segments_of,
    train,
)
from tests.support.logged import opened as with_a_log
from tests.support.serving import Bench, serving
from tests.support.world import TIMEOUT_S, HookedFileSystem, files_below, flip, forget

CLOCK = SystemClock()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases 1, 4, 8, 10, and all of the log."""
    run = tmp_path_factory.mktemp("audits") / "run"
    train(run, World(), 10)
    return run


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def audited(run: Path, filesystem: FileSystem | None = None) -> AuditRecord | str:
    return audit_newest(filesystem or PosixFileSystem(), PurePath(run), 1, CLOCK)


def record_of(run: Path) -> AuditRecord:
    found = audited(run)
    assert isinstance(found, AuditRecord), found
    return found


def keep(run: Path, record: AuditRecord) -> Path:
    """Puts a record where the keeper puts it."""
    path = Path(base_dir(run, record.timeline, record.step)) / AUDIT_RECORD
    path.write_bytes(record.encode())
    return path


def spoil(run: Path, step: int, name: str = "model/0.weight") -> None:
    """One bit of a base is wrong, and every digest vouches for it."""

    def change(state: Any) -> None:
        byte_view(state.tensors[name])[-1] ^= 1

    edit_base(run, step, change)


def resumed(run: Path, step: int | None = None, **options: Any) -> everstep.Recovery:
    with with_a_log(run, World(seed=9), every=None, **options) as ckpt:
        return ckpt.resume(step=step)


class Inline:
    """What the child process does, within this one."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        assert module == "everstep.restore.offline.audit_process"
        options = dict(word.removeprefix("--").split("=", 1) for word in arguments)
        self.run, self.timeline = options["run"], int(options["timeline"])

    def wait(self, timeout_s: float) -> Ended:
        try:
            found = audit_newest(PosixFileSystem(), PurePath(self.run), self.timeline, CLOCK)
        except EverstepError as error:
            found = str(error)
        if isinstance(found, str):
            return Ended(0, b"", found, 0.0)
        return Ended(0, found.encode(), "", 0.0)

    def kill(self) -> None:
        pass


class Blocked:
    """A child that goes on until it is killed."""

    made: list[Blocked]

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self.arguments = arguments
        self.killed = threading.Event()
        self.made.append(self)

    def wait(self, timeout_s: float) -> Ended:
        assert self.killed.wait(TIMEOUT_S), "nobody kills it"
        return Ended(-9, b"", "", 1.0)

    def kill(self) -> None:
        self.killed.set()


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> type[Blocked]:
    monkeypatch.setattr(Blocked, "made", [], raising=False)
    monkeypatch.setattr(auditor_module, "Child", Blocked)
    return Blocked


def make_auditor(run: Path, start: Any = Inline, **options: Any) -> tuple[Auditor, list[Any]]:
    posted: list[Any] = []
    filesystem = options.pop("filesystem", None) or PosixFileSystem()
    clock, settle = options.pop("clock", CLOCK), options.pop("settle", lambda: None)
    made = Auditor(filesystem, PurePath(run), 1, clock, posted.append, settle, start=start)
    return made, posted


def until(there: Callable[[], bool], what: str) -> None:
    waited = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.01)):
        if there():
            return
        waited.wait(0.01)
    raise AssertionError(f"{what} never came")


# --- What an audit finds ----------------------------------------------------------------


def test_the_newest_base_is_what_the_log_gives(run: Path) -> None:
    record = record_of(run)
    assert (record.before, record.timeline, record.step) == ((1, 8), 1, 10)
    assert (record.verdict, record.steps, record.updates) == ("equal", 2, 2)
    assert record.entries == len(document("inspect", run)["entries"])
    assert record.fingerprint["everstep"] == everstep.__version__
    assert {"torch", "threads", "machine"} <= set(record.fingerprint)
    keep(run, record)
    assert "without an audit" in str(audited(run))  # and older ones are of no interest any more


@pytest.mark.parametrize("name", ["model/0.weight", "optimizer/state/model.4.bias/exp_avg_sq"])
def test_a_bit_that_every_digest_vouches_for(name: str, run: Path) -> None:
    spoil(run, 10, name)
    record = record_of(run)
    assert (record.verdict, record.count, record.differing) == ("different", 1, (name,))
    assert f"1 of {record.entries} entries differ: '{name}'" in describe_audit(record)


def test_many_entries_are_counted_and_some_named(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "NAMES_MAX", 3)

    def change(state: Any) -> None:
        for name in list(state.tensors)[:7]:
            byte_view(state.tensors[name])[-1] ^= 1

    edit_base(run, 10, change)
    record = record_of(run)
    assert (record.count, len(record.differing)) == (7, 3)
    assert describe_audit(record).endswith(" and 4 more")


@pytest.mark.parametrize("part", ["rank-00000.safetensors", "rank-00000.done"])
def test_damage_in_the_log_is_said_and_is_never_equal(part: str, run: Path) -> None:
    """Of a record, which only reading shows, and of what is looked at first."""
    path = Path(segments_of(run)[-1].path) / part
    flip(path, path.stat().st_size // 2)
    record = record_of(run)
    assert record.verdict == "unchecked"
    assert path.parent.name in record.reason
    keep(run, record)
    for newer in (run / "timeline-00001/base/000000000010").glob("rank*"):
        newer.touch()
    assert f"not audited: base 10: {record.reason}" in resumed(run).evidence


def test_with_nothing_to_audit_the_log_goes_on_undisturbed(run: Path, tmp_path: Path) -> None:
    """A base without one before it does not end a segment of the log."""
    settled: list[Path] = []
    alone = tmp_path / "alone"
    train(alone, World(), 1)
    for path in (alone, run):
        made, posted = make_auditor(path, settle=lambda path=path: settled.append(path))
        made.audit()
        made.close()
        assert not posted
    assert settled == [run]


def test_a_log_that_does_not_reach_the_base_yet(run: Path) -> None:
    """It may still be written: the pair before it is audited instead."""
    shutil.rmtree(segments_of(run)[-1].path)
    record = record_of(run)
    assert (record.before, record.step, record.verdict) == ((1, 4), 8, "equal")


def test_another_torch_is_no_audit(run: Path) -> None:
    path = run / "timeline-00001" / "timeline.json"
    old = TimelineRecord.decode(path.read_bytes(), path)
    path.write_bytes(replace(old, fingerprint={**old.fingerprint, "torch": "1.0"}).encode())
    record = record_of(run)
    assert record.verdict == "unchecked"
    assert "trained with torch 1.0" in record.reason
    assert record.entries == 0  # nothing was replayed


def test_without_enough_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_bytes = 0
    monkeypatch.setattr(audit_module, "memory_available_bytes", lambda: left_bytes)
    said = re.search(r"takes (\d+) bytes of memory; half of the 0", str(audited(run)))
    assert said is not None
    left_bytes = 2 * int(said[1]) - 1
    assert f"half of the {left_bytes} available" in str(audited(run))
    left_bytes += 1
    assert record_of(run).verdict == "equal"


@pytest.mark.parametrize("victim", ["base/000000000008", "log/000000000008-000000000010"])
def test_retention_may_take_all_of_it_away(victim: str, run: Path) -> None:
    """Neither damage nor a difference: nothing is known, and nothing is claimed."""
    folder = run / "timeline-00001" / victim
    opened: list[PurePath] = []

    def delete(op: str, path: PurePath) -> None:
        if op == "open" and path.parent == PurePath(folder) and path.suffix == ".safetensors":
            opened.append(path)
            if len(opened) == 2:  # it was seen to be there, and is read now
                shutil.rmtree(folder)

    assert "was deleted during the audit" in str(audited(run, HookedFileSystem(delete)))
    assert len(opened) == 2


def test_a_newer_timeline_ends_it(run: Path) -> None:
    filesystem = HookedFileSystem()
    seen: list[PurePath] = []

    def take_over(op: str, path: PurePath) -> None:
        if op == "open" and "/log/" in str(path):
            seen.append(path)
            if len(seen) == len(segments_of(run)) + 1:  # all indices, then the first records
                inventory = scan_run(PosixFileSystem(), PurePath(run))
                open_timeline(Seams(), PurePath(run), inventory, parent=BaseId(1, 10), exact=True)

    filesystem.hook = take_over
    with pytest.raises(everstep.errors.FencedError, match="timeline 2 has taken over the run"):
        audited(run, filesystem)


def test_along_a_fork(run: Path) -> None:
    """Killed, and brought to step 11 by the log: the next base has two timelines before it."""
    shutil.rmtree(run / "timeline-00001/base/000000000010")
    train(run, World(seed=9), 2, every=12)
    shutil.rmtree(run / "timeline-00002/base/000000000011", ignore_errors=True)
    inventory = scan_run(PosixFileSystem(), PurePath(run))
    assert inventory.bases[-1].id == BaseId(2, 12)
    record = audit_newest(PosixFileSystem(), PurePath(run), 2, CLOCK)
    assert isinstance(record, AuditRecord)
    assert (record.before, record.timeline, record.step) == ((1, 8), 2, 12)
    assert (record.verdict, record.steps) == ("equal", 4)


@pytest.mark.parametrize("timeline", [1, 2])
def test_damage_in_an_abandoned_part_of_the_log_is_none_of_the_pair(
    timeline: int, run: Path
) -> None:
    """Of the timeline before, after the fork, or of one that is abandoned altogether: the log does
    not reach the newest base yet, so the pair before it is audited."""
    for steps in (2, 4):
        train(run, World(seed=9), steps, at=8)
    shutil.rmtree(run / "timeline-00003/log")
    abandoned = segments_of(run, timeline)[-1]
    assert (abandoned.after, abandoned.last) == (8, 10)
    path = Path(abandoned.path) / "rank-00000.done"
    flip(path, path.stat().st_size // 2)
    record = audit_newest(PosixFileSystem(), PurePath(run), 3, CLOCK)
    assert isinstance(record, AuditRecord)
    assert (record.before, record.timeline, record.step) == ((1, 4), 1, 8)
    assert record.verdict == "equal"


# --- What becomes of it -----------------------------------------------------------------


def test_it_is_written_down_and_is_evidence(run: Path) -> None:
    auditor, posted = make_auditor(run)
    auditor.audit()
    assert not posted
    recovery = resumed(run)
    assert recovery.exact
    entries = record_of_disk(run).entries
    told = f"audited: base 8 + log of 2 steps = base 10, bit for bit, {entries} entries"
    assert told in recovery.evidence


def record_of_disk(run: Path, step: int = 10) -> AuditRecord:
    path = Path(base_dir(run, 1, step)) / AUDIT_RECORD
    return AuditRecord.decode(path.read_bytes(), path)


def test_a_difference_is_an_error_and_the_end_of_exactness(run: Path) -> None:
    spoil(run, 10)
    auditor, posted = make_auditor(run)
    auditor.audit()
    (error,) = posted
    assert isinstance(error, AuditError)
    assert error.step == 10
    assert "base 8 + log of 2 steps is not base 10" in str(error)
    assert "'model/0.weight'" in str(error)
    assert "resume(step=8)" in str(error)
    recovery = resumed(run)
    assert (recovery.step, recovery.exact) == (10, False)
    assert "not exact: audit failed: base 8 + log of 2 steps is not base 10" in recovery.evidence
    # It is inherited, for ever; but not by what comes from before it.
    assert not resumed(run).exact
    recovery = resumed(run, step=8)
    assert recovery.exact
    assert "audit" not in recovery.evidence


def test_the_record_is_all_that_makes_the_claim(run: Path) -> None:
    assert "audit" not in resumed(run).evidence


def test_a_state_rests_on_the_audits_before_it(run: Path) -> None:
    """Of the bases that it descends from: the newest; or the newest that was different."""
    equal = replace(record_of(run), step=4, before=(1, 1))
    inventory = scan_run(PosixFileSystem(), PurePath(run))

    def rests_on(state: BaseId, *records: AuditRecord) -> int | None:
        audits = {record.step: record for record in records}
        bases = [replace(base, audit=audits.get(base.id.step)) for base in inventory.bases]
        found = audit_of(replace_bases(inventory, bases), state)
        return None if found is None else found.step

    different = replace(equal, step=8, verdict="different", count=1, differing=("a",))
    newest = replace(equal, step=10)
    assert rests_on(BaseId(1, 10)) is None
    assert rests_on(BaseId(1, 10), equal) == 4
    assert rests_on(BaseId(1, 10), equal, newest) == 10
    assert rests_on(BaseId(1, 10), equal, different, newest) == 8
    assert rests_on(BaseId(1, 9), equal, different, newest) == 8
    assert rests_on(BaseId(1, 7), equal, different, newest) == 4
    assert rests_on(BaseId(1, 3), equal, different, newest) is None
    assert rests_on(BaseId(2, 99), equal, newest) is None  # of another history


def replace_bases(inventory: Inventory, bases: list[Any]) -> Inventory:
    return Inventory(inventory.path, inventory.run, inventory.timelines, bases=bases)


def test_an_audit_of_other_contents_is_none(run: Path) -> None:
    keep(run, record_of(run))
    assert scan_run(PosixFileSystem(), PurePath(run)).bases[-1].audit is not None
    path = Path(base_dir(run, 1, 10)) / AUDIT_RECORD
    data = path.read_bytes()
    spoil(run, 10)  # the same step, another base
    path.write_bytes(data)
    base = scan_run(PosixFileSystem(), PurePath(run)).bases[-1]
    assert (base.status, base.audit, base.problem) == ("committed", None, None)
    keep(run, replace(record_of(run), step=8)).rename(path)
    assert scan_run(PosixFileSystem(), PurePath(run)).bases[-1].audit is None
    recovery = resumed(run)
    assert any("belongs to another base" in note for note in recovery.notes)
    assert "audit" not in recovery.evidence


def test_a_damaged_record_makes_no_base_worse(run: Path) -> None:
    path = keep(run, record_of(run))
    flip(path, 40)
    base = scan_run(PosixFileSystem(), PurePath(run)).bases[-1]
    assert (base.status, base.audit, base.problem) == ("committed", None, None)
    found = document("verify", run, status=1)
    assert all(one["ok"] for one in found["bases"])
    assert "audit.json" in found["problems"][0]["problem"]
    recovery = resumed(run)
    assert (recovery.step, recovery.exact) == (10, True)
    assert any("audit.json" in note for note in recovery.notes)


def test_it_goes_with_its_base(run: Path) -> None:
    path = keep(run, record_of(run))
    train(run, World(seed=9), 4, every=1, keep=2)
    assert not path.parent.exists()
    for base in scan_run(PosixFileSystem(), PurePath(run)).bases:
        assert base.status == "committed"


def test_what_a_crash_leaves_of_a_base_is_swept_with_its_audit(run: Path) -> None:
    path = keep(run, record_of(run))
    for other in path.parent.iterdir():
        if other != path:
            other.unlink()
    train(run, World(seed=9), 1)
    assert not path.parent.exists()


# --- Who shows it -----------------------------------------------------------------------


def test_the_command_shows_it(run: Path) -> None:
    keep(run, record_of(run))
    told = describe_audit(record_of_disk(run))
    *_, base = document("ls", run)["bases"]
    assert base["audit"]["before"] == {"timeline": 1, "step": 8}
    assert base["audit"]["verdict"] == "equal"
    assert not base["problems"]
    (line,) = [line for line in invoke("ls", run).stdout.splitlines() if "committed" in line][-1:]
    assert line.rstrip().endswith("audited")
    assert document("inspect", run)["audit"]["steps"] == 2
    assert told in invoke("inspect", run).stdout
    assert told in invoke("verify", run).stdout
    by_step = {one["step"]: one for one in document("verify", run)["bases"]}
    assert by_step[10]["audit"]["entries"] == by_step[10]["entries"]
    assert by_step[8]["audit"] is None
    assert document("verify", run)["ok"]


def test_the_command_shows_that_it_failed(run: Path) -> None:
    spoil(run, 10)
    keep(run, record_of(run))
    told = describe_audit(record_of_disk(run))
    assert told in invoke("verify", run).stdout
    assert not document("verify", run, status=1)["ok"]
    assert document("verify", run, "--step", 8)["ok"]
    listed = invoke("ls", run)
    assert listed.exit_code == invoke("inspect", run).exit_code == 1
    text = listed.stdout
    assert "AUDIT FAILED" in text
    assert f"problem: step 10 of timeline 1: {told}" in text


def test_rm_and_du_know_it(run: Path) -> None:
    path = keep(run, record_of(run))
    assert document("du", run)["timelines"][0]["other"]["files"] == 0
    planned = document("rm", run, "--step", 10, "--force", "--dry-run")
    assert str(path) in {file["path"] for file in planned["files"]}
    assert not planned["stays"]
    assert not document("rm", run, "--step", 10, "--force")["stays"]
    assert not path.parent.exists()


# --- The keeper's part ------------------------------------------------------------------


def test_one_at_a_time_and_killed_at_the_end(run: Path, blocked: type[Blocked]) -> None:
    auditor, posted = make_auditor(run, None)
    auditor.base_durable()
    until(lambda: bool(blocked.made), "the child")
    auditor.base_durable()
    auditor.base_durable()
    auditor.close()
    (child,) = blocked.made
    assert child.killed.is_set()
    assert f"--run={run}" in child.arguments
    assert "--timeline=1" in child.arguments
    auditor.base_durable()
    assert len(blocked.made) == 1
    assert not posted
    assert not list(run.rglob(AUDIT_RECORD))


class AskedClock(ManualClock):
    """Says when somebody asks it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def monotonic_s(self) -> float:
        self.asked.set()
        return super().monotonic_s()


def test_audits_take_a_small_share_of_a_core(run: Path) -> None:
    clock, began, taken_s = AskedClock(), threading.Semaphore(0), 3.0

    class Costly(Inline):
        def wait(self, timeout_s: float) -> Ended:
            began.release()
            return replace(super().wait(timeout_s), cpu_s=taken_s)

    auditor, _ = make_auditor(run, Costly, clock=clock)

    def again() -> bool:
        """Whether the next begins as soon as there is something new."""
        next(iter(run.rglob(AUDIT_RECORD))).unlink(missing_ok=True)
        clock.asked.clear()
        auditor.base_durable()
        assert clock.asked.wait(TIMEOUT_S)
        return not auditor.is_due  # its lock is free again: it has decided

    try:
        auditor.base_durable()
        assert began.acquire(timeout=TIMEOUT_S)
        until(lambda: bool(files_below(run, AUDIT_RECORD)), "the record")
        clock.advance(taken_s / CPU_SHARE - 1)
        assert not again()
        clock.advance(1)
        auditor.base_durable()
        assert began.acquire(timeout=TIMEOUT_S)
    finally:
        auditor.close()


def test_nothing_is_started_where_there_is_nothing_to_compare(
    run: Path, blocked: type[Blocked]
) -> None:
    """A process that imports torch to find that out is not for nothing."""
    keep(run, record_of(run))
    auditor, _ = make_auditor(run, None)
    auditor.audit()
    for step in (4, 8, 10):
        shutil.rmtree(base_dir(run, 1, step))
    auditor.audit()
    assert not blocked.made


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (Ended(0, b"", "not enough memory", 1.0), "not enough memory"),
        (Ended(1, b"", "Traceback ...", 1.0), "Traceback"),
        (Ended(-9, b"", "", 1.0), "status -9"),
        (Ended(-9, b"", "", 1.0, late=True), "not finished after"),
        (Ended(0, b"{}", "", 1.0), "not a audit record"),
    ],
)
def test_a_child_that_finds_nothing_out(
    ended: Ended, said: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Inline):
        def wait(self, timeout_s: float) -> Ended:
            return ended

    auditor, posted = make_auditor(run, Odd)
    caplog.set_level("INFO")
    auditor.base_durable()
    until(lambda: said in caplog.text, "the end")
    auditor.close()
    assert not posted
    assert not list(run.rglob(AUDIT_RECORD))


def test_a_base_that_is_gone_by_then(run: Path) -> None:
    spoil(run, 10)
    data = record_of(run).encode()

    class Late(Inline):
        def wait(self, timeout_s: float) -> Ended:
            shutil.rmtree(base_dir(run, 1, 10))
            return Ended(0, data, "", 1.0)

    auditor, posted = make_auditor(run, Late)
    auditor.audit()
    assert not list(run.rglob(AUDIT_RECORD))
    assert len(posted) == 1  # it was wrong all the same


def test_after_another_process_has_taken_over(run: Path) -> None:
    spoil(run, 10)
    data = record_of(run).encode()

    class Fenced(Inline):
        def wait(self, timeout_s: float) -> Ended:
            inventory = scan_run(PosixFileSystem(), PurePath(run))
            open_timeline(Seams(), PurePath(run), inventory, parent=BaseId(1, 10), exact=True)
            return Ended(0, data, "", 1.0)

    auditor, posted = make_auditor(run, Fenced)
    auditor.audit()
    assert not posted
    assert not list(run.rglob(AUDIT_RECORD))


# --- With a keeper ----------------------------------------------------------------------

ON_DISK = LogOptions(to="disk", batch_steps=3)


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def a_trainer(served: Bench, **options: Any) -> tuple[World, everstep.Checkpointer]:
    world = World()
    forget(served.run)
    method = everstep.Method(base="lazy", log="dense")
    options = {"every": 4, "method": method, "log": ON_DISK, "keep": 9} | options
    return world, everstep.Checkpointer(served.run, world.state, **options)


def trained(world: World, ckpt: everstep.Checkpointer, steps: int) -> None:
    ckpt.resume()
    for _ in range(steps):
        world.train()
        ckpt.step()
    ckpt.wait()


def test_each_base_as_it_becomes_durable(served: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the log is written three steps at a time: what it lacks is written first."""
    monkeypatch.setattr(auditor_module, "Child", Inline)
    world, ckpt = a_trainer(served)
    trained(world, ckpt, 4)
    until(lambda: bool(files_below(served.run, AUDIT_RECORD)), "the audit")
    ckpt.close()
    (path,) = served.run.rglob(AUDIT_RECORD)
    record = AuditRecord.decode(path.read_bytes(), path)
    assert (record.before, record.step, record.verdict) == ((1, 1), 4, "equal")


@pytest.mark.parametrize(
    "options",
    [
        {"log": LogOptions(to="memory")},
        {"log": replace(ON_DISK, audit=False)},
        {"keep": 1},
        {"method": "lazy", "log": None},
    ],
    ids=["in memory", "not wanted", "one base", "no log"],
)
def test_where_there_is_none(
    options: dict[str, Any], served: Bench, blocked: type[Blocked]
) -> None:
    world, ckpt = a_trainer(served, **options)
    trained(world, ckpt, 5)
    assert served.server.duties.audits.auditor is None
    ckpt.close()
    assert not blocked.made


def test_it_ends_with_the_keeper(served: Bench, blocked: type[Blocked]) -> None:
    world, ckpt = a_trainer(served)
    trained(world, ckpt, 4)
    until(lambda: bool(blocked.made), "the child")
    ckpt.close()
    served.server.end()
    assert blocked.made[0].killed.wait(TIMEOUT_S)


def test_it_ends_when_another_process_is_served(served: Bench, blocked: type[Blocked]) -> None:
    world, ckpt = a_trainer(served)
    trained(world, ckpt, 4)
    until(lambda: bool(blocked.made), "the child")
    ckpt.resume()
    assert blocked.made[0].killed.wait(TIMEOUT_S)
    ckpt.close()


def test_nobody_waits_for_it(served: Bench, blocked: type[Blocked]) -> None:
    world, ckpt = a_trainer(served, keep=2)
    trained(world, ckpt, 4)
    until(lambda: bool(blocked.made), "the child")
    for _ in range(8):
        world.train()
        ckpt.step()
    ckpt.wait()
    steps = [base.id.step for base in scan_run(PosixFileSystem(), PurePath(served.run)).bases]
    assert steps == [8, 12]
    assert len(blocked.made) == 1
    assert not blocked.made[0].killed.is_set()
    ckpt.close()


def test_json_of_records_is_plain(run: Path) -> None:
    """Nothing in a record but what every reader of JSON understands."""
    found = json.loads(record_of(run).encode())
    assert found["kind"] == "audit"
    assert found["before"] == [1, 8]


@pytest.mark.parametrize("kind", ["huge", "folder", "of a newer format"])
def test_hostile_things_in_its_place(kind: str, run: Path) -> None:
    path = keep(run, record_of(run))
    data = path.read_bytes()
    path.unlink()
    if kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(data.replace(b'"format": 1', b'"format": 2'))  # without a digest of it
    inventory = scan_run(PosixFileSystem(), PurePath(run))
    assert inventory.bases[-1].status == "committed"
    assert inventory.bases[-1].audit is None
    recovery = resumed(run)
    assert (recovery.step, recovery.exact) == (10, True)
    assert "audit" not in recovery.evidence
