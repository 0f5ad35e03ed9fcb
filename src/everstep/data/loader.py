"""A loader that is part of the state: it resumes in mid-epoch, with the same batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from everstep.config import is_int
from everstep.data.fetching import Batch, MapData, StreamData, Task, as_it_is, begin_worker
from everstep.data.orders import Order, Place, Samplers, number, set_epoch_of
from everstep.errors import OptionError, StateError
from everstep.state.positions import MOVED, POSITIONS, length_of, shuffles_in_a_buffer


@dataclass(frozen=True, slots=True)
class _Position:
    """A position between two batches.

    Attributes:
        epoch: from 0.
        begin: units of the epoch's order that were divided before, among other numbers of ranks.
        batch: batches of the epoch that the loop has had since then.
        world: number of ranks among which the rest is divided; None: not divided yet.
        order: digest of the epoch's order; None: unknown.
        streams: states of a dataset that is restored by its own state, by worker.
    """

    epoch: int = 0
    begin: int = 0
    batch: int = 0
    world: int | None = None
    order: str | None = None
    streams: tuple[Any, ...] = ()

    @property
    def is_start(self) -> bool:
        """True at the start of an epoch."""
        return self.begin == self.batch == 0


class ResumableLoader:
    """A ``DataLoader``, or another iterable, that resumes where the loop was interrupted.

    ::

        loader = everstep.data.ResumableLoader(DataLoader(dataset, batch_size=32, shuffle=True))
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        with everstep.Checkpointer(path, state) as ckpt:
            ckpt.resume()
            for epoch in range(loader.epoch, epochs):
                for batch in loader:
                    ...
                    ckpt.step()

    All randomness of a batch depends on ``seed``, the epoch, the rank, and the number of the batch:
    the generators of Python, NumPy and torch, and those that the dataset, the sampler and
    ``collate_fn`` hold, are seeded for it, in workers as in the training process, and put back
    afterwards. So neither a loop over the loader nor a resume draws from the generators of the
    program. Batches that workers have made in advance do not count: the position is that of the
    last batch given to the loop.

    *Map-style datasets* continue at the next batch. *Iterable datasets*, and other iterables, are
    replayed up to there, in the workers, or restored with ``dataset_state=True``.

    *Epochs* advance by themselves at the end. After a ``break`` the next loop begins the next
    epoch, as a loop over a ``DataLoader`` begins another order; but a program that resumes there
    continues in the interrupted epoch. A loop that cuts epochs short calls :meth:`set_epoch` for
    each.

    *Ranks*: a ``DistributedSampler`` is used as it is (its order, ``seed``, ``drop_last``), but
    with the epoch of the loader. The output of any other sampler is divided among the ranks here,
    in turn, as a ``DistributedSampler`` does: the last round is filled up from the front of the
    epoch's order, or dropped with ``drop_last``. A sampler that divides by itself is detected by an
    attribute ``num_replicas``, ``world_size``, ``num_processes`` or ``rank``. If another number of
    ranks continues in mid-epoch, the samples that no rank has had are divided again. Of an iterable
    dataset each rank gets its full output.

    Args:
        source: a ``DataLoader``; or an iterable that can be iterated again; or a function that
            returns one for each epoch.
        seed: seed of all randomness.
        rank: this rank, among ``world`` ranks that read different data; default: that of
            ``torch.distributed`` if it is initialised, else 0.
        world: number of these ranks; default: as for ``rank``.
        dataset_state: restore an iterable dataset by its own ``state_dict()``, which is saved, and
            ``load_state_dict()``, instead of replaying it: fast, and as exact as these. (A dataset
            of Hugging Face that shuffles in a buffer is not exact, and is refused.)

    Raises:
        OptionError: the source cannot be iterated again.

    Attributes:
        source: as given.
        seed: as given.
        everstep_restores_data: True; marks an object that restores the order of data.
    """

    everstep_restores_data = True

    def __init__(
        self,
        source: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        dataset_state: bool = False,
    ) -> None:
        _refuse(source, dataset_state)
        if not is_int(seed) or (rank is None) != (world is None):
            raise OptionError("seed must be a whole number; rank and world are given together")
        if rank is not None and world is not None and not 0 <= rank < world:
            raise OptionError(f"rank is {rank}, and must be one of {world} (0 to {world - 1})")
        self.source = source
        self.seed = seed
        self._given = None if rank is None or world is None else Place(rank, world)
        self._by_state = dataset_state
        self._position = _Position()
        self._is_fresh = True  # no batch after the position was given to the loop yet
        self._turn = 0  # which iteration may go on
        self._machinery: _Machinery | None = None
        self._made_for: Place | None = None

    @property
    def epoch(self) -> int:
        """The current epoch of the loop, or the next one to begin; from 0."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next loop.

        If it is the restored epoch, the loop continues in it; any other begins at its start.

        Raises:
            OptionError: the epoch is not a whole number from 0 on.
        """
        if not is_int(epoch) or epoch < 0:
            raise OptionError(f"an epoch must be a whole number from 0 on, not {epoch!r}")
        if epoch != self.epoch or not self._is_fresh:
            self._tell_of_rest(epoch)
            self._go_to(_Position(int(epoch)))

    def _tell_of_rest(self, epoch: int) -> None:
        """Warn if the rest of the restored epoch is skipped, unless it may be empty: a program
        may count an epoch before ``ckpt.step()``."""
        at = self._position
        if not (self._is_fresh and POSITIONS.restoring) or at.is_start:
            return
        try:
            left = at.begin > 0 or at.batch < len(self)
        except TypeError:
            left = False
        if left or epoch != at.epoch + 1:
            POSITIONS.say(
                f"resume() has restored batch {at.batch} of epoch {at.epoch} of a ResumableLoader, "
                f"and set_epoch({epoch}) begins epoch {epoch} instead, which is right only if "
                f"the program had cut epoch {at.epoch} short",
                hint="begin the loop over epochs with loader.epoch",
            )

    def __len__(self) -> int:
        """Return the number of batches that this rank has in a complete epoch.

        Raises:
            TypeError: the source has no length.
        """
        samplers = self._made.samplers
        if samplers is not None:
            return len(samplers)
        if not isinstance(self.source, Sized):
            raise TypeError(f"a {type(self.source).__name__} has no length")
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the restored epoch, or over the next one."""
        # Check this now: a step may draw random numbers before it asks for its batch.
        return self._batches(moved=POSITIONS.moved)

    def _batches(self, *, moved: bool) -> Iterator[Any]:
        made, turn, at, order = self._begin()
        if moved and not at.is_start:
            POSITIONS.lose(MOVED, hint="do so before resume()")
        streams = list(at.streams) or [None] * made.workers
        ended = 0  # workers in a row whose stream has ended
        for place, batch in enumerate(made.begin(turn, at, order), at.batch - made.voids(at)):
            if batch.is_filled:
                ended = 0
                # Workers give their batches in turn, also after a resume, because of the void
                # tasks.
                streams[place % made.workers] = batch.state
                # Before the batch is given to the loop, whose body may ask for the position.
                self._position = replace(
                    at, batch=place + 1, streams=tuple(streams) if self._by_state else ()
                )
                self._is_fresh = False
                yield batch.data
                if self._turn != turn:
                    raise StateError(
                        "this iteration over a ResumableLoader is over: the loader was restored, "
                        "set to another epoch, or iterated anew meanwhile",
                        hint="leave the loop after a rewind(), and begin a new one over the loader",
                    )
            elif order is None and place >= at.batch:
                ended += 1
                if ended == made.workers:
                    break
        self._go_to(_Position(at.epoch + 1))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as plain data: a few numbers."""
        at = self._position
        state = {
            "epoch": at.epoch,
            "begin": at.begin,
            "batch": at.batch,
            "world": self._made.place.world if at.world is None else at.world,
            "order": at.order,
            **self._made.fixed,
        }
        if self._by_state:
            state["streams"] = list(at.streams)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position: the next loop continues there.

        Raises:
            StateError: the position does not fit this loader; see :meth:`refusal`.
        """
        if reason := self.refusal(state):
            raise StateError(reason)
        streams = tuple(state.get("streams") or ())
        names = ("epoch", "begin", "batch", "world", "order")
        self._go_to(_Position(**{name: state[name] for name in names}, streams=streams))

    def refusal(self, state: Any) -> str | None:
        """Return the reason why this loader cannot continue from a position; None: it can."""
        try:
            fixed = {name: state[name] for name in (*self._made.fixed, "world", "order")}
            epoch, begin, batch, world = (
                int(state[name]) for name in ("epoch", "begin", "batch", "world")
            )
            at = _Position(epoch, begin, batch, world)
        except (TypeError, ValueError, LookupError):
            return "the saved state is not a position of a ResumableLoader"
        for name, mine in self._made.fixed.items():
            if fixed[name] != mine and not (name == "workers" and at.is_start):
                return f"the position was saved with {name}={fixed[name]}, this loader has {mine}"
        here = self._made.place.world
        if at.world != here and not at.is_start and not self._made.is_dealt_here:
            return (
                f"epoch {at.epoch} was begun by {at.world} rank(s), now there are {here}: in "
                "mid-epoch only an order that this loader divides itself can be divided among "
                "another number of ranks"
            )
        return None

    @property
    def _made(self) -> _Machinery:
        """The loader's machinery; made late, since ranks are known late."""
        place = self._place()
        if self._machinery is None or self._made_for != place:  # a job may be joined after len()
            self._machinery = _Machinery.of(self.source, self.seed, place, self._by_state)
            self._made_for = place
        return self._machinery

    def _place(self) -> Place:
        if self._given is not None:
            return self._given
        if dist.is_available() and dist.is_initialized():
            return Place(dist.get_rank(), dist.get_world_size())
        return Place(0, 1)

    def _go_to(self, position: _Position) -> None:
        self._position = position
        self._is_fresh = True
        self._turn += 1

    def _begin(self) -> tuple[_Machinery, int, _Position, Order | None]:
        """Begin an iteration: divide the rest of its epoch among the current ranks."""
        if not self._is_fresh:  # after a break
            self._go_to(_Position(self.epoch + 1))
        # From now on an older iteration raises an error instead of moving the position.
        self._turn += 1
        at = self._position
        made = self._made
        order = made.order(at.epoch)
        digest = None if order is None else order.digest
        if at.order is not None and digest != at.order:
            raise StateError(
                f"the sampler gives another order for epoch {at.epoch} than it gave when the "
                f"position was saved (digest {at.order}, now {digest})",
                hint="samplers may draw from the generators of Python, NumPy and torch, and from "
                "those that they hold, and depend on nothing else that changes",
            )
        world = made.place.world
        if order is not None and at.world not in (None, world) and not at.is_start:
            assert at.world is not None
            at = replace(at, begin=order.left_after(at.begin, at.batch, at.world), batch=0)
        self._position = at = replace(at, world=world, order=digest)
        return made, self._turn, at, order


