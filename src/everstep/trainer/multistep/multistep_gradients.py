"""Gradients whose copies run on behind their update (GoCkpt 4.2.4): held, guarded, and looked at.

A gradient that is dropped (``zero_grad()``, or ``p.grad = None``) stays as it is as long as
somebody refers to it. One that is not dropped is written over in place: by ``zero_grad`` with
``set_to_none=False``, or by the next backward, which adds to it. So both wait for its copy here.
What is a part of other memory (buckets of DDP, flat buffers), or lies in that of a CUDA graph, may
be written over without any of that, and is not held: its update waits for its copy. Whatever else
writes to a gradient too early is found by its version, as it is when the copy is made or when the
first is let through that may write, whichever is sooner; and by a few of its elements, which are
compared with what has arrived.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from everstep.capture.lanes.cuda import on_cuda
from everstep.capture.lanes.lane import Transfer
from everstep.seams.gather import Gather
from everstep.state.layout.lru import LayoutCache
from everstep.state.layout.names import GRADIENT
from everstep.state.layout.shards import ShardLayout
from everstep.state.providers.modules import unwrap
from everstep.state.training_state import State

__all__ = ["GradientCheck", "GradientPlaces", "GraphMemory", "HeldGradients", "are_alone"]

_SAMPLES = 4  # of a gradient
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLED = 32  # gradients of an update: views of all of them would take milliseconds

Wait = Callable[[Transfer, int], None]
"""Holds training back until so many bytes are copied."""


def are_alone(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether each has memory of its own, which is nobody else's as long as it is referred to."""
    return all(
        g._base is None and g.untyped_storage().nbytes() == g.numel() * g.element_size()
        for g in gradients
    )


class GraphMemory:
    """Memory that CUDA's allocator keeps apart, for graphs above all (also those that
    ``torch.compile`` makes): a replay writes over the gradients that lie there, whoever refers to
    them, and calls no hook. Each of them seems to have memory of its own.

    Looked for when it is asked, and again where a device has given out memory since: to look takes
    milliseconds, and graphs are captured in the first steps of a training.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []
        self._given: dict[torch.device, Any] = {}  # by each device, when it was looked at last

    def has(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether any of these lies there."""
        there = [tensor for tensor in tensors if on_cuda(tensor)]
        if not there:
            return False
        given = {device: _given_out(device) for device in {tensor.device for tensor in there}}
        if any(now is None or self._given.get(device) != now for device, now in given.items()):
            # What another device has given out since is not looked for before it is asked about.
            self._spans = _kept_apart()
            self._given.update(given)
        return any(self._holds(tensor.data_ptr()) for tensor in there)

    def _holds(self, address: int) -> bool:
        index = bisect.bisect_right(self._spans, address, key=itemgetter(0))
        return index > 0 and address < self._spans[index - 1][1]


def _given_out(device: torch.device) -> Any:
    """How often the allocator has asked a device for memory, and for how much in all: where neither
    has changed, nothing was kept apart since. None: it does not tell."""
    with contextlib.suppress(KeyError, RuntimeError, TypeError):
        found = torch.cuda.memory_stats_as_nested_dict(device)
        return tuple(found[key]["all"]["allocated"] for key in ("segment", "reserved_bytes"))
    return None


def _kept_apart() -> list[tuple[int, int]]:
    """Addresses, in order; all of them where the allocator does not tell."""
    try:
        segments = _segments()
        return sorted(
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in segments
            if tuple(segment["segment_pool_id"]) != (0, 0)
        )
    except (KeyError, RuntimeError):
        return [(0, sys.maxsize)]


def _segments() -> list[dict[str, Any]]:
    """Of all devices. Without the history of their memory, if that is recorded, which is long."""
    snapshot: Any = torch.cuda.memory_snapshot
    if "include_traces" in inspect.signature(snapshot).parameters:
        found: Any = snapshot(include_traces=False)
    else:
        found = snapshot()
    return cast("list[dict[str, Any]]", found)


_Kind = tuple[int, torch.device]  # what one packed copy can hold: width in bytes, and device


class _Few(NamedTuple):
    """Gradients of one kind of which a few elements are looked at.

    Attributes:
        which: numbers of the gradients, in the order of the record's.
        names: of these.
        counts: of elements of each.
        strides: from one element of each to the next, in elements.
        offsets: of the elements from where their gradient begins, in bytes.
        where: these are in the record, in elements.
    """

    which: Sequence[int]
    names: Sequence[str]
    counts: npt.NDArray[np.int64]
    strides: Sequence[int]
    offsets: npt.NDArray[np.int64]
    where: torch.Tensor


