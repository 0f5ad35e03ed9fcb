"""``plan/schedule/trace.py``: where a step is traced, and what is
said of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn
from torch.nn.parallel import DistributedDataParallel

from everstep.errors import OptionError, UnsupportedStateError
from everstep.plan.schedule import trace as trace_module
from everstep.plan.schedule.schedule import Mode, problem_of, schedule
from everstep.plan.schedule.steps import (
    WAIT,
    Operator,
    StepTrace,
    device,
    difference,
    seconds_of,
    times_of,
)
from everstep.plan.schedule.trace import Buckets, trace_of, trace_training
from everstep.workloads.gpt import GPT, GPTConfig
from everstep.workloads.published import published
from tests.support.checkflow_program import obeys

Made = tuple[nn.Module, Callable[[], Tensor]]
MODES: tuple[Mode, ...] = ("paper", "direct")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def linear(batch: int) -> Made:
    model, x = nn.Linear(4, 3), torch.rand(batch, 4)
    return model, lambda: model(x).sum()


def normalised(batch: int) -> Made:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4)
    )
    x = torch.rand(batch, 8)
    return model, lambda: model(x).square().mean()


def gpt(batch: int) -> Made:
    model = GPT(GPTConfig(1, 32, 2, 16, vocab=64))
    tokens = torch.arange(16 * batch).reshape(batch, 16) % 64
    return model, lambda: model(tokens).float().square().mean()


# --- Autocast ---------------------------------------------------------------------------


def test_casts_are_operators() -> None:
    """By hand: x and w in two bytes an element, w as long as backward needs it."""
    trace = trace_of(linear, 2, sgd, autocast=torch.bfloat16)
    names = [operator.name for operator in trace.operators]
    casts = [n for n, name in enumerate(names) if name == "aten::_to_copy"]
    product = names.index("aten::addmm")
    assert len([n for n in casts if n < product]) == 3  # x, weight, bias
    assert trace.operators[product].dtype == torch.bfloat16
    made = {tensor.begin: tensor for tensor in trace.tensors if tensor.begin >= 0}
    low = [made[n].size_bytes for n in casts if n < product]
    assert sorted(low) == sorted([2 * 2 * 4, 2 * 3 * 4, 2 * 3])
    # Master weights, and gradients of them, stay in float32.
    assert {t.size_bytes for t in trace.state} == {4 * 3 * 4, 4 * 3}
    gradients = sorted(t.size_bytes for t in trace.tensors if t.kind == "gradient")
    assert gradients == [4 * 3, 4 * 3 * 4]
    assert any("casts as on" in note for note in trace.notes)


def test_without_data_autocast_is_as_with_them() -> None:
    def cast(batch: int) -> Made:
        model, loss = gpt(batch)

        def low() -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss()

        return model, low

    real = _real(cast, 4)
    for dry in (trace_of(cast, 4, sgd), trace_of(gpt, 4, sgd, autocast=torch.bfloat16)):
        assert difference(real, dry) is None
    plain = trace_of(gpt, 4, sgd)
    assert plain.device == "meta"
    assert difference(real, plain) is not None


def _real(training: Callable[[int], Made], batch: int) -> StepTrace:
    torch.manual_seed(1)
    model, loss = training(batch)
    return trace_training(model, sgd(model.parameters()), loss)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch follows it there")
def test_autocast_for_a_device_that_is_not_here() -> None:
    def cast(batch: int) -> Made:
        model, loss = linear(batch)

        def low() -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return loss()

        return model, low

    with pytest.raises(UnsupportedStateError, match="cannot follow autocast for CUDA") as caught:
        trace_of(cast, 2, sgd)
    assert "--autocast" in str(caught.value.hint)


def test_autocast_to_what_is_no_half() -> None:
    with pytest.raises(OptionError, match="float32"):
        trace_of(linear, 2, sgd, autocast=torch.float32)


def test_copied_modules_are_of_one_world() -> None:
    trace = trace_of(published("transformer").training, 2, sgd, autocast=torch.bfloat16)
    assert trace.notes


# --- Scaled losses ----------------------------------------------------------------------

FLAGS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_no_write_is_missed_with_a_scaler(flags: dict[str, bool]) -> None:
    """What unscales, looks for infinities and updates, next to digests of the whole state."""
    torch.manual_seed(2)
    model, loss = normalised(4)
    optimizer = torch.optim.AdamW(model.parameters(), **flags)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trace = trace_training(model, optimizer, halved(loss), scaler=scaler)
    last = len(trace.operators) - 1
    assert trace.operators[last].name == "aten::_amp_update_scale_"
    writes = {tensor.name: tensor.first_write for tensor in trace.state}
    assert writes["scaler/scale"] == writes["scaler/growth_tracker"] == last
    names = [operator.name for operator in trace.operators]
    looked = names.index("aten::_amp_foreach_non_finite_check_and_unscale_")
    for name, write in writes.items():
        if name in dict(model.named_parameters()):
            assert write is not None
            assert looked < write < last, name


def halved(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def low() -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return loss()

    return low


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_step_that_the_scaler_leaves_out(flags: dict[str, bool]) -> None:
    """It writes nothing that one which updates does not write: no plan is too late for it."""
    traces = []
    for overflows in (False, True):
        torch.manual_seed(2)
        model, loss = normalised(4)
        count = itertools.count()

        def maybe_infinite(loss: Any = loss, count: Any = count, over: bool = overflows) -> Tensor:
            result: Tensor = loss()
            return result * torch.inf if over and next(count) else result * 1.0

        optimizer = torch.optim.AdamW(model.parameters(), **flags)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        trace = trace_training(model, optimizer, halved(maybe_infinite), scaler=scaler)
        assert (scaler.get_scale() < 8.0) == overflows
        traces.append(trace)
    updated, left_out = ({t.name: t.first_write for t in trace.state} for trace in traces)
    assert (updated == left_out) == ("fused" in flags)
    if "fused" not in flags:
        assert {n for n, w in left_out.items() if w is not None} == {
            *("1.running_mean", "1.running_var", "1.num_batches_tracked"),
            *("scaler/scale", "scaler/growth_tracker"),
        }


@pytest.mark.parametrize("ranks", [None, 4])
@pytest.mark.parametrize(("training", "dtype"), [(normalised, None), (gpt, torch.float16)])
def test_without_data_a_scaler_is_as_with_them(
    training: Callable[[int], Made], dtype: torch.dtype | None, ranks: int | None
) -> None:
    torch.manual_seed(2)
    model, loss = training(4)
    real = trace_training(
        model,
        sgd(model.parameters()),
        loss if dtype is None else halved(loss),
        parallel=None if ranks is None else Buckets(model, ranks),
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0),
    )
    dry = trace_of(training, 4, sgd, autocast=dtype, scaled=True, ranks=ranks)
    assert dry.device == ("meta" if dtype is None else "cpu")
    assert difference(real, dry) is None


def test_scaled_and_inside_of_backward() -> None:
    with pytest.raises(OptionError, match="too late for updates"):
        trace_of(normalised, 4, sgd, scaled=True, in_backward=True)


def test_a_scaled_step_is_planned() -> None:
    """A checkpoint of it leaves without extra memory, and nothing leaves after it was written."""
    trace = trace_of(normalised, 64, sgd, autocast=torch.float16, scaled=True)
    seconds, _ = times_of(trace, device("v100"))
    problem = problem_of(trace, seconds, 900e9)
    for mode in MODES:
        found = schedule(problem, mode)
        assert obeys(problem, found)
        assert found.gap <= 0.025
    assert found.peak_bytes == problem.peak_bytes


# --- Ranks ------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("cap_bytes", [None, 600, 100])
def test_buckets_are_as_torch_has_them(
    cap_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real DistributedDataParallel on real tensors, operator by operator and byte by byte."""
    model, _ = normalised(4)
    x = torch.rand(4, 8)
    cap = {} if cap_bytes is None else {"bucket_cap_mb": cap_bytes / 2**20}
    wrapped = DistributedDataParallel(model, **cap)
    real = trace_training(wrapped, sgd(wrapped.parameters()), lambda: wrapped(x).square().mean())
    with torch.device("meta"):
        model, loss = normalised(4)
        if cap_bytes is not None:
            monkeypatch.setattr(trace_module, "_BUCKETS_BYTES", (cap_bytes,))
        buckets = Buckets(model, 2)
        dry = trace_training(model, sgd(model.parameters()), loss, parallel=buckets)
    assert difference(_unsent(real), _unsent(dry)) is None
    reduced = [o for o in dry.operators if o.name == "c10d::allreduce_"]
    gradients = sum(p.numel() for p in model.parameters()) * 4
    assert sum(o.sent_bytes or 0 for o in reduced) == gradients  # 2 * (2 - 1) / 2 of them
    assert len(reduced) == {None: 1, 600: 2, 100: 4}[cap_bytes]
    last_backward = max(n for n, o in enumerate(dry.operators) if o.name == "aten::mm")
    first = next(n for n, o in enumerate(dry.operators) if o.name == "c10d::allreduce_")
    assert (first < last_backward) == (len(reduced) > 1)


