"""Positions of loaders that save their own: torchdata's StatefulDataLoader, and wrappers of one.

The position that such a loader saves does not suffice to continue an epoch:

- its iterator draws a seed when it is made, which an uninterrupted run does not do in mid-epoch;
- a sampler without state is asked for its order again, and may draw it from generators that have
  moved on since the epoch began;
- the loader's own ``generator=`` is not saved, nor are the generators of its workers;
- asked for its position before a loop iterates it, the loader makes the iterator too early: before
  the loop has set the epoch of the sampler or the stream.

So three methods of the loader's class are completed while a Checkpointer is open, whoever calls
them (a Checkpointer, Lightning's fit loop, accelerate). ``load_state_dict()`` leaves the position
pending; ``state_dict()`` returns that position until a loop begins to iterate; and then the
iterator is made with the generators set to their states at the beginning of the epoch, and put back
afterwards. torchdata ignores the key that is added to its state.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from everstep.state.values.generators import RngStates, preserve_rng, restore_rng

if TYPE_CHECKING:
    from everstep.state.training_state import State


KEY: Final = "everstep"
"""Key that is added to a loader's state."""

MOVED: Final = (
    "random generators have moved between resume() and the batch at which training "
    "continues: the program has drawn from them, or seeded them, which it does not do in "
    "mid-epoch without the interruption"
)
"""Reason why training continues with other random numbers."""

_FINISHED = "_iterator_finished"  # in each state of torchdata's loader
_TORCHDATA = "torchdata.stateful_dataloader"
_POSITION = "_everstep_position"
_ACCELERATE = frozenset(("accelerate.data_loader",))
_LIGHTNING = frozenset(("lightning.pytorch.loops.fetchers", "pytorch_lightning.loops.fetchers"))
_FRAMES = 10
_GENERATORS = "everstep/generators"
_DATASET = "everstep/dataset"
_COMPLETED = frozenset(("state_dict", "load_state_dict", "_get_iterator"))
_DRAW_NOTHING = (SequentialSampler, DistributedSampler, _InfiniteConstantSampler)


def loader_within(value: object) -> object:
    """Return the loader inside of accelerate's loaders; any other value itself."""
    while (inner := getattr(value, "__dict__", {}).get("base_dataloader")) is not None:
        value = inner
    return value


def is_followed(value: object) -> bool:
    """Return True for a loader that saves its position as torchdata's does."""
    kind = type(value)
    return (
        issubclass(kind, DataLoader)
        and hasattr(kind, "load_state_dict")
        and "next_iter_state" in getattr(value, "__dict__", {})
    )


def holds_position(tree: object) -> bool:
    """Return True if a tree contains the position of a torchdata loader, at any depth."""
    if isinstance(tree, dict):
        return _FINISHED in tree or any(map(holds_position, tree.values()))
    return isinstance(tree, (list, tuple)) and any(map(holds_position, tree))


