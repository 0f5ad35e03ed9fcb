"""A report shows what happened, as one page that needs nothing else."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from xml.etree import ElementTree

import pytest

from everstep.report import RunReport, page_of
from everstep.run.scan import Inventory
from tests.support.log.eventful import BEGIN_S, events_of_two_lives


@pytest.fixture
def report() -> RunReport:
    return RunReport.of(events_of_two_lives(), Inventory(PurePath("/runs/<job>"), run="abc"))


def test_lives_and_recoveries(report: RunReport) -> None:
    assert [(one.life.recovery.step, one.lost_steps) for one in report.recoveries] == [
        (0, None),
        (55, 2),
    ]
    assert (report.failures, report.lost_steps, report.step) == (1, 2, 100)
    assert report.recoveries[1].down_s == pytest.approx(41.0 - 28.5)
    assert report.trained_s == pytest.approx(28.5 + 23.0)
    assert report.stall_s == {"gate": pytest.approx(0.57 + 0.45), "capture": 0.0}


def test_bases_with_the_tiers_that_they_reached(report: RunReport) -> None:
    assert [(base.timeline, base.step) for base in report.bases][:2] == [(1, 10), (1, 20)]
    first = report.bases[0]
    assert (first.captured_s, first.durable_s, first.size_bytes) == (0.1, 0.3, 4096)
    assert (first.tiers, first.status) == (["disk"], "")


def test_predictions_next_to_measurements(report: RunReport) -> None:
    found = {one.name: one for one in report.comparisons}
    assert found.keys() == {
        "written to disk in a day",
        "time wasted",
        "interval between bases, best by Young",
        "interval between bases, best by Daly",
    }
    # 100 bytes a step of half a second.
    assert found["written to disk in a day"].predicted == 17_280_000
    assert found["written to disk in a day"].measured == pytest.approx(4500 / 23.0 * 86_400)
    # C = 1.02 s / 9 bases, M = 51.5 s, N t = 5 s, L = 0.5 s: C / N t + N t / 2 M + L / M.
    wasted = found["time wasted"]
    assert wasted.predicted == pytest.approx(1.02 / 9 / 5 + 5 / 103 + 0.5 / 51.5)
    assert wasted.measured == pytest.approx((1.02 + 1.0 + 0.5) / (51.5 - 2.52))
    young = found["interval between bases, best by Young"]
    assert young.predicted == pytest.approx((2 * 1.02 / 9 * 51.5) ** 0.5 / 0.5)
    assert young.measured == 10


def test_a_rewind_does_not_count_stalls_twice() -> None:
    events = events_of_two_lives()
    # Without the second start the same process went back, and its counters went on.
    events = [one for one in events if not (one.kind == "started" and one.unix_s > BEGIN_S)]
    report = RunReport.of(events, Inventory(PurePath("/runs/job")))
    assert report.stall_s["gate"] == pytest.approx(0.57 + 0.45 - 0.01)


def test_the_page_is_complete_and_needs_nothing_else(report: RunReport) -> None:
    page = page_of(report, BEGIN_S)
    assert "/runs/&lt;job&gt;" in page
    assert "&lt;b&gt;disk&lt;/b&gt;" in page  # of a message
    assert "<job>" not in page
    for word in ("http:", "https:", "<script", "<link", "<img", "@import", "url("):
        assert word not in page
    charts = [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(charts) == 3
    lines = charts[0].findall("polyline")
    assert [line.findtext("title") for line in lines[:2]] == ["training", "training"]
    numbers = re.findall(r"[\d.]+", " ".join(line.attrib["points"] for line in lines))
    assert all(0 <= float(number) <= 960 for number in numbers)
    assert len(charts[0].findall("line[@class='resume']")) == 2


def test_a_run_without_progress_has_a_page(tmp_path: Path) -> None:
    page = page_of(RunReport.of([], Inventory(PurePath("/runs/job"))), BEGIN_S)
    assert "there is nothing to draw" in page
    assert "Nothing to compare" in page


def test_verdicts_are_shown(report: RunReport) -> None:
    assert "Not read back for this page" in page_of(report, BEGIN_S)
    inventory = Inventory(PurePath("/runs/job"))
    verified = RunReport.of(events_of_two_lives(), inventory, {(1, 10): "damaged"})
    assert "Every byte of the bases" in page_of(verified, BEGIN_S)