def _unsent(trace: StepTrace) -> StepTrace:
    """A group of one sends nothing."""
    sent = (replace(o, sent_bytes=None if o.sent_bytes is None else 0) for o in trace.operators)
    return replace(trace, operators=tuple(sent))


@pytest.mark.usefixtures("alone")
def test_collectives_are_writes() -> None:
    """Their schemas say nothing of it."""
    model, loss = normalised(4)

    def reduced() -> Tensor:
        torch.distributed.all_reduce(model[1].running_mean)
        torch.distributed.broadcast(model[1].running_var, 0)
        return loss()

    model[1].eval()
    trace = trace_training(model, sgd(model.parameters()), reduced)
    writes = {tensor.name: tensor.first_write for tensor in trace.state}
    assert trace.operators[writes["1.running_mean"]].name == "c10d::allreduce_"
    assert trace.operators[writes["1.running_var"]].name == "c10d::broadcast_"
    assert writes["1.num_batches_tracked"] is None


@pytest.mark.usefixtures("alone")
def test_no_write_is_missed_under_data_parallel() -> None:
    model, _ = normalised(4)
    x = torch.rand(4, 8)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    trace = trace_training(wrapped, optimizer, lambda: wrapped(x).square().mean())
    assert {"0.weight", "1.running_mean", "0.weight/exp_avg"} <= {t.name for t in trace.state}


