"""Self-tests of the fast paths: does this torch give the bits of ``step()`` for them?

torch does not promise the results of its functions on blocks. So before the first use, once for
each kind of configuration, small random tensors are updated by ``step()`` and by the fast path, and
compared.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from everstep.compress.quantized import BLOCK_NUMEL
from everstep.replay.exactness import HALVES, variant_of
from everstep.replay.fused.blocked import ALIGNMENT_ELEMENTS, UNFUSED_ELEMENTS, Blocked
from everstep.replay.fused.slices import Kernel, Sliced
from everstep.replay.optimizer_step import build, step_over
from everstep.replay.updates import Update

__all__ = [
    "LARGE",
    "LONG",
    "MIXED",
    "SMALL",
    "Case",
    "FastPath",
    "Results",
    "blocked_is_exact",
    "compiled_is_exact",
    "kernel_for",
    "nearly_same",
    "run_trial",
    "same_bits",
    "sliced_is_exact",
]

_TURNED = "turned"
_SPREAD = "line"
_MIXED = "mixed"
Shapes = Mapping[str, tuple[int, ...]]
SMALL: Shapes = {
    "scalar": (),
    "empty": (0,),
    "small": (7,),
    _SPREAD: (2 * ALIGNMENT_ELEMENTS + 37,),
    "square": (5, ALIGNMENT_ELEMENTS),
    _TURNED: (9, 40),
}
MIXED: Shapes = {**SMALL, _MIXED: (7, 9)}
"""With one parameter whose gradients have another memory order; small enough for a single block."""
LARGE: Shapes = {"large": (UNFUSED_ELEMENTS + ALIGNMENT_ELEMENTS + 37,)}
LONG: Shapes = {**SMALL, "long": (2 * 65536 + 37,), "odd": (1003,), "longer": (3 * 65536,)}
"""Longer than the chunks that CUDA's kernels over lists of tensors cut them into."""

_UPDATES = 4
# Some hundred roundings of float32. CUDA's fused Adam takes 1 - beta2 in float32, too, which for
# 0.999 is off by 1.3e-5 of it.
_CLOSE = 3e-5
_WIDE = (torch.float32, torch.float64, torch.bfloat16)

Results = Sequence[Sequence[torch.Tensor]]
"""State after ``step()``, and after the fast path."""


class FastPath(NamedTuple):
    """Method of replay other than ``step()``.

    Attributes:
        name: name for messages.
        instead: method used if this one is not exact, for messages.
        make: builds it for an optimizer and its names, with tiny blocks or slices or with real
            ones.
        shapes: tensors that it is tried on, each with True for tiny blocks.
    """

    name: str
    instead: str
    make: Callable[[Optimizer, Sequence[Sequence[str]], bool], Blocked | Sliced]
    shapes: Sequence[tuple[bool, Shapes]]


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that may decide which code of torch runs.

    Attributes:
        kind: one of :data:`~everstep.replay.functional.KINDS`.
        options: hyperparameters of a group. Of values it matters only if they are zero, one, or at
            most
            a half.
        scaled: presence of a scaler's ``grad_scale`` and ``found_inf``.
        dtype: dtype of the parameters.
        device: device of the parameters.
    """

    kind: type[Optimizer]
    options: Mapping[str, Any]
    scaled: tuple[bool, bool]
    dtype: torch.dtype
    device: torch.device

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equivalent cases."""
        options = tuple(sorted((key, _form(value)) for key, value in self.options.items()))
        kind = self.device.type
        model = torch.cuda.get_device_name(self.device) if kind == "cuda" else kind
        return torch.__version__, model, self.kind, self.dtype, self.scaled, options


def _form(value: Any) -> str:
    """Return the properties of a value by which torch, or a kernel, may choose its code."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"tensor of {value.dtype}"
    if isinstance(value, (int, float)):
        return f"{type(value).__name__} {value != 0} {value == 1} {abs(value) <= 0.5}"
    if isinstance(value, (tuple, list)):
        return str([_form(item) for item in value])
    return type(value).__name__


def run_trial(way: FastPath, case: Case) -> list[Results] | None:
    """Return the results of ``step()`` and of a fast path, for each set of shapes; None if one of
    them fails."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # ``thread_dependence`` covers the number of threads
    try:
        return [_both(way, case, tiny, shapes) for tiny, shapes in way.shapes]
    except Exception as error:  # of torch, or of a compiler
        _log.debug("replay: self-test of %s, %s: %r", case.kind.__name__, way.name, error)
        return None
    finally:
        torch.set_num_threads(threads)


