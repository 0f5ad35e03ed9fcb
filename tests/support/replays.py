"""What the tests of replay share: torch itself trains, and says what replay has to give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.replay.engine import Replayer, ReplayOptions
from everstep.replay.updates import Gradient, Packed, Update

__all__ = [
    "SHAPES",
    "Moment",
    "Run",
    "assert_same_bits",
    "batches",
    "bits",
    "record",
    "replayed",
    "replayer_at",
    "tensors_of",
]

SHAPES: dict[str, tuple[int, ...]] = {
    "weight": (13, 31),
    "bias": (13,),
    "scale": (),
    "none": (0, 4),
    "line": (64 * 5 + 37,),
    "image": (4, 6, 5, 3),
    "frozen": (5,),
}
"""With blocks of 64 elements: some are one block, some are several, some are neither."""

FROZEN = ("frozen",)
State = dict[str, dict[str, Any]]
Groups = Callable[[int, list[dict[str, Any]]], None]


@dataclass
class Moment:
    """Everything that replay starts from, or must arrive at."""

    tensors: dict[str, torch.Tensor]
    state: State
    groups: tuple[dict[str, Any], ...]


@dataclass
class Run:
    """A training by torch: what each call consumed, and the state before each and at the end."""

    optimizer: Optimizer
    names: list[list[str]]
    updates: list[Update] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The live ones, by name."""
        named: dict[str, torch.Tensor] = {}
        for group, members in zip(self.optimizer.param_groups, self.names, strict=True):
            named.update(zip(members, group["params"], strict=True))
        return named

    def moment(self) -> Moment:
        """A copy of the state as it is now."""
        return Moment(
            {name: parameter.detach().clone() for name, parameter in self.parameters.items()},
            {
                name: copy.deepcopy(dict(self.optimizer.state[parameter]))
                for name, parameter in self.parameters.items()
                if parameter in self.optimizer.state
            },
            options_of(self.optimizer),
        )


def options_of(optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
    return tuple(
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    )


def tensors_of(
    dtype: torch.dtype = torch.float32,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """New random tensors; ``image`` is channels-last."""
    found = {name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()}
    if "image" in found:
        found["image"] = found["image"].to(memory_format=torch.channels_last)
    return found


def record(
    make: Callable[[list[Any]], Optimizer],
    *,
    dtype: torch.dtype = torch.float32,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    steps: int = 12,
    schedule: Groups | None = None,
    scaler: Callable[[int], tuple[torch.Tensor | None, torch.Tensor | None]] | None = None,
    gradients: Callable[[int], dict[str, torch.Tensor]] | None = None,
    late: bool = True,
    key: str = "optimizer",
    device: str = "cpu",
) -> Run:
    """Trains two groups of parameters on random gradients; some are None now and then.

    Args:
        late: also in the first step. torch's fused SGD with momentum cannot do that.
    """
    start = tensors_of(dtype, shapes, device)
    names = [group for group in (list(start)[::2], list(start)[1::2]) if group]
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in start.items()}
    for name in set(FROZEN).intersection(parameters):
        parameters[name].requires_grad_(False)
    run = Run(make([{"params": [parameters[n] for n in group]} for group in names]), names)
    for step in range(steps):
        run.moments.append(run.moment())
        if schedule is not None:
            schedule(step, run.optimizer.param_groups)
        given = tensors_of(dtype, shapes, device) if gradients is None else gradients(step)
        for name in FROZEN:
            given.pop(name, None)
        for number, name in enumerate(list(given)):
            absent = (step + number) % 5 == 3 and (step > 0 or late)
            if gradients is None and absent and len(given) > 1:
                del given[name]
        scale, inf = (None, None) if scaler is None else scaler(step)
        logged = {name: gradient.clone() for name, gradient in given.items()}
        run.updates.append(Update(step + 1, key, options_of(run.optimizer), logged, scale, inf))
        for name, parameter in parameters.items():
            parameter.grad = given.get(name)
        if scale is not None or inf is not None:
            run.optimizer.grad_scale, run.optimizer.found_inf = scale, inf
        run.optimizer.step()
        if scale is not None or inf is not None:
            del run.optimizer.grad_scale, run.optimizer.found_inf
    run.moments.append(run.moment())
    return run


def replayer_at(run: Run, step: int, **options: Any) -> tuple[Replayer, Moment]:
    """A replayer over a copy of the state before ``step``, and that copy."""
    base = copy.deepcopy(run.moments[step])
    return (
        Replayer(
            type(run.optimizer),
            run.names,
            base.tensors,
            base.state,
            base.groups,
            ReplayOptions(**options),
        ),
        base,
    )


def batches(updates: Sequence[Update], size: int) -> Iterator[Sequence[Update]]:
    """``updates`` in batches; 0: all in one."""
    size = size or max(len(updates), 1)
    for start in range(0, len(updates), size):
        yield updates[start : start + size]


def replayed(run: Run, step: int, size: int, **options: Any) -> Replayer:
    """Replays a run from ``step`` on, and checks that it ends where torch did."""
    replayer, base = replayer_at(run, step, **options)
    before = {u.lsn: {n: bits(g) for n, g in u.gradients.items()} for u in run.updates}
    for batch in batches(run.updates[step:], size):
        replayer.apply(batch)
    end = run.moments[-1]
    assert_same_bits(base.tensors, end.tensors)
    assert_same_bits(replayer.state, end.state)
    for name, values in base.state.items():  # in place
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                assert replayer.state[name][key] is value
    for update in run.updates:  # a log is not written to
        for name, gradient in update.gradients.items():
            assert torch.equal(bits(gradient), before[update.lsn][name])
    return replayer


def bits(tensor: Gradient) -> torch.Tensor:
    """The bytes of a tensor in logical order."""
    if isinstance(tensor, Packed):
        tensor = tensor.dense()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return torch.cat([bits(tensor.indices()), bits(tensor.values())])
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(got: Any, wanted: Any, where: str = "") -> None:
    """Equal in every bit, every dtype, every stride, every key."""
    if isinstance(wanted, Mapping):
        assert set(got) == set(wanted), where
        for key in wanted:
            assert_same_bits(got[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, torch.Tensor):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), where
        assert got.stride() == wanted.stride(), where
        assert torch.equal(bits(got), bits(wanted)), where
    else:
        assert type(got) is type(wanted), where
        assert got == wanted, where
