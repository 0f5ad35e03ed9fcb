"""Self-tests of the fast path: does this torch give the bits of ``step()`` for it?

torch does not promise the results of its functions on blocks. So before the first use, once for
each kind of configuration, small random tensors are updated by ``step()`` and in blocks, and
compared.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.replay.blocked import ALIGNMENT_ELEMENTS, UNFUSED_ELEMENTS, Blocked
from everstep.replay.exactness import HALVES
from everstep.replay.optimizer_step import build, step_over
from everstep.replay.updates import Update

_log = logging.getLogger("everstep")

_TURNED = "turned"
_SPREAD = "line"
_MIXED = "mixed"
Shapes = Mapping[str, tuple[int, ...]]
_SMALL: Shapes = {
    "scalar": (),
    "empty": (0,),
    "small": (7,),
    _SPREAD: (2 * ALIGNMENT_ELEMENTS + 37,),
    "square": (5, ALIGNMENT_ELEMENTS),
    _TURNED: (9, 40),
    # One parameter whose gradients have another memory order; small enough for a single block.
    _MIXED: (7, 9),
}
_LARGE: Shapes = {"large": (UNFUSED_ELEMENTS + ALIGNMENT_ELEMENTS + 37,)}

_UPDATES = 4
_WIDE = (torch.float32, torch.float64, torch.bfloat16)

_proven: dict[tuple[Any, ...], bool] = {}


@dataclass(frozen=True, slots=True)
class _Case:
    """Everything that may decide which code of torch runs, on the CPU.

    Attributes:
        kind: one of :data:`~everstep.replay.blocked.KINDS`.
        options: hyperparameters of a group. Of values it matters only if they are zero, one, or at
            most a half.
        scaled: presence of a scaler's ``grad_scale`` and ``found_inf``.
        dtype: dtype of the parameters.
        compiled: blocks are updated by programs (``programs``) instead of torch's functions.
    """

    kind: type[Optimizer]
    options: Mapping[str, Any]
    scaled: tuple[bool, bool]
    dtype: torch.dtype
    compiled: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equivalent cases."""
        options = tuple(sorted((key, _form(value)) for key, value in self.options.items()))
        return torch.__version__, self.kind, self.dtype, self.scaled, self.compiled, options


def blocks_are_exact(
    kind: type[Optimizer],
    update: Update,
    number: int,
    dtype: torch.dtype,
    *,
    compiled: bool = False,
) -> bool:
    """Return True if the blocked path gives the bits of ``kind.step()`` for updates like this one.

    Args:
        kind: one of :data:`~everstep.replay.blocked.KINDS`.
        update: determines the hyperparameters and the presence of a scaler's tensors.
        number: number of the parameter group.
        dtype: dtype of the parameters, on the CPU.
        compiled: with programs instead of torch's functions (``programs``).
    """
    scaled = (update.grad_scale is not None, update.found_inf is not None)
    case = _Case(kind, update.groups[number], scaled, dtype, compiled)
    if case.key not in _proven:
        _proven[case.key] = _passes(case)
        if not _proven[case.key]:
            _log.warning(
                "replay: %s of %s (%s) are not bit-equal to its step() on torch %s; "
                "%s, more slowly",
                "compiled passes over blocks" if compiled else "blocks",
                kind.__name__,
                dtype,
                torch.__version__,
                "torch's own functions are called"
                if compiled
                else "whole tensors are updated instead",
            )
    return _proven[case.key]


