"""Programs and commands of the documents, run as a reader would run them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.trainers import run_trainer

TIMEOUT_S = 120


COMMAND = """
import os, runpy, sys, time
os.chdir(sys.argv[1])
time.tzset()
sys.argv = sys.argv[2:]
runpy.run_module("everstep", run_name="__main__")
"""


def run_command(command: list[str], folder: Path) -> str:
    """Runs ``everstep ...`` in a process that need not load torch first."""
    found = run_trainer(
        COMMAND, str(folder), *command, timeout_s=TIMEOUT_S, COLUMNS="100", TZ="UTC"
    )
    assert found[0] == 0, found[2]
    return found[1]


def run_program(code: str, folder: Path) -> str:
    """Runs a script in a process that need not load torch first."""
    moved = f"import os, time; os.chdir({str(folder)!r}); time.tzset()\n"
    found = run_trainer(moved + code, timeout_s=TIMEOUT_S, COLUMNS="100", TZ="UTC")
    assert found[0] == 0, found[2]
    return found[1]


def masked(text: str) -> list[str]:
    """Lines without what differs from run to run: digits, ids, sizes' units and padding."""
    text = re.sub(r"\b[0-9a-f]{32}\b", "ID", text)
    text = re.sub(r"[0-9][0-9.,:-]*", "#", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]
