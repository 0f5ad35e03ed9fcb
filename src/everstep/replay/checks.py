"""Checks of updates: order, names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Optimizer, SparseAdam

from everstep.errors import ReplayError
from everstep.replay.exactness import options_refusal
from everstep.replay.fused.cuts import has_gaps
from everstep.replay.packed import Gradient
from everstep.replay.updates import Update
from everstep.state.values.tensors import same_strides

__all__ = ["Checks", "check_order", "is_widening"]


def check_order(updates: Sequence[Update], *, after: int | None, key: str | None) -> None:
    """Refuse updates that are not of one optimizer with ascending LSNs.

    Args:
        updates: updates to apply.
        after: LSN of the last applied update; None: there was none.
        key: key of the optimizer; None: not known yet.

    Raises:
        ReplayError: names the first update that is out of order.
    """
    for update in updates:
        if after is not None and update.lsn <= after:
            raise ReplayError(f"update {update.lsn} cannot follow update {after}")
        if key is not None and update.optimizer != key:
            raise ReplayError(f"update {update.lsn} is one of {update.optimizer!r}, not of {key!r}")
        key = update.optimizer
        after = update.lsn


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks of updates against an optimizer and its parameters.

    Attributes:
        kind: class of the optimizer.
        defaults: its default hyperparameters.
        names: parameter names of each group.
        parameters: by name.
        relaid: entries whose memory layout differs from training's, by parameter.
    """

    kind: type[Optimizer]
    defaults: Mapping[str, Any]
    names: Sequence[Sequence[str]]
    parameters: Mapping[str, torch.Tensor]
    relaid: Mapping[str, str]

    def check(self, update: Update, momentum: set[str]) -> None:
        """Refuse an update that does not fit.

        Args:
            update: update to apply.
            momentum: names of the parameters that have a momentum by then; extended by those that
                get one
                in this update.

        Raises:
            ReplayError: with the reason.
        """
        where = f"update {update.lsn} of {update.optimizer!r}"
        self._check_groups(where, update)
        self._check_scaler(where, update, momentum)
        fused = any(options.get("fused") for options in update.groups)
        for name, gradient in update.gradients.items():
            if why := self._mismatch(name, gradient):
                raise ReplayError(f"{where}: {why}")
            if fused and isinstance(gradient, torch.Tensor) and has_gaps(gradient):
                raise ReplayError(
                    f"{where}: a fused kernel read the gaps between elements of {name!r}"
                )
            if fused and name in self.relaid and not self._has_same_layout(name, gradient):
                raise ReplayError(
                    f"{where}: the memory layout of {self.relaid[name]!r} differs from training's, "
                    "and a fused kernel would apply gradients to the wrong elements",
                    hint="build the model in the memory format of training",
                )

    def _check_groups(self, where: str, update: Update) -> None:
        if len(update.groups) != len(self.names):
            raise ReplayError(
                f"{where} has {len(update.groups)} parameter groups, the base {len(self.names)}",
                hint="a group that is added during training needs a new base",
            )
        # Boolean flags may be missing: newer versions of torch added them, with defaults.
        needed = {
            key
            for key, value in self.defaults.items()
            if value is not None and not isinstance(value, bool)
        }
        for number, (options, names) in enumerate(zip(update.groups, self.names, strict=True)):
            if lacking := sorted(needed.difference(options)):
                raise ReplayError(f"{where}: group {number} has no {', '.join(lacking)}")
            members = [self.parameters[name] for name in names]
            if why := options_refusal(self.kind, options, members):
                raise ReplayError(f"{where}: group {number}: {why}")

    def _check_scaler(self, where: str, update: Update, momentum: set[str]) -> None:
        scaler = {"grad_scale": update.grad_scale, "found_inf": update.found_inf}
        given = {name: tensor for name, tensor in scaler.items() if tensor is not None}
        for name, tensor in given.items():
            if tensor.numel() != 1:
                raise ReplayError(f"{where}: {name} has {tensor.numel()} elements, not 1")
        for names, options in zip(self.names, update.groups, strict=True):
            concerned = [name for name in names if name in update.gradients]
            if given and concerned and not options.get("fused"):
                raise ReplayError(f"{where}: {' and '.join(given)} for a group that is not fused")
            if self.kind is not SGD or not options.get("momentum"):
                continue
            lost = [name for name in concerned if name not in momentum]
            if lost and update.skipped:
                raise ReplayError(
                    f"{where}: a scaler skipped the first step of fused SGD, after which torch "
                    f"leaves the momentum uninitialised: {', '.join(lost)}",
                    hint="capture a new base after it",
                )
            momentum.update(concerned)

    def _has_same_layout(self, name: str, gradient: Gradient) -> bool:
        """Return True if a gradient has the memory layout of its parameter."""
        parameter = self.parameters[name]
        if not isinstance(gradient, torch.Tensor):
            return parameter.is_contiguous()
        return same_strides(parameter.shape, parameter.stride(), gradient.stride())

    def _mismatch(self, name: str, gradient: Gradient) -> str | None:
        """Return why this cannot be the gradient of that parameter, or None."""
        parameter = self.parameters.get(name)
        if parameter is None:
            return f"gradient of {name!r}, which is not one of its parameters"
        if gradient.shape != parameter.shape:
            return (
                f"gradient of {name!r} has shape {list(gradient.shape)}, "
                f"the parameter {list(parameter.shape)}"
            )
        if not is_widening(gradient.dtype, parameter.dtype):
            return f"gradient of {name!r} is {gradient.dtype}, the parameter {parameter.dtype}"
        wanted = torch.sparse_coo if self.kind is SparseAdam else torch.strided
        if gradient.layout != wanted:
            return f"gradient of {name!r} is {gradient.layout}; only {wanted} can be replayed here"
        return None


def is_widening(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return True if ``wide`` has every value of ``narrow``: a log may leave out low bits that are
    zero."""
    if narrow == wide:
        return True
    if narrow.is_complex != wide.is_complex or narrow.is_floating_point != wide.is_floating_point:
        return False
    try:
        return torch.promote_types(narrow, wide) == wide
    except RuntimeError:  # fp8 and the like have no promotion
        return False
