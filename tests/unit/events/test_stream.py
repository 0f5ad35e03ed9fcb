"""Events reach every listener, and no listener delays the program or another listener."""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any

import pytest

from everstep.errors import OptionError
from everstep.events import Event, EventStream, stream
from everstep.events.stream import parse_listeners
from everstep.seams import ManualClock

WAIT_S = 30.0


class Listener:
    """Keeps what it gets; may block or fail."""

    def __init__(self, *, blocked: bool = False, fails: bool = False) -> None:
        self.got: list[Event] = []
        self.free = threading.Event()
        self.called = threading.Event()
        self.closed = threading.Event()
        self.fails = fails
        if not blocked:
            self.free.set()

    def __call__(self, event: Event) -> None:
        self.called.set()
        assert self.free.wait(WAIT_S)
        self.got.append(event)
        if self.fails:
            raise RuntimeError("no")

    def close(self) -> None:
        self.closed.set()

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.got]


def streaming(*listeners: Any) -> EventStream:
    return EventStream(ManualClock(), 3, listeners)


def test_events_arrive_in_order_with_time_rank_and_timeline() -> None:
    listener = Listener()
    events = streaming(listener)
    events.emit("started", 0, method="lazy")
    events.timeline = 2
    for step in range(100):
        events.emit("base_begun", step)
    events.close()
    assert listener.closed.is_set()
    first = listener.got[0]
    assert (first.kind, first.rank, first.timeline) == ("started", 3, 0)
    assert first.details == {"method": "lazy"}
    assert listener.steps[1:] == list(range(100))
    assert {event.timeline for event in listener.got[1:]} == {2}


def test_a_listener_that_hangs_delays_neither_the_program_nor_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream, "_QUEUED", 5)
    monkeypatch.setattr(stream, "_CLOSE_S", 0.05)
    hangs, other = Listener(blocked=True), Listener()
    events = streaming(hangs, other)
    for step in range(50):
        events.emit("base_begun", step)
        other.called.clear()
        while step not in other.steps:
            assert other.called.wait(WAIT_S)
    with caplog.at_level(logging.WARNING, "everstep"):
        events.close()
    before = caplog.text
    assert other.steps == list(range(50))
    assert not hangs.closed.is_set()
    with caplog.at_level(logging.WARNING, "everstep"):
        hangs.free.set()
        assert hangs.closed.wait(WAIT_S)
    # One that was taken out of the queue, and as many as the queue holds.
    assert hangs.steps == list(range(len(hangs.steps)))
    assert len(hangs.steps) <= 6
    assert f"{50 - len(hangs.steps)} events were dropped" in caplog.text
    assert "events are dropped" in before
    assert "the last events were not delivered" in before


def test_a_listener_that_fails_is_called_three_times(caplog: pytest.LogCaptureFixture) -> None:
    fails, other = Listener(fails=True), Listener()
    events = streaming(fails, other)
    with caplog.at_level(logging.WARNING, "everstep"):
        for step in range(10):
            events.emit("base_begun", step)
        events.close()
    assert fails.steps == [0, 1, 2]
    assert other.steps == list(range(10))
    assert "it is called no more" in caplog.text


def test_failures_that_are_rare_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_FORGIVEN", 5)
    got: list[int] = []

    class Words:
        def __call__(self, event: Event) -> None:
            got.append(event.step)
            if event.step % 10 == 0:
                raise KeyError

        def __repr__(self) -> str:
            raise RuntimeError("no words")

    events = streaming(Words())
    for step in range(60):
        events.emit("base_begun", step)
    events.close()
    assert got == list(range(60))


def test_steps_of_an_earlier_timeline_are_told_before_the_recovery() -> None:
    listener = Listener(blocked=True)
    events = streaming(listener)
    events.timeline = 1
    events.emit("log_durable", 5, tier="disk")
    events.emit("log_durable", 6, tier="disk")
    events.timeline = 2
    events.emit("recovery", 3)
    listener.free.set()
    events.close()
    assert [(one.kind, one.step) for one in listener.got][-2:] == [
        ("log_durable", 6),
        ("recovery", 3),
    ]


def test_a_stream_may_be_dropped_by_its_own_listener() -> None:
    kept: list[Any] = []
    ended = threading.Event()

    def listener(event: Event) -> None:
        kept.clear()  # the last reference to the stream
        ended.set()

    kept.append(streaming(listener))
    kept[0].emit("base_begun", 1)
    assert ended.wait(WAIT_S)


def test_a_listener_may_end_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    def leaves(event: Event) -> None:
        raise SystemExit(1)

    other = Listener()
    events = streaming(leaves, other)
    events.emit("base_begun", 1)
    events.close()
    assert other.steps == [1]


def test_of_events_of_every_step_the_last_one_arrives() -> None:
    listener = Listener(blocked=True)
    events = streaming(listener)
    events.emit("started", 0)
    assert listener.called.wait(WAIT_S)
    for step in range(1, 1001):
        events.emit("log_durable", step, tier="disk")
        events.emit("log_durable", step - 1, tier="s3://bucket/run")
    listener.free.set()
    events.close()
    last = {str(event.details.get("tier")): event.step for event in listener.got}
    assert last == {"None": 0, "disk": 1000, "s3://bucket/run": 999}
    assert len(listener.got) < 10


def test_a_stream_that_is_dropped_ends_its_threads() -> None:
    listener = Listener()
    events = streaming(listener)
    events.emit("base_begun", 1)
    del events
    gc.collect()
    assert listener.closed.wait(WAIT_S)
    assert listener.steps == [1]


def test_without_listeners_nothing_is_kept() -> None:
    events = streaming()
    events.emit("base_begun", 1)
    assert not events.has_listeners
    events.close()


@pytest.mark.parametrize("given", [3, [print, 3], "print", {"a": print}])
def test_what_cannot_be_called_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="on_event must be a function"):
        parse_listeners(given)


def test_one_function_or_several() -> None:
    assert parse_listeners(None) == ()
    assert parse_listeners(print) == (print,)
    assert parse_listeners([print, repr]) == (print, repr)
