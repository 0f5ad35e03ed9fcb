"""State providers: one per value of the state dict; each knows how to collect and restore it.

A provider collects a tree with live tensors in it, says which saved entries may be read
straight into live memory and what does not match, and takes the loaded tree back.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.optim.lr_scheduler import LRScheduler

from everstep.state.layout.entries import Entry
from everstep.state.loaders.positions import POSITIONS, holds_position, same_values
from everstep.state.providers.fsdp import forget_iteration
from everstep.state.providers.restoring import RestorePlan, Saved
from everstep.state.survey.guards import ModuleProof, canonical_key
from everstep.state.survey.survey import Block, Part, look_at, same_objects
from everstep.state.values.dtensors import is_dtensor, local_of
from everstep.state.values.objects import TensorRef
from everstep.state.values.tensors import stored_form

__all__ = [
    "ModuleProvider",
    "ParameterNames",
    "Provider",
    "Stateful",
    "StatefulProvider",
    "Unproven",
    "describe",
    "difference",
    "has_begun",
    "restores_data",
    "same_memory",
    "unwrap",
]

_FSDP2 = "torch.distributed.fsdp._fully_shard"
_FSDP2_HOOKS = (
    (
        f"{_FSDP2}._fsdp_param_group",
        "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook",
    ),
    (f"{_FSDP2}._fsdp_param", "FSDPParam.__init__.<locals>.<lambda>"),
)


class Provider(Protocol):
    """One section of the state."""

    section: str

    def collect(self) -> Any:
        """The section as a tree, with live tensors in it; nothing is copied."""
        ...

    def look(self) -> Part:
        """What is in the section now, found by the shortest way that is sure to be right.

        Raises:
            UnsupportedStateError: listing every leaf that cannot be stored.
        """
        ...

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        """Compares with what is saved. ``live`` are the section's live tensors by entry name."""
        ...

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        """Takes the loaded tree; returns what could not be restored, in words."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """torch.distributed.checkpoint's protocol: anything that can hand out and take its state."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def describe(entry: Entry) -> str:
    """``F32 [2, 3]``: an entry's dtype and shape for messages."""
    return f"{entry.logical_dtype or entry.dtype} {list(entry.shape)}"


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel and ``torch.compile`` wrappers, and
    inside Lightning Fabric's, whose ``state_dict()`` is that of the module in it."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif hasattr(module, "_forward_module") and isinstance(
            getattr(module, "_original_module", None), nn.Module
        ):
            module = module._original_module  # type: ignore[assignment]
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def _is_bare(module: nn.Module) -> bool:
    """Whether a module without a wrapper looks up attributes as torch does: then it is not wrapped
    without a change of its class or its members."""
    return unwrap(module) is module and type(module).__getattr__ is nn.Module.__getattr__


class ParameterNames:
    """Names of the parameters of all modules of the state, by ``id(parameter)``.

    A name is ``"section.key"``; of several names for one parameter the first is taken.

    Args:
        modules: all of them by section; may get more until names are asked for.

    Attributes:
        asks_gradients: which parameters have a gradient may be looked at.
    """

    def __init__(self, modules: Mapping[str, ModuleProvider]) -> None:
        self._modules = modules
        self.asks_gradients = True
        self._proofs: list[ModuleProof] = []
        self._names: dict[int, str] | None = None

    def now(self) -> dict[int, str]:
        """The names, looked up now."""
        names: dict[int, str] = {}
        for provider in self._modules.values():
            for key, parameter in provider.named_parameters():
                names.setdefault(id(parameter), f"{provider.section}.{key}")
        return names

    def as_looked_at(self) -> Mapping[int, str]:
        """The names, right after all modules were looked at: the same object as before if it is
        proven that nothing has changed."""
        proofs = [provider.proof for provider in self._modules.values()]
        known = [proof for proof in proofs if proof is not None]
        if len(known) < len(proofs):
            return self.now()
        if self._names is None or not same_objects(known, self._proofs):
            self._proofs, self._names = known, self.now()
        return self._names


