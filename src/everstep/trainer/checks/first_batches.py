"""The batches between a resume and the first step after it.

A program without a stateful loader in the state finds its batch by itself: it makes an iterator
of a torch ``DataLoader`` and skips what was trained on. An uninterrupted run does neither in the
middle of an epoch. If that draws random numbers, training goes on from other generators than it
would have. So each iterator that is made before the first step is looked at, and each batch that
is fetched before the first backward; nothing later.
"""

from __future__ import annotations

import weakref
from itertools import islice
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from everstep.state.loaders.positions import POSITIONS, fetches_ahead, is_followed
from everstep.state.providers.plain import PlainProvider
from everstep.state.providers.stateful import StatefulProvider, restores_data
from everstep.state.training_state import State
from everstep.state.values.generators import RngStates

__all__ = ["FirstBatches"]

_LOOKED_AT = 64  # parameters, for gradients

_INSTEAD = (
    "everstep.data.ResumableLoader, or torchdata's StatefulDataLoader, in the state needs neither"
)


class FirstBatches:
    """Watches what a program does between ``resume()`` and its first step.

    Args:
        state: that was restored.
        step: that was restored.

    Attributes:
        generators: as they were restored.
    """

    def __init__(self, state: State, step: int) -> None:
        self._state = state
        self._step = step
        state.said.clear()
        self.generators = RngStates.now()
        self._first = True  # no iterator was made yet
        self._made: list[_Fetches] = []
        self._gradients = self._gradients_now()
        self._is_over = False
        POSITIONS.resumed(self)  # a framework may load positions only now
        _observers.add(self)
        _observe()

    def end(self) -> None:
        """The first step is over, or there will be none."""
        if self._is_over:
            return
        self._is_over = True
        POSITIONS.resumed(None)
        _observers.discard(self)
        _observe()
        for fetches in self._made:
            if (iterator := fetches.iterator()) is not None:
                vars(iterator).pop("_next_data", None)
                if fetches.gave:
                    self._look_at_position(iterator, fetches.loader())

    def made(self, iterator: Any, loader: Any, before: RngStates) -> None:
        """An iterator was made.

        Args:
            before: the generators before that.
        """
        if is_followed(loader) or restores_data(loader) or not self._gradients or self._trains():
            return
        within = self._is_within(loader)
        if within:
            if not before.same(RngStates.now()):
                self._state.lose(
                    "a DataLoader of a sampler, dataset or stream of the state has drawn from the "
                    "process's random generators when it was iterated after resume(), which it "
                    "does not do in the middle of an epoch without the interruption",
                    hint=f"give the DataLoader generator=torch.Generator(); {_INSTEAD}",
                )
        elif self._first and not self._state.data and not before.same(self.generators):
            self._state.say(
                "random generators were drawn from, or seeded, between resume() and the first "
                "batch: training goes on with other random numbers than without the interruption, "
                "unless it does the same there",
                hint=f"do so before resume(); {_INSTEAD}",
            )
        self._first = False
        fetches = _Fetches(iterator, loader, self, before, ahead=bool(fetches_ahead(loader)))
        # Beside a loader of the state, batches that nobody trains on are those of one step.
        fetches.skips = within or not self._state.data
        self._made.append(fetches)

    def _is_within(self, loader: Any) -> bool:
        """Return whether a part of the state that has its position back belongs to a loader, or
        has the loader as an attribute."""
        providers = self._state.providers.values()
        found = [one for one in providers if isinstance(one, StatefulProvider)]
        restored = [one.value for one in found if one.restored_data]
        parts = [loader.dataset, loader.sampler, loader.batch_sampler]
        parts.append(getattr(loader.batch_sampler, "sampler", None))
        return any(
            one is part or any(loader is held for held in getattr(one, "__dict__", {}).values())
            for one in restored
            for part in parts
        )

    def skipped(self, before: RngStates) -> bool:
        """A batch is fetched after another that nobody has trained on; returns whether to go on
        looking."""
        if self._is_over or self._trains():
            return False
        if before.same(RngStates.now()):
            return True
        self._state.lose(
            "random generators have moved between resume() and the first step: batches were "
            "skipped, and the loader, its sampler or its samples have drawn from them, which "
            "training without the interruption does not do there",
            hint=f"give a DataLoader a generator= of its own, and a dataset, too; {_INSTEAD}",
        )
        return False

    def _look_at_position(self, iterator: Any, loader: Any) -> None:
        """Say where a program begins an epoch anew in the middle of one."""
        providers = self._state.providers.values()
        counts = any(isinstance(one, PlainProvider) for one in providers)
        if loader is None or iterator._num_yielded > 1 or (counts and not self._state.data):
            return
        if type(loader.sampler) not in (SequentialSampler, RandomSampler):
            return  # it may begin anywhere
        length = len(loader)
        if length and self._step % length:
            self._state.say(
                "the order of batches is in no part of the state: after the resume at step "
                f"{self._step} a DataLoader of {length} batches was begun anew",
                hint=_INSTEAD,
            )

    def _trains(self) -> bool:
        """Return whether a backward has run."""
        return self._gradients_now() != self._gradients

    def _gradients_now(self) -> list[tuple[int, int]]:
        trained = (
            parameter
            for optimizer in self._state.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        )
        found = (parameter.grad for parameter in islice(trained, _LOOKED_AT))
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in found]


class _Fetches:
    """Fetches the first batches of an iterator.

    Args:
        ahead: one batch is fetched before it is needed.

    Attributes:
        iterator, loader: weakly held.
        gave: a batch was fetched, and not for an evaluation.
        skips: the program may skip batches.
    """

    def __init__(
        self, iterator: Any, loader: Any, to: FirstBatches, before: RngStates, *, ahead: bool
    ) -> None:
        self.iterator = weakref.ref(iterator)
        self.loader = weakref.ref(loader)
        self.gave = False
        self.skips = True
        self._to = to
        self._before = before
        self._fetched = -ahead
        iterator._next_data = self

    def __call__(self) -> Any:
        iterator = self.iterator()
        assert iterator is not None
        if torch.is_grad_enabled():  # or it is an evaluation
            if self._fetched > 0 and self.skips and not self._to.skipped(self._before):
                vars(iterator).pop("_next_data", None)
            self._fetched += 1
            self.gave = True
        return type(iterator)._next_data(iterator)


_observers = weakref.WeakSet[FirstBatches]()
_original = _BaseDataLoaderIter.__init__


def _init(iterator: Any, loader: Any) -> None:
    before = RngStates.now()
    _original(iterator, loader)
    for observer in list(_observers):
        observer.made(iterator, loader, before)
    if not _observers:  # their Checkpointer was dropped
        _observe()


def _observe() -> None:
    """Look at each iterator that is made, as long as there is an observer."""
    if _BaseDataLoaderIter.__init__ in (_init, _original):  # or somebody else has replaced it
        wanted: Any = _init if _observers else _original
        _BaseDataLoaderIter.__init__ = wanted  # type: ignore[method-assign]
