"""What several ranks do at the same steps, though each measures, or sees, something else: bases by
time and by cost, and the end of a step whose gradients are not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from everstep import Budget, KeeperOptions, LogOptions
from everstep.errors import EverstepError, KeeperError, NonFiniteError, StorageError
from everstep.options import Every
from everstep.seams import Seams, SystemClock
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.ranks import ddp
from everstep.state.ranks.log_shares import log_shares
from everstep.testing import inspect
from everstep.trainer.job.job import Job
from everstep.trainer.session.cadence import ASK_EVERY, FIRST_STEPS
from tests.support.keepers import end_keepers
from tests.support.ranks.logs import die
from tests.support.ranks.replicas import Replica, layers, replicas, take
from tests.support.ranks.replicas import trained as fresh
from tests.support.ranks.together import (
    RankTraining,
    bases,
    on_all,
    rank_seams,
    resume,
    train,
    trainings,
)
from tests.support.world import HookedFileSystem

FASTER_S, SLOWER_S = 10.0, 13.0
TIMED: dict[str, Any] = {"every": "100s", "keep": 9, "progress_timeout_s": 600.0}


class Ahead(SystemClock):
    """A clock that is ahead by what it is told: steps are long by it, and all else goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds


def clocked(world: int = 2) -> tuple[list[Seams], list[Ahead]]:
    """Ranks whose clocks go on by themselves alone."""
    clocks = [Ahead() for _ in range(world)]
    seams = rank_seams(world)
    return [Seams(group=s.group, clock=c) for s, c in zip(seams, clocks, strict=True)], clocks


def steps(ranks: list[RankTraining], clocks: list[Ahead], count: int) -> None:
    """The second rank's take longer, by its clock."""

    def one_trains(rank: int) -> None:
        for _ in range(count):
            clocks[rank].advance((FASTER_S, SLOWER_S)[rank])
            ranks[rank].train(1)

    on_all(*(lambda rank=rank: one_trains(rank) for rank in range(len(ranks))))  # type: ignore[misc]


def committed(ranks: list[RankTraining]) -> list[int]:
    on_all(*(lambda one=one: one.ckpt.wait(20) for one in ranks))  # type: ignore[misc]
    (steps,) = {tuple(sorted(bases(PurePath(inspect(one.ckpt).run)))) for one in ranks}  # type: ignore[arg-type]
    assert {one.ckpt.stats().failed for one in ranks} == {0}
    return list(steps)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", ["async", "lazy", "checkfreq", "logged"])
def test_a_time_is_over_for_all_ranks_at_once(tmp_path: Path, method: str) -> None:
    """When it is over for the last of them, which is the faster one."""
    path, (seams, clocks) = tmp_path / "run", clocked()
    with trainings(path, path, seams=seams, method=method, **TIMED) as ranks:
        resume(ranks)
        steps(ranks, clocks, 32)
        first = [1] if method == "logged" else []
        assert committed(ranks) == [*first, *(len(first) + n for n in (10, 20, 30))]
        if first:
            die(ranks)


def test_a_log_that_needs_nothing_waits_for_no_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most steps cost a byte that nobody waits for; what a step says is known at the next one."""
    path, asked = tmp_path / "run", list[str]()
    with trainings(path, path, method="logged", every=None) as ranks:
        resume(ranks)
        exchange = Job.exchange

        def counted(job: Job, what: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
            if job.info.rank == 0:
                asked.append(what)
            return exchange(job, what, mine)

        monkeypatch.setattr(Job, "exchange", counted)
        train(ranks, 2 * ASK_EVERY + 3)
        assert asked == [f"end step {step}" for step in (1, 1 + ASK_EVERY, 1 + 2 * ASK_EVERY)]
        die(ranks)


def test_with_little_memory_only_the_captures_are_taken_that_are_due(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several ranks need that for five states, to have a capture in common when they are killed."""
    path, keeper = tmp_path / "run", KeeperOptions()  # processes, which would hold the others
    budget = Budget(host_bytes=40_000)
    options = {"method": "checkflow", "every": 3, "keeper": keeper, "budget": budget}
    try:
        with trainings(path, path, **options) as ranks:
            resume(ranks)
            train(ranks, 7)
            assert committed(ranks) == [3, 6]
            schedules = [one.ckpt.stats().schedule for one in ranks]
            assert [one and (one.captures, one.held_step) for one in schedules] == [(2, 6)] * 2
            on_all(*(one.ckpt.close for one in ranks))
    finally:
        end_keepers(tmp_path)
    assert capsys.readouterr().err.count("captures between bases are not kept: none is taken") == 1


