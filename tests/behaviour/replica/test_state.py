"""The keeper's replica: bit for bit the state that training has, in bases and in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.options import KeeperOptions
from everstep.seams.failpoints import arm
from tests.support.following import (
    base_of,
    opened,
    run_steps,
    steps_on_disk,
    taken_here,
)
from tests.support.matrix import CASES, LOOPS
from tests.support.matrix import World as MatrixWorld
from tests.support.serving import serving

STEPS = 6


class Odd:
    """Parameters of all kinds, two optimizers that share one, and a tensor for a learning rate."""

    def __init__(self, *, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Module()
        parameters = {
            "large": torch.randn(700, 97),
            "transposed": torch.randn(9, 33).t(),
            "channels_last": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
            "scalar": torch.randn(()),
            "empty": torch.randn(0, 3),
            "precise": torch.randn(13, dtype=torch.float64),
            "short": torch.randn(33, 7, dtype=torch.bfloat16),
            "turning": torch.randn(5, dtype=torch.complex64),
            "wide": torch.randn(5, dtype=torch.complex128),
            "shared": torch.randn(17),
            "frozen": torch.randn(11),
        }
        for name, tensor in parameters.items():
            self.model.register_parameter(name, nn.Parameter(tensor))
        self.model.frozen.requires_grad_(False)
        self.model.register_buffer("drawn", torch.zeros(3))
        self.model.register_buffer("count", torch.zeros((), dtype=torch.int64))
        named = dict(self.model.named_parameters())
        rest = [tensor for name, tensor in named.items() if name not in ("large", "short")]
        self.first = torch.optim.AdamW(rest, lr=torch.tensor(0.01))
        self.second = torch.optim.SGD(
            [named["large"], named["short"], named["shared"]], lr=0.1, momentum=0.9
        )
        self.state: dict[str, Any] = {
            "model": self.model,
            "first": self.first,
            "second": self.second,
        }

    def train(self) -> None:
        loss = torch.zeros(())
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.numel():
                value = parameter.abs() if parameter.is_complex() else parameter
                loss = loss + (value.to(torch.float32) * torch.randn(value.shape)).square().sum()
        loss.backward()
        self.first.step()
        if int(self.model.count) % 2 == 0:
            self.second.step()
        self.second.zero_grad()
        self.first.zero_grad()
        self.first.param_groups[0]["lr"].mul_(0.9)
        self.model.drawn.copy_(torch.randn(3))
        self.model.count.add_(1)

    def snapshot(self) -> dict[str, bytes]:
        found = {name: _bytes(tensor) for name, tensor in self.model.state_dict().items()}
        for key, optimizer in (("first", self.first), ("second", self.second)):
            for number, values in enumerate(optimizer.state.values()):
                for name, value in values.items():
                    found[f"{key}.{number}.{name}"] = _bytes(torch.as_tensor(value))
        found["rng"] = _bytes(torch.get_rng_state())
        return found


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def bases_as_training_takes_them(run: Path, make: Callable[[], Any]) -> None:
    """Trains, and takes a lazy base of each step."""
    keeper = KeeperOptions(process=False)
    with opened(run, world := make(), method="lazy", every=1, keeper=keeper) as ckpt:
        run_steps(ckpt, world, STEPS)


def check_bases(
    folder: Path,
    make: Callable[[], Any],
    steps: tuple[int, ...] = (2, 5, 6),
    *,
    own: int = 1,
) -> None:
    """Bases of the replica are what the training process would have taken.

    Args:
        own: bases that it has to take itself, because what the state consists of changes.
    """
    bases_as_training_takes_them(folder / "lazy", make)
    with serving(folder / "run") as bench:
        world = make()
        ckpt = opened(bench.run, world)
        for step in range(1, STEPS + 1):
            run_steps(ckpt, world, 1)
            if step == 1:
                ckpt.wait()
            if step in steps:
                ckpt.save()
        ckpt.close()
        assert taken_here(ckpt) == own
    assert set(steps_on_disk(bench.run)) >= {1, STEPS, *steps}
    for step in steps:
        with base_of(bench.run, step) as found, base_of(folder / "lazy", step) as wanted:
            assert found.marker.exact, step
            assert (found.lsn, found.shape) == (wanted.lsn, wanted.shape)
            mine, theirs = found.digests(), wanted.digests()
            assert list(mine) == list(theirs)
            assert not [name for name in mine if mine[name] != theirs[name]], step
            assert found.objects == wanted.objects
            assert found.entries.keys() == wanted.entries.keys()


def own_bases(case: str, loop: str) -> int:
    """A part that begins to learn late brings new state with it, where there is such state and it
    is not there from the start."""
    found = CASES[case]
    makes_state = found.optimizer != "Adagrad" and (
        found.optimizer != "SGD" or "momentum" in found.options
    )
    return 2 if LOOPS[loop].frozen and found.late and makes_state else 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_base_of_the_replica_is_what_a_lazy_base_is(tmp_path: Path, loop: str) -> None:
    case = "AdamW-foreach"
    make = lambda: MatrixWorld(CASES[case], LOOPS[loop])  # noqa: E731
    check_bases(tmp_path, make, own=own_bases(case, loop))


@pytest.mark.parametrize(
    "case", ["SGD-momentum-for-loop", "Adam-fused", "AdamW-fused", "RMSprop-for-loop"]
)
def test_whatever_the_optimizer(tmp_path: Path, case: str) -> None:
    make = lambda: MatrixWorld(CASES[case], LOOPS["all"])  # noqa: E731
    check_bases(tmp_path, make, (5,), own=own_bases(case, "all"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_row_of_the_matrix(tmp_path: Path, case: str) -> None:
    make = lambda: MatrixWorld(CASES[case], LOOPS["all"])  # noqa: E731
    check_bases(tmp_path, make, own=own_bases(case, "all"))


def test_a_base_that_was_asked_for_is_made_before_the_state_changes(tmp_path: Path) -> None:
    """By the replica, which a base of the training process's own begins anew: that waits."""
    stepped, before = threading.Event(), []
    world = MatrixWorld(CASES["AdamW-foreach"], LOOPS["plain"])
    head = world.state["head"] = nn.Linear(3, 3)
    with serving(tmp_path / "run") as bench, opened(bench.run, world) as ckpt:
        run_steps(ckpt, world, 1)
        ckpt.wait()
        arm("replica.before_apply", lambda name: before.append(not stepped.wait(0.5)))
        run_steps(ckpt, world, 1)
        asked = ckpt.save()
        world.optimizer.add_param_group({"params": head.parameters()})
        run_steps(ckpt, world, 1)
        stepped.set()
        ckpt.wait()
    assert before == [True]
    assert asked.durable.exception() is None
    assert {2, 3} <= set(steps_on_disk(bench.run))


def test_parameters_of_all_kinds_and_two_optimizers(tmp_path: Path) -> None:
    check_bases(tmp_path, Odd)
