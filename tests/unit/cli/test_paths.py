"""Paths that cannot be, or that this user may not see: each verb says so, and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.cli.common.errors import ExitCode
from tests.support.logged import document, invoke

LONG = "a" * 300
"""A name that no file system of Linux takes."""

Words = Callable[[Path, str], list[str]]

NAMING: dict[str, Words] = {
    "ls": lambda _, path: ["ls", path],
    "inspect": lambda _, path: ["inspect", path],
    "inspect of a file": lambda _, path: ["inspect", f"{path}.safetensors"],
    "verify": lambda _, path: ["verify", path],
    "du": lambda _, path: ["du", path],
    "pin": lambda _, path: ["pin", path, "--step", "1"],
    "cp": lambda _, path: ["cp", path, "out"],
    "rm": lambda _, path: ["rm", path, "--step", "1"],
    "restore": lambda _, path: ["restore", path, "--step", "1", "--out", "out"],
    "restore --out": lambda run, path: ["restore", str(run), "--step", "1", "--out", path],
    "watch": lambda _, path: ["watch", path],
    "report": lambda _, path: ["report", path],
    "report --out": lambda run, path: ["report", str(run), "--out", path],
    "simulate --picture": lambda _, path: ["simulate", "--days", "1", "--picture", path],
    "stop": lambda _, path: ["stop", path],
    "doctor": lambda _, path: ["doctor", path],
    "doctor, below": lambda _, path: ["doctor", f"none/{path}"],
    "plan auto": lambda _, path: ["plan", "auto", path],
    "plan": lambda _, path: ["plan", "schedule", "--model", f"{path}:factory"],
    "plan --picture": lambda _, path: ["plan", "schedule", "--model", "x", "--picture", path],
    "demo": lambda _, path: ["demo", "--quick", "--run", path],
    "drill": lambda _, path: ["drill", "--dir", path],
    "bench": lambda _, path: ["bench", "persist", "--dir", path],
    "bench --picture": lambda _, path: ["bench", "stall", "--picture", path],
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run without bases, beside which the command works."""
    everstep.Checkpointer(tmp_path / "run", {"x": {"y": torch.ones(2)}}).close()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.mark.parametrize("verb", NAMING)
def test_a_name_that_is_too_long(run: Path, verb: str) -> None:
    result = invoke(*NAMING[verb](run, LONG))
    assert result.exit_code == ExitCode.USAGE, result.output
    assert "File name too long" in result.stderr
    assert LONG in result.stderr.replace("\n", "")
    assert "hint: choose a shorter path" in result.stderr


@pytest.mark.parametrize("verb", sorted(NAMING.keys() - {"doctor, below"}))
def test_a_folder_that_is_closed_to_this_user(
    run: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in it is not called absent."""
    real = os.stat

    def closed(path: Any, **options: Any) -> os.stat_result:
        if "closed" in Path(os.fsdecode(path) if not isinstance(path, int) else "").parts:
            raise PermissionError(13, "Permission denied", path)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", closed)
    result = invoke(*NAMING[verb](run, "closed/run"))
    assert result.exit_code == ExitCode.ENVIRONMENT, result.output
    assert "may not look at" in result.stderr
    assert str(run.parent / "closed" / "run") in result.stderr
    assert "hint: " in result.stderr


def test_errors_of_paths_as_a_document(run: Path) -> None:
    found = document("doctor", LONG, status=2)
    assert (found["error"], found["path"]) == ("OptionError", str(run.parent / LONG))


@pytest.mark.parametrize("verb", ["ls", "restore --out", "stop", "doctor", "plan", "drill"])
def test_a_working_directory_that_is_gone(
    run: Path, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    result = invoke(*NAMING[verb](run, "there"))
    assert result.exit_code == ExitCode.USAGE, result.output
    assert "there is relative to a working directory that was removed" in result.stderr


def test_links_in_a_circle(run: Path) -> None:
    (run.parent / "circle").symlink_to("circle")
    for verb in ("ls", "doctor"):
        result = invoke(verb, "circle")
        assert result.exit_code == ExitCode.USAGE, result.output
        assert "lead in a circle" in result.stderr
