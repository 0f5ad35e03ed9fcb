"""Gradients whose copies continue after their update (GoCkpt, section 4.2.4): held, guarded,
checked.

A gradient that the program drops (``zero_grad()``, or ``p.grad = None``) keeps its values while a
reference to it exists. One that is not dropped is overwritten in place: by ``zero_grad`` with
``set_to_none=False``, or by the next backward, which adds to it. Both wait here for its copy.

Gradients in larger memory (DDP's buckets, flat buffers) or in memory of a CUDA graph may be
overwritten without either, and are not held: their update waits for the copy. Other early writes
are found by the version counter, read when the copy is made or when the first guarded writer is
admitted, whichever is sooner, and by comparing a few elements with the copy."""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.capture import Transfer, on_cuda
from everstep.capture.spot_check import SpotCheck
from everstep.errors import DeadlineError
from everstep.state.layout import GRADIENT, ShardLayout
from everstep.state.providers.modules import unwrap
from everstep.state.training_state import State
from everstep.trainer.base import Saver
from everstep.trainer.multistep.window import Window

_SAMPLED_GRADIENTS = 32  # gradients compared per update: views of all would take milliseconds


def own_their_memory(gradients: Sequence[torch.Tensor]) -> bool:
    """Return True if each gradient has memory of its own."""
    return all(
        # A view of all of its base has the size of the storage, too: only _base shows it.
        g._base is None and g.untyped_storage().nbytes() == g.numel() * g.element_size()
        for g in gradients
    )


class GraphMemory:
    """Private memory pools of CUDA's caching allocator, used by CUDA graphs (also by
    ``torch.compile``).

    A replay of a graph overwrites gradients there, whatever refers to them, and calls no hook;
    each of them looks as if it had memory of its own. The pools are looked up when needed and
    again after a device has allocated memory: a look-up takes milliseconds, and graphs are
    captured in the first steps of training."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []
        self._allocations: dict[torch.device, Any] = {}  # by device, at the last look-up

    def has(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if any of these tensors is in a private pool."""
        there = [tensor for tensor in tensors if on_cuda(tensor)]
        if not there:
            return False
        given = {
            device: _allocation_counts(device) for device in {tensor.device for tensor in there}
        }
        if any(
            now is None or self._allocations.get(device) != now for device, now in given.items()
        ):
            # Other devices are looked up again only when one of their tensors is checked.
            self._spans = _private_pool_spans()
            self._allocations.update(given)
        return any(self._holds(tensor.data_ptr()) for tensor in there)

    def _holds(self, address: int) -> bool:
        index = bisect.bisect_right(self._spans, address, key=itemgetter(0))
        return index > 0 and address < self._spans[index - 1][1]


def _allocation_counts(device: torch.device) -> Any:
    """Return the number and size of the allocator's requests to a device; None if unavailable.

    If neither has changed, no private pool was created since."""
    with contextlib.suppress(KeyError, RuntimeError, TypeError):
        found = torch.cuda.memory_stats_as_nested_dict(device)
        return tuple(found[key]["all"]["allocated"] for key in ("segment", "reserved_bytes"))
    return None


def _private_pool_spans() -> list[tuple[int, int]]:
    """Return the address ranges of private pools, in order; everything if unavailable."""
    try:
        segments = _segments()
        return sorted(
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in segments
            # Pool (0, 0) is that of ordinary allocations; graphs and MemPools have other ids.
            if tuple(segment["segment_pool_id"]) != (0, 0)
        )
    except (KeyError, RuntimeError):
        return [(0, sys.maxsize)]


def _segments() -> list[dict[str, Any]]:
    """Return the allocator's segments of all devices, without the (long) history of allocations."""
    snapshot: Any = torch.cuda.memory_snapshot
    # Older versions of torch do not have this argument.
    if "include_traces" in inspect.signature(snapshot).parameters:
        found: Any = snapshot(include_traces=False)
    else:
        found = snapshot()
    return cast("list[dict[str, Any]]", found)


