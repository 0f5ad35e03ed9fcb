"""Optimizers whose ``state_dict()`` returns their state in another form than training has it.

torch's own optimizers return the tensors that they train with, but cast them on load to the dtype
of the parameter, which loses bits (float32 moments of bfloat16 parameters). So everstep puts the
saved tensors back after a load. A class or a hook may do more: save state in another form, and
decode it on load. Such state is left as the optimizer decodes it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from everstep.state.ownership import Memory, memory_of
from everstep.state.values.tensors import local_tensor

Forms = Mapping[int, Collection[str]]
"""By the number of a parameter: keys of its state that are saved in a form of the optimizer's
own."""


class Encodings:
    """Record of the state that an optimizer saves in another form than it has it.

    Attributes:
        forms: encoded keys by parameter number, as of the last look.
        lossy: ``(parameter number, key)`` of state whose saved form loses bits, or is not known to
            keep them.
    """

    def __init__(self) -> None:
        self.forms: dict[int, list[str]] = {}
        self.lossy: list[tuple[int, str]] = []
        self._judged: set[tuple[int, str]] = set()

    def look(self, optimizer: Optimizer, saved: Mapping[Any, Any], indices: Sequence[int]) -> None:
        """Compare the result of ``state_dict()`` with the live state.

        Args:
            optimizer: the optimizer.
            saved: the ``"state"`` of the result.
            indices: numbers of all parameters in it, in the order of the groups.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        forms: dict[int, list[str]] = {}
        for number, (index, parameter) in enumerate(zip(indices, parameters, strict=True)):
            live = optimizer.state.get(parameter)
            # The usual case: torch's own state_dict() returns the live dicts themselves.
            if live is None or saved.get(index) is live:
                continue
            given = saved.get(index, {})
            if not isinstance(live, Mapping) or not isinstance(given, Mapping):
                continue
            found = [key for key, value in given.items() if _is_other_tensor(value, live.get(key))]
            if found:
                forms[number] = found
            self._judge(number, live, given, found)
        self.forms = forms

    def _judge(
        self, number: int, live: Mapping[Any, Any], given: Mapping[Any, Any], found: Collection[Any]
    ) -> None:
        """Check each live tensor once for lost bits, as soon as it has nonzero elements."""
        for key, tensor in live.items():
            if not isinstance(tensor, torch.Tensor) or (number, key) in self._judged:
                continue
            if key in given and key not in found:
                continue
            mine = local_tensor(tensor).detach()
            if mine.numel() and not bool((mine != 0).any()):
                continue  # zeros: no bits to lose
            self._judged.add((number, key))
            if not _preserves_bits(given.get(key), tensor):
                self.lossy.append((number, key))


def _is_other_tensor(given: Any, live: Any) -> bool:
    """Return True if a returned tensor is not the one that training has."""
    if given is live or not isinstance(given, torch.Tensor):
        return False
    if not isinstance(live, torch.Tensor):
        return True
    one = local_tensor(given)
    other = local_tensor(live)
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return True
    if one.layout is not torch.strided:
        return True
    return (one.data_ptr(), one.stride()) != (other.data_ptr(), other.stride())


def _preserves_bits(given: Any, live: torch.Tensor) -> bool:
    """Return True if every bit of ``live`` is provably in the returned tensor: in a dtype that
    holds all its values, or as words of the same size."""
    if not isinstance(given, torch.Tensor):
        return False
    one = local_tensor(given).detach()
    other = local_tensor(live).detach()
    if one.shape != other.shape or one.device != other.device or one.layout != other.layout:
        return False
    same_words = one.itemsize == other.itemsize and one.dtype != other.dtype
    if same_words and one.is_contiguous() and torch.equal(one.view(other.dtype), other):
        return True
    return bool(torch.equal(one.to(other.dtype), other))


def load_exactly(optimizer: Optimizer, state_dict: dict[str, Any], forms: Forms) -> None:
    """Call ``load_state_dict`` without loss of bits, and keep groups, state and tensor rates the
    same objects.

    Other code may hold references to them: an optimizer around or inside of this one, a loop that
    sets the rates of groups. torch replaces them, and writes to the old objects would be lost
    silently.

    Args:
        optimizer: the optimizer.
        state_dict: the state to load.
        forms: state in a form of the optimizer's own, which it decodes itself.
    """
    own = vars(optimizer)
    groups = own["param_groups"]
    state = own["state"]
    given = state_dict

    def note(_: Optimizer, decoded: dict[str, Any]) -> None:
        nonlocal given
        given = decoded  # as decoded by the class, or by other hooks

    def keep(_: Optimizer) -> None:
        _keep_tensors(groups, own["param_groups"])
        for group, loaded in zip(groups, own["param_groups"], strict=True):
            group.clear()
            group.update(loaded)
        state.clear()
        state.update(own["state"])
        own["param_groups"] = groups
        own["state"] = state
        for number, parameter, values in _by_parameter(optimizer, given):
            raw = state_dict["state"].get(number, {})
            decoded = [k for k in forms.get(number, ()) if values.get(k) is not raw.get(k)]
            _undo_casts(optimizer, parameter, {k: values[k] for k in decoded if k in values})

    # note() must run after all other pre-hooks, to see their result. keep() must run first after
    # torch's own load, before a class or another hook works on the loaded state.
    noted = optimizer.register_load_state_dict_pre_hook(note)
    kept = optimizer.register_load_state_dict_post_hook(keep, prepend=True)
    try:
        optimizer.load_state_dict(_without_arrays(optimizer, state_dict))
    finally:
        kept.remove()
        noted.remove()
    for number, parameter, values in _by_parameter(optimizer, state_dict):
        own_form = forms.get(number, ())
        as_trained = {key: value for key, value in values.items() if key not in own_form}
        _undo_casts(optimizer, parameter, as_trained)


