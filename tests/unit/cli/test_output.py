"""What becomes of the command's output where it cannot be written, and what of its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
import torch

import everstep
from everstep.cli import main
from everstep.cli.common.errors import ExitCode

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")

VERBS = [["ls"], ["ls", "--json"], ["inspect", "--help"], ["du"], ["plan", "--help"], ["--version"]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run without bases."""
    everstep.Checkpointer(tmp_path / "run", {"x": {"y": torch.ones(2)}}).close()
    return tmp_path / "run"


@pytest.fixture
def full() -> Iterator[TextIO]:
    """A device that is full."""
    with open("/dev/full", "w") as file:
        yield file


def status(monkeypatch: pytest.MonkeyPatch, args: list[str], **streams: TextIO | None) -> int:
    """The exit status of the command with other streams."""
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["everstep", *args])
        for name, stream in streams.items():
            patched.setattr(sys, name, stream)
        return main()


def of_run(args: list[str], run: Path) -> list[str]:
    return [*args, str(run)] if args[0] in ("ls", "du") else args


@pytest.mark.parametrize("args", VERBS)
@pytest.mark.parametrize("where", ["full", "closed"])
def test_output_that_cannot_be_written_is_said_in_one_line(
    args: list[str],
    where: str,
    run: Path,
    full: TextIO,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stdout = full if where == "full" else None
    assert status(monkeypatch, of_run(args, run), stdout=stdout) == ExitCode.ENVIRONMENT
    why = "No space left on device" if where == "full" else "it is closed"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: could not write standard output: {why}")


@pytest.mark.parametrize("args", VERBS)
def test_a_reader_that_has_gone_is_no_error(
    args: list[str],
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as gone:
        assert status(monkeypatch, of_run(args, run), stdout=gone) == ExitCode.OK
    assert capsys.readouterr().err == ""


def test_an_error_that_cannot_be_printed_keeps_its_status(
    full: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status(monkeypatch, ["ls", "/nowhere"], stderr=full) == ExitCode.USAGE
    assert status(monkeypatch, ["ls", "/nowhere"], stderr=None) == ExitCode.USAGE
    assert status(monkeypatch, ["lss"], stderr=full) == ExitCode.USAGE


def test_nor_can_an_error_as_a_document(
    full: TextIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(monkeypatch, ["ls", "/nowhere", "--json"], stdout=full) == ExitCode.ENVIRONMENT
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("redirect", "expected"), [(">/dev/full", 4), (">&-", 4), ("2>&-", 0), (">&- 2>&-", 4)]
)
def test_the_interpreter_adds_nothing_when_it_ends(redirect: str, expected: int) -> None:
    """It flushes what is left, and would say that it could not, with a status of its own."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m everstep --version {redirect}', sys.executable],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == expected, done.stderr
    said = 0 if "2>" in redirect or not expected else 1
    assert len(done.stderr.splitlines()) == said, done.stderr


def test_nothing_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """A file that is opened next would get its number, and all that a library prints."""
    code = (
        "import sys, os\n"
        "from everstep.cli.common.streams import guarded_output\n"
        "with guarded_output():\n"
        f"    file = open({str(tmp_path / 'file')!r}, 'w')\n"
        "    assert file.fileno() > 2, file.fileno()\n"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&- <&-', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
