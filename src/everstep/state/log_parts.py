"""Whose log holds which gradient, of those that several ranks consume alike (``adr/029``).

Under DistributedDataParallel every rank consumes the same gradients, so each of them records a
part. Each computes by itself which: a function of the parameters, their sizes, and the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from everstep.state.common import common_of
from everstep.state.dtensors import LocalPart, is_dtensor
from everstep.state.image import State
from everstep.state.objects import join_path
from everstep.state.optimizers import OptimizerProvider
from everstep.state.sharing import spread

__all__ = [
    "Part",
    "digest_of_names",
    "left_to_others_bytes",
    "log_parts",
    "others_of",
    "recorded_by_several",
]


@dataclass(frozen=True, slots=True)
class Part:
    """Of a parameter that several ranks train alike.

    Attributes:
        ranks: these ranks.
        owner: the one of them whose log holds its gradients.
        size_bytes: of a gradient; 0 for a parameter that is frozen now.
    """

    ranks: tuple[int, ...]
    owner: int
    size_bytes: int


def log_parts(state: State) -> dict[str, dict[str, Part]]:
    """By optimizer: of its parameters, by name, those that several ranks train alike."""
    if state.ranks.world == 1:
        return {}
    common = common_of(state.providers.values(), {})
    optimizers = {k: p for k, p in state.providers.items() if isinstance(p, OptimizerProvider)}
    units: dict[tuple[int, ...], dict[str, int]] = {}
    taught: set[str] = set()
    shared: dict[str, dict[str, str]] = {}
    for key, provider in optimizers.items():
        for name, parameter in provider.named():
            entry = common.states.get(join_path(join_path(key, "state"), name), "")
            ranks = common.parameters.get(entry, ())
            if len(ranks) < 2 or is_dtensor(parameter):
                continue
            units.setdefault(ranks, {})[entry] = parameter.numel() * parameter.element_size()
            taught |= {entry} if parameter.requires_grad else set()
            shared.setdefault(key, {})[name] = entry
    parts = {
        entry: Part(ranks, owner, sizes[entry] if entry in taught else 0)
        for ranks, sizes in units.items()
        for entry, owner in spread([(-size, e) for e, size in sizes.items()], ranks).items()
    }
    return {key: {name: parts[e] for name, e in named.items()} for key, named in shared.items()}


def left_to_others_bytes(state: State) -> int:
    """Of all gradients of a step, what this rank leaves to the logs of others."""
    found = [part for parts in log_parts(state).values() for part in parts.values()]
    return sum(part.size_bytes for part in found if part.owner != state.ranks.rank)


def others_of(parts: Mapping[str, Mapping[str, Part]], rank: int) -> Sequence[int]:
    """Ranks whose logs this one needs, beside its own."""
    named: Iterable[Part] = (part for found in parts.values() for part in found.values())
    return sorted({other for part in named for other in part.ranks} - {rank})


def recorded_by_several(state: State) -> str:
    """A parameter of which several ranks train the same elements, and each records them; "" if
    there is none: a DTensor that is replicated along a dimension of its mesh, or what is none
    beside DTensors."""
    plain: list[str] = []
    sharded, split = False, log_parts(state)
    for key, provider in state.providers.items():
        if not isinstance(provider, OptimizerProvider):
            continue
        for name, parameter in provider.named():
            if not is_dtensor(parameter):
                plain += [] if name in split.get(key, ()) else [join_path(key, name)]
                continue
            sharded, placement = True, LocalPart.of(parameter).placement
            sides = zip(placement.cuts, placement.mesh, strict=True)
            if any(cut.dim is None and side > 1 for cut, side in sides):
                return join_path(key, name)
    return plain[0] if sharded and plain else ""


def digest_of_names(names: Iterable[str]) -> str:
    """Of which parameters several ranks have consumed gradients: the same on all of them."""
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(names)).encode())
