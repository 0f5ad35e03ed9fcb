"""Trace of one training step, operator by operator: lifetimes of tensors, and writes to them.

Any model, optimizer and loss in plain Python can be traced: on the meta device without memory or
computation, or on a real device with measured times. Tracers of programs (symbolic_trace, make_fx,
torch.export) each fail on some models; a dispatch mode sees every operator (:mod:`.recorder`).

The meta device runs no autocast, and not every operator. Fake tensors record casts, too. If an
operator needs data, a real step is traced on the CPU (:func:`trace_of`).

Operators that DistributedDataParallel adds to the step of one rank, without other ranks or data.

The real wrapper needs a process group, and data to agree on its buckets, so it is traced only where
it runs. Here its operators are issued as it issues them from its third step on. At the beginning of
forward, buffers are broadcast. After each gradient is computed, it is scaled into its bucket; a
full bucket is all-reduced, in the order of buckets. After backward, buckets are copied back to the
gradients. Buckets are assigned by torch's own function, in the order of gradients in the first
step.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path

from everstep.capture.step_events import Observed, StepEvents
from everstep.errors import EverstepError, OptionError, UnavailableError, UnsupportedStateError
from everstep.plan.schedule.recorder import Recorder
from everstep.plan.schedule.steps import HALF, Kind, StepTrace, difference

# The defaults of DistributedDataParallel for the first bucket and for all others.
_BUCKETS_BYTES = (1 << 20, 25 << 20)

_Launch = Callable[[str, Sequence[Tensor], int], None]


class Buckets:
    """Averaging of a model's gradients over ranks (see :func:`.trace_training`).

    Args:
        model: the model, not wrapped.
        ranks: number of ranks, at least 2.

    Raises:
        OptionError: fewer than 2 ranks.
        UnavailableError: torch was built without torch.distributed.
    """

    warm_up_steps = 2

    def __init__(self, model: nn.Module, ranks: int) -> None:
        if ranks < 2:
            raise OptionError(f"{ranks} ranks have nothing to reduce", hint="at least 2 ranks")
        if not torch.distributed.is_available():
            raise UnavailableError("this torch has no torch.distributed, which cuts the buckets")
        self._model = model
        self._ranks = ranks
        self._came: list[nn.Parameter] = []
        self._buckets: list[_Bucket] = []
        self._of: dict[Tensor, _Bucket] = {}
        self._next = 0
        self._begun = False
        self._launch: _Launch  # set by attach()

    def attach(self, launch: _Launch) -> Callable[[], None]:
        """Register the hooks; return a function that removes them."""
        self._launch = launch
        with ExitStack() as stack:
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    stack.callback(register(self._ready).remove)
            # Reached only if all hooks were registered: otherwise the stack removes those that
            # were.
            return stack.pop_all().close

    def forward(self) -> None:
        """Broadcast the buffers of the first rank."""
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._model.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            sent: deque[tuple[Tensor, list[Tensor]]] = deque()
            for buffers in by_dtype.values():
                flat = buffers[0].view(-1)  # a single buffer is not copied
                if len(buffers) > 1:
                    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                self._launch("c10d::broadcast_", [flat], self._ranks)
                sent.append((flat, buffers))
                del flat  # so that each is freed as soon as it is copied back
            while sent:
                _copy_back(*sent.popleft())

    def _finish(self) -> None:
        """Wait for all buckets and copy them back to the gradients; runs within backward."""
        self._begun = False
        if not self._buckets:
            self._cut()
            return
        for bucket in self._buckets:
            for parameter, place in zip(bucket.parameters, bucket.places, strict=True):
                assert parameter.grad is not None
                with torch.no_grad():
                    parameter.grad.copy_(bucket.memory[place].view_as(parameter))

    def _cut(self) -> None:
        cut: Any = torch.distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
        found, _ = cut(self._came, list(_BUCKETS_BYTES), [False] * len(self._came))
        self._buckets = [_Bucket([self._came[number] for number in numbers]) for numbers in found]
        self._of = {p: bucket for bucket in self._buckets for p in bucket.parameters}

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._begun:
            self._begun = True
            engine: Any = torch.autograd.Variable._execution_engine
            # Runs when this backward is complete, as the callback of DDP does.
            engine.queue_callback(self._finish)
        if not self._buckets:
            self._came.append(parameter)
            return
        bucket = self._of[parameter]
        gradient = parameter.grad
        assert gradient is not None
        place = bucket.places[bucket.number_of(parameter)]
        view = bucket.memory[place].view_as(parameter)
        with torch.no_grad():
            torch.mul(gradient, 1 / self._ranks, out=view)
        bucket.missing -= 1
        # In the order of buckets: all ranks must issue the same collectives in the same order.
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._launch("c10d::allreduce_", [self._buckets[self._next].memory], self._ranks)
            self._next += 1


class _Bucket:
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self.places = []
        position = 0
        for parameter in parameters:
            self.places.append(slice(position, position + parameter.numel()))
            position += parameter.numel()
        self.memory = torch.empty(position, dtype=parameters[0].dtype, device=parameters[0].device)

    def number_of(self, parameter: nn.Parameter) -> int:
        return next(n for n, one in enumerate(self.parameters) if one is parameter)


def _copy_back(flat: Tensor, buffers: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))


def trace_training(
    model: nn.Module,
    optimizer: Optimizer | Mapping[nn.Parameter, Optimizer],
    loss: Callable[[], Tensor],
    *,
    warm_up: bool = True,
    timed: bool = False,
    parallel: Buckets | None = None,
    scaler: GradScaler | None = None,
) -> StepTrace:
    """Trace one step: ``loss().backward()``, ``optimizer.step()``.

    Untraced steps come first: one that creates missing optimizer state, or two with
    DistributedDataParallel, which orders its buckets in the second. Gradients are set to None
    before each step. All are real steps of the model and the optimizer.

    Args:
        optimizer: an optimizer, or one for each parameter: then each parameter is updated within
            backward as soon as its gradient exists, and the gradient is freed.
        loss: computes forward and loss of one batch, whose inputs exist already.
        warm_up: False directly after another trace of the same model and optimizer.
        timed: measure each operator by itself (of no use on the meta device).
        parallel: collectives to record without running them.
        scaler: scales the loss and unscales the gradients; its scale and growth counter belong to
            the state. An update that it skips is not in the trace.

    Raises:
        OptionError: a scaler together with updates within backward, where gradients are not
            unscaled yet; or ``loss`` does not return one number that depends on a parameter.
        UnsupportedStateError: the named operator cannot run without data; or a tensor of the
            state moves to other memory during the step.
    """
    if scaler is not None and not isinstance(optimizer, Optimizer):
        raise OptionError(
            "a GradScaler unscales gradients after backward, too late for updates within it"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
        warm_up_steps = 2
    else:
        warm_up_steps = parallel.warm_up_steps if parallel is not None else 1
    recorder = Recorder(model, timed=timed)
    apart = {} if isinstance(optimizer, Optimizer) else dict(optimizer)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(apart.values())

    def update(parameter: Tensor) -> None:
        recorder.gradients([parameter])
        recorder.enter("update")
        one = apart[parameter]  # type: ignore[index]
        _update(one, None)
        one.zero_grad(set_to_none=True)
        recorder.enter("backward")

    def step() -> None:
        recorder.enter("forward")
        if parallel is not None:
            parallel.forward()
        result = _checked(loss())
        recorder.enter("backward")
        if scaler is not None:
            result = scaler.scale(result)
        result.backward()  # type: ignore[no-untyped-call]
        recorder.gradients(model.parameters())
        # The loss refers to the graph and its memory, which a training loop also releases here.
        del result
        recorder.enter("update")
        if not apart:
            _update(optimizers[0], scaler)
            optimizers[0].zero_grad(set_to_none=True)

    for one in optimizers:
        one.zero_grad(set_to_none=True)
    step_s: float | None = None
    with ExitStack() as stack:
        for parameter in apart:
            if parameter.requires_grad:  # a frozen one gets no gradient
                register: Any = parameter.register_post_accumulate_grad_hook
                stack.callback(register(update).remove)
        if parallel is not None:
            stack.callback(parallel.attach(recorder.collective))
        watch = stack.enter_context(_Watch(model, optimizers, recorder, apart=bool(apart)))
        try:
            with recorder:  # the warm-up, too: it names an operator that needs data
                for _ in range(warm_up_steps if warm_up else 0):
                    step()
            if timed:  # outside the recorder, whose own time would count
                step_s = _seconds(step, recorder.device)
            recorder.begin(state_of(model, optimizers, scaler))
            with recorder, watch.step():
                step()
        except EverstepError:
            raise
        except (NotImplementedError, RuntimeError, TypeError) as error:  # the last: of numpy()
            if not recorder.dry:
                raise
            what = f"operator {recorder.entered}" if recorder.entered else "the step"
            raise UnsupportedStateError(
                f"{what} cannot be traced without data: {error}",
                leaves=((recorder.entered, "an operator that needs data"),),
                hint="trace a small real batch on the CPU, or register a fake kernel for it",
            ) from error
    elsewhere = recorder.moved(state_of(model, optimizers, scaler))
    if elsewhere:
        raise UnsupportedStateError(
            f"{len(elsewhere)} tensors of the state move to other memory in a step, the first is "
            f"{elsewhere[0]!r}: a plan holds only for memory that stays",
            leaves=tuple((name, "moves to other memory during the step") for name in elsewhere),
            hint="change them in place, or method='lazy', which needs no plan",
        )
    operators, tensors = recorder.result()
    if not operators:
        raise EverstepError("the step runs no operator: there is nothing to plan")
    return watch.complete(StepTrace(operators, tensors, str(recorder.device.type), step_s))


MODEL = "model"
OPTIMIZER = "optimizer"
"""Names under which a run that follows a plan has its model and its optimizer in the state."""


class _Watch(ExitStack):
    """Watch a traced step as a running one is watched: its events, and the operators before each.

    Args:
        apart: each parameter has an optimizer of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        recorder: Recorder,
        *,
        apart: bool,
    ) -> None:
        super().__init__()
        self._model = model
        self._optimizers = {
            f"{OPTIMIZER} {number}" if apart else OPTIMIZER: one
            for number, one in enumerate(optimizers)
        }
        # Its clock is the number of operators so far.
        self._events = StepEvents(lambda event: None, lambda: None, lambda: float(recorder.count))
        self._observed: Observed | None = None
        self._names: list[str] = []

    def __enter__(self) -> _Watch:
        self.callback(self._events.close)
        self._events.watch({MODEL: self._model}, self._optimizers)
        for key, one in self._optimizers.items():
            self.callback(one.register_step_pre_hook(partial(self._updates, key)).remove)
        return self

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch one step."""
        self._events.begin()
        yield
        _, known = self._events.end()
        if known:
            self._observed = known[0]
            self._names = self._events.names_of(known[0])

    def complete(self, trace: StepTrace) -> StepTrace:
        """Return the trace with the events of the step."""
        observed = self._observed
        if observed is None:
            return trace
        counts = accumulate(map(int, observed.seconds), initial=0)
        keys = {
            id(parameter): key
            for key, optimizer in self._optimizers.items()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        named = self._model.named_parameters(remove_duplicate=False)
        return replace(
            trace,
            events=tuple(zip(self._names, counts, strict=False)),
            updates=observed.updates,
            owners={name: keys[id(one)] for name, one in named if id(one) in keys},
        )

    def _updates(self, key: str, *_: Any) -> None:
        self._events.update(key)


def _checked(loss: Any) -> Tensor:
    """Return the loss if gradients can be computed from it.

    Raises:
        OptionError: it is not one number that depends on a parameter.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    found = type(loss).__name__
    if isinstance(loss, Tensor):
        count = loss.numel()
        found = f"a tensor of {count} numbers" if count != 1 else "a number without gradient"
    raise OptionError(
        f"the loss is {found}", hint="return one number that depends on a parameter, as a tensor"
    )


