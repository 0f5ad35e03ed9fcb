"""A loader that saves its position, as torchdata's StatefulDataLoader does in one process."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

__all__ = ["StatefulLoader"]


class StatefulLoader(DataLoader[Any]):
    """Makes its iterator when it is iterated, or asked for its state before that."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._iterator: Any = None
        self.next_iter_state: dict[str, Any] | None = None
        self._made_for_state = False

    def _get_iterator(self) -> Any:
        iterator = _Iterator(self)
        state, self.next_iter_state = self.next_iter_state, None
        if state is not None:
            iterator.restore(state)
        return iterator

    def __iter__(self) -> Any:
        if not self._made_for_state:
            self._iterator = self._get_iterator()
        self._made_for_state = False
        if self._iterator.state()["_iterator_finished"]:
            self._iterator = self._get_iterator()
        return self._iterator

    def state_dict(self) -> dict[str, Any]:
        if self._iterator is None:
            self._iterator, self._made_for_state = self._get_iterator(), True
        return self._iterator.state()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._iterator, self._made_for_state = None, False
        if state_dict:
            self.next_iter_state = state_dict


class _Iterator(_SingleProcessDataLoaderIter):
    def __init__(self, loader: StatefulLoader) -> None:
        super().__init__(loader)
        self._sampler_iter_yielded, self._finished = 0, False

    def state(self) -> dict[str, Any]:
        return {
            "_num_yielded": self._num_yielded,
            "_sampler_iter_yielded": self._sampler_iter_yielded,
            "_iterator_finished": self._finished,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._sampler_iter_yielded = self._num_yielded = state["_num_yielded"]
        self._finished = state["_iterator_finished"]
        self._sampler_iter = itertools.islice(self._index_sampler, state["_num_yielded"], None)

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
        self._sampler_iter_yielded += 1
        return index

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self._finished = True
            raise


COUNT, BATCH = 20, 4


EPOCH = COUNT // BATCH


class Noisy(Dataset[torch.Tensor]):
    """Samples with a random part."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + 0.1 * torch.rand(2)
