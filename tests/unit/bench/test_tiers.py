"""``everstep bench tiers``: what is seen from outside, what is held against it, and a real run."""

from __future__ import annotations

import json
import mmap
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from everstep.arena import CONTROL_BYTES, PAGE_BYTES, Arena
from everstep.errors import OptionError
from everstep_bench.cli import bench
from everstep_bench.options import TiersOptions
from everstep_bench.tiers import run
from everstep_bench.tiers.child import RankOrder
from everstep_bench.tiers.run import (
    COPIES,
    DISK,
    MEMORY,
    PEER,
    LogCopies,
    Occupied,
    Sampler,
    TiersReport,
    Trained,
    above,
    copies_in,
    files_bytes,
    memory_bytes,
)
from tests.support.displays import Silent
from tests.support.stalls import facts_of, shown_by

STEPS = 16
OPTIONS = TiersOptions(steps=STEPS, every=2, keep=2, params=100_000)


def report_of(tmp_path: Path, *, peak: int = 90, added_s: float = 0.0) -> TiersReport:
    """Four tiers whose bound is 100 bytes; the durable place has ``peak`` in step 7."""
    most = dict.fromkeys(range(1, STEPS + 1), 50)
    arms = [Trained(t, saved_s=[0.001] * STEPS, trained_s=[0.1] * STEPS) for t in (False, True)]
    for arm in arms:
        arm.wall_s = [0.2] * STEPS
    arms[1].saved_s = [0.001 + added_s] * STEPS
    arms[1].occupied = [Occupied(tier, 100, most) for tier in (MEMORY, PEER, DISK)]
    arms[1].occupied.append(Occupied(COPIES, 100, most | {7: peak}))
    return TiersReport(OPTIONS, facts_of(1000, folder=str(tmp_path)), arms[0], arms[1])


def test_all_within_bounds(tmp_path: Path) -> None:
    assert report_of(tmp_path, peak=100).all_met()


def test_one_byte_above_in_one_step_is_a_miss(tmp_path: Path) -> None:
    report = report_of(tmp_path, peak=101)
    (missed,) = [verdict for verdict in report.verdicts() if not verdict.met]
    assert missed.target.startswith(COPIES)
    assert "above in 1 steps, first in step 7" in missed.figure
    assert above({3: 5, 1: 9, 2: 4}, 4) == [1, 3]


