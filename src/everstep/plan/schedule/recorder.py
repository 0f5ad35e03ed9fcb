"""Records every operator of a step: the memory that it reads, writes, allocates and frees.

The recorder is a dispatch mode, below autograd and autocast and above the kernels: casts,
collectives and the operators of backward pass it like any other. Memory is followed by weak
references to storages. It costs tens of microseconds per operator, so it serves planning only.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from everstep.plan.schedule.steps import WAIT, Kind, Operator, Phase, Traced

# Operators that write to arguments which their schemas do not mark as written.
_UNMARKED_WRITES: Mapping[str, tuple[str, ...]] = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
}
# The schemas of collectives mark none of the arguments that they write to.
_COLLECTIVE = "c10d::"
_COLLECTIVE_WRITES = (
    *("tensors", "output", "outputs", "output_lists", "output_tensor", "output_tensors"),
)
_COLLECTIVE_READS = ("c10d::send", "c10d::barrier", "c10d::monitored_barrier_")


@dataclass(slots=True)
class _Seen:
    traced: Traced
    alive: weakref.ref[Any]
    reduced: int | None = None  # number of the collective on it that is still running


@dataclass(slots=True)
class _Steps:
    operators: list[Operator] = field(default_factory=list)
    tensors: list[Traced] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Recorder of one step.

    Args:
        model: the model, for its device.
        timed: measure each operator by itself (not on the meta device).

    Attributes:
        device: device of the model.
        dry: True if its tensors have no data.
        entered: operator that was called last, as ``"aten::mm"``.
    """

    def __init__(self, model: nn.Module, *, timed: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        first = next(iter(model.parameters()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.dry = self.device.type == "meta" or isinstance(first, FakeTensor)
        self.entered = ""
        self._timed = timed and not self.dry
        self._phase: Phase = "forward"
        self._live: dict[int, _Seen] = {}
        self._steps: _Steps | None = None

    def enter(self, phase: Phase) -> None:
        """Start a phase."""
        self._phase = phase

    def begin(self, state: Iterable[tuple[Kind, str, Tensor]]) -> None:
        """Start to record operators.

        Args:
            state: tensors that exist before the step.
        """
        self._steps = _Steps()
        for kind, name, tensor in state:
            for part in parts_of(tensor):
                self._note(part, kind, name, begin=-1)

    @property
    def count(self) -> int:
        """Number of operators recorded so far."""
        return 0 if self._steps is None else len(self._steps.operators)

    def gradients(self, parameters: Iterable[Tensor]) -> None:
        """Mark the gradients that backward has left as gradients."""
        for parameter in parameters:
            if parameter.grad is None or self._steps is None:
                continue
            for part in parts_of(parameter.grad):
                seen = self._live.get(address_of(part))
                if seen is not None and seen.traced.kind == "activation":
                    seen.traced.kind = "gradient"

    def moved(self, state: Iterable[tuple[Kind, str, Tensor]]) -> list[str]:
        """Return names of state tensors that have moved to other memory during the step, although
        their old memory still exists and was not written."""
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
        """Record a collective that does not pass the dispatcher (see :mod:`.trace`)."""
        if self._steps is not None:
            self._record_collective(name, tensors, tensors, ranks, None)

    def result(self) -> tuple[tuple[Operator, ...], tuple[Traced, ...]]:
        """Return all operators and tensors, and stop recording."""
        steps = self._recorded()
        last = len(steps.operators) - 1
        for seen in self._live.values():
            seen.traced.end = last
        # The weak references go first: their callbacks must not change a trace that was returned.
        self._live.clear()
        self._steps = None
        tensors = tuple(tensor for tensor in steps.tensors if tensor.size_bytes)
        return tuple(steps.operators), tensors

    def _recorded(self) -> _Steps:
        assert self._steps is not None, "begin() was not called"
        return self._steps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A subclass that consists of tensors: the operators that it runs on those are recorded.
            return NotImplemented
        kwargs = kwargs or {}
        name = func._schema.name
        self.entered = name
        if self.device.type == "meta" and any(map(torch.is_autocast_enabled, ("cuda", "cpu"))):
            # trace.trace_of() recognises this error by the word autocast, and takes fake tensors
            # then.
            raise NotImplementedError("autocast does nothing on the meta device")
        if self._steps is None:
            return func(*args, **kwargs)
        start_s = self._now_s()
        out = func(*args, **kwargs)
        if name.startswith(_COLLECTIVE):
            work = _work_of(out)
            if work is not None and self._timed:
                work.wait()
            seconds = self._now_s() - start_s if self._timed else None
            written = _unique(_written(func, args, kwargs))
            read = _unique(x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor))
            self._record_collective(name, read, written, _ranks_of(args), seconds)
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
            return  # a view, or a query of metadata
        for tensor in inputs:  # tensors of the batch exist before the step
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
        )
        steps.operators.append(operator)

    def _record_collective(
        self,
        name: str,
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
        ranks: int,
        seconds: float | None,
    ) -> None:
        """Record the launch of a collective; the next operator on its tensors waits for it."""
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
        operator = Operator(name, self._phase, 0, 0, dtype, seconds, shapes, sent)
        steps.operators.append(operator)

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
                Operator(WAIT, self._phase, 0, 0, tensor.dtype, zero, (), 0, number)
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
                # Other memory takes its place in the state: from then on this copy would be stale.
                traced.first_write = traced.end + 1

        # torch keeps the Python object of a storage as long as the storage exists, even if only C++
        # refers to it. So the reference dies when the memory is freed.
        self._live[address] = _Seen(traced, weakref.ref(storage, freed))

    def _write(self, tensor: Tensor, number: int) -> None:
        seen = self._live[address_of(tensor)].traced
        # The operator that allocates memory also fills it, which is not a first write.
        if seen.begin < number and seen.first_write is None:
            seen.first_write = number

    def _now_s(self) -> float:
        if not self._timed:
            return 0.0
        if self.device.type == "cuda":
            # Kernels run asynchronously: otherwise only their launch would be measured.
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor consists of: mostly the tensor itself."""
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
    """Return the address of a tensor's storage, which its views share."""
    # Not data_ptr(): it is 0 for tensors without data.
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> Iterator[Tensor]:
    for value in tree_iter(tree):
        if isinstance(value, Tensor):
            yield from parts_of(value)


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({address_of(tensor): tensor for tensor in tensors}.values())


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that an operator reads or writes of it: expanded elements share memory."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the arguments that an operator writes to: those that its schema marks, and others."""
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
        # Each of the two gradients takes as many operations as the forward pass. torch's own count
        # ignores groups.
        gradient, _, weight, _, _, _, _, transposed, _, _, wanted = args
        out_channels: int = weight.shape[1 if transposed else 0]
        each: int = 2 * gradient.numel() * weight.numel() // out_channels
        return each * int(sum(wanted[:2]))
    count: Callable[..., Any] | None = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _sent(name: str, ranks: int) -> float:
    """Return the minimum bytes that each rank sends per byte of the result, with ring algorithms
    (Patarasuk and Yuan, JPDC 2009)."""
    if "reduce_scatter" in name:
        return ranks - 1
    share = (ranks - 1) / ranks
    return 2 * share if "allreduce" in name else share


def _ranks_of(args: tuple[Any, ...]) -> int:
    """Return the size of the process group among a collective's arguments."""
    from torch import distributed

    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return int(distributed.ProcessGroup.unbox(value).size())
    return int(distributed.get_world_size())


def _work_of(out: Any) -> Any:
    """Return the ``Work`` object among a collective's results; None: there is none."""
    from torch import distributed

    for value in out if isinstance(out, tuple | list) else (out,):
        if isinstance(value, torch.ScriptObject) and "Work" in str(value._type()):
            return distributed.Work.unbox(value)
    return None
