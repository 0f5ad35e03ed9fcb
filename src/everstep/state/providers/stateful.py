"""Provider of objects with ``state_dict()`` and ``load_state_dict()``: schedulers, scalers,
loaders.

Loaders of torchdata, alone or within accelerate's, have a provider of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.amp.grad_scaler import OptState
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from everstep.errors import OptionError
from everstep.state.positions import (
    KEY,
    POSITIONS,
    follow_existing,
    holds_position,
    is_followed,
    loader_within,
    same_values,
)
from everstep.state.providers.provider import RestorePlan, Saved, SectionProvider, difference
from everstep.state.values.tensors import is_dtensor


@runtime_checkable
class Stateful(Protocol):
    """Protocol of torch.distributed.checkpoint: an object that returns and takes its state."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class StatefulProvider(SectionProvider):
    """Provider of an object with ``state_dict`` and ``load_state_dict``.

    Attributes:
        section: key in the state dict.
        is_data: the object gives batches or samples, or their order, and its state is a position in
            them.
        restored_data: a position in the data was restored with it.
    """

    def __init__(self, section: str, value: Stateful) -> None:
        self.section = section
        self._value = value
        self.is_data = hasattr(type(value), "__iter__") or restores_data(value)
        self.restored_data = False
        self._pending: tuple[Any, Any] | None = (
            None  # the loaded tree, and the state that the object returned after loading it
        )

    @property
    def value(self) -> Stateful:
        """The object as the user gave it."""
        return self._value

    def collect(self) -> Any:
        tree = self._value.state_dict()
        if self._pending is not None:
            loaded, returned = self._pending
            # As long as the object returns the same state, it has not applied the loaded one yet.
            if same_values(tree, returned):
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
            return []  # the object has no state, and may not accept None
        with POSITIONS.loads():
            self._value.load_state_dict(tree)
        self.restored_data = self.is_data or holds_position(tree)
        if isinstance(self._value, torch.amp.GradScaler) and self._value.is_enabled():
            # The scaler keeps a stage per optimizer for gradients that no longer exist, and would
            # not unscale the next ones. Its update() leaves the same empty dict.
            self._value._per_optimizer_states.clear()
        # Ask for the state now, so that anything created lazily (a generator, say) is created
        # before the generators of the process are restored.
        self._pending = None
        returned = self._value.state_dict()
        if self.is_data and not same_values(returned, tree):
            # A stream that takes its position only when it is iterated: save the loaded state
            # until then.
            self._pending = tree, copy.deepcopy(returned)
        return []


def restores_data(value: object) -> bool:
    """Return True if a loader restores its own position without random draws."""
    return bool(getattr(value, "everstep_restores_data", False))


def has_inspected_gradients(scaler: torch.amp.GradScaler) -> bool:
    """Return True if a scaler has inspected gradients since its last ``update()``."""
    if not scaler.is_enabled():
        return False
    return any(one["stage"] is not OptState.READY for one in scaler._per_optimizer_states.values())


def _kind_mismatch(value: Stateful, saved: Any) -> str | None:
    """Return the reason why saved state belongs to another kind of scheduler or scaler; None if it
    may fit.

    torch would load such state without an error and continue with neither object's behaviour. Other
    versions of torch may save more or fewer keys of the same scheduler.
    """
    if getattr(value, "everstep_restores_data", False):
        return value.refusal(saved)  # type: ignore[attr-defined,no-any-return]
    if not isinstance(saved, dict):
        return None
    if isinstance(value, torch.amp.GradScaler):
        if bool(saved) == value.is_enabled():
            return None
        return (
            f"saved by a scaler that is {'enabled' if saved else 'disabled'}, the live one is not"
        )
    if isinstance(value, LRScheduler):
        theirs = saved.keys()
        mine = value.state_dict().keys()
        more = sorted(map(str, theirs - mine))
        less = sorted(map(str, mine - theirs))
        if more and less:
            keys = f"the saved state has {', '.join(more)}, and no {', '.join(less)}"
            return f"saved by another scheduler than {type(value).__name__}: {keys}"
    return None


_FINISHED = "_iterator_finished"
_ITERATION = "iteration"


class LoaderProvider(StatefulProvider):
    """Provider of a loader whose position :class:`.LoaderPositions` completes.

    accelerate puts a loader of its own around torchdata's. The outer one counts its epochs, which
    is in no state; it fetches a batch ahead, and keeps the state before that; and it reports an
    epoch as finished while its last batch is still trained on.
    """

    def __init__(self, section: str, value: Any) -> None:
        super().__init__(section, value)
        self._loader: Any = loader_within(value)
        self._outer: Any = None if self._loader is value else value
        follow_existing(self._loader)

    @staticmethod
    def takes(value: object) -> bool:
        """Return True if a value is such a loader.

        Raises:
            OptionError: accelerate's loader around a loader without a position.
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
        if self._loader._iterator is None:  # the outer loader holds the state of an old iterator
            tree = dict(self._loader.state_dict())
        else:
            tree = dict(self._outer.state_dict())
        iteration = self._outer.iteration
        if tree.get(_FINISHED) and self._is_iterated():
            # The loop still trains on the epoch's last batch. After a resume the epoch ends
            # without another batch, so it must not be saved as finished.
            tree[_FINISHED] = False
            iteration += 1
        return {**tree, KEY: {**tree.get(KEY, {}), _ITERATION: iteration}}

    def _is_iterated(self) -> bool:
        """Return True while a loop iterates over accelerate's loader."""
        under_way = self._outer.gradient_state.dataloader_references
        return any(one is self._outer for one in under_way)

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        notes = super().restore(tree, strict=strict)
        if self._outer is not None and isinstance(tree, dict):
            self._outer.iteration = tree.get(KEY, {}).get(_ITERATION, self._outer.iteration)
        return notes
