"""Bytes that lie beside what updates read, or that a registered function changes: to write there is
no change that nobody was told of (I8)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from everstep.testing import inspect
from tests.support.log.untold import opened, said_once


def odd_run(
    run: Path, state: dict[str, Any], one_step: Callable[[Any], None], **options: Any
) -> Any:
    """A few steps of a loop of one's own, without a last base; what it took."""
    with opened(run, SimpleNamespace(state=state), **options) as ckpt:
        ckpt.resume()
        for _ in range(6):
            one_step(ckpt)
            ckpt.step()
        stats = ckpt.stats()
        inspect(ckpt).skip_last_base()
    return stats


def test_the_rest_of_a_table_that_is_an_entry(run_folder: Path) -> None:
    """Its counter is that of the slice, too, which is watched by samples then."""

    def made(seed: int) -> tuple[dict[str, Any], Callable[[Any], None]]:
        torch.manual_seed(seed)
        table = torch.randn(1200, 64)
        emb = nn.Embedding.from_pretrained(table[:1000], freeze=False)
        optimizer = torch.optim.Adam(emb.parameters(), 0.01)

        def one_step(_: Any) -> None:
            emb(torch.tensor([3, 555])).square().mean().backward()
            table[1100:].add_(1)
            optimizer.step()
            optimizer.zero_grad()

        return {"m": emb, "all": table, "o": optimizer}, one_step

    state, one_step = made(1)
    stats = odd_run(run_folder, state, one_step)
    assert (stats.log_holes, stats.saves) == (0, 1)
    other, _ = made(9)
    with opened(run_folder, SimpleNamespace(state=other)) as ckpt:
        recovery = ckpt.resume()
        inspect(ckpt).skip_last_base()
        assert (recovery.step, recovery.base_step, recovery.exact) == (6, 1, True)
    assert torch.equal(other["all"], state["all"])
    for mine, theirs in zip(*(s["o"].state.values() for s in (other, state)), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


class Flat:
    """A buffer that a registered function updates, of which an optimizer has the first elements."""

    def __init__(self, seed: int = 1, owned: tuple[slice, ...] = (slice(0, 40),)) -> None:
        torch.manual_seed(seed)
        self.flat, self.apart = torch.randn(100), torch.randn(64)
        parameters = [nn.Parameter(self.flat[own]) for own in owned]
        self.two = [nn.Parameter(self.apart[at : at + 32]) for at in (0, 32)]
        self.optimizer = torch.optim.Adam([*parameters, *self.two], 0.01, weight_decay=0.1)
        self.state: dict[str, Any] = {"flat": self.flat, "apart": self.apart, "o": self.optimizer}
        self.parameters = [*parameters, *self.two]

    def told(self, ckpt: Any) -> None:
        ckpt.before_update()
        self.shrink()
        ckpt.after_update("flat")

    def shrink(self) -> None:
        self.flat.mul_(0.9)

    def update(self) -> None:
        sum(parameter.square().sum() for parameter in self.parameters).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> list[torch.Tensor]:
        moments = [value for values in self.optimizer.state.values() for value in values.values()]
        return [tensor.clone() for tensor in (self.flat, self.apart, *moments)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("owned", [(slice(0, 40),), (slice(0, 40), slice(40, 100))], ids=len)
def test_what_a_registered_function_changes_is_told(
    run_folder: Path, owned: tuple[slice, ...], first: bool
) -> None:
    """Also of what the next update reads, whether everything there is read or not."""
    world = Flat(owned=owned)

    def one_step(ckpt: Any) -> None:
        if first:
            world.told(ckpt)
        world.update()
        if not first:
            world.told(ckpt)

    stats = odd_run(run_folder, world.state, one_step, declared={"flat": world.shrink})
    assert (stats.log_holes, stats.saves) == (0, 1)
    other = Flat(9, owned)
    with opened(run_folder, other, declared={"flat": other.shrink}) as ckpt:
        recovery = ckpt.resume()
        inspect(ckpt).skip_last_base()
        assert (recovery.step, recovery.base_step) == (6, 1)
    assert all(map(torch.equal, other.snapshot(), world.snapshot()))


def test_what_no_update_reads_of_a_buffer_is_not_watched(run_folder: Path) -> None:
    world = Flat()

    def one_step(_: Any) -> None:
        world.flat[40:].add_(1)
        world.update()

    stats = odd_run(run_folder, world.state, one_step)
    assert (stats.log_holes, stats.saves) == (0, 1)


@pytest.mark.parametrize("where", ["read", "elsewhere"])
def test_what_else_is_written_to_is_found_all_the_same(run_folder: Path, where: str) -> None:
    """What an optimizer has of the buffer, and what it has elsewhere, before the function runs."""
    world = Flat()

    def one_step(ckpt: Any) -> None:
        if where == "elsewhere":
            world.apart.mul_(0.5)
        world.told(ckpt)
        if where == "read":
            world.flat[:40].mul_(0.5)
        world.update()

    with said_once():
        stats = odd_run(run_folder, world.state, one_step, declared={"flat": world.shrink})
    assert stats.log_holes >= 5
