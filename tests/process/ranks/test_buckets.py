"""DDP's buckets: a job of more than two ranks that is killed and resumed sums gradients in the
order in which one that nobody disturbed does, or says that it does not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from everstep.state.providers.modules import ModuleProvider
from everstep.state.ranks import ddp as buckets
from everstep.state.ranks.ddp import DDPBuckets
from everstep.state.survey import SectionContents
from everstep.state.training_state import State
from everstep.state.values.objects import decode
from tests.support.ranks.parallel import MORE, Deep
from tests.support.ranks.trainings import STEPS, Run, compare, run, steps_of

__all__ = ["run"]

DDP = nn.parallel.DistributedDataParallel


@pytest.fixture
def any_ranks(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of this process alone, where the order is kept all the same."""
    monkeypatch.setattr(buckets, "_RANKS_MIN", 1)


def made(module: nn.Module | None = None, **options: Any) -> tuple[Any, DDPBuckets]:
    ddp = DDP(module or Deep(), **{"bucket_cap_mb": 0.004, **options})
    return ddp, DDPBuckets({"model": ModuleProvider("model", ddp)})


def train(ddp: Any, steps: int = 1) -> None:
    for _ in range(steps):
        ddp(torch.ones(2, 5)).sum().backward()
        ddp.zero_grad()


def restored(ddp: Any, found: DDPBuckets, tree: Any) -> tuple[str, ...]:
    """The doubts of a process that has restored this; it has rehearsed what it could."""
    found.restore(tree, strict=True)
    doubts = found.settle(as_many=True)
    assert not found.rebuild([found.rehearsals()])
    return doubts


def layout(ddp: Any) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    found = ddp.reducer._get_zeros_like_grad_buckets()
    return [[names[id(one)] for one in bucket.parameters()] for bucket in found]


def objects(part: SectionContents) -> Any:
    return decode(part.tree.data)  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_buckets_of_a_training_are_rebuilt(any_ranks: None, steps: int) -> None:
    ddp, found = made()
    train(ddp, steps)
    saved = objects(found.look())
    train(ddp, 3)
    again, other = made()
    assert layout(again) != layout(ddp)
    assert not restored(again, other, saved)
    assert layout(again) == layout(ddp)
    assert not again.reducer._rebuild_buckets(), "nor does the next forward do it"
    train(again)
    assert layout(again) == layout(ddp)
    assert other.collect().keys() == saved.keys()
    for name, one in other.collect().items():
        np.testing.assert_array_equal(one["order"], saved[name]["order"])


def test_the_order_is_looked_for_until_it_is_settled(any_ranks: None) -> None:
    ddp, found = made()
    before = objects(found.look())
    assert [list(one["order"]) for one in before.values()] == [[]], "there was no backward"
    train(ddp)
    orders = [objects(found.look())]
    train(ddp)
    orders.append(objects(found.look()))
    assert repr(orders[0]) == repr(orders[1]) != repr(before)
    assert found.look() is found.look()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_rehearsal_leaves_everything_as_it_was(any_ranks: None, views: bool, zeros: bool) -> None:
    first, of_first = made()
    train(first, 3)
    ddp, found = made(gradient_as_bucket_view=views)
    called, before = list[str](), torch.get_rng_state()
    for name, parameter in ddp.module.named_parameters():
        parameter.grad = torch.zeros_like(parameter) if zeros else None
        parameter.register_hook(lambda gradient, name=name: called.append(name))
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: called.append(name))
    values = [parameter.detach().clone() for parameter in ddp.parameters()]
    assert not restored(ddp, found, of_first.collect())
    assert layout(ddp) == layout(first)
    assert not called
    assert torch.equal(torch.get_rng_state(), before)
    for parameter, value in zip(ddp.parameters(), values, strict=True):
        assert torch.equal(parameter, value)
        assert (parameter.grad is not None) == zeros
        assert parameter.grad is None or not parameter.grad.any()
        assert parameter.grad is None or parameter.grad._is_view() == views


def test_the_module_in_ddp_is_as_good_as_ddp(any_ranks: None) -> None:
    first, of_first = made()
    train(first, 2)
    ddp = DDP(Deep(), bucket_cap_mb=0.004)
    found = DDPBuckets({"model": ModuleProvider("model", ddp.module)})
    assert found.are_saved
    assert not restored(ddp, found, of_first.collect())
    assert layout(ddp) == layout(first)


def test_buckets_that_stay_are_in_no_base(any_ranks: None) -> None:
    ddp, found = made(find_unused_parameters=True)
    train(ddp, 3)
    assert not found.are_saved
    assert not restored(ddp, found, None)


def test_two_ranks_need_no_order(alone: None) -> None:
    assert not made()[1].are_saved


def stateful_hook(state: Any, bucket: Any) -> Any:
    state.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket)


stateful_hook.__annotations__.clear()  # torch compares them, and these are postponed


def with_hook(state: Any, hook: Any) -> Callable[[], tuple[Any, DDPBuckets]]:
    def make() -> tuple[Any, DDPBuckets]:
        ddp, found = made()
        ddp.register_comm_hook(state, hook)
        return ddp, found

    return make


def rebuilt_otherwise() -> tuple[Any, DDPBuckets]:
    ddp, found = made()
    buckets.rehearse(ddp, range(14))
    return ddp, found


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_static_graph_cannot_be_rehearsed(any_ranks: None, steps: int) -> None:
    first, of_first = made(static_graph=True)
    before = of_first.collect()
    train(first, steps)
    ddp, found = made(static_graph=True)
    assert not restored(ddp, found, before)
    (told,) = restored(ddp, found, of_first.collect())
    assert "static_graph" in told


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: made(bucket_cap_mb=1), "bucket_cap_mb"),
        (with_hook([], stateful_hook), "communication hook"),
        (rebuilt_otherwise, "another order"),
    ],
)
def test_what_cannot_be_rebuilt_is_told(any_ranks: None, make: Any, why: str) -> None:
    first, of_first = made()
    train(first, 3)
    ddp, found = make()
    (told,) = restored(ddp, found, of_first.collect())
    assert "may sum the gradients" in told
    assert why in told


