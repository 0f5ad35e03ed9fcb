"""Ways to trace a step: without a device, on the device, or scaled up from a smaller step.

The meta device needs neither memory nor time, but runs no autocast, and not every operator. Fake
tensors record casts, too. If an operator needs data, small real batches are traced on the CPU, and
sizes are extrapolated to the requested batch: they are linear in it, which a third batch confirms.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from everstep.errors import EverstepError, OptionError, UnsupportedStateError
from everstep.plan.schedule.parallel import Buckets
from everstep.plan.schedule.scaling import UpdatingScaler
from everstep.plan.schedule.steps import Operator, StepTrace, difference
from everstep.plan.schedule.trace import trace_training

__all__ = ["Optimizers", "Training", "drawn_out", "trace_of"]

Training = Callable[[int], tuple[nn.Module, Callable[[], Tensor]]]
"""Function of a batch size that makes, on the default device, a model and its loss on a batch."""

Optimizers = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Function that makes an optimizer of parameters."""

_SMALL = (2, 3, 4)
_FAKE = "fake"
_HALF = (torch.bfloat16, torch.float16)


def trace_of(
    training: Training,
    batch: int,
    optimizer: Optimizers,
    *,
    in_backward: bool = False,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
    ranks: int | None = None,
    measured_on: str | None = None,
) -> StepTrace:
    """Return the trace of a step of a model, on the meta device if possible.

    Two steps are traced and compared. The process's random generators do not move.

    Args:
        in_backward: update each parameter as soon as its gradient exists.
        autocast: compute the loss under autocast to this dtype.
        scaled: use a ``GradScaler``, in a step whose update it does not skip.
        ranks: number of ranks that train under DistributedDataParallel with its defaults; its
            work is recorded without other ranks (:mod:`.parallel`).
        measured_on: trace real steps with times on this device, like ``"cuda"``.

    Raises:
        OptionError: autocast to something other than a 16-bit float; ranks or a scaler together
            with updates within backward, where gradients are neither averaged nor unscaled yet;
            or ``training`` returns no model with trained parameters, or no loss.
        UnsupportedStateError: the two steps differ, with the first difference; or sizes that must
            be extrapolated are not linear in the batch.
    """
    if autocast is not None and autocast not in _HALF:
        raise OptionError(f"autocast to {autocast}", hint="torch.bfloat16 or torch.float16")
    if ranks is not None and in_backward:
        raise OptionError(
            "DistributedDataParallel averages gradients too late for updates within backward"
        )
    asked = _Asked(training, optimizer, in_backward, autocast, scaled, ranks)
    cuda = [measured_on] if measured_on is not None and measured_on.startswith("cuda") else []
    with torch.random.fork_rng(devices=cuda):
        if measured_on is not None:
            return _alike(asked, batch, measured_on)
        why = "autocast"
        if autocast is None:
            try:
                return _alike(asked, batch, "meta")
            except _UnlikeError:
                raise
            except UnsupportedStateError as error:
                why = error.message
        if "autocast" in why:
            try:
                found = _alike(asked, batch, _FAKE)
                note = f"casts as on {_fake_device()}, on tensors without data"
                return replace(found, notes=(*found.notes, note))
            except _UnlikeError:
                raise
            except UnsupportedStateError as error:
                why = error.message
        if batch <= _SMALL[-1]:
            found = _alike(asked, batch, "cpu")
            how = "traced on the CPU"
        else:
            found = drawn_out({size: _alike(asked, size, "cpu") for size in _SMALL}, batch)
            how = f"extrapolated from batches of {', '.join(map(str, _SMALL))} on the CPU"
    return replace(found, notes=(*found.notes, f"{how}: {why}"))


def drawn_out(small: Mapping[int, StepTrace], batch: int) -> StepTrace:
    """Extrapolate the step of a batch from those of smaller batches: sizes are linear in it.

    Args:
        small: traces by batch size, at least three.

    Raises:
        UnsupportedStateError: the steps differ in more than sizes, or a size is not linear.
    """
    (x, one), (y, two), *rest = sorted(small.items())
    assert rest, "a third trace confirms the line through two"
    for size, trace in rest:
        said = difference(_line(one, two, x, y, size), _untimed(trace))
        if said is not None:
            raise UnsupportedStateError(
                f"the step's sizes are not linear in the batch ({x}, {y}, {size}), so the step of "
                f"batch {batch} cannot be extrapolated: {said}",
                leaves=(("model", "a step that is not linear in its batch"),),
                hint="register fake kernels for its operators, or trace with times on a device",
            )
    return _line(one, two, x, y, batch)


def _line(one: StepTrace, two: StepTrace, x: int, y: int, to: int) -> StepTrace:
    """Return the step on the line through two steps.

    Where the two differ in more than sizes, the first is kept: the comparison with a third fails.
    """

    def at(a: int, b: int) -> int:
        step, rest = divmod((b - a) * (to - x), y - x)
        return a + step if not rest else -1  # no size: the comparison with a third step fails

    def operator(a: Operator, b: Operator) -> Operator:
        if len(a.shapes) != len(b.shapes) or any(map(_unlike, a.shapes, b.shapes)):
            return a
        shapes = tuple(tuple(map(at, s, t)) for s, t in zip(a.shapes, b.shapes, strict=True))
        sent = None if a.sent_bytes is None else at(a.sent_bytes, b.sent_bytes or 0)
        flops = at(a.flops, b.flops)
        moved = at(a.moved_bytes, b.moved_bytes)
        return replace(
            a, seconds=None, shapes=shapes, flops=flops, moved_bytes=moved, sent_bytes=sent
        )

    operators = tuple(map(operator, one.operators, two.operators))
    tensors = tuple(
        replace(a, size_bytes=at(a.size_bytes, b.size_bytes))
        for a, b in zip(one.tensors, two.tensors, strict=False)
    )
    return StepTrace(operators, tensors, one.device)


