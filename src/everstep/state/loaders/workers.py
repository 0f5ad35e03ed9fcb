"""State of the random generators in the worker processes of a loader.

torchdata's workers save the state of their dataset with each batch, if the dataset has
``state_dict()`` and ``load_state_dict()``, but not the state of the generators that its items draw
from. In a worker, everstep adds these two methods to the dataset. They save the worker's
generators, if anything was drawn from them since the worker was seeded. Nothing changes in the
training process, and no number is drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from everstep.state.values.generators import RngStates, restore_rng

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
        self._seeded = RngStates.now(devices=False)
        self._restored: dict[str, Any] | None = None
        self._pending: Any = None

    def state_dict(self) -> Any:
        # torchdata calls this after it has made the dataset's iterator, which may draw, and before
        # the first batch. Restoring the generators any earlier would be undone by those draws.
        if self._restored is not None:
            restore_rng(self._restored)
            self._restored = None
        # A dataset may apply a loaded state only at its first item, as those of Hugging Face do.
        # Until then it would return the state of a fresh epoch, and training that is killed before
        # this worker's first batch would continue there.
        mine = self._pending
        self._pending = None
        if mine is None and self._get is not None:
            mine = self._get()
        now = RngStates.now(devices=False)
        return mine if now.same(self._seeded) else {_GENERATORS: now.plain(), _DATASET: mine}

    def load_state_dict(self, state: Any) -> None:
        if isinstance(state, dict) and _GENERATORS in state:
            self._restored = state[_GENERATORS]
            state = state[_DATASET]
        if self._set is not None and state is not None:
            self._set(state)
            self._pending = state
