"""Provider of an object with state_dict() and load_state_dict()."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.amp.grad_scaler import OptState
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from everstep.errors import OptionError
from everstep.state.loaders.positions import (
    KEY,
    POSITIONS,
    follow_existing,
    holds_position,
    is_followed,
    loader_within,
    same_values,
)
from everstep.state.providers.provider import RestorePlan, Saved, UnguardedProvider, difference
from everstep.state.values.tensors import is_dtensor

__all__ = [
    "LoaderProvider",
    "Stateful",
    "StatefulProvider",
    "has_inspected_gradients",
    "restores_data",
]


@runtime_checkable
class Stateful(Protocol):
    """torch.distributed.checkpoint's protocol: anything that can hand out and take its state."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class StatefulProvider(UnguardedProvider):
    """Anything with ``state_dict`` and ``load_state_dict``: schedulers, loaders, scalers.

    Attributes:
        is_data: it gives batches or samples, or their order, and its state is a position in them.
        restored_data: a position in the data has come back with it.
    """

    def __init__(self, section: str, value: Stateful) -> None:
        self.section = section
        self._value = value
        self.is_data = hasattr(type(value), "__iter__") or restores_data(value)
        self.restored_data = False
        self._pending: tuple[Any, Any] | None = None  # what was loaded, and what it says of that

    @property
    def value(self) -> Stateful:
        """As the user gave it."""
        return self._value

    def collect(self) -> Any:
        tree = self._value.state_dict()
        if self._pending is not None:
            loaded, said = self._pending
            if same_values(tree, said):
                return loaded
            self._pending = None
        return tree

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        if problem := _kind_mismatch(self._value, saved.tree):
            return RestorePlan.without([(self.section, problem)])
        spread = {name: tensor for name, tensor in live.items() if is_dtensor(tensor)}
        like = {
            name: tensor
            for name, tensor in spread.items()
            if name in saved.entries and difference(saved.entries[name], tensor) is None
        }
        return RestorePlan(saved.tree, like=like)

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        if tree is None and self._value.state_dict() is None:
            return []  # it never has any, and may not take that
        with POSITIONS.loads():
            self._value.load_state_dict(tree)
        self.restored_data = self.is_data or holds_position(tree)
        if isinstance(self._value, torch.amp.GradScaler) and self._value.is_enabled():
            # It knows of gradients that it has unscaled, or found infinities in, which are gone: it
            # would not unscale the next ones. This is what its update() leaves.
            self._value._per_optimizer_states.clear()
        # What it makes only once it is asked for it (a generator, say), it makes now: the process's
        # generators are restored after this.
        self._pending = None
        said = self._value.state_dict()
        if self.is_data and not same_values(said, tree):
            # A stream that takes its position only when it is iterated: until then this is it.
            self._pending = tree, copy.deepcopy(said)
        return []


def restores_data(value: object) -> bool:
    """Return whether a loader restores its own position, and draws nothing in doing so."""
    return bool(getattr(value, "everstep_restores_data", False))


def has_inspected_gradients(scaler: torch.amp.GradScaler) -> bool:
    """Whether it has looked at gradients since its last ``update()``."""
    if not scaler.is_enabled():
        return False
    return any(one["stage"] is not OptState.READY for one in scaler._per_optimizer_states.values())


def _kind_mismatch(value: Stateful, saved: Any) -> str | None:
    """Why torch would take the state of another scheduler, or of a scaler that does nothing, and go
    on without a word as neither does; None: it is of this kind, as far as that can be told. (A
    newer torch may keep more of the same scheduler, or less.)"""
    if getattr(value, "everstep_restores_data", False):
        return value.refusal(saved)  # type: ignore[attr-defined,no-any-return]
    if not isinstance(saved, dict):
        return None
    if isinstance(value, torch.amp.GradScaler):
        if bool(saved) == value.is_enabled():
            return None
        return f"a scaler that is {'enabled' if saved else 'disabled'}, here it is not"
    if isinstance(value, LRScheduler):
        theirs = saved.keys()
        mine = value.state_dict().keys()
        more = sorted(map(str, theirs - mine))
        less = sorted(map(str, mine - theirs))
        if more and less:
            what = f"it has {', '.join(more)}, and no {', '.join(less)}"
            return f"another scheduler than {type(value).__name__}: {what}"
    return None


_FINISHED = "_iterator_finished"
_ITERATION = "iteration"


class LoaderProvider(StatefulProvider):
    """A loader that :class:`.Positions` follows.

    accelerate puts a loader of its own around torchdata's. That one counts its epochs, which is in
    no state; it fetches a batch ahead, and keeps the state before that; and it says that an epoch
    is finished while its last batch is still trained on.
    """

    def __init__(self, section: str, value: Any) -> None:
        super().__init__(section, value)
        self._loader: Any = loader_within(value)
        self._outer: Any = None if self._loader is value else value
        follow_existing(self._loader, POSITIONS)

    @staticmethod
    def takes(value: object) -> bool:
        """Return whether a value is such a loader.

        Raises:
            OptionError: it is accelerate's around a loader without a position.
        """
        inner = loader_within(value)
        if inner is not value and isinstance(inner, DataLoader) and not is_followed(inner):
            raise OptionError(
                f"a {type(value).__name__} around torch's own DataLoader has no position",
                hint="Accelerator(dataloader_config=DataLoaderConfiguration("
                "use_stateful_dataloader=True)), or everstep.data.ResumableLoader",
            )
        return is_followed(inner)

    def collect(self) -> Any:
        if self._outer is None:
            return self._loader.state_dict()
        if self._loader._iterator is None:  # the outer one has the state of one that is gone
            tree = dict(self._loader.state_dict())
        else:
            tree = dict(self._outer.state_dict())
        iteration = self._outer.iteration
        if tree.get(_FINISHED) and self._is_iterated():
            # No batch is left, but the loop is still in this epoch, which ends without one more.
            tree[_FINISHED] = False
            iteration += 1
        return {**tree, KEY: {**tree.get(KEY, {}), _ITERATION: iteration}}

    def _is_iterated(self) -> bool:
        """Return whether a loop over accelerate's loader is under way."""
        under_way = self._outer.gradient_state.dataloader_references
        return any(one is self._outer for one in under_way)

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        notes = super().restore(tree, strict=strict)
        if self._outer is not None and isinstance(tree, dict):
            self._outer.iteration = tree.get(KEY, {}).get(_ITERATION, self._outer.iteration)
        return notes
