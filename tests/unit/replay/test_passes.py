"""Programs that update blocks pass by pass: torch's own bits, or they are not used (I9)."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from everstep.errors import ReplayError
from everstep.replay import blocked, self_test
from everstep.replay.blocked import Blocked
from everstep.replay.updates import Update
from tests.support.replays import Run, record, replayed, replayer_at, tensors_of

LARGE = {
    "large": (2 * blocked.UNFUSED_ELEMENTS + 77,),
    "matrix": (521, 130),
    "bias": (130,),
    "scale": (),
}
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 3e38, 1.0]
VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {"weight_decay": 0.1}),
    (AdamW, {"weight_decay": 0.0, "eps": 1e-3, "betas": (0.3, 0.9)}),
    (Adam, {"weight_decay": 0.1}),
    (Adam, {}),
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]
FLAGS = [{"foreach": False}, {"foreach": True}]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Updates in each call of a program; torch's own functions count as 0."""
    calls: list[int] = []
    own, run_block = blocked.program, Blocked._run_block

    def noting(kind: Any) -> Any:
        run = own(kind)
        if run is None:  # without TorchScript
            return None

        def noted(parameters: Any, moments: Any, gradients: Any, *rest: Any) -> None:
            calls.append(len(gradients))
            run(parameters, moments, gradients, *rest)

        return noted

    def noted_block(self: Any, *args: Any) -> None:
        calls.append(0)
        run_block(self, *args)

    monkeypatch.setattr(blocked, "program", noting)
    monkeypatch.setattr(Blocked, "_run_block", noted_block)
    return calls


def trained(kind: Any, options: dict[str, Any], **more: Any) -> Run:
    """Its self-test is done."""
    run = record(lambda groups: kind(groups, **options), steps=6, late=False, **more)
    replayed(run, 1, 0)
    return run


def special(step: int) -> dict[str, torch.Tensor]:
    """Gradients that hold what is no ordinary number."""
    given = tensors_of(shapes=LARGE)
    values = torch.tensor(SPECIAL)
    for tensor in given.values():
        line = tensor.view(-1)
        places = torch.randperm(line.numel())[: line.numel() // 9]
        line[places] = values[torch.randint(len(values), places.shape)]
    return given


@pytest.mark.thinned(3)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=str)
def test_every_bit_is_that_of_torch(
    kind: Any, options: dict[str, Any], flags: dict[str, Any], ran: list[int]
) -> None:
    run = trained(kind, {**options, **flags}, shapes=LARGE)
    ran.clear()
    assert replayed(run, 4, 0, threads=2).exact.exact
    assert ran  # and by nothing but programs
    assert 0 not in ran
    trained(kind, {**options, **flags}, shapes=LARGE, gradients=special)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_other_dtypes(kind: Any, dtype: torch.dtype, ran: list[int]) -> None:
    """Also with factors that half precision cannot hold: see ``blocked._times``."""
    telling = {"momentum": 0.9} if kind is SGD else {"betas": (0.9, 0.95)}
    for options in ({"weight_decay": 0.1}, {"weight_decay": 0.1, "lr": 0.3, **telling}):
        run = trained(kind, options, shapes=LARGE, dtype=dtype)
        ran.clear()
        replayed(run, 4, 0, threads=2, training_threads=1)
        assert ran
        assert 0 not in ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_in_another_order_than_small_tensors(dtype: torch.dtype, ran: list[int]) -> None:
    """torch takes scalar code then, which rounds halves otherwise than a program would."""
    shapes = {"turned": (40, 65), "line": (71,)}

    def make(groups: Any) -> Any:
        for group in groups:
            for parameter in group["params"]:
                if parameter.dim() == 2:
                    parameter.data = parameter.data.t().contiguous().t()
        return SGD(groups, lr=1e-3, momentum=0.9, nesterov=True)

    gradients = lambda step: tensors_of(dtype, shapes)  # noqa: E731
    run = record(make, dtype=dtype, shapes=shapes, gradients=gradients)
    replayed(run, 1, 0, training_threads=1)  # its self-test is done
    ran.clear()
    replayed(run, 1, 0, training_threads=1)
    assert bool(ran) == (dtype == torch.float32)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_gradients_of_fewer_bits(kind: Any, ran: list[int]) -> None:
    """A log may leave out low bits that are zero."""

    def narrow(step: int) -> dict[str, torch.Tensor]:
        given = tensors_of(torch.bfloat16, LARGE)
        return {name: gradient.float() for name, gradient in given.items()}

    run = record(lambda groups: kind(groups), steps=5, late=False, shapes=LARGE, gradients=narrow)
    for at, update in enumerate(run.updates):
        packed = {name: gradient.bfloat16() for name, gradient in update.gradients.items()}
        run.updates[at] = Update(update.lsn, update.optimizer, update.groups, packed)
    replayed(run, 1, 0, threads=2)
    assert 4 in ran


