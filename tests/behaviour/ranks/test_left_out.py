"""What ``resume(strict=False)`` leaves out of what ranks have in common is the same on all of them,
or nothing is restored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep import LogOptions
from everstep.errors import EverstepError, MismatchError, RecoveryError
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from everstep.state.ranks import ddp
from everstep.testing import inspect
from tests.support.ranks.logs import die
from tests.support.ranks.together import on_all, rank_seams
from tests.support.world import forget_open_runs

LOGGED: dict[str, Any] = {
    "method": "logged",
    "every": 4,
    "log": LogOptions(to="disk", batch_steps=1, history="all"),
}
Build = Callable[[int], dict[str, Any]]


@pytest.fixture(autouse=True)
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is as if DistributedDataParallel were around it."""
    ranks = lambda module: (getattr(module, "alike", None), frozenset[str]())  # noqa: E731
    monkeypatch.setattr(ddp, "ddp_replicas", ranks)


@dataclass
class Rank:
    number: int
    ckpt: everstep.Checkpointer
    state: dict[str, Any]

    def train(self, steps: int) -> None:
        """Gradients of the body are the same on all ranks."""
        for _ in range(steps):
            value = 0.1 * (self.ckpt.stats().step + 1)
            for module in (one for one in self.state.values() if isinstance(one, nn.Module)):
                for parameter in module.parameters():
                    parameter.grad = torch.full_like(parameter, value)
            for name, one in self.state.items():
                if name.startswith("optimizer"):
                    one.step()
            if "scheduler" in self.state:
                self.state["scheduler"].step()
            self.ckpt.step()

    @property
    def weights(self) -> list[torch.Tensor]:
        """Of the body, and what the optimizer has for it."""
        held = self.state["optimizer"].state
        parameters = list(self.state["body"].parameters())
        kept = [p.detach().clone() for p in parameters]
        return kept + [held[p][k].clone() for p in parameters for k in sorted(held.get(p, ()))]


def body(world: int, layers: int = 1, first: str = "0") -> Any:
    net: Any = nn.Sequential()
    for number in range(layers):
        net.add_module(first if number == 0 else str(number), nn.Linear(4, 4))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + number)
    net.alike = tuple(range(world))
    return net


def adamw(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for one in modules for p in one.parameters()], lr=0.1)


def plain(rank: int, world: int = 2) -> dict[str, Any]:
    net = body(world)
    return {"body": net, "optimizer": adamw(net)}


