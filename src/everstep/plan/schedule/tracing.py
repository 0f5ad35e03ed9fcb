"""Ways to trace a step: without a device, or on one.

The meta device needs neither memory nor time, but runs no autocast, and not every operator. Fake
tensors record casts, too. If an operator needs data, a real step is traced on the CPU.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from everstep.errors import EverstepError, OptionError, UnsupportedStateError
from everstep.plan.schedule.steps import StepTrace, difference
from everstep.plan.schedule.trace import Buckets, trace_training

Training = Callable[[int], tuple[nn.Module, Callable[[], Tensor]]]
"""Function of a batch size that makes, on the default device, a model and its loss on a batch."""

Optimizers = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Function that makes an optimizer of parameters."""

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
            work is recorded without other ranks (:mod:`.trace`).
        measured_on: trace real steps with times on this device, like ``"cuda"``.

    Raises:
        OptionError: autocast to something other than a 16-bit float; ranks or a scaler together
            with updates within backward, where gradients are neither averaged nor unscaled yet;
            or ``training`` returns no model with trained parameters, or no loss.
        UnsupportedStateError: the two steps differ, with the first difference.
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
        found = _alike(asked, batch, "cpu")
    return replace(found, notes=(*found.notes, f"traced on the CPU: {why}"))


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

            scaler = _UpdatingScaler(torch.device(where).type) if asked.scaled else None
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


class _UpdatingScaler(GradScaler):
    """A ``GradScaler`` that never skips an update: a step without one has fewer deadlines.

    It runs the operators of torch's own scaler in a step with an update, in the same order. The
    scale is 1, so that a real step stays finite.

    Args:
        device: type of the device, like ``"cuda"``.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device, init_scale=1.0)

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        for found_inf in optimizer_state["found_inf_per_device"].values():
            if not _without_data(found_inf):
                found_inf.item()  # torch synchronizes with the device here, so the trace does, too
        loss: float | None = optimizer.step(*args, **kwargs)
        return loss


def _without_data(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta" or type(tensor) is not torch.Tensor
