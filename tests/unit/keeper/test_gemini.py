"""Bases that live in memory: which ones, how many, when the next may come, and what comes back."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep import Method
from everstep.commit.job.messages import PeerRound
from everstep.commit.job.offers import BaseOffer, Offer, Piece, choose
from everstep.commit.lineage import BaseId
from everstep.errors import (
    AuditError,
    DamageError,
    DeadlineError,
    OptionError,
    OutOfSpaceError,
    StateError,
)
from everstep.format.header import BasePlan, ShardIdentity, plan_files
from everstep.format.names import TIMELINE_RECORD, timeline_dir
from everstep.format.records import TimelineRecord
from everstep.keeper.held.peer_stores import MemoryBases, PeerBaseStore, copy_memory_bytes
from everstep.keeper.ship.senders import Pace
from everstep.options import Options, validate_options
from everstep.restore.fetch.held import size_of
from everstep.run.scan import scan_run
from everstep.seams import ManualClock
from everstep.seams.posix import PosixFileSystem
from everstep.seams.progress import silent
from everstep.state.layout.entries import Entry
from everstep.state.layout.shards import Seen
from everstep.state.ranks.writers import RankInfo
from everstep.testing import inspect
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.budget import own_budget_bytes
from everstep.trainer.job.run_folder import memory_notice, node_names
from tests.support.ranks.peering import RUN, BodyOfBytes, Ring, copy_of, piece, record_of

A, B, C = BaseId(1, 10), BaseId(1, 20), BaseId(1, 30)
MEMORY = ("memory", "peer", "disk")
_ASKS_MAX = 2000


# --- What is asked for ------------------------------------------------------------------


def options_of(**options: Any) -> Options:
    known: dict[str, Any] = {
        "method": "gemini",
        "every": 2,
        "keep": 3,
        "budget": None,
        "on_failure": "raise",
        "progress_timeout_s": 20.0,
    }
    return validate_options(**{**known, **options})


def test_one_base_of_ten_goes_to_disk() -> None:
    options = options_of()
    assert options.method_name == "gemini"
    in_memory = [step for step in range(2, 42, 2) if options.stays_in_memory(step)]
    assert in_memory == [step for step in range(2, 42, 2) if step % 20]
    assert not any(options_of(method="lazy").stays_in_memory(step) for step in range(2, 42, 2))
    each = options_of(method=dataclasses.replace(everstep.presets["gemini"], disk_every=1))
    assert not any(each.stays_in_memory(step) for step in range(2, 42, 2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tiers": ("memory",)},
        {"tiers": ("peer", "disk")},
        {"tiers": ("disk", "memory")},
        {"tiers": ("memory", "disk")},
        {"tiers": MEMORY, "disk_every": 0},
        {"tiers": MEMORY, "disk_every": True},
        {"disk_every": 2},
        {"tiers": MEMORY, "log": "dense"},
        {"tiers": MEMORY, "base": "sync"},
        {"tiers": MEMORY, "base": "checkfreq"},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Method(**wrong)


@pytest.mark.parametrize("every", ["auto", "10min"])
def test_bases_are_counted_in_steps(every: str) -> None:
    with pytest.raises(OptionError, match="number of steps"):
        options_of(every=every)


def test_without_a_keeper_process_there_is_no_such_memory(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="separate keeper process"):
        everstep.Checkpointer(
            tmp_path / "run",
            {"t": {"t": torch.zeros(3)}},
            method="gemini",
            keeper=everstep.KeeperOptions(process=False),
        )


def test_memory_is_shared_out_and_two_bases_must_fit() -> None:
    options = options_of()
    assert own_budget_bytes(options, 1200, 100, peers=True) == 400
    assert own_budget_bytes(options, 1200, 100, peers=False) == 600
    assert own_budget_bytes(options_of(method="lazy"), 1200, 100, peers=True) == 0
    with pytest.raises(OutOfSpaceError, match="600"):
        own_budget_bytes(options, 599, 100, peers=True)


def test_what_it_survives_is_said() -> None:
    alone = memory_notice(RankInfo(0, 1), 10, 1000)
    assert all(part in alone for part in ("NOT a lost node", "1.0 kB", "one base of 10"))
    ring = memory_notice(RankInfo(1, 2, nodes=("a", "b")), 1, 1000)
    assert all(part in ring for part in ("loss of this node", "rank 0's", "each base"))


def test_bases_that_are_in_memory_only_are_sent_as_fast_as_it_goes() -> None:
    for at_once, wanted in ((False, 125.0), (True, None)):
        pace = Pace(at_once=at_once)
        pace.durable(10.0)
        pace.durable(20.0)
        assert pace.rate_of(1000) == wanted
    assert Pace(5.0, at_once=True).rate_of(1000) == 5.0


def test_one_node_is_no_error_where_peers_were_not_asked_for() -> None:
    same = [{"node": "m"}, {"node": "m"}]
    assert node_names(same, 0, if_there=True) == ()
    assert node_names([{"node": "m"}, {"node": "n"}], 0, if_there=True) == ("m", "n")
    with pytest.raises(OptionError):
        node_names(same, 0)


# --- What a keeper does -----------------------------------------------------------------


class Memory:
    """A keeper's memory for rank 0, and whether other ranks are through with a base."""

    def __init__(self, folder: Path, *, bound_bytes: int = 1 << 24, alone: bool = False) -> None:
        self.store, self.clock = PeerBaseStore(), ManualClock()
        self.store.new_start(bound_bytes, (0,), None)
        self.everywhere: BaseId | None = None
        self.whole: list[BaseId] = []
        self.asked, self.on_asked = threading.Event(), lambda: None
        self._asks = 0
        path = timeline_dir(folder, 1)
        path.mkdir(parents=True)
        (path / TIMELINE_RECORD).write_bytes(record_of(1).encode())
        self.bases = MemoryBases(
            PosixFileSystem(),
            folder,
            self.store,
            self.clock,
            None if alone else self._is_past,
            self.whole.append,
            timeout_s=30.0,
        )

    def hold(
        self,
        base: BaseId,
        size_bytes: int = 3000,
        audit: Callable[[Any, Any], None] = lambda plan, written: None,
    ) -> None:
        data = bytes((at + base.step) % 251 for at in range(size_bytes))
        plan = _plan(base, size_bytes)
        self.bases.hold(plan, [BodyOfBytes(data)], silent, audit)
        copy = self.store.find(0, base)
        assert copy is not None
        assert bytes(copy.memory).endswith(data)
        assert copy.record == record_of(1).encode()
        assert size_of(copy.marker) == copy.memory.nbytes

    def passes(self, base: BaseId) -> None:
        """It is whole with all ranks."""
        self.everywhere = base
        self.store.passed(base)

    @property
    def held(self) -> list[int]:
        return [step for _, step in self.store.held]

    def _is_past(self, base: BaseId) -> bool:
        self._asks += 1
        assert self._asks < _ASKS_MAX, "it waits for ever"
        self.asked.set()
        self.on_asked()
        return self.everywhere is not None and base <= self.everywhere