class GradientPlaces:
    """Which elements of gradients are looked at: found out once for each layout of a record."""

    def __init__(self) -> None:
        self._found = LayoutCache[tuple[int, dict[int, Mapping[_Kind, _Few]]]]()  # by turn

    def of(
        self, gradients: Sequence[tuple[str, torch.Tensor]], layout: ShardLayout, turn: int
    ) -> tuple[int, Mapping[_Kind, _Few]]:
        """The end of all gradients in the record; and the elements, by kind.

        Args:
            gradients: by their names in a record of this layout, which says all of their form, and
                not where they are: a model may be moved.
            turn: other gradients with the next number, where there are many.
        """
        turn %= -(-len(gradients) // _SAMPLED)
        known = self._found.get(layout)
        if known is None:
            names = {name for name, _ in gradients}
            end = max(place.end for place in layout.placed if place.entry.name in names)
            known = end, {}
            self._found.add(layout, known)
        end, turns = known
        found = turns.get(turn)
        if found is None or not _are_there(gradients, found):
            found = turns[turn] = _places_of(gradients, layout, turn)
        return end, found


def _places_of(
    gradients: Sequence[tuple[str, torch.Tensor]], layout: ShardLayout, turn: int
) -> Mapping[_Kind, _Few]:
    begins = {place.entry.name: place.begin for place in layout.placed}
    rows: dict[_Kind, list[tuple[int, str, int, int, int]]] = {}
    every = -(-len(gradients) // _SAMPLED)
    for number in range(turn, len(gradients), every):
        name, gradient = gradients[number]
        length = gradient.numel()
        width = gradient.element_size()
        if length and gradient.is_contiguous() and not gradient.is_complex():
            stride = max(1, length // _SAMPLES)
            row = number, name, -(-length // stride), stride, begins[name] // width
            rows.setdefault((width, gradient.device), []).append(row)
    found = {}
    for kind, some in rows.items():
        which, names, counts, strides, firsts = zip(*some, strict=True)
        within = np.concatenate([n * np.arange(m) for m, n in zip(counts, strides, strict=True)])
        where = torch.from_numpy(np.repeat(firsts, counts) + within)
        offsets = kind[0] * within
        found[kind] = _Few(which, names, np.array(counts), strides, offsets, where)
    return found


def _are_there(gradients: Sequence[tuple[str, torch.Tensor]], places: Mapping[_Kind, _Few]) -> bool:
    """Whether those that are looked at are on the devices that they were on."""
    return all(
        gradients[number][1].device == device
        for (_, device), few in places.items()
        for number in few.which
    )


class GradientCheck:
    """Versions of gradients, and a few elements of some, as they are consumed.

    Args:
        named: gradients by their names in the record.
        layout: of the record.
        turn: of which elements are taken: of others with the next number.
        places: remembers where these are.
    """

    def __init__(
        self,
        named: Mapping[str, torch.Tensor],
        layout: ShardLayout,
        turn: int,
        places: GradientPlaces,
    ) -> None:
        self._gradients = list(named.items())
        self._versions = self._now()
        self._seen: list[list[int]] = []  # versions since; the first ones count
        self._end, self._places = places.of(self._gradients, layout, turn)
        gradients = list(named.values())
        self._values = {kind: _few_of(gradients, few, kind) for kind, few in self._places.items()}

    def copied(self, end: int) -> None:
        """So many bytes of the record are copied, and whoever waits for them does not know yet."""
        if end >= self._end:
            self.see()

    def see(self) -> None:
        """From now on versions may move: the copy is made, or whoever comes next may write, since
        it comes behind the copy."""
        # Several threads may come at once, and nobody waits: what the first has, all of it from
        # before it has let anybody through, is what counts.
        if not self._seen:
            self._seen.append(self._now())

    def torn(self, block: torch.Tensor) -> str | None:
        """The name of one that was written to before it was copied into ``block``."""
        self.see()
        for (name, _), then, now in zip(
            self._gradients, self._versions, self._seen[0], strict=True
        ):
            if now != then:
                return name.removeprefix(GRADIENT)
        for kind, values in self._values.items():
            few = self._places[kind]
            width = kind[0]
            whole = block[: block.numel() // width * width].view(_INTEGERS[width])
            differs = whole[few.where] != values.cpu()
            if bool(differs.any()):
                index = int(differs.nonzero()[0])
                number = int(np.searchsorted(np.cumsum(few.counts), index, side="right"))
                return few.names[number].removeprefix(GRADIENT)
        return None

    def _now(self) -> list[int]:
        return [gradient._version for _, gradient in self._gradients]


def _few_of(gradients: Sequence[torch.Tensor], few: _Few, kind: _Kind) -> torch.Tensor:
    """The elements as they are now, as integers."""
    chosen = [gradients[number] for number in few.which]
    width, device = kind
    if device.type == "cpu":
        begins = np.array([gradient.data_ptr() for gradient in chosen], np.int64)
        addresses = begins.repeat(few.counts) + few.offsets
        return torch.from_numpy(Gather.at(addresses, np.dtype(f"i{width}")).take())
    return torch.cat(
        [
            gradient.detach().view(-1)[::stride].view(_INTEGERS[width])
            for gradient, stride in zip(chosen, few.strides, strict=True)
        ]
    )


@dataclass(eq=False, slots=True)
class _Copying:
    """Gradients of one update.

    Attributes:
        end: of their bytes.
        gradients: by ``id(parameter)``.
        on_device: some of them are in no host memory.
        check: of them.
    """

    key: str
    transfer: Transfer
    end: int
    gradients: Mapping[int, torch.Tensor]
    on_device: bool
    check: GradientCheck | None


class HeldGradients:
    """Those that are not copied yet, and what holds back whoever would write them over.

    Args:
        wait: holds training back.
    """

    def __init__(self, state: State, wait: Wait) -> None:
        self._state = state
        self._wait = wait
        self._pid = os.getpid()
        self._copying: list[_Copying] = []
        self._hooks: dict[int, Any] = {}
        self._guards: list[_Guard] = []

    def hold(
        self,
        key: str,
        transfer: Transfer,
        end: int,
        held: Sequence[tuple[torch.Tensor, torch.Tensor]],
        check: GradientCheck | None,
    ) -> None:
        """Copies are under way: nobody writes these gradients over before they are made.

        Args:
            key: of the optimizer that has consumed them.
            held: parameters, and their gradients.
            check: of these, as they were consumed.
        """
        gradients = {id(parameter): gradient for parameter, gradient in held}
        on_device = not all(gradient.is_cpu for _, gradient in held)
        self._copying.append(_Copying(key, transfer, end, gradients, on_device, check))
        for parameter, _ in held:
            if id(parameter) not in self._hooks:
                # Before anything is added to its gradient.
                hook = functools.partial(self._before_adding, parameter)
                register: Any = parameter.register_hook
                self._hooks[id(parameter)] = register(hook)
        if not self._guards:
            self._guards = [_Guard(owner, self.gate) for owner in self._owners()]

    def gate(self, key: str | None = None, *, keep: int = 0) -> None:
        """Training goes on when copies are made.

        Args:
            key: of what this optimizer has consumed; None: all.
            keep: but for those of so many updates, the last ones.
        """
        if os.getpid() != self._pid:  # nobody copies in a forked child
            return
        due = [one for one in self._copying if key in (None, one.key)]
        for one in due[: max(0, len(due) - keep)]:
            if not (one.on_device and one.transfer.complete):
                self._wait(one.transfer, one.end)
            if one.check is not None:
                one.check.see()
            # On a device only the current stream waits: whoever writes in another asks again.
            if not one.on_device or one.transfer.complete:
                with contextlib.suppress(ValueError):  # another thread has waited, too
                    self._copying.remove(one)

    @property
    def open(self) -> bool:
        """Whether somebody may have to wait."""
        return bool(self._copying)

    def settle(self) -> None:
        """No more gradients are held: where all copies are made, nothing is in training's way any
        more. Does not wait."""
        if self._copying:
            self._copying = [one for one in self._copying if not one.transfer.complete]
        if not self._copying and (self._hooks or self._guards):
            self.release()

    def release(self) -> None:
        """No more gradients are held: training goes on when all copies are made, and nothing is
        in its way from then on."""
        self.gate()
        for hook in self._hooks.values():
            hook.remove()
        for guard in self._guards:
            guard.remove()
        self._hooks = {}
        self._guards = []

    def _before_adding(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        for one in list(self._copying):  # another thread may remove some meanwhile
            held = one.gradients.get(id(parameter))
            if held is not None and parameter.grad is held:
                self.gate()
                return

    def _owners(self) -> list[Any]:
        modules = [value for value in self._state.values.values() if isinstance(value, nn.Module)]
        inner = [unwrap(module) for module in modules]
        owners: list[Any] = [*self._state.optimizers.values(), *modules, *inner]
        return list({id(owner): owner for owner in owners}.values())


class _Guard:
    """In the place of ``zero_grad`` of one optimizer or module: waits where it would zero
    gradients in place. A copy of its owner does not get it."""

    def __init__(self, owner: Any, gate: Callable[[], None]) -> None:
        self._owner = owner
        self._gate = gate
        self._own = vars(owner).get("zero_grad")
        kind = Optimizer if isinstance(owner, Optimizer) else nn.Module
        self._is_torchs = self._own is None and type(owner).zero_grad is kind.zero_grad
        self._zero_grad = owner.zero_grad
        vars(owner)["zero_grad"] = self

    def __call__(self, *args: Any, **options: Any) -> Any:
        """``zero_grad``."""
        to_none = args[0] if args else options.get("set_to_none", True)
        if not to_none or not self._is_torchs:
            self._gate()
        return self._zero_grad(*args, **options)

    def remove(self) -> None:
        """Puts back what was there."""
        attributes = vars(self._owner)
        if attributes.get("zero_grad") is self:
            del attributes["zero_grad"]
            if self._own is not None:
                attributes["zero_grad"] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._owner), self._owner)
        return types.MethodType(type(self._owner).zero_grad, copied)

    def __reduce__(self) -> Any:
        return types.MethodType, (type(self._owner).zero_grad, self._owner)
