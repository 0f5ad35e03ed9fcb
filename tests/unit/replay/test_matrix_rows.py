"""What the exactness matrix says: of docs/EXACTNESS.md, of the trainings that prove it, and of
torch's updates."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import UnsupportedStateError
from everstep.replay.exactness import MATRIX, kind_refusal
from everstep.replay.optimizer_step import writes_gradients
from everstep.seams.fingerprint import computed_on, fingerprint
from tests.support.matrix import CASES, FLAGS, LOOPS, OPTIONS, SKIPPED, STEPS, Case, World, table

VARIANTS = ("for-loop", "foreach", "fused")


def test_the_document_has_the_matrix() -> None:
    kinds = dict.fromkeys((row.optimizer, row.device) for row in MATRIX)
    there = {(row.optimizer, row.device, row.variant) for row in MATRIX}
    wanted = [
        [name, device, *("x" if (name, device, v) in there else "" for v in VARIANTS)]
        for name, device in sorted(kinds, key=lambda kind: (kind[0].lower(), kind[1]))
    ]
    lines = ["| " + " | ".join(row) + " |" for row in wanted]
    assert sorted(table("optimizer")) == sorted(wanted), "it should be:\n" + "\n".join(lines)


def test_the_document_has_the_conditions() -> None:
    conditions = {row[0] for row in table("condition")}
    with computed_on(("cuda",)):
        assert conditions == {*fingerprint(), "cuda", "device", "denormals"} - {"python"}


def test_the_document_says_why_lbfgs_is_refused() -> None:
    reasons = {row[0]: row[1] for row in table("configuration")}
    assert reasons["LBFGS"] in (kind_refusal(torch.optim.LBFGS) or "")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (torch.optim.LBFGS, "evaluates the loss several times"),
        (lambda p: torch.optim.SparseAdam(list(p)), "sparse gradients"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable=True"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "capturable=True"),
    ],
)
def test_what_cannot_be_logged_is_refused_with_the_reason(
    make: Callable[[Any], torch.optim.Optimizer], why: str, run_folder: Path
) -> None:
    model = nn.Linear(2, 2)
    state = {"model": model, "optimizer": make(model.parameters())}
    with pytest.raises(UnsupportedStateError, match=why):
        everstep.Checkpointer(run_folder, state, method="logged")


def compiled(run: Path, step: Callable[[torch.optim.Optimizer], Any]) -> None:
    """A step that is run by ``step``, and recorded."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    keeper = everstep.KeeperOptions(process=False)
    with everstep.Checkpointer(run, state, method="logged", keeper=keeper) as ckpt:
        ckpt.resume()
        model(torch.randn(3, 2)).sum().backward()
        step(optimizer)
        with pytest.raises(
            UnsupportedStateError, match=r"optimizer cannot .* step\(\) is compiled"
        ):
            ckpt.step()


def test_a_compiled_step_is_refused(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(optimizer: torch.optim.Optimizer) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            optimizer.step()

    compiled(run_folder, step)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of what it cannot trace
def test_a_really_compiled_step_is_refused(run_folder: Path) -> None:
    compiled(run_folder, lambda optimizer: torch.compile(optimizer.step, backend="eager")())


# --- The trainings that prove it --------------------------------------------------------


def test_every_row_is_trained() -> None:
    rows = {(row.optimizer, row.variant) for row in MATRIX if row.device == "cpu"}
    assert {(case.optimizer, case.variant) for case in CASES.values()} == rows - {
        ("SparseAdam", "for-loop")
    }


def trained(case: str, loop: str) -> tuple[World, list[dict[str, str]]]:
    world = World(CASES[case], LOOPS[loop])
    states = [world.snapshot()]
    for _ in range(STEPS):
        world.train()
        states.append(world.snapshot())
    return world, states


@pytest.mark.parametrize("case", ["AdamW-for-loop", "AdamW-fused"])
def test_the_traps_are_there(case: str) -> None:
    """Or a training that passes would show nothing."""
    world, states = trained(case, "all")
    weight, statistics = "model/3.weight", "low/1.running_mean"
    for step in range(1, STEPS + 1):
        before, after = states[step - 1], states[step]
        assert (before[weight] == after[weight]) is (step in SKIPPED), step
        assert (before["low/3.weight"] == after["low/3.weight"]) is (step in SKIPPED), step
        assert before[statistics] != after[statistics]
        assert before["rng"] != after["rng"]
        assert before["optimizer/param_groups"] != after["optimizer/param_groups"]
        frozen = before["model/0.weight"] == after["model/0.weight"]
        assert frozen is (step in (*SKIPPED, 4, 5))
        late = before["model/3.bias"] == after["model/3.bias"]
        assert late is (step in (*SKIPPED, 1, 2, 3))
    assert states[0]["model/5.bias"] == states[-1]["model/5.bias"]
    assert world.head.weight is world.middle.weight
    for trap in LOOPS:
        if trap not in ("plain", "all", "zeroed"):  # zeroed: only a log can see the difference
            assert trained(case, trap)[1][-1]["model/0.weight"] != states[-1]["model/0.weight"]


# --- Updates and their gradients --------------------------------------------------------


def unchanged(case: Case, extra: dict[str, Any]) -> bool:
    """Whether some updates leave their gradients as they are."""
    parameters = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3))]
    kind: Any = getattr(torch.optim, case.optimizer)
    optimizer = kind(parameters, **{**case.options, **extra}, **FLAGS[case.variant])
    for _ in range(3):
        given = [torch.randn_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        if not all(torch.equal(p.grad, g) for p, g in zip(parameters, given, strict=True)):
            return False
    return True


@pytest.mark.parametrize("name", CASES)
def test_updates_that_write_to_their_gradients_are_known(name: str) -> None:
    case = CASES[name]
    for decay, maximize in itertools.product([None, 0.0, 0.1], [False, True]):
        extra: dict[str, Any] = {"maximize": maximize}
        if decay is not None and case.optimizer != "Rprop":
            extra["weight_decay"] = decay
        group = {**case.options, **extra, **FLAGS[case.variant]}
        kind: Any = getattr(torch.optim, case.optimizer)
        assert unchanged(case, extra) or writes_gradients(kind, [group])


def test_one_is_known_that_does() -> None:
    assert not unchanged(CASES["SGD-nesterov-foreach"], {})
    assert OPTIONS["SGD"]
