"""Finds schedulers that are not what drives the optimizers of a state.

A scheduler in the state may drive another optimizer than the one in the state; and one that is in
no part of it may drive an optimizer of the state, as where a framework's ``train()`` has made a
scheduler of its own. What such a scheduler counts is in no base.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep.errors import StateError
from everstep.state.providers.optimizers import unwrap_optimizer
from everstep.state.providers.stateful import StatefulProvider
from everstep.state.training_state import State
from everstep.state.values.referrers import find_referrers
from everstep.trainer.checks.strangers import is_held, is_ours, kind_of

__all__ = ["Schedules"]

_log = logging.getLogger("everstep")


class Schedules:
    """The schedulers of the process, as far as they concern a state.

    torch keeps no list of the schedulers of an optimizer, so what refers to the optimizer is
    searched for them at the start. Almost all schedulers also mark the ``step`` of their optimizer
    when they are made (ReduceLROnPlateau does not). Where there is such a mark, the search is
    repeated at step marks 1, 2, 4, 8 and so on after the start, for those that are made later. A
    scheduler that exists may be one that nobody uses any more: it is reported once it has counted
    a step.

    Args:
        lost: called, with the reason, as a new base is due that carries it: what a log leads to
            rests on an older one that is exact; None: there is no log.
        tell: called, once for each, with what the user should know.
    """

    def __init__(
        self,
        state: State,
        lost: Callable[[str], None] | None,
        tell: Callable[[StateError], None],
    ) -> None:
        self._state = state
        self._lost = lost
        self._tell = tell
        self._idle: dict[int, tuple[weakref.ref[LRScheduler], object]] = {}  # with what it counted
        self._parts_then: dict[str, object] = {}
        self._marks = 0  # since the start
        for key, scheduler in self._parts():
            driven = unwrap_optimizer(scheduler.optimizer)
            if state.optimizers and not is_ours(driven, state) and not is_held(driven, state):
                why = f"{key!r} drives an optimizer that is in no part of the state"
                state.coverage.unsaved_trainers.append(f"{why} ({kind_of(driven)})")
                _log.warning(
                    "everstep: %s: its steps do not drive the optimizer of the state, and nothing "
                    "is called exact\n  hint: give the scheduler that drives the optimizer of the "
                    "state, or the optimizer that it drives; a framework's train() may make "
                    "new ones: make the Checkpointer after that",
                    state.coverage.unsaved_trainers[-1],
                )

    def started(self) -> None:
        """The state is that of a start: what counts from now on is looked for."""
        self._idle = {id(one): (weakref.ref(one), _count(one)) for one in self._beside()}
        self._parts_then = {key: _count(one) for key, one in self._parts()}
        self._marks = 0

    def marked(self) -> None:
        """A step is over."""
        self._marks += 1
        if self._marks.bit_count() == 1 and self._are_marked:
            for one in self._beside():
                self._idle.setdefault(id(one), (weakref.ref(one), _count_when_made(one)))
        if self._idle:
            self._look()

    def _look(self) -> None:
        for key, (ref, before) in list(self._idle.items()):
            scheduler = ref()
            if scheduler is not None and _count(scheduler) == before:
                continue
            del self._idle[key]
            if scheduler is not None and not self._may_be_saved(scheduler):
                self._found(scheduler)

    def _may_be_saved(self, scheduler: LRScheduler) -> bool:
        """Return whether an object of the state has it, and may save it. Not one that has a whole
        framework, where that has put the scheduler in the place of one that is a part of the state
        itself and counts no more, and saves nothing like it."""
        if not is_held(scheduler, self._state):
            return False
        driven = unwrap_optimizer(scheduler.optimizer)
        replaced = any(
            unwrap_optimizer(one.optimizer) is driven and self._parts_then.get(key) == _count(one)
            for key, one in self._parts()
        )
        if not replaced:
            return True
        counted = [{"last_epoch": one.last_epoch} for one in _counting(scheduler)]
        others = (one for one in self._state.stateful_objects if not isinstance(one, LRScheduler))
        saved = [one.state_dict() for one in others]  # type: ignore[attr-defined]
        return all(_has(saved, wanted) for wanted in counted)

    def _found(self, scheduler: LRScheduler) -> None:
        driven = unwrap_optimizer(scheduler.optimizer)
        key = next(key for key, one in self._state.optimizers.items() if one is driven)
        why = f"a scheduler that is in no part of the state ({kind_of(scheduler)}) drives {key!r}"
        if why in self._state.coverage.unsaved_trainers:
            return
        self._state.coverage.unsaved_trainers.append(why)
        self._tell(
            StateError(
                f"{why}: what it counts is not saved, resume() loses it, and nothing that is saved "
                "from now on is called exact",
                hint='add it to the state, {"scheduler": scheduler}; a framework\'s train() may '
                "make one of its own: make the Checkpointer after that, of what is used then",
            )
        )
        if self._lost is not None:
            self._lost(why)

    def _parts(self) -> Iterator[tuple[str, LRScheduler]]:
        """Yield the schedulers of the state, as they are or as a framework wraps them."""
        for key, value in self._state.values.items():
            if isinstance(self._state.providers.get(key), StatefulProvider):
                inner = value if isinstance(value, LRScheduler) else _inner(value)
                if isinstance(inner, LRScheduler):
                    yield key, inner

    @property
    def _are_marked(self) -> bool:
        """Return whether a scheduler has been made for an optimizer of the state."""
        own = self._state.optimizers.values()
        return any(hasattr(one.step, "_wrapped_by_lr_sched") for one in own)

    def _beside(self) -> list[LRScheduler]:
        """Return the schedulers of the state's optimizers that are no part of the state."""
        own = self._state.optimizers.values()
        if not own:
            return []
        parts = {id(scheduler) for _, scheduler in self._parts()}
        holders = find_referrers(own, Optimizer, LRScheduler, depth=2)
        # Frameworks put an optimizer into another, which a scheduler may hold instead of it.
        around = [one for one in holders if Optimizer in type(one).__mro__]
        if wrappers := [one for one in around if any(unwrap_optimizer(one) is o for o in own)]:
            holders += find_referrers(wrappers, LRScheduler, depth=2)
        found = []
        for one in {id(one): one for one in holders if LRScheduler in type(one).__mro__}.values():
            driven = vars(one).get("optimizer")
            if id(one) not in parts and isinstance(driven, Optimizer):
                found += [one] if any(unwrap_optimizer(driven) is o for o in own) else []
        return found


