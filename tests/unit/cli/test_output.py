"""What becomes of the command's output where it cannot be written, and what of its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import everstep

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run without bases."""
    everstep.Checkpointer(tmp_path / "run", {"x": {"y": torch.ones(2)}}).close()
    return tmp_path / "run"


def shell(command: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which ``everstep`` is the command."""
    return subprocess.run(
        ["bash", "-c", f'everstep() {{ "$0" -m everstep "$@"; }}; {command}', sys.executable]
        + [str(arg) for arg in args],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("verb", ["ls", "ls --json"])
def test_output_that_cannot_be_written_is_said_in_one_line(verb: str, run: Path) -> None:
    done = shell(f'everstep {verb} "$1" >/dev/full', run)
    assert done.returncode == 4
    assert done.stderr.splitlines() == [
        "error: could not write standard output: No space left on device"
    ]


def test_a_reader_that_has_gone_is_no_error(run: Path) -> None:
    done = shell('(sleep 0.1; everstep inspect --help; everstep ls "$1") | true', run)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("redirect", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(redirect: str) -> None:
    done = shell(f"everstep --version {redirect}")
    assert (done.returncode, done.stderr) == (0, "")
