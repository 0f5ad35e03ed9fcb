"""Training ends on several ranks: who waits for whom, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.commit.job.member import Member
from everstep.commit.job.messages import WatermarkNotice
from everstep.keeper.persist.job_committer import JobCommitter
from everstep.keeper.persist.job_link import JobLink
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from tests.support.ranks.together import RankTraining, on_all, trainings

LAST = 4


class SlowToTell:
    """Rank 0 tells the watermark of the last base only when rank 1 is about to leave, or never.

    Attributes:
        settled: what rank 0 has found, each time that it asked whether there is nothing left to do.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ever: bool = True) -> None:
        self.settled: list[bool] = []
        self._leaves = False
        self._held: list[tuple[JobLink, int, Any]] = []
        send, leaves, settled = (
            JobLink.send,
            JobCommitter.is_dispensable,
            JobCommitter.is_settled,
        )

        def sent(of: JobLink, rank: int, message: Any) -> None:
            late = isinstance(message, WatermarkNotice) and message.base.step == LAST
            if late and not self._leaves:
                self._held.append((of, rank, message))
            else:
                send(of, rank, message)

        def left(of: JobCommitter) -> bool:
            answer = leaves(of)
            if of.link.session.rank == 1 and ever:
                self._leaves = True
                while self._held:
                    send(*self._held.pop())
            return answer

        def asked(of: JobCommitter) -> bool:
            self.settled.append(settled(of))
            return self.settled[-1]

        monkeypatch.setattr(JobLink, "send", sent)
        monkeypatch.setattr(JobCommitter, "is_dispensable", left)
        monkeypatch.setattr(JobCommitter, "is_settled", asked)


def end(ranks: list[RankTraining]) -> None:
    on_all(*(one.ckpt.resume for one in ranks))
    on_all(*(lambda one=one: one.train(5) for one in ranks))  # type: ignore[misc]
    on_all(*(one.ckpt.close for one in ranks))


def test_no_rank_leaves_before_the_base_before_its_last_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is its second one: until it hears of the last, there is nothing that it could delete."""
    SlowToTell(monkeypatch)
    paths = tmp_path / "a", tmp_path / "b"
    with trainings(*paths, method="lazy", every=2, keep=1) as ranks:
        end(ranks)
    for path in paths:
        assert [base.id.step for base in scan_run(PosixFileSystem(), path).bases] == [LAST]


def test_nobody_waits_for_a_rank_that_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowToTell(monkeypatch, ever=False)
    monkeypatch.setattr(
        Member, "watermark_pending", property(lambda self: False)
    )  # rank 1 leaves at once
    with trainings(tmp_path / "a", tmp_path / "b", method="lazy", every=2, keep=2) as ranks:
        end(ranks)
    assert slow.settled[-1], "not waited for until it was too late"
