"""Real processes: exits without close(), forks, kills, signals, two of them on one run."""

from __future__ import annotations

import signal
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from everstep.seams.failpoints import FAILPOINTS
from tests.support.trainers import Trainer, finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S, inventory_of, opened, verdict_of

PRELUDE = """
import os, signal, sys, threading
import torch
import everstep
run = sys.argv[1]
state = {"n": [0], "t": torch.zeros(50_000)}
def advance(ckpt):
    state["n"][0] += 1
    state["t"] += 1
    ckpt.step()
"""


def start(run: Path, body: str, **environment: str) -> Trainer:
    return start_trainer(PRELUDE + textwrap.dedent(body), str(run), **environment)


def finish(process: Trainer) -> tuple[int, str, str]:
    return finish_trainer(process, 3 * TIMEOUT_S)


def check_run(run: Path, step: int) -> None:
    """Every base is whole, nothing is left over, and the newest has the values of its step."""
    assert not [path for path in run.rglob("*.tmp") if path.parent != run]
    assert all(not verdict_of(base).damages for base in inventory_of(run).bases)
    live: dict[str, Any] = {"n": None, "t": None}
    with opened(run, live) as ckpt:
        assert ckpt.resume().step == step
    assert live["n"] == [step]
    assert (live["t"] == step).all()


ENDINGS: dict[str, str] = {
    "the end of the script": "",
    "sys.exit": "sys.exit(3)",
    "an exception": "raise RuntimeError('mine')",
    # It may be ignored where the tests were started.
    "SIGINT": "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "    os.kill(os.getpid(), signal.SIGINT)",
}


@pytest.mark.parametrize(
    "ending",
    ["the end of the script", *(pytest.param(e, marks=pytest.mark.slow) for e in [*ENDINGS][1:])],
)
def test_the_last_base_survives_an_exit_without_close(ending: str, run_folder: Path) -> None:
    """Several are still queued; the interpreter is on its way out, and no thread may start."""
    body = f"""
    ckpt = everstep.Checkpointer(run, state, method="async", every=None)
    ckpt.resume()
    for _ in range(4):
        advance(ckpt)
        ckpt.save()
    {ENDINGS[ending]}
    """
    code, _, err = finish(start(run_folder, body))
    expected = {"": 0, "sys.exit(3)": 3, "raise RuntimeError('mine')": 1}
    assert code == expected.get(ENDINGS[ending], -signal.SIGINT), err
    assert "lost at exit" not in err
    check_run(run_folder, 4)


def test_a_base_lost_at_exit_is_said_to_be(run_folder: Path) -> None:
    body = """
    from everstep.seams import PosixFileSystem, Seams
    class Full(PosixFileSystem):
        full = False
        def create(self, path, *, direct=False):
            if self.full and "000000000002" in str(path):
                raise OSError(28, "No space left on device")
            return super().create(path, direct=direct)
    fs = Full()
    ckpt = everstep.Checkpointer(run, state, every=None, seams=Seams(filesystem=fs))
    ckpt.resume()
    for number in (1, 2, 3):
        fs.full = True
        advance(ckpt)
        ckpt.save()
    """
    code, _, err = finish(start(run_folder, body))
    assert code == 0
    assert "a base was lost at exit" in err
    assert "No space left" in err
    check_run(run_folder, 3)  # the one behind it is not abandoned


@pytest.mark.thinned(2)
@pytest.mark.parametrize("within", ["contextlib.nullcontext()", "ckpt"])
def test_a_daemon_thread_that_trains_does_not_hold_up_the_exit(
    within: str, run_folder: Path
) -> None:
    """What it had taken by then is durable; it takes no more, and is told why."""
    body = f"""
    import atexit, contextlib
    from everstep.errors import StateError
    ckpt = everstep.Checkpointer(run, state, method="async", every=1)
    begun, refused = threading.Event(), threading.Event()
    def work():
        with contextlib.suppress(StateError), {within}:
            while True:
                done = state["n"][0]
                advance(ckpt)
                if done == 5:
                    begun.set()
        said = 0
        for call in (ckpt.step, ckpt.save, ckpt.resume, ckpt.wait, ckpt.close):
            try:
                call()
            except StateError as error:
                said += "while the interpreter is shutting down" in str(error)
        print(done, said, flush=True)
        refused.set()
    # It is called last.
    atexit.register(lambda: refused.wait({TIMEOUT_S}))
    ckpt.resume()
    threading.Thread(target=work, daemon=True).start()
    assert begun.wait({TIMEOUT_S})
    """
    code, out, err = finish(start(run_folder, body))
    assert code == 0, err
    assert "lost at exit" not in err
    done, said = map(int, out.split())
    assert said == 5
    assert done >= 5
    check_run(run_folder, done)


