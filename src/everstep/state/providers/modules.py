"""Provider of modules, and the names of their parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from everstep.state.guards import ModuleGuard, canonical_key
from everstep.state.layout import Entry
from everstep.state.providers.gradients import discard_unreduced_gradients
from everstep.state.providers.provider import (
    RestorePlan,
    Saved,
    SectionProvider,
    difference,
    same_memory,
)
from everstep.state.survey import SectionContents, same_objects
from everstep.state.values.objects import TensorRef, join_path
from everstep.state.values.tensors import tensor_entry

_FSDP2 = "torch.distributed.fsdp._fully_shard"


# Private names. If a version of torch renames them, loading is slower, as the hooks then count as a
# user's.
_FSDP2_HOOKS = (
    (
        f"{_FSDP2}._fsdp_param_group",
        "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook",
    ),
    (f"{_FSDP2}._fsdp_param", "FSDPParam.__init__.<locals>.<lambda>"),
)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside DistributedDataParallel, ``torch.compile`` and
    Lightning Fabric wrappers, whose ``state_dict()`` is that of the module inside."""
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


class ParameterNames:
    """Names of the parameters of all modules of the state, by ``id(parameter)``.

    A name is ``"section.key"``; of several names for one parameter the first is taken.

    Args:
        modules: all modules by section; more may be added until names are asked for.

    Attributes:
        asks_gradients: it is safe to look for parameters with a gradient now.
    """

    def __init__(self, modules: Mapping[str, ModuleProvider]) -> None:
        self._modules = modules
        self.asks_gradients = True
        self._proofs: list[ModuleGuard] = []
        self._names: dict[int, str] | None = None

    def now(self) -> dict[int, str]:
        """Return the names, looked up now."""
        names: dict[int, str] = {}
        for provider in self._modules.values():
            for key, parameter in provider.named_parameters():
                names.setdefault(id(parameter), f"{provider.section}.{key}")
        return names

    def as_looked_at(self) -> Mapping[int, str]:
        """Return the names as of the last inspection of all modules: the same object as before
        if guards prove that nothing has changed."""
        proofs = [provider.proof for provider in self._modules.values()]
        known = [proof for proof in proofs if proof is not None]
        if len(known) < len(proofs):
            return self.now()
        if self._names is None or not same_objects(known, self._proofs):
            self._proofs, self._names = known, self.now()
        return self._names


class ModuleProvider(SectionProvider):
    """Provider of an ``nn.Module``, through its ``state_dict``.

    Attributes:
        section: key in the state dict.
        proof: guard of the last inspection; None: there can be none, or the module was not
            inspected yet.
    """

    def __init__(self, section: str, module: nn.Module) -> None:
        self.section = section
        self._outer = module
        self.proof: ModuleGuard | None = None

    @property
    def outer(self) -> nn.Module:
        """The module as the user gave it, wrappers included."""
        return self._outer

    @property
    def _module(self) -> nn.Module:
        return unwrap(self._outer)

    def collect(self) -> dict[str, Any]:
        return {canonical_key(key): value for key, value in self._state_dict().items()}

    def look(self) -> SectionContents:
        module = self._module
        # A guard that fails is dropped before the inspection, which may raise an error.
        if self.proof is None or not self.proof.holds(module):
            self.proof = None
            part = self._look_at(self.collect())
            self.proof = ModuleGuard.of(module, part)
            if self.proof is None:
                return part
        return self.proof.part

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        plan = RestorePlan(tree={})
        mine = self.collect()
        memory = dict(self.memory())
        if not isinstance(saved.tree, dict):
            kind = "the checkpoint has no module here, the state has one"
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
                if key in memory:  # extra state of a module may change its kind
                    plan.mismatches.append(
                        (name, "the checkpoint has no tensor here, the model has one")
                    )
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
        notes = discard_unreduced_gradients(self._outer)
        if not self.needs_load(tree):
            return notes  # every tensor was read into the module's own memory
        keys = {canonical_key(key): key for key in self._state_dict()}
        state = OrderedDict((keys.get(key, key), value) for key, value in tree.items())
        self._module.load_state_dict(state, strict=strict)
        return notes

    def _state_dict(self) -> dict[str, Any]:
        return self._module.state_dict()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by canonical key, each once."""
        for key, parameter in self._module.named_parameters():
            yield canonical_key(key), parameter

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's own parameters and buffers, by canonical key."""
        for key, parameter in self._module.named_parameters(remove_duplicate=False):
            yield canonical_key(key), parameter
        for key, buffer in self._module.named_buffers(remove_duplicate=False):
            yield canonical_key(key), buffer

    def _grows(self, key: str, entry: Entry) -> bool:
        """Return True for a placeholder buffer of a module with its own loading, which takes the
        saved shape.

        Such are the ranges and scales of torch's quantization before the first batch.
        """
        owner, _, name = key.rpartition(".")
        try:
            module = self._module.get_submodule(owner)
        except AttributeError:
            return False
        buffer = module._buffers.get(name)
        if buffer is None or buffer.numel() > 1 or _from_torch(module._load_from_state_dict):
            return False
        live = tensor_entry("", buffer)
        return (live.dtype, live.logical_dtype) == (entry.dtype, entry.logical_dtype)

    def needs_load(self, tree: Mapping[str, Any]) -> bool:
        """Return True if ``load_state_dict`` has more to do than to fill the module's memory."""
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


def named_parameters(
    providers: Mapping[str, SectionProvider],
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of all modules of a state, by entry name."""
    for section, provider in providers.items():
        if isinstance(provider, ModuleProvider):
            for key, parameter in provider.named_parameters():
                yield join_path(section, key), parameter


def _from_torch(method: Any) -> bool:
    """Return True for a method of torch; a user's override may do more than fill tensors."""
    return str(getattr(method, "__module__", "")).startswith("torch.nn.")


def _is_of_fsdp2(hook: Any) -> bool:
    """Return True for one of FSDP2's hooks on loading.

    Before loading they reshard parameters, and after it they follow replaced parameters. If the
    data was read into the parameters' own memory, neither is needed, and copying each DTensor onto
    itself would take longer than reading all of them.
    """
    return (getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")) in _FSDP2_HOOKS
