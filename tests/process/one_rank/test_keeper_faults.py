"""Faults around a real keeper process: forks of the trainer, a keeper that is stopped or left
alone, objects larger than a message, hundreds of starts, a tiny /dev/shm, a disk that is
slower than the saves."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import DeadlineError
from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
from everstep.link.messages import OBJECT_PART_BYTES
from everstep.link.registry import list_keepers
from everstep.options import Budget
from everstep.restore.load.load import check_contents
from everstep.run.verify import verify_base
from everstep.seams import PosixFileSystem, SystemClock
from everstep.seams.processes.processes import PidWatch, process_ended
from everstep.seams.progress import silent
from everstep.testing import inspect
from tests.support.following import until
from tests.support.keeper_process import PRELUDE, finish, start
from tests.support.leftovers import MARK, processes_marked
from tests.support.lost_keepers import keeper_of, remote_of, stopped
from tests.support.serving import Place, die, serving
from tests.support.world import (
    TIMEOUT_S,
    Gate,
    HookedFileSystem,
    acquiring,
    forget,
    freeze,
    inventory_of,
)
from tests.support.world import opened as opened_here

ARENA = "memfd:everstep-arena"

pytestmark = pytest.mark.usefixtures("no_garbage", "no_keeper_stays")


class World:
    """A model and its optimizer, one step into their training."""

    def __init__(self, seed: int = 1, width: int = 64) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.train()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 16)).square().mean().backward()
        self.optimizer.step()

    def snapshot(self) -> Any:
        return freeze([self.model.state_dict(), self.optimizer.state_dict()])


@contextmanager
def opened(run: Path, world: World, **options: Any) -> Iterator[everstep.Checkpointer]:
    """With a keeper process."""
    forget(run)
    options = {"every": None, "method": "lazy", "keep": 100} | options
    with everstep.Checkpointer(run, world.state, **options) as ckpt:
        yield ckpt


@contextmanager
def closing_or_dead(run: Path, world: World) -> Iterator[everstep.Checkpointer]:
    """Closed at the end, unless it has died."""
    forget(run)
    ckpt = everstep.Checkpointer(run, world.state, every=None, method="lazy", keep=100)
    yield ckpt
    if inspect(ckpt).is_open:
        ckpt.close()


def restored(run: Path, step: int, width: int = 64) -> Any:
    world = World(seed=99, width=width)
    with opened(run, world, method="sync") as ckpt:
        ckpt.resume(step)
    return world.snapshot()


def saved(ckpt: everstep.Checkpointer, world: World, snapshots: dict[int, Any]) -> everstep.Save:
    """Trains a step and saves it."""
    world.train()
    ckpt.step()
    save = ckpt.save()
    snapshots[save.step] = world.snapshot()
    return save


def check_bases(run: Path) -> int:
    """Every base is committed and whole; the newest one's step."""
    bases = inventory_of(run).bases
    ring = ChunkRing(CHUNKS, WRITERS)
    try:
        for base in bases:
            assert base.status == "committed"
            verdict = verify_base(
                PosixFileSystem(),
                base,
                ring,
                timeout_s=TIMEOUT_S,
                progress=silent,
                contents=check_contents,
            )
            assert not verdict.damages
    finally:
        ring.close()
    return max(base.id.step for base in bases)


def arenas() -> dict[int, int]:
    """Processes of this test run that have arenas, and how many mappings and descriptors."""
    found = {}
    for pid in [os.getpid(), *processes_marked(os.environ[MARK])]:
        count = 0
        with suppress(OSError):  # it ends
            count = Path(f"/proc/{pid}/maps").read_text().count(ARENA)
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # one that it closes just now hides none of the others
                    count += ARENA in os.readlink(path)
        if count:
            found[pid] = count
    return found


# --- Forks ------------------------------------------------------------------------------

