"""What communication hooks of DistributedDataParallel keep from step to step, beside the state."""
# Without postponed annotations: torch compares those of hooks.

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import everstep

SAID = ", which is not in the state"


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def power_sgd() -> PowerSGDState:
    torch_state: Any = PowerSGDState
    made: PowerSGDState = torch_state(
        None, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=0.5
    )
    return made


class PowerSGDPart:
    """As ``docs/EXACTNESS.md`` has it."""

    NAMES = ("error_dict", "p_memory_dict", "q_memory_dict", "iter")

    def __init__(self, hook_state: Any) -> None:
        self.hook_state = hook_state

    def state_dict(self) -> dict[str, Any]:
        _, key, *rest = self.hook_state.rng.get_state()
        kept = {name: getattr(self.hook_state, name) for name in self.NAMES}
        return {**kept, "rng": [key.tolist(), *rest]}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        for name in self.NAMES:
            setattr(self.hook_state, name, kept[name])
        key, *rest = kept["rng"]
        self.hook_state.rng.set_state(("MT19937", np.array(key, dtype=np.uint32), *rest))


def trained(
    folder: Path, hook_state: Any, hook: Any, steps: int, *, part: Any = None, **options: Any
) -> tuple[everstep.Recovery, list[torch.Tensor]]:
    """What a process comes back to and has at the end."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(hook_state, hook)
    if part is not None:  # DDP sorts its buckets anew behind the first backward
        ddp(torch.zeros(16, 8)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": ddp, "optimizer": optimizer}
    if part is not None:
        state["part"] = part
    about = {"keeper": everstep.KeeperOptions(process=False), "method": "async", **options}
    with everstep.Checkpointer(folder, state, **about) as ckpt:
        found = ckpt.resume()
        for at in range(found.step, steps):
            torch.manual_seed(at)
            optimizer.zero_grad()
            ddp(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            ckpt.step()
        ckpt.save()
    return found, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("method", ["async", "logged"])
def test_what_powersgd_keeps_is_lost_without_a_part_of_the_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    run = tmp_path / "run"
    trained(run, power_sgd(), powerSGD_hook, 6, method=method)
    assert caplog.text.count(f"a PowerSGDState{SAID}") == 1, "once, at the start"
    found, _ = trained(run, power_sgd(), powerSGD_hook, 8, method=method)
    assert (found.step, found.exact) == (6, False)
    assert "not exact: the base of step 6 of timeline 1 is marked as not exact" in found.evidence
    assert f"a PowerSGDState{SAID}" in found.evidence


def test_an_object_that_saves_it_brings_it_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook_state = power_sgd()
    other = power_sgd()
    undisturbed = trained(tmp_path / "other", other, powerSGD_hook, 9, part=PowerSGDPart(other))[1]
    run = tmp_path / "run"
    trained(run, hook_state, powerSGD_hook, 6, part=PowerSGDPart(hook_state))
    hook_state = power_sgd()
    part = PowerSGDPart(hook_state)
    found, weights = trained(run, hook_state, powerSGD_hook, 9, part=part)
    assert (found.step, found.exact) == (6, True), found
    assert all(map(torch.equal, weights, undisturbed))
    assert "communication hook" not in caplog.text


class Ours:
    """Keeps what it likes."""

    def hook(self, _: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Fixed:
    """Keeps nothing."""

    ratio: float = 0.1


def plain(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]


@pytest.mark.thinned(9)
@pytest.mark.parametrize(
    ("hook_state", "hook", "said"),
    [
        (lambda: None, default_hooks.allreduce_hook, ""),
        (lambda: dist.group.WORLD, default_hooks.fp16_compress_hook, ""),
        (lambda: Fixed(), plain, ""),
        (lambda: (None, 0.1, torch.float16), plain, ""),
        (lambda: {"seen": 0}, plain, "a dict"),
        (lambda: Ours(), plain, "a Ours"),
        (lambda: None, Ours().hook, "a Ours"),
    ],
)
def test_only_hooks_that_may_keep_something_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hook_state: Any, hook: Any, said: str
) -> None:
    trained(tmp_path / "run", hook_state(), hook, 1)
    assert (f"{said}{SAID}" in caplog.text) == bool(said)
    found, _ = trained(tmp_path / "run", hook_state(), hook, 1)
    assert found.exact == (not said)
