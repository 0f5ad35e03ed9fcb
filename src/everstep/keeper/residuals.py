"""What error feedback keeps for compressed training: how much it is, and whether it is saved."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

from torch import nn

from everstep.compress.training import Compressor
from everstep.keeper.recordable import compressors_of, exchanges_of
from everstep.state.image import State
from everstep.state.providers import ModuleProvider

__all__ = ["residual_bytes", "tell_of_lost_residuals"]

_log = logging.getLogger("everstep")


def residual_bytes(state: State) -> int:
    """Of all that is in the state; each step mark of a log holds them."""
    behind = sum(one.residual_bytes for one in compressors_of(state).values())
    return behind + sum(one.residual_bytes for one in exchanges_of(state))


def tell_of_lost_residuals(state: State) -> None:
    """Says of which parts of a state gradients are compressed by what is in no part of it."""
    saved = {id(value) for value in state.values.values()}
    for section, kind, there in _compressing(state):
        if there not in saved:
            _log.warning(
                "everstep: a %s compresses gradients of %r, and is in no part of the state: what "
                "it has left out of them is not saved, and resume() loses it\n  hint: add it to "
                "the state, under a name of its own",
                kind,
                section,
            )


def _compressing(state: State) -> Iterator[tuple[str, str, int]]:
    """Section, kind and id of all that keeps residuals."""
    for section, optimizer in state.optimizers.items():
        for hook in optimizer._optimizer_step_pre_hooks.values():
            one = getattr(hook, "__self__", None)
            if isinstance(one, Compressor) and one.residual_bytes:
                yield section, "Compressor", id(one)
    loaded = sys.modules.get("everstep.compress.ddp")  # not loaded: nobody uses it
    for section, provider in state.providers.items():
        if loaded is None or not isinstance(provider, ModuleProvider):
            continue
        for module in provider.outer.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                for _, one in getattr(module, "_comm_hooks", ()):
                    if isinstance(one, loaded.DDPCompression) and one.residual_bytes:
                        yield section, "DDPCompression", id(one)
