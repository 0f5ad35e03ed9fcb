"""Updates by which ranks under DDP would part from each other are refused: nothing is changed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.join import Join

from everstep.errors import UnsupportedStateError
from everstep.state.ranks.ddp import refuse_divergent_updates
from everstep.state.training_state import State
from tests.support.keepers import end_keepers
from tests.support.ranks.sharding import as_rank
from tests.support.trainers import finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S

DDP = nn.parallel.DistributedDataParallel


@contextlib.contextmanager
def gated(*, world: int = 2, compiled: bool = False) -> Iterator[tuple[Any, State, list[str]]]:
    """A model of which an expert is each rank's own, and what the gate hears."""
    net = nn.ModuleDict({"shared": nn.Linear(2, 2), "expert": nn.Linear(2, 2)})
    ignored = [name for name, _ in net.named_parameters() if "expert" in name]
    DDP._set_params_and_buffers_to_ignore_for_model(net, ignored)  # type: ignore[no-untyped-call]
    both = torch.optim.SGD(net.parameters(), lr=0.1)
    experts = torch.optim.SGD(net["expert"].parameters(), lr=0.1)
    other = nn.Linear(2, 2)
    alone = torch.optim.SGD(other.parameters(), lr=0.1)
    with as_rank(0, world) as ranks:
        ddp = DDP(net, init_sync=False)
        model = torch.compile(ddp) if compiled else ddp
        values = {"model": model, "other": other, "both": both, "experts": experts, "alone": alone}
        yield ddp, State(values, ranks=ranks), []


def refused(state: State, heard: list[str], key: str = "both") -> str:
    with pytest.raises(UnsupportedStateError) as caught:
        refuse_divergent_updates(state, heard.append)(key)
    assert heard == []
    assert caught.value.leaves[0][0] == "model"
    assert "ddp.module" in str(caught.value.hint)
    return str(caught.value)


def passes(state: State, heard: list[str], *keys: str) -> None:
    look = refuse_divergent_updates(state, heard.append)
    for key in keys:
        look(key)
    assert heard == list(keys)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_update_within_no_sync(compiled: bool) -> None:
    with gated(compiled=compiled) as (ddp, state, heard):
        with ddp.no_sync():
            assert "no_sync()" in refused(state, heard)
            passes(state, heard, "experts", "alone")  # nothing that DDP reduces
        heard.clear()
        passes(state, heard, "both")


def test_a_group_that_is_added() -> None:
    with gated() as (ddp, state, heard):
        look = refuse_divergent_updates(state, heard.append)
        with ddp.no_sync():
            look("alone")
            state.optimizers["alone"].add_param_group({"params": ddp.module["shared"].weight})
            with pytest.raises(UnsupportedStateError):
                look("alone")


@pytest.mark.parametrize("throws", [False, True])
def test_uneven_inputs(throws: bool) -> None:
    with gated() as (ddp, state, heard):
        passes(state, heard, "both")
        heard.clear()
        Join([ddp], throw_on_early_termination=throws)
        if throws:
            passes(state, heard, "both")
        else:
            assert "Join" in refused(state, heard)


@pytest.mark.parametrize("hook", [post_localSGD_hook, fp16_compress_wrapper(post_localSGD_hook)])
def test_local_sgd(hook: Any) -> None:
    with gated() as (ddp, state, heard):
        ddp.register_comm_hook(PostLocalSGDState(None, None, 10), hook)
        assert "post_localSGD_hook" in refused(state, heard)


def test_a_layer_that_was_frozen_when_ddp_was_made() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    with as_rank(0, 2) as ranks:
        values = {"model": DDP(net, init_sync=False), "both": torch.optim.SGD(net.parameters())}
        state = State(values, ranks=ranks)
        passes(state, [], "both")
        net[0].requires_grad_(True)
        passes(state, [], "both")  # it has no gradient yet
        net[0].weight.grad = torch.ones(2, 2)
        assert "frozen when it was made" in refused(state, [])


def test_other_hooks_are_not_meant() -> None:
    with gated() as (ddp, state, heard):
        ddp.register_comm_hook(None, allreduce_hook)
        passes(state, heard, "both")


def test_one_rank_has_nobody_to_part_from() -> None:
    with gated(world=1) as (ddp, state, heard), ddp.no_sync():
        passes(state, heard, "both")


TRAINS = """
import json, os, sys
import torch, torch.distributed as dist
import everstep

folder, meet, rank = *sys.argv[1:3], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
torch.manual_seed(7)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
state = {"model": ddp, "optimizer": optimizer}
ckpt = everstep.Checkpointer(folder, state, method="async", every=1)
ckpt.resume()

def backward(batch):
    optimizer.zero_grad()
    torch.manual_seed(10 * batch + rank)
    ddp(torch.randn(8, 4)).square().mean().backward()

with ddp.no_sync():  # gradients of two batches: what it is for
    backward(0)
backward(1)
optimizer.step()
ckpt.step()
before = ddp.module.weight.detach().clone()
said = None
with ddp.no_sync():
    backward(2)
    try:
        optimizer.step()
    except everstep.errors.UnsupportedStateError as error:
        said = str(error)
changed = not torch.equal(before, ddp.module.weight)
ckpt.wait()
backward(3)
optimizer.step()
ckpt.step()
ckpt.close()
os.write(1, (json.dumps([said, changed, ckpt.stats().durable_step]) + "\\n").encode())
dist.destroy_process_group()
os._exit(0)
"""


def test_a_job_is_told_before_its_ranks_part(tmp_path: Path) -> None:
    run, meet = tmp_path / "run", tmp_path / "meet"
    try:
        ranks = [start_trainer(TRAINS, str(run), str(meet), str(rank)) for rank in range(2)]
        ended = [finish_trainer(process, TIMEOUT_S) for process in ranks]
        assert [status for status, _, _ in ended] == [0, 0], ended
        for rank, (_, out, _) in enumerate(ended):
            said, changed, durable = json.loads(out)
            assert "no_sync()" in said
            assert f"rank {rank}" in said
            assert (changed, durable) == (False, 2)
    finally:
        end_keepers(run)
