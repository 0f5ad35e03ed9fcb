"""What the tests of the exactness matrix share: one training for every row and every trap, and a
server that forks a process for each job, because tests that kill need many of them.

As a program (``python -m tests.support.matrix``) it reads jobs, one JSON document a line, and runs
each in a process of its own, which says a line for each thing that it has done.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import everstep
from everstep.replay.exactness import MATRIX
from everstep.seams import failpoints
from tests.crash.sim.training import freeze

__all__ = [
    "CASES",
    "LOOPS",
    "MOMENTS",
    "STEPS",
    "Case",
    "Fleet",
    "Loop",
    "Said",
    "World",
    "workers",
]

STEPS = 9
"""How long the trainings are."""

SKIPPED = (3, 6)
"""Steps whose gradients overflow where there is a scaler."""

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ],
    "Adam": [{"lr": 0.01, "amsgrad": True}],
    "AdamW": [{"lr": 0.01}],
    "Adagrad": [{"lr": 0.05, "lr_decay": 0.1}],
    "RMSprop": [{"lr": 0.01, "momentum": 0.5, "centered": True}],
    "NAdam": [{"lr": 0.01, "weight_decay": 0.1}],
    "RAdam": [{"lr": 0.01, "weight_decay": 0.1}],
    "Adamax": [{"lr": 0.01}],
    "Adadelta": [{"weight_decay": 0.1}],
    "ASGD": [{"t0": 3}],
    "Rprop": [{}],
}
FLAGS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclass(frozen=True)
class Case:
    """A row of the matrix, and hyperparameters that make torch take one way through its code."""

    name: str
    optimizer: str
    variant: str
    options: dict[str, Any]

    @property
    def late(self) -> bool:
        """Whether a parameter may get its first gradient after the others. torch's fused SGD
        with momentum cannot do that."""
        return not (self.variant == "fused" and self.options.get("momentum"))

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        kind: Any = getattr(torch.optim, self.optimizer)
        made: torch.optim.Optimizer = kind(groups, **self.options, **FLAGS[self.variant])
        return made


def _name(row: Any, options: dict[str, Any]) -> str:
    kind = "-nesterov" if "nesterov" in options else "-momentum" if "momentum" in options else ""
    return f"{row.optimizer}{kind if row.optimizer == 'SGD' else ''}-{row.variant}"


CASES = {
    _name(row, options): Case(_name(row, options), row.optimizer, row.variant, options)
    for row in MATRIX
    if row.device == "cpu" and row.optimizer != "SparseAdam"
    for options in OPTIONS[row.optimizer]
}
"""Every row of the matrix whose gradients can be logged: SparseAdam's are sparse."""


@dataclass(frozen=True)
class Loop:
    """What a training does beside the plain: each of them is a trap of its own."""

    clip: bool = False
    accumulate: bool = False
    scaler: bool = False
    norm: bool = False
    tied: bool = False
    frozen: bool = False
    schedule: bool = False
    zeroed: bool = False
    masters: bool = False


LOOPS = {
    "plain": Loop(),
    **{field.name: Loop(**{field.name: True}) for field in fields(Loop)},
    "all": Loop(**{field.name: field.name != "zeroed" for field in fields(Loop)}),
    "all zeroed": Loop(**{field.name: True for field in fields(Loop)}),
}


