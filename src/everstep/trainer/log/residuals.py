"""What compressed training keeps beside the state: how much it is, and whether it is saved."""

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

from everstep.compress.training import Compressor
from everstep.link.recordable import compressors_of, exchanges_of
from everstep.state.providers.modules import ModuleProvider
from everstep.state.training_state import State

__all__ = ["residual_bytes", "tell_of_lost_residuals"]

_log = logging.getLogger("everstep")

_OURS = "add it to the state, under a name of its own"
_THEIRS = (
    "add an object to the state that holds it as an attribute, and whose state_dict() and "
    "load_state_dict() take and give what it keeps (docs/EXACTNESS.md has one for PowerSGD); or "
    "use everstep's DDPCompression, which can be a part of the state itself"
)
_OF_TORCH = ("torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks",)
_GROUPS = (dist.ProcessGroup,) if dist.is_available() else ()
_FIXED = (
    *(type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device),
    *(weakref.ref, types.ModuleType, types.FunctionType, *_GROUPS),
)


def residual_bytes(state: State) -> int:
    """Of all that is in the state; each step mark of a log holds them."""
    behind = sum(one.residual_bytes for one in compressors_of(state).values())
    return behind + sum(one.residual_bytes for one in exchanges_of(state))


def tell_of_lost_residuals(state: State) -> None:
    """Says of which parts of a state gradients are compressed, or else changed on their way, by
    what is in no part of it, once; and lets nothing that is saved without it be called exact."""
    saved = _saved(state)
    found = list[str]()
    for section, kind, kept in _keeping(state):
        if id(kept) in saved:
            continue
        if kind:
            what = f"a {kind} compresses gradients of {section!r}"
            lost = "what it has left out of them"
            hint = _OURS
        else:
            kind = type(kept).__name__
            what = f"a {kind} is what a communication hook of {section!r} goes by"
            lost = "what it keeps (residuals, counters)"
            hint = _THEIRS
        found.append(f"{what}, and is in no part of the state")
        if found[-1] not in state.coverage.unsaved_inputs:
            _log.warning(
                "everstep: %s: %s is not saved, and resume() loses it\n  hint: %s",
                found[-1],
                lost,
                hint,
            )
    state.coverage.unsaved_inputs = tuple(found)


def _saved(state: State) -> set[int]:
    """Ids of the objects of a state, and of what those of a program's own have as attributes."""
    found = set(map(id, state.values.values()))
    for value in state.values.values():
        if not isinstance(value, nn.Module | torch.optim.Optimizer):
            found.update(map(id, getattr(value, "__dict__", {}).values()))
    return found


def _keeping(state: State) -> Iterator[tuple[str, str, object]]:
    """Section, kind ("": not one of ours) and object of all that keeps something from one step to
    the next that gradients depend on."""
    for section, optimizer in state.optimizers.items():
        for hook in optimizer._optimizer_step_pre_hooks.values():
            one = getattr(hook, "__self__", None)
            if isinstance(one, Compressor) and one.residual_bytes:
                yield section, "Compressor", one
    loaded = sys.modules.get("everstep.compress.ddp")  # not loaded: nobody uses it
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
                        behind = (kept, getattr(hook, "__self__", None))
                        yield from ((section, "", one) for one in behind if not _is_fixed(one))


def _is_fixed(kept: object) -> bool:
    """Whether a hook can keep nothing there that it would miss."""
    if isinstance(kept, tuple):
        return all(map(_is_fixed, kept))
    if is_dataclass(kept) and not isinstance(kept, type):
        frozen = type(kept).__dataclass_params__.frozen  # type: ignore[attr-defined]
        return bool(frozen) or type(kept).__module__ in _OF_TORCH
    return isinstance(kept, _FIXED) or type(kept).__name__ == "DeviceMesh"
