"""A base that is asked for in the middle of a step is of the last step mark, or not called exact:
a forward has drawn random numbers, and counted batches, and no optimizer has updated anything."""

from __future__ import annotations

import functools
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep import Checkpointer
from everstep.errors import StateError
from everstep.trainer.session.state_watch import mid_step_position
from tests.support.following import base_of
from tests.support.following import opened as following
from tests.support.serving import serving
from tests.support.world import freeze, opened

NUMBER = signal.SIGUSR1


class Hooked(nn.Module):
    """Calls ``then`` in the middle of its forward, where dropout has drawn random numbers."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm: nn.Module = nn.BatchNorm1d(8) if batch_norm else nn.LayerNorm(8)
        self.drop = nn.Dropout(0.5)
        self.then: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.inner(x)))
        self.then()
        return x


class World:
    def __init__(self, *, batch_norm: bool = False, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = Hooked(batch_norm)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def forward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.randn(6, 8)).square().mean()
        return loss

    def update(self) -> None:
        self.forward().backward()
        self.optimizer.step()

    def snapshot(self) -> Any:
        """With the random numbers that would come next."""
        return freeze(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "random": torch.get_rng_state(),
            }
        )


@pytest.fixture(autouse=True)
def _handler_stays() -> Iterator[None]:
    before = signal.getsignal(NUMBER)
    yield
    signal.signal(NUMBER, before)


def restored(run: Path, *, batch_norm: bool) -> tuple[int, bool, Any]:
    world = World(batch_norm=batch_norm, seed=9)
    with opened(run, world.state) as ckpt:
        found = ckpt.resume()
        return found.step, found.exact, world.snapshot()


class Handler:
    """All that a handler can be: a function, a method, a partial, an object."""

    def __init__(self, save: Callable[[], object]) -> None:
        self.save = save

    def method(self, number: int, frame: object) -> None:
        self.save()

    def __call__(self, *given: object) -> None:
        self.save()

    def kinds(self) -> dict[str, Callable[..., None]]:
        def function(number: int, frame: object) -> None:
            self.save()

        def more(name: str, number: int, frame: object) -> None:
            self.save()

        return {
            "function": function,
            "method": self.method,
            "partial": functools.partial(more, "x"),
            "object": self,
        }


def raise_signal() -> None:
    os.kill(os.getpid(), NUMBER)  # its handler runs before this function returns


@pytest.mark.thinned(3)
@pytest.mark.parametrize("where", ["forward", "loading"])
@pytest.mark.parametrize("kind", ["function", "method", "partial", "object"])
def test_in_a_signal_handler(
    kind: str, where: str, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever looks at the checkpoint later is told that a run from it is another one."""
    world = World()
    with opened(run_folder, world.state) as ckpt:
        signal.signal(NUMBER, Handler(ckpt.save).kinds()[kind])
        world.update()
        ckpt.step()
        at_one = world.snapshot()
        torch.rand(1)  # as a sampler does
        if where == "forward":
            world.model.then = raise_signal
            world.forward()
        else:
            raise_signal()
    step, exact, found = restored(run_folder, batch_norm=False)
    assert (step, exact) == (1, False)
    assert found != at_one
    assert [r.levelno for r in caplog.records if "in a signal handler" in r.message] == [
        logging.WARNING
    ]
    assert "not called exact" in caplog.text


def test_the_same_function_called_from_the_loop(run_folder: Path) -> None:
    """It is where it is called from that makes a handler of it."""
    world = World()
    with opened(run_folder, world.state) as ckpt:
        handler = Handler(ckpt.save)
        signal.signal(NUMBER, handler.method)
        world.update()
        ckpt.step()
        handler.method(0, None)
        at_one = world.snapshot()
    assert restored(run_folder, batch_norm=False) == (1, True, at_one)


