"""Sees every operator of a step: what it reads, writes, makes, and what is freed behind it.

A dispatch mode, below autograd and autocast and above the kernels: casts, collectives and the
operators of backward pass it like any other. Memory is followed by weak references to storages.
It costs tens of microseconds for every operator: for planning, never in production.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from everstep.plan.schedule.steps import WAIT, Kind, Operator, Phase, Traced

__all__ = ["Look", "Recorder", "address_of", "parts_of"]

# These write to arguments that their schemas do not mark.
_UNMARKED_WRITES: Mapping[str, tuple[str, ...]] = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
}
# Nor do collectives.
_COLLECTIVE = "c10d::"
_COLLECTIVE_WRITES = (
    *("tensors", "output", "outputs", "output_lists", "output_tensor", "output_tensors"),
)
_COLLECTIVE_READS = ("c10d::send", "c10d::barrier", "c10d::monitored_barrier_")

_FRAMES_MAX = 60


class Look(Protocol):
    """Looks at a real step while it is traced; for checks against what has really changed."""

    def begin(self) -> None:
        """The step begins."""

    def behind(self, number: int, operator: Operator, written: frozenset[str]) -> None:
        """Operator ``number`` has run; ``written``: what it wrote of the state, by name."""


@dataclass(slots=True)
class _Seen:
    traced: Traced
    alive: weakref.ref[Any]
    reduced: int | None = None  # the collective that has not been waited for


@dataclass(slots=True)
class _Steps:
    operators: list[Operator] = field(default_factory=list)
    tensors: list[Traced] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """One step.

    Args:
        model: names modules and says which device it is.
        timed: measure each operator by itself (not on the meta device).

    Attributes:
        device: of the model.
        dry: whether its tensors have no data.
        entered: the operator that was called last, as ``"aten::mm"``.
    """

    def __init__(self, model: nn.Module, *, timed: bool = False, look: Look | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        first = next(iter(model.parameters()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.dry = self.device.type == "meta" or isinstance(first, FakeTensor)
        self.entered = ""
        self._modules: dict[int, str] = {id(module): name for name, module in model.named_modules()}
        self._timed = timed and not self.dry
        self._look = look
        self._phase: Phase = "forward"
        self._live: dict[int, _Seen] = {}
        self._steps: _Steps | None = None

    def enter(self, phase: Phase) -> None:
        """Start a phase."""
        self._phase = phase

    def begin(self, state: Iterable[tuple[Kind, str, Tensor]]) -> None:
        """Start recording operators. ``state``: tensors that exist before the step."""
        self._steps = _Steps()
        for kind, name, tensor in state:
            for part in parts_of(tensor):
                self._note(part, kind, name, begin=-1)
        if self._look is not None:
            self._look.begin()

    def gradients(self, parameters: Iterable[Tensor]) -> None:
        """The gradients as backward has left them."""
        for parameter in parameters:
            if parameter.grad is None or self._steps is None:
                continue
            for part in parts_of(parameter.grad):
                seen = self._live.get(address_of(part))
                if seen is not None and seen.traced.kind == "activation":
                    seen.traced.kind = "gradient"

    def moved(self, state: Iterable[tuple[Kind, str, Tensor]]) -> list[str]:
        """Return names of state tensors that have moved although their old memory is still there,
        unwritten.
        """
        found = []
        for kind, name, tensor in state:
            for part in parts_of(tensor):
                seen = self._live.get(address_of(part))
                if kind != "activation" and (seen is None or name not in seen.traced.names):
                    before = [x for x in self._recorded().tensors if name in x.names]
                    if any(x.first_write is None for x in before):
                        found.append(name)
        return found

    def collective(self, name: str, tensors: Sequence[Tensor], ranks: int) -> None:
        """One was launched that no dispatcher has seen (see :mod:`.parallel`)."""
        if self._steps is not None:
            self._record_collective(name, tensors, tensors, ranks, None)

    def result(self) -> tuple[tuple[Operator, ...], tuple[Traced, ...]]:
        """Return all operators and tensors, and stop recording."""
        steps = self._recorded()
        last = len(steps.operators) - 1
        for seen in self._live.values():
            seen.traced.end = last
        self._live.clear()
        self._steps = None
        tensors = tuple(tensor for tensor in steps.tensors if tensor.size_bytes)
        return tuple(steps.operators), tensors

    def _recorded(self) -> _Steps:
        assert self._steps is not None, "not begun"
        return self._steps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of tensors: what it does with them is seen
        kwargs = kwargs or {}
        name = func._schema.name
        self.entered = name
        if self.device.type == "meta" and any(map(torch.is_autocast_enabled, ("cuda", "cpu"))):
            raise NotImplementedError("autocast does nothing on the meta device")
        if self._steps is None:
            return func(*args, **kwargs)
        start_s = self._now_s()
        out = func(*args, **kwargs)
        if name.startswith(_COLLECTIVE):
            work = _work_of(out)
            if work is not None and (self._timed or self._look is not None):
                work.wait()
            seconds = self._now_s() - start_s if self._timed else None
            written = _unique(_written(func, args, kwargs))
            read = _unique(x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor))
            number = self._record_collective(name, read, written, _ranks_of(args), seconds)
            if self._look is not None:
                operator = self._steps.operators[number]
                self._look.behind(number, operator, self._names(written))
            return out
        seconds = self._now_s() - start_s if self._timed else None
        self._record(func, args, kwargs, out, seconds)
        return out

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any, seconds: float | None
    ) -> None:
        steps = self._recorded()
        inputs = list(_tensors((args, kwargs)))
        outputs = list(_tensors(out))
        written = list(_written(func, args, kwargs))
        known = {address_of(x) for x in inputs}
        made = [x for x in outputs if address_of(x) not in {*known, *self._live}]
        if not made and not written and all(address_of(x) in known for x in outputs):
            return  # a view, or a question
        for tensor in inputs:  # of a batch, made before the step
            self._note(tensor, "activation", "", begin=-1)
        self._wait_for(inputs)
        number = len(steps.operators)
        for tensor in made:
            self._note(tensor, "activation", "", begin=number)
        for tensor in written:
            self._write(tensor, number)
        results = outputs or written
        operator = Operator(
            func._schema.name,
            self._phase,
            _flops(func, args, kwargs, out),
            sum(map(_bytes, inputs)) + sum(map(_bytes, results)),
            results[0].dtype if results else torch.float32,
            seconds,
            tuple(tuple(x.shape) for x in (*inputs, *outputs)),
            self._module(),
        )
        steps.operators.append(operator)
        if self._look is not None:
            self._look.behind(number, operator, self._names(written))

    def _record_collective(
        self,
        name: str,
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
        ranks: int,
        seconds: float | None,
    ) -> int:
        """Launches it; whoever touches its tensors waits for it."""
        steps = self._recorded()
        for tensor in tensors:
            self._note(tensor, "activation", "", begin=-1)
        self._wait_for(tensors)
        number = len(steps.operators)
        for tensor in written:
            self._write(tensor, number)
        for tensor in tensors:
            self._live[address_of(tensor)].reduced = number
        sent = int(_sent(name, ranks) * sum(map(_bytes, written or tensors)))
        dtype = tensors[0].dtype if tensors else torch.float32
        shapes = tuple(tuple(x.shape) for x in tensors)
        operator = Operator(name, self._phase, 0, 0, dtype, seconds, shapes, "", sent)
        steps.operators.append(operator)
        return number

    def _wait_for(self, tensors: Iterable[Tensor]) -> None:
        """Record the end of collectives that the next operator waits for."""
        steps = self._recorded()
        for tensor in tensors:
            seen = self._live[address_of(tensor)]
            if seen.reduced is None:
                continue
            number = seen.reduced
            seen.reduced = None
            for other in self._live.values():
                if other.reduced == number:
                    other.reduced = None
            zero = 0.0 if self._timed else None
            steps.operators.append(
                Operator(WAIT, self._phase, 0, 0, tensor.dtype, zero, (), "", 0, number)
            )

    def _note(self, tensor: Tensor, kind: Kind, name: str, *, begin: int) -> None:
        steps = self._recorded()
        address = address_of(tensor)
        if address in self._live:
            names = self._live[address].traced.names
            if name and name not in names:
                self._live[address].traced.names = (*names, name)
            return
        storage = tensor.untyped_storage()
        names = (name,) if name else ()
        traced = Traced(kind, names, storage.nbytes(), begin, begin)
        steps.tensors.append(traced)

        def freed(_: Any) -> None:
            seen = self._live.pop(address, None)
            if seen is None:
                return
            traced.end = max(traced.begin, len(steps.operators) - 1)
            if traced.checkpointed and traced.first_write is None:
                traced.first_write = traced.end + 1  # another takes its place in the state

        self._live[address] = _Seen(traced, weakref.ref(storage, freed))

    def _write(self, tensor: Tensor, number: int) -> None:
        seen = self._live[address_of(tensor)].traced
        if seen.begin < number and seen.first_write is None:
            seen.first_write = number

    def _names(self, written: Iterable[Tensor]) -> frozenset[str]:
        return frozenset(
            name for tensor in written for name in self._live[address_of(tensor)].traced.names
        )

    def _module(self) -> str:
        """Return the name of the module whose forward runs; "" outside any forward."""
        if self._phase != "forward":
            return ""
        frame = sys._getframe(2)
        for _ in range(_FRAMES_MAX):
            if frame.f_code.co_name == "forward":
                name: str | None = self._modules.get(id(frame.f_locals.get("self")))
                if name is not None:
                    return name
            if frame.f_back is None:
                break
            frame = frame.f_back
        return ""

    def _now_s(self) -> float:
        if not self._timed:
            return 0.0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that one consists of: itself, mostly."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    else:
        yield tensor


def address_of(tensor: Tensor) -> int:
    """Of its storage: views have the same."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> Iterator[Tensor]:
    for value in tree_iter(tree):
        if isinstance(value, Tensor):
            yield from parts_of(value)


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({address_of(tensor): tensor for tensor in tensors}.values())


