"""Lines of progress, only once there is something to wait for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import everstep
from everstep.options import KeeperOptions
from everstep.seams import progress as progress_module
from everstep.seams.progress import progress
from tests.support.logged import invoke
from tests.support.world import opened


class Time:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    moved = Time()
    monkeypatch.setattr(progress_module, "time", moved)
    return moved


def test_lines(time: Time, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("save", 200) as bar:
        bar.advance(50)
        assert capsys.readouterr().err == "", "work that is over soon is not worth a word"
        time.now_s += 3.1
        bar.advance(50)
        assert capsys.readouterr().err == "save: 50 %\n"
        bar.advance(50)
        assert capsys.readouterr().err == ""
        time.now_s += 3.1
        bar.advance(50)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "save: 100 %\nsave: ended after 6.2 s\n")


def test_nothing_to_do_is_no_error(time: Time, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("save", 0) as bar:
        time.now_s += 3.1
        bar.advance(0)
    assert capsys.readouterr().err == "save: 3 s\nsave: ended after 3.1 s\n"


def test_lines_come_after_a_second_and_then_every_few(
    time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    with progress("save", 0) as bar:
        for _ in range(18):
            time.now_s += 0.5
            bar.advance(1)
            said.append(capsys.readouterr().err)
    assert [number / 2 + 0.5 for number, text in enumerate(said) if text] == [1.5, 5.0, 8.5]


def test_more_than_was_said_is_no_share(time: Time, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody knows how much a keeper's replica is going to write."""
    with progress("save", 0) as bar:
        time.now_s += 3.1
        bar.advance(804676)
    assert capsys.readouterr().err.startswith("save: 3 s\n")
    with progress("save", 200) as bar:
        time.now_s += 3.1
        bar.advance(300)
    assert capsys.readouterr().err.startswith("save: 100 %\n")


@pytest.mark.parametrize(
    ("method", "process"), [("sync", False), ("async", False), ("async", True)]
)
def test_what_may_take_long_tells_of_it(
    method: str,
    process: bool,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Saving on close, resuming, reading back."""
    monkeypatch.setattr(progress_module, "_LINE_FIRST_S", -1.0)
    monkeypatch.setattr(progress_module, "_LINE_EVERY_S", -1.0)
    state = {"t": torch.ones(400_000)}
    keeper = KeeperOptions(process=process)
    with everstep.Checkpointer(run_folder, state, method=method, every=None, keeper=keeper) as ckpt:
        ckpt.save()
    assert re.search(r"^save.*: ended after", capsys.readouterr().err, re.MULTILINE)
    with opened(run_folder, state) as ckpt:
        ckpt.resume()
    assert re.search(r"^resume from step 0.*: \d+ %", capsys.readouterr().err, re.MULTILINE)
    assert re.search(r"^verify: \d+ %", invoke("verify", run_folder).stderr, re.MULTILINE)


# --- Notices ----------------------------------------------------------------------------

NOTICE = """
import logging, sys
{before}
from everstep.seams.progress import log_or_print
log_or_print("runs/a: lazy", level=logging.{level})
"""


@pytest.mark.parametrize(
    ("before", "level", "shown"),
    [
        ("", "INFO", "everstep: runs/a: lazy\n"),
        ("", "DEBUG", ""),
        ("logging.basicConfig(level=logging.INFO)", "INFO", "INFO:everstep:runs/a: lazy\n"),
        ("logging.basicConfig(level=logging.INFO)", "DEBUG", ""),
        ("logging.basicConfig()", "INFO", ""),
        ("logging.basicConfig()", "WARNING", "WARNING:everstep:runs/a: lazy\n"),
        ("logging.getLogger('everstep').addHandler(logging.NullHandler())", "WARNING", ""),
        ("sys.stderr = None", "INFO", ""),
    ],
)
def test_notices_go_to_the_logger_of_a_program_that_has_one(
    before: str, level: str, shown: str
) -> None:
    code = NOTICE.format(before=before, level=level)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("", shown)
