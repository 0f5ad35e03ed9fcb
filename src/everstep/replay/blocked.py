"""Apply several updates at once, block by block: SGD, Adam and AdamW on the CPU.

A complete pass for each update reads and writes the state from memory each time. Here a block of it
stays in the cache for all updates of a call. torch's own functions run on the blocks, in the
variant (for-loop, foreach, fused) that the hyperparameters select, so the bits are those of a
complete pass: each element is updated independently, and the choice between torch's vector code and
its scalar code for the last elements of a tensor (fused kernels, half precision) stays the same,
since blocks begin at multiples of every vector length and do not straddle tensors. ``self_test``
checks it on the installed torch.

TorchScript programs of SGD, Adam and AdamW: operator by operator, several updates in one call.

torch's for-loop and foreach variants make several passes over a tensor, each a call from Python. On
blocks that fit a core's second-level cache a pass takes some 10 us, and threads that release and
reacquire the GIL around each pass are together no faster than one. So the same operators, with the
same numbers in the same order, are a TorchScript program here: it runs without the GIL, and writes
to preallocated memory. ``self_test`` checks on the installed torch that its bits are those of
``step()``; if not, or if there is no TorchScript, torch's own functions are called.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from everstep.replay.cuts import Block, Scratch, cut, line
from everstep.replay.exactness import HALVES
from everstep.replay.optimizer_step import writes_gradients
from everstep.replay.updates import Gradient, Packed, Update

Numbers = list[float]
Program = Callable[
    [
        list[torch.Tensor],
        list[list[torch.Tensor]],
        list[list[torch.Tensor]],
        list[list[Numbers]],
        torch.Tensor,
        torch.Tensor,
    ],
    None,
]

COUNT_MAX = 2**24
"""Steps are counted in float32, which represents every integer up to this one."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_OF_SGD = ("lr", "momentum", "dampening", "weight_decay")
_OF_ADAM = ("lr", "eps", "weight_decay")

_log = logging.getLogger("everstep")


def _widened(gradient: torch.Tensor, parameter: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Return the gradient in the dtype of the parameter; for a block, in preallocated memory."""
    if gradient.dtype == parameter.dtype:
        return gradient
    if parameter.dim() == 1:
        return wide[: parameter.numel()].copy_(gradient)
    return gradient.to(parameter.dtype)


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Do ``tensor.mul_(factor)`` as Python calls it. TorchScript's own call takes another overload,
    which rounds the factor to the tensor's dtype: 0.95 is 0.9492 in bfloat16."""
    one = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    return one.mul_(torch.scalar_tensor(factor, dtype=torch.float64, device="cpu"))


def _adam(
    parameters: list[torch.Tensor],
    moments: list[list[torch.Tensor]],
    gradients: list[list[torch.Tensor]],
    numbers: list[list[list[float]]],
    room: torch.Tensor,
    wide: torch.Tensor,
) -> None:
    means = moments[0]
    squares = moments[1]
    for logged, known in zip(gradients, numbers):  # noqa: B905 - TorchScript's has no `strict`
        for i in range(len(parameters)):
            parameter = parameters[i]
            mean = means[i]
            square = squares[i]
            own = known[i]
            line = parameter.dim() == 1
            work = room[: parameter.numel()] if line else torch.empty_like(square)
            gradient = _widened(logged[i], parameter, wide)
            if own[0] == 1.0:
                _times(parameter, own[1])
            elif own[0] == 2.0:
                # Not in place: logged gradients must not change.
                gradient = torch.add(gradient, parameter, alpha=own[1], out=work)
            mean.lerp_(gradient, own[2])
            _times(square, own[3])
            square.addcmul_(gradient, gradient, value=own[4])
            # `work` may hold the gradient, which is not needed from here on.
            torch.sqrt(square, out=work)
            work.div_(own[5]).add_(own[6])
            parameter.addcdiv_(mean, work, value=own[7])


def _adam_numbers(options: Mapping[str, Any], count: float) -> Numbers:
    """Compute the numbers as ``torch.optim.adam`` does; the first encodes how weights decay."""
    rate = options["lr"]
    decay = options["weight_decay"]
    (beta1, beta2) = options["betas"]
    decoupled = options["decoupled_weight_decay"]
    # The expressions of torch, term by term: a different order, or sqrt(), may round differently.
    size = rate / (1 - beta1**count)
    return [
        float((1 if decoupled else 2) if decay != 0 else 0),
        float(1 - rate * decay if decoupled else decay),
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**count) ** 0.5,
        float(options["eps"]),
        -size,
    ]


