"""TorchScript programs of SGD, Adam and AdamW: operator by operator, several updates in one call.

torch's for-loop and foreach variants make several passes over a tensor, each a call from Python. On
blocks that fit a core's second-level cache a pass takes some 10 us, and threads that release and
reacquire the GIL around each pass are together no faster than one. So the same operators, with the
same numbers in the same order, are a TorchScript program here: it runs without the GIL, and writes
to preallocated memory. ``self_test`` checks on the installed torch that its bits are those of
``step()``; if not, or if there is no TorchScript, torch's own functions are called.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import SGD, Optimizer

Numbers = list[float]
Program = Callable[
    [
        list[torch.Tensor],
        list[list[torch.Tensor]],
        list[list[torch.Tensor]],
        list[list[Numbers]],
        torch.Tensor,
        torch.Tensor,
    ],
    None,
]

COUNT_MAX = 2**24
"""Steps are counted in float32, which represents every integer up to this one."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_OF_SGD = ("lr", "momentum", "dampening", "weight_decay")
_OF_ADAM = ("lr", "eps", "weight_decay")

_log = logging.getLogger("everstep")


def _widened(gradient: torch.Tensor, parameter: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Return the gradient in the dtype of the parameter; for a block, in preallocated memory."""
    if gradient.dtype == parameter.dtype:
        return gradient
    if parameter.dim() == 1:
        return wide[: parameter.numel()].copy_(gradient)
    return gradient.to(parameter.dtype)


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Do ``tensor.mul_(factor)`` as Python calls it. TorchScript's own call takes another overload,
    which rounds the factor to the tensor's dtype: 0.95 is 0.9492 in bfloat16."""
    one = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    return one.mul_(torch.scalar_tensor(factor, dtype=torch.float64, device="cpu"))


def _adam(
    parameters: list[torch.Tensor],
    moments: list[list[torch.Tensor]],
    gradients: list[list[torch.Tensor]],
    numbers: list[list[list[float]]],
    room: torch.Tensor,
    wide: torch.Tensor,
) -> None:
    means = moments[0]
    squares = moments[1]
    for logged, known in zip(gradients, numbers):  # noqa: B905 - TorchScript's has no `strict`
        for i in range(len(parameters)):
            parameter = parameters[i]
            mean = means[i]
            square = squares[i]
            own = known[i]
            line = parameter.dim() == 1
            work = room[: parameter.numel()] if line else torch.empty_like(square)
            gradient = _widened(logged[i], parameter, wide)
            if own[0] == 1.0:
                _times(parameter, own[1])
            elif own[0] == 2.0:
                # Not in place: logged gradients must not change.
                gradient = torch.add(gradient, parameter, alpha=own[1], out=work)
            mean.lerp_(gradient, own[2])
            _times(square, own[3])
            square.addcmul_(gradient, gradient, value=own[4])
            # `work` may hold the gradient, which is not needed from here on.
            torch.sqrt(square, out=work)
            work.div_(own[5]).add_(own[6])
            parameter.addcdiv_(mean, work, value=own[7])


def _adam_numbers(options: Mapping[str, Any], count: float) -> Numbers:
    """Compute the numbers as ``torch.optim.adam`` does; the first encodes how weights decay."""
    rate = options["lr"]
    decay = options["weight_decay"]
    (beta1, beta2) = options["betas"]
    decoupled = options["decoupled_weight_decay"]
    # The expressions of torch, term by term: a different order, or sqrt(), may round differently.
    size = rate / (1 - beta1**count)
    return [
        float((1 if decoupled else 2) if decay != 0 else 0),
        float(1 - rate * decay if decoupled else decay),
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**count) ** 0.5,
        float(options["eps"]),
        -size,
    ]