def _unlike(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) != len(other)


def _untimed(trace: StepTrace) -> StepTrace:
    return replace(trace, operators=tuple(replace(o, seconds=None) for o in trace.operators))


class _UnlikeError(UnsupportedStateError):
    """Two steps of a model differ: another device would not change that."""


@dataclass(frozen=True, slots=True)
class _Asked:
    training: Training
    optimizer: Optimizers
    in_backward: bool
    autocast: torch.dtype | None
    scaled: bool
    ranks: int | None


def _alike(asked: _Asked, batch: int, device: str) -> StepTrace:
    """Return the trace of a step, if the next step and one of a new model have the same.

    On a real device, with times, the batches of the two models differ in their data.
    """
    dry = device in (_FAKE, "meta")
    found = _steps(asked, batch, device, 2)
    if not dry:
        found += _steps(asked, batch, device, 1)
    for other in found[1:]:
        said = difference(found[0], other)
        if said is not None:
            raise _UnlikeError(
                "two steps of this model differ: its operators depend on the data, so no plan fits "
                f"every step; the first difference is at {said}",
                leaves=(("model", "a step that depends on data"),),
                hint='method="lazy" needs no plan',
            )
    return found[0]


def _steps(asked: _Asked, batch: int, device: str, count: int) -> list[StepTrace]:
    """Return traces of consecutive steps of one model."""
    fake = device == _FAKE
    where = _fake_device() if device == _FAKE else device
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # Only a warning, after which autocast would have no effect.
        warnings.filterwarnings("error", "(?s).*'cuda', but CUDA is not available.*")
        # Copying modules warns, which many places of torch.nn do.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        stack.enter_context(_FakeMode() if fake else nullcontext())
        stack.enter_context(torch.device(where))
        try:
            model, plain = _made(asked.training, batch, dry=device in (_FAKE, "meta"))
            update: Optimizer | dict[nn.Parameter, Optimizer]
            if asked.in_backward:
                update = {one: asked.optimizer([one]) for one in model.parameters()}
            else:
                update = asked.optimizer(model.parameters())

            def loss() -> Tensor:
                if asked.autocast is None:
                    return plain()
                with torch.autocast(torch.device(where).type, dtype=asked.autocast):
                    return plain()

            scaler = UpdatingScaler(torch.device(where).type) if asked.scaled else None
            buckets = None if asked.ranks is None else Buckets(model, asked.ranks)
            timed = device not in (_FAKE, "meta")
            found = []
            for number in range(count):
                first = not number
                found.append(
                    trace_training(
                        *(model, update, loss),
                        warm_up=first,
                        timed=timed,
                        parallel=buckets,
                        scaler=scaler,
                    )
                )
            return found
        except UserWarning as error:
            raise _UnlikeError(
                f"this machine cannot follow autocast for CUDA: {error}",
                leaves=(("model", "autocast for a device that is not here"),),
                hint="plain training, and autocast= (--autocast) here",
            ) from error


def _made(training: Training, batch: int, *, dry: bool) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Make the model and its loss.

    Raises:
        OptionError: ``training`` returns something else, or no parameter is trained.
        UnsupportedStateError: making the model reads data, as ``item()`` does, and has none.
    """
    hint = "def factory(batch): return model, loss; loss() returns one number as a tensor"
    _check_called(training, (batch,), hint)
    made: Any
    try:
        made = training(batch)
    except EverstepError:
        raise
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if not dry:
            raise
        raise UnsupportedStateError(
            f"the model cannot be made without data: {error}",
            leaves=(("model", "making it reads data"),),
            hint="trace a small real batch on the CPU",
        ) from error
    if not (
        isinstance(made, tuple | list)
        and len(made) == 2
        and isinstance(made[0], nn.Module)
        and callable(made[1])
    ):
        raise OptionError(
            f"the factory returned {type(made).__name__}, not a model and its loss", hint=hint
        )
    _check_called(made[1], (), hint)
    if not any(one.requires_grad and one.numel() for one in made[0].parameters()):
        raise OptionError("the model has no parameter that is trained")
    model, loss = made
    return model, loss


def _check_called(function: Callable[..., Any], arguments: tuple[Any, ...], hint: str) -> None:
    """Check that a function takes these arguments.

    Raises:
        OptionError: it does not.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # it has none
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise OptionError(f"{name}{signature}: {error}", hint=hint) from error


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    def __deepcopy__(self, _: Any) -> _FakeMode:
        return self  # a copied module must stay in the same mode


def _fake_device() -> str:
    """Return the device type whose autocast fake tensors follow; "cuda" needs a torch with CUDA."""
    return "cuda" if torch.cuda.is_available() else "cpu"
