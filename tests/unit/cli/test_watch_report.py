"""``everstep watch`` and ``everstep report`` on real runs, and the report in a real browser."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import document, invoke
from tests.support.log.eventful import events_of_two_lives, train, write_events

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1100,2600",
)


@pytest.fixture
def run(run_folder: Path) -> Path:
    train(run_folder)
    return run_folder


def test_watch_shows_what_each_failure_would_cost(run: Path) -> None:
    shown = invoke("watch", run, columns=160).output
    assert "logged, every 5 steps; 1 rank, timeline 1; ended" in shown
    rows = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert "the step in flight" in rows["the training process dies"]
    assert "nothing" in rows["a rack dies with its disks"]
    assert "began at step 0" in shown


def test_watch_as_a_document(run: Path) -> None:
    found = document("watch", run)
    assert (found["state"], found["step"], found["ranks"]) == ("ended", 20, 1)
    lost = {loss["failure"]: loss["lost_steps"] for loss in found["losses"]}
    assert lost == {"process": 0, "machine": 0, "node": 20, "rack": 20}


def test_watch_goes_on_until_it_is_interrupted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt
        shutil.rmtree(run / "events", ignore_errors=True)

    module = sys.modules["everstep.cli.watch"]
    monkeypatch.setattr(module, "_is_terminal", lambda: True)
    monkeypatch.setattr("time.sleep", sleep)
    result = invoke("watch", run, "--every", 0.5, columns=120)
    assert (result.exit_code, slept) == (130, [0.5, 0.5, 0.5])
    assert "the training process dies" in result.output


def test_a_killed_run_is_silent(run_folder: Path) -> None:
    train(run_folder)
    shutil.rmtree(run_folder / "events")
    write_events(run_folder, events_of_two_lives()[:-1])
    assert "silent for" in invoke("watch", run_folder).output


def test_a_run_without_events_is_refused(run: Path) -> None:
    shutil.rmtree(run / "events")
    result = invoke("watch", run)
    assert result.exit_code == 2
    assert "has no event log" in result.output


def test_report_writes_one_page(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    result = invoke("report", run, "--out", target, "--verify")
    assert result.exit_code == 0
    page = target.read_text()
    assert page.count('<span class="good">good</span>') == 3
    found = document("report", run, "--out", target)
    assert (found["steps"], found["failures"], found["lost_steps"]) == (20, 0, 0)
    assert found["size_bytes"] == target.stat().st_size


def test_report_with_damage(run: Path, tmp_path: Path) -> None:
    newest = max(run.glob("timeline-00001/base/*/rank-00000.safetensors"))
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    result = invoke("report", run, "--out", tmp_path / "page.html", "--verify")
    assert result.exit_code == 1
    assert "damaged: step 20" in result.output


def test_report_where_it_cannot_be_written(run: Path, tmp_path: Path) -> None:
    result = invoke("report", run, "--out", tmp_path / "missing" / "page.html")
    assert result.exit_code == 2
    assert "missing" in result.output
    assert not (tmp_path / "missing").exists()


def test_disk_usage_names_the_event_log(run: Path) -> None:
    found = document("du", run)
    assert found["events"]["files"] == 1
    assert found["other"]["files"] == 0


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_the_page_in_a_browser(run: Path, tmp_path: Path) -> None:
    """A browser lays the page out with its charts."""
    shutil.rmtree(run / "events")
    write_events(run, events_of_two_lives())
    page = tmp_path / "page.html"
    assert invoke("report", run, "--out", page).exit_code == 0
    picture = tmp_path / "page.png"
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    for action in ("--dump-dom", f"--screenshot={picture}"):
        shown = subprocess.run(
            [str(CHROMIUM), *FLAGS, profile, action, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        )
        assert shown.returncode == 0, shown.stderr
        if action == "--dump-dom":
            assert shown.stdout.count("<svg") == 3
            assert '<dd id="lost">2</dd>' in shown.stdout
            assert '<dd id="step">100</dd>' in shown.stdout
    assert picture.stat().st_size > 20_000