@pytest.mark.parametrize("asks", ["hook", "backward", "interrupt", "error", "unrelated", "goes on"])
def test_elsewhere(asks: str, run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world.state) as ckpt:
        world.update()
        ckpt.step()
        at_one = world.snapshot()
        if asks == "hook":
            world.model.then = ckpt.save
            world.forward()
        elif asks == "backward":
            loss = world.forward()
            world.model.inner.weight.register_hook(lambda grad: ckpt.save() and None)
            loss.backward()
        elif asks == "interrupt":
            try:
                torch.rand(1)
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                ckpt.save()
        elif asks == "error":
            world.model.then = lambda: {}["no"]
            try:
                world.forward()
            except KeyError:
                ckpt.save()
        elif asks == "goes on":
            world.model.then = lambda: {}["no"]
            try:
                world.forward()
            except KeyError:  # with smaller batches, say
                world.model.then = lambda: None
                world.update()
                ckpt.step()
                at_one = world.snapshot()
                ckpt.save()
        else:
            try:
                next(iter(()))
            except StopIteration:  # an epoch is over
                ckpt.save()
    step, exact, found = restored(run_folder, batch_norm=False)
    assert (step, exact) == (1 + (asks == "goes on"), asks in ("unrelated", "goes on"))
    assert (found == at_one) == exact


def test_an_interrupt_where_a_freed_one_lay(run_folder: Path) -> None:
    """It has the ``id()`` of one that the loop was handling at the last mark."""
    world = World()
    with opened(run_folder, world.state) as ckpt:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            freed = id(error)
            world.update()
            ckpt.step()
        made = [KeyboardInterrupt()]
        while id(made[-1]) != freed:
            assert len(made) < 100_000
            made.append(KeyboardInterrupt())
        try:
            torch.rand(1)
            raise made[-1]
        except KeyboardInterrupt:
            ckpt.save()
    step, exact, _ = restored(run_folder, batch_norm=False)
    assert (step, exact) == (1, False)


def check_where_the_mark_is_known(run: Path, world: World, ckpt: Checkpointer) -> None:
    refused, batch_norm = list[str](), isinstance(world.model.norm, nn.BatchNorm1d)

    def save(*_: object) -> None:
        if not batch_norm:
            ckpt.save()
            return
        with pytest.raises(StateError, match="the log has this one already") as caught:
            ckpt.save()
        refused.append(str(caught.value.hint))

    signal.signal(NUMBER, save)
    for _ in range(2):
        world.update()
        ckpt.step()
        ckpt.wait()
    at_two = world.snapshot()
    world.model.then = raise_signal
    world.forward()
    assert world.snapshot() != at_two
    ckpt.wait()
    if batch_norm:
        assert "preempt=" in refused[0]
    else:
        with base_of(run, 2) as found:
            assert found.marker.exact
        assert restored(run, batch_norm=False) == (2, True, at_two)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_where_a_log_knows_the_mark(batch_norm: bool, run_folder: Path) -> None:
    """A base that is not exact would be less than what the log has: it is of the mark, with its
    random numbers, or refused, where a module has counted on."""
    world = World(batch_norm=batch_norm)
    with opened(run_folder, world.state, method="logged") as ckpt:
        check_where_the_mark_is_known(run_folder, world, ckpt)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_where_a_replica_makes_the_base(batch_norm: bool, run_folder: Path) -> None:
    """It compares its own with samples of what training has: these, too, are of the mark."""
    world = World(batch_norm=batch_norm)
    with serving(run_folder) as bench, following(bench.run, world) as ckpt:
        check_where_the_mark_is_known(bench.run, world, ckpt)


def test_training_goes_on_exactly(run_folder: Path) -> None:
    """What is taken behind the next step mark is exact again."""
    world = World()
    with opened(run_folder, world.state) as ckpt:
        signal.signal(NUMBER, lambda *_: ckpt.save())
        world.update()
        ckpt.step()
        world.model.then = raise_signal
        loss = world.forward()
        world.model.then = lambda: None
        loss.backward()
        world.optimizer.step()
        ckpt.step()
        ckpt.save()
        at_two = world.snapshot()
    assert restored(run_folder, batch_norm=False) == (2, True, at_two)


def test_no_call_of_a_handler() -> None:
    """Handlers without code of Python's, and classes, are none that could be on a stack."""
    assert mid_step_position() == ""
    for handler in (signal.SIG_IGN, signal.default_int_handler, Checkpointer, print):
        signal.signal(NUMBER, handler)  # type: ignore[arg-type]
        assert mid_step_position() == ""
