"""Optimizers that can be replayed, and configurations where replay is bit-exact (I9).

Three separate questions:

- *May it be logged?* :func:`refusal` answers before training starts. An update must be a function
of a parameter, its gradient, its state and the hyperparameters, by code that is available at
replay.

- *Is the result exact?* :func:`exactness` answers from :data:`MATRIX`; a configuration that is not
listed there is not called exact, however likely it is.

- *May tensors be cut?* :func:`is_elementwise`: Adafactor sums over rows and columns, Muon
multiplies matrices; they are replayed on complete tensors only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.errors import OptionError
from everstep.replay.cuts import has_gaps
from everstep.state.values.tensors import local_tensor

Kind = type[Optimizer]


@dataclass(frozen=True, slots=True)
class Exactness:
    """Statement whether replay gives the bits of training.

    Attributes:
        exact: True if it does, as long as the fingerprint (torch, its number of threads, machine)
            is
            that of training.
        why: reason if not; ``""`` if it does.
    """

    exact: bool
    why: str


@dataclass(frozen=True, slots=True)
class Row:
    """Configuration for which replay is bit-exact.

    Attributes:
        optimizer: class of ``torch.optim``.
        variant: torch's implementation: ``"for-loop"``, ``"foreach"``, ``"fused"``.
        device: device type of the parameters, the same in training and replay.
    """

    optimizer: str
    variant: str
    device: str


_FOREACH = "SGD Adam AdamW Adagrad RMSprop NAdam RAdam Adamax Adadelta ASGD Rprop".split()
_FUSED = "SGD Adam AdamW Adagrad".split()

MATRIX: tuple[Row, ...] = (
    *(Row(name, "for-loop", "cpu") for name in [*_FOREACH, "SparseAdam"]),
    *(Row(name, "foreach", "cpu") for name in _FOREACH),
    *(Row(name, "fused", "cpu") for name in _FUSED),
)
"""Every configuration that is claimed to be exact; a test replays each, bit for bit.

No other device is listed: torch's own operators run there as well, on whole tensors, but a row
needs a test that ran. Adafactor and Muon are not listed because they sum and multiply over
whole tensors, in an order that depends on the number of threads. See also
:func:`thread_dependence`.
"""

_ELEMENTWISE = dict.fromkeys([*_FOREACH, "SparseAdam"], True) | {
    "Adafactor": False,
    "Muon": False,
}
"""The classes of ``torch.optim`` that can be replayed, and whether each element of a parameter
is updated independently of the others. Not every torch has all of them."""

_TORCH: dict[str, Kind] = {
    name: getattr(torch.optim, name) for name in _ELEMENTWISE if hasattr(torch.optim, name)
}
_DECLARED: dict[str, tuple[Kind, bool]] = {}

_NEEDS_CLOSURE = "it evaluates the loss several times in one step and keeps a history of gradients"
# Taken from private lists of torch (_get_capturable_supported_devices() in optim/optimizer.py,
# _get_foreach_kernels_supported_devices() in utils/_foreach_utils.py).
_CAPTURABLE_DEVICES = ("cuda", "xpu", "hpu", "xla")
_FOREACH_DEVICES = ("cuda", "xpu", "mtia")


def kind_name(kind: Kind) -> str:
    """Return the qualified name of a class, e.g. ``"torch.optim.adamw.AdamW"``."""
    return f"{kind.__module__}.{kind.__qualname__}"


def replay_kind(name: str) -> Kind | None:
    """Return the optimizer class of this name, None if it cannot be replayed.

    Nothing is imported, since names come from files. A user's class must be declared first.

    Args:
        name: as :func:`kind_name` gives it, or ``"torch.optim.AdamW"``.
    """
    if name in _DECLARED:
        return _DECLARED[name][0]
    kind = _TORCH.get(name.rpartition(".")[2])
    if kind is None or name not in (kind_name(kind), f"torch.optim.{kind.__name__}"):
        return None
    return kind


def declare(kind: Kind, *, elementwise: bool) -> None:
    """Allow optimizers of a user's class to be logged and replayed.

    The declaration promises that ``step()`` computes a parameter from the parameter, its gradient,
    its entry in ``optimizer.state`` and its group's hyperparameters, and nothing else: no random
    numbers, no closure, no other parameter, no changing attributes.

    Args:
        kind: the class. ``kind(groups)`` or ``kind(groups, **hyperparameters)`` must build one.
        elementwise: True if each element is updated independently, so that some of a tensor can
            be replayed without the rest.

    Raises:
        OptionError: it is no optimizer, or one of torch's.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise OptionError(f"{kind!r} is no torch.optim.Optimizer class")
    if _is_torchs(kind):
        raise OptionError(f"{kind_name(kind)} cannot be declared: torch's own classes are fixed")
    _DECLARED[kind_name(kind)] = (kind, elementwise)