@dataclass
class _Machinery:
    """Machinery made from a source.

    Attributes:
        seed: seed of all randomness.
        place: this rank.
        fixed: values that must match for a position to be usable.
        samplers: samplers of a map-style dataset.
        data: dataset that makes the batches.
        inner: loader that runs the workers; None: there are none, and no ``DataLoader``.
        tasks: sampler of ``inner``.
        workers: number of workers that share a stream.
        user_init: the user's ``worker_init_fn``.
    """

    seed: int
    place: Place
    fixed: dict[str, Any]
    samplers: Samplers | None
    data: Any
    inner: DataLoader[Any] | None = None
    tasks: _Tasks = field(default_factory=lambda: _Tasks())
    workers: int = 1
    user_init: Callable[[int], object] | None = None

    @classmethod
    def of(cls, source: Any, seed: int, place: Place, by_state: bool) -> _Machinery:
        if not _is_entered(source):
            fixed = {"kind": "iterable", "seed": seed, "length": length_of(source)}
            data: Any = StreamData(_Again(source), as_it_is, None, False, by_state)
            data.prepare()
            return cls(seed, place, fixed, None, data)
        loader: DataLoader[Any] = source
        stream = isinstance(loader.dataset, IterableDataset)
        samplers = None if stream else Samplers(loader, place)
        fixed = {"seed": seed, "batch_size": loader.batch_size}
        if samplers is None:
            size = loader.batch_size
            drop_last = loader.drop_last
            data = StreamData(loader.dataset, loader.collate_fn, size, drop_last, by_state)
            fixed |= {"kind": "stream", "workers": max(1, loader.num_workers)}
        else:
            place = samplers.place
            in_batches = loader.batch_sampler is not None
            data = MapData(loader.dataset, loader.collate_fn, in_batches)
            fixed |= {"kind": "map", "length": length_of(loader.dataset)}
            if in_batches:
                fixed["batch_size"] = samplers.step
        # In this process the states that the dataset's generators have now are those of each
        # epoch's beginning.
        if not loader.num_workers:
            data.prepare()
        parts = cls(seed, place, fixed, samplers, data)
        parts.workers = max(1, loader.num_workers)
        parts.user_init = loader.worker_init_fn
        parts.inner = DataLoader(
            data,
            batch_size=None,
            sampler=parts.tasks,
            num_workers=loader.num_workers,
            collate_fn=as_it_is,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            multiprocessing_context=loader.multiprocessing_context,
            # Its own: each iterator draws a base seed, by default from the generator of the
            # program.
            generator=torch.Generator(),
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=getattr(loader, "pin_memory_device", ""),
        )
        parts.inner.everstep_restores_data = True
        return parts

    @property
    def is_dealt_here(self) -> bool:
        """True if the rest of an epoch can be divided among another number of ranks."""
        return self.samplers is not None and not self.samplers.deals_itself

    def order(self, epoch: int) -> Order | None:
        """Return the order of an epoch; None for a stream."""
        set_epoch_of(self.data.dataset, epoch)
        return None if self.samplers is None else self.samplers.order(self.seed, epoch)

    def begin(self, run: int, at: _Position, order: Order | None) -> Iterator[Batch]:
        """Begin to make batches from a position on; void tasks keep the order of workers."""
        key = (self.seed, self.place.rank, at.begin)
        before = range(at.batch - self.voids(at), at.batch)
        voids = [Task(run, at.epoch, n, key, is_void=True) for n in before]
        if order is None:
            wanted = self._of_stream(run, at, key)
        else:
            numbered = enumerate(order.batches(at.begin, at.batch), at.batch)
            wanted = (Task(run, at.epoch, n, key, index) for n, index in numbered)
        if self.inner is None:
            return map(self.data.__getitem__, wanted)
        assert self.inner.generator is not None
        self.tasks.wanted = itertools.chain(voids, wanted)
        self.inner.generator.manual_seed(number("workers", *key[:2]))
        epoch = 0 if self.inner.persistent_workers else at.epoch  # workers outlive epochs
        self.inner.worker_init_fn = functools.partial(
            begin_worker, self.user_init, (*key[:2], epoch)
        )
        return iter(self.inner)

    def voids(self, at: _Position) -> int:
        """Return the number of void tasks that make each batch come from the same worker as
        without a resume."""
        return at.batch % self.workers

    def _of_stream(self, run: int, at: _Position, key: tuple[int, ...]) -> Iterator[Task]:
        for n in itertools.count(at.batch):
            is_first = n < at.batch + self.workers
            state = at.streams[n % self.workers] if is_first and at.streams else None
            yield Task(run, at.epoch, n, key, state=state)


