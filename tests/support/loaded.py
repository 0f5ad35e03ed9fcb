"""What the tests of ``everstep.data`` load: samples that show how they were drawn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from everstep.data import ResumableLoader

__all__ = [
    "Noisy",
    "NoisyStream",
    "Taken",
    "by_parts",
    "generator_states",
    "noise",
    "same",
    "take",
]

Taken = list[tuple[int, torch.Tensor]]


def noise() -> list[float]:
    """A number of each generator of the process."""
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


class Noisy(Dataset[torch.Tensor]):
    """Map-style, augmented at random."""

    def __init__(self, length: int = 22) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *noise()])


class NoisyStream(IterableDataset[torch.Tensor]):
    """Iterable, dealt among workers, shuffled in a buffer, augmented at random."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        buffer: list[int] = []
        for index in range(first, self.length, step):
            buffer.append(index)
            if len(buffer) == 3:
                yield self._sample(buffer)
        while buffer:
            yield self._sample(buffer)

    def _sample(self, buffer: list[int]) -> torch.Tensor:
        return torch.tensor([buffer.pop(random.randrange(len(buffer))), *noise()])


def take(loader: ResumableLoader, count: int) -> Taken:
    """So many batches, over as many epochs as it takes, each with the number of its epoch."""
    found: Taken = []
    while len(found) < count:
        for batch in loader:
            found.append((loader.epoch, batch))
            if len(found) == count:
                break
    return found


def by_parts(make: Any, cuts: tuple[int, ...], count: int, around: Any = lambda: None) -> Taken:
    """The same batches by several programs, of which each is ended after some batches."""
    found: Taken = []
    state = None
    for cut in (*cuts, count):
        around()
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
        found += take(loader, cut - len(found))
        state = loader.state_dict()
    return found


def same(one: Taken, other: Taken) -> bool:
    """Whether both have the same bits, and epochs."""
    return len(one) == len(other) and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True)
    )


def generator_states() -> list[Any]:
    """The states of the generators of the process."""
    numpy: Any = np.random.get_state(legacy=False)
    return [
        random.getstate(),
        torch.get_rng_state().tolist(),
        str(numpy),
        numpy["state"]["key"].tolist(),
    ]


def indices(batches: Any) -> list[int]:
    """The samples of some batches of :class:`Noisy`."""
    return [int(sample[0]) for batch in batches for sample in batch]


def loader_of(dataset: Any, **options: Any) -> ResumableLoader:
    """A resumable ``DataLoader`` with these options, and batches of four."""
    given = {name: options.pop(name) for name in ("seed", "rank", "world") if name in options}
    return ResumableLoader(DataLoader(dataset, **{"batch_size": 4, **options}), **given)