def _without_arrays(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace values that torch's ``load_state_dict`` cannot rebuild by None; they are put back
    after the load.

    A class that overrides ``load_state_dict`` gets all values.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return state_dict
    state = {
        index: {key: None if _has_array(value) else value for key, value in values.items()}
        if isinstance(values, Mapping)
        else values
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _has_array(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_array, value.values()))
    if isinstance(value, (list, tuple, deque)):
        return any(map(_has_array, value))
    return isinstance(value, (np.ndarray, range))


def _by_parameter(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> Iterable[tuple[int, torch.Tensor, Mapping[Any, Any]]]:
    """Yield number, parameter and state of each parameter with state in ``state_dict``."""
    listed = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for number, (index, parameter) in enumerate(zip(listed, parameters, strict=True)):
        values = state_dict["state"].get(index)
        if isinstance(values, Mapping):
            yield number, parameter, values


def _undo_casts(optimizer: Optimizer, parameter: torch.Tensor, values: Mapping[Any, Any]) -> None:
    """Put saved values back after ``load_state_dict``, which casts them to the parameter's dtype
    and splits strings."""
    held = optimizer.state[parameter] if values else {}
    for name, value in values.items():
        if name in held and isinstance(value, Iterable):  # a tensor is one, too
            held[name] = _with_saved_dtypes(value, held[name], parameter.device)


def _keep_tensors(groups: Sequence[dict[str, Any]], loaded: Sequence[dict[str, Any]]) -> None:
    """Copy loaded values into the tensors that the groups have, alone or in a tuple.

    A tensor is kept if it occurs in the same groups as the loaded one.
    """
    places = [
        (new, key, old[key], value)
        for old, new in zip(groups, loaded, strict=True)
        for key, value in new.items()
        if key in old
    ]
    both: set[tuple[Memory | int, Memory | int]] = set()

    def note(mine: torch.Tensor, value: torch.Tensor) -> bool:
        both.add((_tensor_identity(mine), _tensor_identity(value)))
        return False

    for _, _, old, value in places:
        _put(old, value, note)
    one = Counter(mine for mine, _ in both)
    other = Counter(value for _, value in both)

    def kept(mine: torch.Tensor, value: torch.Tensor) -> bool:
        matches = mine.dtype == value.dtype and mine.shape == value.shape
        return matches and one[_tensor_identity(mine)] == 1 and other[_tensor_identity(value)] == 1

    for new, key, mine, value in places:
        new[key] = _put(mine, value, kept)


def _put(mine: Any, value: Any, kept: Callable[[torch.Tensor, torch.Tensor], bool]) -> Any:
    """Return ``value`` with the tensors of ``mine`` in place of those that are kept; these get
    its values."""
    if type(value) is torch.Tensor and type(mine) is torch.Tensor:
        if not kept(mine, value):
            return value
        with torch.no_grad():
            mine.copy_(value)
        return mine
    if type(value) in (list, tuple) and type(mine) is type(value) and len(mine) == len(value):
        return type(value)(_put(one, other, kept) for one, other in zip(mine, value, strict=True))
    return value


def _tensor_identity(tensor: torch.Tensor) -> Memory | int:
    """Return a key that is equal for tensors with the same elements of the same memory.

    torch's ``load_state_dict`` makes a tensor object for each place of a tensor.
    """
    return memory_of(tensor) or id(tensor)


def _with_saved_dtypes(value: Any, got: Any, device: torch.device) -> Any:
    """Return ``value`` with its own dtypes, given the result ``got`` of ``load_state_dict``."""
    if isinstance(value, torch.Tensor):
        on = got.device if isinstance(got, torch.Tensor) else device
        same = isinstance(got, torch.Tensor) and got.dtype == value.dtype
        return got if same else value.to(on)
    if type(value) in (dict, OrderedDict):
        parts = got if isinstance(got, dict) else {}
        return type(value)(
            (k, _with_saved_dtypes(v, parts.get(k), device)) for k, v in value.items()
        )
    if type(value) in (list, tuple):
        items = got if isinstance(got, (list, tuple)) and len(got) == len(value) else value
        return type(value)(
            _with_saved_dtypes(v, g, device) for v, g in zip(value, items, strict=True)
        )
    return value
