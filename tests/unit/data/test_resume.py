"""A resumed loop is given the batches that an uninterrupted one is given, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from everstep.data import ResumableLoader
from everstep.errors import StateError
from tests.support.loaded import (
    Noisy,
    NoisyStream,
    by_parts,
    generator_states,
    indices,
    loader_of,
    noise,
    same,
    take,
)

CUTS = {
    "mid-epoch": (2,),
    "end of an epoch": (6,),
    "second epoch": (8,),
    "twice in one epoch": (1, 3),
    "twice in the second, and at its end": (7, 10, 12),
}


class Paired(Dataset[Any]):
    """Fetches whole batches."""

    def __len__(self) -> int:
        return 22

    def __getitems__(self, of: list[int]) -> list[list[float]]:
        drawn = noise()
        return [[index, *drawn] for index in of]


class OwnNoise(Noisy):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.transforms = [np.random.default_rng(3), {"a": random.Random(3)}]
        self.generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        rng: Any = self.transforms
        drawn = torch.rand((), generator=self.generator)
        return torch.tensor([index, rng[0].random(), rng[1]["a"].random(), float(drawn)])


class OwnNoiseStream(NoisyStream):
    """Draws its samples from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def _sample(self, buffer: list[int]) -> torch.Tensor:
        return torch.tensor([buffer.pop(int(self.rng.integers(len(buffer)))), *noise()])


class Epochs(IterableDataset[torch.Tensor]):
    """Orders its samples by the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = np.random.default_rng(self.epoch).permutation(23)
        info = get_worker_info()
        for index in order if info is None else order[info.id :: info.num_workers]:
            yield torch.tensor([index, self.epoch, *noise()])


class Unending(RandomSampler):
    """Draws for ever."""

    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(22)
            yield int(torch.randint(22, ()))


class ByLength(BatchSampler):
    """Batches of samples that go together, in an order of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        random.shuffle(batches)
        yield from batches


def collate_at_random(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(())


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0, 2.0] * 11, 22)


MAPS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"dataset": Noisy()},
    "shuffled": lambda: {"dataset": Noisy(), "shuffle": True},
    "with a generator": lambda: {
        "dataset": Noisy(),
        "shuffle": True,
        "generator": torch.Generator().manual_seed(random.randrange(99)),
    },
    "drop_last": lambda: {"dataset": Noisy(27), "shuffle": True, "drop_last": True},
    "subset": lambda: {"dataset": Noisy(), "sampler": SubsetRandomSampler(range(22))},
    "weighted": lambda: {"dataset": Noisy(), "sampler": weighted()},
    "unending": lambda: {"dataset": Noisy(), "sampler": Unending(range(22))},
    "batch sampler": lambda: {
        "dataset": Noisy(),
        "batch_size": 1,
        "batch_sampler": ByLength(range(22), 4, drop_last=False),
    },
    "batches at once": lambda: {"dataset": Paired(), "collate_fn": torch.tensor, "shuffle": True},
    "collate_fn": lambda: {"dataset": Noisy(), "collate_fn": collate_at_random},
    "unbatched": lambda: {"dataset": Noisy(6), "batch_size": None, "shuffle": True},
    "own generators": lambda: {"dataset": OwnNoise(), "shuffle": True},
}
STREAMS: dict[str, Callable[[], dict[str, Any]]] = {
    "stream": lambda: {"dataset": NoisyStream()},
    "stream with a generator": lambda: {"dataset": OwnNoiseStream()},
    "stream by epoch": lambda: {"dataset": Epochs()},
    "stream, drop_last": lambda: {"dataset": NoisyStream(27), "drop_last": True},
    "stream, unbatched": lambda: {"dataset": NoisyStream(6), "batch_size": None},
}
PLAIN: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.full((2,), float(n)) for n in range(6)],
    "function": lambda: lambda: (torch.tensor(noise()) for _ in range(6)),
    "range": lambda: range(6),
    "stream alone": lambda: NoisyStream(6),
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("kind", [*MAPS, *STREAMS])
def test_in_the_training_process(kind: str, cuts: tuple[int, ...]) -> None:
    def make() -> ResumableLoader:
        return loader_of(**{**MAPS, **STREAMS}[kind](), seed=7)

    def draw() -> None:
        """Programs stand elsewhere, and what the loader is given may be otherwise drawn."""
        torch.rand(5)
        random.random()
        np.random.rand()

    whole = take(make(), 15)
    before = generator_states()
    assert same(by_parts(make, cuts, 15, draw), whole)
    torch.manual_seed(0)
    before = generator_states()
    loader = make()
    after = generator_states() if kind == "with a generator" else before
    take(loader, 7)
    assert generator_states() == after, "nobody else's generators move"


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("kind", PLAIN)
def test_of_a_plain_iterable(kind: str, cuts: tuple[int, ...]) -> None:
    def make() -> ResumableLoader:
        return ResumableLoader(PLAIN[kind](), seed=7)

    before = generator_states()
    whole = [(epoch, torch.as_tensor(batch)) for epoch, batch in take(make(), 15)]
    found = [(epoch, torch.as_tensor(batch)) for epoch, batch in by_parts(make, cuts, 15)]
    assert same(found, whole)
    assert generator_states() == before


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(1, 6), (7, 10, 12)], ids=str)
@pytest.mark.parametrize("kind", ["shuffled", "own generators", *STREAMS])
@pytest.mark.parametrize("persistent", [False, True], ids=["anew", "persistent"])
def test_with_workers(kind: str, cuts: tuple[int, ...], persistent: bool) -> None:
    def make() -> ResumableLoader:
        given = {**MAPS, **STREAMS}[kind]()
        return loader_of(**given, seed=7, num_workers=2, persistent_workers=persistent)

    before = generator_states()
    whole = take(make(), 15)
    assert same(by_parts(make, cuts, 15), whole)
    assert generator_states() == before
    if kind in MAPS:
        assert same(whole, take(loader_of(**MAPS[kind](), seed=7), 15)), "workers do not matter"


