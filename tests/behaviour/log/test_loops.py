"""Training loops that change under the log what an update reads: replay gives the same bits, or a
new base is taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import UnsupportedStateError
from everstep.options import LogOptions
from tests.support.world import forget

STEPS = 6
Step = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def world(fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    groups = [
        {"params": list(layer.parameters()), "lr": rate}
        for layer, rate in zip(model, (0.1, 0.001), strict=True)
    ]
    if fused:
        return model, torch.optim.AdamW(groups, fused=True)
    return model, torch.optim.SGD(groups, foreach=False)


def use_fused(optimizer: torch.optim.Optimizer, *, fused: bool) -> None:
    for group in optimizer.param_groups:
        group["fused"] = fused


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    tensors = dict(model.named_parameters())
    for number, values in enumerate(optimizer.state.values()):
        tensors |= {f"{number}.{key}": value for key, value in values.items()}
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


def opened(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> everstep.Checkpointer:
    forget(run)
    return everstep.Checkpointer(
        run,
        {"model": model, "optimizer": optimizer},
        method=everstep.Method(base="lazy", log="dense"),
        log=LogOptions(to="disk", batch_steps=1),
        keeper=everstep.KeeperOptions(process=False),
        every=1000,
        keep=10,
    )


def gradients(step: int, model: nn.Module) -> None:
    drawn = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=drawn)


def other_strides(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gradients(step, model)
    if step % 2:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.t()  # a fused kernel reads it as it lies in memory
    optimizer.step()


def other_dtype(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gradients(step, model)
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        parameter.grad_dtype = None  # of any
        parameter.grad = gradient.to(torch.bfloat16 if step % 2 else torch.float16)
    optimizer.step()


def one_value_many_times(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As ``torch.autograd.grad()`` gives it for a sum: all elements lie at one place."""
    gradients(step, model)
    for parameter in model.parameters():
        if parameter.dim() == step % 2 + 1:
            drawn = torch.Generator().manual_seed(step)
            parameter.grad = torch.randn(1, generator=drawn).expand(parameter.shape)
    optimizer.step()


