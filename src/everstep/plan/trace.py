"""What one training step does, operator by operator: which tensors live when, which are written.

The input of a capture plan (Checkflow section III-A): operators in the order in which they run,
the bytes and the life of every tensor, and for what is checkpointed the operator that first writes
to it, its deadline. Any model, optimizer and loss in plain Python can be traced, on the meta device
without memory or computation, or for real, then with measured times. Tracers of programs
(symbolic_trace, make_fx, torch.export) each fail on some models; a dispatch mode sees what runs.
It costs tens of microseconds for every operator: for planning, never in production.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from everstep.errors import EverstepError, UnsupportedStateError

__all__ = ["Kind", "Operator", "Phase", "StepTrace", "Traced", "trace_training"]

Phase = Literal["forward", "backward", "update"]
Kind = Literal["parameter", "state", "buffer", "gradient", "activation"]

_CHECKPOINTED = ("parameter", "state", "buffer")

# These write to arguments that their schemas do not mark.
_UNMARKED_WRITES: Mapping[str, tuple[str, ...]] = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
}


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the step.

    Attributes:
        name: like ``"aten::mm"``.
        flops: floating-point operations, a multiplication and an addition being two; 0 for what
            is bound by memory.
        moved_bytes: read and written.
        dtype: of what it computes.
        seconds: as measured; None on the meta device.
    """

    name: str
    phase: Phase
    flops: int
    moved_bytes: int
    dtype: torch.dtype
    seconds: float | None = None


