"""Run another program under ckpt-chaos: ``chaos.py PROGRAM FOLDER``.

The run goes into the folder; what the program records goes beside it, out of sight. It says from
which step it has resumed, and writes ``final.json``, which two trainings that end in the same bits
have in common. Of several ranks the first one writes it, of what all have recorded.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0


def final_of(rank: int) -> Any:
    """Return the final state that a rank has recorded in this start, once it has."""
    path = record / ("record.jsonl" if rank == 0 else f"record-{rank}.jsonl")
    pause = threading.Event()
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and "final" in (last := json.loads(lines[-1])):
            return last["final"]
        pause.wait(0.1)
    raise TimeoutError(f"rank {rank} has recorded no final state")


program, folder = sys.argv[1], Path(sys.argv[2])
record = folder.with_name("record")
os.environ.update(RUN=str(folder / "run"), OUT=str(record), KILL_AT="")
os.environ.setdefault("METHOD", "logged")
sys.argv[1:] = []
runpy.run_path(str(Path(__file__).with_name(f"{program}.py")), run_name="__main__")
name = (
    "record.jsonl" if os.environ.get("RANK", "0") == "0" else f"record-{os.environ['RANK']}.jsonl"
)
entries = [json.loads(line) for line in (record / name).read_text().splitlines()]
recoveries = [one["recovery"] for one in entries if "recovery" in one]
print(f"resumed from step {recoveries[-1]['step']}")
if os.environ.get("RANK", "0") == "0":
    finals = [final_of(rank) for rank in range(int(os.environ.get("WORLD_SIZE", "1")))]
    (folder / "final.json").write_text(json.dumps(finals, sort_keys=True))
# Gloo's threads may abort a process that exits with groups (pytorch/pytorch pull request 179291).
distributed = sys.modules.get("torch.distributed")
if distributed is not None and distributed.is_initialized():
    distributed.destroy_process_group()