def groups_there_and_back(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gradients(step, model)
    if step in (3, 5):
        optimizer.param_groups.reverse()
    optimizer.step()


def parameter_there_and_back(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The order of all parameters stays what it is."""
    first, second = (group["params"] for group in optimizer.param_groups)
    gradients(step, model)
    if step == 3:
        second.insert(0, first.pop())
    if step == 5:
        first.append(second.pop(0))
    optimizer.step()


def groups_in_one_update(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As they were again before the step is over."""
    gradients(step, model)
    if step == 4:
        optimizer.param_groups.reverse()
    optimizer.step()
    if step == 4:
        optimizer.param_groups.reverse()


def at_step_4(change: Callable[[nn.Module, torch.optim.Optimizer], None]) -> Step:
    def one_step(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        gradients(step, model)
        if step == 4:
            change(model, optimizer)
        optimizer.step()

    one_step.__name__ = change.__name__
    return one_step


@at_step_4
def loaded_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values["exp_avg"].zero_()
    optimizer.load_state_dict(state)


@at_step_4
def state_made_anew(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


@at_step_4
def one_moment_replaced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    values = list(optimizer.state.values())[-1]
    values["exp_avg_sq"] = torch.ones_like(values["exp_avg_sq"])


@at_step_4
def swapped_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first, second = (layer.weight for layer in model)
    first.data, second.data = second.data, first.data


@pytest.mark.thinned(18)
@pytest.mark.parametrize(
    ("one_step", "fused", "replayed"),
    [
        (other_strides, True, STEPS - 1),
        (other_dtype, False, STEPS - 1),
        (one_value_many_times, False, STEPS - 1),
        (groups_there_and_back, True, 1),
        (groups_there_and_back, False, 1),
        (parameter_there_and_back, True, 1),
        (groups_in_one_update, True, 2),
        (groups_in_one_update, False, 2),
        (loaded_state, True, 2),
        (state_made_anew, True, 2),
        (one_moment_replaced, True, 2),
        (swapped_parameters, True, 2),
        (swapped_parameters, False, 2),
    ],
)
def test_the_same_bits(run_folder: Path, one_step: Step, fused: bool, replayed: int) -> None:
    model, optimizer = world(fused)
    with opened(run_folder, model, optimizer) as ckpt:
        ckpt.resume()
        for step in range(1, STEPS + 1):
            one_step(step, model, optimizer)
            ckpt.step()
        then = snapshot(model, optimizer)
        one_step(STEPS + 1, model, optimizer)
        ckpt.step()  # at the end of it there will be a base
    other = world(fused)
    with opened(run_folder, *other) as ckpt:
        recovery = ckpt.resume(step=STEPS)
        assert snapshot(*other) == then
    assert recovery.exact, recovery
    assert recovery.replayed == replayed


def test_parameters_in_another_order_of_memory(run_folder: Path) -> None:
    """A fused kernel goes through parameters, gradients and moments as they lie."""

    def turned() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = world()
        for layer in model:  # type: ignore[attr-defined]
            layer.weight = nn.Parameter(layer.weight.detach().t())
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    model, optimizer = turned()
    states = {}
    with opened(run_folder, model, optimizer) as ckpt:
        ckpt.resume()
        for step in range(1, STEPS + 1):
            gradients(step, model)
            optimizer.step()
            ckpt.step()
            states[step] = snapshot(model, optimizer)
    model, optimizer = turned()
    with opened(run_folder, model, optimizer) as ckpt:
        recovery = ckpt.resume(step=4)
        assert snapshot(model, optimizer) == states[4]
        assert (recovery.exact, recovery.replayed) == (True, 3)
        for step in (5, 6):
            gradients(step, model)
            optimizer.step()
            assert snapshot(model, optimizer) == states[step]


def test_groups_of_the_first_step(run_folder: Path) -> None:
    """Of a timeline: what they were before, no mark of it tells."""
    model, optimizer = world()
    with opened(run_folder, model, optimizer) as ckpt:
        ckpt.resume()
        for step in (1, 2):
            gradients(step, model)
            optimizer.step()
            ckpt.step()
    model, optimizer = world()
    with opened(run_folder, model, optimizer) as ckpt:
        ckpt.resume()
        optimizer.param_groups.reverse()
        gradients(3, model)
        optimizer.step()
        optimizer.param_groups.reverse()
        ckpt.step()
        then = snapshot(model, optimizer)
        gradients(4, model)
        optimizer.step()
        ckpt.step()
    other = world()
    with opened(run_folder, *other) as ckpt:
        recovery = ckpt.resume(step=3)
        assert snapshot(*other) == then
    assert recovery.replayed == 0  # another chain, from the base of step 2, would be wrong


@pytest.mark.parametrize("later", [False, True])
def test_gaps_of_a_gradient_that_a_fused_kernel_reads(later: bool, run_folder: Path) -> None:
    """No log holds the bytes in the gaps, so the step is not recorded and a new base is taken; also
    where the kernel is chosen ``later`` than the gradient has gaps."""
    model, optimizer = world(fused=True)
    use_fused(optimizer, fused=not later)
    with opened(run_folder, model, optimizer) as ckpt:
        ckpt.resume()
        for step in range(1, STEPS + 2):
            gradients(step, model)
            if step == 4 or (later and step == 3):
                weight = next(model.parameters())
                weight.grad = torch.randn(6, 12)[:, ::2]
            if step == 4:
                use_fused(optimizer, fused=True)
            optimizer.step()
            if step == 4:
                with pytest.raises(UnsupportedStateError, match="has gaps between its elements"):
                    ckpt.step()
            else:
                ckpt.step()
            if step == STEPS:
                then = snapshot(model, optimizer)
    other = world(fused=True)
    with opened(run_folder, *other) as ckpt:
        recovery = ckpt.resume(step=STEPS)
        assert snapshot(*other) == then
    assert recovery.exact
    assert (recovery.base_step or 0) >= 4


def test_gaps_of_a_parameter_that_a_fused_kernel_changes(run_folder: Path) -> None:
    model = nn.Linear(6, 6)
    model.weight = nn.Parameter(torch.randn(6, 12)[:, ::2])
    with pytest.raises(UnsupportedStateError, match="a parameter with gaps"):
        opened(run_folder, model, torch.optim.AdamW(model.parameters(), fused=True))