def is_elementwise(kind: Kind) -> bool:
    """Return True if each element of a parameter is updated independently of the others."""
    if _TORCH.get(kind.__name__) is kind:
        return _ELEMENTWISE[kind.__name__]
    declared = _DECLARED.get(kind_name(kind))
    return declared is not None and declared[0] is kind and declared[1]


def variant_of(options: Mapping[str, Any], device_type: str) -> str:
    """Return the implementation of torch that a parameter group with these hyperparameters runs.

    torch decides in each optimizer's function (``torch.optim.adam.adam`` and the like): a flag that
    is set wins; if none is given, native tensors on accelerators take foreach.
    """
    foreach = options.get("foreach")
    fused = options.get("fused")
    # Classes without a foreach implementation (SparseAdam) do not have the option.
    if foreach is None and fused is None and "foreach" in options:
        tensor_lr = isinstance(options.get("lr"), torch.Tensor)
        # torch does not choose foreach for a rate that is a tensor, unless the group is capturable.
        foreach = device_type in _FOREACH_DEVICES and (
            options.get("capturable", False) or not tensor_lr
        )
    if fused:
        return "fused"
    return "foreach" if foreach else "for-loop"


def exactness(
    kind: Kind,
    groups: Sequence[Mapping[str, Any]],
    device_type: str,
) -> Exactness:
    """Return whether replay of this configuration gives the bits of training.

    Args:
        kind: class of the optimizer.
        groups: hyperparameters of its parameter groups.
        device_type: device type of the parameters, in training and in replay.
    """
    name = kind_name(kind)
    if _TORCH.get(kind.__name__) is not kind:
        return Exactness(
            False,
            f"{name} is {'declared by its user' if name in _DECLARED else 'unknown'}, "
            "not in the exactness matrix",
        )
    for options in groups:
        row = Row(kind.__name__, variant_of(options, device_type), device_type)
        if row not in MATRIX:
            return Exactness(
                False, f"{name}, {row.variant}, on {row.device} is not in the exactness matrix"
            )
    return Exactness(True, "")


HALVES = (torch.bfloat16, torch.float16)
_SERIAL_ELEMENTS = 32768
"""Up to this many elements torch's CPU loops stay in one thread (``at::internal::GRAIN_SIZE``)."""


def thread_dependence(options: Mapping[str, Any], parameters: Iterable[torch.Tensor]) -> str | None:
    """Return why the bits of an update depend on the number of torch's threads, or None.

    torch gives each thread a range of a large CPU tensor. The last elements of a range go through
    scalar code, which rounds bf16 and fp16 differently from vector code, and gives complex zeros
    other signs. For real wider types the two agree, except for the sign of a zero that ``lerp``
    makes of a negative one when all of its weight is at the other end (Adam with ``beta1 = 0``,
    centered RMSprop with ``alpha = 0``). Fused kernels share work in complete vectors.

    Args:
        options: hyperparameters of a parameter group.
        parameters: parameters of that group.
    """
    if variant_of(options, "cpu") == "fused":
        return None
    for parameter in parameters:
        large = parameter.device.type == "cpu" and parameter.numel() > _SERIAL_ELEMENTS
        if large and (parameter.dtype in HALVES or parameter.dtype.is_complex):
            dtype = str(parameter.dtype).removeprefix("torch.")
            return f"{dtype} on the CPU: torch's rounding depends on its number of threads"
        if large and _forgets_at_once(options):
            return "no average is kept: the sign of zeros depends on torch's number of threads"
    return None


def _forgets_at_once(options: Mapping[str, Any]) -> bool:
    kept = options.get("betas", (1.0,))[0]
    if options.get("centered"):
        kept = options["alpha"]
    return float(kept) == 0.0


