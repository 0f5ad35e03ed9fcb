"""Whoever still has a Checkpointer that is closed has none of its memory: what it consists of
knows each other in circles, which Python's collector may not look at for a whole training."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import everstep
from everstep.link.capture import Capture
from everstep.options import KeeperOptions
from everstep.seams import memory
from everstep.seams.sockets import UnixStream
from everstep.testing import inspect
from everstep.trainer.attach.remote import RemoteKeeper
from tests.support.following import until
from tests.support.world import TIMEOUT_S


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def mapped() -> set[int]:
    """Where memory is that was mapped to be shared."""
    return memory.mappings()


def trained(
    run: Path, model: torch.nn.Module, method: str, process: bool
) -> tuple[everstep.Checkpointer, list[everstep.Save]]:
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    ckpt = everstep.Checkpointer(
        run, state, method=method, every=2, keeper=KeeperOptions(process=process)
    )
    ckpt.resume()
    saves = []
    for _ in range(7):
        model(torch.ones(2, 20)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
    if method not in ("lowdiff_plus", "gemini"):
        saves.append(ckpt.save())
    return ckpt, saves


_HERE = ["async", "checkfreq", "lazy", "logged", "checkflow"]
_BESIDE = [*_HERE, "gockpt", "gockpt_o", "lowdiff_plus", "gemini"]


@pytest.mark.thinned(18)
@pytest.mark.parametrize(
    ("method", "process"),
    [*((method, True) for method in _BESIDE), *((method, False) for method in _HERE)],
)
def test_close_gives_the_memory_back(method: str, process: bool, run_folder: Path) -> None:
    before = mapped()
    model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(6)))
    ckpt, saves = trained(run_folder, model, method, process)
    assert mapped() - before, "or this says nothing"
    host_bytes = ckpt.stats().host_bytes
    assert host_bytes > 0
    ckpt.close()
    assert mapped() == before
    assert ckpt.stats().step == 7
    assert all(save.durable.done() for save in saves)


@pytest.mark.slow
def test_a_cell_that_is_run_again_does_not_take_it_twice(run_folder: Path) -> None:
    """Nobody has closed the first one."""
    before = mapped()
    model = torch.nn.Linear(20, 20)
    kept = [trained(run_folder, model, "lazy", process=True) for _ in range(3)]
    assert len(mapped() - before) == 1
    kept[-1][0].close()
    assert mapped() == before


class Replaced:
    """A training whose first keeper is lost, somehow, and replaced."""

    def __init__(self, run: Path, method: str) -> None:
        self.before = mapped()
        self.model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(6)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        state = {"model": self.model, "optimizer": self.optimizer}
        self.ckpt = everstep.Checkpointer(run, state, method=method, every=2)
        self.ckpt.resume()
        self.train()
        first = inspect(self.ckpt).keepers.current
        assert isinstance(first, RemoteKeeper)
        self.first = first

    def train(self) -> None:
        for _ in range(3):
            self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 20)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ckpt.step()

    def kill(self) -> None:
        os.kill(self.first.pid, signal.SIGKILL)

    def lose(self) -> None:
        self.kill()
        until(lambda: self.first.lost is not None, "its loss")


@contextmanager
def replaced(run: Path, method: str) -> Iterator[Replaced]:
    """The second one's memory is there afterwards, and not the first one's; and at last neither."""
    training = Replaced(run, method)
    with training.ckpt as ckpt:
        yield training
        assert ckpt.stats().keeper_restarts == 1
        ckpt.wait()
        inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
        assert len(mapped() - training.before) == 1
        training.train()
    assert mapped() == training.before


@pytest.mark.thinned(12)
@pytest.mark.filterwarnings("ignore:everstep:RuntimeWarning")
@pytest.mark.parametrize(
    "method", ["async", "lazy", "logged", "checkflow", "gockpt_o", "lowdiff_plus", "gemini"]
)
def test_a_keeper_that_is_replaced_takes_its_memory_along(method: str, run_folder: Path) -> None:
    """Half of the machine's, perhaps; the next one takes as much."""
    with replaced(run_folder, method) as training:
        training.lose()
        training.train()


@pytest.mark.thinned(4)
@pytest.mark.filterwarnings("ignore:everstep:RuntimeWarning")
@pytest.mark.parametrize("method", ["lazy", "logged", "checkflow"])
def test_whoever_sends_may_be_the_first_to_notice(
    method: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has failed there is told again and again, but without all that was in use there."""
    with replaced(run_folder, method) as training:
        keeper, send = training.first.pid, UnixStream.send_some

        def refuse(stream: UnixStream, data: memoryview, fds: Sequence[int] = ()) -> int:
            if stream.peer().pid != keeper:
                return send(stream, data, fds)
            training.kill()
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

        monkeypatch.setattr(UnixStream, "send_some", refuse)
        training.train()
        training.train()


@pytest.mark.thinned(6)
@pytest.mark.filterwarnings("ignore:everstep:RuntimeWarning")
@pytest.mark.parametrize("method", ["lazy", "checkflow", "gockpt_o", "gemini"])
def test_one_that_is_lost_when_a_capture_begins(
    method: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has its block by then."""
    with replaced(run_folder, method) as training:
        begin, steps = training.first.begin, []

        def lost(capture: Capture) -> None:
            steps.append(capture.step)
            training.lose()
            begin(capture)

        monkeypatch.setattr(training.first, "begin", lost)
        training.train()
        training.train()
        assert len(steps) == 1


@pytest.mark.filterwarnings("ignore:everstep:RuntimeWarning")
def test_one_that_is_lost_when_what_was_parked_is_to_become_durable(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the thread that copies sees to, as soon as it is whole."""
    with replaced(run_folder, "checkflow") as training:
        captured, persist = training.first.captured, training.first.persist
        asked, tried = threading.Event(), threading.Event()

        def late(capture: Capture, objects: Mapping[str, bytes]) -> None:
            assert asked.wait(TIMEOUT_S)
            captured(capture, objects)

        def lost(capture: Capture) -> None:
            training.lose()
            tried.set()
            persist(capture)

        training.step()
        inspect(training.ckpt).saver.finish_captures()
        monkeypatch.setattr(training.first, "captured", late)
        monkeypatch.setattr(training.first, "persist", lost)
        training.step()
        save = training.ckpt.save()
        asked.set()
        inspect(training.ckpt).saver.finish_captures()
        assert tried.is_set()
        assert save.is_lost
        training.train()
