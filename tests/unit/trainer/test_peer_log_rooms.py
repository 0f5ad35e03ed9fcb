"""How long the log stays in its own keeper's memory, and what logs of others may take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.arena import PAGE_BYTES
from everstep.commit.lineage import BaseId
from everstep.format.log import RecordHead
from everstep.format.writer import ChunkRing
from everstep.keeper.process.duties import Duties
from everstep.link.messages import RECORD_BYTES
from everstep.link.pool import Block
from everstep.seams import Seams
from everstep.state.ranks.writers import RankInfo
from everstep.trainer.budget import peer_log_bytes
from everstep.trainer.job.run_folder import peer_notice
from everstep.trainer.log.kept_records import LogMemory, LogTarget, log_dropped_early

SIZE = 100
TAKEN = PAGE_BYTES + RECORD_BYTES


class _Keeper:
    def __init__(self) -> None:
        self.forgotten = 0

    def forget_log(self, upto: int) -> None:
        self.forgotten = upto


class _Pool:
    def __init__(self) -> None:
        self.taken = 0

    def rounded_bytes(self, size_bytes: int) -> int:
        return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES

    def acquire_now(self, size_bytes: int, beside_bytes: int) -> Block:
        self.taken += 1
        return Block(0, size_bytes, 0, beside_bytes)

    def charge(self, room: Block, beside_bytes: int) -> None:
        room.beside_bytes = beside_bytes

    def release(self, room: Block) -> None:
        self.taken -= 1


class _Disk:
    on = False

    def has(self, number: int) -> bool:
        return True


class Rooms:
    """The memory of a log that takes one record in each step."""

    def __init__(self, *, steps_max: int, peers: bool) -> None:
        self.keeper, self.pool = _Keeper(), _Pool()
        disk: Any = _Disk()
        self.rooms = LogMemory(disk, steps_max * TAKEN, waits_for_peers=peers)
        keeper: Any = self.keeper
        pool: Any = self.pool
        self.rooms.start(LogTarget(keeper, pool, 1))
        self._step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._step += 1
            room = self.rooms.take(SIZE)
            assert room is not None
            assert self.rooms.target is not None
            head = RecordHead("mark", 1, self._step, self._step, "s")
            self.rooms.keep(self.rooms.target, head, room)

    @property
    def held(self) -> list[int]:
        return [kept.step for kept in self.rooms.kept]


def test_without_peers_a_durable_base_relieves_the_log() -> None:
    log = Rooms(steps_max=100, peers=False)
    log.train(5)
    log.rooms.base_durable(3)
    assert log.held == [4, 5]
    assert log.keeper.forgotten == 3


def test_what_is_held_is_what_lies_there() -> None:
    log = Rooms(steps_max=100, peers=False)
    log.train(5)
    assert log.rooms.kept_bytes == 5 * TAKEN
    log.rooms.base_durable(3)
    assert log.rooms.kept_bytes == 2 * TAKEN
    pool: Any = _Pool()
    keeper: Any = log.keeper
    log.rooms.start(LogTarget(keeper, pool, 2))
    assert log.held == [], "they are gone with their memory"
    assert log.rooms.kept_bytes == 0


def test_with_peers_it_waits_until_the_base_is_whole_with_all_of_them() -> None:
    """A node that is lost before goes back to the base before, and the others must go with it."""
    log = Rooms(steps_max=100, peers=True)
    log.train(3)
    log.rooms.base_durable(1)
    log.rooms.base_everywhere(1)
    assert log.held == [2, 3]
    log.rooms.base_durable(3)
    log.train(2)
    assert log.held == [2, 3, 4, 5]
    log.rooms.base_everywhere(3)
    assert log.held == [4, 5]
    log.rooms.base_everywhere(5)
    assert log.held == [4, 5], "not durable: its own rank may yet need them"
    assert log.rooms.cut_short == -1


def test_when_its_memory_is_half_full_it_does_not_wait_and_says_so() -> None:
    log = Rooms(steps_max=10, peers=True)
    log.train(4)
    log.rooms.base_durable(3)
    log.train(1)
    assert log.held == [1, 2, 3, 4, 5]
    log.train(1)
    assert log.held == [4, 5, 6]
    assert log.rooms.cut_short == 3
    assert not log.rooms.half_full, "no base is asked for: there is one"
    log.train(4)
    assert log.rooms.half_full, "nothing relieves it but the next base"
    assert "step 3" in log_dropped_early(3).message


def test_another_timeline_begins_anew() -> None:
    log = Rooms(steps_max=100, peers=True)
    log.train(2)
    log.rooms.base_durable(2)
    log.rooms.base_everywhere(2)
    assert log.rooms.target is not None
    into = log.rooms.target
    log.rooms.start(LogTarget(into.keeper, into.pool, 2))
    log.rooms.base_durable(1)
    assert log.rooms.everywhere_step == -1


@pytest.mark.parametrize(("held", "room"), [(4 << 20, 0), (1 << 30, 1 << 29)])
def test_two_bases_of_each_rank_have_room_first(held: int, room: int) -> None:
    info = RankInfo(0, 2, nodes=("a", "b"))
    assert peer_log_bytes(info, held, 1 << 20) == room
    found = peer_log_bytes(info, 100 << 20, 30 << 20)
    assert 0 < found <= (100 << 20) - 2 * (37 << 20)
    alone = RankInfo(2, 3, nodes=("a", "b", "b"))
    assert peer_log_bytes(alone, 0, 1 << 20) == 0


def test_the_bound_of_logs_is_printed() -> None:
    info = RankInfo(0, 2, nodes=("m", "n"))
    line = peer_notice(info, 4_000_000, 1_000_000)
    assert "bases and log of rank 0" in line
    assert "1.0 MB of it for their logs" in line
    assert "log" not in peer_notice(info, 4_000_000)


@pytest.mark.parametrize(("at_peers", "drops_at"), [(False, [1, 2, 3]), (True, [3])])
def test_logs_of_earlier_timelines_stay_until_a_base_is_with_all_peers(
    at_peers: bool, drops_at: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, where that never comes to pass, until two more are durable."""
    dropped: list[int] = []
    bases = [1, 2, 3]
    ring = ChunkRing(1, 1)
    duties = Duties(Seams(), tmp_path, ring)
    monkeypatch.setattr(duties.logs, "drop_older", lambda timeline: dropped.append(bases[0]))
    monkeypatch.setattr(duties, "stats", dict)
    told: list[dict[str, Any]] = []
    timeline: Any = SimpleNamespace(number=2, trainer=SimpleNamespace(send=told.append))
    while bases:
        duties.logs.base_durable(2, at_peers=at_peers)
        bases.pop(0)
    assert dropped == drops_at
    bases.append(0)
    duties.base_at_peers(timeline, BaseId(1, 9))
    assert dropped == drops_at, "of the timeline before: that of the start is not with them"
    duties.base_at_peers(timeline, BaseId(2, 9))
    assert dropped == [*drops_at, 0]
    assert [one["base"] for one in told] == [9]
    ring.close()


def test_steps_that_nothing_on_disk_has() -> None:
    """For these a keeper stays behind a script that ends without close(), and for no others."""
    log = Rooms(steps_max=100, peers=False)
    assert not log.rooms.is_ahead
    log.train(2)
    assert log.rooms.is_ahead
    log.rooms.base_durable(1)
    assert log.rooms.is_ahead
    log.rooms.base_durable(2)
    assert not log.rooms.is_ahead
    log.train(1)
    assert log.rooms.is_ahead
    log.rooms.disk.on = True
    assert not log.rooms.is_ahead
