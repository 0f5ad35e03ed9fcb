"""``Replayer``: apply logged updates of one optimizer to named tensors, in place."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import SGD, Optimizer, SparseAdam

from everstep.errors import ReplayError, UnsupportedStateError
from everstep.replay.blocked import KINDS, Blocked
from everstep.replay.cuts import has_gaps
from everstep.replay.exactness import (
    HALVES,
    Exactness,
    exactness,
    kind_name,
    kind_refusal,
    options_refusal,
    refusal,
    tensor_refusal,
    thread_dependence,
    variant_of,
)
from everstep.replay.optimizer_step import build, set_options, step_over
from everstep.replay.self_test import blocks_are_exact
from everstep.replay.updates import Gradient, Update, is_widening
from everstep.state.values.tensors import same_strides

BLOCKS_PAY_ELEMENTS = 32_000_000
"""Work, in elements times updates, from which blocks are used. Before the first block the self-test
runs and the program is compiled: 23 to 30 ms of one core. A state that fits in the cache gains next
to nothing. Six updates of 3 million elements take 58 ms on complete tensors and 78 ms in blocks, of
6 million about the same, of 12 million 320 and 215 ms (AdamW, AMD EPYC, torch 2.13)."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay.

    Attributes:
        threads: Python threads that share the work on blocks, each with one of torch's.
        training_threads: number of torch's threads in training, which the bits of large
            half-precision tensors depend on; None: unknown.
        relaid: tensors whose memory layout differs from training's, by the parameter that they are
            or belong to.
    """

    threads: int = 1
    training_threads: int | None = None
    relaid: Mapping[str, str] = field(default_factory=dict)


ONE_THREAD = ReplayOptions()


class Replayer:
    """Apply updates of one optimizer to named tensors, in place.

    Several methods with the same bits, chosen for each update:

    - the optimizer's own ``step()`` over the logged gradients, on complete tensors;

    - SGD, Adam and AdamW on the CPU, once their state exists and the work is large enough
    (:data:`BLOCKS_PAY_ELEMENTS`): torch's functional forms of the same variant, block by block,
    over all updates of a call (``blocked``).

    For use by one thread at a time.

    Args:
        kind: class of the optimizer.
        params: parameter names of each group, in order.
        tensors: parameters by name; updated in place. Views of shared memory are accepted.
        state: ``optimizer.state`` by parameter name; its tensors are updated in place. Parameters
            whose state the optimizer had not made yet are absent.
        groups: hyperparameters of each group at the base.
        options: see :class:`ReplayOptions`.

    Attributes:
        optimizer: runs the updates; holds the state.
        names: parameter names of each group.
        exact: the result of :meth:`apply` is bit for bit that of training. Once False, it stays so
            (I9).

    Raises:
        UnsupportedStateError: this optimizer cannot be replayed, with the reason.
        ReplayError: names, tensors, state and groups do not fit together.
    """

    exact: Exactness

    def __init__(
        self,
        kind: type[Optimizer],
        params: Sequence[Sequence[str]],
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        options: ReplayOptions = ONE_THREAD,
    ) -> None:
        if why := kind_refusal(kind):
            raise _unsupported(kind, why)
        names = [list(members) for members in params]
        _check_names(names, tensors, state, groups)
        # Detached tensors over the same memory, so that each has a `grad` of its own.
        own = {name: tensors[name].detach() for members in names for name in members}
        for name in own:
            if why := tensor_refusal(tensors[name]):
                raise _unsupported(kind, f"{name}: {why}")
        members = [[own[name] for name in group] for group in names]
        for hyperparameters, group in zip(groups, members, strict=True):
            if why := options_refusal(kind, hyperparameters, group):
                raise _unsupported(kind, why)
        optimizer = build(kind, members, groups)
        eager = [name for name, tensor in own.items() if optimizer.state.get(tensor)]
        if lost := [name for name in eager if not state.get(name)]:
            raise ReplayError(
                f"{kind.__name__} makes its state when it is built; the state of {lost} is missing",
                hint="a base of this optimizer must hold its state",
            )
        # Some classes (Adagrad) make state when they are built: that of the base takes its place.
        optimizer.state.clear()
        optimizer.state.update({own[name]: dict(held) for name, held in state.items() if held})
        self._given = _tensors_of(state)
        self._start(optimizer, names, options)

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        names: Mapping[int, str],
        options: ReplayOptions | None = None,
    ) -> Replayer:
        """Return a replayer around a live optimizer, which holds the state of the base.

        The optimizer and its parameters are updated in place, and so are the hyperparameters of its
        groups, which end as in the last update. No hook runs, neither its own nor global ones;
        ``grad`` of each parameter is left as it is.

        Args:
            optimizer: the user's.
            names: names of all its parameters, by ``id(parameter)``.
            options: None: as many threads as torch has, in training as well.

        Raises:
            UnsupportedStateError: the optimizer cannot be replayed, with the reason.
            ReplayError: a parameter has no name.
        """
        if why := refusal(optimizer):
            raise _unsupported(type(optimizer), why)
        found = []
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise ReplayError(f"parameter {position} of group {number} has no name")
            found.append([names[id(parameter)] for parameter in group["params"]])
        # __init__ would build another optimizer; this one is used as it is.
        own = cls.__new__(cls)
        own._given = {}  # the caller's tensors are the optimizer's own
        available = torch.get_num_threads()
        own._start(optimizer, found, options or ReplayOptions(available, available))
        return own

    def _start(self, optimizer: Optimizer, names: list[list[str]], options: ReplayOptions) -> None:
        if options.threads < 1:
            raise ReplayError(f"threads={options.threads}: at least 1 is needed")
        self.optimizer = optimizer
        self._options = options
        self.names = names
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._parameters = {
            name: parameter
            for group, members in zip(names, self._members, strict=True)
            for name, parameter in zip(group, members, strict=True)
        }
        if len(self._parameters) != sum(map(len, names)):
            raise ReplayError("two parameters have the same name")
        self._at_once = self._blocks(options.threads)
        self._size = sum(parameter.numel() for parameter in self._parameters.values())
        self._work = 0  # elements times updates so far
        self._key: str | None = None
        self._lsn: int | None = None
        self._broken: str | None = None
        self._judged: set[tuple[str, ...]] = set()
        self.exact = self._layout_exactness()
        self._judge(optimizer.param_groups)

    @property
    def _kind(self) -> type[Optimizer]:
        return type(self.optimizer)

    def _blocks(self, threads: int) -> Blocked | None:
        """Return the fast path, None if there is none for this device and class."""
        devices = {parameter.device.type for parameter in self._parameters.values()}
        if self._kind not in KINDS or devices != {"cpu"}:
            return None
        # Blocks are updated in any order and by several threads: with shared memory the result
        # would depend on both.
        if not _disjoint(self._parameters.values()):
            return None
        compiled = functools.partial(blocks_are_exact, self._kind, compiled=True)
        return Blocked(
            self.optimizer, self.names, self._parameters, threads=threads, compiled=compiled
        )

    @property
    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """``optimizer.state`` by parameter name, including state that the optimizer created."""
        held = self.optimizer.state
        return {name: held[p] for name, p in self._parameters.items() if p in held}

    @property
    def lsn(self) -> int | None:
        """LSN of the last applied update; None before the first."""
        return self._lsn

    def apply(self, updates: Sequence[Update]) -> None:
        """Apply updates in their order; several in one call are faster than one by one.

        All of them are checked before the first is applied. If one is refused, nothing has changed.

        Args:
            updates: of this optimizer, with ascending LSNs. The caller has checked that none is
                missing (I4).

        Raises:
            ReplayError: an update is out of order or does not fit; or one failed half-way, which
                leaves the
                state unusable.
        """
        if self._broken is not None:
            raise ReplayError(
                f"an earlier update failed half-way: {self._broken}",
                hint="load the base again and replay from it",
            )
        updates = list(updates)
        self._check(updates)
        if not updates:
            return
        # Set before the first change: an interrupt leaves a mixture of steps that no later call may
        # build on.
        self._broken = f"update {updates[0].lsn} or one of the next {len(updates) - 1}"
        try:
            self._apply(updates)
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise ReplayError(
                f"updates {updates[0].lsn} to {updates[-1].lsn} failed half-way: {self._broken}",
                hint="load the base again and replay from it",
            ) from error
        self._broken = None
        self._key = updates[-1].optimizer
        self._lsn = updates[-1].lsn

    def _apply(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self._judge(update.groups)
            if update.lossy and not update.skipped and self.exact.exact:
                self.exact = Exactness(False, "the log holds lossy copies of the gradients")
        self._work += self._size * len(updates)
        waiting: list[Update] = []

        def apply_waiting() -> None:
            if waiting:
                assert self._at_once is not None
                self._at_once.run(waiting)
                # Blocks take the hyperparameters from the updates; those of the optimizer must end
                # as in training.
                set_options(self.optimizer, waiting[-1].groups)
                waiting.clear()

        for update in updates:
            # Fast paths create no state, so the decision for an update does not depend on waiting
            # ones.
            if self._takes_blocks(update):
                waiting.append(update)
                continue
            apply_waiting()
            self._step(update)
        apply_waiting()

    def _step(self, update: Update) -> None:
        """Run the optimizer's own step."""
        before = torch.get_num_threads()
        # The bits of large half-precision tensors depend on it.
        if self._options.training_threads is not None:
            torch.set_num_threads(self._options.training_threads)
        try:
            step_over(self.optimizer, self._parameters, update)
        finally:
            torch.set_num_threads(before)
        self._keep_in_place()

    def _keep_in_place(self) -> None:
        """Copy the values of state tensors that the optimizer replaced into the caller's
        tensors."""
        moved = []
        for (name, key), given in self._given.items():
            values = self.optimizer.state.get(self._parameters[name], {})
            now = values.get(key)
            if now is given or not isinstance(now, torch.Tensor):
                continue
            if (now.shape, now.dtype, now.device) == (given.shape, given.dtype, given.device):
                moved.append((values, key, given, now.detach().clone()))
        # Only after all values were cloned: if the optimizer has swapped tensors, the target of one
        # is the source of another.
        for values, key, given, now in moved:
            given.detach().copy_(now)
            values[key] = given

    def _takes_blocks(self, update: Update) -> bool:
        if self._at_once is None or self._work < BLOCKS_PAY_ELEMENTS:
            return False
        if not self._at_once.takes(update):
            return False
        for number, (options, members) in enumerate(zip(update.groups, self._members, strict=True)):
            # Blocks have one thread of torch each.
            if self._options.training_threads not in (None, 1) and thread_dependence(
                options, members
            ):
                return False
            for dtype in {parameter.dtype for parameter in members}:
                if not blocks_are_exact(self._kind, update, number, dtype):
                    return False
        return True

    def _judge(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Keep :attr:`exact` true to the updates that are replayed."""
        if not self.exact.exact:
            return
        device_types = sorted({p.device.type for p in self._parameters.values()})
        variants = tuple(variant_of(options, d) for d in device_types for options in groups)
        if variants in self._judged:
            return
        self._judged.add(variants)
        for device_type in device_types:
            found = exactness(self._kind, groups, device_type)
            if not found.exact:
                self.exact = found
                return
        if self._options.training_threads is None:
            for options, members in zip(groups, self._members, strict=True):
                if why := thread_dependence(options, members):
                    self.exact = Exactness(False, f"{why}, and those of training are not known")
                    return

    def _layout_exactness(self) -> Exactness:
        """Return the exactness given the tensors whose memory layout differs from training's."""
        for name, entry in self._options.relaid.items():
            if name in self._parameters and self._parameters[name].dtype in HALVES:
                return Exactness(
                    False,
                    f"the memory layout of {entry!r} differs from training's, and torch's rounding "
                    "of half precision depends on it",
                )
        return Exactness(True, "")

    def _check(self, updates: Sequence[Update]) -> None:
        members = [p for group in self.optimizer.param_groups for p in group["params"]]
        # The program may have changed its groups since this replayer was made.
        if list(map(id, members)) != list(map(id, self._parameters.values())):
            raise ReplayError("the optimizer's parameters have been replaced")
        _check_order(updates, after=self._lsn, key=self._key)
        states = self.state.items()
        momentum = {name for name, values in states if values.get("momentum_buffer") is not None}
        for update in updates:
            self._check_update(update, momentum)

    def _check_update(self, update: Update, momentum: set[str]) -> None:
        """Refuse an update that does not fit.

        Args:
            update: update to apply.
            momentum: names of the parameters that have a momentum by then; extended by those that
                get one
                in this update.

        Raises:
            ReplayError: with the reason.
        """
        where = f"update {update.lsn} of {update.optimizer!r}"
        self._check_groups(where, update)
        self._check_scaler(where, update, momentum)
        fused = any(options.get("fused") for options in update.groups)
        for name, gradient in update.gradients.items():
            if why := self._mismatch(name, gradient):
                raise ReplayError(f"{where}: {why}")
            if fused and isinstance(gradient, torch.Tensor) and has_gaps(gradient):
                raise ReplayError(
                    f"{where}: a fused kernel read the gaps between elements of {name!r}"
                )
            if fused and name in self._options.relaid and not self._has_same_layout(name, gradient):
                raise ReplayError(
                    f"{where}: the memory layout of {self._options.relaid[name]!r} differs from "
                    "training's, and a fused kernel would apply gradients to the wrong elements",
                    hint="build the model in the memory format of training",
                )

    def _check_groups(self, where: str, update: Update) -> None:
        if len(update.groups) != len(self.names):
            raise ReplayError(
                f"{where} has {len(update.groups)} parameter groups, the base {len(self.names)}",
                hint="a group that is added during training needs a new base",
            )
        # Boolean flags may be missing: newer versions of torch added them, with defaults.
        needed = {
            key
            for key, value in self.optimizer.defaults.items()
            if value is not None and not isinstance(value, bool)
        }
        for number, (options, names) in enumerate(zip(update.groups, self.names, strict=True)):
            if lacking := sorted(needed.difference(options)):
                raise ReplayError(f"{where}: group {number} has no {', '.join(lacking)}")
            members = [self._parameters[name] for name in names]
            if why := options_refusal(self._kind, options, members):
                raise ReplayError(f"{where}: group {number}: {why}")

    def _check_scaler(self, where: str, update: Update, momentum: set[str]) -> None:
        scaler = {"grad_scale": update.grad_scale, "found_inf": update.found_inf}
        given = {name: tensor for name, tensor in scaler.items() if tensor is not None}
        for name, tensor in given.items():
            if tensor.numel() != 1:
                raise ReplayError(f"{where}: {name} has {tensor.numel()} elements, not 1")
        for names, options in zip(self.names, update.groups, strict=True):
            concerned = [name for name in names if name in update.gradients]
            if given and concerned and not options.get("fused"):
                raise ReplayError(f"{where}: {' and '.join(given)} for a group that is not fused")
            if self._kind is not SGD or not options.get("momentum"):
                continue
            lost = [name for name in concerned if name not in momentum]
            if lost and update.skipped:
                raise ReplayError(
                    f"{where}: a scaler skipped the first step of fused SGD, after which torch "
                    f"leaves the momentum uninitialised: {', '.join(lost)}",
                    hint="capture a new base after it",
                )
            momentum.update(concerned)

    def _has_same_layout(self, name: str, gradient: Gradient) -> bool:
        """Return True if a gradient has the memory layout of its parameter."""
        parameter = self._parameters[name]
        if not isinstance(gradient, torch.Tensor):
            return bool(parameter.is_contiguous())
        return same_strides(parameter.shape, parameter.stride(), gradient.stride())

    def _mismatch(self, name: str, gradient: Gradient) -> str | None:
        """Return why this cannot be the gradient of that parameter, or None."""
        parameter = self._parameters.get(name)
        if parameter is None:
            return f"gradient of {name!r}, which is not one of its parameters"
        if gradient.shape != parameter.shape:
            return (
                f"gradient of {name!r} has shape {list(gradient.shape)}, "
                f"the parameter {list(parameter.shape)}"
            )
        if not is_widening(gradient.dtype, parameter.dtype):
            return f"gradient of {name!r} is {gradient.dtype}, the parameter {parameter.dtype}"
        wanted = torch.sparse_coo if self._kind is SparseAdam else torch.strided
        if gradient.layout != wanted:
            return f"gradient of {name!r} is {gradient.layout}; only {wanted} can be replayed here"
        return None


def _check_order(updates: Sequence[Update], *, after: int | None, key: str | None) -> None:
    """Refuse updates that are not of one optimizer with ascending LSNs.

    Args:
        updates: updates to apply.
        after: LSN of the last applied update; None: there was none.
        key: key of the optimizer; None: not known yet.

    Raises:
        ReplayError: names the first update that is out of order.
    """
    for update in updates:
        if after is not None and update.lsn <= after:
            raise ReplayError(f"update {update.lsn} cannot follow update {after}")
        if key is not None and update.optimizer != key:
            raise ReplayError(f"update {update.lsn} is one of {update.optimizer!r}, not of {key!r}")
        key = update.optimizer
        after = update.lsn


def _tensors_of(
    state: Mapping[str, Mapping[str, Any]],
) -> dict[tuple[str, str], torch.Tensor]:
    """Return the tensors of an optimizer's state, by parameter and key."""
    return {
        (name, key): value
        for name, values in state.items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def _check_names(
    names: Sequence[Sequence[str]],
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse names, tensors, state and groups that do not fit together."""
    flat_names = [name for members in names for name in members]
    if len(names) != len(groups):
        raise ReplayError(f"{len(names)} groups of parameters, {len(groups)} of options")
    if doubled := sorted(name for name, times in Counter(flat_names).items() if times > 1):
        raise ReplayError(f"parameters listed more than once: {doubled}")
    if missing := [name for name in flat_names if name not in tensors]:
        raise ReplayError(f"no tensors of parameters {missing}")
    if unknown := sorted(set(state).difference(flat_names)):
        raise ReplayError(f"state of parameters that are in no group: {unknown}")


def _disjoint(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if no two tensors share memory; otherwise the order of updates would matter."""
    spans = []
    for tensor in tensors:
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((count - 1) * step for count, step in steps)
            # Spans are compared, so tensors whose elements only interleave count as sharing memory.
            begin = tensor.data_ptr()
            spans.append((begin, begin + (last + 1) * tensor.element_size()))
    spans.sort()
    return all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def _unsupported(kind: type[Optimizer], why: str) -> UnsupportedStateError:
    name = kind_name(kind)
    return UnsupportedStateError(f"{name} cannot be replayed: {why}", leaves=((name, why),))