class World:
    """A small training of a case in a loop; everything in it is a function of the seed.

    Args:
        state: to be added to, under names that begin with the case's.
    """

    def __init__(
        self, case: Case, loop: Loop, *, seed: int = 1, state: dict[str, Any] | None = None
    ) -> None:
        torch.manual_seed(seed)
        self.case, self.loop = case, loop
        self.state: dict[str, Any] = {} if state is None else state
        self.prefix = "" if state is None else f"{case.name}."
        self.first, self.middle = nn.Linear(6, 8), nn.Linear(8, 8)
        self.head, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        between = [nn.BatchNorm1d(8), nn.Dropout(0.2)] if loop.norm else []
        if loop.tied:
            self.head.weight = self.middle.weight
        self.model = nn.Sequential(self.first, *between, self.middle, self.head, self.last)
        # What computes, where the optimizer has masters: no optimizer owns it.
        self.low = copy.deepcopy(self.model).bfloat16() if loop.masters else None
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2]}]
        self.optimizer = case.make(groups)
        self.scheduler = self._scheduler() if loop.schedule else None
        self.scaler = None
        if loop.scaler:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": {"steps": 0},
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "low": self.low,
        }
        self.state |= {self.prefix + key: part for key, part in parts.items() if part is not None}
        self.backward_done = self.updated = lambda step: None

    def _scheduler(self) -> OneCycleLR:
        """Every group has a rate of its own, and momentum or betas move as well."""
        defaults = self.optimizer.defaults
        cycled = "betas" in defaults or bool(defaults.get("momentum"))
        rate = float(defaults["lr"])
        return OneCycleLR(
            self.optimizer, [rate, 0.5 * rate], total_steps=3 * STEPS, cycle_momentum=cycled
        )

    def train(self) -> None:
        """One step."""
        data = self.state[self.prefix + "data"]
        step = data["steps"] = data["steps"] + 1
        self._freeze(step)
        overflow = self.scaler is not None and step in SKIPPED
        for _ in range(2 if self.loop.accumulate else 1):
            loss = self._forward(torch.randn(5, 6)).square().mean()
            if self.scaler is not None:
                loss = self.scaler.scale(loss * float("inf") if overflow else loss)
            loss.backward()
        self._raise()
        self.backward_done(step)
        if self.loop.clip and not (self.scaler is not None and step % 2):
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.2)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.loop.zeroed)
        self._lower()
        if self.scheduler is not None:
            self.scheduler.step()
        self.updated(step)

    def _freeze(self, step: int) -> None:
        """One part never learns, one stops for a while, one begins late."""
        if self.loop.frozen:
            self.last.bias.requires_grad_(False)
            for parameter in self.first.parameters():
                parameter.requires_grad_(step not in (4, 5))
            self.middle.bias.requires_grad_(step > 3 or not self.case.late)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor
        found = self.model(x) if self.low is None else self.low(x.bfloat16()).float()
        return found

    def _raise(self) -> None:
        """The masters' gradients."""
        if self.low is not None:
            for master, low in zip(self.model.parameters(), self.low.parameters(), strict=True):
                if low.grad is not None and master.requires_grad:
                    master.grad = low.grad.float()
                low.grad = None

    @torch.no_grad()
    def _lower(self) -> None:
        """What computes is what the masters have become."""
        if self.low is not None:
            for master, low in zip(self.model.parameters(), self.low.parameters(), strict=True):
                low.copy_(master)

    def snapshot(self) -> dict[str, str]:
        """Digest of every part: every entry, and the generator that is drawn from."""
        return snapshot_of(self.state)


class Fleet:
    """A training of every case at once: models and optimizers in one state, one log."""

    def __init__(self, loop: Loop, *, seed: int = 1) -> None:
        self.state: dict[str, Any] = {}
        self.worlds = [World(case, loop, seed=seed, state=self.state) for case in CASES.values()]

    def train(self) -> None:
        """One step of each."""
        for world in self.worlds:
            world.train()

    def snapshot(self) -> dict[str, str]:
        """Digest of every part."""
        return snapshot_of(self.state)


def snapshot_of(state: dict[str, Any]) -> dict[str, str]:
    """Digest of every part of a state, and of torch's generator."""
    parts: dict[str, Any] = {"rng": torch.get_rng_state()}
    for key, value in state.items():
        found = dict(value if isinstance(value, dict) else value.state_dict())
        if isinstance(value, torch.optim.Optimizer):
            for number, values in found.pop("state").items():
                parts |= {f"{key}/{number}/{name}": item for name, item in values.items()}
        parts |= {f"{key}/{name}": item for name, item in found.items()}
    return {
        name: hashlib.sha256(repr(freeze(part)).encode()).hexdigest()[:16]
        for name, part in parts.items()
    }


# --- Processes --------------------------------------------------------------------------

MOMENTS = ("backward", "update", "log.before_record", "log.after_record", "mark")
"""Where a step can be killed: before its update, behind it, before and after a record of it is
the keeper's, and when it is over."""

