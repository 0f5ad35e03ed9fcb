"""The self-test of the blocked path: on this torch, are its bits those of ``step()``?

What torch computes on a block is not promised anywhere. So before the first use, and once
per kind of configuration, small random tensors are updated both ways and compared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.replay.blocked import ALIGNMENT_ELEMENTS, UNFUSED_ELEMENTS, Blocked
from everstep.replay.own import build, step_over
from everstep.replay.updates import Update

__all__ = ["blocked_is_exact", "compiled_is_exact"]

_log = logging.getLogger("everstep")
_proven: dict[tuple[Any, ...], bool] = {}

_TURNED = "turned"
_SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "empty": (0,),
    "small": (7,),
    "line": (2 * ALIGNMENT_ELEMENTS + 37,),
    "square": (5, ALIGNMENT_ELEMENTS),
    _TURNED: (9, 40),
}
_LARGE_SHAPES = {"large": (UNFUSED_ELEMENTS + ALIGNMENT_ELEMENTS + 37,)}
_UPDATES = 4


def blocked_is_exact(
    kind: type[Optimizer], update: Update, number: int, dtype: torch.dtype
) -> bool:
    """Whether the blocked path gives the bits of ``kind.step()`` for updates like this one.

    Args:
        kind: one of :data:`~everstep.replay.forms.KINDS`.
        update: says which hyperparameters and which of a scaler's tensors there are; that they
            are zero or not matters, not their values.
        number: of the parameter group.
        dtype: of the parameters, on the CPU.
    """
    return _proven_for(kind, update, number, dtype, False)


def compiled_is_exact(
    kind: type[Optimizer], update: Update, number: int, dtype: torch.dtype
) -> bool:
    """Whether the blocked path does so with programs instead of torch's functions (``passes``).

    Args:
        kind, update, number, dtype: as for :func:`blocked_is_exact`.
    """
    return _proven_for(kind, update, number, dtype, True)


def _proven_for(
    kind: type[Optimizer], update: Update, number: int, dtype: torch.dtype, compiled: bool
) -> bool:
    options = update.groups[number]
    scaled = (update.grad_scale is not None, update.found_inf is not None)
    signature = tuple(sorted((key, _form(value)) for key, value in options.items()))
    key = (torch.__version__, kind, dtype, compiled, scaled, signature)
    if key not in _proven:
        found = _same_bits(kind, options, scaled, dtype, _SHAPES, compiled)
        # Blocks as large as those that they will be, too: an operator may care.
        found = found and (
            not compiled or _same_bits(kind, options, scaled, dtype, _LARGE_SHAPES, compiled)
        )
        _proven[key] = found
        if not found:
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
    return _proven[key]


def _form(value: Any) -> str:
    """What torch may choose its code by."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"tensor of {value.dtype}"
    if isinstance(value, (int, float)):
        return f"{type(value).__name__} {value != 0}"
    if isinstance(value, (tuple, list)):
        return str([_form(item) for item in value])
    return type(value).__name__


def _same_bits(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    scaled: tuple[bool, bool],
    dtype: torch.dtype,
    shapes: Mapping[str, tuple[int, ...]],
    compiled: bool,
) -> bool:
    drawn = torch.Generator().manual_seed(0)  # not the generator that training draws from

    def tensors() -> dict[str, torch.Tensor]:
        found = {n: torch.randn(s, generator=drawn).to(dtype) for n, s in shapes.items()}
        if _TURNED in found:
            found[_TURNED] = found[_TURNED].t()
        return found

    # A learning rate of a warm-up's first steps would hide what it multiplies.
    rate = options.get("lr")
    if isinstance(rate, torch.Tensor):
        options = {**options, "lr": torch.full_like(rate, 0.01)}
    elif rate:
        options = {**options, "lr": 0.01}
    start = tensors()
    updates = []
    for lsn in range(1, _UPDATES + 1):
        gradients = tensors()
        if lsn == 3:
            gradients.pop("square", None)
        scale = torch.tensor(4.0) if scaled[0] else None
        inf = torch.tensor(0.0) if scaled[1] else None
        updates.append(Update(lsn, "", (options,), gradients, scale, inf))
    results = []
    try:
        for blocked in (False, True):
            named = {name: tensor.clone() for name, tensor in start.items()}
            optimizer = build(kind, [list(named.values())], [options])
            step_over(optimizer, named, updates[0])  # creates the state
            if blocked:
                path = Blocked(
                    optimizer,
                    [list(named)],
                    threads=1,
                    block_elements=ALIGNMENT_ELEMENTS if shapes is _SHAPES else None,
                    compiled=lambda update, number, dtype: compiled,
                )
                if not all(path.takes(update) for update in updates[1:]):
                    return False
                path.run(updates[1:])
            else:
                for update in updates[1:]:
                    step_over(optimizer, named, update)
            results.append(_bits(optimizer, named))
    except (RuntimeError, TypeError, KeyError, AssertionError) as error:
        _log.debug("replay: self-test of %s: %r", kind.__name__, error)
        return False
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def _bits(optimizer: Optimizer, named: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    tensors = list(named.values())
    for tensor in named.values():
        state = optimizer.state.get(tensor, {})
        tensors += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    return [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
