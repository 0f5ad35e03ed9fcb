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
    found = find_replication(state.providers.values(), {}).parameters
    return sorted(name.removeprefix("model/") for name in found)


def written(state: State) -> list[str]:
    """Parameters that this rank writes."""
    entries = state.survey().shape.entries
    return [e.name.removeprefix("model/") for e in entries if e.name.startswith("model/")]


@pytest.mark.thinned(6)
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
