"""Apply several updates at once, block by block: SGD, Adam and AdamW on the CPU.

A complete pass for each update reads and writes the state from memory each time. Here a block of it
stays in the cache for all updates of a call. torch's own functions run on the blocks, in the
variant (for-loop, foreach, fused) that the hyperparameters select, so the bits are those of a
complete pass: each element is updated independently, and the choice between torch's vector code and
its scalar code for the last elements of a tensor (fused kernels, half precision) stays the same,
since blocks begin at multiples of every vector length and do not straddle tensors. ``self_test``
checks it on the installed torch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.replay.exactness import HALVES
from everstep.replay.functional import Tensors, form_of, options_of
from everstep.replay.fused.cuts import Block, Scratch, cut, line
from everstep.replay.fused.programs import Numbers, WorkBuffers, numbers, program, suits
from everstep.replay.optimizer_step import writes_gradients
from everstep.replay.updates import Gradient, Packed, Update

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

    def of_group(
        self, number: int
    ) -> Iterator[tuple[Update, Mapping[str, Any], tuple[str, ...], Mapping[str, Gradient]]]:
        """Yield update, hyperparameters, names of moments, and gradients, one update at a time."""
        for update, options, keys, gradients in zip(
            self.updates, self.options, self.keys, self.gradients, strict=True
        ):
            yield update, options[number], keys[number], gradients


class Blocked:
    """Update the parameters and the state of an optimizer in place, block by block.

    Args:
        optimizer: holds the state; of a class in :data:`KINDS`. Its ``step`` is not called.
        names: parameter names of each group, in order.
        threads: Python threads that share the blocks, each with one thread of torch.
        block_elements: a multiple of 64; None: :data:`BLOCK_ELEMENTS`.
        compiled: returns True if a program (``programs``) may replace torch's functions, given an
            update, the number of a group, and the dtype of its parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
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
        self._form = form_of(self._kind)
        self._names = names
        self._parameters = {
            name: parameter
            for group, members in zip(optimizer.param_groups, names, strict=True)
            for name, parameter in zip(members, group["params"], strict=True)
        }
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
            buffers = WorkBuffers(elements)
            while True:
                try:
                    block = blocks.popleft()
                except IndexError:
                    return
                if block.group in batch.compiled:
                    self._run_program(block, batch, scratch, buffers)
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
        held: tuple[Sequence[str], Sequence[str], Tensors, dict[str, Tensors]] = ((), (), [], {})
        for update, options, keys, gradients in batch.of_group(block.group):
            names = [name for name in block.names if name in gradients]
            if not names:
                continue
            if held[:2] != (names, keys):
                own = {key: block.of(batch.moments[key], names) for key in keys}
                held = (names, keys, block.of(batch.parameters, names), own)
            _, _, parameters, moments = held
            copies = update.grad_scale is not None or writes_gradients(self._kind, (options,))
            scratch.clear()
            self._form.call(
                # Copies of the lists: torch's functions may replace items (views of complex
                # tensors).
                list(parameters),
                [
                    scratch.gradient(block.of_gradient(gradients[name]), parameter.dtype, copies)
                    for name, parameter in zip(names, parameters, strict=True)
                ],
                {key: list(tensors) for key, tensors in moments.items()},
                [steps[name] for name in names] if steps else [],
                options,
                update,
            )
        # Only the first block of a tensor reports its count, so no two threads write the same key.
        if block.elements is None or block.elements.start == 0:
            batch.counted.update(steps)

    def _run_program(
        self, block: Block, batch: _Batch, scratch: Scratch, buffers: WorkBuffers
    ) -> None:
        """Do the work of :meth:`_run_block`, with as many updates in one call as have the same
        tensors."""
        run = program(self._kind)
        assert run is not None
        counts = {name: float(batch.steps[name]) for name in block.names if name in batch.steps}
        held: tuple[Sequence[str], Sequence[str], Tensors, list[Tensors]] = ((), (), [], [])
        waiting: list[tuple[Tensors, list[Numbers]]] = []

        def run_waiting() -> None:
            if waiting:
                gradients, known = map(list, zip(*waiting, strict=True))
                run(held[2], held[3], gradients, known, *buffers.of(held[2][0].dtype))
                waiting.clear()

        for _, options, keys, gradients in batch.of_group(block.group):
            names = [name for name in block.names if name in gradients]
            if not names:
                continue
            # Waiting updates are for the tensors in `held`, so they run before it changes.
            if held[:2] != (names, keys):
                run_waiting()
                moments = [block.of(batch.moments[key], names) for key in keys]
                held = (names, keys, block.of(batch.parameters, names), moments)
            for name in names if counts else ():
                counts[name] += 1
            at = [counts.get(name, 0.0) for name in names]
            known = {count: numbers(self._kind, options, count) for count in set(at)}
            logged = [block.of_gradient(gradients[name]) for name in names]
            packed = any(isinstance(gradient, Packed) for gradient in logged)
            if packed:
                run_waiting()
                scratch.clear()
            dtype = held[2][0].dtype
            dense = [
                one if isinstance(one, torch.Tensor) else scratch.gradient(one, dtype, False)
                for one in logged
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