def _update(optimizer: Optimizer, scaler: GradScaler | None) -> None:
    # The optimizer reads its step counters. Some versions of torch (2.11) would create them on the
    # default device, and on the meta device they have no value.
    with torch.device("cpu"):
        if scaler is None:
            optimizer.step()
            return
        scaler.step(optimizer)
        scaler.update()


def state_of(
    model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler | None = None
) -> Iterator[tuple[Kind, str, Tensor]]:
    """Yield the tensors of a checkpoint, and non-persistent buffers as ``"activation"``."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, name)
        yield "parameter", name, parameter
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name in passing:
            yield "activation", "", buffer
        else:
            yield "buffer", name, buffer
    for optimizer in optimizers:
        for owner, values in optimizer.state.items():
            owned = names.get(owner, "?") if isinstance(owner, Tensor) else str(owner)
            for key, value in _tensors(values):
                yield "state", f"{owned}/{key}", value
        for number, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            for key, value in _tensors(options):
                yield "state", f"group {number}/{key}", value
    if scaler is not None:
        for key, value in _tensors([scaler._scale, scaler._growth_tracker]):
            yield "state", f"scaler/{('scale', 'growth_tracker')[int(key)]}", value


def _tensors(values: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested data, each with its path."""
    for path, value in tree_flatten_with_path(values)[0]:
        if isinstance(value, Tensor):
            keys = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
            yield "/".join(keys), value


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    def now_s() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start_s = now_s()
    step()
    return now_s() - start_s


# --- Without a device, or on one ------------------------------------------------------------

Training = Callable[[int], tuple[nn.Module, Callable[[], Tensor]]]
"""Function of a batch size that makes, on the default device, a model and its loss on a batch."""

Optimizers = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Function that makes an optimizer of parameters."""

_FAKE = "fake"


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
            work is recorded without other ranks (:class:`Buckets`).
        measured_on: trace real steps with times on this device, like ``"cuda"``.

    Raises:
        OptionError: autocast to something other than a 16-bit float; ranks or a scaler together
            with updates within backward, where gradients are neither averaged nor unscaled yet;
            or ``training`` returns no model with trained parameters, or no loss.
        UnsupportedStateError: the two steps differ, with the first difference.
    """
    if autocast is not None and autocast not in HALF:
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
