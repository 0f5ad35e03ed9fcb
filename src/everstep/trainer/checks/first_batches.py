"""Detects lost data and random numbers between a resume and the first step after it.

A program without a stateful loader in the state has to find its batch by itself: it makes an
iterator of a torch ``DataLoader`` and skips the batches that were trained on. An uninterrupted run
does neither in the middle of an epoch. If this draws random numbers, training continues with other
generators than an uninterrupted run. Therefore each iterator made before the first step is
examined, and each batch fetched before the first backward.
"""

from __future__ import annotations

import weakref
from itertools import islice
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.hooks import RemovableHandle

from everstep.state.positions import POSITIONS, fetches_ahead, is_followed
from everstep.state.providers import ModuleProvider, StatefulProvider
from everstep.state.providers.plain import PlainProvider
from everstep.state.providers.stateful import restores_data
from everstep.state.training_state import State
from everstep.state.values.generators import RngStates
from everstep.trainer.participant import Participant, RestoredState

_EXAMINED = 64  # parameters whose gradients show that a backward has run

_INSTEAD = (
    "everstep.data.ResumableLoader, or torchdata's StatefulDataLoader, in the state needs neither"
)


class FirstBatches(Participant):
    """Watch the data loaders between ``resume()`` and the first step.

    Args:
        state: state of the Checkpointer.

    Attributes:
        generators: random generators as they were restored.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._step = 0
        self._first = True  # no iterator was made yet
        self._made: list[_Fetches] = []
        self._gradients: list[tuple[int, int]] = []
        self._hooks: list[RemovableHandle] = []
        self._is_over = True

    def restored(self, restored: RestoredState) -> None:
        """Begin to watch, if anything was restored."""
        if restored.resumed.base is None:
            return
        self._step = restored.resumed.step
        self._state.said.clear()
        self.generators = RngStates.now()
        self._first = True
        self._made = []
        self._gradients = self._gradients_now()
        self._hooks = []
        self._is_over = False
        POSITIONS.resumed(self)  # a framework may load positions only after resume()
        _observers.add(self)
        _observe()

    def go_back(self) -> None:
        """Stop watching."""
        self.close()

    def step_ends(self) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Stop watching."""
        if self._is_over:
            return
        self._is_over = True
        if self._hooks:
            self._settle(undone=False)
        POSITIONS.resumed(None)
        _observers.discard(self)
        _observe()
        for fetches in self._made:
            fetches.remove(self)
            iterator = fetches.iterator()
            if fetches.gave and iterator is not None:
                self._check_position(iterator, fetches.loader())

    def made(self, fetches: _Fetches, loader: Any) -> None:
        """Examine an iterator that was made, and its batches."""
        if is_followed(loader) or restores_data(loader) or not self._gradients or self._trains():
            return
        within = self._is_within(loader)
        if within:
            if not fetches.before.same(RngStates.now()):
                self._state.lose(
                    "a DataLoader of a sampler, dataset or stream of the state has drawn from the "
                    "process's random generators when it was iterated after resume(), which it "
                    "does not do in the middle of an epoch of an uninterrupted run",
                    hint=f"give the DataLoader generator=torch.Generator(); {_INSTEAD}",
                )
        elif self._first and not self._state.data and not fetches.before.same(self.generators):
            self._state.say(
                "random generators were drawn from, or seeded, between resume() and the first "
                "batch: training continues with other random numbers than an uninterrupted run, "
                "unless that does the same there",
                hint=f"do so before resume(); {_INSTEAD}",
            )
        self._first = False
        self._made.append(fetches)
        # With a loader in the state, other loaders fetch batches for one step, and skip none.
        fetches.add(self, skips=within or not self._state.data)

    def _is_within(self, loader: Any) -> bool:
        """Return True if a restored object of the state belongs to the loader or holds it."""
        providers = self._state.providers.values()
        found = [one for one in providers if isinstance(one, StatefulProvider)]
        restored = [one.value for one in found if one.restored_data]
        members = [loader.dataset, loader.sampler, loader.batch_sampler]
        members.append(getattr(loader.batch_sampler, "sampler", None))
        return any(
            one is member or any(loader is held for held in getattr(one, "__dict__", {}).values())
            for one in restored
            for member in members
        )

    def batch_skipped(self, before: RngStates, made: RngStates) -> bool:
        """Examine a batch that is fetched after another one that was not trained on.

        Args:
            before: random generators before the iterator was made.
            made: random generators after that.

        Returns:
            True to examine the next batch, too.
        """
        if self._is_over or self._hooks or self._trains():
            return False
        now = RngStates.now()
        if before.same(now):
            return True
        if made.same(now):
            self._settle_at_first_forward()
        else:
            self._settle(undone=False)
        return False

    def _settle_at_first_forward(self) -> None:
        """Decide when a model is first called for training whether the draw of an iterator matters.

        torch draws a seed for the workers whenever an iterator is made. The program, or the
        framework that skips for it, may restore the generators after that. Draws of samplers and
        samples are another matter: they show that the order or the samples are other ones.
        """
        this = weakref.ref(self)  # a model must not keep a dropped Checkpointer's state alive

        def settle(*_: object) -> None:
            if torch.is_grad_enabled() and (watch := this()) is not None:
                watch._settle(undone=watch.generators.same(RngStates.now()))

        for provider in self._state.providers.values():
            if isinstance(provider, ModuleProvider):
                self._hooks.append(provider.outer.register_forward_pre_hook(settle))
        if not self._hooks:
            self._settle(undone=False)

    def _settle(self, *, undone: bool) -> None:
        """Report that skipping has moved the generators, unless that was undone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if not undone:
            self._state.lose(
                "random generators have moved between resume() and the first step: batches were "
                "skipped, and the loader, its sampler or its samples have drawn from them, which "
                "an uninterrupted run does not do there",
                hint=f"give a DataLoader a generator= of its own, and a dataset, too; {_INSTEAD}",
            )

    def _check_position(self, iterator: Any, loader: Any) -> None:
        """Report a loader that begins an epoch anew in the middle of one."""
        providers = self._state.providers.values()
        counts = any(isinstance(one, PlainProvider) for one in providers)
        if loader is None or iterator._num_yielded > 1 or (counts and not self._state.data):
            return
        if type(loader.sampler) not in (SequentialSampler, RandomSampler):
            return  # another sampler may begin at any position
        length = len(loader)
        if length and self._step % length:
            self._state.say(
                "the order of batches is not part of the state: after the resume at step "
                f"{self._step} a DataLoader of {length} batches was begun anew",
                hint=_INSTEAD,
            )

    def _trains(self) -> bool:
        """Return True if a backward has run."""
        return self._gradients_now() != self._gradients

    def _gradients_now(self) -> list[tuple[int, int]]:
        trained = (
            parameter
            for optimizer in self._state.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        )
        found = (parameter.grad for parameter in islice(trained, _EXAMINED))
        # A backward makes a new gradient, or adds to the present one and moves its counter.
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in found]


class _Fetches:
    """Replacement of an iterator's method that fetches the next batch.

    Args:
        before: random generators before the iterator was made.

    Attributes:
        iterator: weak reference to the iterator.
        loader: weak reference to its loader.
        gave: True if a batch was fetched, and not for an evaluation.
    """

    def __init__(self, iterator: Any, loader: Any, before: RngStates) -> None:
        # Weak: the iterator holds this object, and a cycle would delay its end, which stops its
        # worker processes.
        self.iterator = weakref.ref(iterator)
        self.loader = weakref.ref(loader)
        self.before = before
        self.gave = False
        self._made = RngStates.now()
        # -1: the batch that is fetched ahead is no sign that one was skipped.
        self._fetched = -bool(fetches_ahead(loader))
        self._observers: dict[FirstBatches, bool] = {}

    def add(self, observer: FirstBatches, *, skips: bool) -> None:
        """Tell an observer of the batches.

        Args:
            skips: True if the program may skip batches.
        """
        self._observers[observer] = skips
        if (iterator := self.iterator()) is not None:
            iterator._next_data = self

    def remove(self, observer: FirstBatches) -> None:
        """Tell an observer no more."""
        self._observers.pop(observer, None)
        if not self._observers and (iterator := self.iterator()) is not None:
            # The attribute of the instance hides the method of its class. Without it the method
            # runs again.
            vars(iterator).pop("_next_data", None)

    def __call__(self) -> Any:
        iterator = self.iterator()
        assert iterator is not None
        if torch.is_grad_enabled():  # otherwise it is an evaluation
            if self._fetched > 0:
                for observer, skips in list(self._observers.items()):
                    if skips and not observer.batch_skipped(self.before, self._made):
                        self.remove(observer)
            self._fetched += 1
            self.gave = True
        return type(iterator)._next_data(iterator)


# Weak: this module must not keep a Checkpointer alive that was dropped without close().
_observers = weakref.WeakSet[FirstBatches]()
_original = _BaseDataLoaderIter.__init__


def _init(iterator: Any, loader: Any) -> None:
    # Before the constructor, which draws a seed for the workers.
    before = RngStates.now()
    _original(iterator, loader)
    fetches = _Fetches(iterator, loader, before)
    for observer in list(_observers):
        observer.made(fetches, loader)
    if not _observers:  # the Checkpointer was dropped without close()
        _observe()


def _observe() -> None:
    """Patch the constructor of iterators while there is an observer, and restore it after."""
    if _BaseDataLoaderIter.__init__ in (
        _init,
        _original,
    ):  # otherwise other code has patched it, too
        wanted: Any = _init if _observers else _original
        _BaseDataLoaderIter.__init__ = wanted  # type: ignore[method-assign]
