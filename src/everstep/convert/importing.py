"""Make a run of a state that another program has written: ``everstep import``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from everstep.commit import BaseId
from everstep.convert.sources import Source
from everstep.errors import OptionError, UnsupportedStateError
from everstep.format import Marker
from everstep.restore.offline.memory import OfflineState
from everstep.restore.offline.rebuild import Rebuilt
from everstep.state.layout import OBJECT_PREFIX
from everstep.state.values.objects import encode, unsupported_leaves
from everstep.state.values.tensors import tensor_entry, why_not_storable
from everstep.state.values.tree import split

_WRAPPERS = ("_orig_mod.", "module.")  # of torch.compile and DistributedDataParallel
_NO_NAMES = (
    "an optimizer's state names no parameters: resume(initial=...) loads it into the optimizer"
)


@dataclass(frozen=True, slots=True)
class Imported:
    """State of a run to be written.

    Attributes:
        rebuilt: the state.
        parts: names of its parts.
        left_out: parts that were left out, with the reason.
    """

    rebuilt: Rebuilt
    parts: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]


def import_state(source: Source, *, part: str, step: int) -> Imported:
    """Return the state of a run with the contents of a source.

    Args:
        source: what another program has written.
        part: name for the part that the tensors of a single module become. A source of several
            parts keeps their names.
        step: number of the step that the state is of.

    Raises:
        OptionError: the source has no tensors.
        UnsupportedStateError: a value cannot be stored; lists all of them.
    """
    value = source.value
    parts = dict(value) if isinstance(value, Mapping) else {}
    if not parts or any(isinstance(one, torch.Tensor) for one in parts.values()):
        parts = {part: value}
    left_out = {name: _NO_NAMES for name, one in parts.items() if _is_optimizer(one)}
    kept = {name: _without_prefix(one) for name, one in parts.items() if name not in left_out}
    rebuilt = state_of(kept, step)
    if not rebuilt.state.entries:
        raise OptionError(f"the {source.name} has no tensors", path=source.path)
    return Imported(rebuilt, tuple(kept), tuple(left_out.items()))


def state_of(parts: Mapping[str, Any], step: int) -> Rebuilt:
    """Return the state of a step that consists of nested values, with its tensors in host memory.

    Raises:
        UnsupportedStateError: a value cannot be stored; lists all of them.
    """
    tensors: dict[str, torch.Tensor] = {}
    trees = {name: split(one, name, tensors) for name, one in parts.items()}
    leaves = [leaf for name, tree in trees.items() for leaf in unsupported_leaves(tree, name)]
    leaves += [(name, why) for name, one in tensors.items() if (why := why_not_storable(one))]
    if leaves:
        listed = "\n".join(f"  {name}: {why}" for name, why in leaves)
        raise UnsupportedStateError(
            f"{len(leaves)} value(s) cannot be stored:\n{listed}", leaves=tuple(leaves)
        )
    objects = {
        OBJECT_PREFIX + name: bytes(encode(tree, name, checked=True))
        for name, tree in trees.items()
    }
    aliases = _aliases(tensors)
    own = {name: one.cpu().contiguous() for name, one in tensors.items() if name not in aliases}
    entries = {name: tensor_entry(name, one) for name, one in own.items()}
    marker = Marker(run="", timeline=0, step=step, lsn=0, rank=0, world=1, exact=True, files=())
    state = OfflineState(marker, entries, own, aliases, objects, shape="")
    return Rebuilt(state, BaseId(0, step), 0, 0, exact=True, why="")


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and "param_groups" in value


def _without_prefix(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    for prefix in _WRAPPERS:
        if all(isinstance(name, str) and name.startswith(prefix) for name in value):
            value = {name.removeprefix(prefix): one for name, one in value.items()}
    return value


def _aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of tensors that share all memory with an earlier one."""
    found: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, one in tensors.items():
        where = (one.data_ptr(), one.dtype, one.shape, one.stride())
        first = found.setdefault(where, name) if one.numel() else name
        if first != name:
            aliases[name] = first
    return aliases
