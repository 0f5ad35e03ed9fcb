"""State of the random generators in the worker processes of a loader.

torchdata's workers save the state of their dataset with each batch, if the dataset has
``state_dict()`` and ``load_state_dict()``, but not the state of the generators that its items draw
from. In a worker, everstep adds these two methods to the dataset. They save the worker's
generators, if anything was drawn from them since the worker was seeded. Nothing changes in the
training process, and no number is drawn.
"""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

__all__ = ["WorkerGenerators"]

_GENERATORS = "everstep/generators"
_DATASET = "everstep/dataset"


class WorkerGenerators:
    """Initialize a worker; replaces a loader's ``worker_init_fn``, which is called first.

    Args:
        init: the loader's own ``worker_init_fn``; None: it has none.
    """

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self.init = init

    def __call__(self, worker_id: int) -> None:
        if self.init is not None:
            self.init(worker_id)
        info = get_worker_info()
        dataset: Any = None if info is None else info.dataset
        own = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        if isinstance(dataset, IterableDataset) and not own:
            return  # torchdata fetches its batches again, which repeats the same draws
        with contextlib.suppress(AttributeError, TypeError):  # a list, a range: they draw nothing
            state = _DatasetState(dataset if own else None)
            dataset.state_dict = state.state_dict
            dataset.load_state_dict = state.load_state_dict


class _DatasetState:
    """State of a dataset and of the generators of this process.

    Args:
        dataset: the dataset; None: it has no state of its own.
    """

    def __init__(self, dataset: Any) -> None:
        self._get = None if dataset is None else dataset.state_dict
        self._set = None if dataset is None else dataset.load_state_dict
        self._seeded = _generators()
        self._restored: dict[str, Any] = {}
        self._pending: Any = None

    def state_dict(self) -> Any:
        # torchdata calls this after it has made the dataset's iterator, which may draw, and before
        # the first batch. Restoring the generators any earlier would be undone by those draws.
        restored = self._restored
        self._restored = {}
        _put_back(restored)
        # A dataset may apply a loaded state only at its first item, as those of Hugging Face do.
        # Until then it would return the state of a fresh epoch, and training that is killed before
        # this worker's first batch would continue there.
        mine = self._pending
        self._pending = None
        if mine is None and self._get is not None:
            mine = self._get()
        now = _generators()
        drawn = {name: state for name, state in now.items() if state != self._seeded[name]}
        return {_GENERATORS: drawn, _DATASET: mine} if drawn else mine

    def load_state_dict(self, state: Any) -> None:
        if isinstance(state, dict) and _GENERATORS in state:
            self._restored = state[_GENERATORS]
            state = state[_DATASET]
        if self._set is not None and state is not None:
            self._set(state)
            self._pending = state


def _generators() -> dict[str, Any]:
    """Return the states of the generators of this process, as plain data that can be compared."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    found = {
        "python": [version, array("I", words).tobytes(), gauss],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if isinstance(numpy, dict) and numpy["bit_generator"] == "MT19937":
        at = numpy["state"]
        found["numpy"] = [at["key"].tobytes(), at["pos"], numpy["has_gauss"], numpy["gauss"]]
    return found


def _put_back(states: dict[str, Any]) -> None:
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(array("I", words)), gauss))
    if "numpy" in states:
        key, position, has_gauss, gauss = states["numpy"]
        words = np.frombuffer(key, np.uint32)
        np.random.set_state(("MT19937", words, position, has_gauss, gauss))
    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