def _plan(base: BaseId, size_bytes: int) -> BasePlan:
    identity = ShardIdentity(RUN, base.timeline, base.step, base.step, 0, 2, True)
    shards = plan_files(identity, [Entry.whole("t", "U8", (size_bytes,))], {}, {})
    return BasePlan(identity, tuple(shards))


def test_the_newest_two_are_held_and_the_next_waits_for_all_ranks(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.hold(A)
    memory.passes(A)
    memory.hold(B)
    assert memory.held == [10, 20]
    memory.asked.clear()
    waiting = threading.Thread(target=memory.hold, args=(C,), daemon=True)
    waiting.start()
    assert memory.asked.wait(20.0)
    assert memory.held == [10, 20], "B is not whole everywhere: A has to stay, and B to be sent"
    assert memory.whole == [A, B]
    memory.passes(B)
    waiting.join(20.0)
    assert (memory.held, memory.whole) == ([20, 30], [A, B, C])


def test_who_is_alone_waits_for_nobody(tmp_path: Path) -> None:
    memory = Memory(tmp_path, alone=True)
    for base in (A, B, C):
        memory.hold(base)
    assert (memory.held, memory.whole) == ([30], [A, B, C])


def test_the_bound_is_never_passed(tmp_path: Path) -> None:
    one = copy_memory_bytes(3000 + 4096)
    memory = Memory(tmp_path, bound_bytes=2 * one, alone=True)
    most = 0
    for step in range(1, 40):
        memory.hold(BaseId(1, step))
        most = max(most, memory.store.used_bytes)
    assert 0 < most <= 2 * one
    with pytest.raises(OutOfSpaceError, match=str(2 * one)):
        memory.hold(BaseId(1, 40), size_bytes=1 << 20)
    assert memory.held == [39], "what there is stays"
    assert memory.store.used_bytes <= 2 * one


def test_what_an_audit_refuses_is_not_held(tmp_path: Path) -> None:
    memory = Memory(tmp_path)

    def refuse(plan: Any, written: Any) -> None:
        assert [set(shard.digests) for shard in written] == [{"t"}]
        raise AuditError("not the state of its step")

    with pytest.raises(AuditError):
        memory.hold(A, audit=refuse)
    assert (memory.held, memory.whole) == ([], [])
    memory.hold(B)
    assert memory.held == [20]


def test_bytes_that_change_while_they_are_copied_are_not_held(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.hold(A)

    class Changes(BodyOfBytes):
        reads = 0

        def fill(self, begin: int, chunk: memoryview, seen: Seen) -> None:
            super().fill(begin, chunk, seen)
            Changes.reads += 1
            if Changes.reads == 2:  # the first is for the digests
                chunk[7] ^= 1

    memory.passes(A)
    with pytest.raises(DamageError):
        memory.bases.hold(_plan(B, 3000), [Changes(bytes(3000))], silent, lambda *_: None)
    assert (memory.held, memory.whole) == ([10], [A])


def test_what_all_have_gone_back_to_stays_until_a_newer_one_is_whole() -> None:
    """A newer one was whole here only: it is of no use to anybody."""
    store = PeerBaseStore()
    store.new_start(1 << 24, (0,), None)
    for base in (A, B):
        copy = copy_of(piece(0, base))
        store.keep(copy.marker, copy.record, functools.partial(_fill, copy.memory))
    assert store.held == [(0, 10), (0, 20)]
    store.new_start(1 << 24, (0,), None, A)
    later = copy_of(piece(0, BaseId(2, 15)))
    store.keep(later.marker, later.record, functools.partial(_fill, later.memory))
    assert store.held == [(0, 10), (0, 15)]


def _fill(data: memoryview, memory: memoryview) -> None:
    memory[:] = data


def test_the_next_start_waits_for_nobody(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.hold(A)
    memory.on_asked = memory.bases.release
    with pytest.raises(StateError, match="next start"):
        memory.hold(B)
    assert memory.held == [10]


def test_ranks_that_get_nowhere_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.hold(A)
    memory.on_asked = lambda: memory.clock.advance(10.0)
    with pytest.raises(DeadlineError, match="step 10"):
        memory.hold(B)
    assert memory.held == [10]


# --- When all ranks are through ---------------------------------------------------------


@pytest.mark.parametrize("nodes", ["ab", "aa"], ids=["peers", "one node"])
def test_a_base_is_past_when_it_is_whole_with_all_ranks(nodes: str) -> None:
    ring = Ring(nodes)
    ring.bases[0, A] = piece(0, A)
    for one in ring.ranks:
        one.durable(A)
    ring.run(5.0)
    assert not any(one.is_past(A) for one in ring.ranks), "rank 1 has none yet"
    ring.bases[1, A] = piece(1, A)
    ring.run(5.0)
    assert all(one.is_past(A) and not one.is_past(B) for one in ring.ranks)
    assert ring.held(0) == ([(1, 10)] if nodes == "ab" else [])
    ring.take(B)
    ring.run(5.0)
    assert all(one.is_past(B) for one in ring.ranks)


def test_a_base_is_past_when_it_has_failed_or_another_is_sent() -> None:
    ring = Ring("ab", timeout_s=10.0)
    ring.bases[0, A] = piece(0, A)
    ring.ranks[0].durable(A)
    ring.run(60.0)
    assert all(one.is_past(A) for one in ring.ranks), "rank 1 never has it: the round is over"
    one = Ring("ab").ranks[1]
    one.receive(0, PeerRound(C, A))
    one.turn(0.0)
    past = [one.is_past(base) for base in (A, B, C)]
    assert past == [True, True, False], "rank 0 is at C: B is not sent any more"


# --- What comes back --------------------------------------------------------------------


def offer(rank: int, memory: tuple[BaseId, ...], disk: tuple[BaseId, ...] = ()) -> Offer:
    found = {
        base: BaseOffer({rank: Piece(piece(rank, base).marker, ("memory",))}) for base in memory
    }
    found |= {base: BaseOffer({rank: Piece(piece(rank, base).marker)}) for base in disk}
    timelines: dict[int, TimelineRecord | None] = {1: record_of(1)}
    return Offer(rank, str(rank), RUN, 2, timelines, found)


@pytest.mark.parametrize(
    ("memory", "disk", "wanted", "durable"),
    [
        (((A, B), (A, B)), (), B, False),
        (((A, B), (A,)), (), A, False),
        (((B, C), (A, B)), (), B, False),
        (((B, C), (A, B)), (C,), C, True),
        (((B,), (C,)), (A,), A, True),
        (((), (C,)), (A,), A, True),
    ],
    ids=["both", "one is behind", "in between", "the disk's is newer", "none of all", "one empty"],
)
def test_the_newest_that_all_ranks_have_counts_wherever_it_lies(
    memory: tuple[tuple[BaseId, ...], ...],
    disk: tuple[BaseId, ...],
    wanted: BaseId,
    durable: bool,
) -> None:
    mine = [tuple(base for base in held if base not in disk) for held in memory]
    choice = choose([offer(rank, mine[rank], disk) for rank in range(2)], needs=lambda r, m: (r,))
    assert (choice.base, choice.durable) == (wanted, durable)


def test_what_lives_in_memory_and_on_disk_is_the_same_base(tmp_path: Path) -> None:
    """Otherwise the two would contradict each other, and neither could be used."""
    state = {"t": {"t": torch.arange(5.0)}, "data": {"step": 0}}
    made = everstep.Checkpointer(tmp_path / "run", state, method="gemini", every=1)
    with made as ckpt:
        for _ in range(3):
            ckpt.step()
        first = inspect(ckpt).keepers.current
        ckpt.save()
        ckpt.wait()
        assert isinstance(first, RemoteKeeper)
        copies = {copy.marker.step: copy for copy in first.recall(20.0, own=True).copies}
        inventory = scan_run(PosixFileSystem(), tmp_path / "run")
        ((base_step, manifest),) = [(base.id.step, base.manifest) for base in inventory.bases]
        assert manifest is not None
        assert base_step == 3
        assert copies[3].marker == manifest.markers[0]
        keepers = inspect(ckpt).keepers
        assert [copy.marker.step for copy in keepers.recall_leftovers(own=True).copies] == [3]
        terms = keepers.terms
        mine = terms.run_id
        terms.run_id = "another run in a folder that was emptied"
        assert keepers.recall_leftovers(own=True).copies == ()
        terms.run_id = mine
        ckpt.step()
        ckpt.wait()
        stats = ckpt.stats()
        assert (stats.saves, stats.held, stats.committed, stats.durable_step) == (5, 4, 1, 3)
    inventory = scan_run(PosixFileSystem(), tmp_path / "run")
    assert [base.id.step for base in inventory.bases] == [3, 4], "the last one goes to disk"
