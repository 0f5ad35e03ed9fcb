"""The collector is paused while a state is walked, and is afterwards as the program had it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.seams.garbage import collection_paused
from tests.support.world import TIMEOUT_S


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    threshold = gc.get_threshold()
    gc.enable()
    yield
    gc.enable()
    gc.set_threshold(*threshold)


def test_it_is_paused_within_and_not_after() -> None:
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_after_an_error_it_goes_on() -> None:
    with pytest.raises(KeyError), collection_paused():
        raise KeyError
    assert gc.isenabled()


def test_a_program_that_has_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_the_last_of_several_threads_turns_it_on() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collection_paused():
            entered.set()
            leave.wait(TIMEOUT_S)

    thread = threading.Thread(target=other)
    thread.start()
    with collection_paused():
        assert entered.wait(TIMEOUT_S)
    assert not gc.isenabled()
    leave.set()
    thread.join(TIMEOUT_S)
    assert gc.isenabled()


def test_a_child_that_is_forked_meanwhile_collects() -> None:
    """No block of the parent ends there."""
    with collection_paused():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_start_is_not_interrupted(tmp_path: Path) -> None:
    """Not once, though each new object could begin a collection."""
    model = torch.nn.Linear(4, 4)
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    keeper = everstep.KeeperOptions(process=False)
    with everstep.Checkpointer(tmp_path / "run", state, keeper=keeper) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.save()
    collected: list[str] = []
    own = threading.get_ident()

    def note(phase: str, about: Any) -> None:
        if phase == "start" and threading.get_ident() == own:
            collected.append(ckpt_at)

    gc.callbacks.append(note)
    try:
        gc.set_threshold(1)
        ckpt_at = "construct"
        ckpt = everstep.Checkpointer(tmp_path / "run", state, keeper=keeper)
        made = collected.count("construct")
        ckpt_at = "resume"
        ckpt.resume()
        resumed = collected.count("resume")
        gc.set_threshold(700)
    finally:
        gc.callbacks.remove(note)
    ckpt.close()
    # Without the pause 1789 and 4217; what is left is before and after it.
    assert (made < 500, resumed < 100) == (True, True), (made, resumed)
