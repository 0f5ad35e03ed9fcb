"""Raw figures of a device: without one they are taken of host memory, and say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep_bench import device
from everstep_bench.device import SECTIONS, Device, Row, run

ROOT = Path(__file__).parents[3]


def test_every_section_runs_without_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "_REPEATS", 1)
    rows = run("cpu", tmp_path / "rows.jsonl")
    assert not [row for row in rows if "failed" in row]
    assert "mean nothing" in rows[0]["device"]
    names = list(dict.fromkeys(row["section"] for row in rows))
    assert names == ["machine", *(section.__name__ for section in SECTIONS)]
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row.get("what") for row in written] == [row.get("what") for row in rows]
    assert capsys.readouterr().out == (tmp_path / "rows.jsonl").read_text()


def test_a_section_that_fails_does_not_cost_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: Device) -> Any:
        yield {"what": "first"}
        raise RuntimeError("out of memory")

    def works(device: Device) -> Any:
        yield {"what": "second"}

    monkeypatch.setattr(device, "SECTIONS", (fails, works))
    rows: list[Row] = run("cpu", None)[1:]
    assert "out of memory" in rows[0]["failed"]
    assert rows[1] == {"section": "works", "what": "second"}


@pytest.mark.slow
def test_the_check_of_a_gpu_runs_in_all_its_parts(tmp_path: Path) -> None:
    """On a CPU, with tiny models; of the tests only the list is made."""
    small = {
        "DEVICE": "cpu",
        "REPEATS": "1",
        "LARGE": "200K",
        "SMALL": "200K",
        "STEPS": "200K",
        "ARMS": "lazy",
    }
    env = {**os.environ, **small, "PYTHON": sys.executable, "TESTS": "--collect-only"}
    command = ["sh", str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("status 0") == 6
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"device.jsonl", "step.txt"}
