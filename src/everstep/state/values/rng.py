"""The random number generators of the process: always part of the state."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from everstep.seams.fingerprint import cuda_in_use

__all__ = ["RngStates", "collect_rng", "other_generator", "restore_rng", "rng_kept"]


class RngStates(NamedTuple):
    """States of Python's, NumPy's and torch's generators, and of every CUDA device in use; None:
    none is. Nobody else has any of these objects."""

    python: tuple[Any, ...]
    numpy: Mapping[str, Any]
    torch: torch.Tensor
    cuda: list[torch.Tensor] | None

    @classmethod
    def now(cls) -> RngStates:
        """As they are."""
        cuda = list(torch.cuda.get_rng_state_all()) if cuda_in_use() else None
        numpy = np.random.get_state(legacy=False)
        return cls(random.getstate(), numpy, torch.get_rng_state(), cuda)

    @property
    def is_usual(self) -> bool:
        """Whether they need not be looked through for what cannot be stored."""
        gauss = type(self.python[2])
        return self.numpy["bit_generator"] == "MT19937" and gauss in (float, type(None))

    def same(self, other: RngStates) -> bool:
        """Return whether nothing was drawn between these states and others."""
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
        """The states as they are stored.

        Args:
            of_torch, of_cuda: what stands there for the tensors.
        """
        version, words, gauss = self.python
        # An array instead of a tuple of 625 integers, which costs milliseconds to take apart.
        python = {"version": version, "words": _as_array(words), "gauss": gauss}
        state: dict[str, Any] = {"python": python, "numpy": self.numpy, "torch": of_torch}
        return state if self.cuda is None else {**state, "cuda": of_cuda}


def collect_rng() -> dict[str, Any]:
    """States of all generators as they are now, as they are stored."""
    states = RngStates.now()
    return states.tree(states.torch, states.cuda)


def _as_array(words: Sequence[int]) -> np.ndarray[Any, Any]:
    """32-bit words as an array; twice as fast as ``np.array``."""
    return np.frombuffer(array("I", words), np.uint32)


def other_generator(state: Any) -> str | None:
    """Why NumPy's generator cannot take up the state that was saved of it; None: it can."""
    numpy = state.get("numpy") if isinstance(state, dict) else None
    saved = numpy.get("bit_generator") if isinstance(numpy, dict) else None
    mine = np.random.get_state(legacy=False)["bit_generator"]
    if not isinstance(saved, str) or saved == mine:
        return None
    return (
        f"saved of a {saved}, live is a {mine}: call numpy.random.set_bit_generator() before "
        "resume(), as the program that saved it has"
    )


def restore_rng(state: dict[str, Any]) -> list[str]:
    """Puts the generators back.

    Returns:
        What could not be restored on this machine, in words; such a resume is not exact.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    saved = state.get("cuda", [])
    here = torch.cuda.device_count() if saved and torch.cuda.is_available() else 0
    if here:
        # Before that torch would only note the states down, and when CUDA comes into use, put
        # behind them what torch.manual_seed() has noted, however long before.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    for device in range(min(len(saved), here)):
        torch.cuda.set_rng_state(saved[device], device)
    if here < len(saved):
        return [f"RNG of {len(saved) - here} CUDA device(s) that are not here"]
    return []


@contextmanager
def rng_kept() -> Iterator[None]:
    """Put the generators back as they were at the end of the block, whatever it has drawn."""
    states = collect_rng()
    try:
        yield
    finally:
        restore_rng(states)