def _both(way: FastPath, case: Case, tiny: bool, shapes: Shapes) -> Results:
    if case.dtype in HALVES:  # blocks do not take those
        shapes = {name: shape for name, shape in shapes.items() if name != _MIXED}
    # A generator of its own: training's random numbers must not change.
    drawn = torch.Generator().manual_seed(0)
    start = _tensors(shapes, case.dtype, drawn)
    updates = list(_updates(case, shapes, drawn))
    results = []
    for own in (True, False):
        named = {name: tensor.clone().to(case.device) for name, tensor in start.items()}
        optimizer = build(case.kind, [list(named.values())], updates[0].groups)
        step_over(optimizer, named, updates[0])  # creates the state
        if own:
            for update in updates[1:]:
                step_over(optimizer, named, update)
        else:
            path = way.make(optimizer, [list(named)], tiny)
            if not all(path.takes(update) for update in updates[1:]):
                raise RuntimeError("the fast path does not take such updates")
            path.run(updates[1:])
        results.append(_state(optimizer, named))
    return results


def _updates(case: Case, shapes: Shapes, drawn: torch.Generator) -> Iterator[Update]:
    options = {key: _telling(key, value) for key, value in case.options.items()}
    for lsn in range(1, _UPDATES + 1):
        gradients = _tensors(shapes, case.dtype, drawn)
        if _MIXED in gradients:
            gradients[_MIXED] = gradients[_MIXED].t().contiguous().t()
        if lsn == 3:
            gradients.pop("square", None)
        if _SPREAD in gradients and case.dtype in _WIDE:  # squares of some are denormal
            spread = torch.logspace(-24, 12, gradients[_SPREAD].numel(), device="cpu")
            gradients[_SPREAD] = (gradients[_SPREAD] * spread).to(case.dtype)
        scale = torch.tensor(4.0, device="cpu") if case.scaled[0] else None
        inf = torch.tensor(0.0, device="cpu") if case.scaled[1] else None
        yield Update(lsn, "", (options,), gradients, scale, inf)


def _telling(key: str, value: Any) -> Any:
    """Return another value of a hyperparameter, equivalent by :func:`_form`, that does not hide
    rounding. A learning rate from the first steps of a warm-up would, and so would a factor of
    0.999, which leaves any bfloat16 unchanged."""
    if key == "lr" and isinstance(value, torch.Tensor):
        return torch.full_like(value, 0.13)
    if isinstance(value, tuple | list):
        return type(value)(_telling(key, item) for item in value)
    if key not in ("lr", "betas", "momentum", "dampening", "weight_decay"):
        return value
    if not isinstance(value, float) or value in (0, 1):
        return value
    return math.copysign(0.13 if abs(value) <= 0.5 else 0.83, value)


def _tensors(shapes: Shapes, dtype: torch.dtype, drawn: torch.Generator) -> dict[str, torch.Tensor]:
    found = {
        name: torch.randn(shape, generator=drawn, device="cpu").to(dtype)
        for name, shape in shapes.items()
    }
    if _TURNED in found:
        found[_TURNED] = found[_TURNED].t()
    return found


def _state(optimizer: Optimizer, named: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    tensors = list(named.values())
    for tensor in named.values():
        state = optimizer.state.get(tensor, {})
        tensors += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    return [tensor.detach().cpu().contiguous().reshape(-1) for tensor in tensors]


def same_bits(results: Results) -> bool:
    """Return True if both results are equal in every bit."""
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(*results, strict=True)
    )


def nearly_same(results: Results) -> bool:
    """Return True if the results differ by no more than roundings of float32."""
    return all(
        torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE)
        for one, other in zip(*results, strict=True)
    )


_log = logging.getLogger("everstep")
_proven: dict[tuple[Any, ...], bool] = {}
_kernels: dict[tuple[Any, ...], tuple[Kernel, bool] | None] = {}

_CPU = torch.device("cpu")


def _blocks(optimizer: Optimizer, names: Any, tiny: bool, compiled: bool = False) -> Blocked:
    return Blocked(
        optimizer,
        names,
        threads=1,
        block_elements=ALIGNMENT_ELEMENTS if tiny else None,
        compiled=lambda update, number, dtype: compiled,
    )


def _slices(optimizer: Optimizer, names: Any, tiny: bool, kernel: Kernel | None = None) -> Sliced:
    elements = BLOCK_NUMEL if tiny else None
    return Sliced(optimizer, names, elements=elements, kernel=lambda update, number: kernel)


