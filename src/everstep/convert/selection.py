"""Part of a state to be written in another format, and its tensors, which are read a group ahead.

The tensors of a state stand for themselves on the meta device until they are read (see
:mod:`everstep.look.open_state`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from everstep.errors import OptionError
from everstep.look.load import Loaded
from everstep.look.open_state import OpenState
from everstep.state.values.tensors import DTYPE_CODES

_GROUP_BYTES = 128 << 20
_OWN = "everstep/"
_LISTED = 8


@dataclass(frozen=True, slots=True)
class Selection:
    """State to be written.

    Attributes:
        value: nested state, with tensors on the meta device.
        tensors: these tensors by name, in the order of ``value``; empty if ``value`` holds anything
            else.
    """

    value: Any
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def nested(cls, outline: Loaded, *, is_narrowed: bool) -> Selection:
        """Select all parts of a state, by name; of one that was named, the part itself.

        Args:
            outline: the selected state.
            is_narrowed: the user named what to take; otherwise the random generators, whose form is
                everstep's own, are left out.

        Raises:
            OptionError: no part is complete.
        """
        found = dict(outline.objects)
        if not is_narrowed:
            found = {part: one for part, one in found.items() if not part.startswith(_OWN)}
        if not found:
            raise OptionError("no part of the state is selected completely", step=outline.step)
        value = next(iter(found.values())) if is_narrowed and len(found) == 1 else found
        return cls(value, {})

    @classmethod
    def by_name(cls, outline: Loaded, *, is_narrowed: bool) -> Selection:
        """Select tensors by name, as a module's ``state_dict()`` has them.

        Args:
            outline: the selected state.
            is_narrowed: the user named what to take; otherwise it is the only module.

        Raises:
            OptionError: several parts are modules, or a value is no tensor.
        """
        found = dict(outline.objects)
        if not is_narrowed:
            modules = {part: one for part, one in found.items() if _is_module(one)}
            # A state dict of DCP may have the tensors of a module beside its other parts.
            are_bare = {isinstance(one, torch.Tensor) for one in modules.values()} == {True}
            if len(modules) != 1 and not are_bare:
                names = ", ".join(map(repr, modules)) or "none"
                raise OptionError(
                    f"the state has {len(modules)} parts that hold tensors by name: {names}",
                    step=outline.step,
                    hint="choose with --only",
                )
            found = modules
        if not found:
            raise OptionError("no part of the state is selected completely", step=outline.step)
        value: Any = found
        if len(found) == 1 and not isinstance(only := next(iter(found.values())), torch.Tensor):
            value = only
        tensors = dict[str, torch.Tensor]()
        for name, leaf in leaves(value):
            if not isinstance(leaf, torch.Tensor):
                raise OptionError(
                    f"{name!r} is a {type(leaf).__name__}, and this format holds only tensors",
                    step=outline.step,
                    hint="choose with --only, or write it with --to torch",
                )
            if leaf.dtype not in DTYPE_CODES:
                raise OptionError(
                    f"{name!r} is of {leaf.dtype}, which safetensors does not have",
                    step=outline.step,
                    hint="write it with --to torch",
                )
            tensors[name] = leaf
        return cls(value, tensors)

    @property
    def has_optimizer(self) -> bool:
        """True if an optimizer is selected: its state must keep its precision."""
        parts = self.value.values() if isinstance(self.value, dict) else ()
        return any(isinstance(one, dict) and "param_groups" in one for one in (self.value, *parts))


def _is_module(value: Any) -> bool:
    found = [leaf for _, leaf in leaves(value)]
    return bool(found) and all(isinstance(leaf, torch.Tensor) for leaf in found)


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield what nested mappings hold, with the keys that lead to it, joined by dots."""
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    else:
        yield ".".join(path), value


def distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors once each, in order."""
    return list({id(one): one for one in tensors}.values())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested value, in the order in which it would be pickled."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def with_tensors(value: Any, made: Mapping[int, torch.Tensor]) -> Any:
    """Return a nested value with each of its tensors replaced, given by ``id()``."""
    if isinstance(value, torch.Tensor):
        return made[id(value)]
    if isinstance(value, Mapping):
        return type(value)((key, with_tensors(item, made)) for key, item in value.items())  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(with_tensors(item, made) for item in value)
    return value


class TensorStream:
    """Tensors of a state in a given order, read in groups: one is read while the one before it is
    written.

    Args:
        state: state that they belong to.
        order: tensors of its outline.
        dtype: dtype to convert floating-point tensors to; None: as they are.

    Attributes:
        order: the tensors once each.
    """

    def __init__(
        self, state: OpenState, order: Iterable[torch.Tensor], dtype: torch.dtype | None = None
    ) -> None:
        self.order = distinct(order)
        self._state = state
        self._dtype = dtype
        self._groups = list(_grouped(self.order))
        self._group_of = {id(one): n for n, group in enumerate(self._groups) for one in group}
        self._thread = ThreadPoolExecutor(1, "everstep-export")
        self._ahead: tuple[int, Future[list[torch.Tensor]]] | None = None
        self._number = -1
        self._values: dict[int, torch.Tensor] = {}

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a tensor is written."""
        convert = self._dtype is not None and tensor.is_floating_point()
        return self._dtype if convert and self._dtype is not None else tensor.dtype

    @property
    def size_bytes(self) -> int:
        """Size of all tensors as they are written."""
        return sum(one.numel() * self.dtype_of(one).itemsize for one in self.order)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value of a tensor of the outline, contiguous and on the CPU.

        Quick if tensors are asked for in order.
        """
        number = self._group_of[id(tensor)]
        if number != self._number:
            self._values = {}  # before the next group is in memory
            values = self._read_group(number)
            self._number = number
            group = self._groups[number]
            self._values = {id(one): value for one, value in zip(group, values, strict=True)}
        return self._values[id(tensor)].to(self.dtype_of(tensor)).contiguous()

    def _read_group(self, number: int) -> list[torch.Tensor]:
        ahead = self._ahead
        self._ahead = None
        if ahead is not None and ahead[0] != number:
            ahead[1].result()
            ahead = None
        found = self._submit(number) if ahead is None else ahead[1]
        values = found.result()
        if number + 1 < len(self._groups):
            self._ahead = number + 1, self._submit(number + 1)
        return values

    def _submit(self, number: int) -> Future[list[torch.Tensor]]:
        return self._thread.submit(self._state.read, self._groups[number])

    def close(self) -> None:
        """Wait for the thread that reads ahead."""
        self._thread.shutdown()


def _grouped(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    group = list[torch.Tensor]()
    size_bytes = 0
    for one in tensors:
        if group and size_bytes + one.nbytes > _GROUP_BYTES:
            yield group
            group = []
            size_bytes = 0
        group.append(one)
        size_bytes += one.nbytes
    if group:
        yield group
