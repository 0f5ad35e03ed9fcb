"""Ranks that are processes and train on compressed gradients, whose keepers follow their logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_log_together_processes import came_back, undisturbed
from tests.unit.test_replica_ranks_processes import (
    Made,
    change,
    committed,
    followed,
    made,
    replicas_follow,
)
from tests.unit.test_together_processes import STEPS

__all__ = ["made", "replicas_follow"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", ["ddp, exchange", "ddp, compressor", "fsdp, compressor"])
def test_keepers_that_apply_compressed_gradients_write_the_bases(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    start = "ckpt = everstep.Checkpointer(run, state, **options)\n"
    follows = 'options["method"] == "lowdiff_plus"'
    method = 'everstep.Method(base="lazy", log="topk", apply="replica")'
    change(monkeypatch, (start, f'if {follows}: options["method"] = {method}\n{start}'))
    expected = undisturbed(how, tmp_path_factory.mktemp("undisturbed"))
    job = followed(made, tmp_path, how)
    job.until_all_die(5)
    assert came_back(job, expected) == 5
    assert STEPS in committed(job)
