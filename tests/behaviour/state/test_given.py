"""What users hand over by habit or by mistake: it comes back right, or it is said at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from everstep import Budget, Checkpointer, KeeperOptions
from everstep.errors import (
    EverstepError,
    MismatchError,
    OptionError,
    OutOfSpaceError,
    StorageError,
    UnsupportedStateError,
)
from everstep.state.providers.optimizers import CLASS
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from everstep.state.values.objects import decode
from tests.support.world import opened

Make = Callable[[list[nn.Parameter]], Optimizer]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(3.0))]


def trained(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_a_modules_state_dict_is_restored_into_the_module(run_folder: Path) -> None:
    saved, live = nn.Linear(3, 2), nn.Linear(3, 2)
    with opened(run_folder, {"all": {"model": saved.state_dict()}}) as ckpt:
        ckpt.save()
    with opened(run_folder, {"all": {"model": live.state_dict()}}) as ckpt:
        ckpt.resume()
    assert torch.equal(live.weight, saved.weight)
    assert torch.equal(live.bias, saved.bias)


def test_parameters_in_containers_are_restored_where_they_lie(run_folder: Path) -> None:
    saved, live = parameters(), [nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.AdamW(live, lr=1.0)
    with opened(run_folder, {"parts": {"list": saved, "seen": 7}}) as ckpt:
        ckpt.save()
    state: dict[str, Any] = {"parts": {"list": live, "seen": 0}}
    with opened(run_folder, state) as ckpt:
        ckpt.resume()
    assert torch.equal(live[0], saved[0])
    assert state["parts"]["list"][0] is live[0] is optimizer.param_groups[0]["params"][0]
    assert state["parts"]["seen"] == 7


def test_a_parameter_in_a_container_that_differs_is_reported(run_folder: Path) -> None:
    with opened(run_folder, {"parts": parameters()}) as ckpt:
        ckpt.save()
    live = [nn.Parameter(torch.zeros(4))]
    with opened(run_folder, {"parts": live}) as ckpt:
        with pytest.raises(MismatchError, match=r"parts/0: saved F32 \[3\], live F32 \[4\]"):
            ckpt.resume()
        assert ckpt.resume(strict=False).mismatched
    assert torch.equal(live[0], torch.zeros(4))


def test_other_tensors_in_containers_are_put_there_anew(run_folder: Path) -> None:
    with opened(run_folder, {"history": [torch.ones(3), torch.ones(2)]}) as ckpt:
        ckpt.save()
    zero = torch.zeros(3)
    live = {"history": [zero, zero]}  # one tensor, as a placeholder for two
    with opened(run_folder, live) as ckpt:
        ckpt.resume()
    assert [len(tensor) for tensor in live["history"]] == [3, 2]
    assert torch.equal(zero, torch.zeros(3))


def of_optimizer() -> Any:
    return torch.optim.AdamW(parameters()).state_dict()


def of_scheduler() -> Any:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    return {"all": [torch.optim.lr_scheduler.StepLR(optimizer, 2).state_dict()]}


def of_scaler() -> Any:
    return torch.amp.GradScaler("cpu").state_dict()


@pytest.mark.parametrize(
    ("make", "whose"),
    [(of_optimizer, "an optimizer"), (of_scheduler, "a scheduler"), (of_scaler, "a scaler")],
)
def test_copies_that_training_does_not_change_are_refused(
    make: Callable[[], Any], whose: str, run_folder: Path
) -> None:
    with pytest.raises(OptionError, match=f"'kept' is a copy from the state_dict.. of {whose}:"):
        Checkpointer(run_folder, {"kept": make()})
    assert not run_folder.exists()


ADAM: Make = lambda given: torch.optim.Adam(given, lr=0.1)  # noqa: E731
ADAMW: Make = lambda given: torch.optim.AdamW(given, lr=0.1)  # noqa: E731
SGD: Make = lambda given: torch.optim.SGD(given, lr=0.1)  # noqa: E731
RADAM: Make = lambda given: torch.optim.RAdam(given, lr=0.1)  # noqa: E731


@pytest.mark.parametrize(
    ("saved", "live", "lacks"),
    [
        (ADAMW, SGD, "SGD has no .*betas"),
        (SGD, ADAM, "Adam has no .*momentum"),
        (ADAMW, RADAM, "RAdam has no amsgrad, fused"),
    ],
)
def test_another_class_of_optimizer_is_a_mismatch(
    saved: Make, live: Make, lacks: str, run_folder: Path
) -> None:
    with opened(run_folder, {"w": parameters()[0], "o": saved(parameters())}) as ckpt:
        ckpt.save()
    optimizer = live(parameters())
    before = copy.deepcopy(optimizer.state_dict())
    with opened(run_folder, {"w": parameters()[0], "o": optimizer}) as ckpt:
        with pytest.raises(MismatchError, match=rf"o/param_groups/0: saved by another.*{lacks}"):
            ckpt.resume()
        recovery = ckpt.resume(strict=False)
    assert recovery.mismatched
    assert not recovery.exact
    assert optimizer.state_dict() == before


SPARSE_ADAM: Make = lambda given: torch.optim.SparseAdam(given, lr=0.1)  # noqa: E731


@pytest.mark.parametrize(
    ("saved", "live", "names"),
    [
        (ADAM, ADAMW, ("torch.optim.Adam", "torch.optim.AdamW")),
        (ADAMW, ADAM, ("torch.optim.AdamW", "torch.optim.Adam")),
        (SPARSE_ADAM, ADAM, ("torch.optim.SparseAdam", "torch.optim.Adam")),
    ],
)
def test_another_class_with_the_same_options_is_a_mismatch(
    saved: Make, live: Make, names: tuple[str, str], run_folder: Path
) -> None:
    """AdamW would take Adam's options, and train on as Adam; its gradient log would be replayed."""
    weight = [nn.Parameter(torch.ones(2))]
    with opened(run_folder, {"w": weight[0], "o": saved(weight), "n": 1}) as ckpt:
        ckpt.save()
    state = {"w": nn.Parameter(torch.zeros(2)), "n": 2}
    optimizer = state["o"] = live([state["w"]])  # type: ignore[list-item]
    before = copy.deepcopy(optimizer.state_dict())
    with opened(run_folder, state) as ckpt:
        with pytest.raises(MismatchError) as caught:
            ckpt.resume()
        assert caught.value.mismatches == (("o", f"saved by a {names[0]}, live is a {names[1]}"),)
        assert "resume(strict=False) to load the rest" in str(caught.value.hint)
        assert torch.equal(state["w"], torch.zeros(2))  # type: ignore[arg-type]
        recovery = ckpt.resume(strict=False)
    assert recovery.mismatched == caught.value.mismatches
    assert not recovery.exact
    assert optimizer.state_dict() == before
    assert (state["n"], state["w"].tolist()) == (1, [1, 1])  # type: ignore[attr-defined]


