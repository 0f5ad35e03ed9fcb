"""Ways to trace a step: without a device, on the device, or scaled up from a smaller step.

The meta device needs neither memory nor time, but runs no autocast, and not every operator. Casts
are seen on fake tensors. Where an operator needs data, small real batches are traced on the CPU,
and sizes are drawn out to the batch that was asked for: they are linear in it, which a third batch
confirms.
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
"""Makes, on the default device, a model and its loss on one batch of the given size."""

Optimizers = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Makes an optimizer of parameters."""

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
    """A step of a model, traced twice, on the meta device if that can be.

    The random generators of the process are left as they are.

    Args:
        in_backward: each parameter is updated as soon as its gradient is there.
        autocast: the loss is computed under autocast to this dtype.
        scaled: with a ``GradScaler``, in a step that it does not leave out.
        ranks: that many train together under DistributedDataParallel, with its defaults: what it
            does is seen, and nobody has to be there (:mod:`.parallel`).
        measured_on: trace real steps on this device, like ``"cuda"``, with times.

    Raises:
        OptionError: autocast to something that is not a 16-bit float; ranks or a scaler, and
            updates inside of backward, where gradients are neither averaged nor unscaled yet; or
            ``training`` gives no model with something to train, or no loss.
        UnsupportedStateError: the second step is not like the first, with where they part; or
            sizes are not linear in the batch, where small batches have to do.
    """
    if autocast is not None and autocast not in _HALF:
        raise OptionError(f"autocast to {autocast}", hint="torch.bfloat16 or torch.float16")
    if ranks is not None and in_backward:
        raise OptionError("DistributedDataParallel has not averaged a gradient inside of backward")
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
            how = f"drawn out from batches of {', '.join(map(str, _SMALL))} on the CPU"
    return replace(found, notes=(*found.notes, f"{how}: {why}"))


def drawn_out(small: Mapping[int, StepTrace], batch: int) -> StepTrace:
    """The step of a batch, from those of smaller ones: each size is linear in the batch.

    Args:
        small: by batch, at least three.

    Raises:
        UnsupportedStateError: steps are not alike but for sizes, or one is not linear.
    """
    (x, one), (y, two), *rest = sorted(small.items())
    assert rest, "nothing would confirm it"
    for size, trace in rest:
        said = difference(_line(one, two, x, y, size), _untimed(trace))
        if said is not None:
            raise UnsupportedStateError(
                f"what a step does is not linear in its batch ({x}, {y}, {size}), so a small one "
                f"says nothing of {batch}: {said}",
                leaves=(("model", "a step that is not linear in its batch"),),
                hint="fake kernels for its operators, or trace it with times on a device",
            )
    return _line(one, two, x, y, batch)


def _line(one: StepTrace, two: StepTrace, x: int, y: int, to: int) -> StepTrace:
    """Through two steps. Where they are not alike the first stands, for a third to differ from."""

    def at(a: int, b: int) -> int:
        step, rest = divmod((b - a) * (to - x), y - x)
        return a + step if not rest else -1  # of no tensor

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
    """Two steps are not alike: no other device makes them so."""


@dataclass(frozen=True, slots=True)
class _Asked:
    training: Training
    optimizer: Optimizers
    in_backward: bool
    autocast: torch.dtype | None
    scaled: bool
    ranks: int | None


def _alike(asked: _Asked, batch: int, device: str) -> StepTrace:
    """A step, if the next one is like it, and one of other data.

    With times on a real device, where there are data to differ.
    """
    dry = device in (_FAKE, "meta")
    found = _steps(asked, batch, device, 2)
    if not dry:
        found += _steps(asked, batch, device, 1)
    for other in found[1:]:
        said = difference(found[0], other)
        if said is not None:
            raise _UnlikeError(
                "two steps of this model are not alike: what it does depends on its data, so no "
                f"plan holds for every step; they part at {said}",
                leaves=(("model", "a step that depends on data"),),
                hint='method="lazy" needs no plan',
            )
    return found[0]


def _steps(asked: _Asked, batch: int, device: str, count: int) -> list[StepTrace]:
    """So many steps of one model, one behind the other."""
    fake = device == _FAKE
    where = _fake_device() if device == _FAKE else device
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # Else it is as if autocast had not been asked for.
        warnings.filterwarnings("error", "(?s).*'cuda', but CUDA is not available.*")
        # By copies of modules, which are made in a dozen places of torch.nn.
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
    """A model with something to train, and its loss.

    Raises:
        OptionError: it is something else.
        UnsupportedStateError: making it takes data, as ``item()`` does, which are not there.
    """
    hint = "def factory(batch): return model, loss; loss() gives a tensor of one number"
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
            leaves=(("model", "it needs data to be made"),),
            hint="trace a small real batch on the CPU",
        ) from error
    if not (
        isinstance(made, tuple | list)
        and len(made) == 2
        and isinstance(made[0], nn.Module)
        and callable(made[1])
    ):
        raise OptionError(
            f"what makes the model gave {type(made).__name__}, not a model and its loss", hint=hint
        )
    _check_called(made[1], (), hint)
    if not any(one.requires_grad and one.numel() for one in made[0].parameters()):
        raise OptionError("the model has no parameter that is trained")
    model, loss = made
    return model, loss


def _check_called(function: Callable[..., Any], arguments: tuple[Any, ...], hint: str) -> None:
    """It can be called so.

    Raises:
        OptionError: it cannot.
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
        return self  # a copied module is of the same world


def _fake_device() -> str:
    """Return the device type whose autocast fake tensors follow: "cuda" needs a torch built for
    it.
    """
    return "cuda" if torch.cuda.is_available() else "cpu"
