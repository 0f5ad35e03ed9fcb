"""docs/ARCHITECTURE.md: the modules listed for its three walks are those that the code calls.

A training process and its keeper process take each walk under a profiler. Each listed module must
be called on its walk, in the process under which it is listed. In the packages that a walk is
about, each called module must be listed. So a renamed, merged or new module fails this test.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.trainers import run_trainer

ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").exists())
DOCUMENT = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
TIMEOUT_S = 240
WALKS = {
    "base": "A base: from `step()` to `manifest.json`",
    "log": "A step with a log: from the optimizer's hook to the segment file",
    "resume": "A resume: from `resume()` to the restored objects",
}
PROCESSES = {"trainer": "In the training process", "keeper": "In the keeper process"}
COMPLETE = {
    "base": ("trainer/base", "keeper/persist"),
    "log": ("trainer/log", "keeper/log"),
    "resume": ("restore/redo", "restore/start"),
}
"""Packages of which every called module must be listed, by walk."""

MOST = {"base": 14, "log": 20, "resume": 16}
"""Most modules that the value of a walk passes through."""

KEEPER = """
import mmap, os, sys, threading

if "EVERSTEP_WALK" in os.environ and "everstep.keeper" in sys.orig_argv:
    # Set before the keeper makes its threads: others would not be followed.
    with open(os.environ["EVERSTEP_WALK"], "r+b") as file:
        switch = mmap.mmap(file.fileno(), 1)
    called = set()

    def note(frame, event, _):
        walk = switch[0]
        if walk and event == "call" and frame.f_code.co_flags & 1:
            key = walk, frame.f_globals.get("__name__", "")
            if key not in called and key[1].startswith("everstep."):
                called.add(key)
                with open(os.environ["EVERSTEP_WALK"] + f".{walk}", "a") as file:
                    file.write(key[1] + "\\n")

    threading.setprofile(note)
    sys.setprofile(note)
"""
"""``sitecustomize`` of the keeper. Flag 1 of a code object tells functions from the bodies of
classes and modules, which also run when something is imported."""

TRAINER = """
import json, mmap, os, pathlib, sys, threading, time

import torch

import everstep
from everstep import KeeperOptions, LogOptions

folder = pathlib.Path(sys.argv[1])
with open(os.environ["EVERSTEP_WALK"], "r+b") as file:
    switch = mmap.mmap(file.fileno(), 1)
called = {}


def note(frame, event, _):
    walk = switch[0]
    if walk and event == "call" and frame.f_code.co_flags & 1:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("everstep."):
            called.setdefault(walk, {})[name] = None


def walk(number, *calls):
    sys.setprofile(note)
    switch[0] = number
    for call in calls:
        call()
    switch[0] = 0
    sys.setprofile(None)


def segment_is_durable():
    marker = "timeline-00001/log/000000000001-000000000002/rank-00000.done"
    until = time.monotonic() + 60
    while not (folder / "log" / marker).exists():
        assert time.monotonic() < until
        threading.Event().wait(0.01)


def training():
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.AdamW(model.parameters())