def _passes(case: _Case) -> bool:
    """Return True if both methods give the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # ``thread_dependence`` covers the number of threads
    try:
        # With programs in blocks of the real size as well: operators may choose code by size.
        return _same(case, True, _SMALL) and (not case.compiled or _same(case, False, _LARGE))
    except Exception as error:  # of torch, or of a compiler
        _log.debug("replay: self-test of %s: %r", case, error)
        return False
    finally:
        torch.set_num_threads(threads)


def _same(case: _Case, tiny: bool, shapes: Shapes) -> bool:
    if case.dtype in HALVES:  # blocks do not take those
        shapes = {name: shape for name, shape in shapes.items() if name != _MIXED}
    # A generator of its own: training's random numbers must not change.
    drawn = torch.Generator().manual_seed(0)
    start = _tensors(shapes, case.dtype, drawn)
    updates = list(_updates(case, shapes, drawn))
    results = []
    # Both methods start from equal tensors, and from state that step() has made.
    for own in (True, False):
        named = {name: tensor.clone() for name, tensor in start.items()}
        optimizer = build(case.kind, [list(named.values())], updates[0].groups)
        step_over(optimizer, named, updates[0])  # creates the state
        if own:
            for update in updates[1:]:
                step_over(optimizer, named, update)
        else:
            path = Blocked(
                optimizer,
                [list(named)],
                named,
                threads=1,
                block_elements=ALIGNMENT_ELEMENTS if tiny else None,
                compiled=lambda update, number, dtype: case.compiled,
            )
            if not all(path.takes(update) for update in updates[1:]):
                return False
            path.run(updates[1:])
        results.append(_state(optimizer, named))
    return all(
        # As bytes: NaN is equal to itself then, and zeros of different sign are not.
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(*results, strict=True)
    )


def _form(value: Any) -> str:
    """Return the properties of a value by which torch, or a kernel, may choose its code."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"tensor of {value.dtype}"
    if isinstance(value, (int, float)):
        return f"{type(value).__name__} {value != 0} {value == 1} {abs(value) <= 0.5}"
    if isinstance(value, (tuple, list)):
        return str([_form(item) for item in value])
    return type(value).__name__


def _updates(case: _Case, shapes: Shapes, drawn: torch.Generator) -> Iterator[Update]:
    options = {key: _telling(key, value) for key, value in case.options.items()}
    for lsn in range(1, _UPDATES + 1):
        gradients = _tensors(shapes, case.dtype, drawn)
        if _MIXED in gradients:
            gradients[_MIXED] = gradients[_MIXED].t().contiguous().t()
        if lsn == 3:
            # A parameter without a gradient in one update has another step count from then on.
            gradients.pop("square", None)
        if _SPREAD in gradients and case.dtype in _WIDE:  # squares of some are denormal
            spread = torch.logspace(-24, 12, gradients[_SPREAD].numel(), device="cpu")
            gradients[_SPREAD] = (gradients[_SPREAD] * spread).to(case.dtype)
        scale = torch.tensor(4.0, device="cpu") if case.scaled[0] else None
        inf = torch.tensor(0.0, device="cpu") if case.scaled[1] else None
        yield Update(lsn, "", (options,), gradients, scale, inf)


def _telling(key: str, value: Any) -> Any:
    """Return another value of a hyperparameter, equivalent by :func:`_form`, that does not hide
    rounding. A learning rate from the first steps of a warm-up would, and so would a factor of
    0.999, which leaves any bfloat16 unchanged."""
    if key == "lr" and isinstance(value, torch.Tensor):
        return torch.full_like(value, 0.13)
    if isinstance(value, tuple | list):
        return type(value)(_telling(key, item) for item in value)
    if key not in ("lr", "betas", "momentum", "dampening", "weight_decay"):
        return value
    if not isinstance(value, float) or value in (0, 1):
        return value
    return math.copysign(0.13 if abs(value) <= 0.5 else 0.83, value)


def _tensors(shapes: Shapes, dtype: torch.dtype, drawn: torch.Generator) -> dict[str, torch.Tensor]:
    found = {
        name: torch.randn(shape, generator=drawn, device="cpu").to(dtype)
        for name, shape in shapes.items()
    }
    if _TURNED in found:
        found[_TURNED] = found[_TURNED].t()
    return found


def _state(optimizer: Optimizer, named: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    tensors = list(named.values())
    for tensor in named.values():
        state = optimizer.state.get(tensor, {})
        tensors += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    return [tensor.detach().contiguous().reshape(-1) for tensor in tensors]