def test_what_one_rank_saves_begins_the_time_anew(tmp_path: Path) -> None:
    path, (seams, clocks) = tmp_path / "run", clocked()
    with trainings(path, path, seams=seams, method="async", **TIMED) as ranks:
        resume(ranks)
        steps(ranks, clocks, 14)
        on_all(*(one.ckpt.save for one in ranks))
        steps(ranks, clocks, 11)
        assert committed(ranks) == [10, 14, 24]


def test_a_rank_that_fails_at_a_step_still_asks_at_the_same_ones(tmp_path: Path) -> None:
    """And a caller that goes on meets the others again."""
    path, (seams, clocks) = tmp_path / "run", clocked()
    with trainings(path, path, seams=seams, method="async", **TIMED) as ranks:
        resume(ranks)
        for step in range(1, 22):

            def one_trains(one: RankTraining, step: int = step) -> None:
                clocks[one.rank].advance(FASTER_S)
                expected: Any = contextlib.nullcontext()
                if one.rank == 1 and step not in (10, 20):
                    inspect(one.ckpt).channel.post(KeeperError("of a test"))
                    expected = pytest.raises(KeeperError, match="of a test")
                with expected:
                    one.train(1)

            on_all(*(lambda one=one: one_trains(one) for one in ranks))  # type: ignore[misc]
        assert committed(ranks) == [10, 20]


def test_an_interval_is_chosen_by_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest that one of them wants; rank 0 reports it, and it is what ``stats()`` has."""
    path, (seams, clocks), costs_s = tmp_path / "run", clocked(), (10.0, 30.0)

    def of_rank(rank: int) -> Seams:
        def hook(op: str, path: PurePath) -> None:
            if op == "rename" and path.name == f"rank-{rank:05d}.safetensors":
                clocks[rank].advance(costs_s[rank])

        group, clock = seams[rank].group, clocks[rank]
        return Seams(filesystem=HookedFileSystem(hook), clock=clock, group=group)

    options = {**TIMED, "every": Every(auto=True, mtbf_s=6000.0)}
    with trainings(path, path, seams=[of_rank(0), of_rank(1)], **options) as ranks:
        resume(ranks)
        steps(ranks, clocks, 2 * ASK_EVERY + 1)
        assert committed(ranks) == [FIRST_STEPS + 1]
        wanted = round((2 * 6000.0 * 30.0) ** 0.5 / SLOWER_S)
        assert [one.ckpt.stats().interval_steps for one in ranks] == [wanted] * 2
        steps(ranks, clocks, wanted)
        assert committed(ranks) == [FIRST_STEPS + 1, FIRST_STEPS + 1 + wanted]
    said = [line for line in capsys.readouterr().err.splitlines() if "a base every" in line]
    assert len(said) == 1
    assert all(f"a base every {wanted} steps" in line for line in said)
    assert all("according to rank 1" in line for line in said)


# --- Gradients that are not finite --------------------------------------------------------

WATCHED: dict[str, Any] = {"method": "logged", "every": 5, "log": LogOptions(watch=True)}


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is as if DistributedDataParallel were around it, without a group of processes."""
    ranks = lambda module: (getattr(module, "alike", None), frozenset[str]())  # noqa: E731
    monkeypatch.setattr(ddp, "ddp_replicas", ranks)


def spoil(ranks: list[Replica], recorded_by: int) -> None:
    """An update that consumes NaN, for a parameter whose gradients only one rank records."""
    for one in ranks:
        state = inspect(one.ckpt).state
        owners = {name: part.owner for name, part in log_shares(state)["optimizer"].items()}
        provider = state.providers["optimizer"]
        assert isinstance(provider, OptimizerProvider)
        named = [parameter for name, parameter in provider.named() if owners[name] == recorded_by]

        def spoils(*_: Any, bad: torch.nn.Parameter = named[0]) -> None:
            assert bad.grad is not None
            bad.grad.view(-1)[1:2] = torch.nan

        hook = one.optimizer.register_step_pre_hook(spoils)
        one.optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)  # no late one
        take(one.model, one.optimizer, one.state["data"]["step"])
        hook.remove()
        one.state["data"]["step"] += 1


