"""The communication hook: two real ranks against the same computed in one process, bit for bit."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep.compress import sparse
from everstep.compress.sparse import SAMPLE_NUMEL, sampled_threshold
from everstep.errors import MismatchError, OptionError, StateError

if not torch.distributed.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

from everstep.compress.ddp import DDPCompression, compressed_mean
from tests.support.ranks import compressed
from tests.support.ranks.compressed import DENSE_BELOW, RATIO, SCENARIOS, STEPS, WORLD
from tests.support.trainers import finish_trainer, start_trainer

TIMEOUT_S = 100.0


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each scenario."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    code = (
        "import sys; from tests.support.ranks import compressed; "
        "compressed.main(sys.argv[1], int(sys.argv[2]))"
    )
    with ExitStack() as stack:
        processes = [
            stack.enter_context(start_trainer(code, str(store), str(rank), GLOO_SOCKET_IFNAME="lo"))
            for rank in range(WORLD)
        ]
        said = [finish_trainer(process, TIMEOUT_S) for process in processes]
    for status, _, err in said:
        assert status == 0, err
    return [json.loads(out) for _, out, _ in said]


class Reference:
    """Both ranks in one process, by plain sorts and sums."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario
        self.residuals: list[dict[str, torch.Tensor]] = [{} for _ in range(WORLD)]

    def play(self) -> list[str]:
        net = compressed.net_of(self.scenario)
        optimizer = compressed.optimizer_of(net)
        digests = []
        for step in range(STEPS):
            grads = [self.grads_of(net, rank, step) for rank in range(WORLD)]
            for name, parameter in net.named_parameters():
                parts = [mine[name] for mine in grads]
                if all(part is None for part in parts):
                    parameter.grad = None
                    continue
                flat = self.mean(name, [self.flat(part, parameter) for part in parts])
                parameter.grad = torch.empty_like(parameter).copy_(flat.view(parameter.shape))
            if self.scenario == "clipped":
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            digests.append(compressed.digest_of({n: p.grad for n, p in net.named_parameters()}))
            compressed.update(net, optimizer)
        return digests

    def grads_of(self, net: compressed.Net, rank: int, step: int) -> dict[str, torch.Tensor | None]:
        net.zero_grad()
        compressed.loss_of(net, net, self.scenario, rank, step).backward()
        found = {name: p.grad for name, p in net.named_parameters()}
        net.zero_grad()
        return found

    def flat(self, part: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(parameter).view(-1) if part is None else part.reshape(-1)

    def mean(self, name: str, flats: list[torch.Tensor]) -> torch.Tensor:
        dtype = flats[0].dtype
        sent = flats
        if flats[0].numel() >= DENSE_BELOW:
            sent = [self.sent(rank, name, flat) for rank, flat in enumerate(flats)]
        total = torch.zeros(flats[0].numel())
        for part in sent:
            total += part.float()
        if not bool(total.isfinite().all()):
            return torch.full_like(flats[0], math.nan)
        return (total / WORLD).to(dtype)

    def sent(self, rank: int, name: str, flat: torch.Tensor) -> torch.Tensor:
        if not bool(flat.isfinite().all()) or not bool(flat.any()):
            return flat
        held = self.residuals[rank].get(name, torch.zeros(flat.numel()))
        total = held + flat
        if self.scenario == "threshold":
            kept = sampled_threshold(total, RATIO).positions()
        else:
            order = np.argsort(-total.abs().numpy(), kind="stable")
            kept = torch.from_numpy(order[: math.ceil(RATIO * total.numel())].copy())
        sent = torch.zeros_like(flat)
        sent[kept] = total[kept].to(flat.dtype)
        if self.scenario != "lossy":
            self.residuals[rank][name] = total - sent.float()
        return sent


@pytest.mark.thinned(3)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=SCENARIOS)
def test_both_ranks_hold_the_gradient_that_one_process_computes(
    played: list[dict[str, Any]], scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "SAMPLE_NUMEL", SAMPLE_NUMEL)
    found = [rank[scenario] for rank in played]
    assert found[0]["grads"] == found[1]["grads"]
    reference = Reference(scenario)
    assert found[0]["grads"] == reference.play()
    for rank, mine in enumerate(found):
        assert mine["names"] == sorted(reference.residuals[rank])
        assert mine["residuals"] == compressed.digest_of(reference.residuals[rank])


