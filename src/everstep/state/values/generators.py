"""States of random generators: those of the process, and generator objects in plain data.

The generators of the process (Python, NumPy, torch, CUDA devices in use) are always part of the
state. The state of a generator object is taken when the state is surveyed, and set in the live
generator when it is restored, so that every holder of that generator continues from there.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from everstep.errors import FormatError, UnavailableError
from everstep.seams.fingerprint import cuda_in_use

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_HOSTILE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """Stored state of a generator object.

    Attributes:
        kind: kind of generator that can take the state, as :func:`kind_of` returns it.
        data: the state, encoded by :mod:`.objects`.
    """

    kind: str
    data: bytes

    def __repr__(self) -> str:
        return f"<state of {self.kind}, {len(self.data)} bytes>"


GENERATORS = frozenset((np.random.Generator, np.random.RandomState, torch.Generator, random.Random))
"""Types of generators whose state can be taken, if their algorithm is known."""


def is_generator(value: object) -> bool:
    """Return True if a value is a generator whose state can be taken and set again."""
    kind = type(value)
    if kind is np.random.Generator or kind is np.random.RandomState:
        return kind_of(value).split()[-1] in _BIT_GENERATORS
    return kind is torch.Generator or kind is random.Random


def kind_of(generator: Any) -> str:
    """Return the kind of a generator: generators of one kind can take each other's state."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator {type(generator.bit_generator).__name__}"
    if isinstance(generator, np.random.RandomState):
        return f"numpy.random.RandomState {generator.get_state(legacy=False)['bit_generator']}"
    return "random.Random"


def state_of(generator: Any) -> Any:
    """Return the state of a generator as plain data that later draws do not change."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().copy()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    version, words, gauss = generator.getstate()
    return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a generator to one that :func:`state_of` returned for the same kind.

    Raises:
        FormatError: the data is not a state of such a generator.
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
        raise FormatError(f"not a state of a {kind_of(generator)}: {error!r}") from error


def new_generator(kind: str) -> Any:
    """Create a generator of this kind.

    Raises:
        UnavailableError: this machine cannot create one.
    """
    family, _, detail = kind.partition(" ")
    if family == "random.Random":
        return random.Random()
    if family == "torch.Generator":
        try:
            return torch.Generator(device=detail)
        except (RuntimeError, TypeError) as error:
            why = str(error).splitlines()[0]
            raise UnavailableError(f"no {kind} can be made on this machine: {why}") from error
    numpys = {
        "numpy.random.Generator": np.random.Generator,
        "numpy.random.RandomState": np.random.RandomState,
    }
    if family not in numpys:
        raise UnavailableError(
            f"{kind!r} is not a random generator that this version of everstep supports"
        )
    if detail not in _BIT_GENERATORS:
        raise UnavailableError(f"numpy has no bit generator {detail!r}")
    return numpys[family](getattr(np.random, detail)())


def why_not_made(kind: str) -> str | None:
    """Return the reason why this machine cannot create a generator of this kind; None: it can."""
    try:
        new_generator(kind)
    except UnavailableError as error:
        return str(error)
    return None


class RngStates(NamedTuple):
    """States of the generators of Python, NumPy and torch, and of every CUDA device in use.

    The objects are not shared with the generators.

    Attributes:
        python: ``random.getstate()``.
        numpy: ``numpy.random.get_state(legacy=False)``.
        torch: state of the CPU generator, uint8.
        cuda: states by device; None: no CUDA device is in use.
    """

    python: tuple[Any, ...]
    numpy: Mapping[str, Any]
    torch: torch.Tensor
    cuda: list[torch.Tensor] | None

    @classmethod
    def now(cls, *, devices: bool = True) -> RngStates:
        """Take the current states.

        Args:
            devices: those of CUDA devices, too.
        """
        # get_rng_state_all() would initialise CUDA in a process that does not use it.
        cuda = list(torch.cuda.get_rng_state_all()) if devices and cuda_in_use() else None
        # The tuple of legacy=True exists for MT19937 only.
        numpy = np.random.get_state(legacy=False)
        return cls(random.getstate(), numpy, torch.get_rng_state(), cuda)

    def put_back(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # type: ignore[arg-type]
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)

    @property
    def is_usual(self) -> bool:
        """Return True if the states are of the usual types, so that they need no check for storable
        leaves."""
        gauss = type(self.python[2])
        return self.numpy["bit_generator"] == "MT19937" and gauss in (float, type(None))

    def same(self, other: RngStates) -> bool:
        """Return True if no numbers were drawn between these states and others."""
        mine = self.numpy["state"]
        theirs = other.numpy["state"]
        return (
            self.python == other.python
            and torch.equal(self.torch, other.torch)
            and all(np.array_equal(mine[key], theirs.get(key)) for key in mine)
            and self.numpy.get("gauss") == other.numpy.get("gauss")
            and len(self.cuda or ()) == len(other.cuda or ())
            and all(map(torch.equal, self.cuda or (), other.cuda or ()))
        )

    def tree(self, of_torch: object, of_cuda: object) -> dict[str, Any]:
        """Return the states in the form in which they are stored.

        Args:
            of_torch: value to store in place of torch's state.
            of_cuda: value to store in place of the states of CUDA devices.
        """
        version, words, gauss = self.python
        # An array instead of a tuple of 625 integers, which costs milliseconds to take apart; by
        # way of array(), twice as fast as np.array().
        words = np.frombuffer(array("I", words), np.uint32)
        python = {"version": version, "words": words, "gauss": gauss}
        state: dict[str, Any] = {"python": python, "numpy": self.numpy, "torch": of_torch}
        return state if self.cuda is None else {**state, "cuda": of_cuda}

    def plain(self) -> dict[str, Any]:
        """Return the states without those of devices, as plain data for :func:`restore_rng`."""
        return self._replace(cuda=None).tree(self.torch.numpy(), None)


def capture_rng() -> dict[str, Any]:
    """Return the current states of all generators of the process, in stored form."""
    states = RngStates.now()
    return states.tree(states.torch, states.cuda)


def numpy_rng_mismatch(state: Any) -> str | None:
    """Return the reason why NumPy's generator cannot take a saved state; None: it can."""
    numpy = state.get("numpy") if isinstance(state, dict) else None
    saved = numpy.get("bit_generator") if isinstance(numpy, dict) else None
    mine = np.random.get_state(legacy=False)["bit_generator"]
    if not isinstance(saved, str) or saved == mine:
        return None
    return (
        f"saved from a {saved}, but the live generator is a {mine}: call "
        "numpy.random.set_bit_generator() before resume(), as the saving program did"
    )


def restore_rng(state: dict[str, Any]) -> list[str]:
    """Set the generators of the process to saved states.

    Returns:
        Descriptions of the states that could not be restored on this machine; such a resume is not
            exact.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])
    of_torch = state["torch"]
    torch.set_rng_state(
        torch.from_numpy(of_torch.copy()) if isinstance(of_torch, np.ndarray) else of_torch
    )
    saved = state.get("cuda", [])
    here = torch.cuda.device_count() if saved and torch.cuda.is_available() else 0
    if here:
        # CUDA must be initialised first. Otherwise torch only queues the states, and when CUDA is
        # first used it applies a queued torch.manual_seed() after them, which overwrites them.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    for device in range(min(len(saved), here)):
        torch.cuda.set_rng_state(saved[device], device)
    if here < len(saved):
        return [f"RNG of {len(saved) - here} CUDA device(s) that this machine does not have"]
    return []


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the generators at the end of the block to their states at its beginning."""
    states = RngStates.now()
    try:
        yield
    finally:
        states.put_back()
