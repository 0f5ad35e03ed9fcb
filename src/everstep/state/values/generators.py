"""Generators of random numbers as parts of the state: torch's, NumPy's and Python's.

A generator's state is taken when the state is surveyed, and set in the generator that is there
when it is restored, so that whoever holds the generator draws on from there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from everstep.errors import FormatError, UnavailableError

__all__ = [
    "GeneratorState",
    "is_generator",
    "kind_of",
    "new_generator",
    "set_state",
    "state_of",
    "why_not_made",
]

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_HOSTILE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """The state of a generator, as it is stored.

    Attributes:
        kind: which generator can take it, as :func:`kind_of` names it.
        data: the state, encoded by :mod:`.objects`.
    """

    kind: str
    data: bytes

    def __repr__(self) -> str:
        return f"<state of {self.kind}, {len(self.data)} bytes>"


def is_generator(value: object) -> bool:
    """Return whether a value is a generator whose state can be taken and set again."""
    kind = type(value)
    if kind is np.random.Generator or kind is np.random.RandomState:
        return kind_of(value).split()[-1] in _BIT_GENERATORS
    return kind is torch.Generator or kind is random.Random


def kind_of(generator: Any) -> str:
    """Return a name that two generators share if one can take the state of the other."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator {type(generator.bit_generator).__name__}"
    if isinstance(generator, np.random.RandomState):
        return f"numpy.random.RandomState {generator.get_state(legacy=False)['bit_generator']}"
    return "random.Random"


def state_of(generator: Any) -> Any:
    """Return the state of a generator as plain data, which later draws do not change."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().copy()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    version, words, gauss = generator.getstate()
    return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}


def set_state(generator: Any, state: Any) -> None:
    """Set what :func:`state_of` gave for a generator of the same kind.

    Raises:
        FormatError: it is no state of such a generator.
    """
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.from_numpy(state.copy()))
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            words = tuple(state["words"].tolist())
            generator.setstate((state["version"], words, state["gauss"]))
    except _HOSTILE as error:
        raise FormatError(f"no state of a {kind_of(generator)}: {error!r}") from error


def new_generator(kind: str) -> Any:
    """Make a generator of this kind.

    Raises:
        UnavailableError: this machine has none of this kind.
    """
    if reason := why_not_made(kind):
        raise UnavailableError(reason)
    family, _, detail = kind.partition(" ")
    if family == "torch.Generator":
        return torch.Generator(device=detail)
    if family == "random.Random":
        return random.Random()
    bits = getattr(np.random, detail)()
    if family == "numpy.random.Generator":
        return np.random.Generator(bits)
    return np.random.RandomState(bits)


def why_not_made(kind: str) -> str | None:
    """Return why no generator of this kind can be made on this machine; None: one can."""
    family, _, detail = kind.partition(" ")
    if family == "random.Random":
        return None
    if family == "torch.Generator":
        try:
            torch.Generator(device=detail)
        except (RuntimeError, TypeError) as error:
            return f"no {kind} can be made on this machine: {str(error).splitlines()[0]}"
        return None
    if family in ("numpy.random.Generator", "numpy.random.RandomState"):
        return None if detail in _BIT_GENERATORS else f"numpy has no bit generator {detail!r}"
    return f"{kind!r} names no random generator that this version of everstep knows"
