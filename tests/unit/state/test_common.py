"""What ranks of a job have in common under DistributedDataParallel, and what they do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from everstep.state.ranks.writers import find_replication
from everstep.state.training_state import State
from tests.support.ranks.sharding import as_rank

DDP = nn.parallel.DistributedDataParallel
BLOCKS: dict[str, Callable[[nn.Module], Any]] = {
    "bare": lambda block: block,
    "checkpointed": checkpoint_wrapper,
    "compiled": torch.compile,
}


@contextlib.contextmanager
def state_of(module: nn.Module, rank: int) -> Iterator[State]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with as_rank(rank, 2) as ranks:
        ddp = DDP(module, init_sync=False)
        yield State({"model": ddp, "optimizer": optimizer}, ranks=ranks)


def common(state: State) -> list[str]:
    """Parameters that ranks keep equal."""
    found = find_replication(state.providers.values(), {}, state.rank_local.own()).parameters
    return sorted(name.removeprefix("model/") for name in found)


def written(state: State) -> list[str]:
    """Parameters that this rank writes."""
    entries = state.survey().shape.entries
    return [e.name.removeprefix("model/") for e in entries if e.name.startswith("model/")]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_ddp_is_told_to_ignore_is_a_ranks_own_whatever_is_around_it(
    block: str, rank: int
) -> None:
    net = nn.ModuleDict({"shared": nn.Linear(2, 2), "expert": BLOCKS[block](nn.Linear(2, 2))})
    ignored = [name for name, _ in net.named_parameters() if "expert" in name]
    DDP._set_params_and_buffers_to_ignore_for_model(net, ignored)  # type: ignore[no-untyped-call]
    with state_of(net, rank) as state:
        assert common(state) == ["shared.bias", "shared.weight"]
        own = [name for name in written(state) if "expert" in name]
        assert own == ["expert.weight", "expert.bias"]


@pytest.mark.parametrize("frozen", [["0"], ["0", "1"]])
def test_what_was_frozen_when_ddp_was_made_is_a_ranks_own_once_it_is_trained(
    frozen: list[str],
) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    layers = [net.get_submodule(name) for name in frozen]
    every = sorted(name for name, _ in net.named_parameters())
    apart = [name for name in every if name.split(".")[0] in frozen]
    others = [name for name in every if name not in apart]
    before: list[str] = []
    behind: list[str] = []
    for rank in range(2):
        for layer in layers:
            layer.requires_grad_(False)
        with state_of(net, rank) as state:
            alone = {name: frozenset({rank}) for name in apart}
            known = {**dict.fromkeys(others, frozenset({0, 1})), **alone}

            def meant(state: State = state) -> dict[str, frozenset[int]]:
                """Among which ranks: of a base in which they differed each knows its own."""
                here = {name: state.holders()(f"model/{name}") for name in every}
                return {name: found[1] for name, found in here.items() if found is not None}

            assert (common(state), meant()) == (every, known)
            before += written(state)
            for layer in layers:
                layer.requires_grad_(True)
            assert (common(state), meant()) == (others, known)
            behind += written(state)  # though no tensor has changed
            net[2].requires_grad_(False)
            assert common(state) == others
            net[2].requires_grad_(True)  # was not frozen when DDP was made
            assert common(state) == others
    assert sorted(before) == every
    assert sorted(behind) == sorted(every + apart)


def test_a_torch_that_does_not_tell_what_ddp_reduces_leaves_each_rank_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(DDP, "_get_ddp_logging_data")
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    with state_of(net, 0) as state:
        assert common(state) == ["1.bias", "1.weight"]
