"""Datasets that make batches from tasks, in worker processes or in the training process.

The ``DataLoader`` that runs the workers sends them tasks instead of indices. A task names a batch
of an epoch; the worker seeds its generators for that batch and makes it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import Dataset, get_worker_info

from everstep.data.orders import Draws, Held, number, set_epoch_of
from everstep.state.values.generators import preserve_rng

Key = tuple[int, ...]


class Task(NamedTuple):
    """Request for a batch.

    Attributes:
        run: number of the iteration: a stream is opened once in each.
        epoch: epoch of the batch.
        number: number of the batch in the epoch. Worker w of W gets those with number % W == w.
        key: key of random numbers, besides the batch.
        index: the sampler's indices of the batch; None for a stream.
        is_void: no batch is requested; the task only keeps the order of workers.
        state: state of a stream's dataset to load first; None: open it anew.
    """

    run: int
    epoch: int
    number: int
    key: Key
    index: Any = None
    is_void: bool = False
    state: Any = None


class Batch(NamedTuple):
    """Result of a task.

    Attributes:
        is_filled: there is a batch; otherwise the task was void, or the stream has ended.
        data: the batch.
        state: state of the dataset after it, if requested.
    """

    is_filled: bool
    data: Any = None
    state: Any = None


_NOTHING = Batch(False)


def as_it_is(batch: Any) -> Any:
    """Return the argument: results of tasks are collated already."""
    return batch


def begin_worker(user_init: Callable[[int], object] | None, key: Key, worker: int) -> None:
    """Begin a worker process: seed it, and let the user's ``worker_init_fn`` see its dataset."""
    Draws().seed("worker", worker, *key)
    _show_dataset(number("worker", worker, *key))
    if user_init is not None:
        user_init(worker)


def _show_dataset(seed: int) -> None:
    """Make ``get_worker_info()`` return the user's dataset, and a seed that depends on the
    epoch."""
    info: Any = get_worker_info()
    wrapper = info.dataset
    shown = wrapper.dataset if isinstance(wrapper, (MapData, StreamData)) else wrapper
    # Private: get_worker_info() returns this variable, and torch has no function to set it.
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=info.id, num_workers=info.num_workers, seed=seed % (1 << 63), dataset=shown
    )


class _Data(Dataset[Any]):
    """Dataset that is indexed by tasks.

    Args:
        dataset: the user's dataset.
        collate: the user's ``collate_fn``.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self._collate = collate
        self._draws: Draws | None = None
        self._epoch: int | None = None

    def prepare(self) -> Draws:
        """Find the generators to draw from, once, in the process that draws."""
        if self._draws is None:
            self._draws = Draws(self.dataset, self._collate)
        return self._draws

    def _tell_epoch(self, epoch: int) -> None:
        """Set the dataset's epoch.

        In a worker that outlives epochs nothing else sets it. If all workers share the number (as
        with Hugging Face's datasets), it is set already, and must not be set twice.
        """
        if self._epoch == epoch:
            return
        self._epoch = epoch
        if get_worker_info() is None or getattr(self.dataset, "epoch", None) != epoch:
            set_epoch_of(self.dataset, epoch)


class MapData(_Data):
    """Map-style dataset: each batch is made independently.

    Args:
        dataset: the user's dataset.
        collate: the user's ``collate_fn``.
        in_batches: an index is a list of sample indices.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], in_batches: bool) -> None:
        super().__init__(dataset, collate)
        self._in_batches = in_batches

    def __getitem__(self, task: Task) -> Batch:
        if task.is_void:
            return _NOTHING
        with self.prepare().under("batch", task.epoch, task.number, *task.key):
            self._tell_epoch(task.epoch)
            return Batch(True, self._collate(self._samples(task.index)))

    def _samples(self, index: Any) -> Any:
        if not self._in_batches:
            return self.dataset[index]
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(index)
        return [self.dataset[one] for one in index]


class StreamData(_Data):
    """Iterable dataset: opened once in each iteration, and replayed up to the first requested
    batch, or restored there by its own state.

    Args:
        dataset: the user's dataset.
        collate: the user's ``collate_fn``.
        batch_size: samples of a batch; None: each sample is a batch.
        drop_last: skip a last batch with fewer samples.
        by_state: return the dataset's state with each batch.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        batch_size: int | None,
        drop_last: bool,
        by_state: bool,
    ) -> None:
        super().__init__(dataset, collate)
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._by_state = by_state
        self._run: int | None = None
        self._held = Held()
        self._held_states: list[Any] = []
        self._samples: Iterator[Any] = iter(())
        self._first_state: Any = None
        self._is_moved = False  # a state has been loaded
        self._is_ended = False

    def prepare(self) -> Draws:
        if self._draws is None:
            # The dataset's own generators may decide its order. They are not seeded, but begin
            # each epoch in their initial states.
            self._draws, self._held = Draws(self._collate), Held(self.dataset)
            self._first_state = self._state()
        return self._draws

    def __getitem__(self, task: Task) -> Batch:
        if task.is_void:
            return _NOTHING
        draws = self.prepare()
        with draws.kept(), self._own():
            if task.run != self._run:
                self._open(task, draws)
            # After the stream was opened, which may have replayed earlier batches with their seeds.
            draws.seed("batch", task.epoch, task.number, *task.key)
            found = self._take()
            if not found:
                return _NOTHING
            data = self._collate(found[0] if self._batch_size is None else found)
            return Batch(True, data, self._state())

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        """Continue the dataset's own generators from the stream's last state; put them back for
        other users."""
        before = self._held.states()
        if self._held_states:
            self._held.put_back(self._held_states)
        try:
            yield
        finally:
            self._held_states = self._held.states()
            self._held.put_back(before)

    def _open(self, task: Task, draws: Draws) -> None:
        self._run = task.run
        self._is_ended = False
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._held.rewind()
        draws.seed("open", worker, task.epoch, *task.key)
        if info is not None:
            _show_dataset(number("open", worker, task.epoch, *task.key))
        self._tell_epoch(task.epoch)
        # A dataset into which a state was loaded does not begin anew by itself.
        if task.state is not None or self._is_moved:
            state = self._first_state if task.state is None else task.state
            # A copy: a dataset may keep and change the object, and the first state is loaded
            # repeatedly.
            self.dataset.load_state_dict(copy.deepcopy(state))
            self._is_moved = True
        self._samples = iter(self.dataset)
        if task.state is not None:
            return
        # Worker w makes the batches w, w + W, ... : all before this one are replayed.
        # The caller does not put the generators of devices back, from which replayed samples may
        # draw.
        with preserve_rng() if info is None else contextlib.nullcontext():
            for batch in range(worker, task.number, workers):
                draws.seed("batch", task.epoch, batch, *task.key)
                if not self._take():
                    return

    def _take(self) -> list[Any]:
        """Take the samples of a batch; none: the stream has ended."""
        if self._is_ended:
            return []
        wanted = 1 if self._batch_size is None else self._batch_size
        found = list(itertools.islice(self._samples, wanted))
        if len(found) < wanted:
            self._is_ended = True
            self._samples = iter(())  # release the exhausted iterator
            return [] if self._drop_last else found
        return found

    def _state(self) -> Any:
        """Return the dataset's state; a copy, since it is sent to the training process later."""
        return copy.deepcopy(self.dataset.state_dict()) if self._by_state else None