def _sgd(
    parameters: list[torch.Tensor],
    moments: list[list[torch.Tensor]],
    gradients: list[list[torch.Tensor]],
    numbers: list[list[list[float]]],
    room: torch.Tensor,
    wide: torch.Tensor,
) -> None:
    for logged, known in zip(gradients, numbers):  # noqa: B905 - TorchScript's has no `strict`
        for i in range(len(parameters)):
            parameter = parameters[i]
            own = known[i]
            line = parameter.dim() == 1
            work = room[: parameter.numel()] if line else torch.empty_like(parameter)
            gradient = _widened(logged[i], parameter, wide)
            if own[0] != 0.0:
                gradient = torch.add(gradient, parameter, alpha=own[0], out=work)
            if len(moments) > 0:
                buffer = moments[0][i]
                _times(buffer, own[1])
                buffer.add_(gradient, alpha=own[2])
                if own[3] != 0.0:
                    gradient = torch.add(gradient, buffer, alpha=own[1], out=work)
                else:
                    gradient = buffer
            parameter.add_(gradient, alpha=own[4])


def _sgd_numbers(options: Mapping[str, Any], count: float) -> Numbers:
    """Compute the numbers as ``torch.optim.sgd`` does."""
    return [
        float(options["weight_decay"]),
        float(options["momentum"]),
        float(1 - options["dampening"]),
        float(bool(options["nesterov"])),
        float(-options["lr"]),
    ]


def suits(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    dtypes: Iterable[torch.dtype],
    counts: Iterable[float] = (),
) -> bool:
    """Return True if there is a program for these hyperparameters; its bits are checked elsewhere.

    Args:
        kind: one of :data:`~everstep.replay.blocked.KINDS`.
        options: hyperparameters of a group.
        dtypes: dtypes of the parameters and their moments.
        counts: steps of the parameters after the updates.
    """
    flags = ("fused", "maximize", "amsgrad", "capturable", "differentiable")
    if any(options.get(flag) for flag in flags):
        return False
    values = [options[key] for key in (_OF_SGD if kind is SGD else _OF_ADAM)]
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
        return False  # a tensor: torch may take other operators
    if kind is not SGD and not all(isinstance(beta, float) for beta in options["betas"]):
        return False
    if len(found := set(dtypes)) > 1 or not found.issubset(_DTYPES):
        return False
    return all(0 < count < COUNT_MAX for count in counts) and program(kind) is not None


def numbers(kind: type[Optimizer], options: Mapping[str, Any], count: float) -> Numbers:
    """Return the numbers that the operators of one update take.

    Args:
        kind: one of :data:`~everstep.replay.blocked.KINDS`.
        options: hyperparameters that :func:`suits` has accepted.
        count: step count, including this update.
    """
    return (_sgd_numbers if kind is SGD else _adam_numbers)(options, count)


def program(kind: type[Optimizer]) -> Program | None:
    """Return the program of an optimizer class, None if there is none.

    It updates tensors in place. Its arguments are parameters; moments by kind, in the order of
    their names; gradients and numbers for each update; and two buffers of one block, for
    intermediate results and for gradients of another dtype than the parameters.
    """
    return _compiled(_sgd if kind is SGD else _adam)


