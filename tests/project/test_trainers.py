"""Processes that tests fork with torch loaded: they end, speak and see what ``python -c`` would."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from everstep.seams.processes.processes import process_ended
from tests.support.leftovers import MARK, processes_marked
from tests.support.trainers import end_server, run_trainer, server_process, start_trainer
from tests.support.world import TIMEOUT_S

ENDINGS = {
    "": 0,
    "import sys; sys.exit(3)": 3,
    "raise RuntimeError('mine')": 1,
    "import os; os._exit(7)": 7,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "import os, signal\nsignal.signal(2, signal.default_int_handler)\nos.kill(os.getpid(), 2)": -2,
}


@pytest.mark.parametrize("code", ENDINGS)
def test_how_it_ended(code: str) -> None:
    status, out, err = run_trainer(code, timeout_s=TIMEOUT_S)
    assert (status, out) == (ENDINGS[code], "")
    assert ("mine" in err) == ("mine" in code)


def test_its_end_is_that_of_an_interpreter() -> None:
    """What is registered for the exit runs, and threads are waited for."""
    code = """
import atexit, sys, threading
atexit.register(print, "at exit")
thread = threading.Thread(target=lambda: print(sys.stdin.read(), end=""))
thread.start()
"""
    with start_trainer(code) as trainer:
        trainer.stdin.write("read\n")
        out, err = trainer.communicate(TIMEOUT_S)
    assert (trainer.returncode, out, err) == (0, "read\nat exit\n", "")


def test_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os, sys
from everstep.seams import failpoints
print(sys.argv, __name__, sys.modules["__main__"].sys is sys, "torch" in sys.modules)
print(os.environ["OF_TESTS"], os.environ["ADDED"], os.getsid(0) == os.getpid())
links = {int(n): f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")}
links = {n: os.readlink(link) for n, link in links.items() if os.path.lexists(link)}
print([links.pop(n).split(":")[0] for n in range(3)], links)
failpoints.failpoint("save.before_write")
"""
    environment = {"ADDED": "added", "EVERSTEP_FAILPOINTS": "save.before_write=kill"}
    monkeypatch.setenv("OF_TESTS", "of tests")
    with start_trainer(code, "one", "two", new_session=True, **environment) as trainer:
        out, err = trainer.communicate(TIMEOUT_S)
    lines = out.splitlines()
    assert lines[0] == "['-c', 'one', 'two'] __main__ True True"
    assert lines[1] == "of tests added True"
    assert lines[2] == "['pipe', 'pipe', 'pipe'] {}", "it has inherited descriptors"
    assert trainer.returncode == -signal.SIGKILL, err


def test_one_that_hangs_is_killed_and_what_it_said_is_told() -> None:
    code = "import signal; print('so far', flush=True); signal.pause()"
    with pytest.raises(AssertionError, match=r"hangs:\nso far"):
        run_trainer(code, timeout_s=0.5)
    with start_trainer(code) as trainer:
        assert trainer.stdout.readline() == "so far\n"
        assert trainer.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            trainer.wait(0.0)
        assert trainer.pid in processes_marked(os.environ[MARK]), "no test would find it"
    assert trainer.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_all_of_them_end_with_the_tests() -> None:
    trainer = start_trainer("import signal; signal.pause()")
    end_server()
    assert process_ended(trainer.pid, TIMEOUT_S)
    with pytest.raises(AssertionError, match="is gone"):
        trainer.wait(TIMEOUT_S)
    for pipe in (trainer.stdin, trainer.stdout, trainer.stderr):
        pipe.close()
    assert run_trainer("print(1)", timeout_s=TIMEOUT_S) == (0, "1\n", "")  # from a new one


def test_a_lost_server_is_an_error() -> None:
    run_trainer("", timeout_s=TIMEOUT_S)
    server = server_process()
    server.kill()
    server.wait(TIMEOUT_S)
    with pytest.raises((AssertionError, ConnectionError)):
        start_trainer("")
    end_server()
    assert not Path(f"/proc/{server.pid}").exists()