def test_collectives_run_beside() -> None:
    """By hand: 6 s for a collective, of which 5 are hidden; the next waits for the network."""
    f32 = torch.float32
    operators = [
        Operator("c10d::allreduce_", "backward", 0, 0, f32, sent_bytes=60),
        Operator("aten::mm", "backward", 2, 0, f32, 2.0),
        Operator("c10d::allreduce_", "backward", 0, 0, f32, sent_bytes=10),
        Operator("aten::mm", "backward", 3, 0, f32, 3.0),
        Operator(WAIT, "backward", 0, 0, f32, waits_for=0),
        Operator(WAIT, "backward", 0, 0, f32, waits_for=2),
    ]
    slow = replace(device("a100"), flops_per_s=1.0)
    assert seconds_of(operators, slow, 10.0) == [0, 2, 0, 3, 1, 1]
    assert seconds_of(operators, None, 10.0) == [0, 2, 0, 3, 1, 1]
    assert seconds_of(operators, slow, 1000.0) == [0, 2, 0, 3, 0, 0]
    with pytest.raises(OptionError, match="no time of") as caught:
        seconds_of(operators, slow)
    assert "network" in str(caught.value.hint)


def test_ranks() -> None:
    trace = trace_of(normalised, 4, sgd, ranks=8)
    reduced = [o for o in trace.operators if o.name == "c10d::allreduce_"]
    model, _ = normalised(4)
    size = 4 * sum(p.numel() for p in model.parameters())
    assert sum(o.sent_bytes or 0 for o in reduced) == 2 * 7 * size // 8
    # Its buckets take as much memory as gradients.
    assert max(trace.live_bytes()) >= max(trace_of(normalised, 4, sgd).live_bytes()) + size
    with pytest.raises(OptionError, match="1 ranks"):
        trace_of(normalised, 4, sgd, ranks=1)
    with pytest.raises(OptionError, match="updates within"):
        trace_of(normalised, 4, sgd, ranks=8, in_backward=True)


