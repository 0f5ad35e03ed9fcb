"""Random numbers for data: generators are seeded for each batch and put back afterwards.

Data are drawn from the shared generators of Python, NumPy and torch, and from those that datasets,
samplers and collate functions hold. Each is seeded before a batch is made, so that the batch
depends only on its place, and put back afterwards, so that training draws the same numbers with and
without a resume.
"""

from __future__ import annotations

import functools
import hashlib
import random
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

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