# --- Refusals ------------------------------------------------------------


def refusal(optimizer: Optimizer, *, parts: bool = False) -> str | None:
    """Return why the updates of this optimizer cannot be logged and replayed, or None if they can.

    For use before training starts. Sparse gradients show only in training; see
    :meth:`~everstep.replay.engine.Replayer.apply`.

    Args:
        optimizer: optimizer to check.
        parts: each rank replays its own shards of sharded parameters.
    """
    return next(_refusals(optimizer, parts), None)


def _refusals(optimizer: Optimizer, parts: bool) -> Iterator[str]:
    kind = type(optimizer)
    if why := kind_refusal(kind):
        yield why
        return
    replaced = vars(optimizer).get("step")
    # Schedulers put a wrapper on the instance that only counts calls.
    if replaced is not None and _innermost(replaced) is not _innermost(kind.step):
        yield f"the step() of this {kind.__name__} was replaced by {replaced!r}"
    for group in optimizer.param_groups:
        if why := options_refusal(kind, group, group["params"]):
            yield why
        for position, parameter in enumerate(group["params"]):
            own = local_tensor(parameter) if parts else parameter
            if own.shape != parameter.shape and not is_elementwise(kind):
                yield (
                    f"parameter {position} is spread over ranks, and a {kind.__name__} does not "
                    "act element by element: no rank can replay its part of it"
                )
            if why := tensor_refusal(own):
                yield f"parameter {position}: {why}"


def kind_refusal(kind: Kind) -> str | None:
    """Return why no optimizer of this class can be replayed, or None."""
    # By identity: a class of the user may have the name of one of torch.
    if _TORCH.get(kind.__name__) is kind or _DECLARED.get(kind_name(kind), (None,))[0] is kind:
        return None
    if kind is torch.optim.LBFGS:
        return f"{kind.__name__} cannot be replayed from one gradient a step: {_NEEDS_CLOSURE}"
    if _is_torchs(kind):
        return f"{kind_name(kind)} is not known to this version"
    bases = [base.__name__ for base in kind.__mro__[1:] if base in _TORCH.values()]
    return (
        f"{kind_name(kind)} is not one of torch.optim's classes"
        + (f" (a subclass of {bases[0]} may do anything)" if bases else "")
        + "; if its update of a parameter depends on nothing but the parameter, its gradient, its "
        "state and the hyperparameters, declare it: everstep.replay.exactness.declare(...)"
    )


def options_refusal(
    kind: Kind, options: Mapping[str, Any], parameters: Sequence[torch.Tensor]
) -> str | None:
    """Return why a parameter group with these hyperparameters cannot be replayed, or None."""
    if options.get("differentiable"):
        return "differentiable=True: the update is part of a graph, not a change in place"
    if options.get("capturable"):
        types = {parameter.device.type for parameter in parameters}
        known = (*_CAPTURABLE_DEVICES, torch._C._get_privateuse1_backend_name())
        if wrong := sorted(types.difference(known)):
            return f"capturable=True: torch has no such update on {', '.join(wrong)}"
    if options.get("fused") and any(map(has_gaps, parameters)):
        return (
            "a fused kernel over a parameter with gaps between its elements in memory changes "
            "what lies there; use fused=False, or a contiguous parameter"
        )
    halves = any(p.device.type == "cpu" and p.dtype in HALVES for p in parameters)
    if kind is torch.optim.SGD and options.get("fused") and options.get("momentum") and halves:
        return (
            "fused SGD with momentum in half precision on the CPU: torch 2.13 computes it wrongly, "
            "from memory of other tensors (pytorch #191763); use fused=False"
        )
    return None


def tensor_refusal(parameter: torch.Tensor) -> str | None:
    """Return why updates of this parameter cannot be replayed, or None."""
    if type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(parameter).__name__} is not a plain tensor"
    if parameter.layout != torch.strided:
        return f"{parameter.layout} parameters are not supported"
    return None


def _is_torchs(kind: Kind) -> bool:
    return kind.__module__.startswith("torch.optim.")


def _innermost(function: Any) -> Any:
    return inspect.unwrap(getattr(function, "__func__", function))
