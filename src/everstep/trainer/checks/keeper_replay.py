"""Refuses states whose updates cannot be repeated, for logs, replicas, multi-step bases."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.config import Options
from everstep.errors import OptionError, UnsupportedStateError
from everstep.link.recordable import refuse_optimizers, replay_refusal
from everstep.replay import is_elementwise, kind_name
from everstep.replay.exactness import exactness
from everstep.state.providers import ModuleProvider, OptimizerProvider, local_optimizer
from everstep.state.ranks.log_shares import (
    parameter_logged_twice,
    zero_parameter_written_elsewhere,
)
from everstep.state.training_state import State
from everstep.tiers import PeerOptions, TierOptions


def require_replicable(state: State) -> None:
    """Check that a replica can follow all updates of the state.

    Raises:
        UnsupportedStateError: An optimizer cannot run without the program, or would give other bits
            in the keeper; its parameters are in no module; a function of the program updates
            entries; or another rank updates entries that this rank writes.
    """
    found = [
        (pattern, "a function of the program updates it")
        for pattern in state.ownership_rules.updates
    ]
    found += _unknown_to_keepers(state) + _outside_of_modules(state)
    if name := zero_parameter_written_elsewhere(state):
        why = (
            "one rank updates it, and other ranks write it, too: to separate disks, or because it "
            "is in no DistributedDataParallel of exactly the ranks that train it"
        )
        found.append((name, why))
    hint = "apply='recovery' (method=\"logged\") applies the log when it is needed"
    _refuse(f"a replica cannot follow {len(found)} kind(s) of updates", found, hint)


def require_replayable(state: State) -> None:
    """Check that a keeper can repeat all updates, as it does to complete a multi-step base.

    Raises:
        UnsupportedStateError: It cannot run an optimizer.
    """
    optimizers = state.optimizers.items()
    refused = [(key, why) for key, o in optimizers if (why := replay_refusal(local_optimizer(o)))]
    found = refused or _unknown_to_keepers(state)
    hint = 'method="lazy" copies the state in one step'
    _refuse(f"a base over several steps cannot follow {len(found)} optimizer(s)", found, hint)


def refuse_method(options: Options, state: State) -> None:
    """Refuse a state whose updates the method cannot repeat.

    Raises:
        UnsupportedStateError, OptionError: The log, a replica or a keeper cannot repeat some.
    """
    if options.logs:
        refuse_optimizers(state, options.method.log)
        if options.has_replica:
            require_replicable(state)
    if options.is_multistep:
        require_replayable(state)


def _refuse(problem: str, found: Sequence[tuple[str, str]], hint: str) -> None:
    if found:
        listed = "\n".join(f"  {key}: {why}" for key, why in found)
        raise UnsupportedStateError(f"{problem}:\n{listed}", leaves=tuple(found), hint=hint)


def _unknown_to_keepers(state: State) -> list[tuple[str, str]]:
    """Return the optimizers that a keeper cannot run with the same bits, and the reasons."""
    found = []
    for key, optimizer in state.optimizers.items():
        kind = type(local_optimizer(optimizer))
        if exactness(kind, (), "cpu").why:
            found.append((key, f"a keeper does not know the class {kind_name(kind)}"))
        elif not is_elementwise(kind):
            found.append((key, f"{kind.__name__} does not update each element on its own"))
    return found


def _outside_of_modules(state: State) -> list[tuple[str, str]]:
    """Return optimizers whose parameters are in no base, so that a keeper cannot find them."""
    named = {
        f"{section}.{key}"
        for section, provider in state.providers.items()
        if isinstance(provider, ModuleProvider)
        for key in provider.collect()
    }
    found = []
    for key, provider in state.providers.items():
        if isinstance(provider, OptimizerProvider):
            lost = [name for name, _ in provider.named() if name not in named]
            if lost:
                why = f"no state_dict() of a module in the state has its parameter {lost[0]!r}"
                found.append((key, f"{why} under that name"))
    return found


def why_inexact(state: State) -> str:
    """Return why bases computed by a keeper are not exact (I9); "" if they may be."""
    parameters = (
        parameter
        for optimizer in state.optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    elsewhere = sorted({p.device.type for p in parameters} - {"cpu"})
    if not elsewhere:
        return ""
    return f"training updates on {elsewhere[0]}, the keeper on the CPU: its bases are not exact"


def why_replay_is_inexact(options: Options, state: State) -> str:
    """Return why a recovery by this method is not called exact (I9); empty if it may be."""
    if not (options.logs or options.is_multistep):
        return ""
    for key, optimizer in state.optimizers.items():
        kind = type(local_optimizer(optimizer))
        groups = optimizer.param_groups
        for device_type in sorted({p.device.type for group in groups for p in group["params"]}):
            found = exactness(kind, groups, device_type)
            if not found.exact:
                return f"a replay of {key} is not called exact: {found.why}"
    return why_inexact(state) if options.is_multistep else ""


def refuse_lossy_replicas(
    state: State,
    peers: PeerOptions | None,
    tiers: Sequence[TierOptions],
    log: str = "dense",
) -> None:
    """Refuse lossy logs where several ranks may record the same elements of a gradient.

    After a recovery, one rank would continue from lossy gradients and another from exact gradients
    of the same parameter.

    Raises:
        OptionError: Several ranks record the same elements, and their log is lossy.
    """
    forms = [tier.log for tier in tiers]
    if peers is not None:
        forms.append(peers.log)
    where = 'log="adaptive" in tiers='
    instead = 'log="whole" in TierOptions and PeerOptions'
    if log == "adaptive" and state.ranks.world > 1:
        forms = [log]
        where = 'log="adaptive"'
        instead = 'log="dense"'
    if "adaptive" in forms and (name := parameter_logged_twice(state)):
        raise OptionError(
            f"{where}: several ranks may hold the same elements of {name}, each with its own log: "
            "after a replay of a lossy log their values would differ",
            rank=state.ranks.rank,
            hint=f"{instead}; or make every parameter a DTensor on the whole mesh, as "
            "torch.distributed.tensor.distribute_module(model, mesh) does",
        )