def _inner(value: object) -> object:
    return vars(value).get("scheduler") if hasattr(value, "__dict__") else None


def _has(tree: object, wanted: Mapping[str, object]) -> bool:
    if isinstance(tree, Mapping):
        found = all(key in tree and tree[key] == value for key, value in wanted.items())
        return found or any(_has(value, wanted) for value in tree.values())
    return isinstance(tree, (list, tuple)) and any(_has(value, wanted) for value in tree)


def _inside(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return the schedulers that it calls (ChainedScheduler, SequentialLR)."""
    found: list[LRScheduler] = []
    for value in vars(scheduler).values():
        several = value if isinstance(value, (list, tuple)) else (value,)
        found += (one for one in several if isinstance(one, LRScheduler))
    return found


def _counting(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return what counts steps: itself, or those that it calls (ChainedScheduler counts none)."""
    if hasattr(scheduler, "last_epoch"):
        return [scheduler]
    return [one for inner in _inside(scheduler) for one in _counting(inner)]


def _count(scheduler: LRScheduler) -> tuple[int, ...]:
    """Return how often it was called."""
    return tuple(
        # A step() of its own (CosineAnnealingWarmRestarts) may leave _step_count as it is.
        getattr(one, "_step_count", 0) if _is_plain(one) else one.last_epoch
        for one in _counting(scheduler)
    )


def _count_when_made(scheduler: LRScheduler) -> tuple[int, ...]:
    """Return what it had counted when it was made, whatever ``last_epoch`` it was given."""
    return tuple(int(_is_plain(one)) for one in _counting(scheduler))


def _is_plain(scheduler: LRScheduler) -> bool:
    return type(scheduler).step is LRScheduler.step