class ModuleProvider:
    """An ``nn.Module``, through its ``state_dict``.

    Attributes:
        proof: that the module has not changed since it was looked at; None where that cannot
            be proven, or was not tried yet.
    """

    def __init__(self, section: str, module: nn.Module) -> None:
        self.section = section
        self._outer = module
        self._blocks: tuple[Block, ...] = ()  # found last
        self._bare = False
        self.proof: ModuleProof | None = None

    @property
    def outer(self) -> nn.Module:
        """As the user gave it, wrappers included."""
        return self._outer

    @property
    def _module(self) -> nn.Module:
        return unwrap(self._outer)

    def collect(self) -> dict[str, Any]:
        return {canonical_key(key): value for key, value in self._state_dict().items()}

    def look(self) -> Part:
        # As long as one without a wrapper is proven to be as it was, it has got none.
        module = self._outer if self.proof is not None and self._bare else self._module
        if self.proof is None or not self.proof.holds(module):
            self.proof = None
            part = look_at(self.collect(), self.section, self._blocks)
            self._blocks = part.blocks
            module = self._module
            self._bare = _is_bare(self._outer)
            self.proof = ModuleProof.of(module, part)
            if self.proof is None:
                return part
        return self.proof.part

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        plan = RestorePlan(tree={})
        mine = self.collect()
        memory = dict(self.memory())
        if not isinstance(saved.tree, dict):
            kind = "no module in the checkpoint, one in the state"
            return RestorePlan.without([(self.section, kind)])
        for key in mine:
            if key not in saved.tree:
                plan.mismatches.append((f"{self.section}/{key}", "not in the checkpoint"))
        for key, value in saved.tree.items():
            name = f"{self.section}/{key}"
            if key not in mine:
                plan.mismatches.append((name, "in the checkpoint, not in the model"))
                continue
            tensor = mine[key]
            if not isinstance(value, TensorRef) and isinstance(tensor, torch.Tensor):
                if key in memory:  # other state of a module may be of another kind each time
                    plan.mismatches.append((name, "no tensor in the checkpoint, one in the model"))
                    continue
            elif isinstance(value, TensorRef) and isinstance(tensor, torch.Tensor):
                entry = saved.entries[value.name]
                problem = difference(entry, tensor)
                if problem and not self._grows(key, entry):
                    plan.mismatches.append((name, problem))
                    continue
                if not problem and same_memory(memory.get(key), tensor):
                    plan.in_place[value.name] = tensor
            plan.tree[key] = value
        return plan

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        notes = forget_iteration(self._outer)
        if not self._needs_load(tree):
            return notes  # every tensor was read into the module's own memory
        keys = {canonical_key(key): key for key in self._state_dict()}
        state = OrderedDict((keys.get(key, key), value) for key, value in tree.items())
        self._module.load_state_dict(state, strict=strict)
        return notes

    def _state_dict(self) -> dict[str, Any]:
        return self._module.state_dict()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by canonical key, each once."""
        for key, parameter in self._module.named_parameters():
            yield canonical_key(key), parameter

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's own parameters and buffers, by canonical key."""
        for key, parameter in self._module.named_parameters(remove_duplicate=False):
            yield canonical_key(key), parameter
        for key, buffer in self._module.named_buffers(remove_duplicate=False):
            yield canonical_key(key), buffer

    def _grows(self, key: str, entry: Entry) -> bool:
        """Whether a buffer is a placeholder of a module with its own way of loading, which gives it
        the shape of what is saved: ranges and scales of torch's quantization, up to the first
        batch."""
        owner, _, name = key.rpartition(".")
        try:
            module = self._module.get_submodule(owner)
        except AttributeError:
            return False
        buffer = module._buffers.get(name)
        if buffer is None or buffer.numel() > 1 or _from_torch(module._load_from_state_dict):
            return False
        live = stored_form("", buffer)
        return (live.dtype, live.logical_dtype) == (entry.dtype, entry.logical_dtype)

    def _needs_load(self, tree: Mapping[str, Any]) -> bool:
        """Whether ``load_state_dict`` has anything to do beyond filling the module's memory."""
        memory = dict(self.memory())
        if any(not same_memory(memory.get(key), value) for key, value in tree.items()):
            return True
        if not _from_torch(self._module.load_state_dict):
            return True
        return any(
            not all(map(_is_of_fsdp2, module._load_state_dict_pre_hooks.values()))
            or not all(map(_is_of_fsdp2, module._load_state_dict_post_hooks.values()))
            or not _from_torch(module._load_from_state_dict)
            for module in self._module.modules()
        )


class Unproven:
    """A provider that collects its section anew each time: such sections are small."""

    section: str
    _blocks: tuple[Block, ...] = ()  # found last

    def collect(self) -> Any:
        raise NotImplementedError

    def look(self) -> Part:
        return self._look_at(self.collect())

    def _look_at(self, collected: Any) -> Part:
        part = look_at(collected, self.section, self._blocks)
        self._blocks = part.blocks
        return part


