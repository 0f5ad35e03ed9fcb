"""``everstep bench persist``: the arms do what they say, the figures mean what they say."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import stat
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from everstep.cli.common.errors import EverstepGroup
from everstep.errors import (
    EverstepError,
    OptionError,
    OutOfSpaceError,
    PermissionDeniedError,
    RecoveryError,
    StorageError,
)
from everstep.workloads.gpt import GPT, GPTConfig
from everstep_bench.cli.bench import app
from everstep_bench.harness import display, machine
from everstep_bench.harness.loop import flatten
from everstep_bench.harness.machine import (
    Instant,
    Sample,
    direct_takes,
    drop_cache,
    look_at,
    workspace,
)
from everstep_bench.harness.session import Turns
from everstep_bench.options import PersistOptions
from everstep_bench.persist import arms, raw, run
from everstep_bench.persist.arms import (
    PEERS,
    SIZE_BYTES_MIN,
    Arm,
    BenchState,
    Column,
    OursRead,
    OursWrite,
    Peer,
    PeerRead,
    PeerWrite,
    installed,
    shape_of,
)
from everstep_bench.persist.raw import RawArm, Setting, make_ring
from everstep_bench.persist.run import PersistReport, Row, run_persist
from tests.support.displays import Silent
from tests.support.stalls import facts_of, session_of, shown_by

MIB = 1 << 20
SIZE_BYTES = SIZE_BYTES_MIN


@pytest.fixture
def state() -> BenchState:
    return BenchState(SIZE_BYTES, seed=1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two settings of the limit, a small ring, no wait for what others write or leave behind."""
    monkeypatch.setattr(raw, "THREADS", (1, 2))
    monkeypatch.setattr(raw, "BLOCKS_BYTES", (MIB,))
    monkeypatch.setattr(raw, "RING_BYTES", 2 * MIB)
    monkeypatch.setattr(os, "sync", lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: 0)


# --- The state --------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [4 * MIB, 64 * MIB, 512 * MIB, 1 << 30, 12 << 30])
def test_shape_has_about_the_size(size_bytes: int) -> None:
    config = shape_of(size_bytes)
    assert config.params * 12 == pytest.approx(size_bytes, rel=0.12)
    assert config.width % 64 == 0


def test_a_gibibyte_is_shaped_like_a_language_model() -> None:
    config = shape_of(1 << 30)
    assert config.vocab == 50_304
    assert 6 <= config.layers <= 24


def test_too_small_a_state_is_refused() -> None:
    with pytest.raises(OptionError, match="too small"):
        shape_of(SIZE_BYTES_MIN - 1)


