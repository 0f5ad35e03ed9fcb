"""Begin a run with the state of another program: ``resume(initial=...)``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from everstep.convert.sources import Source, open_source
from everstep.errors import MismatchError, OptionError
from everstep.restore.start import Recovery
from everstep.state.providers import ModuleProvider
from everstep.state.providers.modules import unwrap
from everstep.state.values.tensors import is_dtensor

_log = logging.getLogger("everstep")
_WRAPPERS = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.", "model.")
_LISTED = 8

Differences = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """Result of beginning a run with given state.

    Attributes:
        notes: remarks.
        differences: tensors that were left out, as of :attr:`everstep.Recovery.mismatched`.
    """

    notes: tuple[str, ...]
    differences: Differences

    def told(self, recovery: Recovery) -> Recovery:
        """Return the result of a resume with these remarks."""
        mismatched = (*recovery.mismatched, *self.differences)
        return replace(recovery, notes=(*recovery.notes, *self.notes), mismatched=mismatched)


@dataclass(frozen=True, slots=True)
class InitialState:
    """State that a run begins with, if it has none of its own.

    Attributes:
        source: path of a file or folder, or the state itself, nested.
        only: names of the parts to take; None: all that the state and the source both have.
    """

    source: str | os.PathLike[str] | Mapping[str, Any]
    only: Sequence[str] | None = None

    def load(self, values: Mapping[str, Any], *, strict: bool) -> Begun:
        """Load the source into the live state.

        Args:
            values: live state, as the program made it.
            strict: refuse missing, unexpected and misshapen tensors.

        Raises:
            MismatchError: names or shapes differ; nothing was modified.
            OptionError: the source has no part of the state, or is of no known format.
        """
        if isinstance(self.source, Mapping):
            found = Source(None, "state that was given", self.source)
        else:
            found = open_source(Path(self.source))
        parts = self._parts(found, values)
        plans = [
            ModuleLoad.of(part, ModuleProvider(part, value), parts[part])
            for part, value in values.items()
            if isinstance(value, nn.Module) and part in parts
        ]
        differences = tuple(one for plan in plans for one in plan.differences)
        if differences and strict:
            raise _mismatch_error(found, differences)
        for plan in plans:
            plan.run()
        modules = {plan.part for plan in plans}
        for part in (one for one in parts if one not in modules):
            values[part].load_state_dict(parts[part])
        notes = [f"the run begins with the {found.name}: {', '.join(map(repr, parts))}"]
        notes += [note for plan in plans for note in plan.notes]
        for note in notes:
            _log.info("%s", note)
        return Begun(tuple(notes), differences)

    def _parts(self, found: Source, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the parts to load, by name."""
        loadable = [part for part, value in values.items() if hasattr(value, "load_state_dict")]
        modules = [part for part, value in values.items() if isinstance(value, nn.Module)]
        wanted = loadable if self.only is None else list(self.only)
        if unknown := [part for part in wanted if part not in loadable]:
            raise OptionError(
                f"only={unknown[0]!r} is not a part of the state that can be loaded",
                hint=f"parts: {', '.join(map(repr, loadable))}",
            )
        value = found.value
        parts = {part: value[part] for part in wanted if _is_mapping(value, part)}
        if parts:
            return parts
        # The tensors of one module, perhaps inside a dict as trainers save them.
        inside = next((value[key] for key in _WRAPPERS if _is_mapping(value, key)), value)
        if len(alone := [part for part in modules if part in wanted]) == 1 and _has_tensors(inside):
            return {alone[0]: inside}
        names = list(value)[:_LISTED] if isinstance(value, Mapping) else []
        raise OptionError(
            f"the {found.name} has none of the parts {', '.join(map(repr, wanted))}",
            path=found.path,
            hint=f"it has: {', '.join(map(str, names))}",
        )


@dataclass(frozen=True, slots=True)
class ModuleLoad:
    """Load of tensors into a module.

    Attributes:
        part: name of the module in the state.
        module: the module, wrappers included.
        tensors: values by the names of the module.
        differences: tensors that are missing, unexpected or of another shape, with the difference.
        notes: renamed and converted tensors, in words.
    """

    part: str
    module: nn.Module
    tensors: Mapping[str, torch.Tensor]
    differences: Differences
    notes: tuple[str, ...]

    @classmethod
    def of(cls, part: str, provider: ModuleProvider, value: Mapping[str, Any]) -> ModuleLoad:
        """Match tensors with a module."""
        live = provider.collect()
        prefix = common_prefix(value, live)
        given = {name.removeprefix(prefix): one for name, one in value.items()}
        taken: dict[str, Any] = {}
        differences: list[tuple[str, str]] = []
        for name in (name for name in live if name in given):
            mine = _shape(live[name])
            if _shape(given[name]) == mine:
                taken[name] = given[name]
            else:
                differences.append((f"{part}/{name}", f"is {_shape(given[name])}, not {mine}"))
        # A tied weight need be there under one of its names only.
        reached = {_memory(live[name]) for name in taken}
        differences += [
            (f"{part}/{name}", "missing")
            for name, mine in live.items()
            if name not in given and _memory(mine) not in reached
        ]
        differences += [(f"{part}/{name}", "unexpected") for name in given if name not in live]
        notes = []
        if prefix:
            notes.append(f"{part!r}: {len(given)} names were renamed: {prefix!r} is left out")
        kinds = {
            (one.dtype, live[name].dtype)
            for name, one in taken.items()
            if isinstance(one, torch.Tensor) and one.dtype != live[name].dtype
        }
        notes += [
            f"{part!r}: {one} is converted to {other}" for one, other in sorted(kinds, key=str)
        ]
        return cls(part, provider.outer, taken, tuple(differences), tuple(notes))

    def run(self) -> None:
        """Load the tensors."""
        options = StateDictOptions(full_state_dict=True, strict=False)
        if any(is_dtensor(one) for one in self.module.state_dict().values()):
            set_model_state_dict(self.module, dict(self.tensors), options=options)
        else:
            unwrap(self.module).load_state_dict(dict(self.tensors), strict=False)


def _mismatch_error(found: Source, differences: Differences) -> MismatchError:
    listed = "\n".join(f"  {name}: {why}" for name, why in differences)
    return MismatchError(
        f"the {found.name} and the live state differ in {len(differences)} place(s):\n{listed}",
        mismatches=differences,
        hint="resume(strict=False) takes what matches",
    )


def common_prefix(names: Iterable[str], live: Mapping[str, Any]) -> str:
    """Return the prefix that wrappers have put before each name, "" if there is none."""
    found = list(names)
    if not live.keys().isdisjoint(found):
        return ""
    for prefix in _PREFIXES:
        stripped = [name.removeprefix(prefix) for name in found]
        if all(name.startswith(prefix) for name in found) and not live.keys().isdisjoint(stripped):
            return prefix
    return ""


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _memory(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return id(value)
    return id(value) if not value.numel() or is_dtensor(value) else value.data_ptr()


def _is_mapping(value: Any, key: str) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get(key), Mapping)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(
        isinstance(one, torch.Tensor) for one in value.values()
    )
