"""``plan/trace.py``: against what operators have really written, and what is really freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor, nn

from everstep.bench.workloads.gpt import GPT, GPTConfig
from everstep.bench.workloads.published import published
from everstep.errors import OptionError, UnsupportedStateError
from everstep.plan.devices import DEVICES, device, seconds_of
from everstep.plan.trace import Operator, StepTrace, trace_training
from everstep.state.tensors import host_bytes

Training = tuple[nn.Module, Callable[[], Tensor]]


def mlp() -> Training:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4)
    )
    batch = torch.rand(6, 8)
    return model, lambda: model(batch).square().mean()


def gpt() -> Training:
    model = GPT(GPTConfig(2, 32, 2, 16, vocab=64))
    tokens = torch.arange(32).reshape(2, 16)
    return model, lambda: model(tokens).float().square().mean()


def tied() -> Training:
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10, bias=False))
    model[1].weight = model[0].weight
    tokens = torch.arange(5)
    return model, lambda: model(tokens).square().mean()


MODELS = {"mlp": mlp, "gpt": gpt, "tied": tied}
MODELS["mnasnet"] = lambda: published("mnasnet").training(2)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), 0.1, foreach=False),
    "adamw foreach": lambda model: torch.optim.AdamW(model.parameters(), 0.1, foreach=True),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), 0.1, fused=True),
}


@pytest.mark.parametrize(
    ("which", "how"),
    [
        pytest.param(which, how, marks=pytest.mark.slow if which == "mnasnet" else ())
        for which in MODELS
        for how in OPTIMIZERS
    ],
)
def test_no_write_is_missed(which: str, how: str) -> None:
    """Ground truth: a checksum of the whole state after every real operator."""
    torch.manual_seed(3)
    model, loss = MODELS[which]()
    optimizer = OPTIMIZERS[how](model)
    values: dict[str, Tensor] = {}
    before: dict[str, str] = {}
    missed: list[tuple[str, str]] = []

    def look(operator: Operator, written: frozenset[str]) -> None:
        if not values:
            return
        for name, tensor in values.items():
            found = digest(tensor)
            if before.setdefault(name, found) != found and name not in written:
                missed.append((operator.name, name))
            before[name] = found

    trace_training(model, optimizer, loss)  # optimizer state exists from here on
    values |= dict(model.named_parameters())
    values |= dict(model.named_buffers())
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        values |= {f"{names[parameter]}/{k}": v for k, v in state.items() if torch.is_tensor(v)}
    before |= {name: digest(tensor) for name, tensor in values.items()}
    first = dict(before)
    trace = trace_training(model, optimizer, loss, look=look)
    # The step that is taken without looking changes everything: those changes are of no operator.
    assert [item for item in missed if item[0] != trace.operators[0].name] == []
    changed = {name for name in values if digest(values[name]) != first[name]}
    assert changed <= {tensor.name for tensor in trace.state if tensor.first_write is not None}


def digest(tensor: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(host_bytes(tensor.detach().contiguous()))


def test_batch_norm_writes_what_its_schema_does_not_mark(monkeypatch: Any) -> None:
    monkeypatch.setattr("everstep.plan.trace._UNMARKED_WRITES", {})
    model, loss = mlp()
    trace = trace_training(model, torch.optim.SGD(model.parameters(), 0.1), loss)
    writes = {tensor.name: tensor.first_write for tensor in trace.state}
    assert writes["1.running_mean"] is None
    monkeypatch.undo()
    trace = trace_training(model, torch.optim.SGD(model.parameters(), 0.1), loss)
    writes = {tensor.name: tensor.first_write for tensor in trace.state}
    number = writes["1.running_mean"]
    assert number is not None
    assert "batch_norm" in trace.operators[number].name


def on_meta(which: str, how: str) -> StepTrace:
    with torch.device("meta"):
        model, loss = MODELS[which]()
        return trace_training(model, OPTIMIZERS[how](model), loss)


def test_meta_gives_the_same_as_a_real_step() -> None:
    model, loss = mlp()
    real = trace_training(model, OPTIMIZERS["adam"](model), loss)
    dry = on_meta("mlp", "adam")
    assert real.state_bytes == dry.state_bytes
    assert {(t.name, t.size_bytes) for t in real.state} == {
        (t.name, t.size_bytes) for t in dry.state
    }
    assert all(tensor.first_write is not None for tensor in dry.state)


def test_lives() -> None:
    """By hand: y = x @ w, loss = y.sum(), w -= 0.1 * gradient."""
    with torch.device("meta"):
        weight = nn.Linear(4, 3, bias=False)
        batch = torch.rand(2, 4)
        trace = trace_training(
            weight,
            torch.optim.SGD(weight.parameters(), 0.1, foreach=False),
            lambda: weight(batch).sum(),
        )
    names = [operator.name for operator in trace.operators]
    assert names == ["aten::mm", "aten::sum", "aten::ones_like", "aten::mm", "aten::add_"]
    assert [operator.phase for operator in trace.operators] == [
        *("forward", "forward", "backward", "backward", "update")
    ]
    assert trace.operators[0].flops == 2 * 2 * 4 * 3
    (parameter,) = trace.state
    assert (parameter.begin, parameter.end, parameter.first_write) == (-1, 4, 4)
    (gradient,) = (tensor for tensor in trace.tensors if tensor.kind == "gradient")
    assert (gradient.begin, gradient.end, gradient.size_bytes) == (3, 4, 48)
    product = next(tensor for tensor in trace.tensors if tensor.begin == 0)
    assert product.end == 1  # nothing holds it beyond the sum
    inputs = 4 * (2 * 4)
    assert trace.live_bytes()[0] == 48 + inputs + product.size_bytes
    assert trace.live_bytes()[4] == 48 + inputs + 48


def test_updates_inside_of_backward() -> None:
    with torch.device("meta"):
        model, loss = gpt()
        optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}
        inside = trace_training(model, optimizers, loss)
        after = trace_training(model, torch.optim.AdamW(model.parameters()), loss)
    assert inside.state_bytes == after.state_bytes
    assert {tensor.name for tensor in inside.state} == {tensor.name for tensor in after.state}
    assert 2 * most_gradients(inside) < most_gradients(after)
    phases = [operator.phase for operator in inside.operators]
    assert phases.index("update") < len(phases) - 1 - phases[::-1].index("backward")
    assert all(tensor.first_write is not None for tensor in inside.state)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def most_gradients(trace: StepTrace) -> int:
    """Bytes of gradients that are there at once."""
    found = [tensor for tensor in trace.tensors if tensor.kind == "gradient"]
    return max(
        sum(tensor.size_bytes for tensor in found if tensor.begin <= number <= tensor.end)
        for number in range(len(trace.operators))
    )


def test_work_of_grouped_convolutions() -> None:
    with torch.device("meta"):
        model = nn.Conv2d(8, 16, 3, padding=1, groups=4, bias=False)
        batch = torch.rand(2, 8, 10, 10, requires_grad=True)
        trace = trace_training(
            model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(batch).sum()
        )
    forward, backward = (o.flops for o in trace.operators if "convolution" in o.name)
    assert forward == 2 * (2 * 16 * 10 * 10) * (8 // 4 * 9)
    assert backward == 2 * forward


def test_same_step_same_signature() -> None:
    one, other = on_meta("gpt", "adam"), on_meta("gpt", "adam")
    assert one.signature == other.signature
    assert one.signature != on_meta("gpt", "sgd").signature


def test_a_step_that_depends_on_data_has_another_signature() -> None:
    model = nn.Linear(4, 4)
    depth = iter([1, 1, 1, 2])

    def loss() -> Tensor:
        x = torch.ones(2, 4)
        for _ in range(next(depth)):
            x = model(x)
        return x.sum()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = trace_training(model, optimizer, loss).signature
    assert trace_training(model, optimizer, loss).signature != first


def test_real_steps_are_measured() -> None:
    model, loss = mlp()
    trace = trace_training(model, OPTIMIZERS["sgd"](model), loss, timed=True)
    assert all(operator.seconds is not None for operator in trace.operators)
    assert sum(seconds_of(trace.operators, None)) > 0
    with pytest.raises(OptionError, match="without times"):
        seconds_of(on_meta("mlp", "sgd").operators, None)


def test_what_cannot_be_traced_without_data_is_named() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
        batch = torch.rand(2, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(UnsupportedStateError, match="nonzero"):
            trace_training(
                model, optimizer, lambda: model(batch).nonzero().sum() * model(batch).sum()
            )


def test_roofline() -> None:
    found = device("a100")
    operator = Operator("aten::mm", "forward", 10**12, 10**6, torch.float32)
    assert found.seconds(operator) == pytest.approx(1e12 / 19.5e12)
    moved = Operator("aten::add", "forward", 0, 10**9, torch.float32)
    assert found.seconds(moved) == pytest.approx(1e9 / 2039e9)
    half = Operator("aten::mm", "forward", 10**12, 10**6, torch.bfloat16)
    assert found.seconds(half) == pytest.approx(1e12 / 312e12)
    assert all(item.source for item in DEVICES.values())
    with pytest.raises(OptionError, match="rtx3090"):
        device("rtx309")