def test_a_forked_child_disturbs_nothing(run_folder: Path) -> None:
    body = """
    ckpt = everstep.Checkpointer(run, state, method="async", every=None)
    ckpt.resume()
    advance(ckpt)
    ckpt.save()
    child = os.fork()
    if child == 0:
        from everstep.errors import StateError
        refused = 0
        for call in (ckpt.step, ckpt.save, ckpt.wait, ckpt.resume):
            try:
                call()
            except StateError as error:
                refused += "was forked" in str(error)
        ckpt.close()
        state["n"][0] = 666
        sys.exit(0 if refused == 4 else 9)   # runs the handlers that are registered for exit
    _, status = os.waitpid(child, 0)
    print("child", os.waitstatus_to_exitcode(status))
    advance(ckpt)
    ckpt.save()
    ckpt.close()
    """
    code, out, err = finish(start(run_folder, body))
    assert code == 0, err
    assert out.split() == ["child", "0"]
    check_run(run_folder, 2)


def test_a_forked_child_may_have_its_own(run_folder: Path) -> None:
    body = """
    ckpt = everstep.Checkpointer(run, state, method="sync", every=None)
    ckpt.resume()
    advance(ckpt)
    ckpt.save()
    child = os.fork()
    if child == 0:
        with everstep.Checkpointer(run, state, method="sync", every=None) as mine:
            mine.resume()
            advance(mine)
            mine.save()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    advance(ckpt)
    try:
        ckpt.save()
    except everstep.errors.FencedError:
        print("fenced", os.waitstatus_to_exitcode(status))
    """
    code, out, err = finish(start(run_folder, body))
    assert code == 0, err
    assert out.split() == ["fenced", "0"]
    check_run(run_folder, 2)


def save_points() -> list[Any]:
    """All within a save; those that the demo does not visit are quick enough to run always.
    Where segments of a log are deleted is no part of it."""
    names = [name for name in FAILPOINTS if name.startswith(("save.", "retain."))]
    names.remove("retain.before_segment")
    quick = ("save.before_marker", "retain.after_condemn")
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("failpoint", save_points())
def test_killed_at_every_failpoint(failpoint: str, run_folder: Path) -> None:
    body = """
    with everstep.Checkpointer(run, state, method="sync", every=1, keep=1) as ckpt:
        ckpt.resume()
        print("ready", flush=True)
        for _ in range(5):
            advance(ckpt)
            print(ckpt.stats().durable_step, flush=True)
    """
    code, out, err = finish(start(run_folder, body, EVERSTEP_FAILPOINTS=f"{failpoint}=kill:2"))
    assert code == -signal.SIGKILL, err
    durable = [int(line) for line in out.split()[1:]]
    killed_at = len(durable) + 1
    live: dict[str, Any] = {"n": None, "t": None}
    with opened(run_folder, live) as ckpt:
        step = ckpt.resume().step
    assert step in (durable[-1], killed_at)
    check_run(run_folder, step)


def test_two_processes_on_one_run(run_folder: Path) -> None:
    """The older one goes on training, is told, and touches nothing of the newer one."""
    older = start(
        run_folder,
        """
        ckpt = everstep.Checkpointer(run, state, method="async", every=None, keep=1)
        ckpt.resume()
        advance(ckpt)
        ckpt.save()
        ckpt.wait()
        print("saved", flush=True)
        sys.stdin.readline()
        advance(ckpt)
        try:
            ckpt.save()
            ckpt.close()
        except everstep.errors.FencedError as error:
            print("fenced", flush=True)
        """,
    )
    assert older.stdout.readline() == "saved\n"
    newer = start(
        run_folder,
        """
        with everstep.Checkpointer(run, state, method="sync", every=1, keep=1) as ckpt:
            assert ckpt.resume().step == 1
            advance(ckpt)
            advance(ckpt)
        """,
    )
    code, _, err = finish(newer)
    assert code == 0, err
    older.stdin.write("\n")
    older.stdin.flush()
    code, out, err = finish(older)
    assert code == 0, err
    assert out.split() == ["fenced"]
    check_run(run_folder, 3)


def test_no_thread_keeps_the_interpreter_alive(run_folder: Path) -> None:
    body = """
    ckpt = everstep.Checkpointer(run, state, method="async", every=None)
    ckpt.step()
    ckpt.save()
    ckpt.wait()
    print(all(t.daemon for t in threading.enumerate() if t is not threading.main_thread()))
    del ckpt
    """
    code, out, err = finish(start(run_folder, body))
    assert (code, out.strip()) == (0, "True"), err


def test_this_process_has_no_threads_left_from_other_tests() -> None:
    for thread in threading.enumerate():
        if thread.name == "everstep-keeper":
            thread.join(TIMEOUT_S)  # of a disk that hung until the end of its test
            assert not thread.is_alive()