# --- Without a kernel for the meta device -----------------------------------------------


@library.custom_op("everstep_tests::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x * x


square.register_autograd(
    lambda context, gradient: 2 * gradient * context.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def of_its_own(batch: int) -> Made:
    model, x = nn.Linear(4, 3), torch.rand(batch, 4)
    return model, lambda: square(model(x)).sum()


def test_custom_operators_are_named_and_traced_on_the_cpu() -> None:
    trace = trace_of(of_its_own, 500, sgd)
    assert trace.device == "cpu"
    (note,) = trace.notes
    assert "everstep_tests::square" in note
    assert "traced on the CPU" in note
    assert difference(trace, _real(of_its_own, 500)) is None
    with torch.device("meta"), pytest.raises(UnsupportedStateError, match="square") as caught:
        model, loss = of_its_own(2)
        trace_training(model, sgd(model.parameters()), loss)
    assert caught.value.leaves[0][0] == "everstep_tests::square"


def test_an_error_of_the_model_stays_what_it_is() -> None:
    def wrong(batch: int) -> Made:
        model, x = nn.Linear(4, 3), torch.rand(batch, 5)
        return model, lambda: model(x).sum()

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trace_of(wrong, 32, sgd)


def test_a_model_that_takes_data_to_be_made() -> None:
    """As rates of dropout do that are asked of a tensor; and values that leave for NumPy."""

    def made(batch: int) -> Made:
        rates = [rate.item() for rate in torch.linspace(0.1, 0.2, 2)]
        model = nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(4, 3))
        x = torch.rand(batch, 4)
        return model, lambda: model(x).sum()

    def through_numpy(batch: int) -> Made:
        model, x = nn.Linear(4, 3), torch.rand(batch, 4)
        return model, lambda: model(torch.from_numpy(x.numpy() * 2)).sum()

    for training, said in (
        (made, r"cannot be made without data.*item\(\)"),
        (through_numpy, r"cannot be traced without data.*numpy"),
    ):
        trace = trace_of(training, 32, sgd)
        assert trace.device == "cpu"
        assert re.search(said, trace.notes[0])
        assert difference(trace, _real(training, 32)) is None


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (lambda batch: nn.Linear(4, 4), "returned Linear, not a model and its loss"),
        (lambda batch: (nn.Linear(4, 4), 3), "not a model and its loss"),
        (lambda: linear(2), "too many positional arguments"),
        (lambda batch: (nn.Linear(4, 4), lambda x: x.sum()), "missing a required argument: 'x'"),
        (lambda batch: (nn.ReLU(), lambda: torch.rand(batch).sum()), "no parameter"),
        (lambda batch: (nn.Linear(4, 4), lambda: None), "the loss is NoneType"),
        (lambda batch: (nn.Linear(4, 4), lambda: torch.rand(())), "a number without gradient"),
        (lambda batch: (m := nn.Linear(4, 4), lambda: m(torch.rand(2, 4))), "a tensor of 8"),
    ],
)
def test_what_is_no_model_with_a_loss(training: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        trace_of(training, 2, sgd)


def test_what_is_frozen_is_not_updated_inside_of_backward() -> None:
    def frozen(batch: int) -> Made:
        model, loss = linear(batch)
        model.bias.requires_grad_(False)
        return model, loss

    inside = trace_of(frozen, 2, sgd, in_backward=True)
    writes = {tensor.name: tensor.first_write for tensor in inside.state}
    assert writes["bias"] is None
    assert writes["weight"] is not None
    assert inside.state_bytes == trace_of(frozen, 2, sgd).state_bytes


def test_what_the_first_operator_writes_is_duplicated_at_the_mark() -> None:
    """A model that begins with a BatchNorm: its count of batches is written at once."""

    def first(batch: int) -> Made:
        model, x = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)), torch.rand(batch, 8)
        return model, lambda: model(x).square().mean()

    trace = trace_of(first, 64, sgd)
    assert next(x for x in trace.state if "num_batches" in x.name).first_write == 0
    seconds, _ = times_of(trace, device("v100"))
    problem = problem_of(trace, seconds, 90e12)
    assert problem.seconds == (0.0, *seconds)
    assert problem.live_bytes[1:] == tuple(trace.live_bytes())
    assert problem.live_bytes[0] == sum(x.size_bytes for x in trace.tensors if x.begin < 0)
    for mode in MODES:
        found = schedule(problem, mode)
        assert obeys(problem, found)
        assert found.peak_bytes == problem.peak_bytes
    places = {problem.items[place.chunk.item].name: place for place in found.placements}
    early = [name for name, place in places.items() if place.snapshot is not None]
    assert early == ["0.num_batches_tracked"]
    assert places[early[0]].snapshot == 0
    other = trace_of(linear, 2, sgd)  # which begins with something else
    assert problem_of(other, [1.0] * len(other.operators), 1e9).live_bytes == tuple(
        other.live_bytes()
    )


