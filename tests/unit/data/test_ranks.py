"""Ranks share the order of an epoch, and another number of them shares what is left of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

import everstep
from everstep.data import ResumableLoader
from everstep.errors import OptionError, StateError
from tests.support.loaded import Noisy, NoisyStream, indices, loader_of, take

Make = Callable[[int, int], ResumableLoader]


def dealt(length: int, **options: Any) -> Make:
    """A shuffled loader that deals to the ranks."""

    def make(rank: int, world: int) -> ResumableLoader:
        return loader_of(Noisy(length), shuffle=True, rank=rank, world=world, **options)

    return make


def with_distributed_sampler(length: int, drop_last: bool = False) -> Make:
    """One with a ``DistributedSampler``."""

    def make(rank: int, world: int) -> ResumableLoader:
        data = Noisy(length)
        sampler: Any = DistributedSampler(data, world, rank, seed=5, drop_last=drop_last)
        return loader_of(data, sampler=sampler)

    return make


class ByTwos(Sampler[list[int]]):
    """Batches of two, shuffled."""

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[list[int]]:
        pairs = [[n, n + 1] for n in range(0, 22, 2)]
        random.shuffle(pairs)
        return iter(pairs)


class Unending(RandomSampler):
    """Goes through its samples again and again."""

    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(22).tolist()


class Unsized(SequentialSampler):
    """Does not know how many samples it has."""

    __len__ = None  # type: ignore[assignment]


def by_batches(rank: int, world: int) -> ResumableLoader:
    return loader_of(Noisy(), batch_size=1, batch_sampler=ByTwos(), rank=rank, world=world)


def unending(rank: int, world: int) -> ResumableLoader:
    return loader_of(Noisy(), sampler=Unending(range(22)), rank=rank, world=world)


MAKERS: dict[str, tuple[Make, int]] = {
    "dealt here": (dealt(40), 4),
    "not evenly": (dealt(43), 4),
    "DistributedSampler": (with_distributed_sampler(43), 4),
    "DistributedSampler, drop_last": (with_distributed_sampler(43, drop_last=True), 4),
    "batches": (by_batches, 2),
}


def rounds(loaders: list[ResumableLoader], count: int) -> list[list[int]]:
    """What each rank is given in so many steps; fewer at the end of the epoch."""
    return [
        indices(batch for _, batch in zip(range(count), loader, strict=False)) for loader in loaders
    ]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("worlds", [(2, 3), (3, 2), (2, 1), (1, 3), (2, 3, 2), (2, 2, 3)])
def test_each_sample_once(name: str, worlds: tuple[int, ...]) -> None:
    make, _ = MAKERS[name]
    whole = indices(make(0, 1))
    assert sorted(set(whole)) == sorted(whole)
    seen: list[int] = []
    state = None
    for number, world in enumerate(worlds):
        loaders = [make(rank, world) for rank in range(world)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        is_last = number == len(worlds) - 1
        parts = rounds(loaders, 99 if is_last else 2)
        assert len({len(part) for part in parts}) == 1, "as many for each"
        seen += [index for part in parts for index in part]
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states), "ranks have the same position"
        state = states[0]
    counted = Counter(seen)
    if "drop_last" in name:
        assert set(counted.values()) == {1}
        assert len(whole) - len(counted) < max(worlds)
    else:
        assert set(counted) == set(whole), "none is lost"
        assert len(seen) - len(whole) < 2 * max(worlds), "those that fill up the last round"


def test_the_end_of_an_epoch_is_its_end_for_any_number_of_ranks() -> None:
    for make in (dealt(43), dealt(43, drop_last=True), with_distributed_sampler(43)):
        loaders = [make(rank, 2) for rank in range(2)]
        for loader in loaders:
            take(loader, len(loader))
        resumed = make(1, 3)
        resumed.load_state_dict(loaders[0].state_dict())
        assert list(resumed) == []
        assert resumed.epoch == 1
        assert len(list(resumed)) == len(resumed)


def test_it_deals_as_a_distributed_sampler_does() -> None:
    for length in (40, 43, 2):
        for rank in range(3):
            wanted: list[int] = list(DistributedSampler(Noisy(length), 3, rank, shuffle=False))
            loader = loader_of(Noisy(length), rank=rank, world=3)
            assert indices(loader) == wanted
            assert len(loader) == -(-len(wanted) // 4)
    dropped: list[int] = list(DistributedSampler(Noisy(43), 3, 2, shuffle=False, drop_last=True))
    loader = loader_of(Noisy(43), rank=2, world=3, drop_last=True)
    assert indices(loader) == dropped[: len(loader) * 4]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [40, 43, 2])
def test_a_sampler_without_a_length_is_dealt_as_one_with_it(length: int, drop_last: bool) -> None:
    for rank in range(3):
        options: dict[str, Any] = {"rank": rank, "world": 3, "drop_last": drop_last}
        wanted = indices(loader_of(Noisy(length), **options))
        loader = loader_of(Noisy(length), sampler=Unsized(range(length)), **options)
        assert indices(loader) == wanted


def test_a_distributed_sampler_is_taken_as_it_is() -> None:
    for drop_last in (False, True):
        for rank in range(3):
            loader = with_distributed_sampler(43, drop_last)(rank, 3)
            for epoch in range(2):
                sampler: Any = DistributedSampler(Noisy(43), 3, rank, seed=5, drop_last=drop_last)
                sampler.set_epoch(epoch)
                assert indices(loader) == list(sampler)


def test_ranks_of_an_unending_sampler() -> None:
    parts = rounds([unending(rank, 2) for rank in range(2)], 4)
    assert len(set(parts[0][:11] + parts[1][:11])) == 22
    loaders = [unending(rank, 2) for rank in range(2)]
    begun = rounds(loaders, 2)
    resumed = unending(0, 1)
    resumed.load_state_dict(loaders[0].state_dict())
    rest = indices(batch for _, batch in zip(range(2), resumed, strict=False))
    assert len(set(begun[0] + begun[1] + rest[:6])) == 22


class OwnDeal(Sampler[int]):
    """Deals by itself."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.num_replicas = rank, world

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 24, self.num_replicas))