class Renamed(torch.optim.Adam):
    """A class of the user's."""


@pytest.mark.parametrize("kinds", [(torch.optim.AdamW, Renamed), (Renamed, torch.optim.AdamW)])
def test_a_class_of_the_users_is_not_compared(kinds: tuple[Any, Any], run_folder: Path) -> None:
    """It may be renamed, or wrapped: a run must not be lost for its name."""
    with opened(run_folder, {"o": trained(kinds[0](parameters()))}) as ckpt:
        ckpt.save()
    live = kinds[1](parameters())
    with opened(run_folder, {"o": live}) as ckpt:
        assert not ckpt.resume().mismatched
    assert live.state_dict()["state"].keys() == {0}
    assert "everstep/class" not in live.state_dict()


def test_the_class_is_named_in_each_survey() -> None:
    """Proven from the last, or looked at anew; and goes when the class is exchanged."""
    optimizer = trained(ADAMW(parameters()))
    state = State({"o": optimizer})
    for _ in range(3):
        tree: Any = decode(state.survey().objects()["everstep/objects/o"])
        assert tree[CLASS] == "torch.optim.AdamW"
    optimizer.__class__ = Renamed
    tree = decode(state.survey().objects()["everstep/objects/o"])
    assert CLASS not in tree


def test_options_of_others_make_no_other_class(run_folder: Path) -> None:
    """Those of a scheduler, of the user, and those that other versions of torch do not have."""
    optimizer = trained(ADAMW(parameters()))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
    optimizer.param_groups[0].update(mine=3)
    with opened(run_folder, {"o": optimizer}) as ckpt:
        ckpt.save()
    live = ADAMW(parameters())
    for options in (live.defaults, *live.param_groups):
        options.pop("decoupled_weight_decay", None)
        options["of_a_newer_torch"] = 1
    with opened(run_folder, {"o": live}) as ckpt:
        assert not ckpt.resume().mismatched
    assert live.param_groups[0]["mine"] == 3


def test_parameters_that_are_in_no_part_of_the_state_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, head = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    State({"model": model, "optimizer": optimizer})
    assert "trains 2 parameter(s) that are not in the state" in caplog.text
    caplog.clear()
    State({"model": model, "head": list(head.parameters()), "optimizer": optimizer})
    assert not caplog.text


def test_a_state_without_parts_is_refused(run_folder: Path) -> None:
    with pytest.raises(OptionError, match="the state is empty") as refused:
        Checkpointer(run_folder, {})
    assert "model" in (refused.value.hint or "")
    assert State({}, ranks=RankInfo(1, 2)).values == {}, "one of several may have nothing"


def test_a_data_loader_is_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedStateError, match="ResumableLoader"):
        State({"loader": DataLoader([1, 2])})  # type: ignore[arg-type]


def test_a_place_stands_behind_the_first_line_of_a_message() -> None:
    assert str(EverstepError("two places:\n  a\n  b", step=3)) == "two places [step 3]:\n  a\n  b"
    assert str(EverstepError("one place", step=3, hint="go")) == "one place [step 3]\n  hint: go"


def test_a_budget_that_holds_no_base_advises_no_number_of_bases(run_folder: Path) -> None:
    process = KeeperOptions(process=False)
    with (
        pytest.raises(OutOfSpaceError) as caught,
        opened(run_folder, {"n": 1}, budget=Budget(disk_bytes=1), keeper=process) as ckpt,
    ):
        ckpt.resume()
    assert "keep=" not in str(caught.value.hint)


def test_a_file_in_the_way_of_a_run_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="a file is in the place of a directory"):
        Checkpointer(tmp_path / "file", {"n": 1})