@dataclass(slots=True)
class Traced:
    """One piece of memory (a storage: views share it).

    Attributes:
        name: of what is checkpointed, as in the state; of anything else ``""``.
        begin: number of the operator that makes it; -1 if it is there before the step.
        end: number of the last operator before it is freed; that of the last one of all if it
            survives the step.
        first_write: number of the first operator that writes to it, after ``begin``; None if
            none does.
    """

    kind: Kind
    name: str
    size_bytes: int
    begin: int
    end: int
    first_write: int | None = None

    @property
    def checkpointed(self) -> bool:
        """Whether it is part of the state."""
        return self.kind in _CHECKPOINTED


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step.

    Attributes:
        operators: in the order in which they run.
        tensors: all memory that lives during the step.
        device: where it was traced.
        signature: digest of the sequence of operators, their shapes, and the tensors: two steps
            with the same one can follow the same plan.
    """

    operators: tuple[Operator, ...]
    tensors: tuple[Traced, ...]
    device: str
    signature: str

    @property
    def state(self) -> tuple[Traced, ...]:
        """What a checkpoint holds."""
        return tuple(tensor for tensor in self.tensors if tensor.checkpointed)

    @property
    def state_bytes(self) -> int:
        """Of a checkpoint."""
        return sum(tensor.size_bytes for tensor in self.state)

    def live_bytes(self) -> list[int]:
        """Bytes that are allocated while each operator runs."""
        change = [0] * (len(self.operators) + 1)
        for tensor in self.tensors:
            change[max(0, tensor.begin)] += tensor.size_bytes
            change[tensor.end + 1] -= tensor.size_bytes
        found, now = [], 0
        for step in change[:-1]:
            now += step
            found.append(now)
        return found


def trace_training(
    model: nn.Module,
    optimizer: Optimizer | Mapping[nn.Parameter, Optimizer],
    loss: Callable[[], Tensor],
    *,
    timed: bool = False,
    look: Callable[[Operator, frozenset[str]], None] | None = None,
) -> StepTrace:
    """Traces one step: ``loss().backward()``, ``optimizer.step()``.

    One step is taken first without looking, which makes optimizer state that does not exist yet.
    Gradients are set to None before each.

    Args:
        optimizer: or one for each parameter, which updates inside of backward, as soon as the
            gradient is there, and frees it.
        loss: forward and loss of one batch, whose inputs exist already.
        timed: measure each operator, one at a time (of no use on the meta device).
        look: called behind each operator with the names of what it wrote of the state; for
            checks against what has really changed.

    Raises:
        UnsupportedStateError: an operator cannot run on the meta device.
    """
    device = next(iter(model.parameters()), torch.empty(0)).device
    recorder = _Recorder(timed=timed and device.type != "meta", look=look, device=device)
    apart = {} if isinstance(optimizer, Optimizer) else dict(optimizer)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(apart.values())

    def update(parameter: Tensor) -> None:
        recorder.gradients([parameter])
        recorder.enter("update")
        one = apart[parameter]  # type: ignore[index]
        one.step()
        one.zero_grad(set_to_none=True)
        recorder.enter("backward")

    def step() -> None:
        recorder.enter("forward")
        result = loss()
        recorder.enter("backward")
        result.backward()  # type: ignore[no-untyped-call]
        recorder.gradients(model.parameters())
        del result
        recorder.enter("update")
        if not apart:
            optimizers[0].step()
            optimizers[0].zero_grad(set_to_none=True)

    for one in optimizers:
        one.zero_grad(set_to_none=True)
    hooks = [
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
        for parameter in apart
    ]
    try:
        step()
        recorder.watch(_state_of(model, optimizers))
        with recorder:
            step()
    except NotImplementedError as error:
        raise UnsupportedStateError(
            f"an operator of this model cannot be traced on {device.type}: {error}",
            leaves=((type(model).__name__, "an operator that needs data"),),
            hint="trace a small real batch on the CPU, or register a fake kernel for the operator",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.result(str(device.type))


def _state_of(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[Kind, str, Tensor]]:
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, name)
        yield "parameter", name, parameter
    for name, buffer in model.named_buffers():
        yield "buffer", name, buffer
    for optimizer in optimizers:
        for owner, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    yield "state", f"{names.get(owner, '?')}/{key}", value


@dataclass(slots=True)
class _Seen:
    traced: Traced
    alive: weakref.ref[Any]


@dataclass(slots=True)
class _Log:
    operators: list[Operator] = field(default_factory=list)
    tensors: list[Traced] = field(default_factory=list)
    shapes: Any = field(default_factory=xxhash.xxh3_128)


class _Recorder(TorchDispatchMode):
    def __init__(
        self,
        *,
        timed: bool,
        look: Callable[[Operator, frozenset[str]], None] | None,
        device: torch.device,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._timed = timed
        self._look = look
        self._device = device
        self._phase: Phase = "forward"
        self._live: dict[int, _Seen] = {}
        self._log = _Log()

    def enter(self, phase: Phase) -> None:
        """What follows is of this phase."""
        self._phase = phase

    def watch(self, state: Iterable[tuple[Kind, str, Tensor]]) -> None:
        """These are there before the step."""
        for kind, name, tensor in state:
            self._note(tensor, kind, name, begin=-1)

    def gradients(self, parameters: Iterable[Tensor]) -> None:
        """The gradients as backward has left them."""
        for parameter in parameters:
            if parameter.grad is not None:
                seen = self._live.get(_address(parameter.grad))
                if seen is not None and seen.traced.kind == "activation":
                    seen.traced.kind = "gradient"

    def result(self, device: str) -> StepTrace:
        """All that was seen."""
        last = len(self._log.operators) - 1
        for seen in self._live.values():
            seen.traced.end = last
        self._live.clear()
        tensors = tuple(tensor for tensor in self._log.tensors if tensor.size_bytes)
        for tensor in tensors:
            self._log.shapes.update(repr(tensor).encode())
        if last < 0:
            raise EverstepError("a step without any operator cannot be planned")
        return StepTrace(tuple(self._log.operators), tensors, device, self._log.shapes.hexdigest())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        start_s = self._now_s()
        out = func(*args, **kwargs)
        seconds = self._now_s() - start_s if self._timed else None
        inputs = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        written = list(_written(func, args, kwargs))
        known = {_address(x) for x in inputs}
        made = [x for x in outputs if _address(x) not in known and _address(x) not in self._live]
        if not made and not written and all(_address(x) in known for x in outputs):
            return out  # a view, or a question
        number = len(self._log.operators)
        for tensor in inputs:  # of a batch, made before the step
            self._note(tensor, "activation", "", begin=-1)
        for tensor in made:
            self._note(tensor, "activation", "", begin=number)
        names = frozenset(filter(None, (self._write(tensor, number) for tensor in written)))
        results = outputs or written
        operator = Operator(
            func._schema.name,
            self._phase,
            _flops(func, args, kwargs, out),
            sum(map(_bytes, inputs)) + sum(map(_bytes, results)),
            results[0].dtype if results else torch.float32,
            seconds,
        )
        self._log.operators.append(operator)
        shapes = [(tuple(x.shape), str(x.dtype)) for x in (*inputs, *outputs)]
        self._log.shapes.update(repr((operator.name, shapes)).encode())
        if self._look is not None:
            self._look(operator, names)
        return out

    def _note(self, tensor: Tensor, kind: Kind, name: str, *, begin: int) -> None:
        address = _address(tensor)
        if address in self._live:
            return
        storage = tensor.untyped_storage()
        traced = Traced(kind, name, storage.nbytes(), begin, begin)
        self._log.tensors.append(traced)

        def freed(_: Any) -> None:
            seen = self._live.pop(address, None)
            if seen is not None:
                seen.traced.end = max(seen.traced.begin, len(self._log.operators) - 1)

        self._live[address] = _Seen(traced, weakref.ref(storage, freed))

    def _write(self, tensor: Tensor, number: int) -> str:
        seen = self._live[_address(tensor)].traced
        if seen.begin < number and seen.first_write is None:
            seen.first_write = number
        return seen.name

    def _now_s(self) -> float:
        if not self._timed:
            return 0.0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    """That an operator touches of it: expanded elements lie in one place."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operator writes to: those that its schema marks."""
    unmarked = _UNMARKED_WRITES.get(func._schema.name, ())
    for position, argument in enumerate(func._schema.arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if not marked and argument.name not in unmarked:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from (x for x in tree_iter(value) if isinstance(x, Tensor))


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    packet = func._overloadpacket
    if packet is torch.ops.aten.convolution_backward:
        # Each of the two gradients is as much work as the forward pass; torch's own count
        # overlooks groups.
        gradient, _, weight, _, _, _, _, transposed, _, _, wanted = args
        out_channels: int = weight.shape[1 if transposed else 0]
        each: int = 2 * gradient.numel() * weight.numel() // out_channels
        return each * int(sum(wanted[:2]))
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))
