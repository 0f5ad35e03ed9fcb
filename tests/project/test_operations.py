"""docs/OPERATIONS.md: its programs run, its commands exist, and what it says of signals is so."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from everstep.cli import app
from everstep.errors import KeeperError
from everstep.link.registry import find_keeper, keeper_files
from everstep.link.spawn import SpawnOptions, connect, spawn_keeper
from everstep.options import ANNOUNCING
from everstep.seams.processes.processes import RUNTIME_DIR_VARIABLE, process_ended, runtime_folder
from tests.support.documents import masked, run_command, run_program
from tests.support.logged import invoke
from tests.support.preempted import PRELUDE, saved_at
from tests.support.trainers import Popen, finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "OPERATIONS.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all programs of the page have run, one behind the other."""
    folder = tmp_path_factory.mktemp("operations")
    before = "import os; os.environ.pop('RUN', None)\n"
    run_program(before + "\n".join(blocks("python")), folder)
    return folder


def test_there_are_blocks() -> None:
    found = {name: len(blocks(name)) for name in ("python", "console", "sh", "yaml", "json")}
    assert found == {"python": 4, "console": 1, "sh": 3, "yaml": 1, "json": 1}


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.split("\n")[0])
def test_console(folder: Path, block: str) -> None:
    first, _, shown = block.partition("\n")
    command = shlex.split(first.removeprefix("$ "))
    assert masked(run_command(command, folder)) == masked(shown)


@pytest.mark.parametrize("block", blocks("sh"), ids=["torchrun", "slurm", "spot"])
def test_scripts_are_shell(block: str) -> None:
    subprocess.run(["bash", "-n"], input=block, text=True, check=True, timeout=TIMEOUT_S)


def commands() -> set[str]:
    inline = re.findall(r"`(everstep [a-z][^`]*)`", TEXT)
    lines = [line.strip() for block in blocks("sh") for line in block.splitlines()]
    return {*inline, *(line for line in lines if line.startswith("everstep "))}


@pytest.mark.parametrize("command", sorted(commands()))
def test_commands_exist(command: str) -> None:
    _, verb, *rest = shlex.split(command)
    group = typer.main.get_command(app)
    found = group.commands[verb]  # type: ignore[attr-defined]
    known = {name for parameter in found.params for name in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= known


def test_commands_of_the_table_do_what_they_say(folder: Path, tmp_path: Path) -> None:
    job, out = str(folder / "runs" / "job"), str(tmp_path / "out")
    assert "80" in said("rm", job, "--step", "80", "--dry-run")
    said("restore", job, "--step", "90", "--out", out)
    assert "90" in said("ls", out)


def said(*arguments: str) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_policy_allows_what_the_page_on_tiers_asks_for() -> None:
    policy = json.loads(blocks("json")[0])
    allowed = [statement["Action"] for statement in policy["Statement"]]
    actions = {*allowed[0], allowed[1]}
    asked = re.search(
        r"What a policy must allow.*?\n\n", (ROOT / "docs/TIERS.md").read_text(), re.S
    )
    assert asked
    assert actions == set(re.findall(r"s3:[A-Za-z]+", asked[0]))


def test_a_mount_point_is_no_runtime_folder_but_what_is_made_in_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = tmp_path / "scratch"
    mount.mkdir()
    mount.chmod(0o777)
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(mount))
    with pytest.raises(KeeperError, match="open to other users"):
        runtime_folder()
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(mount / "everstep"))
    assert runtime_folder().stat().st_mode & 0o777 == 0o700


def test_a_signal_to_every_process_of_the_job(run_folder: Path) -> None:
    """The keeper gets it, too, and ends; the last base is made durable by another one."""
    body = """
from everstep.link.registry import list_keepers
ckpt = everstep.Checkpointer(
    run, state, every=None, preempt=True, keeper=everstep.KeeperOptions(linger_s=3))
ckpt.resume()
advance(ckpt)
(keeper,) = [info.pid for info in list_keepers() if info.run == run]
os.kill(keeper, signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
advance(ckpt)
print(ckpt.preempted, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, out, err = finish_trainer(start_trainer(PRELUDE + body, str(run_folder)), 3 * TIMEOUT_S)
    assert (code, out) == (-signal.SIGKILL, "True\n"), err
    assert [path.parent.name for path in run_folder.rglob("manifest.json")] == [f"{2:012}"]
    assert saved_at(run_folder) == 2


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", [name for name in ANNOUNCING if name != "SIGINT"])
def test_a_keeper_ends_in_order_behind_each_signal_that_may_be_announced(
    name: str, run_folder: Path
) -> None:
    """Killed outright it leaves its lock and its socket, and what it had is lost."""
    run_folder.mkdir(exist_ok=True)
    options = SpawnOptions(str(run_folder), "id", 0)
    files = keeper_files(options.key)
    spawn_keeper(options)
    with connect(options.key, timeout_s=TIMEOUT_S) as connection:
        connection.send({"kind": "status"})  # it is answered when all is in place
        assert connection.receive(TIMEOUT_S) is not None
    keeper = find_keeper(options.key)
    assert keeper is not None
    os.kill(keeper.pid, signal.Signals[name])
    assert process_ended(keeper.pid, TIMEOUT_S)
    assert not os.path.exists(files.info)
    assert not os.path.exists(files.socket)


TRAIN = """
ckpt = everstep.Checkpointer(run, state, every=None, preempt=True)
ckpt.resume()
while not ckpt.preempted:
    advance(ckpt)
    if state["n"][0] == 3:
        print("ready", flush=True)
ckpt.close()
print("left at", state["n"][0], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True])
def test_torchrun_forwards_sigterm(tmp_path: Path, whole_group: bool) -> None:
    """To torchrun alone, or to its process group."""
    script, run_at = tmp_path / "train.py", tmp_path / "run"
    script.write_text(PRELUDE + TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    agent = Popen(
        [*command, "--standalone", str(script), str(run_at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert agent.stdout is not None
    assert agent.stdout.readline() == "ready\n"
    (os.killpg if whole_group else os.kill)(agent.pid, signal.SIGTERM)
    with agent:
        out, err = agent.communicate(timeout=3 * TIMEOUT_S)
    left = re.search(r"left at ([0-9]+)", out)
    assert left, err
    assert agent.returncode not in (0, None)
    assert saved_at(run_at) == int(left[1])