FORKED = """
import atexit, gc
from pathlib import Path
from everstep.link.registry import list_keepers

ckpt = everstep.Checkpointer(run, state, every=None)
ckpt.resume()
train_step(); ckpt.step(); ckpt.save()
(keeper,) = list_keepers()

def seen():
    links = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(path))
        except OSError:
            pass
    return {
        "arena": "everstep-arena" in Path("/proc/self/maps").read_text() + " ".join(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "threads": threading.active_count(),
    }

def forked(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(9)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)

def goes_on(what):
    train_step(); ckpt.step(); save = ckpt.save()
    ckpt.wait(30)
    now = [other.pid for other in list_keepers()]
    say(after=what, durable=save.durable.done(), same=now == [keeper.pid],
        restarts=ckpt.stats().keeper_restarts, digest=digest())

def looks():
    say(child=seen())
    os._exit(0)

def collects():
    global ckpt
    del ckpt
    gc.collect()
    os._exit(0)

def closes():
    ckpt.close()
    atexit._run_exitfuncs()
    os._exit(0)

say(parent=seen())
{work}
ckpt.close()
say(left=len(list_keepers()))
"""

FORKS = """
assert forked(looks) == 0
goes_on("a look")
assert forked(collects) == 0
goes_on("garbage collection")
assert forked(closes) == 0
goes_on("an exit")
assert forked(lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
goes_on("a kill")
"""

LOADERS = """
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor([index, seen()["arena"]])

def loader(**options):
    return torch.utils.data.DataLoader(
        Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork", **options
    )

assert forked(looks) == 0
goes_on("a look")
for _ in range(2):
    rows = torch.cat(list(loader()))
    assert rows[:, 0].tolist() == list(range(8)) and not rows[:, 1].any()
    goes_on("a loader")
batches = iter(loader(persistent_workers=True))
next(batches)
goes_on("a part of a loader")
"""


@pytest.mark.parametrize(
    "work", [FORKS, pytest.param(LOADERS, marks=pytest.mark.slow)], ids=["forks", "data loaders"]
)
def test_children_of_the_trainer_have_no_part_in_the_keeper(work: str, run_folder: Path) -> None:
    """They neither inherit the arena nor the connection, and end nothing, however they end."""
    status, said, err = finish(start(run_folder, FORKED.replace("{work}", work)))
    assert status == 0, err
    parent, child, *rest, end = said
    assert parent["parent"]["arena"]
    assert not child["child"]["arena"]
    assert child["child"]["sockets"] < parent["parent"]["sockets"], "the connection is inherited"
    assert len(rest) == 4
    for line in rest:
        assert (line["durable"], line["same"], line["restarts"]) == (True, True, 0), line
    assert end == {"left": 0}
    newest = check_bases(run_folder)
    assert newest == 5


def test_a_child_that_outlives_the_trainer_does_not_hold_the_keeper(run_folder: Path) -> None:
    """The death of the trainer is noticed though a child of it lives on. The keeper waits for
    a new one for its time, then ends; its memory goes with it."""
    body = """
    from everstep.options import KeeperOptions
    ckpt = everstep.Checkpointer(run, state, every=None, keeper=KeeperOptions(linger_s=1.0))
    ckpt.resume()
    train_step(); ckpt.step(); ckpt.save()
    ckpt.wait()
    child = os.fork()
    if child == 0:
        os.close(1), os.close(2)
        sys.stdin.read()
        os._exit(0)
    say(child=child)
    signal.pause()
    """
    process = start(run_folder, body)
    assert process.stdout is not None
    child = json.loads(process.stdout.readline())["child"]
    try:
        (keeper,) = list_keepers()
        with PidWatch(keeper.pid) as watch, PidWatch(child) as other:
            with stopped(keeper.pid):  # its time begins when we have looked
                process.kill()
                assert process.wait(TIMEOUT_S) == -signal.SIGKILL
                assert list(arenas()) == [keeper.pid]
                start_s = time.monotonic()
            assert watch.ended(TIMEOUT_S)
            took_s = time.monotonic() - start_s
            assert took_s >= 1.0, "it does not wait for its trainer to come back"
            assert took_s < TIMEOUT_S / 2
            assert not other.ended(), "this test shows nothing"
        assert list_keepers() == []
        assert arenas() == {}
    finally:
        process.communicate()  # its input ends: the child goes
    assert process_ended(child, TIMEOUT_S)
    assert check_bases(run_folder) == 1