@functools.cache
def _compiled(function: Callable[..., None]) -> Program | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates TorchScript
            jit: Any = torch.jit
            script = jit.script(function)
    except (RuntimeError, OSError, TypeError, AttributeError) as error:
        _log.debug("replay: no TorchScript of %s: %r", function.__name__, error)
        return None

    def run(*arguments: Any) -> None:
        # No profiling and no rewriting: both take longer than they gain.
        with jit.optimized_execution(False):
            script(*arguments)

    return run


BLOCK_ELEMENTS = 512 * 1024
"""Elements of a block: with fp32 moments 6 MB, which stay in the last-level cache. In smaller
blocks
the overhead of Python (some 15 us for each block and update) shows."""

UNFUSED_ELEMENTS = 64 * 1024
"""Limit for variants with several passes over a block (for-loop, foreach): parameters, moments, a
gradient and intermediate results are 1.3 MB then, which fit in a core's own cache."""

ALIGNMENT_ELEMENTS = 64
"""Blocks are multiples of this. torch's CPU loops take two vectors at a time: 32 fp32 or 64
bf16 elements with AVX-512; fused kernels share work out in cache lines."""

SINGLE = 64
SINGLE_SHARED = 8
"""Factors by which blocks are larger where nothing is kept in the cache: for one thread, for
several."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Several updates, prepared for cutting.

    Attributes:
        updates: in their order.
        options: hyperparameters, for each update and group.
        keys: names of the moments that they need, likewise.
        parameters, moments, gradients: large tensors as flat views, but for compressed gradients;
            moments by key and name, gradients for each update.
        steps: step counters as they are before.
        counted: step counters as they are after, as far as it is known.
        compiled: groups whose blocks are updated by a program (``passes``).
    """

    updates: Sequence[Update]
    options: Sequence[Sequence[Mapping[str, Any]]]
    keys: Sequence[Sequence[tuple[str, ...]]]
    parameters: Mapping[str, torch.Tensor]
    moments: Mapping[str, Mapping[str, torch.Tensor]]
    gradients: Sequence[Mapping[str, Gradient]]
    steps: Mapping[str, torch.Tensor]
    counted: dict[str, torch.Tensor]
    compiled: Collection[int]

    def of_block(self, block: Block) -> Iterator[_Piece]:
        """Yield a block's elements for each update that has gradients of them."""
        held: tuple[Sequence[str], Sequence[str], Tensors, Mapping[str, Tensors]] = ((), (), [], {})
        for update, every_options, every_keys, gradients in zip(
            self.updates, self.options, self.keys, self.gradients, strict=True
        ):
            names = [name for name in block.names if name in gradients]
            keys = every_keys[block.group]
            if not names:
                continue
            # The same lists as long as the names are the same.
            if held[:2] != (names, keys):
                moments = {key: block.of(self.moments[key], names) for key in keys}
                held = (names, keys, block.of(self.parameters, names), moments)
            logged = [block.of_gradient(gradients[name]) for name in names]
            yield _Piece(update, every_options[block.group], names, held[2], held[3], logged)


class _Piece(NamedTuple):
    """Elements of one block, for one update: hyperparameters of their group, names of the
    parameters, and their tensors in the same order; moments by key."""

    update: Update
    options: Mapping[str, Any]
    names: Sequence[str]
    parameters: Tensors
    moments: Mapping[str, Tensors]
    gradients: Sequence[Gradient]


