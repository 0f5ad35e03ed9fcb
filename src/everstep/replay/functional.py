"""torch's functional forms of SGD, Adam and AdamW, behind one signature.

They run on any tensors, blocks of parameters as well, in the variant (for-loop, foreach, fused)
that the hyperparameters select; ``torch.optim``'s classes call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from everstep.replay.updates import Update

Tensors = list[torch.Tensor]
Call = Callable[[Tensors, Tensors, Mapping[str, Tensors], Tensors, Mapping[str, Any], Update], None]


@dataclass(frozen=True, slots=True)
class Form:
    """Functional form of an optimizer class.

    Attributes:
        moments: returns the names of the state tensors that have the parameter's shape.
        counts: True if there is a ``step``.
        call: the functional form: parameters, gradients, moments, steps, options, update.
    """

    moments: Callable[[Mapping[str, Any]], tuple[str, ...]]
    counts: bool
    call: Call


def _adam_moments(options: Mapping[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ()))


def _call_adam(
    parameters: Tensors,
    gradients: Tensors,
    moments: Mapping[str, Tensors],
    steps: Tensors,
    options: Mapping[str, Any],
    update: Update,
) -> None:
    beta1, beta2 = options["betas"]
    decoupled = options["decoupled_weight_decay"]
    same_dtype = len({parameter.dtype for parameter in parameters}) == 1
    if options["fused"] and same_dtype and isinstance(beta1, float):
        # As torch.optim.adam._fused_adam does, without its grouping by device and dtype, which
        # takes
        # several times as long in Python.
        for step in steps:
            step.add_(1)
        operator: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
        operator(
            parameters,
            gradients,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            moments.get("max_exp_avg_sq", []),
            steps,
            amsgrad=options["amsgrad"],
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=options["maximize"],
            grad_scale=update.grad_scale,
            found_inf=update.found_inf,
        )
        # As torch does: a skipped update does not count.
        if update.found_inf is not None:
            for step in steps:
                step.sub_(update.found_inf)
        return
    function: Any = adamw if decoupled else adam
    function(
        parameters,
        gradients,
        moments["exp_avg"],
        moments["exp_avg_sq"],
        moments.get("max_exp_avg_sq", []),
        steps,
        foreach=options["foreach"],
        fused=options["fused"],
        capturable=bool(options.get("capturable")),
        grad_scale=update.grad_scale,
        found_inf=update.found_inf,
        has_complex=any(parameter.is_complex() for parameter in parameters),
        amsgrad=options["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=options["maximize"],
    )


def _sgd_moments(options: Mapping[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if options["momentum"] != 0 else ()


def _call_sgd(
    parameters: Tensors,
    gradients: Tensors,
    moments: Mapping[str, Tensors],
    steps: Tensors,
    options: Mapping[str, Any],
    update: Update,
) -> None:
    function: Any = sgd
    function(
        parameters,
        gradients,
        moments.get("momentum_buffer", []),
        has_sparse_grad=False,
        foreach=options["foreach"],
        fused=options["fused"],
        grad_scale=update.grad_scale,
        found_inf=update.found_inf,
        weight_decay=options["weight_decay"],
        momentum=options["momentum"],
        lr=options["lr"],
        dampening=options["dampening"],
        nesterov=options["nesterov"],
        maximize=options["maximize"],
    )


_FORMS: dict[type[Optimizer], Form] = {
    SGD: Form(_sgd_moments, False, _call_sgd),
    Adam: Form(_adam_moments, True, _call_adam),
    AdamW: Form(_adam_moments, True, _call_adam),
}
KINDS = tuple(_FORMS)
"""The classes that can be updated block by block."""

_FLAGS = {"foreach": None, "fused": None, "maximize": False, "amsgrad": False, "nesterov": False}


def form_of(kind: type[Optimizer]) -> Form:
    """Return the functional form of a class in :data:`KINDS`."""
    return _FORMS[kind]


def options_of(kind: type[Optimizer], update: Update) -> list[Mapping[str, Any]]:
    """Return the hyperparameters of each group, with torch's defaults for flags that older versions
    did not have."""
    decoupled = {"decoupled_weight_decay": kind is AdamW}
    return [{**_FLAGS, **decoupled, **options} for options in update.groups]
