"""Parameters that DDP does not reduce are common; states and options that differ between ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import everstep
from everstep.cli import app
from everstep.config.options import LogOptions
from everstep.errors import EverstepError, OptionError, StorageError
from everstep.format.names import base_dir, shard_name
from everstep.options import validate_options
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from everstep.state.ranks import ddp
from everstep.state.ranks.writers import WriterAssignment
from everstep.trainer.job.place import shared_options
from tests.support.ranks.together import on_all, rank_seams
from tests.support.world import forget_open_runs

FROZEN = ("0.weight", "0.bias")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}


@pytest.fixture(autouse=True)
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is as if DistributedDataParallel were around it, made when a part was frozen."""
    ranks = lambda module: (getattr(module, "alike", None), frozenset[str]())  # noqa: E731
    monkeypatch.setattr(ddp, "ddp_replicas", ranks)


@dataclass
class Rank:
    """One of two, with the same gradients.

    Attributes:
        errors: that ``on_failure`` was called with.
    """

    number: int
    ckpt: everstep.Checkpointer
    model: Any
    optimizer: torch.optim.Optimizer
    errors: list[EverstepError] = field(default_factory=list)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            value = 0.1 * (self.ckpt.stats().step + 1)
            for parameter in self.model.parameters():
                parameter.grad = (
                    torch.full_like(parameter, value) if parameter.requires_grad else None
                )
            self.optimizer.step()
            self.ckpt.step()

    @property
    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def net() -> Any:
    """The same on both, frozen in part, as the program makes it."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(float(parameter.numel())).add(number).sin()
            parameter.copy_(values.reshape(parameter.shape))
    model.alike, model.frozen = (0, 1), tuple(model[0].parameters())
    for parameter in model.frozen:
        parameter.requires_grad_(False)
    return model


@contextlib.contextmanager
def job(
    *paths: Path,
    change: Callable[[int, dict[str, Any]], None] = lambda rank, state: None,
    optimizer: str = "adamw",
    own: Callable[[int], dict[str, Any]] = lambda rank: {},
    **options: Any,
) -> Iterator[list[Rank]]:
    """Two ranks, let go of without a last base.

    Args:
        change: made to a rank's state before the Checkpointer gets it.
        own: options of one rank.
    """
    seams = rank_seams(2)

    def start(rank: int) -> Rank:
        model, errors = net(), list[EverstepError]()
        update = OPTIMIZERS[optimizer](model.parameters())
        state: dict[str, Any] = {"model": model, "optimizer": update}
        change(rank, state)
        about: dict[str, Any] = {
            "method": "sync",
            "every": 2,
            "keeper": everstep.KeeperOptions(process=False),
            "progress_timeout_s": 20.0,
            "on_failure": errors.append,
            **options,
            **own(rank),
        }
        ckpt = everstep.Checkpointer(paths[rank % len(paths)], state, seams=seams[rank], **about)
        forget_open_runs()
        return Rank(rank, ckpt, model, update, errors)

    ranks = on_all(lambda: start(0), lambda: start(1))
    try:
        yield ranks
    finally:
        for one in ranks:
            with contextlib.suppress(EverstepError):
                one.ckpt.close()


def resume(ranks: list[Rank], step: int | None = None) -> list[everstep.Recovery]:
    return on_all(*(lambda one=one: one.ckpt.resume(step) for one in ranks))  # type: ignore[misc]


def train(ranks: list[Rank], steps: int) -> None:
    on_all(*(lambda one=one: one.train(steps) for one in ranks))  # type: ignore[misc]
    on_all(*(lambda one=one: one.ckpt.wait(20) for one in ranks))  # type: ignore[misc]


def written(path: Path, step: int, timeline: int = 1) -> list[list[str]]:
    """By rank: which of the parameters that DDP does not reduce it has written."""
    directory = base_dir(path, timeline, step)
    data = [(Path(directory) / shard_name(rank)).read_bytes() for rank in range(2)]
    return [[name for name in FROZEN if f'"model/{name}"'.encode() in one] for one in data]


def back(path: Path, wanted: list[list[torch.Tensor]], step: int, **options: Any) -> None:
    """All ranks come back to what each of them had."""
    with job(path, **options) as ranks:
        for one, mine, found in zip(ranks, wanted, resume(ranks), strict=True):
            assert (found.step, found.exact) == (step, True)
            assert all(map(torch.equal, one.weights, mine)), f"rank {one.number}"


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", ["sync", "lazy", "checkfreq"])
def test_what_nobody_trains_is_written_once_in_each_life(tmp_path: Path, method: str) -> None:
    """A frozen backbone is most of a model."""
    path = tmp_path / "run"
    for life in range(3):
        with job(path, method=method) as ranks:
            assert {found.step for found in resume(ranks)} == {2 * life}
            train(ranks, 2)
            found = written(path, 2 + 2 * life, 1 + life)
            assert sorted(found[0] + found[1]) == sorted(FROZEN)


def left_out(rank: int, state: dict[str, Any]) -> None:
    if rank == 1:
        del state["model"]


def without_ddp(rank: int, state: dict[str, Any]) -> None:
    if rank == 1:
        state["model"].alike = None


def without_optimizer(rank: int, state: dict[str, Any]) -> None:
    if rank == 1:
        del state["optimizer"]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("change", [left_out, without_ddp, without_optimizer])
@pytest.mark.parametrize("method", ["sync", "lazy"])
def test_ranks_with_other_states_take_no_base_and_keep_the_good_ones(
    tmp_path: Path, change: Callable[[int, dict[str, Any]], None], method: str
) -> None:
    path = tmp_path / "run"
    with job(path, method=method, keep=1) as ranks:
        resume(ranks)
        train(ranks, 4)
        wanted = [one.weights for one in ranks]
    with job(path, method=method, keep=1, change=change) as ranks:
        on_all(*(lambda one=one: one.ckpt.resume(strict=False) for one in ranks))  # type: ignore[misc]
        train(ranks, 2)
        for one in ranks:
            error = next(e for e in one.errors if isinstance(e, StorageError))
            assert error.step == 6
            section = "'optimizer'" if change is without_optimizer else "'model'"
            assert section in error.message
            assert "rank(s) 1: none" in error.message
            assert "the same state" in error.message
    bases = {base.id.step for base in scan_run(PosixFileSystem(), path).bases if base.manifest}
    assert 4 in bases
    assert 6 not in bases
    back(path, wanted, 4, method=method)


@pytest.mark.parametrize("change", [left_out, without_ddp])
def test_verify_does_not_blame_the_disk_for_parts_that_do_not_fit(
    tmp_path: Path,
    change: Callable[[int, dict[str, Any]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patched, job(path, change=change) as ranks:
        patched.setattr(
            WriterAssignment, "replica_digests", lambda self, aliases: ()
        )  # as it was once
        resume(ranks)
        train(ranks, 2)
    found = CliRunner().invoke(app, ["verify", str(path)])
    told = " ".join(found.output.split())
    assert found.exit_code == 1
    assert (
        "the bytes are as they were written, but when the ranks wrote the base they disagreed"
        in told
    )
    assert "the disk is not to blame: give every rank the same state" in told
    assert "failing" not in told
    why = "not in the checkpoint|referenced but missing"
    with job(path) as ranks, pytest.raises(EverstepError, match=why):
        resume(ranks)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("every", ({"every": 4}, {"every": 5})),
        ("every", ({"every": "10min"}, {"every": 600})),
        ("every", ({"every": None, "method": "lazy"}, {"every": "auto", "method": "lazy"})),
        ("method", ({"method": "lazy"}, {"method": "logged"})),
        ("method", ({"method": "lazy", "every": 100}, {"method": "auto", "every": 100})),
        ("keep", ({"keep": 2}, {"keep": 3})),
        (
            "LogOptions.to",
            ({"method": "logged"}, {"method": "logged", "log": LogOptions(to="disk")}),
        ),
    ],
    ids=str,
)
def test_options_that_ranks_must_be_given_alike(
    tmp_path: Path, name: str, given: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    with pytest.raises(OptionError) as caught, job(tmp_path / "run", own=lambda rank: given[rank]):
        pass
    assert f"different values of {name} (rank(s) 0: " in caught.value.message
    assert "; rank(s) 1: " in caught.value.message
    assert caught.value.hint is not None
    assert name.partition(".")[0] in caught.value.hint


@pytest.mark.parametrize(
    ("changed", "alike"),
    [
        ({"parts": 2}, True),
        ({"held_steps": 2}, True),
        ({"chunk_bytes": 1 << 20}, True),
        ({"rebuild": "recovery"}, False),
        ({"overlap_forward": False}, False),
    ],
    ids=str,
)
def test_how_a_rank_uses_its_link_is_its_own(changed: dict[str, Any], alike: bool) -> None:
    method = everstep.presets["gockpt_o"]
    rest: dict[str, Any] = {"every": 4, "keep": 3, "budget": None, "on_failure": "raise"}
    rest["progress_timeout_s"] = 30.0
    said = [
        shared_options(validate_options(method=one, **rest))
        for one in (method, replace(method, **changed))
    ]
    assert (said[0] == said[1]) is alike


def test_options_that_are_each_ranks_own(tmp_path: Path) -> None:
    mine: list[dict[str, Any]] = [
        {"on_failure": "warn", "keeper": everstep.KeeperOptions(process=False, threads=2)},
        {"progress_timeout_s": 30.0, "budget": everstep.Budget(host_bytes=1 << 30)},
    ]
    with job(tmp_path / "run", own=lambda rank: mine[rank]) as ranks:
        assert {found.step for found in resume(ranks)} == {0}
