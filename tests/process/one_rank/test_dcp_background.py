"""``async_save`` in the process that torch starts for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.trainers import ROOT

PROGRAM = """
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from everstep.errors import ForeignDirectoryError, UnsupportedStateError
from everstep.integrations import dcp

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    dist.init_process_group("cpu:gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    in_process = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    for step in (1, 2):  # by the same process
        state = {"x": torch.full((3,), step), "step": step}
        dcp.async_save(state, checkpoint_id=folder / "x", **in_process).result(120)
        found = {"x": torch.zeros(3, dtype=torch.int64), "step": 0}
        dcp.load(found, checkpoint_id=folder / "x")
        assert (found["x"] == step).all() and found["step"] == step
    (folder / "mine").mkdir()
    (folder / "mine" / "file").touch()
    cases = {"mine": ForeignDirectoryError, "y": UnsupportedStateError}
    for name, kind in cases.items():
        state = {"x": {1, Path()}}
        try:
            dcp.async_save(state, checkpoint_id=folder / name, **in_process).result(120)
        except CheckpointException as error:
            (failure, _), = error.failures.values()
            assert type(failure) is kind, failure
            print(failure)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_values_and_errors_come_from_another_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "is not an everstep run folder: it contains 'file'" in done.stdout
    assert "store str(value)" in done.stdout