def test_scenarios_differ(played: list[dict[str, Any]]) -> None:
    """So each shows something; but what is resumed or scaled is the plain one again."""
    runs = {name: tuple(played[0][name]["grads"]) for name in SCENARIOS}
    assert runs["resumed"] == runs["scaled"] == runs["topk"]
    del runs["resumed"], runs["scaled"]
    assert len(set(runs.values())) == len(runs)
    assert played[0]["topk"]["residuals"] != played[1]["topk"]["residuals"]


# --- One rank -----------------------------------------------------------------------------


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def hooked(net: nn.Module, **options: Any) -> tuple[nn.Module, DDPCompression]:
    ddp = nn.parallel.DistributedDataParallel(net)
    state = DDPCompression(ddp, **options)
    ddp.register_comm_hook(state, compressed_mean)
    return ddp, state


def test_gradients_in_sparse_layout_are_refused(one_rank: None) -> None:
    ddp, _ = hooked(nn.Embedding(100, 20, sparse=True))
    with pytest.raises(StateError, match="sparse=False"):
        ddp(torch.tensor([1, 2])).sum().backward()


def test_the_state_of_another_model_is_refused(one_rank: None) -> None:
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    ddp.register_comm_hook(DDPCompression(nn.Linear(4, 3)), compressed_mean)
    with pytest.raises(StateError, match="does not belong to the model"):
        ddp(torch.ones(2, 4)).sum().backward()


def test_residuals_follow_a_scale_that_comes_and_goes(one_rank: None) -> None:
    """Saved with a scaler, loaded without one, and the other way round."""
    net = nn.Linear(100, 50)
    batch = torch.randn(8, 100)

    def residual_of(scale: float | None, saved: dict[str, Any]) -> dict[str, Any]:
        net.zero_grad()
        options = {} if scale is None else {"loss_scale": lambda: scale}
        ddp, state = hooked(net, ratio=0.1, **options)
        state.load_state_dict(saved)
        (ddp(batch).square().sum() * (scale or 1.0)).backward()
        return state.state_dict()

    none = {"residuals": {}, "loss_scale": 1.0}
    plain = [first := residual_of(None, none), residual_of(None, first)]
    mixed = [first := residual_of(2.0**10, none), residual_of(None, first)]
    other = [first := residual_of(None, none), residual_of(2.0**10, first)]
    wanted = plain[1]["residuals"]["weight"]
    assert torch.equal(mixed[1]["residuals"]["weight"], wanted)
    assert torch.equal(other[1]["residuals"]["weight"], wanted * 2.0**10)


@pytest.mark.parametrize("view", [True, False])
def test_gradients_may_be_views_of_buckets(one_rank: None, view: bool) -> None:
    net = nn.Linear(100, 50)
    ddp = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=view)
    state = DDPCompression(ddp, ratio=0.1)
    ddp.register_comm_hook(state, compressed_mean)
    for _ in range(3):
        ddp(torch.randn(8, 100)).square().sum().backward()
        assert int((net.weight.grad != 0).sum()) == 500
        form = state.form_of(net.weight)
        assert form is not None
        assert torch.equal(form.dense(), net.weight.grad.view(-1))
        net.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    "options",
    [{"kind": "int8"}, {"kind": "adaptive"}, {"kind": "topkk"}, {"ratio": 0}, {"dense_below": -1}],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        DDPCompression(nn.Linear(2, 2), **options)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(OptionError, match="weight is complex"):
        DDPCompression(nn.Linear(4, 3, dtype=torch.complex64))


def test_parameters_beyond_int32_are_refused() -> None:
    net = nn.Module()
    net.weight = nn.Parameter(torch.empty(2**31 + 1, device="meta"))
    with pytest.raises(OptionError, match="int32"):
        DDPCompression(net)


def test_residuals_of_another_model_are_refused() -> None:
    state = DDPCompression(nn.Linear(40, 30))
    residuals = {"weight": torch.zeros(7), "other": torch.zeros(3)}
    with pytest.raises(MismatchError, match="other"):
        state.load_state_dict({"residuals": residuals, "loss_scale": 1.0})
    assert state.state_dict()["residuals"] == {}
