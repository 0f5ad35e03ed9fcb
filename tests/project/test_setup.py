"""``make setup`` says what is missing, in one line, and what to do about it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

needs_make = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


def setup(venv: Path, python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script as the Makefile does."""
    return subprocess.run(
        ["sh", "scripts/setup.sh", python, str(venv), str(venv / ".ready-1"), "torch==0.0.1"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def python_that(folder: Path, body: str) -> str:
    """An executable that stands in for python3."""
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def make(*words: str) -> str:
    """What make prints; nothing of a make that runs these tests reaches it."""
    outer = ("MAKE", "MFLAGS", "TORCH", "PYTHON", "VENV", "ARGS")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    return subprocess.run(
        ["make", *words],
        cwd=ROOT,
        env=clean,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    return result.stderr.strip().splitlines()[-1]


def test_no_python(tmp_path: Path) -> None:
    line = last_line(setup(tmp_path / "venv", str(tmp_path / "python3")))
    assert line.startswith(f"setup: {tmp_path}/python3 is not here: install Python 3.10 or newer")
    assert "make PYTHON=" in line


def test_python_that_does_not_run(tmp_path: Path) -> None:
    line = last_line(setup(tmp_path / "venv", python_that(tmp_path, "exit 127")))
    assert "does not run: install Python 3.10 or newer" in line


def test_old_python(tmp_path: Path) -> None:
    # Says 3.9 when asked for its version; any other question is answered with "no".
    old = python_that(tmp_path, 'case "$2" in *print*) echo 3.9;; *) exit 1;; esac')
    line = last_line(setup(tmp_path / "venv", old))
    assert "is Python 3.9, 3.10 or newer is needed" in line


def test_no_venv_module(tmp_path: Path) -> None:
    (tmp_path / "ensurepip.py").write_text("raise ImportError")
    result = setup(tmp_path / "venv", sys.executable, PYTHONPATH=str(tmp_path))
    assert "has no venv module: install it" in last_line(result)


def test_directory_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("precious")
    line = last_line(setup(tmp_path, sys.executable))
    assert "is no virtual environment: move it away" in line
    assert [*tmp_path.iterdir()] == [kept]


@pytest.mark.slow
def test_no_network(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    offline = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",  # the port of the discard service
        "PIP_RETRIES": "0",
    }
    result = setup(venv, sys.executable, **offline)
    assert last_line(result).startswith("setup: no network: pip cannot reach its package index")
    assert not list(venv.glob(".ready-*"))


@needs_make
def test_environment_that_is_ready_is_left_alone(tmp_path: Path) -> None:
    def plan(*words: str) -> str:
        return make("--dry-run", "setup", f"VENV={tmp_path}", *words)

    command = plan()
    assert "scripts/setup.sh" in command
    stamp = next(word for word in command.split('"') if ".ready-" in word)
    Path(stamp).touch()
    assert "scripts/setup.sh" in plan(), "there is no interpreter in the environment"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert "scripts/setup.sh" not in plan()
    assert "scripts/setup.sh" in plan("TORCH=torch==2.11.0"), "another torch was asked for"


def test_environments_of_other_targets_are_ignored_and_removed() -> None:
    makefile = (ROOT / "Makefile").read_text()
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    found = re.findall(r"\$\(MAKE\) VENV=(\S+)", makefile)
    assert len(found) == 2
    for venv in found:
        assert f"{venv}/" in ignored
        assert venv in makefile.partition("\ndistclean:")[2]


@needs_make
def test_make_alone_lists_the_targets() -> None:
    listed = make()
    for target in ("setup", "demo", "test", "test-slow", "docs", "bench", "clean", "help"):
        assert f"\nmake {target} " in "\n" + listed
