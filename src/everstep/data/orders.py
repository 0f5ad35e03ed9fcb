"""Order of an epoch: the output of a ``DataLoader``'s samplers, and its division among ranks.

A sampler is asked once for each epoch, with generators seeded by the epoch, and its output is
divided among the ranks here. So the order can be entered at any place, by any number of ranks.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from everstep.data.draws import Draws
from everstep.errors import StateError
from everstep.state.loaders.positions import length_of

_SHARDED = ("num_replicas", "world_size", "rank")  # attributes of samplers that divide by ranks


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of several.

    Attributes:
        rank: from 0.
        world: number of ranks.
    """

    rank: int
    world: int


def set_epoch_of(target: object, epoch: int) -> None:
    """Set the epoch of an object, if it has a ``set_epoch``."""
    tell = getattr(target, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def _is_sharded(sampler: object) -> bool:
    """Return True if a sampler, or one inside of it, divides its samples among ranks itself."""
    while sampler is not None:
        if any(hasattr(sampler, name) for name in _SHARDED):
            return True
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
    return False


class Samplers:
    """Sampler of a ``DataLoader`` over a map-style dataset, and the way its batches are made.

    Units are divided among ranks: indices of samples, or whole batches if a batch sampler makes
    them in its own way.

    Args:
        loader: the user's loader.
        place: this rank, unless the sampler has its own.

    Attributes:
        sampler: the sampler that gives the units.
        place: the rank that the order is divided for.
        deals_itself: the sampler gives this rank's share only; the shares of other ranks are
            unknown.
    """

    def __init__(self, loader: DataLoader[Any], place: Place) -> None:
        batches = loader.batch_sampler
        if type(batches) is BatchSampler:
            self.sampler: Any = batches.sampler
            self._size: int | None = batches.batch_size
            self._drops = bool(batches.drop_last)
        else:
            self.sampler = loader.sampler if batches is None else batches
            self._size = None
            self._drops = False
        self._evenly = self._drops  # shares are not padded: an incomplete last round is dropped
        self._told = (self.sampler, batches, getattr(batches, "sampler", None))
        self._spread = isinstance(self.sampler, DistributedSampler) and (
            type(self.sampler).__iter__ is DistributedSampler.__iter__
        )
        if self._spread:
            place = Place(self.sampler.rank, self.sampler.num_replicas)
            self._evenly = self.sampler.drop_last
        self.deals_itself = not self._spread and _is_sharded(self.sampler)
        self.place = place

    @property
    def step(self) -> int:
        """Units of a batch of one rank."""
        return self._size or 1

    def __len__(self) -> int:
        """Return the number of batches that one rank has in a complete epoch.

        Raises:
            TypeError: the sampler has no length.
        """
        if self._spread:
            return self._count(self.sampler.num_samples)
        if self.deals_itself:
            return self._count(len(self.sampler))
        return self._count(self._share(len(self.sampler)))

    def order(self, seed: int, epoch: int) -> Order:
        """Ask the sampler for the order of an epoch."""
        for one in self._told:
            set_epoch_of(one, epoch)
        if length_of(self.sampler) is None:
            return Order(self, None, ("order", seed, epoch))
        if type(self.sampler) is SequentialSampler:
            return Order(self, range(len(self.sampler)), ())
        asked: Iterable[Any] = self.sampler
        if self._spread:
            # A copy that gives the order for all ranks; the user's sampler keeps its rank.
            whole: Any = copy.copy(self.sampler)
            whole.num_replicas = 1
            whole.rank = 0
            whole.drop_last = False
            whole.num_samples = whole.total_size = len(whole.dataset)
            asked = whole
        with Draws(self.sampler).under("order", seed, epoch):
            units = list(asked)
        return Order(self, units, ())

    def _share(self, units: int) -> int:
        """Return the number of units of one rank."""
        world = self.place.world
        return units // world if self._evenly else -(-units // world)

    def _count(self, units: int) -> int:
        """Return the number of batches in a number of units of one rank."""
        return units // self.step if self._drops else -(-units // self.step)

    def left_after(self, units: int, begin: int, batches: int, world: int) -> int:
        """Return the first unit that none of ``world`` ranks has had.

        Args:
            units: number of units of the epoch.
            begin: first of the units that were divided among these ranks.
            batches: number of batches that each of them has had.
            world: number of these ranks.
        """
        dealt = units - begin
        share = dealt // world if self._evenly else -(-dealt // world)
        if batches >= self._count(share):
            return units
        return begin + batches * self.step * world

    def deal(self, units: Sequence[Any], begin: int) -> Sequence[Any]:
        """Return this rank's share of the units from ``begin`` on, divided as by
        ``DistributedSampler``.

        Ranks take turns; the last round is filled up from the front of the epoch's order, or
        dropped with ``drop_last``, so that all ranks have the same number.
        """
        if self.deals_itself or self.place.world == 1:
            return units[begin:] if begin else units
        rest = units[begin:]
        share = self._share(len(rest))
        total = share * self.place.world
        mine = rest[self.place.rank : total : self.place.world]
        if len(mine) == share:
            return mine
        missing = (self.place.rank + (share - 1) * self.place.world) - len(rest)
        return [*mine, units[missing % len(units)]]

    def deal_lazily(self, units: Iterator[Any], begin: int) -> Iterator[Any]:
        """Yield this rank's share of units without a known end, divided as by :meth:`deal`."""
        world = 1 if self.deals_itself else self.place.world
        rank = 0 if self.deals_itself else self.place.rank
        front = list(itertools.islice(units, world))
        rest = itertools.islice(itertools.chain(front, units), begin, None)
        while part := list(itertools.islice(rest, world)):
            if len(part) < world and self._evenly:
                return
            yield [*part, *itertools.islice(itertools.cycle(front), world - len(part))][rank]

    def batches(self, units: Iterable[Any], first: int) -> Iterator[Any]:
        """Yield the indices of the batches of one rank's units, from batch ``first`` on."""
        if self._size is None:
            yield from itertools.islice(units, first, None)
            return
        left = itertools.islice(units, first * self._size, None)
        while batch := list(itertools.islice(left, self._size)):
            if len(batch) == self._size or not self._drops:
                yield batch

    def lazily(self, *key: int | str) -> Iterator[Any]:
        """Yield the sampler's output, drawn from generators of its own."""
        draws = Draws(self.sampler)
        with draws.under(*key):
            units = iter(self.sampler)
            own = draws.states()
        while True:
            # For each unit: between two of them the program draws from the same generators.
            with draws.kept():
                draws.put_back(own)
                try:
                    unit = next(units)
                except StopIteration:
                    return
                own = draws.states()
            yield unit


class Order:
    """Order of one epoch.

    Args:
        samplers: the samplers that give it.
        units: all units of the epoch; None: they have no known end, and are drawn under ``key``.
        key: key of the random numbers.
    """

    def __init__(
        self, samplers: Samplers, units: Sequence[Any] | None, key: tuple[int | str, ...]
    ) -> None:
        self._samplers = samplers
        self._units = units
        self._key = key

    @property
    def digest(self) -> str | None:
        """Digest that identifies the order; None: it has no known end."""
        units = self._units
        if units is None:
            return None
        try:
            data = repr(units).encode() if isinstance(units, range) else array("q", units).tobytes()
        except (TypeError, OverflowError):  # indices that are no numbers, or batches
            data = repr(units).encode()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    def left_after(self, begin: int, batches: int, world: int) -> int:
        """Return the first unit that none of ``world`` other ranks has had.

        Raises:
            StateError: only the sampler knows the shares of other ranks.
        """
        samplers = self._samplers
        if samplers.deals_itself:
            raise StateError(
                f"the epoch was begun by {world} rank(s), now {samplers.place.world}, and "
                f"{type(samplers.sampler).__name__} divides samples by itself: the rest of the "
                "epoch cannot be divided again",
                hint="continue with the same number of ranks, or begin an epoch with set_epoch()",
            )
        if self._units is None:
            return begin + batches * samplers.step * world
        return samplers.left_after(len(self._units), begin, batches, world)

    def batches(self, begin: int, first: int) -> Iterator[Any]:
        """Yield the indices of this rank's batches.

        Args:
            begin: first of the units to divide.
            first: first batch of these.
        """
        samplers = self._samplers
        mine: Iterable[Any]
        if self._units is None:
            mine = samplers.deal_lazily(samplers.lazily(*self._key), begin)
        else:
            mine = samplers.deal(self._units, begin)
        return samplers.batches(mine, first)