def test_sparse_gradients_cannot_be_rehearsed(any_ranks: None) -> None:
    net = Deep()
    net.add_module("table", nn.Embedding(2, 3, sparse=True))
    ddp, found = made(net)
    saved = {n: {**one, "order": np.arange(one["count"])} for n, one in found.collect().items()}
    (told,) = restored(ddp, found, saved)
    assert "sparse gradients" in told


def test_what_an_older_base_does_not_tell_is_told(any_ranks: None) -> None:
    ddp, found = made()
    (told,) = restored(ddp, found, None)
    assert "the base does not have the order of its buckets" in told


def test_buckets_that_are_rebuilt_do_not_become_the_first_ones(any_ranks: None) -> None:
    ddp, found = made()
    first = found.collect()
    assert not restored(ddp, found, first)
    train(ddp, 3)
    (told,) = restored(ddp, found, first)
    assert "this process has rebuilt them" in told


@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook])
def test_hooks_that_keep_nothing_are_no_obstacle(any_ranks: None, hook: Any) -> None:
    first, of_first = with_hook(None, hook)()
    train(first, 3)
    ddp, found = with_hook(None, hook)()
    assert not restored(ddp, found, of_first.collect())
    assert layout(ddp) == layout(first)


def test_a_process_that_has_made_a_backward_needs_no_rehearsal(any_ranks: None) -> None:
    """As is advised for PowerSGD, whose hook none may call."""
    first, of_first = with_hook([], stateful_hook)()
    train(first, 3)
    called = list[int]()
    ddp, found = with_hook(called, stateful_hook)()
    train(ddp)
    before = list(called)
    assert not restored(ddp, found, of_first.collect())
    assert called == before
    train(ddp)
    assert layout(ddp) == layout(first)


def test_all_ranks_rehearse_or_none(any_ranks: None) -> None:
    first, of_first = made()
    train(first, 3)
    ddp, found = made()
    before = layout(ddp)
    found.restore(of_first.collect(), strict=True)
    assert not found.settle(as_many=True)
    assert found.rehearsals()
    (told,) = found.rebuild([[]])
    assert "not all ranks" in told
    assert layout(ddp) == before


def test_sums_of_another_number_of_ranks_are_no_doubt(any_ranks: None) -> None:
    _, found = made()
    assert not found.settle(as_many=False)
    assert not found.rehearsals()


def drill(run: Run, layout: str, *steps: int, **options: Any) -> int:
    """A job dies by SIGKILL in each of these steps, and goes on to the end, with the bits of one
    that nobody disturbed and without notes; returns the step from which it went on last."""
    world = MORE[layout].ranks
    wanted = steps_of(run.to_the_end(layout, None, world=world))
    drawn = random.Random(f"{layout} {steps} {options}")
    for step in steps:
        victim, place = drawn.randrange(world), drawn.choice(["before_update", "after_step"])
        print(f"{layout}: rank {victim} dies in step {step}, {place}")
        dies = {"DIES": f"{victim} {step} {place}"}
        compare(run.until_killed(layout, options, victim, dies, world=world), wanted)
    said = run.to_the_end(layout, options, world=world)
    resumed = compare(said, wanted)
    assert all(STEPS in steps for steps in steps_of(said))
    assert not any(lines[0]["notes"] for lines in said)
    return resumed


def test_plain_ddp_goes_on_bit_for_bit(run: Run) -> None:
    assert drill(run, "buckets", 5, method="lazy") >= 2


def test_a_ddp_that_is_made_after_resume_is_told_of(
    any_ranks: None, caplog: pytest.LogCaptureFixture
) -> None:
    net = Deep()
    state = State({"model": net})
    assert not state.buckets.settle(as_many=True)
    assert state.exact
    ddp, state.trains_in = DDP(net), threading.get_ident()
    assert not state.exact
    assert not state.exact
    assert caplog.text.count("was made after resume()") == 1
    del ddp


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lazy", "logged", "lowdiff_plus", "gockpt", "checkflow"])
def test_every_method_knows_the_order(run: Run, method: str) -> None:
    assert drill(run, "buckets", 4, 7, method=method, every=3) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lazy", "logged"])
def test_the_order_is_known_before_buckets_are_rebuilt(run: Run, method: str) -> None:
    """What a base of step 1 has is the order of one backward."""
    assert drill(run, "buckets", 2, method=method, every=1) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [name for name in MORE if name.startswith("buckets_") and name != "buckets_static"]
)
@pytest.mark.parametrize("method", ["lazy", "logged"])
def test_every_kind_of_ddp_goes_on_bit_for_bit(run: Run, layout: str, method: str) -> None:
    assert drill(run, layout, 3, 6, method=method) >= 2


@pytest.mark.slow
def test_a_job_that_cannot_rebuild_is_not_called_exact(run: Run) -> None:
    """Nor is what descends from it."""
    options = {"method": "lazy"}
    run.to_the_end("buckets_static", options, world=4, last=3)
    for last, step in ((5, 2), (6, 4)):
        said = run.to_the_end("buckets_static", options, world=4, last=last)
        assert {lines[0]["resumed"] for lines in said} == {step}
        assert not any(lines[0]["exact"] for lines in said)
        assert all("static_graph" in lines[0]["notes"][0] for lines in said)
