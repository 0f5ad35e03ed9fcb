"""Ranks that are processes and train on compressed gradients, whose keepers follow their logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.keepers import end_keepers
from tests.support.ranks.log_processes import came_back, undisturbed
from tests.support.ranks.processes import STEPS
from tests.support.ranks.replica_processes import (
    Made,
    change,
    committed,
    followed,
    made,
    replicas_follow,
)
from tests.support.ranks.trainings import Run, at, compare, steps_of

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


def test_replicas_of_shards_train_on_compressed_gradients(tmp_path: Path) -> None:
    """Replicas stay alike, and all of them come back to the last step, residuals and all."""
    layout, options = "hsdp_topk", {"method": "lowdiff"}
    (tmp_path / "alike").mkdir()
    said = Run(tmp_path / "alike").to_the_end(layout, None, world=4, last=4, whole=True)
    assert at(said, 4), "torch puts the same tensors together in each replica"
    run = Run(tmp_path)
    wanted = steps_of(run.to_the_end(layout, None, world=4))
    try:
        dies = {"DIES": "1 5 after_step"}
        assert compare(run.until_killed(layout, options, 1, dies, world=4), wanted) == 0
        assert compare(run.to_the_end(layout, options, world=4), wanted) in (4, 5)
    finally:
        end_keepers(tmp_path)