def test_who_has_closed_finds_no_keeper(run_folder: Path) -> None:
    """close() returns when the run is nobody's, not a moment before."""
    waiting: list[bool] = []

    def leave() -> None:
        reads = "everstep-keeper-messages"
        waiting.append(any(thread.name == reads for thread in threading.enumerate()))

    world = World()
    with serving(run_folder, registration=Place(release=leave)):
        with opened(run_folder, world) as ckpt:
            ckpt.step()
            ckpt.save()
        assert waiting == [True]


# --- How soon a death is noticed --------------------------------------------------------

NOTICED_S = 1.0
TRIES = 5  # a machine that has other things to do may be late, and not each time


def test_a_trainer_notices_the_death_of_its_keeper_within_a_second(run_folder: Path) -> None:
    """And has another one at the next step mark."""
    took_s: list[float] = []
    world = World()
    with opened(run_folder, world, on_failure="warn") as ckpt:
        ckpt.resume()
        while not took_s or (min(took_s) >= NOTICED_S and len(took_s) < TRIES):
            remote = remote_of(ckpt)
            os.kill(remote.pid, signal.SIGKILL)
            start_s = time.monotonic()
            until(lambda: inspect(ckpt).keepers.lost is not None, "the loss of the keeper")
            took_s.append(time.monotonic() - start_s)
            world.train()
            with pytest.warns(RuntimeWarning, match="is gone"):
                ckpt.step()
            assert keeper_of(ckpt) != remote.pid
    assert min(took_s) < NOTICED_S, took_s


@pytest.mark.slow
def test_a_keeper_notices_the_death_of_its_trainer_within_a_second(run_folder: Path) -> None:
    """One that does not wait for another trainer has ended by then, too."""
    body = """
    from everstep.options import KeeperOptions
    ckpt = everstep.Checkpointer(run, state, every=None, keeper=KeeperOptions(linger_s=0.0))
    ckpt.resume()
    say(pid=os.getpid())
    signal.pause()
    """
    took_s: list[float] = []
    while not took_s or (min(took_s) >= NOTICED_S and len(took_s) < TRIES):
        process = start(run_folder, body)
        assert process.stdout is not None
        trainer = json.loads(process.stdout.readline())["pid"]
        (keeper,) = list_keepers()
        with PidWatch(keeper.pid) as watch:
            os.kill(trainer, signal.SIGKILL)
            start_s = time.monotonic()
            assert watch.ended(TIMEOUT_S)
            took_s.append(time.monotonic() - start_s)
        process.communicate()
    assert min(took_s) < NOTICED_S, took_s


# --- A keeper that stands still, or is left alone ---------------------------------------


def test_a_stopped_keeper_stops_nothing_but_itself(run_folder: Path) -> None:
    """Training goes on, a wait ends within its time, and when the keeper goes on everything
    becomes durable."""
    world = World()
    snapshots: dict[int, Any] = {}
    with opened(run_folder, world) as ckpt:
        saved(ckpt, world, snapshots)
        ckpt.wait()
        keeper = keeper_of(ckpt)
        with stopped(keeper):
            start_s = time.monotonic()
            saves = [saved(ckpt, world, snapshots) for _ in range(3)]
            for _ in range(5):
                world.train()
            assert time.monotonic() - start_s < TIMEOUT_S / 2, "training was held up"
            start_s = time.monotonic()
            with pytest.raises(DeadlineError, match=r"3 base\(s\) are not durable after"):
                ckpt.wait(0.5)
            assert 0.5 <= time.monotonic() - start_s < TIMEOUT_S / 2
            assert all(save.staged.done() for save in saves)
            assert not any(save.durable.done() for save in saves)
        ckpt.wait(TIMEOUT_S)
        assert keeper_of(ckpt) == keeper
        assert ckpt.stats().keeper_restarts == 0
        assert ckpt.stats().committed == 4
    for step, wanted in snapshots.items():
        assert restored(run_folder, step) == wanted