def test_updates_that_are_alike_go_together(ran: list[int]) -> None:
    """One block, four updates: a gradient that is missing makes other tensors of it."""

    def gradients(step: int) -> dict[str, torch.Tensor]:
        given = tensors_of(shapes={"one": (30,), "two": (3, 4), "three": (7,)})
        if step == 3:
            del given["three"]
        return given

    shapes = {"one": (30,), "two": (3, 4), "three": (7,)}
    run = trained(AdamW, {}, shapes=shapes, gradients=gradients)
    ran.clear()
    replayed(run, 1, 0)
    assert ran == [2, 1, 2, 5]  # the group of "one" and "three", that of "two"


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"maximize": True},
        {"fused": True},
        {"lr": torch.tensor(0.01)},
        {"betas": (torch.tensor(0.9), torch.tensor(0.999)), "foreach": False},
    ],
    ids=str,
)
def test_what_there_is_no_program_for(options: dict[str, Any], ran: list[int]) -> None:
    trained(AdamW, options, shapes=LARGE)
    assert set(ran) <= {0}


def test_steps_that_float32_cannot_count(ran: list[int]) -> None:
    """One more is the same number there: torch stays at it, and so must replay."""
    run = record(lambda groups: AdamW(groups), steps=1, late=False, shapes=LARGE)
    for values in run.optimizer.state.values():
        values["step"].fill_(blocked.COUNT_MAX - 2)
    run.moments[-1] = run.moment()
    for lsn in range(2, 6):
        given = tensors_of(shapes=LARGE)
        run.updates.append(Update(lsn, "optimizer", run.moments[-1].groups, given))
        for name, parameter in run.parameters.items():
            parameter.grad = given[name].clone()
        run.optimizer.step()
        run.moments.append(run.moment())
    replayed(run, 1, 0)
    assert 0 in ran
    ran.clear()
    replayed(run, 1, 1)
    assert 0 in ran
    assert 1 in ran