def test_a_step_that_nobody_looked_at_is_a_miss(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    report.with_tiers.occupied[1] = Occupied(PEER, 100, dict.fromkeys(range(1, STEPS), 1))
    (missed,) = [verdict for verdict in report.verdicts() if not verdict.met]
    assert missed.figure == f"{STEPS - 1} of {STEPS} steps"


@pytest.mark.parametrize(("added_s", "met"), [(0.0009, True), (0.0011, False), (-0.001, True)])
def test_a_hundredth_of_a_step_may_be_added(tmp_path: Path, added_s: float, met: bool) -> None:
    assert report_of(tmp_path, added_s=added_s).all_met() is met


def test_files_of_all_kinds_count(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.tmp").write_bytes(b"12345")
    (tmp_path / "y").write_bytes(b"123")
    assert files_bytes(tmp_path) == 8
    assert files_bytes(tmp_path / "nothing") == 0


def test_segments_of_the_log_count_apart_from_bases(tmp_path: Path) -> None:
    lossy = tmp_path / "t-0000" / "lossy"
    for name, size in (("000000000010-000000000015", 30), ("000000000015-000000000020", 20)):
        (lossy / name).mkdir(parents=True)
        (lossy / name / "rank-00000.log").write_bytes(b"x" * size)
    (tmp_path / "base").write_bytes(b"x" * 7)
    assert copies_in(str(tmp_path)) == (7, LogCopies(50, 10))
    assert copies_in(str(tmp_path))[1].step_bytes == 5


def test_the_size_of_a_logged_step_is_shown_beside_its_gradients(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    assert "Copies of the log" not in shown_by(report)
    report.options = replace(OPTIONS, log="adaptive")
    report.facts = replace(report.facts, size_bytes=30_000_000)
    report.with_tiers.log = LogCopies(4_000_000, 20)
    assert "adaptive  4.00 MB     20  0.20 MB       10.00 MB  2.0 %" in shown_by(report)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_memory_is_what_the_kernel_has_given() -> None:
    """Pages that were touched, by the arena's size: own ones, and those for other ranks."""
    before = memory_bytes(os.getpid(), 64 * PAGE_BYTES)
    own, other = Arena.create(64 * PAGE_BYTES), Arena.create(32 * PAGE_BYTES)
    own.view[: 8 * PAGE_BYTES] = b"x" * (8 * PAGE_BYTES)
    other.view[: 4 * PAGE_BYTES] = b"x" * (4 * PAGE_BYTES)
    found = memory_bytes(os.getpid(), 64 * PAGE_BYTES + mmap.PAGESIZE // 2)
    assert 8 * PAGE_BYTES <= found[0] - before[0] <= 8 * PAGE_BYTES + CONTROL_BYTES
    assert 4 * PAGE_BYTES <= found[1] - before[1] <= 4 * PAGE_BYTES + CONTROL_BYTES
    own.close()
    other.close()
    assert memory_bytes(2**22 + 1, PAGE_BYTES) == (0, 0)  # no process has this number


def test_the_most_in_a_step_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "x"
    sampler = Sampler([tmp_path], [os.getpid()], [PAGE_BYTES], str(tmp_path))
    for step, size in ((1, 10), (1, 30), (1, 20), (2, 5)):
        file.write_bytes(b"x" * size)
        sampler.look(step)
    assert sampler.most[DISK] == sampler.most[COPIES] == {1: 30, 2: 5}
    assert PEER not in sampler.most  # one rank has none
    assert sampler.looked == 4


def test_what_makes_no_measurement_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nothing is deleted before base 3"):
        TiersOptions(steps=7, every=2, keep=2)
    with pytest.raises(OptionError, match="--ranks 0: at least 1"):
        TiersOptions(ranks=0)
    with pytest.raises(OptionError, match="no place"):
        TiersOptions(place="there")
    (tmp_path / "x").write_bytes(b"x")
    with pytest.raises(OptionError, match="not empty"):
        run.run_tiers(TiersOptions(place=str(tmp_path), folder=tmp_path), Silent())


def test_an_order_is_what_the_child_reads() -> None:
    order = RankOrder(os.getppid(), OPTIONS, 1, "/run", "/meet", "/place")
    assert RankOrder.decode(order.encode()) == order
    assert not order.is_orphaned


def test_a_document_a_table_and_a_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def measured(options: TiersOptions, display: object) -> TiersReport:
        found.append(options)
        return report_of(tmp_path, peak=90 if options.seed else 101)

    monkeypatch.setattr(run, "run_tiers", measured)
    runner = CliRunner()
    words = ["tiers", "--steps", "40", "--ranks", "3", "--tier", str(tmp_path), "--check"]
    told = runner.invoke(bench.app, [*words, "--json"])
    assert told.exit_code == 0, told.output
    document = json.loads(told.stdout)
    assert [one["tier"] for one in document["arms"][1]["occupied"]] == [MEMORY, PEER, DISK, COPIES]
    assert len(document["arms"][1]["occupied"][3]["bytes_by_step"]) == STEPS
    assert (found[0].steps, found[0].ranks, found[0].place) == (40, 3, str(tmp_path))
    assert runner.invoke(bench.app, [*words, "--seed", "0"]).exit_code == 3
    assert runner.invoke(bench.app, [*words[:-1], "--seed", "0"]).exit_code == 0


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = report_of(tmp_path)
    report.options = replace(OPTIONS, picture=tmp_path / "tiers.png")
    report.write()
    assert (tmp_path / "tiers.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("log", ["none", "adaptive"])
def test_ranks_with_disks_peers_and_copies(tmp_path: Path, log: str) -> None:
    """Real keepers: every tier is filled, nothing is above what was announced, nothing stays."""
    display = Silent()
    options = TiersOptions(
        steps=STEPS, every=2, keep=2, params=100_000, batch=1, folder=tmp_path, log=log
    )
    report = run.run_tiers(options, display)
    assert display.done == 2 * STEPS
    assert not list(tmp_path.iterdir())
    assert [one.tier for one in report.with_tiers.occupied] == [MEMORY, PEER, DISK, COPIES]
    assert [one.tier for one in report.without.occupied] == [MEMORY, DISK]
    for one in report.with_tiers.occupied:
        assert 0 < one.peak_bytes <= one.bound_bytes, one.tier
        assert one.most.keys() == set(range(1, STEPS + 1))
    for done in report.with_tiers.done:
        if log == "none":
            assert done["committed"] == STEPS // 2
        else:  # where bases are late the log comes to half of its memory, and another one is due
            assert done["committed"] >= STEPS // 2
        assert done["copies"] or done["peered"]
    assert report.with_tiers.keeper_cpu_s > 0
    text = shown_by(report)
    assert text.count("\nmet ") + text.count("\nnot met ") == 6
