"""How ranks that start agree: step by step, whatever becomes of messages (I7)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from everstep.commit.job.agreement import (
    Agreement,
    Compare,
    Compared,
    Demand,
    Go,
    InventorySeen,
    Opened,
    OpenTimeline,
    RanksSilent,
    Refuse,
    Restore,
    Restored,
    TakeInventory,
)
from everstep.commit.job.messages import Command, Send
from everstep.commit.job.offers import Choice, Offer, Source
from everstep.commit.lineage import BaseId
from everstep.commit.log_reach import LogRun
from everstep.format.digests import digest
from everstep.format.records import TimelineRecord, manifest_of
from everstep.state.layout.placement import replica_digests
from tests.support.offers import marker, offer, own


def record_of(choice: Choice, number: int) -> TimelineRecord:
    parent = None if choice.base is None else choice.base.timeline
    step = 0 if choice.base is None else choice.base.step
    return TimelineRecord("run", number, parent, step, True, 2, {"session": "s"}, 0.0)


@dataclass
class Ranks:
    """Ranks in one room: whatever they are to do is done at once, or later, by chance."""

    offers: list[Offer]
    loss: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    step: int | None = None
    taken: set[int] = field(default_factory=set)
    damaged: set[Source] = field(default_factory=set)
    at_open: Any = None
    relaid: int | None = None  # a rank that notices another layout
    compared: dict[int, Compared] | None = None  # by rank; None: nothing may be left out
    done: list[tuple[int, Any]] = field(default_factory=list)

    def run(self) -> dict[int, Any]:
        """What each rank came to: Go or Refuse."""
        world = len(self.offers)
        demand = Demand(step=self.step, compares=self.compared is not None)
        ranks = [Agreement(r, world, demand, record_of=record_of) for r in range(world)]
        ends: dict[int, Any] = {}
        mail: list[tuple[int, int, Any]] = []

        def absorb(rank: int, outs: Iterable[Any]) -> None:
            for out in outs:
                if isinstance(out, Send):
                    for _ in range(1 + (self.rng.random() < self.loss)):
                        if self.rng.random() >= self.loss:
                            mail.append((rank, out.rank, out.message))
                elif isinstance(out, Go | Refuse):
                    ends[rank] = out
                elif not isinstance(out, RanksSilent):
                    self.done.append((rank, out))
                    absorb(rank, ranks[rank].done(self.act(rank, out)))

        for rank in range(world):
            absorb(rank, ranks[rank].start())
        for now_s in range(1000):
            while mail:
                sender, rank, message = mail.pop(self.rng.randrange(len(mail)))
                absorb(rank, ranks[rank].receive(sender, message))
            if len(ends) == world:
                return ends
            for rank in range(world):
                absorb(rank, ranks[rank].tick(float(now_s)))
        raise AssertionError(f"only ranks {sorted(ends)} came to an end")

    def act(self, rank: int, action: Any) -> Any:
        if isinstance(action, TakeInventory):
            return InventorySeen(self.offers[rank])
        if isinstance(action, Compare):
            assert self.compared is not None
            found = self.compared.get(rank, Compared())
            return found if action.choice.reach else replace(found, unusable=None)
        if isinstance(action, Restore):
            damaged = [
                (of, source)
                for of, sources in action.choice.sources.items()
                for source in sources
                if source in self.damaged
            ]
            return Restored(
                tuple(damaged), relaid=rank == self.relaid and not action.choice.readers
            )
        assert isinstance(action, OpenTimeline)
        if action.record.timeline in self.taken:
            return Opened(False)
        known = {**self.offers[rank].timelines, action.record.timeline: action.record}
        number = action.record.timeline + 1
        self.offers[rank] = replace(self.offers[rank], timelines=known, next_timeline=number)
        if self.at_open is not None:
            self.at_open(self, action)
        return Opened(True)


def two() -> list[Offer]:
    return [own(0, 10, 20), own(1, 10, 20)]


@pytest.mark.parametrize("seed", range(20))
def test_all_go_with_the_same(seed: int) -> None:
    print(f"seed {seed}")
    ends = Ranks(two(), loss=0.3 if seed else 0.0, rng=random.Random(seed)).run()
    assert {(end.timeline, end.choice.base) for end in ends.values()} == {(2, BaseId(1, 20))}


def test_nobody_is_in_the_next_step_before_all_are_done() -> None:
    ranks = Ranks(two(), loss=0.3, rng=random.Random(1))
    ranks.run()
    kinds = [type(action) for _, action in ranks.done]
    assert kinds == [TakeInventory] * 2 + [Restore] * 2 + [OpenTimeline] * 2 + [TakeInventory] * 2


def left(rank: int, *names: str) -> Compared:
    """A rank leaves this out of what both have in common."""
    common = replica_digests({((0, 1), "model"): names}) if names else ()
    return Compared(common=common, why=tuple(f"{name}: not in the checkpoint" for name in names))


@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize("names", [(), ("model/a", "model/b")], ids=["nothing", "the same"])
def test_what_all_leave_out_is_compared_first(loss: float, names: tuple[str, ...]) -> None:
    compared = {rank: left(rank, *names) for rank in range(2)}
    ranks = Ranks(two(), loss=loss, rng=random.Random(3), compared=compared)
    assert {end.choice.base for end in ranks.run().values()} == {BaseId(1, 20)}
    kinds = [type(action) for _, action in ranks.done]
    first = [TakeInventory] * 2 + [Compare] * 2 + [Restore] * 2
    assert kinds == first + [OpenTimeline] * 2 + [TakeInventory] * 2


@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize("other", [(), ("model/b",)], ids=["nothing", "another"])
def test_what_only_some_leave_out_is_restored_by_none(loss: float, other: tuple[str, ...]) -> None:
    compared = {0: left(0, *other), 1: left(1, "model/a")}
    ranks = Ranks(two(), loss=loss, rng=random.Random(4), compared=compared)
    ends = ranks.run()
    assert all(isinstance(end, Refuse) and end.unlike for end in ends.values())
    assert ends[0].reason == ends[1].reason
    assert "some ranks would leave out entries of step 20 of timeline 1" in ends[0].reason
    assert "rank 1: model/a: not in the checkpoint" in ends[0].reason
    assert {type(action) for _, action in ranks.done} == {TakeInventory, Compare}


def test_what_is_damaged_or_of_no_use_as_ranks_compare_is_chosen_by_none() -> None:
    """A log that leads on from a whole state only: then the base alone."""
    runs = (LogRun(1, 21, 20, (21, 22), "a"),)
    offers = [replace(one, log=runs) for one in two()]
    ranks = Ranks(offers, compared={1: Compared(unusable=(1, 21))})
    ends = ranks.run()
    assert {(end.choice.end, end.choice.reach) for end in ends.values()} == {(BaseId(1, 20), None)}
    ranks = Ranks(two(), compared={1: Compared(((1, Source(2, 1)),))})
    ends = ranks.run()
    assert all(isinstance(end, Refuse) and not end.unlike for end in ends.values())
    assert not any(isinstance(action, Restore) for _, action in ranks.done)


def test_without_a_base_there_is_nothing_to_compare() -> None:
    ranks = Ranks([own(0), own(1)], compared={1: left(1, "model/a")})
    assert {end.choice.base for end in ranks.run().values()} == {None}
    assert not any(isinstance(action, Compare) for _, action in ranks.done)


@pytest.mark.parametrize("notices", [0, 1])
def test_another_layout_makes_all_look_at_the_logs_of_all(notices: int) -> None:
    runs = (LogRun(1, 21, 20, (21, 22), "a"),)
    offers = [replace(one, log=runs, others={rank: runs}) for rank, one in enumerate(two())]
    ranks = Ranks(offers, loss=0.2, rng=random.Random(2), relaid=notices)
    ends = ranks.run()
    assert {end.choice.end for end in ends.values()} == {BaseId(1, 22)}
    assert all(len(end.choice.readers) == 2 for end in ends.values())
    looks = [action.relaid for rank, action in ranks.done if isinstance(action, TakeInventory)]
    assert looks == [False] * 2 + [True] * 4, "and as they confirm it"


def test_damage_makes_all_choose_again() -> None:
    ranks = Ranks(two())
    ranks.offers = [own(0, 10), own(1, 10)]
    ranks.damaged = {Source(2, 1)}
    ends = ranks.run()
    assert all(isinstance(end, Refuse) for end in ends.values())
    assert "are damaged" in ends[0].reason


def test_what_was_loaded_in_part_is_no_fresh_start() -> None:
    """resume(step=0): the base of step 0 is damaged on one rank, and the others have loaded it."""
    ranks = Ranks([own(0, 0), own(1, 0)], step=0, damaged={Source(2, 1)})
    ends = ranks.run()
    assert all(isinstance(end, Refuse) for end in ends.values())
    assert "that of a fresh start" in ends[0].reason
    ends = Ranks([own(0, 10), own(1, 10)], step=0).run()
    assert {end.choice.base for end in ends.values()} == {None}


def test_a_number_that_is_taken() -> None:
    ranks = Ranks(two(), taken={2, 3})
    assert {end.timeline for end in ranks.run().values()} == {4}


def test_a_base_that_is_deleted_while_it_is_chosen() -> None:
    """At the second inventory it is gone: another is chosen, with one more timeline."""

    def delete(ranks: Ranks, action: OpenTimeline) -> None:
        ranks.at_open = None
        bases = {base: v for base, v in ranks.offers[0].bases.items() if base.step == 10}
        ranks.offers[0] = replace(ranks.offers[0], bases=bases)

    ends = Ranks(two(), at_open=delete).run()
    assert {(end.timeline, end.choice.base) for end in ends.values()} == {(3, BaseId(1, 10))}


def test_a_base_that_is_finished_while_an_older_one_is_chosen() -> None:
    """An older process commits until it is fenced off: what it committed is not lost."""

    def finish(ranks: Ranks, action: OpenTimeline) -> None:
        ranks.at_open = None
        for rank in range(2):
            newer = {**ranks.offers[rank].bases, **own(rank, 30).bases}
            ranks.offers[rank] = replace(ranks.offers[rank], bases=newer)

    ends = Ranks(two(), at_open=finish).run()
    assert {end.choice.base for end in ends.values()} == {BaseId(1, 30)}


def test_another_start_that_overtakes_this_one() -> None:
    def overtake(ranks: Ranks, action: OpenTimeline) -> None:
        ranks.at_open = None
        other = replace(action.record, timeline=7, fingerprint={"session": "other"})
        known = {**ranks.offers[0].timelines, 7: other}
        ranks.offers[0] = replace(ranks.offers[0], timelines=known, next_timeline=8)

    assert {end.timeline for end in Ranks(two(), at_open=overtake).run().values()} == {8}


def test_refused_with_a_reason() -> None:
    ends = Ranks(two(), step=15).run()
    assert all("no base of step 15" in end.reason for end in ends.values())


def test_what_one_rank_saw_a_moment_too_early_is_no_reason_to_refuse() -> None:
    """Rank 0 took inventory before an older process committed, rank 1 behind it."""
    late = own(0, 30)
    base = BaseId(1, 30)
    known = digest(manifest_of({r: marker(base, r, 2) for r in range(2)}).encode())
    ranks = Ranks([own(0), offer(1, {base: replace(own(1, 30).bases[base], manifest=known)})])
    perform = ranks.act

    def catching_up(rank: int, action: Any) -> Any:
        event = perform(rank, action)
        if rank == 0:
            ranks.offers[0] = replace(ranks.offers[0], bases=late.bases)
        return event

    ranks.act = catching_up  # type: ignore[method-assign]
    assert {end.choice.base for end in ranks.run().values()} == {base}


def test_ranks_that_are_silent_are_named() -> None:
    agreement = Agreement(0, 3, Demand(), record_of=record_of, silent_s=60.0)
    agreement.start()
    agreement.done(InventorySeen(own(0, world=3)))
    agreement.tick(0.0)
    assert all(isinstance(out, Send) for out in agreement.tick(59.0))
    silent = [out for out in agreement.tick(61.0) if isinstance(out, RanksSilent)]
    assert silent == [RanksSilent("offer", (1, 2))]
    assert not [out for out in agreement.tick(70.0) if isinstance(out, RanksSilent)], "said once"


def test_a_command_of_an_earlier_step_is_not_obeyed_again() -> None:
    agreement = Agreement(1, 2, Demand(), record_of=record_of)
    assert agreement.receive(0, Command(4, "offer", b"")) == [TakeInventory()]
    assert not agreement.receive(0, Command(4, "offer", b"")), "it is under way"
    (answer,) = agreement.done(InventorySeen(own(1, 10)))
    assert agreement.receive(0, Command(4, "offer", b"")) == [answer], "said again, not done again"
    assert not agreement.receive(0, Command(3, "offer", b""))
    assert not agreement.receive(1, Command(5, "offer", b"")), "only rank 0 commands"