def with_head(rank: int, world: int = 2, on: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """A head on these ranks only, in the same optimizer."""
    net, head = body(world), nn.Linear(2, 2)
    if rank not in on:
        return {"body": net, "optimizer": adamw(net)}
    return {"body": net, "optimizer": adamw(net, head), "head": head}


def with_head_apart(rank: int) -> dict[str, Any]:
    net, head = body(2), nn.Linear(2, 2)
    state = {"body": net, "optimizer": adamw(net)}
    return {**state, "head": head, "optimizer of head": adamw(head)} if rank == 0 else state


def renamed(rank: int) -> dict[str, Any]:
    net = body(2, first="0" if rank else "zero")
    return {"body": net, "optimizer": adamw(net)}


def with_a_layer(rank: int) -> dict[str, Any]:
    """On all ranks."""
    net = body(2, layers=2)
    return {"body": net, "optimizer": adamw(net)}


def of_sgd(rank: int) -> dict[str, Any]:
    net = body(2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return {"body": net, "optimizer": adamw(net) if rank else sgd}


def scheduled(rank: int) -> dict[str, Any]:
    state = plain(rank)
    schedule = torch.optim.lr_scheduler.StepLR(state["optimizer"], 2, gamma=0.5)
    return {**state, "scheduler": schedule}


def otherwise_scheduled(rank: int) -> dict[str, Any]:
    state = scheduled(rank)
    if rank == 1:
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(state["optimizer"], 50)
        state["scheduler"] = cosine
    return state


def scaled(rank: int) -> dict[str, Any]:
    return {**plain(rank), "scaler": torch.amp.GradScaler("cpu")}


def otherwise_scaled(rank: int) -> dict[str, Any]:
    return {**plain(rank), "scaler": torch.amp.GradScaler("cpu", enabled=rank == 1)}


@contextlib.contextmanager
def job(path: Path, build: Build, *, world: int = 2, **options: Any) -> Iterator[list[Rank]]:
    seams = rank_seams(world)
    keeper = everstep.KeeperOptions(process=False)
    about: dict[str, Any] = {"method": "sync", "every": None, "keeper": keeper, **options}

    def start(rank: int) -> Rank:
        state = build(rank)
        about_rank = {"progress_timeout_s": 20.0, "on_failure": "raise", **about}
        ckpt = everstep.Checkpointer(path, state, seams=seams[rank], **about_rank)
        forget_open_runs()
        return Rank(rank, ckpt, state)

    ranks = on_all(*(lambda rank=rank: start(rank) for rank in range(world)))  # type: ignore[misc]
    try:
        yield ranks
    finally:
        for one in ranks:
            with contextlib.suppress(EverstepError):
                one.ckpt.close()


def each(ranks: list[Rank], do: Callable[[Rank], Any]) -> list[Any]:
    """What comes of it on every rank, errors included."""

    def one_does(one: Rank) -> Any:
        try:
            return do(one)
        except EverstepError as error:
            return error

    return on_all(*(lambda one=one: one_does(one) for one in ranks))  # type: ignore[misc]


def resume(ranks: list[Rank], step: int | None = None, *, strict: bool = False) -> list[Any]:
    return each(ranks, lambda one: one.ckpt.resume(step, strict=strict))


def train(ranks: list[Rank], steps: int) -> None:
    def one_trains(one: Rank) -> None:
        one.train(steps)
        one.ckpt.wait(20)

    assert each(ranks, one_trains) == [None] * len(ranks)


def saved(path: Path, build: Build, steps: int = 3, *, world: int = 2, **options: Any) -> None:
    """A run with a base of this step, or, with a log, steps behind one."""
    with job(path, build, world=world, **options) as ranks:
        resume(ranks, strict=True)
        train(ranks, steps)
        if options:
            die(ranks)
        else:
            assert each(ranks, lambda one: (one.ckpt.save(), one.ckpt.wait(20))[0])


def timelines(path: Path) -> list[int]:
    return sorted(scan_run(PosixFileSystem(), path).timelines)


def refused(path: Path, before: Build, build: Build, step: int | None = None, **o: Any) -> str:
    """All ranks refuse, for the same reason, and nothing has been touched."""
    saved(path, before, 6 if o else 3, **o)
    there = timelines(path)
    with job(path, build, **o) as ranks:
        was = [one.weights for one in ranks]
        found = resume(ranks, step)
        assert [type(one) for one in found] == [MismatchError] * 2, found
        assert len({one.message for one in found}) == 1
        assert "add_param_group()" in found[0].hint
        for one, mine in zip(ranks, was, strict=True):
            assert all(map(torch.equal, one.weights, mine))
            assert not inspect(one.ckpt).has_mixed_state
    assert timelines(path) == there
    return str(found[0].message)


def same_everywhere(ranks: list[Rank]) -> None:
    for one in ranks[1:]:
        assert all(map(torch.equal, one.weights, ranks[0].weights))


def test_a_head_in_the_optimizer_of_one_rank(tmp_path: Path) -> None:
    said = refused(tmp_path, plain, with_head)
    assert "'optimizer', tensors replicated on ranks 0-1: rank(s) 0: 2, rank(s) 1: none" in said
    assert "rank 0: head: not in the checkpoint" in said
    assert "rank 0: optimizer/param_groups/0/head.weight: not in the checkpoint" in said


def test_an_optimizer_of_another_class_on_one_rank(tmp_path: Path) -> None:
    said = refused(tmp_path, plain, of_sgd)
    assert "saved by a torch.optim.AdamW, live is a torch.optim.SGD" in said


def test_a_layer_that_has_another_name_on_one_rank(tmp_path: Path) -> None:
    said = refused(tmp_path, plain, renamed)
    assert "'body', tensors replicated on ranks 0-1: rank(s) 0: 2, rank(s) 1: none" in said
    assert "rank 0: body/zero.weight: not in the checkpoint" in said


def test_another_scheduler_on_one_rank(tmp_path: Path) -> None:
    said = refused(tmp_path, scheduled, otherwise_scheduled)
    assert "'scheduler', tensors replicated on ranks 0-1: rank(s) 0: none" in said


def test_a_scaler_that_does_nothing_on_one_rank(tmp_path: Path) -> None:
    said = refused(tmp_path, scaled, otherwise_scaled)
    assert "rank 0: scaler: saved by a scaler that is enabled, the live one is not" in said


@pytest.mark.thinned(3)
@pytest.mark.parametrize("step", [None, 3, 4])
def test_with_a_log_behind_the_base(tmp_path: Path, step: int | None) -> None:
    refused(tmp_path, plain, with_head, step, **LOGGED)


@pytest.mark.parametrize("build", [with_head_apart, with_a_layer])
def test_what_ranks_have_for_themselves_or_all_leave_out_may_be(
    tmp_path: Path, build: Build
) -> None:
    saved(tmp_path, plain)
    with job(tmp_path, build) as ranks:
        found = resume(ranks)
        assert [(one.step, one.exact) for one in found] == [(3, False)] * 2, found
        assert bool(found[0].mismatched)
        assert bool(found[1].mismatched) == (build is with_a_layer)
        train(ranks, 2)
        same_everywhere(ranks)


def test_what_is_new_on_one_rank_is_added_behind_the_resume(tmp_path: Path) -> None:
    """As the error advises."""

    def head_to_come(rank: int) -> dict[str, Any]:
        return {**plain(rank), **({"head": nn.Linear(2, 2)} if rank == 0 else {})}

    saved(tmp_path, plain)
    with job(tmp_path, head_to_come) as ranks:
        assert [one.step for one in resume(ranks)] == [3, 3]
        head = ranks[0].state["head"]
        ranks[0].state["optimizer"].add_param_group({"params": list(head.parameters())})
        train(ranks, 2)
        same_everywhere(ranks)
        assert each(ranks, lambda one: (one.ckpt.save(), one.ckpt.wait(20))[0])
        wanted = [one.weights for one in ranks]

    def added(rank: int) -> dict[str, Any]:
        state = head_to_come(rank)
        if rank == 0:
            state["optimizer"].add_param_group({"params": list(state["head"].parameters())})
        return state

    with job(tmp_path, added) as ranks:
        assert [(one.step, one.mismatched) for one in resume(ranks, strict=True)] == [(5, ())] * 2
        for one, mine in zip(ranks, wanted, strict=True):
            assert all(map(torch.equal, one.weights, mine))


def test_a_rank_that_leaves_nothing_out_may_be_strict(tmp_path: Path) -> None:
    saved(tmp_path, plain)
    with job(tmp_path, with_head_apart) as ranks:
        found = each(ranks, lambda one: one.ckpt.resume(strict=one.number == 1))
        assert [one.step for one in found] == [3, 3], found


def test_a_strict_rank_and_one_that_would_leave_it_out(tmp_path: Path) -> None:
    """Of which the strict one would restore all, or which would leave it out itself."""
    saved(tmp_path, plain)
    with job(tmp_path, with_head) as ranks:
        was = [one.weights for one in ranks]
        found = each(ranks, lambda one: one.ckpt.resume(strict=one.number == 1))
        assert [type(one) for one in found] == [MismatchError] * 2, found
        found = each(ranks, lambda one: one.ckpt.resume(strict=one.number == 0))
        assert [type(one) for one in found] == [MismatchError, RecoveryError], found
        assert "rank 0 could not resume: the checkpoint and the live state differ" in str(found[1])
        for one, mine in zip(ranks, was, strict=True):
            assert all(map(torch.equal, one.weights, mine))


def test_a_step_of_the_log_of_another_state(tmp_path: Path) -> None:
    """The log leads on from a whole state alone: all ranks say so, before anything is touched."""
    saved(tmp_path, plain, 6, **LOGGED)
    with job(tmp_path, with_a_layer, **LOGGED) as ranks:
        was = [one.weights for one in ranks]
        found = resume(ranks, 3)
        assert [type(one) for one in found] == [RecoveryError] * 2, found
        assert "step 2: the log after it belongs to a state of another composition" in str(found[0])
        for one, mine in zip(ranks, was, strict=True):
            assert all(map(torch.equal, one.weights, mine))
            assert not inspect(one.ckpt).has_mixed_state
        found = resume(ranks, 4)
        assert [(one.step, one.replayed) for one in found] == [(4, 0)] * 2, found
        train(ranks, 1)
        same_everywhere(ranks)


def test_a_step_of_the_log_of_another_state_in_one_process(tmp_path: Path) -> None:
    saved(tmp_path, plain, 6, **LOGGED)
    state = with_a_layer(0)
    keeper = everstep.KeeperOptions(process=False)
    with everstep.Checkpointer(tmp_path, state, keeper=keeper, **LOGGED) as ckpt:
        one = Rank(0, ckpt, state)
        was = one.weights
        with pytest.raises(RecoveryError, match="a state of another composition"):
            ckpt.resume(3, strict=False)
        assert all(map(torch.equal, one.weights, was))
        assert not inspect(ckpt).has_mixed_state
        found = ckpt.resume(4, strict=False)
        assert (found.step, found.replayed, found.exact) == (4, 0, False)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("build", [with_head_apart, with_a_layer])
def test_the_newest_base_where_the_log_is_of_another_state(tmp_path: Path, build: Build) -> None:
    saved(tmp_path, plain, 6, **LOGGED)
    with job(tmp_path, build, **LOGGED) as ranks:
        found = resume(ranks)
        assert [(one.step, one.replayed) for one in found] == [(4, 0)] * 2, found
        mine = found[0]
        assert any("another composition" in one.reason for one in mine.skipped)
        same_everywhere(ranks)


def test_of_which_rank_a_common_tensor_is_taken(tmp_path: Path) -> None:
    """Each rank had its own; what two have in common now can be only one of these."""

    def each_its_own(rank: int) -> dict[str, Any]:
        net = body(2)
        del net.alike
        with torch.no_grad():
            next(net.parameters()).add_(rank)
        return {"body": net, "optimizer": adamw(net)}

    said = refused(tmp_path, each_its_own, plain)
    assert "rank 0: body/0.weight: rank(s) 0 had one version, rank(s) 1 another" in said
    with job(tmp_path, plain) as ranks:
        found = resume(ranks, strict=True)
        assert all(isinstance(one, EverstepError) for one in found)
        assert "build the same model and optimizer on every rank" in found[0].hint


def test_more_ranks_than_before_with_a_head_on_one(tmp_path: Path) -> None:
    """The new rank begins with what a rank had that was like it."""
    saved(tmp_path, with_head)
    with job(tmp_path, lambda rank: with_head(rank, 3), world=3) as ranks:
        found = resume(ranks, strict=True)
        assert [one.step for one in found] == [3] * 3, found
        same_everywhere(ranks)
        train(ranks, 2)
        same_everywhere(ranks)
        assert each(ranks, lambda one: (one.ckpt.save(), one.ckpt.wait(20))[0])
    with job(tmp_path, lambda rank: with_head(rank, 3), world=3) as ranks:
        assert [(one.step, one.mismatched) for one in resume(ranks, strict=True)] == [(5, ())] * 3


def test_more_ranks_than_before_and_the_new_one_fits_none(tmp_path: Path) -> None:
    saved(tmp_path, lambda rank: with_head(rank, on=(0, 1)))
    with job(tmp_path, lambda rank: with_head(rank, 3, on=(0, 1)), world=3) as ranks:
        found = resume(ranks, strict=True)
        assert "head.weight: in the checkpoint, not in the optimizer" in str(found[2])
        assert "where ranks leave out the same" in str(found[2])
        found = resume(ranks)
        assert [type(one) for one in found] == [MismatchError] * 3, found
        assert "rank 2: " in found[0].message


# --- A part of the state -------------------------------------------------------------------


def body_alone(rank: int) -> dict[str, Any]:
    return {"body": body(2)}


def test_ranks_with_a_part_of_the_state_do_not_drop_a_log_unasked(tmp_path: Path) -> None:
    """As a job of one rank: the steps that the log has would be lost."""
    path = tmp_path / "run"
    saved(path, plain, 6, **LOGGED)  # a base of step 4, and the log to step 6
    with job(path, body_alone) as ranks:
        for error in resume(ranks):
            assert isinstance(error, RecoveryError)
            assert "reaches step 6, but without 'optimizer' in the state" in str(error)
            assert "resume(step=4, strict=False)" in str(error.hint)
    assert timelines(path) == [1]
    with job(path, plain, **LOGGED) as ranks:
        assert [one.step for one in resume(ranks, strict=True)] == [6, 6]
        die(ranks)
    with job(path, body_alone) as ranks:
        assert [one.step for one in resume(ranks, 4)] == [4, 4]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("strict", [True, False])
def test_ranks_pass_over_a_base_of_a_part_of_the_state(tmp_path: Path, strict: bool) -> None:
    path = tmp_path / "run"
    saved(path, plain)
    with job(path, body_alone) as ranks:
        assert [one.step for one in resume(ranks)] == [3, 3]
        train(ranks, 2)
        assert each(ranks, lambda one: (one.ckpt.save(), one.ckpt.wait(20))[0])
    with job(path, plain) as ranks:
        for error in resume(ranks, 5, strict=True):  # a step that is asked for is not passed over
            assert isinstance(error, MismatchError)
            assert error.mismatches == (("optimizer", "not in the checkpoint"),)
    with job(path, plain) as ranks:
        for found in resume(ranks, strict=strict):
            assert (found.step, found.mismatched) == (3, ())
            assert "the base of step 5 of timeline 2 has no 'optimizer'" in str(found.notes)
    with job(path, body_alone) as ranks:
        assert [one.step for one in resume(ranks, 5)] == [5, 5]