def test_a_sampler_that_deals_by_itself_is_not_dealt_again() -> None:
    def make(rank: int, world: int = 2) -> ResumableLoader:
        return loader_of(Noisy(24), sampler=OwnDeal(rank, world), rank=rank, world=world)

    loader = make(1)
    assert len(loader) == 3
    assert indices(loader) == list(range(1, 24, 2))
    within = BatchSampler(BatchSampler(OwnDeal(1, 2), 4, False), 1, False)  # type: ignore[type-var]
    nested = ResumableLoader(
        torch.utils.data.DataLoader(
            [[float(n)] for n in range(24)],
            batch_sampler=_Flat(within),  # type: ignore[arg-type]
        ),
        rank=1,
        world=2,
    )
    assert [int(batch[0][0]) for batch in nested] == [1, 9, 17]
    take(loader, 1)
    with pytest.raises(StateError, match=r"begun by 2 rank\(s\), now( there are|) 3"):
        make(1, 3).load_state_dict(loader.state_dict())


class _Flat(Sampler[list[int]]):
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for (batch,) in self.sampler:
            yield batch


def test_ranks_of_a_stream_are_refused_in_mid_epoch_only() -> None:
    def make(rank: int, world: int) -> ResumableLoader:
        return loader_of(NoisyStream(), rank=rank, world=world)

    begun = make(0, 2)
    take(begun, 2)
    with pytest.raises(StateError, match=r"epoch 0 was begun by 2 rank\(s\), now( there are|) 3"):
        make(0, 3).load_state_dict(begun.state_dict())
    list(begun)  # epoch 1
    resumed = make(2, 3)
    resumed.load_state_dict(begun.state_dict())
    assert resumed.epoch == 2


def test_without_arguments_ranks_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(Noisy())
    assert len(loader) == 6
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    assert indices(loader_of(Noisy())) == list(range(1, 22, 2))
    assert len(loader) == 3, "of the job that was joined after it was asked first"
    assert indices(loader_of(Noisy(), rank=0, world=1)) == list(range(22))


def test_rank_and_world_belong_together() -> None:
    with pytest.raises(OptionError, match="together"):
        everstep.data.ResumableLoader([1], world=2)