@pytest.mark.parametrize("wrong", ["numbers", "program"])
def test_what_the_self_test_does_not_prove_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A torch that computes something else in a hundredth of all elements, or with numbers that
    are one bit off."""
    own, own_numbers, used = blocked.program(AdamW), blocked.numbers, []

    def astray(parameters: Any, *rest: Any) -> None:
        assert own is not None
        used.append(1)
        own(parameters, *rest)
        if wrong == "program":
            parameters[0].view(-1)[::100].mul_(1.0000002)

    def off(kind: Any, options: Any, count: float) -> list[float]:
        found = own_numbers(kind, options, count)
        return [*found[:-1], found[-1] * 1.0000002] if wrong == "numbers" else found

    monkeypatch.setattr(blocked, "program", lambda kind: astray)
    monkeypatch.setattr(blocked, "numbers", off)
    monkeypatch.setattr(self_test, "_proven", {})
    run = record(lambda groups: AdamW(groups), steps=4, late=False, shapes=LARGE)
    assert replayed(run, 1, 0).exact.exact
    assert used  # in the self-test
    assert caplog.text.count("not bit-equal") == 1
    used.clear()
    assert replayed(run, 1, 0).exact.exact
    assert not used


def test_without_torchscript(monkeypatch: pytest.MonkeyPatch, ran: list[int]) -> None:
    def refused(function: Callable[..., None]) -> None:
        raise RuntimeError("not in this Python")

    blocked._compiled.cache_clear()
    monkeypatch.setattr(torch.jit, "script", refused)
    try:
        run = record(lambda groups: AdamW(groups), steps=4, late=False, shapes=LARGE)
        assert replayed(run, 1, 0).exact.exact
        assert set(ran) == {0}
    finally:
        blocked._compiled.cache_clear()


def test_an_error_in_one_thread_ends_all_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(AdamW, {}, shapes=LARGE)
    calls: list[int] = []

    def failing(*args: Any) -> None:
        calls.append(1)
        raise MemoryError("no memory")

    monkeypatch.setattr(blocked, "program", lambda kind: failing)
    replayer, _ = replayer_at(run, 1, threads=2)
    with pytest.raises(ReplayError, match="updates 2 to 6 failed half-way: MemoryError"):
        replayer.apply(run.updates[1:])
    assert len(calls) <= 2


def test_the_self_test_tells_rounded_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchScript's own ``mul_`` rounds its factor to bfloat16. Hyperparameters that hide that
    (0.999 is 1, and so is what a small learning rate leaves of a weight) prove nothing for others
    that are alike but for their values."""
    plain = _with_plain_factors(tmp_path, monkeypatch)
    monkeypatch.setattr(blocked, "program", plain.program)
    monkeypatch.setattr(self_test, "_proven", {})
    for kind, options in ((AdamW, {}), (SGD, {"momentum": 0.999})):
        optimizer = kind([torch.zeros(1, dtype=torch.bfloat16)], lr=1e-5, **options)
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        update = Update(1, "", (group,), {})
        assert not self_test.blocks_are_exact(kind, update, 0, torch.bfloat16, compiled=True), kind
        assert self_test.blocks_are_exact(kind, update, 0, torch.float32, compiled=True), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_self_test_mixes_memory_orders(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that blocks take: in half precision none."""
    seen: set[bool] = set()
    own = blocked.program(SGD)

    def looking(parameters: Any, moments: Any, gradients: Any, *rest: Any) -> None:
        assert own is not None
        pairs = [(p, g) for every in gradients for p, g in zip(parameters, every, strict=True)]
        seen.update(p.stride() != g.stride() for p, g in pairs if p.numel() > 1)
        own(parameters, moments, gradients, *rest)

    monkeypatch.setattr(blocked, "program", lambda kind: looking)
    monkeypatch.setattr(self_test, "_proven", {})
    optimizer = SGD([torch.zeros(1, dtype=dtype)], lr=0.1, momentum=0.9, nesterov=True)
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    assert self_test.blocks_are_exact(SGD, Update(1, "", (group,), {}), 0, dtype, compiled=True)
    assert (True in seen) == (dtype == torch.float32)


def test_factors_that_tell_do_so_in_whatever_they_come() -> None:
    assert self_test._telling("betas", (0.9, 0.999)) == (0.83, 0.83)
    assert self_test._telling("betas", [0.9, 0.999]) == [0.83, 0.83]


def _with_plain_factors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``blocked`` as it would be without ``_times``."""
    source, line = inspect.getsource(blocked), "    return one.mul_("
    assert source.count(line) == 1
    file = folder / "plain.py"
    file.write_text(source.replace(line, "    return tensor.mul_(factor)  # " + line.strip()))
    spec = importlib.util.spec_from_file_location("plain", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plain", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_programs_are_used_whatever_the_hyperparameters(kind: Any, dtype: torch.dtype) -> None:
    options = {"momentum": 0.9} if kind is SGD else {"betas": (0.9, 0.95)}
    optimizer = kind([torch.zeros(1, dtype=dtype)], lr=0.1, weight_decay=0.1, **options)
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    assert self_test.blocks_are_exact(kind, Update(1, "", (group,), {}), 0, dtype, compiled=True)
