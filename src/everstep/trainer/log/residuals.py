"""Size of the residuals of gradient compression, and a warning where the state does not hold
them."""

from __future__ import annotations

import logging
import sys
import types
import weakref
from collections.abc import Iterator
from dataclasses import is_dataclass

import torch
import torch.distributed as dist
from torch import nn

from everstep.compress.compressor import Compressor
from everstep.link.recordable import compressors_of, exchanges_of
from everstep.state.providers import ModuleProvider
from everstep.state.training_state import State

_log = logging.getLogger("everstep")

_OURS = "add it to the state, under a name of its own"
_THEIRS = (
    "add an object to the state that holds it as an attribute, and whose state_dict() and "
    "load_state_dict() return and restore its data (docs/EXACTNESS.md has one for PowerSGD); or "
    "use everstep's DDPCompression, which can be added to the state itself"
)
_OF_TORCH = ("torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks",)
_GROUPS = (dist.ProcessGroup,) if dist.is_available() else ()
_FIXED = (
    *(type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device),
    *(weakref.ref, types.ModuleType, types.FunctionType, *_GROUPS),
)


def residual_bytes(state: State) -> int:
    """Return the size of the residuals held in the state, in bytes; each step mark of the log
    holds them."""
    of_compressors = sum(one.residual_bytes for one in compressors_of(state).values())
    return of_compressors + sum(one.residual_bytes for one in exchanges_of(state))


def warn_of_unsaved_residuals(state: State) -> None:
    """Warn once of each gradient compressor or communication hook that keeps data between steps
    and is not in the state; note it in ``state.coverage.unsaved_inputs`` (then inexact)."""
    saved = _saved(state)
    found = list[str]()
    for section, kind, kept in _keeping(state):
        if id(kept) in saved:
            continue
        if kind:
            finding = f"a {kind} compresses gradients of {section!r}"
            lost = "its residual"
            hint = _OURS
        else:
            kind = type(kept).__name__
            finding = f"a communication hook of {section!r} uses a {kind}"
            lost = "its data (residuals, counters)"
            hint = _THEIRS
        found.append(f"{finding}, which is not in the state")
        if found[-1] not in state.coverage.unsaved_inputs:
            _log.warning(
                "everstep: %s: %s is not saved, and resume() loses it\n  hint: %s",
                found[-1],
                lost,
                hint,
            )
    state.coverage.unsaved_inputs = tuple(found)


def _saved(state: State) -> set[int]:
    """Return the ids of the objects in a state, and of the attributes of the program's own
    objects."""
    found = set(map(id, state.values.values()))
    for value in state.values.values():
        if not isinstance(value, nn.Module | torch.optim.Optimizer):
            found.update(map(id, getattr(value, "__dict__", {}).values()))
    return found


def _keeping(state: State) -> Iterator[tuple[str, str, object]]:
    """Yield section, kind and object of everything that keeps data gradients depend on between
    steps.

    The kind is empty for objects that are not everstep's own."""
    for section, optimizer in state.optimizers.items():
        for hook in optimizer._optimizer_step_pre_hooks.values():
            one = getattr(hook, "__self__", None)
            if isinstance(one, Compressor) and one.residual_bytes:
                yield section, "Compressor", one
    loaded = sys.modules.get("everstep.compress.ddp")  # not loaded: not used
    for section, provider in state.providers.items():
        if not isinstance(provider, ModuleProvider):
            continue
        for module in provider.outer.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                for hook, kept in getattr(module, "_comm_hooks", ()):
                    if loaded is not None and isinstance(kept, loaded.DDPCompression):
                        if kept.residual_bytes:
                            yield section, "DDPCompression", kept
                    else:
                        owners = (kept, getattr(hook, "__self__", None))
                        yield from ((section, "", one) for one in owners if not _is_fixed(one))


def _is_fixed(kept: object) -> bool:
    """Return True if a hook cannot keep data in ``kept`` that a restart would lose."""
    if isinstance(kept, tuple):
        return all(map(_is_fixed, kept))
    if is_dataclass(kept) and not isinstance(kept, type):
        frozen = type(kept).__dataclass_params__.frozen  # type: ignore[attr-defined]
        return bool(frozen) or type(kept).__module__ in _OF_TORCH
    return isinstance(kept, _FIXED) or type(kept).__name__ == "DeviceMesh"
