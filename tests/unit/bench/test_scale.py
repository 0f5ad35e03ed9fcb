"""``everstep bench scale``: what ranks say, what is made of it, and a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.errors import OptionError
from everstep_bench.harness.figures import Row
from everstep_bench.options import ScaleOptions
from everstep_bench.scale.run import Block, Job, ScaleReport, run_scale
from tests.support.displays import Silent
from tests.support.stalls import facts_of, shown_by


def said(wall_s: float, call_s: float = 0.0, durable_s: float | None = None) -> dict[str, Any]:
    return {"wall_s": wall_s, "call_s": call_s, "durable_s": durable_s}


def job_of(*, lost_s: float = 0.5) -> Job:
    job = Job(1_000_000, 2, every=4, size_bytes=10_000_000)
    ideal = Row[Block]("ideal", "ideal")
    lazy = Row[Block]("lazy")
    for number in (1, 2, 3):
        ideal.blocks[number] = Block(4.0, 0.0, None)
        lazy.blocks[number] = Block(4.0 + number * lost_s, 0.25, 2.0)
    job.rows = [ideal, lazy, Row("torchsnapshot", error="not installed")]
    return job


def test_the_slowest_rank_counts() -> None:
    found = Block.of([said(4.0, 0.5, 2.0), said(5.0, 0.25, 3.0)])
    assert found == Block(5.0, 0.5, 3.0)
    # Of torch.save only rank 0 has anything that becomes durable.
    assert Block.of([said(4.0, 0.5, 2.0), said(5.0)]).durable_s == 2.0


def test_a_save_costs_what_its_round_lost() -> None:
    job = job_of()
    lost = job.lost_s(job.rows[1])
    assert lost is not None
    assert (lost.low, lost.median, lost.high) == (0.5, 1.0, 1.5)
    assert job.seen_bytes_per_s(job.rows[1]) == 10_000_000
    assert job.step_s(job.rows[1]) == 1.25
    # Noise: a save that has cost nothing has no bandwidth.
    assert job_of(lost_s=-0.1).seen_bytes_per_s(job_of(lost_s=-0.1).rows[1]) is None


def test_the_report_has_each_size_number_and_arm(tmp_path: Path) -> None:
    report = ScaleReport(ScaleOptions(), facts_of(1000, folder=str(tmp_path)), [job_of()])
    text = shown_by(report)
    assert "torchsnapshot, 1,000,000 parameters, 2 ranks: not installed" in text
    found = report.as_json()
    (one,) = found["jobs"]
    assert (one["params"], one["ranks"]) == (1_000_000, 2)
    assert [arm["name"] for arm in one["arms"]] == ["ideal", "lazy", "torchsnapshot"]
    assert one["arms"][0]["lost_s"] is None
    assert one["arms"][1]["lost_s"]["median"] == 1.0


def test_arms_that_save_nothing_are_refused() -> None:
    with pytest.raises(OptionError, match="no arm that saves"):
        ScaleOptions(arms=("ideal",)).check()


@pytest.mark.slow
def test_one_rank_and_two(tmp_path: Path) -> None:
    """Peers save in threads of their own while ranks exchange gradients; nothing stays."""
    options = ScaleOptions(
        params=(100_000,),
        ranks=(1, 2),
        every=2,
        repeats=1,
        arms=("torch.save", "dcp-warm", "lazy"),
        folder=tmp_path,
    )
    report = run_scale(options, Silent())
    assert not list(tmp_path.iterdir())
    assert [(job.params, job.ranks) for job in report.jobs] == [(100_000, 1), (100_000, 2)]
    for job in report.jobs:
        assert [row.name for row in job.rows] == ["ideal", "torch.save", "dcp-warm", "lazy"]
        for row in job.rows:
            assert row.error is None
            assert row.blocks.keys() == {1}
            assert (row.blocks[1].durable_s is None) is (row.name == "ideal")
