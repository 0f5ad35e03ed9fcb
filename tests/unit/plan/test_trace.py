"""``plan/schedule/trace.py``: against what operators have really written, and what is really
freed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor, library, nn

from everstep.errors import OptionError, UnsupportedStateError
from everstep.plan.schedule.recorder import _UNMARKED_WRITES
from everstep.plan.schedule.steps import DEVICES, Operator, StepTrace, device, seconds_of
from everstep.plan.schedule.trace import trace_training
from everstep.state.values.tensors import host_bytes
from everstep.workloads.gpt import GPT, GPTConfig
from everstep.workloads.published import published
from tests.support.inside.hooks import hooks_on

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


def tensors_in_place() -> Training:
    """Views, slices of one piece of memory, in-place operators, and a buffer that counts."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.rand(40)
            self.first = nn.Parameter(whole[:16].view(4, 4))
            self.second = nn.Parameter(whole[16:32].view(4, 4))
            self.register_buffer("seen", torch.zeros(4))
            self.register_buffer("mean", torch.zeros(8).as_strided((4,), (2,)))
            self.register_buffer("passing", torch.zeros(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            self.seen[1:3].mul_(2)
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
                self.passing.copy_(x[0])
            return (x @ self.first).add_(1).relu_() @ self.second.t()

    model, x = Odd(), torch.rand(3, 4)
    return model, lambda: model(x).square().mean()


def operators_of_its_own() -> Training:
    """Custom operators: one gives a value, one writes to its argument."""
    model, x = nn.Linear(4, 4), torch.rand(2, 4)
    model.register_buffer("count", torch.zeros(2))

    def loss() -> Tensor:
        count_up(model.count)
        y: Tensor = double(model(x))
        return y.sum()

    return model, loss


@library.custom_op("everstep_tests::count_up", mutates_args={"counts"})
def count_up(counts: Tensor) -> None:
    counts.numpy()[:] += 1


@library.custom_op("everstep_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


double.register_autograd(lambda context, gradient: gradient * 2)


def autocast(training: Callable[[], Training]) -> Callable[[], Training]:
    def made() -> Training:
        model, loss = training()

        def cast() -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss()

        return model, cast

    return made


MODELS = {"mlp": mlp, "gpt": gpt, "tied": tied, "in place": tensors_in_place}
MODELS["custom"] = operators_of_its_own
MODELS["mlp in bfloat16"] = autocast(mlp)
MODELS["gpt in bfloat16"] = autocast(gpt)
MODELS["mnasnet"] = lambda: published("mnasnet").training(2)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.1, foreach=False),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, 0.1, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
@pytest.mark.parametrize(
    ("which", "how"),
    [
        pytest.param(which, how, marks=pytest.mark.slow if which == "mnasnet" else ())
        for which in MODELS
        for how in OPTIMIZERS
    ],
)
def test_no_write_is_missed(which: str, how: str, inside: bool) -> None:
    """Ground truth: a checksum of the whole state after every real operator."""
    torch.manual_seed(3)
    model, loss = MODELS[which]()
    optimizer: Any = OPTIMIZERS[how](model.parameters())
    if inside:
        optimizer = {p: OPTIMIZERS[how]([p]) for p in model.parameters()}
    first = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    trace = trace_training(model, optimizer, loss)
    changed = {name for name, value in model.state_dict().items() if digest(value) != first[name]}
    assert len(changed) > len(list(model.parameters())) / 2
    written = {n for tensor in trace.state if tensor.first_write is not None for n in tensor.names}
    assert changed <= written


def digest(tensor: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(host_bytes(tensor.detach().contiguous()))


class Rebinding(torch.optim.SGD):
    """Its momentum is a new tensor each time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["speed"] = 0.9 * state.get("speed", torch.zeros_like(p)) + p.grad
                state["deep"] = [
                    {"count": state.get("deep", [{"count": p.new_ones(2)}])[0]["count"]}
                ]
                state["deep"][0]["count"].add_(1)
                p.sub_(state["speed"])


def test_state_that_another_tensor_takes_the_place_of() -> None:
    model, loss = mlp()
    trace = trace_training(model, Rebinding(model.parameters(), 0.1), loss)
    speed = next(tensor for tensor in trace.state if tensor.name == "0.weight/speed")
    assert speed.first_write == speed.end + 1 < len(trace.operators)
    nested = next(tensor for tensor in trace.state if tensor.name == "0.weight/deep/0/count")
    assert nested.first_write is not None


def test_state_that_moves_is_refused() -> None:
    model, loss = mlp()
    values = [model[4].bias.data, model[4].bias.data.clone()]

    class Swapping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            values.reverse()
            model[4].bias.data = values[0]

    with pytest.raises(UnsupportedStateError, match=r"other memory.*'4.bias'"):
        trace_training(model, Swapping(model.parameters(), 0.1), loss)


def test_buffers_that_no_checkpoint_holds() -> None:
    model, loss = tensors_in_place()
    trace = trace_training(model, OPTIMIZERS["sgd"](model.parameters()), loss)
    names = [tensor.names for tensor in trace.state]
    assert ("first", "second") in names  # one piece of memory
    assert not any("passing" in name for found in names for name in found)


def test_sparse_gradients() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    tokens = torch.tensor([1, 3])
    trace = trace_training(
        model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(tokens).sum()
    )
    assert [tensor.first_write is not None for tensor in trace.state] == [True]


def test_batch_norm_writes_what_its_schema_does_not_mark(monkeypatch: Any) -> None:
    monkeypatch.setattr("everstep.plan.schedule.recorder._UNMARKED_WRITES", {})
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


def test_no_operator_of_torch_keeps_its_writes_to_itself() -> None:
    """Whatever has running statistics and does not mark them is known, or writes nothing."""
    unmarked = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        for argument in schema.arguments
        if argument.name in ("running_mean", "running_var")
        and not (argument.alias_info and argument.alias_info.is_write)
        and schema.name.startswith("aten::")
    }
    nothing = ("backward", "_functional", "_no_update", "_no_training")  # ends of their names
    made_of_others = {
        f"aten::{n}" for n in ("batch_norm", "instance_norm", "_batch_norm_impl_index")
    }
    left = {name for name in unmarked if not name.endswith(nothing)} - made_of_others
    assert left == set(_UNMARKED_WRITES)


def test_statistics_alone() -> None:
    """Updated, and nothing normalised: that is not marked, either."""
    model, x = nn.BatchNorm1d(4), torch.rand(6, 4)

    def loss() -> Tensor:
        y = x @ x.t()
        torch.batch_norm_update_stats(x, model.running_mean, model.running_var, 0.1)
        return (model.weight + model.bias).sum() + y.sum()

    trace = trace_training(model, torch.optim.SGD(model.parameters(), 0.1), loss)
    writes = {tensor.name: tensor.first_write for tensor in trace.state}
    number = writes["running_mean"]
    assert number is not None
    assert trace.operators[number].name == "aten::batch_norm_update_stats"
    assert writes["running_var"] == number
    assert writes["num_batches_tracked"] is None


OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam fused amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
    "rate in a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), foreach=False),
    **{
        f"{kind.__name__} {'foreach' if foreach else 'for-loop'}": functools.partial(
            kind, lr=0.1, foreach=foreach
        )
        for kind in (
            *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam),
            *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adafactor),
        )
        for foreach in (False, True)
    },
}


@pytest.mark.parametrize("how", OTHERS)
def test_no_write_of_any_optimizer_is_missed(how: str) -> None:
    torch.manual_seed(3)
    model, loss = mlp()
    trace = trace_training(model, OTHERS[how](model.parameters()), loss)
    assert {t.name for t in trace.state if t.kind == "state" and t.first_write is not None}


def on_meta(which: str, how: str) -> StepTrace:
    with torch.device("meta"):
        model, loss = MODELS[which]()
        return trace_training(model, OPTIMIZERS[how](model.parameters()), loss)


def test_meta_gives_the_same_as_a_real_step() -> None:
    model, loss = mlp()
    real = trace_training(model, OPTIMIZERS["adam"](model.parameters()), loss)
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
    assert not any(map(hooks_on, model.parameters()))


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


def test_real_steps_are_measured() -> None:
    model, loss = mlp()
    trace = trace_training(model, OPTIMIZERS["sgd"](model.parameters()), loss, timed=True)
    assert all(operator.seconds is not None for operator in trace.operators)
    assert sum(seconds_of(trace.operators, None)) > 0
    with pytest.raises(OptionError, match="no time of"):
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
