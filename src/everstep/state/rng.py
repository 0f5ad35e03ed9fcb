"""The random number generators of the process: always part of the state."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from everstep.seams.fingerprint import cuda_in_use

__all__ = ["collect_rng", "restore_rng"]


def collect_rng() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators, and of every CUDA device in use."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        # An array instead of a tuple of 625 integers, which costs milliseconds to take apart.
        "python": {"version": version, "words": _as_array(words), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if cuda_in_use():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def _as_array(words: Sequence[int]) -> np.ndarray[Any, Any]:
    """32-bit words as an array; twice as fast as ``np.array``."""
    return np.frombuffer(array("I", words), np.uint32)


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
    for device in range(min(len(saved), here)):
        torch.cuda.set_rng_state(saved[device], device)
    if here < len(saved):
        return [f"RNG of {len(saved) - here} CUDA device(s) that are not here"]
    return []
