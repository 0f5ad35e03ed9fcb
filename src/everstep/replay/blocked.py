"""Several updates at once, a block at a time: SGD, Adam and AdamW on the CPU.

A whole pass per update reads and writes the state from memory each time. Here a block of it
stays in the cache for all the updates of a call. torch's own functions run on the blocks, in the
variant (for-loop, foreach, fused) that the hyperparameters ask for, so that the bits are those
of a whole pass: each element is updated on its own, and what differs between torch's vector
code and its scalar code for the last elements of a tensor (fused kernels, half precision)
stays the same, since blocks begin at multiples of every vector length and do not straddle
tensors. ``proof`` checks that on the torch that is installed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from everstep.replay.own import writes_gradients
from everstep.replay.updates import Update

__all__ = ["BLOCK_ELEMENTS", "KINDS", "Blocked", "flat"]

BLOCK_ELEMENTS = 256 * 1024
"""Elements of a block: small enough for the cache, large enough for Python's part not to show."""

ALIGNMENT_ELEMENTS = 64
"""Blocks are multiples of this. torch's CPU loops take two vectors at a time: 32 fp32 or 64
bf16 elements with AVX-512; fused kernels share work out in cache lines."""

MAX_TENSORS = 256
"""Small tensors go together until they fill a block, but not more of them than this, or there
is nothing to share out among threads."""

Tensors = list[torch.Tensor]
Call = Callable[[Tensors, Tensors, Mapping[str, Tensors], Tensors, Mapping[str, Any], Update], None]


@dataclass(frozen=True, slots=True)
class _Family:
    """What a functional form of torch wants.

    Attributes:
        moments: names of the state tensors of a parameter's shape.
        counts: whether there is a ``step``.
        call: the functional form: parameters, gradients, moments, steps, options, update.
    """

    moments: Callable[[Mapping[str, Any]], tuple[str, ...]]
    counts: bool
    call: Call


def _adam_moments(options: Mapping[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ()))


