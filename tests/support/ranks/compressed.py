"""A small training of two ranks: one of its ranks under DDP, for a process of its own; and what it
trains, so that a test can compute the same in one process.

Every scenario is a few steps of one model, with something in it that ranks disagree about.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from everstep.compress import sparse
from everstep.compress.ddp import DDPCompression, compressed_mean

__all__ = [
    "DENSE_BELOW",
    "RATIO",
    "SCENARIOS",
    "STEPS",
    "WORLD",
    "Net",
    "digest_of",
    "loss_of",
    "main",
    "net_of",
    "optimizer_of",
    "scale_of",
    "update",
]

WORLD, STEPS, RATIO, DENSE_BELOW = 2, 5, 0.05, 300
SCENARIOS = {
    "topk": "",
    "threshold": "with the other compression",
    "bfloat16": "parameters and gradients in bfloat16",
    "lossy": "without error feedback",
    "strange": "rank 1 has a NaN in step 2",
    "unused": "a layer that both, then rank 0, then nobody uses",
    "resumed": "everything made anew from its state before step 3",
    "scaled": "the loss times a number that changes, also while it is resumed",
    "clipped": "gradients are clipped after the exchange",
}


class Net(nn.Module):
    """A convolution in channels_last, a layer of many buckets' size, and one used at times."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.wide = nn.Linear(1024, 16)
        self.side = nn.Linear(16, 128)

    def forward(self, images: torch.Tensor, *, side: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.wide(torch.relu(self.conv(images)).flatten(1))
        if side:
            hidden = self.side(torch.tanh(hidden))
        return hidden


def net_of(scenario: str) -> Net:
    # Samples smaller than the tensors: or thresholds would be exact.
    sparse.SAMPLE_NUMEL = 512 if scenario == "threshold" else 2**16  # type: ignore[misc]
    torch.manual_seed(7)
    net = Net()
    net.conv.weight.data = net.conv.weight.data.contiguous(memory_format=torch.channels_last)
    return net.bfloat16() if scenario == "bfloat16" else net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def loss_of(model: nn.Module, net: Net, scenario: str, rank: int, step: int) -> torch.Tensor:
    """The loss of one rank in one step; ``model`` is ``net``, or a wrapper of it."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    images = torch.randn(4, 3, 8, 8, generator=generator).to(net.wide.weight.dtype)
    side = scenario != "unused" or step < 2 or (step == 2 and rank == 0)
    side = side and (scenario != "late" or rank == 0 or step > 2)
    loss: torch.Tensor = model(images, side=side).float().square().mean()
    if scenario == "strange" and (rank, step) == (1, 2):
        loss = loss + net.wide.weight[0, 0] * math.nan
    return loss


def scale_of(scenario: str, step: int) -> float:
    return [1024.0, 1024.0, 512.0, 2.0**14, 2.0**14][step] if scenario == "scaled" else 1.0


def update(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What a scaler would do: no update with what is not finite."""
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    if all(bool(grad.isfinite().all()) for grad in grads):
        optimizer.step()
    optimizer.zero_grad()


def digest_of(tensors: dict[str, Any]) -> str:
    """Of their names and all their bits."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(name.encode())
        if tensor is not None:
            flat = tensor.detach().reshape(-1).contiguous()
            found.update(bytes(flat.view(torch.uint8).tolist()))
    return found.hexdigest()


def _begin(net: Net, scenario: str, step: int) -> tuple[nn.Module, DDPCompression]:
    at_step = [step]
    # Buckets of some 20 kB, so that there are several, and several layouts.
    ddp = nn.parallel.DistributedDataParallel(
        net, bucket_cap_mb=0.02, find_unused_parameters=scenario == "unused"
    )
    state = DDPCompression(
        ddp,
        kind="threshold" if scenario == "threshold" else "topk",
        ratio=RATIO,
        dense_below=DENSE_BELOW,
        error_feedback=scenario != "lossy",
        loss_scale=(lambda: scale_of(scenario, at_step[0])) if scenario == "scaled" else None,
    )
    state.at_step = at_step  # type: ignore[attr-defined]
    ddp.register_comm_hook(state, compressed_mean)
    return ddp, state


def _play(scenario: str, rank: int) -> dict[str, Any]:
    net = net_of(scenario)
    optimizer = optimizer_of(net)
    ddp, state = _begin(net, scenario, 0)
    grads = []
    for step in range(STEPS):
        if scenario in ("resumed", "scaled") and step == 3:
            saved = copy.deepcopy([x.state_dict() for x in (net, optimizer, state)])
            net = net_of(scenario)
            optimizer = optimizer_of(net)
            ddp, state = _begin(net, scenario, step)
            for part, held in zip((net, optimizer, state), saved, strict=True):
                part.load_state_dict(held)
        state.at_step[0] = step  # type: ignore[attr-defined]
        scale = scale_of(scenario, step)
        (loss_of(ddp, net, scenario, rank, step) * scale).backward()
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        if scenario == "clipped":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        for name, parameter in net.named_parameters():
            _check_form(state, scenario, name, parameter)
        grads.append(digest_of({name: p.grad for name, p in net.named_parameters()}))
        update(net, optimizer)
    residuals = state.state_dict()["residuals"]
    return {
        "grads": grads,
        "residuals": digest_of({name: r / scale for name, r in residuals.items()}),
        "names": sorted(residuals),
    }


def _check_form(state: DDPCompression, scenario: str, name: str, parameter: Any) -> None:
    """What is logged is what is consumed."""
    form = state.form_of(parameter)
    if parameter.grad is None or parameter.numel() < DENSE_BELOW:
        assert form is None, name
    elif not bool(parameter.grad.isfinite().all()):
        assert form is None, name
        assert scenario == "strange"
    else:
        assert form is not None, name
        form.check()
        assert form.values.numel() <= 2 * WORLD * math.ceil(RATIO * parameter.numel())
        assert torch.equal(form.dense(), parameter.grad.reshape(-1)), name


def main(store: str, rank: int) -> None:
    """Plays all scenarios as one of the ranks, and says what it saw: one JSON document."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    print(json.dumps({scenario: _play(scenario, rank) for scenario in SCENARIOS}), flush=True)
    dist.destroy_process_group()