_WHOLE = "whole tensors are updated instead"
_BLOCKS = FastPath("blocks", _WHOLE, _blocks, [(True, MIXED)])
_COMPILED = FastPath(
    "compiled passes over blocks",
    "torch's own functions are called",
    functools.partial(_blocks, compiled=True),
    # Blocks of the real size as well: operators may choose code by size.
    [(True, MIXED), (False, LARGE)],
)
_SLICES = FastPath("slices", _WHOLE, _slices, [(True, SMALL), (False, LONG)])


def blocked_is_exact(
    kind: type[Optimizer], update: Update, number: int, dtype: torch.dtype
) -> bool:
    """Return True if the blocked path gives the bits of ``kind.step()`` for updates like this one.

    Args:
        kind: one of :data:`~everstep.replay.functional.KINDS`.
        update: determines the hyperparameters and the presence of a scaler's tensors.
        number: number of the parameter group.
        dtype: dtype of the parameters, on the CPU.
    """
    return _proven_for(_BLOCKS, _case(kind, update, number, dtype, _CPU))


def compiled_is_exact(
    kind: type[Optimizer], update: Update, number: int, dtype: torch.dtype
) -> bool:
    """Return True if the blocked path does so with programs instead of torch's functions
    (``programs``).

    Args:
        kind, update, number, dtype: as for :func:`blocked_is_exact`.
    """
    return _proven_for(_COMPILED, _case(kind, update, number, dtype, _CPU))


def sliced_is_exact(
    kind: type[Optimizer], update: Update, number: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return True if slices (``slices``) give the bits of ``kind.step()`` on a device.

    Args:
        kind, update, number, dtype: as for :func:`blocked_is_exact`.
        device: of the parameters.
    """
    return _proven_for(_SLICES, _case(kind, update, number, dtype, device))


def kernel_for(
    kind: type[Optimizer], update: Update, number: int, device: torch.device, *, inexact: bool
) -> tuple[Kernel, bool] | None:
    """Return a kernel to use instead of torch's functions on slices of float32.

    Args:
        kind, update, number, device: as for :func:`sliced_is_exact`.
        inexact: accept a kernel that differs in the last bits.

    Returns:
        The kernel, and True if it gives the bits of ``kind.step()``; None if there is no exact one
        or,
        if ``inexact``, no close one.
    """
    case = _case(kind, update, number, torch.float32, device)
    key = (inexact, *case.key)
    if key not in _kernels:
        _kernels[key] = _try_kernels(case, inexact)
    return _kernels[key]


def _try_kernels(case: Case, inexact: bool) -> tuple[Kernel, bool] | None:
    module = _kernels_on(case.device)
    if module is None:
        return None
    close: Kernel | None = None
    for kernel in module.flavours(case.kind, variant_of(case.options, case.device.type)):
        calls: list[int] = []

        def counted(*arguments: Any, own: Kernel = kernel, calls: list[int] = calls) -> None:
            calls.append(1)
            own(*arguments)

        way = _SLICES._replace(name="kernels", make=functools.partial(_slices, kernel=counted))
        found = run_trial(way, case)
        if found is None or not calls:
            continue
        if all(map(same_bits, found)):
            return kernel, True
        if close is None and all(map(nearly_same, found)):
            close = kernel
    _log.debug("replay: no kernel is bit-equal to %s.step()", case.kind.__name__)
    return (close, False) if inexact and close is not None else None


def _kernels_on(device: torch.device) -> ModuleType | None:
    """Return the module of kernels, if they can run."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    try:
        return importlib.import_module("everstep.replay.fused.kernels")
    except Exception as error:  # of a triton that does not fit what is installed
        _log.debug("replay: no kernels: %r", error)
        return None


def _proven_for(way: FastPath, case: Case) -> bool:
    key = (way.name, *case.key)
    if key not in _proven:
        found = run_trial(way, case)
        _proven[key] = found is not None and all(map(same_bits, found))
        if not _proven[key]:
            _log.warning(
                "replay: %s of %s (%s) are not bit-equal to its step() on torch %s; "
                "%s, more slowly",
                way.name,
                case.kind.__name__,
                case.dtype,
                torch.__version__,
                way.instead,
            )
    return _proven[key]


def _case(
    kind: type[Optimizer], update: Update, number: int, dtype: torch.dtype, device: torch.device
) -> Case:
    scaled = (update.grad_scale is not None, update.found_inf is not None)
    return Case(kind, update.groups[number], scaled, dtype, device)