def update(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()


threading.setprofile(note)
linger = KeeperOptions(linger_s=5)

model, optimizer = training()
state = {"model": model, "optimizer": optimizer}
with everstep.Checkpointer(folder / "base", state, every=2, keeper=linger) as ckpt:
    ckpt.resume()
    for step in (1, 2, 3):
        update(model, optimizer)
        ckpt.step()
    ckpt.wait()
    update(model, optimizer)
    walk(1, ckpt.step, ckpt.wait)

log = LogOptions(to="disk", batch_steps=1)
model, optimizer = training()
state = {"model": model, "optimizer": optimizer}
about = {"every": None, "method": "logged", "log": log, "keeper": linger}
with everstep.Checkpointer(folder / "log", state, **about) as ckpt:
    ckpt.resume()
    update(model, optimizer)
    ckpt.step()
    ckpt.wait()
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    walk(2, optimizer.step, ckpt.step, segment_is_durable)
    update(model, optimizer)
    ckpt.step()

model, optimizer = training()
state = {"model": model, "optimizer": optimizer}
with everstep.Checkpointer(folder / "log", state, **about) as ckpt:
    walk(3, lambda: ckpt.resume(step=2))
    assert ckpt.stats().step == 2
print(json.dumps({number: list(names) for number, names in called.items()}))
"""


def listed(walk: str, process: str) -> tuple[list[str], set[str]]:
    """Return the modules called on a walk, and those that may be called besides, as paths."""
    text = text_of(walk, process)
    found = [*tabled(text), *_named("Also called", text)]
    return found, set(_named("May also be called", text))


def tabled(text: str) -> list[str]:
    """Return the modules that the value of a walk passes through: those of the table."""
    return re.findall(r"^\| `([\w/]+\.py)` \|", text, re.M)


def text_of(walk: str, process: str) -> str:
    """Return the text about a walk in one process."""
    _, _, section = DOCUMENT.partition(f"\n## {WALKS[walk]}\n")
    assert section, f"no section {WALKS[walk]!r}"
    section = section.split("\n## ")[0]
    _, _, text = section.partition(PROCESSES[process])
    for other in PROCESSES.values():
        text = text.split(other)[0]
    return text


def _named(begin: str, text: str) -> list[str]:
    """Return the modules named in paragraphs with this beginning."""
    found = re.findall(rf"^{begin}: (.*?)(?:\n\n|\Z)", text, re.M | re.S)
    return re.findall(r"`([\w/]+\.py)`", " ".join(found))


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], set[str]]:
    """The modules that each process called on each walk, as paths under src/everstep."""
    folder = tmp_path_factory.mktemp("walks")
    (folder / "sitecustomize.py").write_text(KEEPER)
    switch = folder / "switch"
    switch.write_bytes(b"\0")
    path = f"{folder}:{ROOT / 'src'}"
    status, out, errors = run_trainer(
        TRAINER, str(folder), timeout_s=TIMEOUT_S, PYTHONPATH=path, EVERSTEP_WALK=str(switch)
    )
    assert status == 0, errors
    trainer = json.loads(out.splitlines()[-1])
    found = {}
    for number, walk in enumerate(WALKS, start=1):
        keeper = switch.with_name(f"switch.{number}")
        names = keeper.read_text().split() if keeper.exists() else []
        found[walk, "trainer"] = {path_of(name) for name in trainer[str(number)]}
        found[walk, "keeper"] = {path_of(name) for name in names}
    return found


def path_of(name: str) -> str:
    """Return a module's path under src/everstep."""
    path = name.removeprefix("everstep.").replace(".", "/")
    package = ROOT / "src" / "everstep" / path / "__init__.py"
    return f"{path}/__init__.py" if package.exists() else f"{path}.py"


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("process", PROCESSES)
def test_listed_modules_are_called(
    walk: str, process: str, called: dict[tuple[str, str], set[str]]
) -> None:
    table, also = listed(walk, process)
    if (walk, process) != ("resume", "keeper"):
        assert table, f"no table for {walk} in the {process}"
    missing = set(table) - called[walk, process]
    assert not missing, f"not called on the walk, or renamed: {sorted(missing)}"
    gone = {path for path in also if not (ROOT / "src" / "everstep" / path).exists()}
    assert not gone, f"renamed: {sorted(gone)}"


@pytest.mark.parametrize("walk", MOST)
def test_a_walk_is_short(walk: str) -> None:
    assert sum(len(tabled(text_of(walk, process))) for process in PROCESSES) <= MOST[walk]


@pytest.mark.parametrize("walk", WALKS)
def test_called_modules_of_the_walk_are_listed(
    walk: str, called: dict[tuple[str, str], set[str]]
) -> None:
    for process in PROCESSES:
        table, also = listed(walk, process)
        own = {path for path in called[walk, process] if path.startswith(COMPLETE[walk])}
        missing = own - {*table, *also}
        assert not missing, f"called on the walk in the {process}, not listed: {sorted(missing)}"
