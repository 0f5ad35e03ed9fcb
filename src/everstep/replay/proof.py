"""The self-tests of blocks, slices and kernels: on this torch, are their bits those of ``step()``?

What torch computes on a block is not promised anywhere. So before the first use, and once
per kind of configuration, small random tensors are updated both ways and compared (``trial``).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.compress.quantized import BLOCK_NUMEL
from everstep.replay.exactness import variant_of
from everstep.replay.fused.alike import Kernel
from everstep.replay.fused.blocked import ALIGNMENT_ELEMENTS, Blocked
from everstep.replay.fused.slices import Sliced
from everstep.replay.trial import (
    LARGE,
    LONG,
    MIXED,
    SMALL,
    Case,
    Way,
    nearly_same,
    same_bits,
    tried,
)
from everstep.replay.updates import Update

__all__ = ["blocked_is_exact", "compiled_is_exact", "kernel_for", "sliced_is_exact"]

_log = logging.getLogger("everstep")
_proven: dict[tuple[Any, ...], bool] = {}
_kernels: dict[tuple[Any, ...], tuple[Kernel, bool] | None] = {}

_CPU = torch.device("cpu")


def _blocks(optimizer: Optimizer, names: Any, tiny: bool, compiled: bool = False) -> Blocked:
    return Blocked(
        optimizer,
        names,
        threads=1,
        block_elements=ALIGNMENT_ELEMENTS if tiny else None,
        compiled=lambda update, number, dtype: compiled,
    )


def _slices(optimizer: Optimizer, names: Any, tiny: bool, kernel: Kernel | None = None) -> Sliced:
    elements = BLOCK_NUMEL if tiny else None
    return Sliced(optimizer, names, elements=elements, kernel=lambda update, number: kernel)


_WHOLE = "whole tensors are updated instead"
_BLOCKS = Way("blocks", _WHOLE, _blocks, [(True, MIXED)])
_COMPILED = Way(
    "compiled passes over blocks",
    "torch's own functions are called",
    functools.partial(_blocks, compiled=True),
    # Blocks as large as those that they will be, too: an operator may care.
    [(True, MIXED), (False, LARGE)],
)
_SLICES = Way("slices", _WHOLE, _slices, [(True, SMALL), (False, LONG)])


def blocked_is_exact(
    kind: type[Optimizer], update: Update, number: int, dtype: torch.dtype
) -> bool:
    """Whether the blocked path gives the bits of ``kind.step()`` for updates like this one.

    Args:
        kind: one of :data:`~everstep.replay.forms.KINDS`.
        update: says which hyperparameters and which of a scaler's tensors there are.
        number: of the parameter group.
        dtype: of the parameters, on the CPU.
    """
    return _proven_for(_BLOCKS, _case(kind, update, number, dtype, _CPU))


def compiled_is_exact(
    kind: type[Optimizer], update: Update, number: int, dtype: torch.dtype
) -> bool:
    """Whether the blocked path does so with programs instead of torch's functions (``passes``).

    Args:
        kind, update, number, dtype: as for :func:`blocked_is_exact`.
    """
    return _proven_for(_COMPILED, _case(kind, update, number, dtype, _CPU))


def sliced_is_exact(
    kind: type[Optimizer], update: Update, number: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether slices (``slices``) give the bits of ``kind.step()`` on a device.

    Args:
        kind, update, number, dtype: as for :func:`blocked_is_exact`.
        device: of the parameters.
    """
    return _proven_for(_SLICES, _case(kind, update, number, dtype, device))


def kernel_for(
    kind: type[Optimizer], update: Update, number: int, device: torch.device, *, inexact: bool
) -> tuple[Kernel, bool] | None:
    """A kernel that may take the place of torch's functions on slices of float32.

    Args:
        kind, update, number, device: as for :func:`sliced_is_exact`.
        inexact: one that gives the same numbers but for their last bits will do.

    Returns:
        The kernel, and whether it gives the bits of ``kind.step()``; None: there is none that does,
        or, if ``inexact``, that comes close.
    """
    case = _case(kind, update, number, torch.float32, device)
    key = (inexact, *case.key)
    if key not in _kernels:
        _kernels[key] = _try_kernels(case, inexact)
    return _kernels[key]


def _try_kernels(case: Case, inexact: bool) -> tuple[Kernel, bool] | None:
    module = _kernels_on(case.device)
    if module is None:
        return None
    close: Kernel | None = None
    for kernel in module.flavours(case.kind, variant_of(case.options, case.device.type)):
        calls: list[int] = []

        def noted(*arguments: Any, own: Kernel = kernel, calls: list[int] = calls) -> None:
            calls.append(1)
            own(*arguments)

        way = _SLICES._replace(name="kernels", make=functools.partial(_slices, kernel=noted))
        found = tried(way, case)
        if found is None or not calls:
            continue
        if all(map(same_bits, found)):
            return kernel, True
        if close is None and all(map(nearly_same, found)):
            close = kernel
    _log.debug("replay: no kernel is bit-equal to %s.step()", case.kind.__name__)
    return (close, False) if inexact and close is not None else None


def _kernels_on(device: torch.device) -> ModuleType | None:
    """The module of kernels, where they can run."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    try:
        return importlib.import_module("everstep.replay.fused.kernels")
    except Exception as error:  # of a triton that does not fit what is installed
        _log.debug("replay: no kernels: %r", error)
        return None


def _proven_for(way: Way, case: Case) -> bool:
    key = (way.name, *case.key)
    if key not in _proven:
        found = tried(way, case)
        _proven[key] = found is not None and all(map(same_bits, found))
        if not _proven[key]:
            _log.warning(
                "replay: %s of %s (%s) are not bit-equal to its step() on torch %s; "
                "%s, more slowly",
                way.name,
                case.kind.__name__,
                case.dtype,
                torch.__version__,
                way.instead,
            )
    return _proven[key]


def _case(
    kind: type[Optimizer], update: Update, number: int, dtype: torch.dtype, device: torch.device
) -> Case:
    scaled = (update.grad_scale is not None, update.found_inf is not None)
    return Case(kind, update.groups[number], scaled, dtype, device)