def test_moments_are_laid_out_as_adamw_does(state: BenchState) -> None:
    model = GPT(GPTConfig(1, 64, 1, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    optimizer.step()
    theirs = optimizer.state[model.norm.weight]
    norm = state.model.get_parameter("norm.weight")
    mine = state.optimizer.state[norm]
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype
        assert mine[name].dim() == tensor.dim()
        assert mine[name].device == tensor.device
    assert bool((mine["exp_avg_sq"] >= 0).all())


def test_state_counts_the_tied_head_once(state: BenchState) -> None:
    assert state.model.head.weight is state.model.tokens.weight
    flat = state.flat()
    pointers = [tensor.data_ptr() for tensor in flat.values()]
    assert len(set(pointers)) == len(pointers) == state.tensors
    assert state.size_bytes == sum(t.numel() * t.element_size() for t in flat.values())
    assert state.size_bytes == pytest.approx(SIZE_BYTES, rel=0.12)


def test_state_is_a_function_of_its_seed() -> None:
    one, same, other = (BenchState(SIZE_BYTES, seed) for seed in (1, 1, 2))
    same.check(one.flat(), "the same seed")
    with pytest.raises(EverstepError, match="differs"):
        other.check(one.flat(), "another seed")


def test_check_finds_one_changed_number_and_a_missing_tensor(state: BenchState) -> None:
    found = {name: tensor.clone() for name, tensor in state.flat().items()}
    state.check(found, "a copy")
    name, tensor = next(iter(found.items()))
    tensor.view(-1)[-1] += 1
    with pytest.raises(EverstepError, match=f"'{name}' differs"):
        state.check(found, "a changed copy")
    del found[name]
    with pytest.raises(EverstepError, match=f"'{name}' is missing"):
        state.check(found, "half a copy")


def test_blank_leaves_nothing(state: BenchState) -> None:
    state.blank()
    assert not any(bool(tensor.any()) for tensor in state.flat().values())


# --- The limit --------------------------------------------------------------------------


@pytest.mark.thinned(8)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("column", run.COLUMNS)
@pytest.mark.parametrize(
    "setting", [Setting(1, MIB), Setting(2, MIB), Setting(4, 4 * MIB), Setting(2, MIB, True)]
)
def test_raw_transfers_every_byte_once(
    setting: Setting,
    column: Column,
    direct: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if direct and not direct_takes(tmp_path):
        pytest.skip("no O_DIRECT here")
    monkeypatch.setattr(raw, "RING_BYTES", 16 * MIB)
    moved: list[tuple[int, int]] = []
    write, read = os.pwrite, os.preadv

    def watched_write(descriptor: int, data: memoryview, offset: int) -> int:
        moved.append((offset, write(descriptor, data, offset)))
        return moved[-1][1]

    def watched_read(descriptor: int, data: list[memoryview], offset: int) -> int:
        moved.append((offset, read(descriptor, data, offset)))
        return moved[-1][1]

    monkeypatch.setattr(os, "pwrite", watched_write)
    monkeypatch.setattr(os, "preadv", watched_read)
    path = tmp_path / "file"
    padded = 5 * MIB + 8192
    arm = RawArm(column, setting, path, 5 * MIB + 5000, make_ring(), direct=direct)
    arm.open()
    if column == "recycled":  # this one is the second of the two
        arm.prepare()
        arm.run()
    arm.prepare()
    moved.clear()
    assert arm.run().seconds > 0
    assert path.stat().st_size == padded
    assert path.stat().st_blocks * 512 >= padded
    moved.sort()
    ends = [offset + size for offset, size in moved]
    assert [offset for offset, _ in moved] == [0, *ends[:-1]]
    assert ends[-1] == padded
    arm.clean()
    arm.close()
    assert path.exists() == (column != "fresh")


def test_raw_rewrites_two_files_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As everstep does, which keeps the last base until the new one is durable."""
    monkeypatch.setattr(raw, "RING_BYTES", 4 * MIB)
    arm = RawArm("recycled", Setting(1, MIB), tmp_path / "file", MIB, make_ring(), direct=False)
    arm.open()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["file", "file-other"]
    written = []
    for _ in range(4):
        for path in tmp_path.iterdir():
            path.write_bytes(bytes(MIB))
        arm.prepare()
        arm.run()
        written += [path.name for path in tmp_path.iterdir() if any(path.read_bytes())]
    arm.close()
    assert sorted(written[:2]) == files
    assert written[2:] == written[:2]


def test_raw_read_of_a_file_that_is_too_short_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "RING_BYTES", 4 * MIB)
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    arm = RawArm("read", Setting(2, MIB), path, 2 * MIB, make_ring(), direct=False)
    with pytest.raises(StorageError, match="of 1048576 bytes"):
        arm.run()
    arm.close()


def test_fresh_files_are_tried_with_and_without_fallocate() -> None:
    fresh, kept = raw.settings("fresh"), raw.settings("recycled")
    assert {s.threads for s in fresh} == {1, 2, 4, 8}
    assert {s.block_bytes for s in fresh} == {4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB}
    assert {s.allocate for s in fresh} == {True, False}
    assert not any(s.allocate for s in kept)
    assert len(fresh) == 2 * len(kept) == 32


def test_dropped_pages_are_not_in_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)

    def cached() -> bool:
        try:
            return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False

    try:
        try:
            if not cached():
                pytest.skip("this file system does not keep what was written")
        except OSError:
            pytest.skip("this file system does not tell what is cached")
        # The kernel keeps a page that something else holds at this moment, for example while
        # it moves memory together. Asked again, it lets go.
        for _ in range(50):
            drop_cache(tmp_path)
            if not cached():
                return
            threading.Event().wait(0.1)
        pytest.fail("the pages of the file are still in the cache")
    finally:
        os.close(descriptor)


def test_a_file_system_without_direct_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        assert not direct_takes(tmp_path)
    assert not list(tmp_path.iterdir())


# --- Ours -------------------------------------------------------------------------------


def test_fresh_files_are_fresh_and_recycled_ones_recycled(
    state: BenchState, run_folder: Path
) -> None:
    columns: tuple[Column, ...] = ("fresh", "recycled")
    for column in columns:
        folder = run_folder / column
        arm = OursWrite(column, state, folder)
        arm.open()
        for _ in range(2):
            arm.prepare()
            reused = arm.watch.reused
            sample = arm.run()
            assert (arm.watch.reused - reused) == (column == "recycled")
            assert sample.seconds > 0
            assert sample.after_s >= 0
            arm.clean()
        left = list(folder.glob("timeline-*/base/*"))
        assert len(left) == (column == "recycled")
        arm.close()


def test_a_save_into_the_wrong_kind_of_file_is_an_error(
    state: BenchState, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "_UNTIL_RECYCLED", 0)
    arm = OursWrite("recycled", state, run_folder)
    arm.open()
    with pytest.raises(EverstepError, match="not recycled"):
        arm.run()
    arm.close()


def test_the_clock_stops_when_the_commit_is_durable(
    state: BenchState, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter(range(1, 100))
    taken: list[int] = []

    def now() -> Instant:
        taken.append(next(moments))
        return Instant(float(taken[-1]), 0.0, 0.0)

    monkeypatch.setattr(arms, "now", now)
    arm = OursWrite("fresh", state, run_folder)
    arm.open()
    sample = arm.run()
    # begin, commit, return: one moment each, in this order
    assert taken == [1, 2, 3]
    assert (sample.seconds, sample.after_s) == (1.0, 1.0)
    assert len(list(run_folder.glob("timeline-*/base/*/manifest.json"))) == 1
    arm.close()


def test_resume_fills_tensors_that_were_blank(state: BenchState, run_folder: Path) -> None:
    _saved_run(state, run_folder)
    arm = OursRead(state, run_folder)
    for _ in range(2):
        arm.prepare()
        assert not any(bool(tensor.any()) for tensor in state.flat().values())
        assert arm.run().seconds > 0  # run() itself compares every tensor
        arm.clean()


def test_resume_of_damaged_bytes_is_no_result(state: BenchState, run_folder: Path) -> None:
    _saved_run(state, run_folder)
    (file,) = run_folder.glob("timeline-*/base/*/rank-*.safetensors")
    with open(file, "r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 1]))
    arm = OursRead(state, run_folder)
    arm.prepare()
    with pytest.raises(RecoveryError):
        arm.run()
    arm.clean()


def _saved_run(state: BenchState, folder: Path) -> None:
    arm = OursWrite("recycled", state, folder)
    arm.open()
    arm.close()


# --- Peers ------------------------------------------------------------------------------

INSTALLED = [peer for peer in PEERS if installed(peer)]


@pytest.mark.parametrize("peer", INSTALLED, ids=lambda peer: peer.name)
def test_peer_brings_back_what_it_saved(peer: Peer, state: BenchState, tmp_path: Path) -> None:
    arm = PeerRead(peer, state, tmp_path / "saved")
    arm.open()
    arm.prepare()
    assert arm.run().seconds > 0  # run() itself compares every tensor
    arm.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("peer", INSTALLED, ids=lambda peer: peer.name)
def test_peer_is_durable_when_its_clock_stops(
    peer: Peer, state: BenchState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[tuple[int, int]] = set()
    fsync = os.fsync

    def watched(file: Any) -> None:
        info = os.fstat(file if isinstance(file, int) else file.fileno())
        synced.add((info.st_dev, info.st_ino))
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched)
    arm = PeerWrite(peer, state, tmp_path / "saved")
    arm.prepare()
    arm.run()
    for path in [tmp_path, *tmp_path.rglob("*")]:
        info = path.stat()
        assert (info.st_dev, info.st_ino) in synced, f"{path.name} was not synced"
    arm.clean()
    assert not list(tmp_path.iterdir())


def test_a_peer_that_brings_back_something_else_is_an_error(
    state: BenchState, tmp_path: Path
) -> None:
    def save(state: BenchState, path: Path) -> None:
        path.touch()

    def load(state: BenchState, path: Path) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(tensor) for name, tensor in state.flat().items()}

    arm = PeerRead(Peer("zeros", "torch", "", "", save, load), state, tmp_path / "saved")
    arm.open()
    arm.prepare()
    with pytest.raises(EverstepError, match="differs after loading"):
        arm.run()


def test_flatten_takes_the_tensors_only() -> None:
    one = torch.zeros(1)
    assert flatten({"a": {0: {"b": one}}, "c": 3, "d": [one]}) == {"a.0.b": one}


# --- The report -------------------------------------------------------------------------


def row(name: str, column: str, role: str, *seconds: float, cpu_s: float = 0.1) -> Row:
    samples = {n: Sample(s, cpu_s, 0.0) for n, s in enumerate(seconds, 1)}
    return Row(name, role, "", samples, column=column)  # type: ignore[arg-type]


def report_of(*rows: Row) -> PersistReport:
    empty: Any = {column: {} for column in run.COLUMNS}
    options = PersistOptions(10**9, 3, 1)
    return PersistReport(options, facts_of(free_core=None), list(rows), empty)


def test_ratios_are_taken_within_rounds() -> None:
    # A slow second round hits both alike: the ratio does not see it.
    limit = row("raw", "fresh", "limit", 1.0, 4.0, 1.0)
    mine = row("everstep", "fresh", "ours", 2.0, 8.0, 2.0)
    found = report_of(limit, mine)
    spread = found.figures_of(mine)["of_limit"]
    assert spread is not None
    assert (spread.low, spread.median, spread.high) == (0.5, 0.5, 0.5)
    speed = found.gb_per_s(mine)
    assert speed is not None
    assert (speed.low, speed.median, speed.high) == (0.125, 0.5, 0.5)


def test_limit_is_the_setting_with_the_best_median_not_the_luckiest() -> None:
    lucky = row("raw, lucky", "fresh", "limit", 0.1, 3.0, 3.0)
    steady = row("raw, steady", "fresh", "limit", 2.0, 2.0, 2.0)
    found = report_of(lucky, steady)
    assert found.limit("fresh") is steady
    assert [r.name for r in found.in_column("fresh")] == ["raw, steady", "raw, lucky"]


def test_rounds_that_only_one_has_do_not_count() -> None:
    mine, other = row("a", "fresh", "ours", 1.0, 1.0), row("b", "fresh", "peer", 2.0)
    spread = mine.faster_than(other)
    assert spread is not None
    assert spread.median == 2.0
    assert mine.faster_than(row("c", "fresh", "peer")) is None


def full_report(ours_s: float, recycled_s: float, read_s: float, cpu_s: float) -> PersistReport:
    return report_of(
        row("raw", "fresh", "limit", 0.9),
        row("everstep", "fresh", "ours", ours_s, cpu_s=0.1),
        row("torch.save", "fresh", "peer", 2.5),
        row("raw", "recycled", "limit", 0.9),
        row("everstep", "recycled", "ours", recycled_s, cpu_s=cpu_s),
        row("raw", "read", "limit", 0.8),
        row("everstep", "read", "ours", read_s),
        row("torch.save", "read", "peer", 1.0),
    )


def test_targets_are_met_at_their_bounds() -> None:
    assert [v.met for v in full_report(1.0, 1.0, 1.0, 0.2).verdicts()] == [True] * 5


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ((1.01, 1.0, 1.0, 0.2), [0, 2]),
        ((1.0, 1.01, 1.0, 0.2), [1]),
        ((1.0, 1.0, 1.0, 0.21), [3]),
        ((1.0, 1.0, 1.01, 0.2), [4]),
    ],
)
def test_targets_are_missed_beyond_their_bounds(
    figures: tuple[float, float, float, float], missed: list[int]
) -> None:
    met = [verdict.met for verdict in full_report(*figures).verdicts()]
    assert [number for number, one in enumerate(met) if one is False] == missed


def test_targets_without_a_figure_are_not_met() -> None:
    assert [v.met for v in report_of().verdicts()] == [None] * 5


def test_report_is_plain_data_and_has_every_sample() -> None:
    found = json.loads(json.dumps(full_report(1.0, 1.0, 1.0, 0.2).as_json()))
    arms = {(arm["column"], arm["name"]): arm for arm in found["arms"]}
    mine = arms["recycled", "everstep"]
    assert mine["of_limit"]["median"] == 0.9
    assert mine["times_torch.save"]["median"] == 2.5
    assert mine["cpu_s_per_gb"] == {"min": 0.2, "median": 0.2, "max": 0.2}
    assert [sample["round"] for sample in mine["samples"]] == [1]
    assert len(found["targets"]) == 5


def test_report_for_people_names_arms_targets_and_a_busy_machine() -> None:
    found = full_report(1.0, 1.0, 1.01, 0.2)
    found.rows.append(Row("torchsnapshot", "peer", error="not installed"))
    text = shown_by(found)
    assert "torchsnapshot, fresh: not installed" in text
    assert text.count("not met") == 1
    assert "not idle" not in text
    busy = full_report(1.0, 1.0, 1.0, 0.2)
    busy.rows[0].blocks[1] = Sample(0.9, 0.1, others_cores=20.0)
    assert "The machine was not idle" in shown_by(busy)


def test_sample_tells_own_time_from_that_of_others() -> None:
    sample = Sample.between(
        Instant(10.0, 1.0, 100.0), Instant(12.0, 1.5, 103.5), Instant(13.0, 1.6, 104.0)
    )
    assert (sample.seconds, sample.cpu_s, sample.after_s) == (2.0, 0.5, 1.0)
    assert sample.others_cores == 1.5  # 3.5 s of work in 2 s, half a second of it our own


# --- Whole runs -------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_whole_run_measures_all_and_leaves_nothing(tmp_path: Path) -> None:
    options = PersistOptions(SIZE_BYTES, repeats=2, seed=3, folder=tmp_path)
    found = run_persist(options, Silent())
    assert not list(tmp_path.iterdir())
    names = {(one.column, one.name) for one in found.rows if one.role != "limit"}
    expected = {("fresh", "everstep"), ("recycled", "everstep"), ("read", "everstep")}
    for peer in PEERS:
        expected.add(("fresh", peer.name))
        if installed(peer):
            expected.add(("read", peer.name))
    assert names == expected
    absent = {peer.name for peer in PEERS if not installed(peer)}
    for one in found.rows:
        if one.name in absent:
            assert one.error == "not installed"
        else:
            assert one.error is None
            assert sorted(one.blocks) == [1, 2]
    for column in run.COLUMNS:
        assert found.limit(column) is not None
    assert all(verdict.met is not None for verdict in found.verdicts())


@pytest.mark.usefixtures("small")
def test_a_peer_that_fails_is_reported_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(BaseException):  # as the one of torch.distributed.checkpoint
        pass

    def broken(state: BenchState, path: Path) -> None:
        path.write_bytes(b"half")
        raise Odd("no such kernel")

    def nothing(state: BenchState, path: Path) -> dict[str, torch.Tensor]:
        return {}

    torch_save = next(peer for peer in PEERS if peer.name == run.BASELINE)
    peer = Peer("broken", "torch", "", "", broken, nothing)
    monkeypatch.setattr(run, "PEERS", (torch_save, peer))
    found = run_persist(PersistOptions(SIZE_BYTES, 1, folder=tmp_path), Silent())
    rows = [one for one in found.rows if one.name == "broken"]
    assert [one.error for one in rows] == ["Odd: no such kernel"] * 2
    assert not any(one.blocks for one in rows)
    assert len([one for one in found.rows if one.name == "everstep" and one.blocks]) == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("the disk is gone")])
def test_whatever_ends_a_run_nothing_is_left(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arm: OursWrite) -> Sample:
        raise error

    monkeypatch.setattr(OursWrite, "run", fail)
    with pytest.raises(type(error)):
        run_persist(PersistOptions(SIZE_BYTES, 1, folder=tmp_path), Silent())
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
def test_a_signal_that_a_library_makes_an_error_of_its_own_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(state: BenchState, path: Path) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise RuntimeError("unexpected position") from None

    peer = Peer("swallows", "torch", "", "", interrupted, lambda state, path: {})
    monkeypatch.setattr(run, "PEERS", (peer,))
    earlier = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_persist(PersistOptions(SIZE_BYTES, 1, folder=tmp_path), Silent())
    assert signal.getsignal(signal.SIGTERM) is earlier
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("field", "what"), [("free_bytes", "GiB are free"), ("memory_available_bytes", "of memory")]
)
def test_too_little_room_is_said_before_anything_is_written(
    field: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = replace(look_at(tmp_path), **{field: SIZE_BYTES})
    monkeypatch.setattr(machine, "look_at", lambda folder: facts)
    monkeypatch.setattr(run, "BenchState", None)  # is not even made
    with pytest.raises(OutOfSpaceError, match=what):
        run_persist(PersistOptions(SIZE_BYTES, 1, folder=tmp_path), Silent())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine, "tempfile", SimpleNamespace(mkdtemp=refuse))
    with pytest.raises(PermissionDeniedError, match="cannot write into"):
        run_persist(PersistOptions(SIZE_BYTES, 1, folder=tmp_path), Silent())


@pytest.mark.usefixtures("small")
def test_order_is_drawn_from_the_seed(tmp_path: Path) -> None:
    class Noted(Arm):
        detail = ""

        def __init__(self, name: str, ran: list[str]) -> None:
            self.name = name
            self.ran = ran

        def run(self) -> Sample:
            self.ran.append(self.name)
            return Sample(1.0, 0.0)

    def order(seed: int) -> list[str]:
        ran: list[str] = []
        options = PersistOptions(SIZE_BYTES, repeats=3, seed=seed)
        bench = run.Bench(session_of(options, folder=tmp_path), None)  # type: ignore[arg-type]
        bench.rounds("saving", [Noted(name, ran) for name in "abcdef"])
        return ran

    first = order(1)
    assert order(1) == first
    assert order(2) != first
    rounds = [first[start : start + 6] for start in range(0, 24, 6)]
    assert all(sorted(one) == list("abcdef") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1


def test_a_row_that_fails_while_it_waits_for_its_turn_is_left_out() -> None:
    rows = [Row("a", "peer"), Row("b", "peer")]
    turns = Turns(Silent(), 1)
    came = []
    for number, turn in turns.rounds("", rows, 2, times=lambda row: 2):
        for row in turn:
            came.append((number, row.name))
            with turns.may_fail(row):
                raise OSError("no disk\n  at line 3\n  really none")
    assert sorted(came) == [(0, "a"), (0, "b")]
    assert rows[0].error == "OSError: no disk ... really none"
    with pytest.raises(OSError, match="no disk"), turns.may_fail(Row("c", "ours")):
        raise OSError("no disk")


# --- The command ------------------------------------------------------------------------


@pytest.fixture
def command() -> typer.Typer:
    root = typer.Typer(cls=EverstepGroup)
    root.callback()(lambda: None)
    root.add_typer(app, name="bench")
    return root


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[PersistOptions]:
    """A run that takes no time; the reading target is missed."""
    asked: list[PersistOptions] = []

    def instead(options: PersistOptions, display: Any) -> PersistReport:
        asked.append(options)
        return full_report(1.0, 1.0, 2.0, 0.2)

    monkeypatch.setattr(run, "run_persist", instead)
    return asked


@pytest.mark.parametrize(("size", "size_bytes"), [("64MiB", 64 * MIB), ("64MB", 64_000_000)])
def test_command_passes_its_options_on(
    command: typer.Typer,
    measured: list[PersistOptions],
    tmp_path: Path,
    size: str,
    size_bytes: int,
) -> None:
    words = f"bench persist --size {size} --repeats 7 --seed 9 --dir {tmp_path}".split()
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.output
    assert measured == [PersistOptions(size_bytes, 7, 9, tmp_path)]
    assert "not met" in result.stdout


@pytest.mark.usefixtures("measured")
def test_command_gives_json_and_with_check_the_verdict(command: typer.Typer) -> None:
    result = CliRunner().invoke(command, ["bench", "persist", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["size_bytes"] == 10**9
    assert CliRunner().invoke(command, ["bench", "persist", "--check"]).exit_code == 3


@pytest.mark.parametrize(
    ("words", "status", "what"),
    [
        (["--size", "much"], 2, "is not a size"),
        (["--size", "1KiB"], 2, "at least 4,194,304"),
        (["--repeats", "0"], 2, "--repeats 0: at least 1"),
        (["--dir", "/nowhere/at/all"], 2, "there is no folder"),
    ],
)
def test_command_refuses_what_cannot_work(
    command: typer.Typer, words: list[str], status: int, what: str
) -> None:
    result = CliRunner().invoke(command, ["bench", "persist", *words])
    assert result.exit_code == status
    assert what in result.stderr


def test_command_ends_with_4_when_there_is_no_room(
    command: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = replace(look_at(tmp_path), free_bytes=0)
    monkeypatch.setattr(machine, "look_at", lambda folder: facts)
    words = ["bench", "persist", "--json", "--dir", str(tmp_path)]
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 4
    assert json.loads(result.stdout)["error"] == "OutOfSpaceError"


def test_bar_is_drawn_between_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    threads = set(threading.enumerate())
    with display.progress_display() as shown:
        shown.begin("saving", 2)
        shown.advance("torch.save")
        drawn = terminal.getvalue()
        assert "saving" in drawn
        assert "torch.save" in drawn
        assert isinstance(shown, display.Bar)
        assert set(threading.enumerate()) <= threads  # or one would draw at any time


def test_plain_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with display.progress_display() as shown:
        shown.begin("saving, round 1 of 2", 3)
        shown.advance("torch.save")
    err = capsys.readouterr().err
    assert "saving, round 1 of 2: 3 runs" in err
    assert "\x1b" not in err


def test_folder_is_private(tmp_path: Path) -> None:
    with workspace(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()