def _call_adam(
    parameters: Tensors,
    gradients: Tensors,
    moments: Mapping[str, Tensors],
    steps: Tensors,
    options: Mapping[str, Any],
    update: Update,
) -> None:
    beta1, beta2 = options["betas"]
    decoupled = options["decoupled_weight_decay"]
    if options["fused"] and len(parameters) == 1 and isinstance(beta1, float):
        # As torch.optim.adam._fused_adam does it, but for the sorting by device and dtype,
        # which takes Python several times as long.
        torch._foreach_add_(steps, 1)
        operator: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
        operator(
            parameters,
            gradients,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            moments.get("max_exp_avg_sq", []),
            steps,
            amsgrad=options["amsgrad"],
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=options["maximize"],
            grad_scale=update.grad_scale,
            found_inf=update.found_inf,
        )
        if update.found_inf is not None:
            torch._foreach_sub_(steps, [update.found_inf])
        return
    function: Any = adamw if decoupled else adam
    function(
        parameters,
        gradients,
        moments["exp_avg"],
        moments["exp_avg_sq"],
        moments.get("max_exp_avg_sq", []),
        steps,
        foreach=options["foreach"],
        fused=options["fused"],
        grad_scale=update.grad_scale,
        found_inf=update.found_inf,
        has_complex=any(parameter.is_complex() for parameter in parameters),
        amsgrad=options["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=options["maximize"],
    )


def _sgd_moments(options: Mapping[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if options["momentum"] != 0 else ()


def _call_sgd(
    parameters: Tensors,
    gradients: Tensors,
    moments: Mapping[str, Tensors],
    steps: Tensors,
    options: Mapping[str, Any],
    update: Update,
) -> None:
    function: Any = sgd
    function(
        parameters,
        gradients,
        moments.get("momentum_buffer", []),
        has_sparse_grad=False,
        foreach=options["foreach"],
        fused=options["fused"],
        grad_scale=update.grad_scale,
        found_inf=update.found_inf,
        weight_decay=options["weight_decay"],
        momentum=options["momentum"],
        lr=options["lr"],
        dampening=options["dampening"],
        nesterov=options["nesterov"],
        maximize=options["maximize"],
    )


_FAMILIES: dict[type[Optimizer], _Family] = {
    SGD: _Family(_sgd_moments, False, _call_sgd),
    Adam: _Family(_adam_moments, True, _call_adam),
    AdamW: _Family(_adam_moments, True, _call_adam),
}
KINDS = tuple(_FAMILIES)
"""The classes that can be updated block by block."""

_FLAGS = {"foreach": None, "fused": None, "maximize": False, "amsgrad": False, "nesterov": False}


@dataclass(frozen=True, slots=True)
class _Block:
    """Part of one large tensor, or several whole small ones, of one parameter group.

    Attributes:
        group: number of the parameter group.
        names: of the parameters.
        elements: half-open range in the memory order of the one large tensor; None: whole.
    """

    group: int
    names: tuple[str, ...]
    elements: slice | None = None


@dataclass(frozen=True, slots=True)
class _Batch:
    """Several updates, made ready to be cut.

    Attributes:
        updates: in their order.
        options: hyperparameters, for each update and group.
        keys: names of the moments that they need, likewise.
        parameters, moments, gradients: large tensors as flat views; moments by key and name,
            gradients for each update.
        steps: step counters as they are before.
        counted: step counters as they are after, as far as it is known.
    """

    updates: Sequence[Update]
    options: Sequence[Sequence[Mapping[str, Any]]]
    keys: Sequence[Sequence[tuple[str, ...]]]
    parameters: Mapping[str, torch.Tensor]
    moments: Mapping[str, Mapping[str, torch.Tensor]]
    gradients: Sequence[Mapping[str, torch.Tensor]]
    steps: Mapping[str, torch.Tensor]
    counted: dict[str, torch.Tensor]

    def of_group(
        self, number: int
    ) -> Iterator[tuple[Update, Mapping[str, Any], tuple[str, ...], Mapping[str, torch.Tensor]]]:
        """Update, hyperparameters, names of moments and gradients, one update at a time."""
        for update, options, keys, gradients in zip(
            self.updates, self.options, self.keys, self.gradients, strict=True
        ):
            yield update, options[number], keys[number], gradients


class Blocked:
    """Updates the parameters and the state of an optimizer in place, block by block.

    Args:
        optimizer: holds the state; of a class in :data:`KINDS`. Its ``step`` is not called.
        names: parameter names of each group, in order.
        threads: Python threads that share the blocks out, each with one thread of torch.
        block_elements: a multiple of 64; None: :data:`BLOCK_ELEMENTS`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        *,
        threads: int,
        block_elements: int | None = None,
    ) -> None:
        block_elements = BLOCK_ELEMENTS if block_elements is None else block_elements
        assert block_elements > 0
        assert block_elements % ALIGNMENT_ELEMENTS == 0
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._family = _FAMILIES[self._kind]
        self._names = names
        self._parameters = {
            name: parameter
            for group, members in zip(optimizer.param_groups, names, strict=True)
            for name, parameter in zip(members, group["params"], strict=True)
        }
        self._threads = threads
        self._block_elements = block_elements

    def takes(self, update: Update) -> bool:
        """Whether this update can be applied to the state as it is now.

        Not where the optimizer would create state, nor where a gradient lies elsewhere, or a
        large one in another memory order than its parameter: the optimizer's own step does those.
        """
        for members, options in zip(self._names, self._options(update), strict=True):
            keys = self._family.moments(options)
            for name in members:
                if name in update.gradients and not self._ready(name, keys, update.gradients[name]):
                    return False
        return True

    def _ready(self, name: str, keys: Iterable[str], gradient: torch.Tensor) -> bool:
        parameter, state = self._parameters[name], self._state(name)
        moments = [state.get(key) for key in keys]
        if gradient.device != parameter.device:
            return False
        if self._family.counts and not isinstance(state.get("step"), torch.Tensor):
            return False
        if not all(
            isinstance(moment, torch.Tensor) and moment.shape == parameter.shape
            for moment in moments
        ):
            return False
        if parameter.numel() <= self._block_elements:
            return True
        order = _memory_order(parameter)
        return all(flat(tensor, order) is not None for tensor in (parameter, gradient, *moments))

    def run(self, updates: Sequence[Update]) -> None:
        """Applies ``updates``, all of which :meth:`takes` has accepted, in their order."""
        batch = self._prepare(updates)
        blocks = deque(self._blocks())

        def work() -> None:
            scratch = _Scratch(self._block_elements)
            while True:
                try:
                    block = blocks.popleft()
                except IndexError:
                    return
                self._run_block(block, batch, scratch)

        _in_threads(work, min(self._threads, len(blocks)), stop=blocks.clear)
        for name, step in batch.counted.items():
            self._state(name)["step"].copy_(step)

    def _prepare(self, updates: Sequence[Update]) -> _Batch:
        options = [self._options(update) for update in updates]
        keys = [[self._family.moments(own) for own in every] for every in options]
        wanted = sorted({key for every in keys for own in every for key in own})
        states = {name: self._state(name) for name in self._parameters}
        moments: dict[str, Mapping[str, torch.Tensor]] = {}
        for key in wanted:
            there = {n: state[key] for n, state in states.items() if state.get(key) is not None}
            moments[key] = self._lines(there)
        return _Batch(
            updates=updates,
            options=options,
            keys=keys,
            parameters=self._lines(self._parameters),
            moments=moments,
            gradients=[self._lines(update.gradients) for update in updates],
            steps={n: state["step"] for n, state in states.items() if self._counted(state)},
            counted={},
        )

    def _counted(self, state: Mapping[str, Any]) -> bool:
        return self._family.counts and "step" in state

    def _lines(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Large ones as flat views, in the memory order of their parameters."""
        found = {}
        for name, tensor in tensors.items():
            found[name] = tensor.detach()
            if tensor.numel() > self._block_elements:
                line = flat(found[name], _memory_order(self._parameters[name]))
                # Of a parameter that has no gradient in these updates, it may have gaps.
                found[name] = found[name] if line is None else line
        return found

    def _run_block(self, block: _Block, batch: _Batch, scratch: _Scratch) -> None:
        def parts(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> Tensors:
            if block.elements is None:
                return [tensors[name] for name in names]
            return [tensors[name][block.elements] for name in names]

        # The same step counts for all blocks of a tensor: each block counts for itself.
        steps = {name: batch.steps[name].clone() for name in block.names if name in batch.steps}
        held: tuple[Sequence[str], Sequence[str], Tensors, dict[str, Tensors]] = ((), (), [], {})
        for update, options, keys, gradients in batch.of_group(block.group):
            names = [name for name in block.names if name in gradients]
            if not names:
                continue
            if held[:2] != (names, keys):
                own = {key: parts(batch.moments[key], names) for key in keys}
                held = (names, keys, parts(batch.parameters, names), own)
            _, _, parameters, moments = held
            copies = update.grad_scale is not None or writes_gradients(self._kind, (options,))
            scratch.clear()
            logged = parts(gradients, names)
            self._family.call(
                list(parameters),
                [
                    scratch.gradient(gradient, parameter.dtype, copies)
                    for gradient, parameter in zip(logged, parameters, strict=True)
                ],
                {key: list(tensors) for key, tensors in moments.items()},
                [steps[name] for name in names] if steps else [],
                options,
                update,
            )
        if block.elements is None or block.elements.start == 0:
            batch.counted.update(steps)

    def _blocks(self) -> Iterator[_Block]:
        """All parameters, in blocks."""
        for number, members in enumerate(self._names):
            small: list[str] = []
            elements = 0
            for name in members:
                numel = self._parameters[name].numel()
                if numel > self._block_elements:
                    for start in range(0, numel, self._block_elements):
                        stop = min(start + self._block_elements, numel)
                        yield _Block(number, (name,), slice(start, stop))
                    continue
                if small and (elements + numel > self._block_elements or len(small) == MAX_TENSORS):
                    yield _Block(number, tuple(small))
                    small, elements = [], 0
                small.append(name)
                elements += numel
            if small:
                yield _Block(number, tuple(small))

    def _options(self, update: Update) -> list[Mapping[str, Any]]:
        """Hyperparameters, with torch's defaults for flags that older versions did not have."""
        decoupled = {"decoupled_weight_decay": self._kind is AdamW}
        return [{**_FLAGS, **decoupled, **options} for options in update.groups]

    def _state(self, name: str) -> dict[str, Any]:
        # Not by index: that would create an entry.
        found: dict[str, Any] = self._optimizer.state.get(self._parameters[name], {})
        return found


class _Scratch:
    """Memory for the gradients of one block, where they must be converted or may be written to.

    Args:
        elements: of a block.
    """

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._lines: dict[torch.dtype, torch.Tensor] = {}
        self._used = 0

    def clear(self) -> None:
        """Forgets the gradients of the last update."""
        self._used = 0

    def gradient(self, logged: torch.Tensor, dtype: torch.dtype, copies: bool) -> torch.Tensor:
        """``logged`` in ``dtype``; another tensor than that if ``copies``."""
        if logged.dtype == dtype and not copies:
            return logged
        if not logged.is_contiguous():
            return logged.to(dtype, copy=True)  # keeps the strides
        line = self._lines.get(dtype)
        if line is None:
            line = self._lines[dtype] = torch.empty(self._elements, dtype=dtype)
        # Fresh memory would be several times slower to write to.
        own = line[self._used : self._used + logged.numel()].view(logged.shape)
        self._used += logged.numel()
        return own.copy_(logged)


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the one with the longest stride to the one with the shortest."""
    dims = range(tensor.dim())
    return tuple(sorted(dims, key=lambda d: (tensor.stride(d), tensor.shape[d] > 1), reverse=True))


def flat(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor | None:
    """The elements in the order in which they lie in memory, shape ``[n]``, without a copy.

    Args:
        order: of dimensions, outermost first.

    Returns:
        None if the tensor has gaps or overlaps, or lies in another order.
    """
    turned = tensor.permute(tuple(order))
    return turned.reshape(-1) if turned.is_contiguous() else None


def _in_threads(work: Callable[[], None], threads: int, stop: Callable[[], None]) -> None:
    """Runs ``work`` in this thread and ``threads - 1`` others, with one torch thread each.

    Raises:
        the first error of any of them; ``stop`` has been called then, so that all end early.
    """
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            with torch.no_grad():
                work()
        except BaseException as error:  # raised below
            errors.append(error)
            stop()

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # for this thread, and for those that are started from here on
    others = [threading.Thread(target=guarded, name="replay") for _ in range(threads - 1)]
    try:
        for thread in others:
            thread.start()
        guarded()
        for thread in others:
            thread.join()
    except BaseException:  # an interrupt while waiting: nobody may go on writing after this
        stop()
        for thread in others:
            if thread.ident is not None:
                thread.join()
        raise
    finally:
        torch.set_num_threads(before)
    if errors:
        raise errors[0]