@pytest.mark.parametrize("process", [True, False])
def test_what_becomes_durable_as_the_time_ends_is_waited_for(
    process: bool, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that "0 base(s) are not durable"."""
    world = World()
    snapshots: dict[int, Any] = {}
    gate = Gate()
    with opened(run_folder, world, keeper=everstep.KeeperOptions(process=process)) as ckpt:
        saved(ckpt, world, snapshots)
        ckpt.wait()
        keeper: Any = inspect(ckpt).keepers.current
        if process:
            holding, go_on = stopped(keeper.pid), lambda: os.kill(keeper.pid, signal.SIGCONT)
        else:
            keeper.queue(gate.wait_at)
            holding, go_on = nullcontext(), gate.open
        with holding:
            save = saved(ckpt, world, snapshots)
            inspect(ckpt).saver.finish_captures()
            with pytest.raises(DeadlineError, match=r"1 base\(s\) are not durable after 0 s"):
                keeper.wait(0.0)
            check = inspect(ckpt).channel.check

            def late() -> None:
                go_on()
                save.durable.result(TIMEOUT_S)
                until(lambda: not keeper.waiting, "it is still waited for")
                check()

            monkeypatch.setattr(inspect(ckpt).channel, "check", late)
            keeper.wait(0.0)
            monkeypatch.undo()


def test_a_keeper_that_says_nothing_is_reported_within_the_stated_time(run_folder: Path) -> None:
    world = World()
    snapshots: dict[int, Any] = {}
    with opened(run_folder, world, progress_timeout_s=TIMEOUT_S) as ckpt:
        saved(ckpt, world, snapshots)
        ckpt.wait()
        keeper, remote = keeper_of(ckpt), remote_of(ckpt)
        assert remote.silence.timeout_s == TIMEOUT_S
        with stopped(keeper):
            saved(ckpt, world, snapshots)
            remote.silence.timeout_s = 1.0
            start_s = time.monotonic()
            with pytest.raises(DeadlineError, match=rf"process {keeper}\) has sent no message for"):
                ckpt.wait()
            assert time.monotonic() - start_s < TIMEOUT_S / 2
            remote.silence.timeout_s = TIMEOUT_S  # one that is slow is another matter
        until(lambda: ckpt.stats().durable_step == 2, "it never became durable")
        ckpt.wait(TIMEOUT_S)
    assert restored(run_folder, 2) == snapshots[2]


# --- Objects larger than a message ------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("source", ["memory", "disk"])
def test_objects_of_many_messages(source: str, run_folder: Path) -> None:
    """There and, when the trainer has died, back again: character for character."""
    noise = random.Random(5).choices("abcdefghijklmnopqrstuvwxyz \u00e4\u20ac", k=99_991)
    text = "".join(noise) * 200
    assert len(text.encode()) > OBJECT_PART_BYTES
    world = World()
    snapshots: dict[int, Any] = {}
    world.state["plain"] = {}
    with closing_or_dead(run_folder, world) as ckpt:
        for step in (1, 2):
            plain = {"first": f"step {step}", "text": text[step:], "last": [step]}
            world.state["plain"].update(plain)
            saved(ckpt, world, snapshots)
        if source == "memory":
            inspect(ckpt).saver.finish_captures()
            die(ckpt)
    other = World(seed=99)
    other.state["plain"] = {"first": "", "text": "", "last": []}
    with opened(run_folder, other) as ckpt:
        found = ckpt.resume()
        assert (found.step, found.source) == (2, source)
    assert other.state["plain"] == {"first": "step 2", "text": text[2:], "last": [2]}
    assert other.snapshot() == snapshots[2]


# --- Many starts ------------------------------------------------------------------------


def held_now() -> dict[str, int]:
    """What this process, and keepers of its own, have."""
    gc.collect()
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(path))
    return {
        "descriptors": len(links),
        "threads": threading.active_count(),
        "tasks": len(list(Path("/proc/self/task").iterdir())),
        "keepers": len(list_keepers()),
        "processes": len(processes_marked(os.environ[MARK])),
        "arenas": sum(arenas().values()),
    }


@pytest.mark.parametrize("cycles", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_starts_and_ends_leave_nothing(cycles: int, tmp_path: Path) -> None:
    """No descriptor, thread, process or mapping more after many of them than after two."""
    world = World()
    before: dict[str, int] = {}
    for cycle in range(cycles):
        run = tmp_path / f"run{cycle % 5}"
        with opened(run, world, keep=1) as ckpt:
            ckpt.resume()
            world.train()
            ckpt.step()
            ckpt.save()
        if cycle == 1:
            until(lambda: not arenas(), "a keeper that has let us go does not end")
            before = held_now()
    until(lambda: not arenas(), "a keeper that has let us go does not end")
    after = held_now()
    assert before["keepers"] == before["arenas"] == 0
    more = {what: count for what, count in after.items() if count > before[what]}
    assert not more, before  # what another test has left may end meanwhile


# --- Little shared memory ---------------------------------------------------------------

LARGE = """
opened = []
def audit(event, arguments):
    if event == "open" and str(arguments[0]).startswith("/dev/shm"):
        opened.append(str(arguments[0]))
sys.addaudithook(audit)
from pathlib import Path
from everstep.link.registry import list_keepers

model = torch.nn.Linear(2500, 2500)  # with moments 75 MB
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
ckpt = everstep.Checkpointer(run, {"model": model, "optimizer": optimizer}, every=None)
model(torch.randn(4, 2500)).square().mean().backward()
optimizer.step()
ckpt.step()
ckpt.save()
ckpt.wait()
(keeper,) = list_keepers()
links = []
for pid in (os.getpid(), keeper.pid):
    maps = Path(f"/proc/{pid}/maps").read_text()
    links += [line.split(None, 5)[-1] for line in maps.splitlines()]
    links += [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()]
room = os.statvfs("/dev/shm")
state_bytes = sum(t.nbytes for t in model.parameters()) * 3
say(room=room.f_blocks * room.f_frsize, names=os.listdir("/dev/shm"), state=state_bytes,
    opened=opened, linked=[link for link in links if link.startswith("/dev/shm")])
ckpt.close()
"""


@pytest.mark.slow
def test_a_base_larger_than_dev_shm(run_folder: Path) -> None:
    """Containers give 64 MB of it; writing past that is a SIGBUS. The arena is not there."""
    tiny = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && "$@"']
    probe = [*tiny, "sh", "true"]
    with suppress(OSError):
        small = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(LARGE), str(run_folder)]
    process = subprocess.Popen(
        [*tiny, "sh", *command] if small else command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    status, said, err = finish(process)
    assert status == 0, err
    (line,) = said
    assert line["state"] > 70_000_000
    assert line["opened"] == line["linked"] == []
    if small:
        assert line["room"] == 64 << 20
        assert line["names"] == []
    assert check_bases(run_folder) == 1


# --- A disk that is slower than the saves -----------------------------------------------


def one_and_a_half(world: World) -> Budget:
    """Room for one capture, not for two."""
    from everstep.state.training_state import State

    size = sum(entry.size_bytes for entry in State(world.state).survey().shape.entries)
    return Budget(host_bytes=size * 3 // 2)


def test_a_slow_disk_pushes_back_and_nothing_is_lost(run_folder: Path) -> None:
    """I10: the second save waits until the first is on disk; the wait is counted."""
    world = World(width=3000)
    snapshots: dict[int, Any] = {}
    gate = Gate()

    def slow(op: str, path: Any) -> None:
        if op == "write" and "000000000001" in str(path):
            gate.wait_at()

    options: dict[str, Any] = {"every": None, "keep": 100, "budget": one_and_a_half(world)}
    fs = HookedFileSystem(slow)
    with opened_here(
        run_folder, world.state, fs=fs, clock=SystemClock(), method="lazy", **options
    ) as ckpt:
        first = saved(ckpt, world, snapshots)
        assert gate.reached.wait(TIMEOUT_S)
        with acquiring(ckpt, first=threading.Timer(0.3, gate.open).start):
            saved(ckpt, world, snapshots)
        assert first.durable.done(), "its memory was taken before it was on disk"
        assert ckpt.stats().stall_s["back_pressure"] > 0.1
        for _ in range(4):
            saved(ckpt, world, snapshots)
        ckpt.wait()
        stats = ckpt.stats()
        assert (stats.saves, stats.committed, stats.failed) == (6, 6, 0)
        assert stats.host_bytes <= options["budget"].host_bytes
    for step, wanted in snapshots.items():
        assert restored(run_folder, step, width=3000) == wanted


def test_a_stopped_keeper_pushes_back_and_nothing_is_lost(run_folder: Path) -> None:
    """The same with a keeper process, which writes nothing while it stands still."""
    world = World(width=3000)
    snapshots: dict[int, Any] = {}
    with opened(run_folder, world, budget=one_and_a_half(world)) as ckpt:
        saved(ckpt, world, snapshots)
        ckpt.wait()
        keeper = keeper_of(ckpt)
        before_s = ckpt.stats().stall_s["back_pressure"]
        with stopped(keeper):
            saved(ckpt, world, snapshots)
            goes_on = threading.Timer(0.3, lambda: os.kill(keeper, signal.SIGCONT))
            with acquiring(ckpt, first=goes_on.start):
                saved(ckpt, world, snapshots)
        assert ckpt.stats().stall_s["back_pressure"] - before_s > 0.1
        for _ in range(3):
            saved(ckpt, world, snapshots)
        ckpt.wait(TIMEOUT_S)
        stats = ckpt.stats()
        assert (stats.saves, stats.committed, stats.failed) == (6, 6, 0)
        assert stats.keeper_restarts == 0
    for step, wanted in snapshots.items():
        assert restored(run_folder, step, width=3000) == wanted


def test_a_disk_that_gets_nowhere_ends_the_wait_for_memory(run_folder: Path) -> None:
    """I11: within the stated time, with the reason; training goes on, and so do later saves."""
    world = World(width=3000)
    snapshots: dict[int, Any] = {}
    with opened(
        run_folder,
        world,
        budget=one_and_a_half(world),
        progress_timeout_s=TIMEOUT_S,
        on_failure="warn",
    ) as ckpt:
        saved(ckpt, world, snapshots)
        ckpt.wait()
        keeper = keeper_of(ckpt)
        with stopped(keeper):
            saved(ckpt, world, snapshots)
            start_s = time.monotonic()
            no_memory = "no host memory was released within 1 s"
            with pytest.warns(RuntimeWarning, match=no_memory), acquiring(ckpt, timeout_s=1.0):
                lost = saved(ckpt, world, snapshots)
            assert time.monotonic() - start_s < TIMEOUT_S / 2
            assert isinstance(lost.durable.exception(TIMEOUT_S), DeadlineError)
        until(lambda: ckpt.stats().durable_step == 2, "it never became durable")
        saved(ckpt, world, snapshots)
        ckpt.wait(TIMEOUT_S)
    for step in (1, 2, 4):
        assert restored(run_folder, step, width=3000) == snapshots[step]
