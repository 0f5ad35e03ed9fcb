"""Trainings of several ranks over gloo, one for each way to spread one: what
:mod:`tests.process.ranks.test_parallel` kills and resumes.

A process is one rank of one start of a job (:func:`main`). Every rank has a state of its own kind:
parameters and moments, whole or in parts, statistics of batches, a schedule, what it has drawn from
Python's and NumPy's generators, and the generators themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from everstep.errors import AuditError
from everstep.seams import failpoints
from everstep.testing import inspect
from everstep.trainer.multistep.held_gradients import GradientCheck
from tests.support.lost_keepers import noticed

__all__ = ["LAYOUTS", "MORE", "Layout", "Training", "main"]

EVERY, WAITS_AT = 2, 3
_HANGS_S = 240.0
_LATE_S = 1.0
_ROWS, _WIDTH = 4, 5
DistributedDataParallel = nn.parallel.DistributedDataParallel


class Net(nn.Module):
    """What goes in and what comes out are alike: stages of a pipeline have parameters of the same
    names and shapes. Few numbers of ranks divide its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(_WIDTH)
        self.up = nn.Linear(_WIDTH, 8)
        self.noise = nn.Dropout(0.3)
        self.down = nn.Linear(8, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.noise(self.up(self.norm(x)).relu()))  # type: ignore[no-any-return]