class Blocked:
    """Update the parameters and the state of an optimizer in place, block by block.

    Args:
        optimizer: holds the state; of a class in :data:`KINDS`. Its ``step`` is not called.
        names: parameter names of each group, in order.
        parameters: its parameters, by name.
        threads: Python threads that share the blocks, each with one thread of torch.
        block_elements: a multiple of 64; None: :data:`BLOCK_ELEMENTS`.
        compiled: returns True if a program (``programs``) may replace torch's functions, given an
            update, the number of a group, and the dtype of its parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        parameters: Mapping[str, torch.Tensor],
        *,
        threads: int,
        block_elements: int | None = None,
        compiled: Callable[[Update, int, torch.dtype], bool] = lambda update, number, dtype: False,
    ) -> None:
        block_elements = BLOCK_ELEMENTS if block_elements is None else block_elements
        assert block_elements > 0
        assert block_elements % ALIGNMENT_ELEMENTS == 0
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._form = _FORMS[self._kind]
        self._names = names
        self._parameters = parameters
        self._threads = threads
        self._block_elements = block_elements
        self._may_compile = compiled

    def takes(self, update: Update) -> bool:
        """Return True if this update can be applied to the present state.

        It cannot if the optimizer would create state, if a gradient is on another device, or if a
        gradient of a large or half-precision parameter has another memory order: the optimizer's
        own step handles those.
        """
        for members, options in zip(self._names, options_of(self._kind, update), strict=True):
            keys = self._form.moments(options)
            for name in members:
                if name in update.gradients and not self._ready(name, keys, update.gradients[name]):
                    return False
        return True

    def _ready(self, name: str, keys: Iterable[str], gradient: Gradient) -> bool:
        parameter = self._parameters[name]
        state = self._state(name)
        moments: list[Any] = [state.get(key) for key in keys]
        if gradient.device != parameter.device:
            return False
        if self._form.counts and not isinstance(state.get("step"), torch.Tensor):
            return False
        if not all(
            isinstance(moment, torch.Tensor) and moment.shape == parameter.shape
            for moment in moments
        ):
            return False
        tensors = [parameter, *moments]
        large = parameter.numel() > min(self._block_elements, UNFUSED_ELEMENTS)
        # Where memory orders differ, torch takes scalar code, which rounds halves differently:
        # intermediate results of a program would need the same layout as torch's.
        if not large and not any(tensor.dtype in HALVES for tensor in tensors):
            return True
        if not isinstance(gradient, Packed):
            tensors.append(gradient)
        elif not parameter.is_contiguous() or (
            large and not gradient.splits_at(self._block_elements)
        ):
            return False
        return all(line(tensor, parameter) is not None for tensor in tensors)

    def run(self, updates: Sequence[Update]) -> None:
        """Apply ``updates``, all accepted by :meth:`takes`, in their order."""
        elements = self._elements_for(updates)
        batch = self._prepare(updates, elements)
        # popleft() is atomic, so threads share the queue without a lock.
        blocks = deque(cut(self._names, self._parameters, elements))

        def work() -> None:
            # Buffers belong to one thread; the state needs no lock, since no two blocks overlap.
            scratch = Scratch(self._block_elements)
            while True:
                try:
                    block = blocks.popleft()
                except IndexError:
                    return
                if block.group in batch.compiled:
                    self._run_program(block, batch, scratch)
                else:
                    self._run_block(block, batch, scratch)

        _in_threads(work, min(self._threads, len(blocks)), stop=blocks.clear)
        # After all blocks: each of them starts from the counts as they were.
        for name, step in batch.counted.items():
            self._state(name)["step"].copy_(step)

    def _elements_for(self, updates: Sequence[Update]) -> int:
        """Return the size of a block. One fused update passes over the state once: cutting then
        gains nothing except sharing among threads."""
        update = updates[0]
        if not all(options.get("fused") for one in updates for options in one.groups):
            return min(self._block_elements, UNFUSED_ELEMENTS)
        if len(updates) > 1 or update.grad_scale is not None:
            return self._block_elements
        for name, gradient in update.gradients.items():
            if isinstance(gradient, Packed) or gradient.dtype != self._parameters[name].dtype:
                return self._block_elements
        return self._block_elements * (SINGLE if self._threads == 1 else SINGLE_SHARED)

    def _prepare(self, updates: Sequence[Update], elements: int) -> _Batch:
        options = [options_of(self._kind, update) for update in updates]
        keys = [[self._form.moments(own) for own in every] for every in options]
        wanted = sorted({key for every in keys for own in every for key in own})
        states = {name: self._state(name) for name in self._parameters}
        moments: dict[str, Mapping[str, torch.Tensor]] = {}
        for key in wanted:
            there = {n: state[key] for n, state in states.items() if state.get(key) is not None}
            moments[key] = self._lines(there, elements)
        return _Batch(
            updates=updates,
            options=options,
            keys=keys,
            parameters=self._lines(self._parameters, elements),
            moments=moments,
            gradients=[self._gradients(update, elements) for update in updates],
            steps={n: state["step"] for n, state in states.items() if self._counted(state)},
            counted={},
            compiled=[
                number
                for number in range(len(self._names))
                if self._compiles(updates, options, keys, number)
            ],
        )

    def _compiles(
        self,
        updates: Sequence[Update],
        options: Sequence[Sequence[Mapping[str, Any]]],
        keys: Sequence[Sequence[tuple[str, ...]]],
        number: int,
    ) -> bool:
        """Return True if a program gives the bits of these updates for all blocks of a group."""
        members = [n for n in self._names[number] if any(n in one.gradients for one in updates)]
        dtypes = {self._parameters[name].dtype for name in members}
        counts = [0.0]
        for name in members:
            state = self._state(name)
            dtypes.update(state[key].dtype for own in keys for key in own[number])
            if self._counted(state):
                counts.append(float(state["step"]))
        first, last = (
            count + more for count, more in ((min(counts), 1), (max(counts), len(updates)))
        )
        return all(
            suits(self._kind, own[number], dtypes, (first, last))
            and update.grad_scale is None
            and update.found_inf is None
            and all(self._may_compile(update, number, dtype) for dtype in dtypes)
            for update, own in zip(updates, options, strict=True)
        )

    def _counted(self, state: Mapping[str, Any]) -> bool:
        return self._form.counts and "step" in state

    def _lines(self, tensors: Mapping[str, torch.Tensor], elements: int) -> dict[str, torch.Tensor]:
        """Return large tensors as flat views, in the memory order of their parameters."""
        found = {}
        for name, tensor in tensors.items():
            found[name] = tensor.detach()
            if tensor.numel() > elements:
                whole = line(found[name], self._parameters[name])
                # A parameter without a gradient in these updates may have gaps.
                found[name] = found[name] if whole is None else whole
        return found

    def _gradients(self, update: Update, elements: int) -> dict[str, Gradient]:
        packed = {}
        plain = {}
        for name, gradient in update.gradients.items():
            if isinstance(gradient, Packed):
                packed[name] = gradient
            else:
                plain[name] = gradient
        return {**packed, **self._lines(plain, elements)}

    def _run_block(self, block: Block, batch: _Batch, scratch: Scratch) -> None:
        # All blocks of a tensor start from the same step count: each block counts on a copy.
        steps = {name: batch.steps[name].clone() for name in block.names if name in batch.steps}
        for piece in batch.of_block(block):
            update = piece.update
            options = piece.options
            copies = update.grad_scale is not None or writes_gradients(self._kind, (options,))
            scratch.clear()
            self._form.call(
                # Copies of the lists: torch's functions may replace items (views of complex
                # tensors).
                list(piece.parameters),
                [
                    scratch.gradient(gradient, parameter.dtype, copies)
                    for gradient, parameter in zip(piece.gradients, piece.parameters, strict=True)
                ],
                {key: list(tensors) for key, tensors in piece.moments.items()},
                [steps[name] for name in piece.names] if steps else [],
                options,
                update,
            )
        # Only the first block of a tensor reports its count, so no two threads write the same key.
        if block.elements is None or block.elements.start == 0:
            batch.counted.update(steps)

    def _run_program(self, block: Block, batch: _Batch, scratch: Scratch) -> None:
        """Do the work of :meth:`_run_block`, with as many updates in one call as have the same
        tensors."""
        run = program(self._kind)
        assert run is not None
        counts = {name: float(batch.steps[name]) for name in block.names if name in batch.steps}
        waiting: list[tuple[Tensors, list[Numbers]]] = []
        parameters: Tensors = []
        moments: list[Tensors] = []

        def run_waiting() -> None:
            if waiting:
                gradients, known = map(list, zip(*waiting, strict=True))
                run(parameters, moments, gradients, known, *scratch.work(parameters[0].dtype))
                waiting.clear()

        for piece in batch.of_block(block):
            if piece.parameters is not parameters:
                # Waiting updates are for the tensors before.
                run_waiting()
                parameters = piece.parameters
                moments = list(piece.moments.values())
            for name in piece.names if counts else ():
                counts[name] += 1
            at = [counts.get(name, 0.0) for name in piece.names]
            known = {count: numbers(self._kind, piece.options, count) for count in set(at)}
            packed = any(isinstance(gradient, Packed) for gradient in piece.gradients)
            if packed:
                run_waiting()
                scratch.clear()
            dtype = parameters[0].dtype
            dense = [
                one if isinstance(one, torch.Tensor) else scratch.gradient(one, dtype, False)
                for one in piece.gradients
            ]
            waiting.append((dense, [known[count] for count in at]))
            # The scratch memory of a packed gradient is reused for the next one.
            if packed:
                run_waiting()
        run_waiting()
        if block.elements is None or block.elements.start == 0:
            batch.counted.update(
                {n: torch.tensor(c, dtype=torch.float64, device="cpu") for n, c in counts.items()}
            )

    def _state(self, name: str) -> dict[str, Any]:
        # Not by index: the state is a defaultdict, which would create an entry.
        found: dict[str, Any] = self._optimizer.state.get(self._parameters[name], {})
        return found


def _in_threads(work: Callable[[], None], threads: int, stop: Callable[[], None]) -> None:
    """Runs ``work`` in this thread and ``threads - 1`` others, with one torch thread each.

    Raises:
        BaseException: the first error of any thread, after ``stop`` was called to end all early.
    """
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            # Grad mode belongs to a thread: a new one starts with gradients enabled.
            with torch.no_grad():
                work()
        except BaseException as error:  # raised below
            errors.append(error)
            stop()

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # for this thread, and for threads started from now on
    others = [threading.Thread(target=guarded, name="replay") for _ in range(threads - 1)]
    try:
        for thread in others:
            thread.start()
        guarded()
        for thread in others:
            thread.join()
    except BaseException:  # an interrupt: no thread may write to the state after this
        stop()
        for thread in others:
            # The interrupt may have come before all threads were started.
            if thread.ident is not None:
                thread.join()
        raise
    finally:
        torch.set_num_threads(before)
    if errors:
        raise errors[0]


Tensors = list[torch.Tensor]
Call = Callable[[Tensors, Tensors, Mapping[str, Tensors], Tensors, Mapping[str, Any], Update], None]


@dataclass(frozen=True, slots=True)
class Form:
    """Functional form of an optimizer class.

    Attributes:
        moments: returns the names of the state tensors that have the parameter's shape.
        counts: True if there is a ``step``.
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
    same_dtype = len({parameter.dtype for parameter in parameters}) == 1
    if options["fused"] and same_dtype and isinstance(beta1, float):
        # As torch.optim.adam._fused_adam does, without its grouping by device and dtype, which
        # takes
        # several times as long in Python.
        for step in steps:
            step.add_(1)
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
        # As torch does: a skipped update does not count.
        if update.found_inf is not None:
            for step in steps:
                step.sub_(update.found_inf)
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
        capturable=bool(options.get("capturable")),
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


_FORMS: dict[type[Optimizer], Form] = {
    SGD: Form(_sgd_moments, False, _call_sgd),
    Adam: Form(_adam_moments, True, _call_adam),
    AdamW: Form(_adam_moments, True, _call_adam),
}
KINDS = tuple(_FORMS)
"""The classes that can be updated block by block."""

_FLAGS = {"foreach": None, "fused": None, "maximize": False, "amsgrad": False, "nesterov": False}


def options_of(kind: type[Optimizer], update: Update) -> list[Mapping[str, Any]]:
    """Return the hyperparameters of each group, with torch's defaults for flags that older versions
    did not have."""
    decoupled = {"decoupled_weight_decay": kind is AdamW}
    return [{**_FLAGS, **decoupled, **options} for options in update.groups]
