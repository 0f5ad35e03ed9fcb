"""The emulated link: as slow as it says."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from everstep.capture.batches import Batch, Chunks
from everstep.testing import emulated_link as emulated
from everstep.testing.emulated_link import EmulatedLink

MB = 1_000_000
TIMEOUT_S = 60.0


class Time:
    """Passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.naps_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.naps_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(emulated, "time", made)
    return made


def batch_of(begin: int, end: int) -> Batch:
    return Batch(begin, end, (torch.full((end - begin,), 7, dtype=torch.uint8),))


def test_a_copy_takes_as_long_as_its_bytes(clock: Time) -> None:
    link, block = EmulatedLink(10 * MB), torch.zeros(3 * MB, dtype=torch.uint8)
    told: list[tuple[int, float]] = []
    batches = [batch_of(0, MB), batch_of(MB, 3 * MB)]
    transfer = link.submit(batches, block, lambda end: told.append((end, clock.now_s - 100.0)))
    assert transfer.wait(TIMEOUT_S)
    link.close()
    assert told == [(MB, pytest.approx(0.1)), (3 * MB, pytest.approx(0.3))]
    assert block.eq(7).all()


# --- What is more urgent ----------------------------------------------------------------


class ByHand:
    """A clock that is moved by hand: whoever sleeps, does so until it has come to that time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.changed = threading.Condition()
        self.sleeping: dict[int, float] = {}

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        me = threading.get_ident()
        with self.changed:
            end_s = self.sleeping[me] = self.now_s + seconds
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.now_s >= end_s, TIMEOUT_S)
            del self.sleeping[me]
            self.changed.notify_all()

    def until_asleep(self, thread: int) -> float:
        """Waits until a thread sleeps; when it wants to wake up."""
        with self.changed:
            assert self.changed.wait_for(lambda: thread in self.sleeping, TIMEOUT_S)
            return self.sleeping[thread]

    def until_awake(self, thread: int, end_s: float) -> None:
        """Waits until a thread no longer sleeps up to that time."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.sleeping.get(thread) != end_s, TIMEOUT_S)

    def move_to(self, now_s: float) -> None:
        with self.changed:
            self.now_s = max(self.now_s, now_s)
            self.changed.notify_all()


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> ByHand:
    made = ByHand()
    monkeypatch.setattr(emulated, "time", made)
    return made


def lanes_thread(link: EmulatedLink) -> int:
    found: list[int] = []
    link.run(lambda: found.append(threading.get_ident())).result(TIMEOUT_S)
    return found[0]


def marked_at(
    clock: ByHand, link: EmulatedLink, submitted: list[Batch], marks: list[Batch]
) -> tuple[float, float]:
    """A mark while the first quarter of the first batch is copied: when it began, and ended."""
    block = torch.zeros(20 * MB, dtype=torch.uint8)
    copying = lanes_thread(link)
    transfer = link.submit(submitted, block, lambda end: None)
    first_s = clock.until_asleep(copying)
    begin_s = 100.0 + (first_s - 100.0) / 4
    clock.move_to(begin_s)
    with ThreadPoolExecutor(1) as marking:
        about: Future[int] = marking.submit(threading.get_ident)
        thread = about.result(TIMEOUT_S)
        done = marking.submit(link.copy_now, marks, block)
        for _ in marks:
            end_s = clock.until_asleep(thread)
            clock.move_to(end_s)
            clock.until_awake(thread, end_s)
        done.result(TIMEOUT_S)
    clock.move_to(1e9)
    assert transfer.wait(TIMEOUT_S)
    link.close()
    return begin_s, end_s


def test_a_mark_waits_for_what_is_under_way(by_hand: ByHand) -> None:
    """8 MB of small gradients take 0.8 s as one batch: the mark of 5 kB behind them waits for what
    is left of it, as a link does not stop in the middle."""
    gradients = [torch.full((80_000,), 7, dtype=torch.uint8) for _ in range(100)]
    packed = Batch(0, 8 * MB, tuple(gradients))
    mark = batch_of(19 * MB, 19 * MB + 5_000)
    begin_s, end_s = marked_at(by_hand, EmulatedLink(10 * MB), [packed], [mark])
    assert end_s - begin_s == pytest.approx(0.75 * 0.8 + 0.0005)


def test_a_mark_waits_for_no_more_than_a_chunk(by_hand: ByHand) -> None:
    gradients = [torch.full((80_000,), 7, dtype=torch.uint8) for _ in range(100)]
    chunks = list(Chunks([Batch(0, 8 * MB, tuple(gradients))], 100_000))
    mark = batch_of(19 * MB, 19 * MB + 5_000)
    begin_s, end_s = marked_at(by_hand, EmulatedLink(10 * MB), chunks, [mark])
    assert end_s - begin_s == pytest.approx(0.75 * 0.008 + 0.0005)


def test_all_of_a_mark_goes_before_what_was_submitted(by_hand: ByHand) -> None:
    chunks = list(Chunks([batch_of(0, 8 * MB)], 100_000))
    marks = [batch_of(19 * MB + at, 19 * MB + at + 5_000) for at in range(0, 50_000, 5_000)]
    begin_s, end_s = marked_at(by_hand, EmulatedLink(10 * MB), chunks, marks)
    assert end_s - begin_s == pytest.approx(0.75 * 0.01 + 10 * 0.0005)
