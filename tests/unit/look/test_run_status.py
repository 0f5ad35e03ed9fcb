"""The status of a run, from its events: pace, stalls, what each failure would cost."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.events import Event
from everstep.look.run_status import FAILURES, Loss, RunStatus, Survival, survival

STORE = "s3://bucket/run"
LOCAL = "/disk2/copies"


def on(disk: str) -> Survival:
    """Survival of places: the store outlives a rack, all others what their disk outlives."""
    return survival(lambda where: "rack" if where == STORE else disk, "/run")


LOSES = on("machine")


def progress(
    step: int, unix_s: float, *, rank: int = 0, timeline: int = 1, **figures: Any
) -> Event:
    found = {"recoverable_step": step, "durable_step": step // 10 * 10, **figures}
    return Event("progress", unix_s, rank, timeline, step, found)


def told(kind: str, unix_s: float, *, rank: int = 0, timeline: int = 1, **details: Any) -> Event:
    return Event(kind, unix_s, rank, timeline, 0, details)


def test_pace_and_stalls_are_those_of_the_last_minute() -> None:
    stall = [{"gate": 0.0}, {"gate": 30.0, "capture": 0.5}, {"gate": 31.0, "capture": 3.5}]
    events = [
        progress(0, 0.0, stall_s=stall[0], written_bytes=0),
        progress(10, 100.0, stall_s=stall[1], written_bytes=1000),
        progress(130, 160.0, stall_s=stall[2], written_bytes=7000),
    ]
    status = RunStatus(events)
    assert status.step == 130
    assert status.step_s == pytest.approx(0.5)
    assert status.stalled == {"gate": pytest.approx(1 / 60), "capture": pytest.approx(3 / 60)}
    assert status.rate_of("written_bytes") == pytest.approx(100.0)
    assert status.rate_of("copied_bytes") is None


def test_what_each_failure_would_cost() -> None:
    places = {"peer": 57, STORE: 40, LOCAL: 58}
    status = RunStatus(
        [progress(49, 0.0), progress(59, 20.0, recoverable_step=58, recoverable_from=places)]
    )
    assert status.losses(LOSES) == [
        Loss("process", "memory", 58, 1, 2.0),
        Loss("machine", LOCAL, 58, 1, 2.0),
        Loss("node", "peer", 57, 2, 4.0),
        Loss("rack", STORE, 40, 19, 38.0),
    ]


def test_a_run_on_one_disk_loses_everything_with_it() -> None:
    losses = {loss.failure: loss for loss in RunStatus([progress(59, 1.0)]).losses(LOSES)}
    assert losses["machine"] == Loss("machine", "disk", 50, 9, None)
    for failure in ("node", "rack"):
        assert losses[failure] == Loss(failure, None, 0, 59, None)
    status = RunStatus([progress(59, 1.0)])
    assert [loss.step for loss in status.losses(on("rack"))] == [59, 50, 50, 50]
    # A folder in memory goes with its machine.
    assert [loss.step for loss in status.losses(on("process"))] == [59, 0, 0, 0]


def test_a_step_counts_if_every_rank_can_restore_it() -> None:
    ranks = [
        progress(20, 1.0, rank=0, durable_step=20, recoverable_from={"peer": 20, STORE: 10}),
        progress(19, 1.0, rank=1, durable_step=10, recoverable_from={"peer": 15}),
    ]
    status = RunStatus([*map(begun, (0, 1), (2, 2)), *ranks])
    losses = {loss.failure: loss for loss in status.losses(LOSES)}
    # Rank 0 is a step further: that one is lost.
    assert (losses["process"].step, losses["process"].lost_steps) == (19, 1)
    assert losses["machine"].step == 15
    assert losses["rack"].place is None


def begun(rank: int, world: int) -> Event:
    return Event("started", 0.5, rank, 0, 0, {"world": world})


@pytest.mark.parametrize("second", [None, told("recovery", 1.0, rank=1)])
def test_nothing_is_claimed_while_a_rank_is_silent(second: Event | None) -> None:
    """Its log is on a disk that is not seen here, it has died, or it has not begun."""
    events = [begun(0, 2), begun(1, 2), progress(20, 1.0)]
    status = RunStatus([*events, *([] if second is None else [second])])
    assert (status.losses(LOSES), status.silent_ranks, status.as_of_unix_s) == ([], 1, None)
    status.add(progress(10, 2.0, rank=1))
    assert (status.silent_ranks, status.as_of_unix_s) == (0, 1.0)
    assert [loss.lost_steps for loss in status.losses(LOSES)] == [10, 10, 20, 20]


def test_the_memory_of_a_keeper_is_given_up_in_time() -> None:
    status = RunStatus([progress(59, 1.0)])
    assert status.losses(LOSES, 100.0)[0].place == "memory"
    assert status.losses(LOSES, 1000.0)[0] == Loss("process", "disk", 50, 9, None)


def test_without_a_keeper_process_there_is_only_the_disk() -> None:
    status = RunStatus([progress(59, 1.0, recoverable_step=50)])
    assert status.losses(LOSES)[0] == Loss("process", "disk", 50, 9, None)


def test_events_of_a_timeline_that_was_left_do_not_count() -> None:
    """An older process goes on, or a clock went back: the newest timeline is the run."""
    status = RunStatus(
        [
            progress(100, 50.0, durable_step=100),
            told("recovery", 20.0, timeline=2),
            progress(60, 30.0, timeline=2, durable_step=50),
            progress(200, 90.0, durable_step=200),
        ]
    )
    assert (status.timeline, status.step) == (2, 60)
    assert status.losses(LOSES)[1] == Loss("machine", "disk", 50, 10, None)


def test_only_progress_says_which_step_it_is() -> None:
    status = RunStatus([progress(1000, 1.0)])
    for late in (Event("base_durable", 2.0, 0, 1, 950), Event("notice", 3.0, 0, 1, 0)):
        status.add(late)
        assert status.step == 1000


def test_a_job_that_goes_on_with_fewer_ranks() -> None:
    events = [begun(rank, 2) for rank in (0, 1)]
    events += [progress(20, 1.0, rank=rank) for rank in (0, 1)]
    events += [begun(0, 1), told("recovery", 2.0, timeline=2), progress(30, 3.0, timeline=2)]
    status = RunStatus(events)
    assert (status.timeline, len(status.active), status.step) == (2, 1, 30)


def test_before_the_first_progress_nothing_is_claimed() -> None:
    status = RunStatus([told("started", 1.0, timeline=0, method="lazy")])
    assert (status.losses(LOSES), status.step_s, status.stalled) == ([], None, {})
    assert RunStatus().losses(LOSES) == []


def test_failures_and_recoveries_are_listed_by_time() -> None:
    events = [
        told("failure", 3.0, rank=1, message="disk"),
        told("recovery", 1.0, source="disk"),
        told("keeper", 2.0, lost="killed"),
        told("keeper", 0.5, lost=None),
    ]
    status = RunStatus(sorted(events, key=lambda event: event.unix_s))
    assert [event.kind for event in status.messages] == ["recovery", "keeper", "failure"]
    assert sum(one.keepers_lost for one in status.ranks.values()) == 1


def test_the_end_and_silence() -> None:
    status = RunStatus([progress(20, 5.0, rank=rank) for rank in (0, 1)])
    status.add(told("closed", 6.0, rank=0))
    assert (status.is_closed, status.last_unix_s) == (False, 5.0)
    status.add(told("closed", 7.0, rank=1))
    assert (status.is_closed, status.last_unix_s) == (True, 6.0)


def test_each_place_survives_some_failure() -> None:
    for place in ("memory", "disk", "peer", STORE, LOCAL):
        assert LOSES(place) in FAILURES
