"""Order of an epoch: the output of a ``DataLoader``'s samplers, and its division among ranks.

A sampler is asked once for each epoch, with generators seeded by the epoch, and its output is
divided among the ranks here. So the order can be entered at any place, by any number of ranks.

Random numbers for data: generators are seeded for each batch and put back afterwards.

Data are drawn from the shared generators of Python, NumPy and torch, and from those that datasets,
samplers and collate functions hold. Each is seeded before a batch is made, so that the batch
depends only on its place, and put back afterwards, so that training draws the same numbers with and
without a resume.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import random
import types
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from everstep.errors import StateError
from everstep.state.positions import length_of
from everstep.state.values.generators import RngStates, set_state, state_of

KeyItem = int | str
_LONG = 1000  # collections with more members are data; generators are not looked for in them
_OPAQUE = (torch.Tensor, np.ndarray, types.ModuleType, type, str, bytes, int, float)


def number(*key: KeyItem) -> int:
    """Return a seed of 64 bits that depends on all items of ``key``."""
    return int.from_bytes(_digest(key)[:8], "little")


def _digest(key: Sequence[KeyItem]) -> bytes:
    # repr() keeps the items of a key apart: ("a", "bc") and ("ab", "c") get different digests.
    return hashlib.blake2b(repr(key).encode(), digest_size=32).digest()


def generators_in(*holders: object) -> list[Any]:
    """Return the generators reachable from ``holders``, in a deterministic order.

    Searched are attributes, members of small collections, arguments of partial functions, and
    closures.
    """
    found: list[Any] = []
    seen: set[int] = set()
    # A stack: reversed, so that members are visited in their own order.
    todo = list(reversed(holders))
    while todo:
        value = todo.pop()
        if isinstance(value, _OPAQUE) or value is None or id(value) in seen:
            continue
        seen.add(id(value))
        if _can_be_seeded(value):
            found.append(value)
        else:
            todo += reversed(_members_of(value))
    return found


def _can_be_seeded(value: object) -> bool:
    if isinstance(value, torch.Generator):  # an accelerator's generator is left to the program
        return value.device.type == "cpu"
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    return isinstance(value, (np.random.Generator, np.random.RandomState))


def _members_of(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _LONG else []
    if isinstance(value, (list, tuple)):
        return list(value) if len(value) <= _LONG else []
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        return [cell.cell_contents for cell in cells if _is_full(cell)]
    found = getattr(value, "__dict__", None)
    return list(found.values()) if isinstance(found, dict) else []


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # of a name that has no value yet
        return False
    return True


class Held:
    """Generators that some objects hold.

    Args:
        holders: searched once, on construction.
    """

    def __init__(self, *holders: object) -> None:
        self._found = generators_in(*holders)
        self._first = self.states()

    def states(self) -> list[Any]:
        """Return their states."""
        return [state_of(generator) for generator in self._found]

    def put_back(self, states: Sequence[Any]) -> None:
        """Set them to ``states``."""
        for generator, state in zip(self._found, states, strict=True):
            set_state(generator, state)

    def rewind(self) -> None:
        """Set them to their states on construction."""
        self.put_back(self._first)

    def seed(self, *key: KeyItem) -> None:
        """Seed each of them by ``key`` and its place."""
        for place, generator in enumerate(self._found):
            _seed(generator, number("held", place, *key))


class Draws:
    """The generators of the process: Python's, NumPy's and torch's for the CPU.

    Args:
        holders: objects whose generators are seeded and put back along with them.
    """

    def __init__(self, *holders: object) -> None:
        self._held = Held(*holders)

    def seed(self, *key: KeyItem) -> None:
        """Seed all of them by ``key``."""
        digest = _digest(key)
        random.seed(int.from_bytes(digest[:16], "little"))
        # Not torch.manual_seed(), which seeds the generators of accelerators, too.
        torch.default_generator.manual_seed(int.from_bytes(digest[16:24], "little"))
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in the stubs
        if isinstance(bits, np.random.MT19937):
            np.random.seed(np.frombuffer(digest, np.uint32))
        else:
            state = type(bits)(int.from_bytes(digest, "little")).state
            # Without the second value of an earlier normal draw, which NumPy stores beside the
            # generator.
            np.random.set_state({**state, "has_gauss": 0, "gauss": 0.0})
        self._held.seed(*key)

    def states(self) -> tuple[RngStates, list[Any]]:
        """Return the states of all of them."""
        return RngStates.now(devices=False), self._held.states()

    def put_back(self, states: tuple[RngStates, list[Any]]) -> None:
        """Set all of them to ``states``."""
        of_process, held = states
        of_process.put_back()
        self._held.put_back(held)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put all of them back at the end of the block."""
        states = self.states()
        try:
            yield
        finally:
            self.put_back(states)

    @contextmanager
    def under(self, *key: KeyItem) -> Iterator[None]:
        """Seed all of them by ``key`` for the block, then put them back."""
        with self.kept():
            self.seed(*key)
            yield


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, np.random.RandomState):
        # A RandomState takes words of 32 bits.
        generator.seed([seed & 0xFFFFFFFF, seed >> 32])
    else:
        generator.seed(seed)


_SHARDED = (
    "num_replicas",
    "world_size",
    "num_processes",
    "rank",
)  # attributes of samplers that divide by ranks


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