class Lines(nn.Module):
    """A net without a norm: tensor parallelism makes each of its parameters a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 8)
        self.down = nn.Linear(8, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Deep(nn.Module):
    """A net whose layers are used in another order than they are named in, so that gradients come
    in another order than that of the parameters or its reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(24, _WIDTH), nn.Linear(_WIDTH, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        for number in (2, 0, 4, 1, 3):
            x = x + self.layers[number](x).tanh()
        return self.down(x)  # type: ignore[no-any-return]


class Stage(nn.Module):
    """A stage of a pipeline; ``tied`` is the same matrix in the first and in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.tied = nn.Parameter(torch.randn(_WIDTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x @ self.tied)  # type: ignore[no-any-return]


class Follower(nn.Module):
    """A net, and one of which no optimizer knows: it follows the first."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.slow = Net(), Net().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) - self.slow(x)  # type: ignore[no-any-return]

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            slow.lerp_(fast, 0.1)


@dataclass
class Training:
    """One rank's part in a training.

    Attributes:
        values: its state dict.
        gradients: forward and backward of a batch.
        stage: of the pipeline.
        draws: which ranks draw the same batches and noise: those of the same number.
        to_none: gradients are let go of after each step; False: they are set to zero.
    """

    values: dict[str, Any]
    gradients: Callable[[], None]
    stage: int = 0
    draws: int = 0
    to_none: bool = True

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        self.values["data"] = {"python": random.random(), "numpy": float(np.random.rand())}
        self.gradients()
        before_update()
        self.values["optimizer"].step()
        self.values["scheduler"].step()
        self.values["optimizer"].zero_grad(set_to_none=self.to_none)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Of the module and the optimizer's state, by name."""
        model, optimizer = self.values["model"], self.values["optimizer"]
        found = {k.removeprefix("module."): v for k, v in model.state_dict().items()}
        names = {id(p): k.removeprefix("module.") for k, p in model.named_parameters()}
        for parameter, state in getattr(optimizer, "optim", optimizer).state.items():
            for key, value in state.items():
                found[f"{names[id(parameter)]}/{key}"] = value
        return found

    def digests(self) -> dict[str, str]:
        """Of what this rank has, in memory."""
        local = {name: _local(tensor) for name, tensor in self.tensors().items()}
        optimizer, scheduler = self.values["optimizer"], self.values["scheduler"]
        rest = optimizer.param_groups[0]["lr"], scheduler.last_epoch, self.values["data"]
        generators = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
        return {
            "tensors": _digest(local),
            "rest": repr(rest),
            "torch": _digest({"": torch.get_rng_state()}),
            "generators": hashlib.sha256(repr(generators).encode()).hexdigest(),
        }

    def whole(self) -> dict[str, str]:
        """Of tensors as torch puts them together; every rank has to call it."""
        found = {}
        for name, tensor in self.tensors().items():
            if not any(own in name for own in ("running", "num_batches")):  # each rank's own
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                found[f"stage {self.stage}/{name}"] = _digest({"": whole})
        return found


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        about = f"{name} {tensor.dtype} {list(tensor.shape)}"
        found.update(about.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


# --- Ways to spread it --------------------------------------------------------------------


def _finish(model: Any, draws: int, zero: bool = False) -> Training:
    """Everything in one module, which every rank has, whole or in parts."""

    def gradients() -> None:
        model(torch.randn(_ROWS, _WIDTH)).square().mean().backward()

    return Training(_values(model, zero=zero), gradients, draws=draws)


def _values(model: Any, *, zero: bool = False) -> dict[str, Any]:
    if zero:
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": {}}


def _tensor_parallel(net: nn.Module, mesh: Any) -> None:
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _one(rank: int, world: int) -> Training:
    return _finish(Net(), rank)


def _ddp(rank: int, world: int) -> Training:
    return _finish(DistributedDataParallel(Net()), rank)


def _buckets(rank: int, world: int, to_none: bool = True, **options: Any) -> Training:
    """DDP of several buckets."""
    training = _finish(DistributedDataParallel(Deep(), bucket_cap_mb=0.004, **options), rank)
    training.to_none = to_none
    return training


def _buckets_inside(rank: int, world: int) -> Training:
    """The state has the module in DDP, with buckets of torch's own size, and no DDP."""
    model = DistributedDataParallel(Deep())
    training = _finish(model, rank)
    training.values["model"] = model.module
    return training


def _buckets_accumulated(rank: int, world: int) -> Training:
    """Three backwards for an update, two of them within ``no_sync()``."""
    training = _buckets(rank, world)
    once, model = training.gradients, training.values["model"]

    def gradients() -> None:
        with model.no_sync():
            once()
            once()
        once()

    training.gradients = gradients
    return training


def _buckets_two(rank: int, world: int) -> Training:
    """Two DDPs in the module that the state has."""
    parts = [Deep(), nn.Linear(_WIDTH, _WIDTH, bias=False), Deep()]
    for at in (0, 2):
        parts[at] = DistributedDataParallel(parts[at], bucket_cap_mb=0.004)
    parts[1].requires_grad_(False)
    return _finish(nn.Sequential(*parts), rank)


def _follows(rank: int, world: int) -> Training:
    """What follows is alike on all ranks, and inside of DDP."""
    both = Follower()
    model = DistributedDataParallel(both) if world > 1 else both

    def gradients() -> None:
        both.follow()
        model(torch.randn(_ROWS, _WIDTH)).square().mean().backward()

    return Training({**_values(both.net), "model": model}, gradients, draws=rank)


def _zero(rank: int, world: int) -> Training:
    return _finish(DistributedDataParallel(Net()), rank, zero=True)


def _fsdp(rank: int, world: int) -> Training:
    net = Net()
    fully_shard(net.up)
    return _finish(fully_shard(net), rank)


def _fsdp_low(rank: int, world: int) -> Training:
    """Trains float32 parts; what is gathered of them for forward and backward is bfloat16, and is
    made anew each time: no state holds it."""
    net, policy = Net(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(net.norm)
    fully_shard(net.up, mp_policy=policy)
    return _finish(fully_shard(net, mp_policy=policy), rank)


def _hsdp(rank: int, world: int) -> Training:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    return _finish(fully_shard(Net(), mesh=mesh), rank)


def _hsdp_topk(rank: int, world: int) -> Training:
    """Residuals are sharded and replicated as parameters are."""
    from everstep.compress import Compressor

    training = _hsdp(rank, world)
    optimizer = training.values["optimizer"]
    training.values["compressor"] = Compressor(optimizer, ratio=0.2, dense_below=8)
    return training


def _tp(rank: int, world: int) -> Training:
    net = Net()
    _tensor_parallel(net, init_device_mesh("cpu", (world,)))
    return _finish(net, 0)


def _tp_lines(rank: int, world: int) -> Training:
    net = Lines()
    _tensor_parallel(net, init_device_mesh("cpu", (world,)))
    return _finish(net, 0)


def _fsdp_tp(rank: int, world: int, net_type: Callable[[], nn.Module] = Net) -> Training:
    mesh, net = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp")), net_type()
    _tensor_parallel(net, mesh["tp"])
    return _finish(fully_shard(net, mesh=mesh["dp"]), rank // 2)


def _dp_tp(rank: int, world: int) -> Training:
    """Gradients are averaged by hand over columns of ranks that are tensor-parallel each."""
    mesh, net = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp")), Net()
    _tensor_parallel(net, mesh["tp"])
    training = _finish(net, rank // 2)
    inner, group = training.gradients, mesh["dp"].get_group()

    def gradients() -> None:
        inner()
        for parameter in net.parameters():
            grad = _local(parameter.grad)
            distributed.all_reduce(grad, group=group)
            grad.div_(world // 2)

    training.gradients = gradients
    return training


def _pipeline(rank: int, world: int, wrap: Callable[[Stage], Any], draws: int) -> Training:
    """Two stages, the first of them on the first half of the ranks, ``tied`` equal in both."""
    half = world // 2
    stage, other = rank // half, (rank + half) % world
    torch.manual_seed(2 + stage)
    made = Stage()
    with torch.no_grad():
        made.tied.copy_(torch.arange(float(_WIDTH**2)).reshape(_WIDTH, _WIDTH).sin())
    model = wrap(made)
    pairs = [distributed.new_group([low, low + half]) for low in range(half)]
    pair, shape = pairs[rank % half], (_ROWS, _WIDTH)

    def gradients() -> None:
        if stage == 0:
            out = model(torch.randn(shape))
            distributed.send(out.detach().contiguous(), other)
            grad = torch.empty(shape)
            distributed.recv(grad, other)
            out.backward(grad)
        else:
            x = torch.empty(shape)
            distributed.recv(x, other)
            x.requires_grad_()
            (model(x) - torch.randn(shape)).square().mean().backward()
            assert x.grad is not None
            distributed.send(x.grad, other)
        distributed.all_reduce(_local(made.tied.grad), group=pair)

    return Training(_values(model), gradients, stage, draws)


def _pp(rank: int, world: int) -> Training:
    return _pipeline(rank, world, lambda stage: stage, 0)


def _dp_pp(rank: int, world: int) -> Training:
    half = world // 2
    groups = [distributed.new_group(list(range(at, at + half))) for at in (0, half)]
    group = groups[rank // half]
    return _pipeline(
        rank,
        world,
        lambda stage: DistributedDataParallel(stage, process_group=group),
        rank % half,
    )


def _pp_tp(rank: int, world: int) -> Training:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "tp"))

    def wrap(stage: Stage) -> Stage:
        _tensor_parallel(stage.net, mesh["tp"])
        return stage

    return _pipeline(rank, world, wrap, 0)


def _three(rank: int, world: int) -> Training:
    mesh = init_device_mesh("cpu", (2, world // 4, 2), mesh_dim_names=("pp", "dp", "tp"))

    def wrap(stage: Stage) -> Any:
        _tensor_parallel(stage.net, mesh["tp"])
        return fully_shard(stage, mesh=mesh["dp"])

    return _pipeline(rank, world, wrap, rank // 2 % (world // 4))


@dataclass(frozen=True)
class Layout:
    """A way to spread a training.

    Attributes:
        name: as the documents call it.
        ranks: on which it is killed and resumed.
        others: what goes on from it: layout and number of ranks.
    """

    name: str
    ranks: int
    build: Callable[[int, int], Training]
    others: tuple[tuple[str, int], ...] = ()


LAYOUTS = {
    "one": Layout("one process", 1, _one),
    "ddp": Layout("DDP", 2, _ddp, (("ddp", 3), ("one", 1))),
    "zero": Layout("DDP, `ZeroRedundancyOptimizer`", 2, _zero, (("zero", 3), ("ddp", 2))),
    "fsdp": Layout("FSDP2", 4, _fsdp, (("fsdp", 2), ("zero", 2))),
    "fsdp_low": Layout("FSDP2, computing in bfloat16", 2, _fsdp_low, (("fsdp", 3),)),
    "hsdp": Layout("FSDP2, replicated", 4, _hsdp, (("fsdp", 3), ("tp", 2))),
    "tp": Layout("TP", 2, _tp, (("one", 1), ("fsdp_tp", 4))),
    "dp_tp": Layout("DP x TP", 4, _dp_tp, (("tp", 2), ("ddp", 4))),
    "fsdp_tp": Layout("FSDP2 x TP", 4, _fsdp_tp, (("fsdp", 2), ("one", 1))),
    "pp": Layout("PP", 2, _pp),
    "dp_pp": Layout("DP x PP", 4, _dp_pp),
    "pp_tp": Layout("PP x TP", 4, _pp_tp),
    "3d": Layout("FSDP2 x PP x TP", 8, _three),
}
"""The rows of the matrix."""

MORE = {
    **LAYOUTS,
    "follows": Layout("DDP, with parameters that no optimizer trains", 2, _follows),
    "buckets": Layout("DDP, several buckets", 4, _buckets),
    "buckets_views": Layout(
        "DDP, gradients are views of buckets, and set to zero",
        3,
        partial(_buckets, to_none=False, gradient_as_bucket_view=True),
    ),
    "buckets_views_unused": Layout(
        "DDP, the same, looking for parameters that are not used",
        3,
        partial(_buckets, to_none=False, gradient_as_bucket_view=True, find_unused_parameters=True),
    ),
    "buckets_batched": Layout(
        "DDP, gradients are copied together", 4, partial(_buckets, batched_grad_copy=True)
    ),
    "buckets_inside": Layout("DDP, its module in the state", 4, _buckets_inside),
    "buckets_accumulated": Layout("DDP, gradients accumulated", 4, _buckets_accumulated),
    "buckets_two": Layout("two DDPs in a module", 4, _buckets_two),
    "buckets_static": Layout("DDP, static graph", 4, partial(_buckets, static_graph=True)),
    "tp_lines": Layout("TP, all parameters", 2, _tp_lines),
    "fsdp_tp_lines": Layout("FSDP2 x TP, all parameters", 4, partial(_fsdp_tp, net_type=Lines)),
    "hsdp_topk": Layout("FSDP2, replicated, on compressed gradients", 4, _hsdp_topk),
}
"""With what is tried for one thing alone."""


# --- The process --------------------------------------------------------------------------


def _die_at(place: str, rank: int, step: int) -> None:
    if os.environ.get("DIES") == f"{rank} {step} {place}":
        os.kill(os.getpid(), signal.SIGKILL)


def _do_at(step: int, ckpt: Any) -> None:
    """Do as ``DOES`` says for the end of a step: a JSON object, by step; several with commas."""
    for wanted in json.loads(os.environ.get("DOES", "{}")).get(str(step), "").split(","):
        _do(wanted, ckpt)


def _do(wanted: str, ckpt: Any) -> None:
    found, _, number = wanted.partition(" ")
    if found in ("wait", "save", "rewind"):
        getattr(ckpt, found)(*map(int, number.split()))
    elif found == "spoil":  # what was captured of a base over several steps
        inspect(ckpt).multistep.window.failed = AuditError("planted")
    elif found == "hole":  # in the log
        failpoints.arm("log.before_record", "raise")
    elif found == "tear":  # a gradient of the next update, which the lane finds out in its own time
        torn, late = GradientCheck.torn, threading.Event()

        def find(*_: Any) -> str:
            late.wait(_LATE_S)
            GradientCheck.torn = torn
            return "planted"

        GradientCheck.torn = find
    elif found == "doubt":
        inspect(ckpt).state.coverage.descends_exactly = False
    elif found == "kill":  # its keeper, and training hears of it
        os.kill(inspect(ckpt).keeper.pid, signal.SIGKILL)
        noticed(ckpt)
    elif found == "lose":  # a base, and training hears of it
        if (
            last := inspect(ckpt).multistep.last
        ) is not None:  # else it has heard, and a new keeper is there
            last.durable.exception(_HANGS_S)
    elif found == "draw":
        torch.rand(1)
    elif found == "flush":
        assert torch.set_flush_denormal(True)
    elif found == "raise":
        raise ValueError("planted")


def main() -> None:
    """A rank. Arguments: run folder, where ranks meet, layout, rank, number of ranks, last step,
    options of the Checkpointer as JSON (null: train without one)."""
    run, meet, layout, *numbers, about = sys.argv[1:]
    rank, world, last = map(int, numbers)
    run += os.environ.get("DISK", "")
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True)
    options = json.loads(about)
    if world > 1:
        store, limit = f"file://{meet}", timedelta(seconds=_HANGS_S)
        distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world, timeout=limit
        )
    torch.manual_seed(1)
    training = MORE[layout].build(rank, world)
    torch.manual_seed(100 + training.draws)
    random.seed(rank)
    np.random.seed(rank)

    def say(**what: Any) -> None:
        os.write(1, (json.dumps(what) + "\n").encode())

    ckpt: Any = None
    start, wholly = 0, bool(os.environ.get("WHOLE"))
    if options is not None:
        import everstep

        options = {"every": EVERY, "on_failure": "warn", "progress_timeout_s": _HANGS_S, **options}
        if isinstance(options["method"], dict):
            own = json.loads(os.environ.get("METHOD", "{}"))
            options["method"] = everstep.Method(**{**options["method"], **own})
        ckpt = everstep.Checkpointer(run, training.values, **options)
        recovery = ckpt.resume()
        if "DOES" in os.environ:
            os.environ.pop("EVERSTEP_FAILPOINTS", None)  # keepers that are started later live on
        start = recovery.step
        told = {"exact": recovery.exact, "notes": recovery.notes, "timeline": recovery.timeline}
        say(resumed=start, digests=training.digests(), **told)
    if wholly:
        say(at=start, whole=training.whole())
        torch.manual_seed(200 + training.draws)  # in another layout other ranks draw alike
    for step in range(start + 1, last + 1):
        training.step(lambda step=step: _die_at("before_update", rank, step))  # type: ignore[misc]
        if ckpt is not None:
            ckpt.step()
            if step == WAITS_AT and "DOES" not in os.environ:
                ckpt.wait()
            _do_at(step, ckpt)
        say(step=step, digests=training.digests())
        _die_at("after_step", rank, step)
    if wholly:
        say(at=last, whole=training.whole())
    if ckpt is not None:
        ckpt.close()
        stats = ckpt.stats()
        over_steps = None if stats.multistep is None else asdict(stats.multistep)
        taken = {"committed": stats.committed, "captured": inspect(ckpt).captured}
        say(**taken, multistep=over_steps)
    if world > 1:
        distributed.destroy_process_group()
        os._exit(0)  # what DDP holds of gloo may wait for ever for the other ranks as it is freed