# --- Steps that are not alike -----------------------------------------------------------


def test_where_two_steps_part_is_said() -> None:
    count = itertools.count()

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return self.inner(y) if next(count) > 1 else y.relu()  # type: ignore[no-any-return]

    def deep(batch: int) -> Made:
        model, x = Deep(), torch.rand(batch, 4)
        return model, lambda: model(x).sum()

    with pytest.raises(UnsupportedStateError, match="two steps of this model differ") as caught:
        trace_of(deep, 2, sgd)
    said = str(caught.value)
    assert "operator 1: aten::relu of 2x4 2x4 (forward" in said
    assert "aten::addmm of 4 2x4 4x4 2x4 (forward) in the second" in said


def test_other_data_are_tried() -> None:
    """Steps of one batch are alike; those of another are not."""
    numbers = iter([1.0, -1.0] * 9)

    def routed(batch: int) -> Made:
        model, x = nn.Linear(4, 4), torch.full((batch, 4), next(numbers))
        return model, lambda: (model(x) if x.sum() > 0 else model(model(x))).sum()

    with pytest.raises(UnsupportedStateError, match="depend on the data"):
        trace_of(routed, 2, sgd)


def test_a_difference_in_sizes_only() -> None:
    one, other = trace_of(linear, 2, sgd), trace_of(linear, 3, sgd)
    assert difference(one, one) is None
    assert "aten::addmm of 3 2x4 4x3 2x3 (forward) in the first" in (difference(one, other) or "")
    longer = replace(one, operators=(*one.operators, one.operators[0]))
    assert "only the second step has aten::addmm" in str(difference(one, longer))
    tensors = (replace(one.tensors[0], end=1), *one.tensors[1:])
    assert "another lifetime: 'weight'" in str(difference(one, replace(one, tensors=tensors)))


# --- Times ------------------------------------------------------------------------------


def test_measured_on_this_cpu() -> None:
    trace = trace_of(normalised, 64, sgd, measured_on="cpu")
    assert trace.step_s is not None
    seconds, words = times_of(trace, None)
    assert 0 < sum(seconds) <= trace.step_s * 1.001
    assert "measured on cpu" in words
    assert "NVIDIA A100" in times_of(trace, device("a100"))[1]


def test_one_by_one_never_takes_longer_than_in_a_row() -> None:
    operators = tuple(Operator("aten::mm", "forward", 1, 1, torch.float32, s) for s in (1.0, 3.0))
    seconds, words = times_of(StepTrace(operators, (), "cuda", step_s=2.0), None)
    assert seconds == [0.5, 1.5]
    assert "times 0.50" in words
    assert times_of(StepTrace(operators, (), "cuda", step_s=5.0), None)[0] == [1.0, 3.0]


def test_figures_of_ones_own() -> None:
    found = device("a100").with_figures(flops_per_s=1e12)
    assert found.flops_per_s == 1e12
    assert "given: flops_per_s" in found.source


def test_random_generators_are_left_as_they_are() -> None:
    before = torch.get_rng_state()
    trace_of(of_its_own, 2, sgd)
    assert torch.equal(torch.get_rng_state(), before)