class StatefulProvider(Unproven):
    """Anything with ``state_dict`` and ``load_state_dict``: schedulers, loaders, scalers.

    Attributes:
        is_data: it gives batches or samples, or their order, and its state is a position in them.
        restored_data: a position in the data has come back with it.
    """

    def __init__(self, section: str, value: Stateful) -> None:
        self.section = section
        self._value = value
        self.is_data = hasattr(type(value), "__iter__") or restores_data(value)
        self.restored_data = False
        self._pending: tuple[Any, Any] | None = None  # what was loaded, and what it says of that

    @property
    def value(self) -> Stateful:
        """As the user gave it."""
        return self._value

    def collect(self) -> Any:
        tree = self._value.state_dict()
        if self._pending is not None:
            loaded, said = self._pending
            if same_values(tree, said):
                return loaded
            self._pending = None
        return tree

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        if problem := _another_kind(self._value, saved.tree):
            return RestorePlan.without([(self.section, problem)])
        spread = {name: tensor for name, tensor in live.items() if is_dtensor(tensor)}
        like = {
            name: tensor
            for name, tensor in spread.items()
            if name in saved.entries and difference(saved.entries[name], tensor) is None
        }
        return RestorePlan(saved.tree, like=like)

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        if tree is None and self._value.state_dict() is None:
            return []  # it never has any, and may not take that
        with POSITIONS.loads():
            self._value.load_state_dict(tree)
        self.restored_data = self.is_data or holds_position(tree)
        if isinstance(self._value, torch.amp.GradScaler) and self._value.is_enabled():
            # It knows of gradients that it has unscaled, or found infinities in, which are gone: it
            # would not unscale the next ones. This is what its update() leaves.
            self._value._per_optimizer_states.clear()
        # What it makes only once it is asked for it (a generator, say), it makes now: the process's
        # generators are restored after this.
        self._pending = None
        said = self._value.state_dict()
        if self.is_data and not same_values(said, tree):
            # A stream that takes its position only when it is iterated: until then this is it.
            self._pending = tree, copy.deepcopy(said)
        return []


def restores_data(value: object) -> bool:
    """Return whether a loader restores its own position, and draws nothing in doing so."""
    return bool(getattr(value, "everstep_restores_data", False))


def has_begun(scaler: torch.amp.GradScaler) -> bool:
    """Whether it has looked at gradients since its last ``update()``."""
    if not scaler.is_enabled():
        return False
    return any(one["stage"] is not OptState.READY for one in scaler._per_optimizer_states.values())


def _another_kind(value: Stateful, saved: Any) -> str | None:
    """Why torch would take the state of another scheduler, or of a scaler that does nothing, and go
    on without a word as neither does; None: it is of this kind, as far as that can be told. (A
    newer torch may keep more of the same scheduler, or less.)"""
    if getattr(value, "everstep_restores_data", False):
        return value.refusal(saved)  # type: ignore[attr-defined,no-any-return]
    if not isinstance(saved, dict):
        return None
    if isinstance(value, torch.amp.GradScaler):
        if bool(saved) == value.is_enabled():
            return None
        return f"a scaler that is {'enabled' if saved else 'disabled'}, here it is not"
    if isinstance(value, LRScheduler):
        theirs = saved.keys()
        mine = value.state_dict().keys()
        more = sorted(map(str, theirs - mine))
        less = sorted(map(str, mine - theirs))
        if more and less:
            what = f"it has {', '.join(more)}, and no {', '.join(less)}"
            return f"another scheduler than {type(value).__name__}: {what}"
    return None


def difference(entry: Entry, tensor: torch.Tensor, *, dtype: bool = True) -> str | None:
    """How the saved entry and the live tensor differ in dtype or shape; None if they do not.

    Args:
        dtype: False: a tensor of another dtype would do.
    """
    live = stored_form("", tensor)
    if not dtype and _shape_of(live) == _shape_of(entry):
        return None
    if (live.dtype, live.shape, live.logical_dtype) == (
        entry.dtype,
        entry.shape,
        entry.logical_dtype,
    ):
        return None
    return f"saved {describe(entry)}, live {describe(live)}"


def _shape_of(entry: Entry) -> tuple[int, ...]:
    return entry.shape if entry.logical_dtype is None else entry.shape[:-1]


def _from_torch(method: Any) -> bool:
    """Whether it is torch's own; a user's override may do more than fill tensors."""
    return str(getattr(method, "__module__", "")).startswith("torch.nn.")


def _is_of_fsdp2(hook: Any) -> bool:
    """Whether a hook is FSDP2's: before loading it brings parameters into their sharded form, and
    behind it it follows those that others have taken the place of. Where parameters are the memory
    that was read into, nothing of that is left to do; and to copy each DTensor onto itself would
    take longer than to read all of them."""
    return (getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")) in _FSDP2_HOOKS


def same_memory(owner: Any, tensor: Any) -> bool:
    """Whether two tensors are one, as they lie: address, shape, strides, dtype."""
    if not isinstance(owner, torch.Tensor) or not isinstance(tensor, torch.Tensor):
        return False
    owner = local_of(owner)
    tensor = local_of(tensor)
    same: bool = (
        owner.data_ptr() == tensor.data_ptr()
        and owner.shape == tensor.shape
        and owner.dtype == tensor.dtype
        and owner.stride() == tensor.stride()
    )
    return same