def same_values(one: object, other: object) -> bool:
    """Return True if two trees of plain data and tensors have the same contents."""
    if isinstance(one, dict) and isinstance(other, dict):
        same = one.keys() == other.keys()
        return same and all(same_values(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_values, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)  # type: ignore[arg-type]
    return type(one) is type(other) and one == other


def shuffles_in_a_buffer(dataset: object) -> bool:
    """Return True for a streaming dataset of Hugging Face that shuffles in a buffer.

    Its ``state_dict()`` does not contain the buffer, and does not mention it.
    """
    return _has_buffer(getattr(dataset, "_ex_iterable", None))


def _has_buffer(examples: object) -> bool:
    if type(examples).__name__.startswith("BufferShuffled"):
        return True
    inner = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", ()) or ())]
    return any(map(_has_buffer, filter(None, inner)))


def _calling_module(modules: Collection[str]) -> str:
    """Return the module among these that is asking a loader for an iterator; "": none is."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_globals.get("__name__") in modules:
            return str(frame.f_globals["__name__"])
    return ""


def fetches_ahead(loader: object) -> str:
    """Return the module that is asking a loader for an iterator, if it fetches each batch before
    the previous one is trained on; "" for others.

    Lightning does so if it cannot know the number of batches.
    """
    return _calling_module(_ACCELERATE) or (
        _calling_module(_LIGHTNING) if length_of(loader) is None else ""
    )


class Resumed(Protocol):
    """A restored state, until the first step after that.

    Attributes:
        generators: states of the generators as restored.
    """

    generators: RngStates


class LoaderPositions:
    """The loaders of this process that save their position, and the data missing from those
    positions.

    One object per process. The loaders' classes are patched as long as a holder keeps it open.
    """

    def __init__(self) -> None:
        self._classes: dict[type, dict[str, Any]] = {}
        self._holders = 0
        self._listeners: weakref.WeakSet[State] = weakref.WeakSet()
        self._resumed: Callable[[], Resumed | None] = lambda: None
        self._loading = False

    @property
    def is_open(self) -> bool:
        """True while a holder keeps it open."""
        return self._holders > 0

    @property
    def restoring(self) -> bool:
        """True if a position that is loaded now is the one where training continues."""
        return self._loading or self._resumed() is not None

    def resumed(self, by: Resumed | None) -> None:
        """Note that a state was restored, and the generators with it; None: training has
        continued."""
        # Weak: after a Checkpointer was dropped, loaded positions are not those of a resume any
        # more.
        self._resumed = (lambda: None) if by is None else weakref.ref(by)

    @property
    def moved(self) -> bool:
        """True if generators have moved since a state was restored."""
        resumed = self._resumed()
        return resumed is not None and not resumed.generators.same(RngStates.now())

    def open(self, listener: State, *loaders: object) -> None:
        """Follow torchdata's class, if it is imported by now, and the classes of these loaders.

        Args:
            listener: receives the findings; only a weak reference is kept.
            loaders: loaders of its state.
        """
        self._holders += 1
        self._listeners.add(listener)
        kinds = list(map(type, loaders))
        if (module := sys.modules.get(_TORCHDATA)) is not None:  # imported by now
            kinds.append(module.StatefulDataLoader)
        for kind in kinds:
            owner = next(one for one in kind.__mro__ if vars(one).keys() >= _COMPLETED)
            if owner not in self._classes:
                self._complete(owner)

    def close(self) -> None:
        """Undo one :meth:`open`; the last one restores the classes."""
        self._holders -= 1
        if not self.is_open:
            for owner, methods in self._classes.items():
                for name, method in methods.items():
                    setattr(owner, name, method)
            self._classes.clear()

    def lose(self, why: str, hint: str) -> None:
        """Report to all listeners that restored data differs from that of the saved training."""
        for listener in list(self._listeners):
            listener.lose(why, hint)

    def say(self, message: str, hint: str) -> None:
        """Report to all listeners a use of the data that may not be intended."""
        for listener in list(self._listeners):
            listener.say(message, hint)

    def at_end_of_epoch(self) -> None:
        """Report to all listeners that a restored loader was at the end of an epoch."""
        for listener in list(self._listeners):
            listener.at_end_of_epoch()

    @contextmanager
    def loads(self) -> Iterator[None]:
        """Treat positions loaded within the block as those where training continues."""
        before = self._loading
        self._loading = True
        try:
            yield
        finally:
            self._loading = before

    def _complete(self, owner: type) -> None:
        # From the class's own dict, so that restoring them does not give it an inherited method.
        kept = self._classes[owner] = {name: vars(owner)[name] for name in _COMPLETED}

        def state_dict(loader: Any) -> dict[str, Any]:
            return _position(loader).state_dict(loader, kept["state_dict"])

        def load_state_dict(loader: Any, state_dict: dict[str, Any]) -> None:
            _position(loader).load(loader, state_dict, kept["load_state_dict"])

        def _get_iterator(loader: Any) -> Any:
            return _position(loader).make(loader, kept["_get_iterator"])

        for function in (state_dict, load_state_dict, _get_iterator):
            function.__doc__ = kept[function.__name__].__doc__
            setattr(owner, function.__name__, function)


def follow_existing(loader: Any) -> None:
    """Follow a loader whose iterator was made before, and not iterated yet.

    Workers that run already were not initialized by :class:`.WorkerGenerators`: end them, and leave
    the position of the iterator pending.
    """
    iterator = loader._iterator
    if iterator is None or iterator._num_yielded or _POSITION in vars(loader):
        return
    position = _position(loader)
    if loader.num_workers > 0:
        with POSITIONS.loads():
            loader.load_state_dict(loader.state_dict())
    elif _draws_order(loader):
        position.watch_first_index(loader, iterator)


def _position(loader: Any) -> _Position:
    found: _Position = vars(loader).setdefault(_POSITION, _Position())
    return found


class _Position:
    """Data missing from the position of one loader.

    Attributes:
        pending: the loaded state; the next iterator begins there.
        begun: states of the generators at the time when the order of the epoch was drawn from them;
            None: no order was drawn, or the sampler restores it itself.
        epochs: epochs that samplers and dataset were set to when the iterator was made.
        behind: keeps the state before the last fetch if each batch is fetched too early.
    """

    def __init__(self) -> None:
        self.pending: dict[str, Any] | None = None
        self.begun: dict[str, Any] | None = None
        self.epochs: list[int] = []
        self.behind: _DelayedState | None = None

    def state_dict(self, loader: Any, get: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return the position; makes no iterator for a loader that was not iterated."""
        if loader._iterator is None:
            return dict(loader.next_iter_state or {})
        more: dict[str, Any] = {}
        if own := [one.get_state().numpy() for one in _own_generators(loader)]:
            more["own"] = own
        if self.begun is not None:
            more["begun"] = self.begun
        if self.epochs:
            more["epochs"] = self.epochs
        tree = get(loader) if self.behind is None else self.behind.state
        return {**tree, KEY: more} if more else tree

    def load(self, loader: Any, state: dict[str, Any], load: Callable[..., None]) -> None:
        """Take a position, and leave it pending until a loop iterates."""
        old = loader._iterator
        load(loader, state)
        self.begun = None
        self.pending = None
        if not POSITIONS.restoring:
            return
        self.pending = state or None
        if old is not None:
            # Its workers fetch ahead from the position that was left.
            if hasattr(old, "_shutdown_workers"):
                old._shutdown_workers()
            # Holders of the old iterator (a loop under way, a Trainer that made it before its
            # callbacks resume) continue at the restored position.
            old._next_data = _RedirectedFetch(loader)

    def make(self, loader: Any, make: Callable[[Any], Any]) -> Any:
        """Make the iterator for a loop."""
        iterator = self._make(loader, make)
        # Lightning fetches a batch before it is needed where it cannot know the number of batches.
        unsized = length_of(loader) is None and _calling_module(_LIGHTNING)
        self.behind = _DelayedState(iterator) if unsized else None
        return iterator

    def _make(self, loader: Any, make: Callable[[Any], Any]) -> Any:
        pending = self.pending
        self.pending = None
        moved = POSITIONS.moved
        epochs = _epochs(loader)  # read now: workers fetch ahead, which may end the sampler's epoch
        if pending is None:
            self.epochs = epochs
            self.begun = None
            with _OrderCapture(self, loader, None):
                return self._made(loader, make)
        more = pending.get(KEY, {})
        self.begun = begun = more.get("begun")
        self.epochs = saved = more.get("epochs", epochs)
        other_epoch = "" if saved == epochs else f"{_listed(epochs)} instead of {_listed(saved)}"
        with preserve_rng():
            with _OrderCapture(self, loader, begun):
                iterator = self._made(loader, make)
                if _draws_order(loader):
                    _draw_order_now(iterator)
            _count_once(iterator, pending)
        for generator, state in zip(_own_generators(loader), more.get("own", ()), strict=False):
            generator.set_state(torch.from_numpy(state.copy()))
        if begun is None and iterator._num_yielded and _draws_order(loader):
            POSITIONS.lose(
                f"{type(loader).__name__}: its sampler may draw the order of the epoch from random "
                "generators whose state at the beginning of that epoch was not saved",
                "make the Checkpointer before the loader is iterated or asked for its state",
            )
        if iterator._num_yielded and shuffles_in_a_buffer(loader.dataset):
            POSITIONS.lose(
                "datasets fills the buffers of shuffle(buffer_size=) anew where a stream goes on: "
                "its samples come in another order, and some are left out",
                "shuffle the stream without a buffer (shuffle its shards), or shuffle before",
            )
        if not iterator._finished:
            ahead = fetches_ahead(loader)
            _FirstBatchCheck(iterator, ahead=ahead, moved=moved, other_epoch=other_epoch)
        return iterator

    def _made(self, loader: Any, make: Callable[[Any], Any]) -> Any:
        if loader.num_workers == 0:
            return make(loader)
        init = loader.worker_init_fn
        # Workers start while the iterator is made, so the function is replaced only for that long.
        loader.worker_init_fn = WorkerGenerators(init)
        try:
            iterator = make(loader)
        finally:
            loader.worker_init_fn = init
        if loader.persistent_workers:  # it begins later epochs, too
            # Weak: the iterator will hold this function, and in a reference cycle its workers would
            # run on until the next garbage collection.
            held = weakref.ref(iterator)

            def reset(loader: Any, *about: Any, **named: Any) -> None:
                kept = held()
                assert kept is not None
                self.begun = None
                self.epochs = _epochs(loader)
                with _OrderCapture(self, loader, None):
                    type(kept)._reset(kept, loader, *about, **named)

            iterator._reset = reset
        return iterator

    def watch_first_index(self, loader: Any, iterator: Any) -> None:
        """Take the generators' states when the sampler is first asked for its order."""
        held = weakref.ref(iterator)

        def next_index() -> Any:
            made = held()
            assert made is not None
            del made._next_index
            self.begun = _states(loader)
            return made._next_index()

        iterator._next_index = next_index


class WorkerGenerators:
    """Initialize a worker; replaces a loader's ``worker_init_fn``, which is called first.

    torchdata's workers save the state of their dataset with each batch, if the dataset has
    ``state_dict()`` and ``load_state_dict()``, but not the state of the generators that its items
    draw from. So these two methods are added to the dataset in a worker. They save the worker's
    generators, if anything was drawn from them since the worker was seeded. Nothing changes in the
    training process, and no number is drawn.

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


class _OrderCapture:
    """While an iterator is made: capture or replay the generators that its sampler draws the order
    from.

    The sampler may draw as soon as it is iterated, or when it is asked for the first sample.
    torchdata iterates it up to three times, and only the last order counts.

    Args:
        position: receives the states of the generators.
        loader: the loader.
        begun: states to draw the order from again; None: draw a new order, and note the states.
    """

    def __init__(self, position: _Position, loader: Any, begun: dict[str, Any] | None) -> None:
        self._position = position
        self._loader = loader
        self._begun = begun
        self._sampler = loader._index_sampler
        while _restores_itself(self._sampler) and isinstance(self._sampler, BatchSampler):
            self._sampler = self._sampler.sampler  # which its iterator iterates at once
        self._kind = type(self._sampler)
        self._draws = _draws_order(loader)

    def __enter__(self) -> None:
        if self._draws:

            def iterate(sampler: Any) -> Any:
                return self._iterate(sampler)

            kind = self._kind
            # iter() looks __iter__ up in the class, so an attribute of the sampler would have no
            # effect.
            with contextlib.suppress(TypeError):  # of a class that no object can be made another's
                self._sampler.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate})

    def __exit__(self, *about: object) -> None:
        self._begun = None  # later orders are drawn anew
        if type(self._sampler) is not self._kind:
            self._sampler.__class__ = self._kind

    def _iterate(self, sampler: Any) -> Any:
        if self._begun is not None:
            _set_states(self._loader, self._begun)
        before = _states(self._loader)
        order = self._kind.__iter__(sampler)
        if not same_values(_states(self._loader), before):
            self._position.begun = before
            return order
        return order if hasattr(order, "state_dict") else self._asked(order)

    def _asked(self, order: Any) -> Iterator[Any]:
        if self._begun is not None:
            _set_states(self._loader, self._begun)
        self._position.begun = _states(self._loader)
        yield from order


class _RedirectedFetch:
    """Fetch from the iterator that a loader makes at its restored position."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Any = None

    def __call__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return next(self._iterator)


class _FirstBatchCheck:
    """Check the first batch after a restored position, once.

    Args:
        iterator: the loader's iterator.
        ahead: module that fetches a batch before it is needed: it had fetched the first batch
            before the state was saved. "": none.
        moved: generators have moved since the state was restored.
        other_epoch: the sampler's epochs, and the saved ones, in words; "": they are equal.
    """

    def __init__(self, iterator: Any, *, ahead: str, moved: bool, other_epoch: str) -> None:
        self._held = weakref.ref(iterator)
        self._moved = moved
        self._other_epoch = other_epoch
        self._ahead = ahead if iterator._num_yielded else ""
        iterator._next_data = self

    def __call__(self) -> Any:
        iterator = self._held()
        assert iterator is not None
        # This hook removes itself: the attribute of the instance hides the method of the class.
        del iterator._next_data
        before = RngStates.now() if self._ahead else None
        try:
            data = iterator._next_data()
        except StopIteration:
            POSITIONS.at_end_of_epoch()
            raise
        if self._moved and iterator._num_yielded:
            POSITIONS.lose(MOVED, "do so before resume()")
        if self._other_epoch and iterator._num_yielded:
            POSITIONS.lose(
                f"a loader continues in mid-epoch, and its sampler was set to epoch "
                f"{self._other_epoch}: these batches are not the rest of the epoch that was saved",
                "put the number of the epoch into the state, begin the loop over epochs with it, "
                "and call set_epoch() before each loop over the loader",
            )
        if before is not None and not before.same(RngStates.now()):
            POSITIONS.lose(
                f"{self._ahead} fetches each batch while the previous one is trained on, and its "
                "samples draw random numbers in this process: the batch at which training "
                "continues was drawn before the state was saved, and now again",
                "let workers draw (num_workers=1), or use everstep.data.ResumableLoader",
            )
        return data


class _DelayedState:
    """Fetch batches for a loop that trains on each one only after it has fetched the next.

    Attributes:
        state: state of the loader before the last fetch.
    """

    def __init__(self, iterator: Any) -> None:
        self._held = weakref.ref(iterator)
        self._fetch = vars(iterator).get("_next_data")
        self.state = iterator.state_dict()
        iterator._next_data = self

    def __call__(self) -> Any:
        iterator = self._held()
        assert iterator is not None
        self.state = iterator.state_dict()
        fetch = self._fetch
        self._fetch = None
        if fetch is not None:
            data = fetch()  # the previous hook removes itself after the first batch
            iterator._next_data = self
            return data
        return type(iterator)._next_data(iterator)


def length_of(value: object) -> int | None:
    """Return the length of a loader, sampler or dataset; None if it has none."""
    try:
        return len(value)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _draw_order_now(iterator: Any) -> None:
    """Let a sampler without position draw its order now, and skip the samples that were given.

    torchdata skips when the first batch is fetched, and asks for one sample more than was given: at
    the end of an epoch the sampler could draw once more for that.
    """
    if iterator._num_workers or hasattr(iterator._sampler_iter, "state_dict"):
        return  # workers were given their batches already
    if iterator._sampler_iter_yielded:
        iterator._sampler_iter = iter(iterator._index_sampler)
        given = itertools.islice(iterator._sampler_iter, iterator._sampler_iter_yielded)
        collections.deque(given, maxlen=0)


def _count_once(iterator: Any, pending: dict[str, Any]) -> None:
    """Correct the counters that torchdata advances twice if it fetches the batches of a stream
    again."""
    if "_num_yielded" in pending:
        iterator._num_yielded = pending["_num_yielded"]
        iterator._sampler_iter_yielded = pending["_sampler_iter_yielded"]
        return
    yielded = pending["_snapshot"]["_snapshot_step"] + pending["_steps_since_snapshot"]
    twice = iterator._num_yielded - yielded
    if twice:
        iterator._num_yielded = yielded
        step = iterator._snapshot["_snapshot_step"] - twice
        iterator._snapshot = {**iterator._snapshot, "_snapshot_step": step}


def _leaf(sampler: Any) -> Any:
    """Return the innermost sampler inside of batch samplers of torch, torchdata and accelerate;
    a batch sampler with its own way of batching is returned itself."""
    while isinstance(sampler, BatchSampler) and _only_batches(type(sampler)):
        inner = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if inner is None:
            break
        sampler = inner
    return sampler


def _only_batches(kind: type[BatchSampler]) -> bool:
    libraries = ("torch.utils.data.", _TORCHDATA, "accelerate.")
    return str(kind.__iter__.__module__).startswith(libraries)


def _draws_order(loader: Any) -> bool:
    """Return True if a loader's sampler may draw its order from generators without restoring it."""
    sampler = _leaf(loader._index_sampler)
    kind = type(sampler)
    if isinstance(sampler, (list, tuple, range)) or hasattr(kind, "state_dict"):
        return False
    if any(isinstance(sampler, one) and kind.__iter__ is one.__iter__ for one in _DRAW_NOTHING):
        return False
    return not _restores_itself(sampler)


def _restores_itself(sampler: Any) -> bool:
    return type(sampler).__module__.startswith(_TORCHDATA)


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader and its samplers that are not in their state."""
    found = [loader.generator]
    left = [loader.batch_sampler, loader.sampler]
    seen = set[int]()
    while left:
        sampler = left.pop(0)
        if sampler is None or id(sampler) in seen:
            continue
        seen.add(id(sampler))
        if not _restores_itself(sampler):
            found.append(getattr(sampler, "generator", None))
        left += [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]
    unique = {id(one): one for one in found if isinstance(one, torch.Generator)}
    return list(unique.values())


def _epochs(loader: Any) -> list[int]:
    """Return the epochs that a loader's samplers are set to, if they can be set."""
    samplers = (loader.sampler, loader.batch_sampler, _leaf(loader._index_sampler))
    settable = {id(one): one for one in samplers if hasattr(one, "set_epoch")}
    found = (getattr(one, "epoch", None) for one in settable.values())
    return [epoch for epoch in found if isinstance(epoch, int)]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "(none)"


def _states(loader: Any) -> dict[str, Any]:
    """Return the states of all generators that an order may be drawn from."""
    own: list[np.ndarray[Any, Any]] = [one.get_state().numpy() for one in _own_generators(loader)]
    return {"process": RngStates.now(devices=False).plain(), "own": own}


def _set_states(loader: Any, states: dict[str, Any]) -> None:
    restore_rng(states["process"])
    for generator, state in zip(_own_generators(loader), states["own"], strict=False):
        generator.set_state(torch.from_numpy(state.copy()))


POSITIONS: Final = LoaderPositions()
"""The positions of this process."""