class _Tasks:
    """Sampler of the ``DataLoader`` that runs the workers.

    Attributes:
        wanted: tasks to give when it is iterated.
    """

    def __init__(self) -> None:
        self.wanted: Iterator[Task] = iter(())

    def __iter__(self) -> Iterator[Task]:
        return self.wanted  # asked for twice when workers start, and read by the later one


class _Again:
    """A plain iterable, or a function that returns one, as a dataset."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source if hasattr(self._source, "__iter__") else self._source())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the iterable, if it has a ``set_epoch``."""
        set_epoch_of(self._source, epoch)


def _is_entered(source: object) -> bool:
    """Return True for a ``DataLoader`` that is iterated as torch's is."""
    kind = type(source)
    return isinstance(source, DataLoader) and all(
        getattr(kind, name) is getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")
    )


def _refuse(source: Any, dataset_state: bool) -> None:
    """Refuse a source that cannot be iterated again."""
    name = type(source).__name__
    again = "give a function that returns a new one for each epoch"
    if isinstance(source, Iterator):
        raise OptionError(f"a {name} can be iterated only once: its epochs are one", hint=again)
    if not callable(source) and not hasattr(source, "__iter__"):
        raise OptionError(f"a {name} is neither a DataLoader nor an iterable")
    dataset: Any = None
    if isinstance(source, DataLoader):
        if hasattr(source, "state_dict"):
            raise OptionError(
                f"a {name} has a position of its own",
                hint="put it into the state itself, or make a plain DataLoader",
            )
        dataset = source.dataset
        if isinstance(dataset, (IterDataPipe, MapDataPipe)):
            raise OptionError(
                "a DataPipe is shuffled and sharded by its DataLoader alone",
                hint="give a Dataset or an IterableDataset",
            )
        if source.num_workers and not getattr(source, "in_order", True):
            raise OptionError("in_order=False gives batches in another order each time")
        if any(isinstance(one, Iterator) for one in (source.sampler, source.batch_sampler)):
            raise OptionError("its sampler is an iterator, which can be iterated only once")
    if not dataset_state:
        return
    if not isinstance(dataset, IterableDataset) or not all(
        hasattr(dataset, method) for method in ("state_dict", "load_state_dict")
    ):
        raise OptionError(
            "dataset_state=True is for a DataLoader over an IterableDataset with state_dict() and "
            "load_state_dict()"
        )
    if shuffles_in_a_buffer(dataset):
        raise OptionError(
            "this dataset shuffles in a buffer, which its state_dict() does not have: samples "
            "would be lost",
            hint="leave dataset_state out: the dataset is replayed then",
        )