class GradientCheck:
    """Version counters of gradients, and a few elements of some, at the time they are consumed.

    Args:
        named: gradients by their names in the record.
        layout: layout of the record.
        turn: selects other gradients with each next number, if there are many.
    """

    def __init__(self, named: Mapping[str, torch.Tensor], layout: ShardLayout, turn: int) -> None:
        self._gradients = list(named.values())
        self._names = list(named)
        self._versions = self._now()
        self._seen: list[
            list[int]
        ] = []  # versions when writers were admitted; the first list counts
        self._end = max(place.end for place in layout.placed if place.entry.name in named)
        every = -(-len(named) // _SAMPLED_GRADIENTS)
        self._spots = SpotCheck([(layout, 0)], named, frozenset(self._names[turn % every :: every]))
        self._sample = self._spots.take()

    def copied(self, end: int) -> None:
        """Read the counters if ``end`` bytes of the record complete the gradients."""
        if end >= self._end:
            self.see()

    def see(self) -> None:
        """Read the counters, once: from now on writers may be admitted."""
        # Several threads may get here at once, without a lock: the first list counts, and all of it
        # was read before its thread admitted any writer.
        if not self._seen:
            self._seen.append(self._now())

    def torn(self, block: torch.Tensor) -> str | None:
        """Return the name of a gradient written to before it was copied into ``block``, or None."""
        self.see()
        for name, then, now in zip(self._names, self._versions, self._seen[0], strict=True):
            if now != then:
                return name.removeprefix(GRADIENT)
        # Fetched only here, in the lane's thread: training does not wait for the device.
        torn = self._spots.differing(self._sample, block)
        return None if torn is None else torn.removeprefix(GRADIENT)

    def _now(self) -> list[int]:
        return [gradient._version for gradient in self._gradients]


@dataclass(frozen=True, slots=True)
class CopyGate:
    """Hold training back until copies of a window are made, but not for ever.

    Attributes:
        saver: counts the time that training waits.
        timeout_s: longest wait for one copy, in seconds.
    """

    saver: Saver
    timeout_s: float

    def wait(self, window: Window, transfer: Transfer, end: int, cause: str) -> None:
        """Block until ``end`` bytes are copied; after the timeout training goes on, and the window
        is void.

        Args:
            cause: cause of the wait in ``stall_s``.
        """
        with self.saver.stalled(cause):
            if not transfer.gate(end, self.timeout_s):
                what = "gradients" if cause == "gradients" else "the state"
                late = f"copying {what} to host memory took longer than {self.timeout_s:g} s"
                window.fail(DeadlineError(late, step=window.identity.step))


@dataclass(eq=False, slots=True)
class _Copying:
    """Gradients of one update that are being copied.

    Attributes:
        window: window that needs them.
        key: key of the optimizer.
        transfer: the copy.
        end: size of the gradients, in bytes.
        gradients: gradients by ``id(parameter)``.
        on_device: some are not in host memory.
        check: check of the gradients.
    """

    window: Window
    key: str
    transfer: Transfer
    end: int
    gradients: Mapping[int, torch.Tensor]
    on_device: bool
    check: GradientCheck | None


class HeldGradients:
    """Gradients that are not copied yet, and guards that block writers until they are.

    Args:
        state: state whose optimizers and modules are guarded.
        gate: blocks until copied.
    """

    def __init__(self, state: State, gate: CopyGate) -> None:
        self._state = state
        self._gate = gate
        self._pid = os.getpid()
        self._copying: list[_Copying] = []
        self._hooks: dict[int, Any] = {}
        self._guards: list[_ZeroGradGuard] = []

    def hold(
        self,
        window: Window,
        key: str,
        transfer: Transfer,
        end: int,
        held: Sequence[tuple[torch.Tensor, torch.Tensor]],
        check: GradientCheck | None,
    ) -> None:
        """Block writers of these gradients until their copies are made.

        Args:
            window: window that needs them.
            key: key of the optimizer that has consumed them.
            transfer: the copies.
            end: size of the gradients, in bytes.
            held: parameters and their gradients.
            check: check of the gradients as they were consumed.
        """
        gradients = {id(parameter): gradient for parameter, gradient in held}
        on_device = not all(gradient.is_cpu for _, gradient in held)
        self._copying.append(_Copying(window, key, transfer, end, gradients, on_device, check))
        for parameter, _ in held:
            # The hook keeps the parameter alive, so no other tensor can get its id.
            if id(parameter) not in self._hooks:
                # Runs before backward adds to the gradient.
                hook = functools.partial(self._before_adding, parameter)
                register: Any = parameter.register_hook
                self._hooks[id(parameter)] = register(hook)
        if not self._guards:
            self._guards = [_ZeroGradGuard(owner, self.gate) for owner in self._owners()]

    def gate(self, key: str | None = None, *, keep: int = 0) -> None:
        """Block until the copies are made.

        Args:
            key: key of an optimizer, to wait only for what it has consumed; None for all.
            keep: number of latest updates not to wait for.
        """
        if os.getpid() != self._pid:  # nothing is copied in a forked child
            return
        due = [one for one in self._copying if key in (None, one.key)]
        for one in due[: max(0, len(due) - keep)]:
            if not (one.on_device and one.transfer.complete):
                self._gate.wait(one.window, one.transfer, one.end, "gradients")
            if one.check is not None:
                one.check.see()
            # On a device only the current stream has waited: a writer in another must wait, too.
            if not one.on_device or one.transfer.complete:
                with contextlib.suppress(ValueError):  # another thread may have removed it
                    self._copying.remove(one)

    @property
    def open(self) -> bool:
        """Return True if a writer may have to wait."""
        return bool(self._copying)

    def settle(self) -> None:
        """Remove the guards if all copies are made; does not wait."""
        if self._copying:
            self._copying = [one for one in self._copying if not one.transfer.complete]
        if not self._copying and (self._hooks or self._guards):
            self.release()

    def release(self) -> None:
        """Wait for all copies, and remove the guards."""
        self.gate()
        for hook in self._hooks.values():
            hook.remove()
        for guard in self._guards:
            guard.remove()
        self._hooks = {}
        self._guards = []

    def _before_adding(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        for one in list(self._copying):  # another thread may remove entries meanwhile
            held = one.gradients.get(id(parameter))
            # A gradient that the program has dropped is referred to only from here: backward makes
            # a new one, and need not wait.
            if held is not None and parameter.grad is held:
                self.gate()
                return

    def _owners(self) -> list[Any]:
        modules = [value for value in self._state.values.values() if isinstance(value, nn.Module)]
        inner = [unwrap(module) for module in modules]
        owners: list[Any] = [*self._state.optimizers.values(), *modules, *inner]
        return list({id(owner): owner for owner in owners}.values())


class _ZeroGradGuard:
    """Replacement of ``zero_grad`` of one optimizer or module, which waits before zeroing in place.

    A copy of the owner does not inherit it."""

    def __init__(self, owner: Any, gate: Callable[[], None]) -> None:
        self._owner = owner
        self._gate = gate
        self._own = vars(owner).get("zero_grad")
        kind = Optimizer if isinstance(owner, Optimizer) else nn.Module
        # An override may zero in place whatever set_to_none says.
        self._is_default = self._own is None and type(owner).zero_grad is kind.zero_grad
        self._zero_grad = owner.zero_grad
        vars(owner)["zero_grad"] = self

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Zero the gradients, after the held copies if they are zeroed in place."""
        to_none = args[0] if args else options.get("set_to_none", True)
        if not to_none or not self._is_default:
            self._gate()
        return self._zero_grad(*args, **options)

    def remove(self) -> None:
        """Restore the owner's ``zero_grad``."""
        attributes = vars(self._owner)
        # The program, or another Checkpointer, may have replaced it since.
        if attributes.get("zero_grad") is self:
            del attributes["zero_grad"]
            if self._own is not None:
                attributes["zero_grad"] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # deepcopy() enters the copy of the owner in memo before it copies the owner's attributes.
        copied = memo.get(id(self._owner), self._owner)
        return types.MethodType(type(self._owner).zero_grad, copied)

    def __reduce__(self) -> Any:
        return types.MethodType, (type(self._owner).zero_grad, self._owner)
