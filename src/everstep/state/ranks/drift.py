"""Ranks under DistributedDataParallel that would part from each other, found before they do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from everstep.errors import UnsupportedStateError
from everstep.state.providers.provider import ModuleProvider
from everstep.state.ranks.common import ddp_in, reduced_in
from everstep.state.training_state import State

__all__ = ["before_update"]

_LOCAL_SGD = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"


def before_update(state: State, gate: Callable[[str], None]) -> Callable[[str], None]:
    """``gate``, and before it a look at what DDP is about to let each rank update by itself.

    One rank writes for all what ranks under DDP have in common; once they consume different
    gradients they have nothing in common, and a base would mix what several of them hold. So such
    an update is refused, with nothing changed. Seen are optimizer steps within ``no_sync()``,
    uneven inputs (``Join``) and local SGD (``post_localSGD_hook``); what a program does to
    gradients behind DDP's back is not.
    """
    if state.ranks.world == 1:
        return gate
    found = [(key, p.outer) for key, p in state.providers.items() if isinstance(p, ModuleProvider)]
    ddps = [(section, ddp) for section, module in found if (ddp := ddp_in(module)) is not None]
    if not ddps:
        return gate
    updated: dict[tuple[str, int], list[tuple[str, Any]]] = {}

    def look(key: str) -> None:
        groups = state.optimizers[key].param_groups
        if (at := (key, len(groups))) not in updated:
            theirs = {id(parameter) for group in groups for parameter in group["params"]}
            updated[at] = [one for one in ddps if not theirs.isdisjoint(reduced_in(one[1]))]
        for section, ddp in updated[at]:
            if (why := _why_apart(ddp)) is not None:
                raise UnsupportedStateError(
                    f'the ranks would part from each other: "{section}" is in '
                    f"DistributedDataParallel, and {why}; nothing was updated",
                    leaves=((section, why),),
                    rank=state.ranks.rank,
                    hint=f'give {{"{section}": ddp.module}}: each rank saves its own then',
                )
        gate(key)

    return look


def _why_apart(ddp: nn.parallel.DistributedDataParallel) -> str | None:
    if not ddp.require_backward_grad_sync:
        return "its optimizer is called within no_sync()"
    join: Any = ddp._join_config
    if join.enable and not join.throw_on_early_termination:
        return (
            "inputs may be uneven (Join): a rank that runs out makes fewer updates (with "
            "throw_on_early_termination=True it ends the step of all)"
        )
    hooks = sys.modules.get(_LOCAL_SGD)  # not loaded: nobody uses it
    if hooks is not None and any(
        isinstance(kept, hooks.PostLocalSGDState) for _, kept in ddp._comm_hooks
    ):
        return "its gradients are reduced within groups of ranks only (post_localSGD_hook)"
    return None
