"""Trials of a way to replay: small random tensors are updated by ``step()``, and by it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from everstep.replay.exactness import HALVES
from everstep.replay.fused.blocked import ALIGNMENT_ELEMENTS, UNFUSED_ELEMENTS, Blocked
from everstep.replay.fused.slices import Sliced
from everstep.replay.own import build, step_over
from everstep.replay.updates import Update

__all__ = [
    "LARGE",
    "LONG",
    "MIXED",
    "SMALL",
    "Case",
    "Results",
    "Way",
    "nearly_same",
    "same_bits",
    "tried",
]

_log = logging.getLogger("everstep")

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
"""With one whose gradients lie in another order than it; small enough for a single block."""
LARGE: Shapes = {"large": (UNFUSED_ELEMENTS + ALIGNMENT_ELEMENTS + 37,)}
LONG: Shapes = {**SMALL, "long": (2 * 65536 + 37,), "odd": (1003,), "longer": (3 * 65536,)}
"""Longer than the chunks that CUDA's kernels over lists of tensors cut them into."""

_UPDATES = 4
# Some hundred roundings of float32. CUDA's fused Adam takes 1 - beta2 in float32, too, which for
# 0.999 is off by 1.3e-5 of it.
_CLOSE = 3e-5
_WIDE = (torch.float32, torch.float64, torch.bfloat16)

Results = Sequence[Sequence[torch.Tensor]]
"""The state that ``step()`` leaves, and that which the other way leaves."""


class Way(NamedTuple):
    """A way to replay that is not ``step()``.

    Attributes:
        name, instead: what it is, and what is done where it is not exact, in words.
        make: of an optimizer and its names; with tiny blocks or slices, or as large as ever.
        shapes: of what it is tried on: tiny blocks or not, and which tensors.
    """

    name: str
    instead: str
    make: Callable[[Optimizer, Sequence[Sequence[str]], bool], Blocked | Sliced]
    shapes: Sequence[tuple[bool, Shapes]]


@dataclass(frozen=True, slots=True)
class Case:
    """What may decide which code of torch runs.

    Attributes:
        kind: one of :data:`~everstep.replay.forms.KINDS`.
        options: hyperparameters of a group. Their values do not matter: whether they are zero,
            one, or at most a half.
        scaled: whether there are a scaler's ``grad_scale`` and ``found_inf``.
        dtype: of the parameters.
        device: likewise.
    """

    kind: type[Optimizer]
    options: Mapping[str, Any]
    scaled: tuple[bool, bool]
    dtype: torch.dtype
    device: torch.device

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for cases that are alike."""
        options = tuple(sorted((key, _form(value)) for key, value in self.options.items()))
        kind = self.device.type
        model = torch.cuda.get_device_name(self.device) if kind == "cuda" else kind
        return torch.__version__, model, self.kind, self.dtype, self.scaled, options


def _form(value: Any) -> str:
    """What torch, or a kernel, may choose its code by."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"tensor of {value.dtype}"
    if isinstance(value, (int, float)):
        return f"{type(value).__name__} {value != 0} {value == 1} {abs(value) <= 0.5}"
    if isinstance(value, (tuple, list)):
        return str([_form(item) for item in value])
    return type(value).__name__


def tried(way: Way, case: Case) -> list[Results] | None:
    """What ``step()`` and another way give, for each set of shapes; None: one of them fails."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what depends on it is asked elsewhere: ``thread_dependence``
    try:
        return [_both(way, case, tiny, shapes) for tiny, shapes in way.shapes]
    except Exception as error:  # of torch, or of a compiler
        _log.debug("replay: self-test of %s, %s: %r", case.kind.__name__, way.name, error)
        return None
    finally:
        torch.set_num_threads(threads)


def _both(way: Way, case: Case, tiny: bool, shapes: Shapes) -> Results:
    if case.dtype in HALVES:  # blocks do not take those
        shapes = {name: shape for name, shape in shapes.items() if name != _MIXED}
    drawn = torch.Generator().manual_seed(0)  # not the generator that training draws from
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
                raise RuntimeError("it does not take such updates")
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
    """Another value of a hyperparameter, alike by :func:`_form`: one that does not hide how it is
    rounded, or what it multiplies. A learning rate of a warm-up's first steps would, and so would a
    factor of 0.999, which leaves any bfloat16 as it is, whether it is rounded to one or not."""
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
    """Whether both are equal in every bit."""
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(*results, strict=True)
    )


def nearly_same(results: Results) -> bool:
    """Whether they differ by no more than roundings of float32 do."""
    return all(
        torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE)
        for one, other in zip(*results, strict=True)
    )
