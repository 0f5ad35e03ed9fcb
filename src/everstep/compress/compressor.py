"""Compressed training in one process: the optimizer consumes the gradient that is logged.

A log of compressed gradients restores training exactly only if training itself consumed them
(LowDiff section V-A and Algorithm 1). So the gradient is replaced by its compressed form before the
optimizer sees it, and the compression error is kept for the next step
(:mod:`everstep.compress.feedback`).

With error feedback the residuals are part of the training state. They depend on the gradients
before compression, so a log of compressed gradients does not determine them. A state replayed from
such a log has the right parameters and moments; to continue exactly, training also needs the
residuals of that step. Without error feedback the log is sufficient.

The cost of compression depends on the optimizer. With plain SGD and error feedback 1 % of the
gradient trains as well as all of it; Adam and momentum converge more slowly (figures in
``tests/unit/compress/test_convergence.py``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.compress.feedback import (
    ErrorFeedback,
    Form,
    can_be_compressed,
    compression,
    flat_of,
    refuse_residuals,
)
from everstep.compress.floats import FORMATS, largest_magnitudes
from everstep.compress.sparse import Sparse, nonzero_count
from everstep.config import named
from everstep.errors import OptionError, StateError
from everstep.state.layout import Box
from everstep.state.providers import unwrap_optimizer
from everstep.state.values.tensors import (
    LocalShard,
    dtensor_over,
    is_dtensor,
    local_box,
    local_tensor,
)


class Compressor:
    """Compress the gradients of one optimizer in place, once in each ``step()``.

    It registers a step pre-hook: it runs after backward, accumulation, unscaling and clipping,
    which see full gradients, and before hooks that are registered later, which see compressed ones.
    With a closure it runs after the closure, which may be called once per step.

    Not compressed, and None in :attr:`last`: gradients of fewer than ``dense_below`` elements, of
    dtypes without a compressed form (complex), and in sparse layout. A parameter without a gradient
    takes no part in the step; its residual stays. If any gradient of a step is not finite, nothing
    is compressed and no residual changes, so that the optimizer, or a scaler's check, sees it.

    Several processes may each have one after the gradients were averaged: equal gradients give
    equal forms and residuals. To compress the exchange itself, see :mod:`everstep.compress.ddp`.
    With sharded parameters (FSDP2) each rank compresses its own shard of each gradient that has at
    least ``dense_below`` elements in total. Ranks may replicate all of their shards (HSDP), but not
    only some: each of them decides by all shards that it has.

    With a ``GradScaler`` and a fused optimizer call ``scaler.unscale_(optimizer)`` before
    ``scaler.step(optimizer)``: the optimizer would unscale after compression, and residuals of
    several scales do not add up. Such a step is refused.

    Args:
        optimizer: optimizer whose gradients are compressed. A step captured as a CUDA graph is
            refused.
        kind: ``"topk"``, ``"threshold"``, ``"int8"`` or ``"adaptive"``
            (:mod:`everstep.compress.feedback`).
        ratio: fraction of elements that sparse forms keep, in (0, 1].
        dense_below: gradients with fewer elements stay dense.
        error_feedback: add the compression error to the next gradient; costs 4 bytes for each
            element of a compressed gradient (8 for float64).

    Attributes:
        last: form of each gradient of the last step, by ``id(parameter)``; None if it is dense. Its
            tensors are new in each step.

    Raises:
        OptionError: an option is invalid, the optimizer has a Compressor already, or several ranks
            hold the same shard of some parameters, but not of all.
    """

    @named("Compressor", optimizer=Optimizer, kind=str, dense_below=int, error_feedback=bool)
    def __init__(
        self,
        optimizer: Optimizer,
        *,
        kind: str = "topk",
        ratio: float = 0.01,
        dense_below: int = 1024,
        error_feedback: bool = True,
    ) -> None:
        optimizer = unwrap_optimizer(optimizer)
        hooks: Mapping[int, Any] = optimizer._optimizer_step_pre_hooks
        # A second one would compress the output of the first: neither residual would be the error
        # of what the optimizer consumes.
        if any(isinstance(getattr(hook, "__self__", None), Compressor) for hook in hooks.values()):
            raise OptionError("the optimizer has a Compressor already", hint="close() that one")
        if dense_below < 0:
            raise OptionError(f"dense_below must be at least 0, not {dense_below}")
        if why := _sharding_problem(list(_parameters_of(optimizer))):
            raise OptionError(
                f"this optimizer cannot have a Compressor: {why}",
                hint='shard every parameter along every dimension of the mesh; or method="logged", '
                "without a Compressor",
            )
        self._feedback = ErrorFeedback(compression(kind, ratio), enabled=error_feedback)
        self._optimizer = optimizer
        self._checked_parameters = 0  # parameters of the optimizer
        self._sharded: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {}
        self._dense_below = dense_below
        self._step: FrameType | None = None  # the outermost step() that is running
        # The parameter is kept beside its form: the id of a freed object may be reused.
        self._last: dict[int, tuple[torch.Tensor, Form | None]] = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer whose gradients are compressed."""
        return self._optimizer

    @property
    def last(self) -> Mapping[int, Form | None]:
        return {key: form for key, (_, form) in self._last.items()}

    @property
    def is_last(self) -> bool:
        """True if only hooks of Checkpointers follow, which change nothing: no other code can
        change gradients between this hook and the recording.
        """
        looks_on = False
        for hook in reversed(self._optimizer._optimizer_step_pre_hooks.values()):
            # Without a hook of a Checkpointer after this one nothing records compressed gradients.
            if hook == self._before:
                return looks_on
            if not getattr(hook, "looks_on", False):
                return False
            looks_on = True
        return False

    def check(self) -> None:
        """Check that gradients still equal :attr:`last`, bit for bit.

        For code that runs later, before the optimizer consumes the gradients. A hook that clips in
        between scales every element and is detected.

        Raises:
            StateError: a gradient was changed.
        """
        for number, parameter in enumerate(self._parameters()):
            _, form = self._last.get(id(parameter), (None, None))
            if form is None:
                continue
            grad = parameter.grad
            if grad is None or not _matches(form, flat_of(local_tensor(grad.detach()))):
                raise StateError(
                    f"the gradient of parameter {number} {list(parameter.shape)} was changed "
                    "after it was compressed",
                    hint="change gradients before optimizer.step(), not in a hook on it",
                )

    @property
    def residual_bytes(self) -> int:
        """Bytes of the residuals of all parameters that can be compressed."""
        parameters = (p for p in self._parameters() if p.requires_grad)
        return self._feedback.size_bytes_for(parameters, self._dense_below)

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals (live tensors, flat, row-major), by the parameter's number.
        Residuals of sharded parameters are sharded the same way and exist from the start, because a
        shard can only be restored into an existing tensor.

        They fit any ``kind`` and ``ratio``: these are options and no part of the state.
        """
        residuals = self._feedback.residuals
        parameters = list(self._parameters())
        for parameter in parameters:
            if is_dtensor(parameter) and self._is_compressed(parameter, local_tensor(parameter)):
                self._feedback.reserve(parameter, local_tensor(parameter).reshape(-1))
        return {
            "shapes": [list(parameter.shape) for parameter in parameters],
            "residuals": {
                number: self._sharded_residual(parameter, residuals[parameter])
                for number, parameter in enumerate(parameters)
                if parameter in residuals
            },
        }

    def _sharded_residual(self, parameter: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return a residual sharded like its parameter; the same tensor each time."""
        if not is_dtensor(parameter):
            return residual
        known = self._sharded.get(parameter)
        # load_state_dict() binds new residuals; a DTensor over an old one would show stale memory.
        if known is None or known[0] is not residual:
            made = dtensor_over(parameter, residual.view(local_tensor(parameter).shape))
            known = self._sharded[parameter] = residual, made
        return known[1]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the residuals of ``state``.

        Raises:
            MismatchError: the state belongs to another list of parameters.
        """
        parameters = list(self._parameters())
        shapes = [list(parameter.shape) for parameter in parameters]
        saved = [list(shape) for shape in state["shapes"]]
        mismatches = [
            (f"parameter {number}", f"saved {theirs}, live {mine}")
            for number, (theirs, mine) in enumerate(zip(saved, shapes, strict=False))
            if theirs != mine
        ]
        if len(saved) != len(shapes):
            mismatches.append(("parameters", f"saved {len(saved)}, live {len(shapes)}"))
        for number, residual in state["residuals"].items():
            if number < len(shapes) and residual.numel() != parameters[number].numel():
                what = f"{residual.numel()} elements, not {parameters[number].numel()}"
                mismatches.append((f"residual {number}", what))
        refuse_residuals("other parameters", mismatches)
        self._feedback.residuals = {
            parameters[number]: _local_residual(parameters[number], residual)
            for number, residual in state["residuals"].items()
        }

    def close(self) -> None:
        """Detach from the optimizer; residuals stay readable."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._last = {}

    def _is_compressed(self, parameter: torch.Tensor, part: torch.Tensor) -> bool:
        """Return True if a gradient is compressed: of a sharded one all shards are, or none."""
        return can_be_compressed(parameter if is_dtensor(parameter) else part, self._dense_below)

    def _parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters in torch's order."""
        return _parameters_of(self._optimizer)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # torch's wrapper around step(), which calls the pre-hooks and the post-hooks in one frame.
        caller = sys._getframe(1)
        # A step() that raised ran no post-hook and has left its frame in _step. Such a frame is on
        # no stack.
        if self._step is not None and _on_stack(self._step, caller):
            # A step() called within a step(): the gradients are compressed already.
            return None
        self._step = caller
        # torch passes the optimizer itself as args[0].
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._compress()
            return None
        wrapped = self._wrap_closure(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _after(self, *_: Any) -> None:
        # A nested step() also ends here; only the outermost one clears the frame.
        if sys._getframe(1) is self._step:
            self._step = None

    def _wrap_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        calls = 0

        def closure_then_compress() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise StateError(
                    f"{type(self._optimizer).__name__} calls its closure more than once in a "
                    "step; the compressed gradients of one call do not determine the step",
                    hint="train without a Compressor with this optimizer",
                )
            loss = closure()
            self._compress()
            return loss

        return closure_then_compress

    @torch.no_grad()
    def _compress(self) -> None:
        self._check_step()
        grads = [(p, _local_gradient(p)) for p in self._parameters() if p.grad is not None]
        # Replaced before anything can fail or return: check() must not find forms of the previous
        # step.
        self._last = {id(parameter): (parameter, None) for parameter, _ in grads}
        # All gradients are checked before the first of them is written.
        _check_gradients(grads)
        if not _all_finite([grad for _, grad in grads]):
            return
        for parameter, grad in grads:
            if grad.numel() and self._is_compressed(parameter, grad):
                flat = flat_of(grad)
                form = self._feedback.take(parameter, flat)
                form.dense(out=flat)
                if flat.data_ptr() != grad.data_ptr() or not grad.is_contiguous():
                    grad.copy_(flat.view(grad.shape))  # a gradient in strides of its own
                self._last[id(parameter)] = (parameter, form)

    def _check_step(self) -> None:
        parameters = list(self._parameters())
        # add_param_group() may have added parameters. Placements are not read again in each step.
        if len(parameters) != self._checked_parameters:
            if why := _sharding_problem(parameters):
                raise StateError(f"gradients cannot be compressed: {why}")
            self._checked_parameters = len(parameters)
        # GradScaler.step() sets it on a fused optimizer if it has not unscaled the gradients
        # itself.
        if getattr(self._optimizer, "grad_scale", None) is not None:
            raise StateError(
                "the optimizer would unscale its gradients after they were compressed",
                hint="call scaler.unscale_(optimizer) before scaler.step(optimizer)",
            )
        # is_initialized first: the capture query would initialise CUDA.
        capturable: Any = torch.cuda
        if capturable.is_initialized() and capturable.is_current_stream_capturing():
            raise StateError(
                "gradients cannot be compressed in a step that is captured as a CUDA graph",
                hint="call optimizer.step() outside the graph",
            )


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _sharding_problem(parameters: list[torch.Tensor]) -> str:
    """Return the reason why ranks cannot each compress their shards; "" if they can.

    Non-finite values stop a rank's compression, so ranks that share some shards and not all would
    diverge. Ranks that share all (HSDP) see the same values, as under DDP.
    """
    sharded = [(one, LocalShard.of(one).placement) for one in parameters if is_dtensor(one)]
    sharded = [(one, placement) for one, placement in sharded if math.prod(placement.mesh) > 1]
    groups: dict[tuple[Any, ...], torch.Tensor] = {}
    for one, placement in sharded:
        sides = zip(placement.cuts, placement.mesh, strict=True)
        copied = tuple(cut.dim is None and side > 1 for cut, side in sides)
        groups.setdefault((placement.ranks, placement.mesh, copied), one)
    if len(groups) > 1:
        shared = (one for (*_, copied), one in groups.items() if any(copied))
        for one in shared:
            shape = list(one.shape)
            return f"several ranks hold the same shard of a parameter {shape}, but not of all"
    if sharded and len(sharded) < len(parameters):
        return "some of its parameters are sharded over ranks, and some are not"
    return ""


def _local_gradient(parameter: torch.Tensor) -> Any:
    """Return a parameter's gradient; for a sharded one this rank's shard, in the same memory."""
    grad: Any = parameter.grad
    if not is_dtensor(grad):
        return grad
    if not is_dtensor(parameter) or grad.placements != parameter.placements:  # type: ignore[attr-defined]
        raise StateError(
            f"the gradient of a parameter {list(parameter.shape)} is not sharded like "
            "the parameter",
            hint="gradient.redistribute(placements=parameter.placements) before optimizer.step()",
        )
    return local_tensor(grad)


def _local_residual(parameter: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return a copy of this rank's shard of a residual, flat."""
    if is_dtensor(parameter) and not is_dtensor(residual):  # saved under another layout
        shape = tuple(parameter.shape)
        whole = Box((0,) * len(shape), shape)
        residual = residual.view(shape)[local_box(parameter).slices_in(whole)]
    return local_tensor(residual).detach().to(parameter.device, copy=True).reshape(-1)


def _check_gradients(grads: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    begins: set[int] = set()
    for parameter, grad in grads:
        if type(grad) is not torch.Tensor:
            raise StateError(
                f"gradients of type {type(grad).__name__} cannot be compressed in this version "
                f"(parameter {list(parameter.shape)})"
            )
        if grad.layout == torch.strided and grad.numel():
            # The second parameter would compress the compressed gradient of the first.
            if grad.data_ptr() in begins:
                raise StateError(
                    "two parameters share the memory of one gradient (one is "
                    f"{list(parameter.shape)})",
                    hint="give each its own memory: parameter.grad = parameter.grad.clone()",
                )
            begins.add(grad.data_ptr())


def _all_finite(grads: list[torch.Tensor]) -> bool:
    parts = [grad if grad.layout == torch.strided else grad.coalesce().values() for grad in grads]
    return all(math.isfinite(magnitude) for magnitude in largest_magnitudes(parts))


def _matches(form: Form, flat: torch.Tensor) -> bool:
    if flat.dtype != form.dtype or flat.numel() != form.numel:
        return False
    if not isinstance(form, Sparse):
        return _same_bits(flat, form.dense())
    # Equal counts mean that every other position still has +0.0, as dense() wrote it.
    kept = _same_bits(flat.index_select(0, form.indices), form.values)
    return kept and nonzero_count(flat) == nonzero_count(form.values)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Compared as integers: as numbers NaN differs from itself, and -0.0 equals +0.0.
    bits = FORMATS[one.dtype].signed
    return torch.equal(one.view(bits), other.view(bits))


def _on_stack(wanted: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None
