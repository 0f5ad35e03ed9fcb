"""Launchers and the keeper (docs/KEEPER.md): what can be tried on one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.link.registry import list_keepers
from tests.support.keeper_process import PRELUDE, finish
from tests.support.trainers import finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S

pytestmark = pytest.mark.usefixtures("no_keeper_stays")

SCRIPT = (
    PRELUDE
    + """
from everstep.testing import inspect

# Whoever runs the tests may ignore them (nohup), and children inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
ckpt = everstep.Checkpointer(run, state, every=1)
recovery = ckpt.resume()
report(recovery)
if recovery.step:
    ckpt.close()
    sys.exit(0)
for step in range(1, 4):
    train_step()
    ckpt.step()
inspect(ckpt).saver.finish_captures()
say(digest=digest())
{ending}
"""
)


def script(folder: Path, ending: str) -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("{ending}", ending))
    return path


@pytest.mark.slow
def test_torchrun_restarts_a_killed_worker_and_its_keeper_is_there(
    tmp_path: Path, run_folder: Path
) -> None:
    path = script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=1", "--max-restarts=1", "--monitor-interval=0.1"]
    process = subprocess.Popen(
        [*command, str(path), str(run_folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    status, said, err = finish(process)
    assert status == 0, err
    first, captured, second = said
    assert first["source"] == "fresh"
    assert (second["step"], second["source"]) == (3, "memory")
    assert second["digest"] == captured["digest"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_process_group_spare_the_keeper(
    number: signal.Signals, tmp_path: Path, run_folder: Path, request: pytest.FixtureRequest
) -> None:
    """What a terminal, nohup, a notebook's kernel and SLURM (pgid) do."""
    path = script(tmp_path, "signal.pause()")
    process = start_trainer(path.read_text(), str(run_folder), new_session=True)
    request.addfinalizer(process.close)
    lines = [json.loads(process.stdout.readline()) for _ in range(2)]
    (keeper,) = list_keepers()
    os.killpg(process.pid, number)
    assert process.wait(TIMEOUT_S) != 0
    if number != signal.SIGINT:  # with Python's handler: a KeyboardInterrupt, an orderly end
        assert [left.pid for left in list_keepers()] == [keeper.pid]
    again = start_trainer(path.read_text(), str(run_folder))
    _, out, err = finish_trainer(again, 3 * TIMEOUT_S)
    recovery = json.loads(out.splitlines()[0])
    assert recovery["step"] == 3, err
    assert recovery["digest"] == lines[1]["digest"]
