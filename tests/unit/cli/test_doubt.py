"""Commands that go by bases which are not what they should be: damaged, or audited and found other
than the log says."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePath

import pytest
import torch

from everstep.format.digests import digest
from everstep.format.names import AUDIT_RECORD, base_dir
from everstep.format.records import AuditRecord
from everstep.restore.offline.audit import audit, pairs
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from tests.support.logged import World, document, edit_base, invoke, opened, rebuilder_of, train
from tests.support.world import flip, forget

STEPS, EVERY = 18, 4


@pytest.fixture
def run(run_folder: Path) -> Path:
    train(run_folder, World(), STEPS, every=EVERY)
    return run_folder


def other(state: object) -> None:
    weight = state.tensors["model/0.weight"]  # type: ignore[attr-defined]
    weight.view(torch.int32).view(-1)[0].bitwise_xor_(1)


def audited(run: Path, step: int) -> None:
    """Puts the record of an audit beside a base, as the keeper's."""
    with rebuilder_of(run) as rebuilder:
        (found,) = [
            audit(rebuilder, pair) for pair in pairs(rebuilder) if pair.after.id.step == step
        ]
    inventory = scan_run(PosixFileSystem(), PurePath(run))
    (base,) = [one for one in inventory.bases if one.id.step == step]
    assert base.manifest is not None
    record = AuditRecord(
        run=inventory.run,
        timeline=1,
        step=step,
        manifest=digest(base.manifest.encode()),
        before=(1, step - EVERY),
        verdict=found.verdict,
        reason="",
        steps=EVERY,
        updates=EVERY,
        entries=found.entries,
        count=len(found.differing),
        differing=found.differing,
        fingerprint={},
        created_unix_s=1.0,
    )
    (Path(base.path) / AUDIT_RECORD).write_bytes(record.encode())


@pytest.mark.thinned(4)
@pytest.mark.parametrize("step", [12, 14, 18])
def test_nothing_behind_an_audit_that_failed_is_called_exact(run: Path, step: int) -> None:
    """By ``restore`` no more than by ``resume()``, and not by whoever goes on from there (I9)."""
    edit_base(run, 12, other)
    audited(run, 12)
    out = run.parent / "out"
    made = document("restore", run, "--step", step, "--out", out)
    assert not made["exact"]
    assert "audit failed" in made["why"]
    with opened(out, World()) as ckpt:
        assert not ckpt.resume().exact
    forget(out)
    with opened(run, World()) as ckpt:
        assert not ckpt.resume(step=step).exact


def test_before_it_is(run: Path) -> None:
    edit_base(run, 12, other)
    audited(run, 12)
    made = document("restore", run, "--step", 10, "--out", run.parent / "out")
    assert made["exact"], made["why"]


def test_a_damaged_base_is_no_reason_to_delete_a_good_one(run: Path) -> None:
    """Of the two the log can be replayed on the good one only; the other one may go."""
    shutil.rmtree(base_dir(run, 1, 1))
    (data,) = Path(base_dir(run, 1, 4)).glob("*.safetensors")
    (entry,) = (
        one
        for one in document("inspect", run, "--step", 4)["entries"]
        if one["name"] == "model/0.weight"
    )
    flip(data, entry["offset"])
    refused = invoke("rm", run, "--step", 8)
    assert refused.exit_code == 2
    assert "only from step 8" in refused.output.replace("\n", " ")
    assert invoke("restore", run, "--step", 10, "--out", run.parent / "out").exit_code == 0
    assert invoke("rm", run, "--step", 4).exit_code == 0
