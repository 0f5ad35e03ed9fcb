"""ckpt-chaos kills each integration at the file events of its saves, and judges what comes back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.kills import PROGRAMS, ROOT

_TIMEOUT_S = 1500
POINTS = 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "method", "ranks", "crash_rank"),
    [
        ("accelerate_resumable", "logged", 1, 0),
        ("accelerate_resumable", "sync", 1, 0),
        ("accelerate_resumable", "sync", 2, 1),
        ("dcp_loop", "its own", 1, 0),
        ("dcp_loop", "its own", 2, 0),
        ("dcp_loop", "its own", 2, 1),
        ("deepspeed_loop", "logged", 1, 0),
        ("deepspeed_loop", "sync", 2, 0),
        ("fabric_loop", "logged", 1, 0),
        ("fabric_loop", "sync", 1, 0),
        ("fabric_loop", "sync", 2, 0),
        ("lightning_callback", "logged", 1, 0),
        ("lightning_callback", "sync", 1, 0),
        ("lightning_callback", "sync", 2, 1),
        ("trainer_resumable", "logged", 1, 0),
        ("trainer_resumable", "sync", 1, 0),
        ("trainer_resumable", "sync", 2, 0),
    ],
)
def test_every_verdict_is_a_pass(
    program: str, method: str, ranks: int, crash_rank: int, tmp_path: Path
) -> None:
    """As its documentation says: the command once, then killed before and amid file events."""
    command = [sys.executable, str(PROGRAMS / "chaos.py"), program, "{out}"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ckpt_chaos", "run", "--work", str(tmp_path / "work")),
            *("--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/final.json"),
            *("--ranks", str(ranks), "--crash-rank", str(crash_rank)),
            *("--max-points", str(POINTS), "--", *command),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "STAGE": "2",
            "METHOD": method,
        },
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search("HARD_FAIL|SILENT_DIVERGENCE", done.stdout.partition("3/3")[2])
    assert "no crash (control)" in done.stdout
