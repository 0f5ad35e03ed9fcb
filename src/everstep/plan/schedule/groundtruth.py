"""Verification of a trace: finds changes of the state that it does not contain.

A real step is traced, and all tensors of a checkpoint are digested after each operator. Schemas can
omit writes (:mod:`.recorder` has a table of torch's own), and libraries may write without the
dispatcher: a plan would then copy such a tensor too late. Use it in tests, and before you trust a
plan for a model with custom operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import xxhash
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from everstep.plan.schedule.recorder import address_of, parts_of
from everstep.plan.schedule.steps import Operator, StepTrace
from everstep.plan.schedule.trace import state_of, trace_training
from everstep.state.values.tensors import host_bytes

__all__ = ["Missed", "missed_writes"]

_Value = tuple[tuple[int, ...], str]  # addresses, digest


@dataclass(frozen=True, slots=True)
class Missed:
    """A change of the state that the trace does not contain.

    Attributes:
        name: name of the changed tensor.
        number: number of the operator after which the change was found; the last operator's
            number also stands for changes after it.
        operator: name of that operator.
    """

    name: str
    number: int
    operator: str


def missed_writes(
    model: nn.Module,
    optimizer: Optimizer | Mapping[nn.Parameter, Optimizer],
    loss: Callable[[], Tensor],
    scaler: GradScaler | None = None,
) -> tuple[StepTrace, list[Missed]]:
    """Trace a real step as :func:`.trace_training` does, and digest the state after each operator.

    Returns:
        The trace, and all changes of the state that no operator of the trace has made by then.

    Raises:
        OptionError, UnsupportedStateError: as for :func:`.trace_training`.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer.values())
    watch = _Watch(lambda: {n: t for _, n, t in state_of(model, optimizers, scaler) if n})
    trace = trace_training(model, optimizer, loss, look=watch, scaler=scaler)
    last = len(trace.operators) - 1
    watch.after(last, trace.operators[-1], frozenset())
    known = {name: tensor for tensor in trace.state for name in tensor.names}
    for name, number in watch.moved:  # in the trace, the old memory ends there
        write = known[name].first_write if name in known else None
        if write is None or write > number + 1:
            watch.missed.append(Missed(name, number, trace.operators[number].name))
    return trace, watch.missed


class _Watch:
    def __init__(self, state: Callable[[], dict[str, Tensor]]) -> None:
        self._state = state
        self._before: dict[str, _Value] = {}
        self.missed: list[Missed] = []
        self.moved: list[tuple[str, int]] = []

    def begin(self) -> None:
        self._before = {name: _value(tensor) for name, tensor in self._state().items()}

    def after(self, number: int, operator: Operator, written: frozenset[str]) -> None:
        for name, tensor in self._state().items():
            found = _value(tensor)
            before = self._before.get(name)
            self._before[name] = found
            if before == found:
                continue
            if before is None or before[0] != found[0]:
                self.moved.append((name, number))
            elif name not in written:
                self.missed.append(Missed(name, number, operator.name))


def _value(tensor: Tensor) -> _Value:
    tensor = tensor.detach()
    parts = list(parts_of(tensor))
    digest = xxhash.xxh3_128()
    for part in parts:
        copy = part.contiguous().cpu()  # a variable, as host_bytes() does not keep it alive
        digest.update(host_bytes(copy))
    return tuple(map(address_of, parts)), digest.hexdigest()
