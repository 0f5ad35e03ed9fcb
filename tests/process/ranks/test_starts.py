"""Starts behind a killed trainer whose keeper has what no disk has: a start that is interrupted,
that ends at once, or that is not the only one, loses nothing of it."""

from __future__ import annotations

import json
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainers import finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S

pytestmark = pytest.mark.usefixtures("no_keeper_stays")

PRELUDE = """
import hashlib, json, os, signal, sys
import torch
import everstep
import everstep.trainer.attach.remote as remote
run, method, how = sys.argv[1:4]

def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ckpt = everstep.Checkpointer(run, {"model": model, "optimizer": optimizer}, method=method,
                                 every=4)
    return model, optimizer, ckpt

def trained(model, optimizer, ckpt, steps):
    for _ in range(steps):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
        say(step=ckpt.stats().step, digest=digest(model))

def digest(model):
    return hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()

def say(**what):
    print(json.dumps(what), flush=True)

def resumed(seed):
    model, optimizer, ckpt = made(seed)
    recovery = ckpt.resume()
    say(step=recovery.step, source=recovery.source, digest=digest(model))
    return model, optimizer, ckpt
"""

TRAIN = """
from everstep.testing import inspect

model, optimizer, ckpt = made(1)
ckpt.resume()
trained(model, optimizer, ckpt, 7)
inspect(ckpt).saver.finish_captures()
if how == "raise":
    raise RuntimeError("of the user's")
os.kill(os.getpid(), signal.SIGKILL)
"""

INTERRUPTED = """
real = remote.RemoteKeeper.serve

def serve(self, *about, **options):
    remote.RemoteKeeper.serve = real
    real(self, *about, **options)
    raise KeyboardInterrupt

remote.RemoteKeeper.serve = serve
model, optimizer, ckpt = made(2)
try:
    if how == "with":
        with ckpt:
            ckpt.resume()
    ckpt.resume()
except KeyboardInterrupt:
    say(interrupted=True)
if how == "close":
    ckpt.close()
elif how == "new":
    resumed(3)[2].close()
"""

CLOSED = """
resumed(2)[2].close()
"""

NOT_ALONE = """
from everstep.testing import inspect

real, others = remote.RemoteKeeper.settle, []

def settle(self, timeout_s):
    if len(others) < 3:  # another process asks the keeper, too, before it has answered
        others.append(inspect(ckpt).keepers._attach())
    real(self, timeout_s)

remote.RemoteKeeper.settle = settle
model, optimizer, ckpt = made(2)
recovery = ckpt.resume()
say(step=recovery.step, source=recovery.source, digest=digest(model))
assert len(others) == 3
ckpt.close()
"""


def ran(run: Path, body: str, method: str, how: str = "") -> tuple[int, list[dict[str, Any]], str]:
    process = start_trainer(PRELUDE + textwrap.dedent(body), str(run), method, how)
    status, out, err = finish_trainer(process, 3 * TIMEOUT_S)
    return status, [json.loads(line) for line in out.splitlines()], err


def newest(run: Path, method: str) -> dict[str, Any]:
    """The step that the keeper of a trainer has that is gone: the last base of those that live in
    memory, or the last step of the log."""
    status, said, err = ran(run, TRAIN, method)
    assert status == -signal.SIGKILL, err
    return said[3 if method == "gemini" else 6]


def assert_back(run: Path, method: str, wanted: dict[str, Any]) -> None:
    status, said, err = ran(run, CLOSED, method)
    assert status == 0, err
    assert (said[0]["step"], said[0]["digest"]) == (wanted["step"], wanted["digest"]), err


METHODS = ["logged", "lowdiff_plus", "gemini"]


@pytest.mark.thinned(6)
@pytest.mark.parametrize("how", ["close", "with", "new"])
@pytest.mark.parametrize("method", METHODS)
def test_a_start_that_is_interrupted_at_its_end(method: str, how: str, run_folder: Path) -> None:
    wanted = newest(run_folder, method)
    status, said, err = ran(run_folder, INTERRUPTED, method, how)
    assert status == 0, err
    assert said[0] == {"interrupted": True}
    if how == "new":
        assert said[1]["step"] == wanted["step"]
    assert_back(run_folder, method, wanted)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", METHODS)
def test_a_start_that_is_closed_at_once(method: str, run_folder: Path) -> None:
    wanted = newest(run_folder, method)
    assert_back(run_folder, method, wanted)
    assert_back(run_folder, method, wanted)
    _, said, _ = ran(run_folder, CLOSED, method)
    assert said[0]["source"] == "disk", "close() has taken it there"


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", METHODS)
def test_others_ask_the_keeper_too(method: str, run_folder: Path) -> None:
    wanted = newest(run_folder, method)
    status, said, err = ran(run_folder, NOT_ALONE, method)
    assert status == 0, err
    assert (said[0]["step"], said[0]["digest"]) == (wanted["step"], wanted["digest"])
    assert_back(run_folder, method, wanted)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", METHODS)
def test_a_script_that_ends_with_an_error_and_without_close(method: str, run_folder: Path) -> None:
    status, said, err = ran(run_folder, TRAIN, method, "raise")
    assert status == 1, err
    assert ("are in the memory of the keeper" in err) == (method == "logged")
    wanted = said[3 if method == "gemini" else 6]
    assert_back(run_folder, method, wanted)
