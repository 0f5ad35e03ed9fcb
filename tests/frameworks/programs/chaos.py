"""Run another program under ckpt-chaos: ``chaos.py PROGRAM FOLDER``.

The run goes into the folder; what the program records goes beside it, out of sight. It says from
which step it has resumed, and writes ``final.json``, which two trainings that end in the same bits
have in common.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

program, folder = sys.argv[1], Path(sys.argv[2])
record = folder.with_name("record")
os.environ.update(RUN=str(folder / "run"), OUT=str(record), KILL_AT="")
os.environ.setdefault("METHOD", "logged")
sys.argv[1:] = []
runpy.run_path(str(Path(__file__).with_name(f"{program}.py")), run_name="__main__")
entries = [json.loads(line) for line in (record / "record.jsonl").read_text().splitlines()]
recoveries = [one["recovery"] for one in entries if "recovery" in one]
print(f"resumed from step {recoveries[-1]['step']}")
(folder / "final.json").write_text(json.dumps(entries[-1]["final"], sort_keys=True))
