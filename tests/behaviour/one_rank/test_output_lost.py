"""Standard error that takes nothing (full, closed, read by nobody, or none) ends no training."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from everstep.options import Every
from everstep.seams import ManualClock
from everstep.seams import progress as progress_module
from everstep.seams.progress import print_line, print_line_to, progress
from everstep.trainer.session.cadence import FIRST_STEPS
from tests.support.world import HookedFileSystem, opened


class Lost(io.StringIO):
    """Fails with ``error`` at each line, from the start or when a test says so.

    Attributes:
        tried: what was to be written.
    """

    def __init__(self, error: Exception, *, terminal: bool = False) -> None:
        super().__init__()
        self.error, self.terminal, self.tried = error, terminal, ""
        self.works = False

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str, /) -> int:
        if self.works:
            return super().write(text)
        self.tried += text
        raise self.error

    def flush(self) -> None:
        if not self.works:
            raise self.error


def full() -> Any:
    return open("/dev/full", "w", encoding="utf-8", buffering=1)


def unread() -> Any:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8", buffering=1)


def closed() -> Any:
    stream = io.StringIO()
    stream.close()
    return stream


def without_its_descriptor() -> Any:
    # A real one might be another file's by now.
    return Lost(OSError(errno.EBADF, "bad file descriptor"))


def none() -> Any:
    return None


@pytest.fixture(params=[full, unread, closed, without_its_descriptor, none])
def lost(request: pytest.FixtureRequest) -> Iterator[Any]:
    make: Callable[[], Any] = request.param
    stream = make()
    yield stream
    with contextlib.suppress(OSError):  # with what it holds back
        if stream is not None:
            stream.close()


def test_a_line_that_cannot_be_printed(
    lost: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", lost)
    for _ in range(3):  # what a stream holds back fails with the next one
        print_line("everstep: a line")
        print_line_to(lost, "everstep: a line")
    assert capsys.readouterr().out == "", "without standard error, print() takes the other"


def test_a_character_that_the_stream_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stderr", stream)
    print_line("everstep: runs/année")
    print_line("everstep: runs/year")
    assert stream.buffer.getvalue() == b"everstep: runs/year\n"  # type: ignore[attr-defined]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("from_the_start", [True, False])
def test_training_goes_on(
    from_the_start: bool,
    lost: Any,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The start, steps that say something, bases with their progress, resume, and the end."""
    if from_the_start:
        monkeypatch.setattr(sys, "stderr", lost)
    trained(run_folder, monkeypatch, lambda: monkeypatch.setattr(sys, "stderr", lost))
    assert capsys.readouterr().out == ""


def test_what_is_lost_was_to_be_said(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is about lines of the start, of a step, of a base and of resume."""
    stream = Lost(OSError(errno.ENOSPC, "no space left"))
    monkeypatch.setattr(sys, "stderr", stream)
    trained(run_folder, monkeypatch, lambda: None)
    for said in ("keep 3", "a base every 120 steps", "save step", "resume from step"):
        assert said in stream.tried


def trained(run: Path, monkeypatch: pytest.MonkeyPatch, midway: Callable[[], None]) -> None:
    """A run whose bases take 3 s, and whose steps 0.5 s: one of them says what that comes to."""
    monkeypatch.setattr(progress_module, "_LINE_FIRST_S", -1.0)
    monkeypatch.setattr(progress_module, "_LINE_EVERY_S", -1.0)
    clock = ManualClock()

    def hook(op: str, path: PurePath) -> None:
        if op == "rename" and path.name == "rank-00000.safetensors":
            clock.advance(3.0)

    options: dict[str, Any] = {
        "fs": HookedFileSystem(hook),
        "clock": clock,
        "every": Every(auto=True, mtbf_s=600.0),
    }
    state = {"a": torch.ones(400_000), "plain": {"n": 0}}
    with opened(run, state, **options) as ckpt:
        assert ckpt.resume().source == "fresh"
        midway()
        for _ in range(FIRST_STEPS + 2):
            clock.advance(0.5)
            state["plain"]["n"] += 1
            ckpt.step()
        assert (ckpt.stats().saves, ckpt.stats().interval_steps) == (1, 120)
        ckpt.save()
    state["plain"]["n"] = 0
    with opened(run, state, **options) as ckpt:
        assert (ckpt.resume().step, state["plain"]["n"]) == (FIRST_STEPS + 2, FIRST_STEPS + 2)


@pytest.mark.parametrize("make", [closed, none])
def test_progress_without_a_stream(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "_LINE_FIRST_S", -1.0)
    monkeypatch.setattr(sys, "stderr", make())
    with progress("save", 1) as bar:
        bar.advance(1)