def _bytes(tensor: Tensor) -> int:
    """That an operator touches of it: expanded elements lie in one place."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operator writes to: those that its schema marks."""
    name = func._schema.name
    unmarked = _UNMARKED_WRITES.get(name, ())
    if name.startswith(_COLLECTIVE) and not name.startswith(_COLLECTIVE_READS):
        unmarked = _COLLECTIVE_WRITES
    for position, argument in enumerate(func._schema.arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if not marked and argument.name not in unmarked:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from _tensors(value)


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    packet = func._overloadpacket
    if packet is torch.ops.aten.convolution_backward:
        # Each of the two gradients is as much work as the forward pass; torch's own count
        # overlooks groups.
        gradient, _, weight, _, _, _, _, transposed, _, _, wanted = args
        out_channels: int = weight.shape[1 if transposed else 0]
        each: int = 2 * gradient.numel() * weight.numel() // out_channels
        return each * int(sum(wanted[:2]))
    count: Callable[..., Any] | None = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _sent(name: str, ranks: int) -> float:
    """Bytes that each rank sends for one byte of the result, at least (rings; Patarasuk and Yuan,
    JPDC 2009)."""
    if "reduce_scatter" in name:
        return ranks - 1
    share = (ranks - 1) / ranks
    return 2 * share if "allreduce" in name else share


def _ranks_of(args: tuple[Any, ...]) -> int:
    """Size of the group that a collective is given."""
    from torch import distributed

    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return int(distributed.ProcessGroup.unbox(value).size())
    return int(distributed.get_world_size())


def _work_of(out: Any) -> Any:
    """Objects that can be waited for."""
    from torch import distributed

    for value in out if isinstance(out, tuple | list) else (out,):
        if isinstance(value, torch.ScriptObject) and "Work" in str(value._type()):
            return distributed.Work.unbox(value)
    return None