def test_two_workers_quickly() -> None:
    """Of the slow tests above one case each."""

    def make(dataset: Any) -> ResumableLoader:
        return loader_of(dataset, num_workers=2)

    for dataset in (Noisy(), NoisyStream()):
        loader = make(dataset)
        whole = take(loader, 8)
        assert same(by_parts(lambda dataset=dataset: make(dataset), (3,), 8), whole)  # type: ignore[misc]


@pytest.mark.slow
def test_spawned_workers() -> None:
    def make() -> ResumableLoader:
        return loader_of(Noisy(), num_workers=2, multiprocessing_context="spawn")

    assert same(by_parts(make, (3,), 7), take(loader_of(Noisy()), 7))


def test_epochs_and_seeds_and_batches_are_drawn_apart() -> None:
    first = take(loader_of(Noisy(), shuffle=True), 12)
    assert not torch.equal(first[0][1][:, 0], first[6][1][:, 0])
    drawn = {float(sample[1]) for _, batch in first for sample in batch}
    assert len(drawn) == 44
    other = take(loader_of(Noisy(), shuffle=True, seed=1), 12)
    assert drawn.isdisjoint({float(sample[1]) for _, batch in other for sample in batch})
    ranks = [take(loader_of(Noisy(), rank=rank, world=2), 3) for rank in (0, 1)]
    noises = [{float(sample[1]) for _, batch in taken for sample in batch} for taken in ranks]
    assert noises[0].isdisjoint(noises[1])


def test_a_map_style_dataset_is_not_replayed() -> None:
    class Counting(Noisy):
        asked = 0

        def __getitem__(self, index: int) -> torch.Tensor:
            Counting.asked += 1
            return super().__getitem__(index)

    loader = loader_of(Counting(), shuffle=True)
    take(loader, 4)
    state = loader.state_dict()
    Counting.asked = 0
    resumed = loader_of(Counting(), shuffle=True)
    resumed.load_state_dict(state)
    take(resumed, 1)
    assert Counting.asked == 4


def test_what_a_dataset_holds_is_put_back() -> None:
    """Whoever else draws from a generator of a dataset draws the same with and without a loader."""
    for dataset in (OwnNoise(), OwnNoiseStream()):
        rng: Any = dataset.rng if isinstance(dataset, OwnNoiseStream) else dataset.transforms[0]
        before = rng.bit_generator.state
        take(loader_of(dataset), 8)
        assert rng.bit_generator.state == before


def test_another_bit_generator_of_numpy() -> None:
    there: Any = np.random.get_bit_generator()
    whole = take(loader_of(Noisy()), 4)
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        before = str(np.random.get_state(legacy=False))
        found = by_parts(lambda: loader_of(Noisy()), (2,), 4)
        assert str(np.random.get_state(legacy=False)) == before
        assert same(found, take(loader_of(Noisy()), 4))
        assert not same(found, whole)
    finally:
        np.random.set_bit_generator(there)


@pytest.mark.slow
def test_worker_init_fn_sees_its_dataset_and_is_called_after_the_seeds() -> None:
    seen = []

    def begin(worker: int) -> None:
        info: Any = get_worker_info()
        info.dataset.length = 6 + 2 * worker + random.randrange(2)

    def make(dataset: Any, **options: Any) -> ResumableLoader:
        return loader_of(dataset, num_workers=2, worker_init_fn=begin, batch_size=2, **options)

    for options in ({}, {"persistent_workers": True}):
        whole = take(make(NoisyStream(), **options), 11)
        assert same(by_parts(lambda o=options: make(NoisyStream(), **o), (5, 7), 11), whole)  # type: ignore[misc]
        seen.append(indices(batch for _, batch in whole))
    assert max(seen[0]) < 9


def test_a_sampler_that_gives_another_order_is_found() -> None:
    class Unsteady(RandomSampler):
        turn = 0

        def __iter__(self) -> Iterator[int]:
            Unsteady.turn += 1
            return iter(range(Unsteady.turn, Unsteady.turn + len(self)))

    loader = loader_of(Noisy(), sampler=Unsteady(range(20)))
    take(loader, 2)
    resumed = loader_of(Noisy(), sampler=Unsteady(range(20)))
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="another order for epoch 0"):
        take(resumed, 1)


def test_it_is_a_data_loader_of_torch_that_carries_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a user gave is what it has."""
    given = DataLoader(
        Noisy(), num_workers=2, prefetch_factor=3, timeout=9, persistent_workers=True
    )
    made: list[Any] = []
    init = DataLoader.__init__

    def recorded(loader: Any, *args: Any, **options: Any) -> None:
        made.append(loader)
        init(loader, *args, **options)

    monkeypatch.setattr(DataLoader, "__init__", recorded)
    ResumableLoader(given).state_dict()
    (inner,) = made
    for name in ("num_workers", "prefetch_factor", "timeout", "persistent_workers", "pin_memory"):
        assert getattr(inner, name) == getattr(given, name)