def failures(ranks: list[Replica], do: Callable[[Replica], Any]) -> list[EverstepError]:
    def fails(one: Replica) -> EverstepError:
        with pytest.raises(EverstepError) as caught:
            do(one)
        return caught.value

    return on_all(*(lambda one=one: fails(one) for one in ranks))  # type: ignore[misc]


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_sees_ends_the_step_of_all(tmp_path: Path, rank: int) -> None:
    """Before a base is taken of it; and training goes on without that batch."""
    path = tmp_path / "run"
    with replicas(path, path, **WATCHED) as ranks:
        together(ranks, 4)
        spoil(ranks, rank)
        for error in failures(ranks, lambda one: one.ckpt.step()):
            assert isinstance(error, NonFiniteError)
            assert (error.step, error.rank) == (5, rank)
            assert "consumed by step 5 is not finite" in error.message
            assert "ckpt.rewind(4) on every rank" in str(error)
        assert [one.ckpt.stats().saves for one in ranks] == [1, 1], "none of step 5"
        found = on_all(*(lambda one=one: one.ckpt.rewind(4) for one in ranks))  # type: ignore[misc]
        assert [(one.step, one.exact) for one in found] == [(4, True)] * 2
        for one in ranks:
            one.state["data"]["step"] += 1  # that batch
        train(ranks, 4)  # type: ignore[arg-type]
        model = layers(None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for at in (0, 1, 2, 3, 5, 6, 7, 8):
            take(model, optimizer, at)
        for one in ranks:
            assert all(map(torch.equal, one.weights, model.parameters()))
        die(ranks)


def together(ranks: list[Replica], steps: int) -> None:
    resume(ranks)  # type: ignore[arg-type]
    train(ranks, steps)  # type: ignore[arg-type]


@pytest.mark.usefixtures("alike")
def test_by_another_policy_all_ranks_hear_of_it_and_go_on(tmp_path: Path) -> None:
    path, told = tmp_path / "run", list[EverstepError]()
    with replicas(path, path, **WATCHED, on_failure=told.append) as ranks:
        together(ranks, 2)
        spoil(ranks, 1)
        on_all(*(one.ckpt.step for one in ranks))
        train(ranks, 2)  # type: ignore[arg-type]
        spoil(ranks, 0)
        on_all(*(one.ckpt.step for one in ranks))
        assert {type(error) for error in told} == {NonFiniteError}
        found = [(error.step, error.rank) for error in told]
        assert found == [(3, 1), (3, 1), (6, 0), (6, 0)]
        die(ranks)


@pytest.mark.usefixtures("alike")
def test_another_error_of_a_rank_does_not_stand_before_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with replicas(path, path, **WATCHED) as ranks:
        together(ranks, 2)
        spoil(ranks, 0)
        ask = inspect(ranks[1].ckpt).consensus.decide

        def asks(step: int) -> tuple[bool, bool]:
            inspect(ranks[1].ckpt).channel.post(StorageError("of a test"))
            return ask(step)

        inspect(ranks[1].ckpt).consensus.decide = asks  # type: ignore[method-assign]
        assert {type(e) for e in failures(ranks, lambda one: one.ckpt.step())} == {NonFiniteError}
        die([ranks[0]])
        with pytest.raises(StorageError, match="of a test"):
            die([ranks[1]])


@pytest.mark.usefixtures("alike")
def test_no_rank_takes_a_last_base_of_what_one_has_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, told = tmp_path / "run", list[EverstepError]()
    with replicas(path, path, **{**WATCHED, "every": None}, on_failure=told.append) as ranks:
        together(ranks, 2)
        spoil(ranks, 1)
        on_all(*(one.ckpt.step for one in ranks))
        on_all(*(one.ckpt.close for one in ranks))
    assert sorted(bases(path)) == [1]
    assert capsys.readouterr().err.count("no last base of step 3 is taken") == 2


@pytest.mark.usefixtures("alike")
def test_what_was_seen_in_a_step_that_is_not_over(tmp_path: Path) -> None:
    """A rewind undoes it; at the end the rank that has seen it says so."""
    path = tmp_path / "run"
    with replicas(path, path, **WATCHED) as ranks:
        together(ranks, 3)
        spoil(ranks, 1)
        on_all(*(lambda one=one: one.ckpt.rewind(3) for one in ranks))  # type: ignore[misc]
        train(ranks, 1)  # type: ignore[arg-type]
        for one in ranks:
            assert all(map(torch.equal, one.weights, fresh(4)))
        spoil(ranks, 1)
        on_all(*(inspect(one.ckpt).saver.finish_captures for one in ranks))
        ranks[0].ckpt.close()
        with pytest.raises(NonFiniteError, match="consumed by step 5"):
            ranks[1].ckpt.close()