def _sgd(
    parameters: list[torch.Tensor],
    moments: list[list[torch.Tensor]],
    gradients: list[list[torch.Tensor]],
    numbers: list[list[list[float]]],
    room: torch.Tensor,
    wide: torch.Tensor,
) -> None:
    for logged, known in zip(gradients, numbers):  # noqa: B905 - TorchScript's has no `strict`
        for i in range(len(parameters)):
            parameter = parameters[i]
            own = known[i]
            line = parameter.dim() == 1
            work = room[: parameter.numel()] if line else torch.empty_like(parameter)
            gradient = _widened(logged[i], parameter, wide)
            if own[0] != 0.0:
                gradient = torch.add(gradient, parameter, alpha=own[0], out=work)
            if len(moments) > 0:
                buffer = moments[0][i]
                _times(buffer, own[1])
                buffer.add_(gradient, alpha=own[2])
                if own[3] != 0.0:
                    gradient = torch.add(gradient, buffer, alpha=own[1], out=work)
                else:
                    gradient = buffer
            parameter.add_(gradient, alpha=own[4])


def _sgd_numbers(options: Mapping[str, Any], count: float) -> Numbers:
    """Compute the numbers as ``torch.optim.sgd`` does."""
    return [
        float(options["weight_decay"]),
        float(options["momentum"]),
        float(1 - options["dampening"]),
        float(bool(options["nesterov"])),
        float(-options["lr"]),
    ]


def suits(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    dtypes: Iterable[torch.dtype],
    counts: Iterable[float] = (),
) -> bool:
    """Return True if there is a program for these hyperparameters; its bits are checked elsewhere.

    Args:
        kind: one of :data:`~everstep.replay.functional.KINDS`.
        options: hyperparameters of a group.
        dtypes: dtypes of the parameters and their moments.
        counts: steps of the parameters after the updates.
    """
    flags = ("fused", "maximize", "amsgrad", "capturable", "differentiable")
    if any(options.get(flag) for flag in flags):
        return False
    values = [options[key] for key in (_OF_SGD if kind is SGD else _OF_ADAM)]
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
        return False  # a tensor: torch may take other operators
    if kind is not SGD and not all(isinstance(beta, float) for beta in options["betas"]):
        return False
    if len(found := set(dtypes)) > 1 or not found.issubset(_DTYPES):
        return False
    return all(0 < count < COUNT_MAX for count in counts) and program(kind) is not None


def numbers(kind: type[Optimizer], options: Mapping[str, Any], count: float) -> Numbers:
    """Return the numbers that the operators of one update take.

    Args:
        kind: one of :data:`~everstep.replay.functional.KINDS`.
        options: hyperparameters that :func:`suits` has accepted.
        count: step count, including this update.
    """
    return (_sgd_numbers if kind is SGD else _adam_numbers)(options, count)


def program(kind: type[Optimizer]) -> Program | None:
    """Return the program of an optimizer class, None if there is none.

    It updates tensors in place. Its arguments are parameters; moments by kind, in the order of
    their names; gradients and numbers for each update; and two buffers of one block, for
    intermediate results and for gradients of another dtype than the parameters.
    """
    return _compiled(_sgd if kind is SGD else _adam)


@functools.cache
def _compiled(function: Callable[..., None]) -> Program | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates TorchScript
            jit: Any = torch.jit
            script = jit.script(function)
    except (RuntimeError, OSError, TypeError, AttributeError) as error:
        _log.debug("replay: no TorchScript of %s: %r", function.__name__, error)
        return None

    def run(*arguments: Any) -> None:
        # No profiling and no rewriting: both take longer than they gain.
        with jit.optimized_execution(False):
            script(*arguments)

    return run


class WorkBuffers:
    """Buffers for a program, by dtype; allocated once, since fresh memory is slow to write to.

    Args:
        elements: number of elements of a block.
    """

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._pairs: dict[torch.dtype, Sequence[torch.Tensor]] = {}

    def of(self, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Return two buffers of one block each."""
        if dtype not in self._pairs:
            pair = [torch.empty(self._elements, dtype=dtype, device="cpu") for _ in range(2)]
            self._pairs[dtype] = pair
        return self._pairs[dtype]