_LIMIT_S = 60
Said = list[dict[str, Any]]


@contextmanager
def workers(errors: Path) -> Iterator[Any]:
    """Gives a function that runs a job in a new process: its exit status, and what it said.

    Args:
        errors: file for what the processes have to say to people.
    """
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.matrix"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        read = server.stdout.readline

        def run(**job: Any) -> tuple[int, Said]:
            assert server.stdin is not None
            print(json.dumps(job), file=server.stdin, flush=True)
            said: Said = []
            while line := read():
                said.append(json.loads(line))
                if "ended" in said[-1]:
                    return said.pop()["ended"], said
            raise AssertionError(f"the server of processes is gone:\n{errors.read_text()}")

        yield run
        server.stdin.close()
        assert server.wait(_LIMIT_S) == 0, errors.read_text()


def _serve() -> None:
    import torch._dynamo  # noqa: F401, what optimizers load when they are first made: once for all

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(_LIMIT_S)  # what hangs is killed
                _work(**job)
            except BaseException as error:
                print(f"{job}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        _say(ended=os.waitstatus_to_exitcode(status))


def _work(
    loop: str,
    *,
    seed: int,
    case: str | None = None,
    run: str | None = None,
    kill: tuple[str, int, int] | None = None,
    on_disk: str | None = None,
) -> None:
    """Trains, or trains on, to the last step; without a run nobody watches.

    Args:
        case: None: all of them.
        kill: the moment, the step, and (modulo how many there are) the training at which this
            process kills itself.
        on_disk: the log is on disk, and the keeper in this process, which kills itself at the
            second visit of this failpoint; "": at none.
    """
    world = (
        Fleet(LOOPS[loop], seed=seed)
        if case is None
        else World(CASES[case], LOOPS[loop], seed=seed)
    )
    if run is None:
        for step in range(1, STEPS + 1):
            world.train()
            _say(step=step, parts=world.snapshot())
        return
    options: dict[str, Any] = {"method": "logged", "every": 4}
    if on_disk is not None:
        log = everstep.LogOptions(to="disk", batch_steps=1)
        options |= {"log": log, "keeper": everstep.KeeperOptions(process=False), "keep": 1}
    if on_disk:
        failpoints.arm(on_disk, "kill", hit=2)
    ckpt = everstep.Checkpointer(run, world.state, **options)
    recovery = ckpt.resume()
    _say(
        resumed=recovery.step,
        parts=world.snapshot(),
        exact=recovery.exact,
        evidence=recovery.evidence,
        replayed=recovery.replayed,
        skipped=[str(one) for one in recovery.skipped],
    )
    for step in range(recovery.step + 1, STEPS + 1):
        if kill is not None and kill[1] == step:
            _arm(world, kill[0], kill[2])
        world.train()
        parts = world.snapshot()
        ckpt.step()
        if on_disk and step == recovery.step + 1:
            ckpt.wait()  # a log leads nowhere before its base is durable
        _say(step=step, parts=parts)
        if kill is not None and (kill[0], kill[1]) == ("mark", step):
            _die(step)
    ckpt.close()


def _arm(world: World | Fleet, moment: str, number: int) -> None:
    worlds = world.worlds if isinstance(world, Fleet) else [world]
    number %= len(worlds)
    if moment == "backward":
        worlds[number].backward_done = _die
    elif moment == "update":
        worlds[number].updated = _die
    elif moment != "mark":
        failpoints.arm(moment, "kill", hit=1 + number)


def _die(step: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _say(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    warnings.simplefilter("error")
    _serve()


DOCUMENT = (Path(__file__).parents[2] / "docs" / "EXACTNESS.md").read_text()


def table(heading: str) -> list[list[str]]:
    """Rows of the table whose header row begins with ``heading``."""
    _, _, rest = DOCUMENT.partition(f"\n| {heading} |")
    assert rest, f"no table {heading!r} in docs/EXACTNESS.md"
    rows = itertools.takewhile(lambda line: line.startswith("|"), rest.splitlines()[1:])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in list(rows)[1:]]
