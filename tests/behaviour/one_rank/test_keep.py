"""Policies of ``keep=``: the newest bases, one every so many steps, the best, the pinned ones."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep import Checkpointer, KeeperOptions, LogOptions
from everstep.commit.lineage import BaseId, Branch
from everstep.commit.retention import BestRule, KeepRules
from everstep.errors import OptionError
from everstep.format.names import ANNOTATIONS, PIN_RECORD, base_dir
from everstep.format.records import PinRecord
from everstep.keeper.retain.retention import delete_base
from everstep.options import KeepBest, KeepEvery, KeepNewest
from everstep.run.scan import scan_base, scan_run
from everstep.seams import PosixFileSystem
from tests.support.command import document, invoke
from tests.support.copying import wait_for
from tests.support.ranks.together import folders, on_all, resume, save, train, trainings

FILES = PosixFileSystem()
ONE = {1: Branch(1, None, 0)}
TREE = {1: Branch(1, None, 0), 2: Branch(2, 1, 20)}


class Training:
    """A model that is trained without randomness."""

    def __init__(self, run: Path, **options: Any) -> None:
        self.model = torch.nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            self.model.weight.copy_(torch.arange(6.0).reshape(2, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        state = {"model": self.model, "optimizer": self.optimizer}
        self.ckpt = Checkpointer(run, state, **{"method": "sync", "every": 1, **options})
        self.step = self.ckpt.resume().step

    def train(self, *losses: float) -> None:
        for loss in losses:
            self.step += 1
            self.model.weight.grad = torch.full_like(self.model.weight, 0.1 * self.step)
            self.optimizer.step()
            self.ckpt.step(metrics={"loss": loss})

    @property
    def weight(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


def steps_of(run: Path) -> list[int]:
    return sorted(base.id.step for base in scan_run(FILES, run).bases if base.manifest is not None)


# --- The rules --------------------------------------------------------------------------


def kept(rules: KeepRules, losses: dict[BaseId, float | None], **more: Any) -> set[tuple[int, int]]:
    metrics = {base: {} if loss is None else {"loss": loss} for base, loss in losses.items()}
    found = rules.kept(metrics, more.get("pinned", ()), more.get("branches", ONE))
    return {(base.timeline, base.step) for base in found}


def of(steps: list[int]) -> dict[BaseId, float | None]:
    return {BaseId(1, step): None for step in steps}


def test_the_first_base_at_or_after_each_multiple_stays() -> None:
    rules = KeepRules(1, every_steps=(100,))
    assert kept(rules, of([30, 60, 90, 120, 150, 180, 200, 230])) == {(1, 120), (1, 200)}
    assert kept(rules, of([0, 30])) == {(1, 0)}


def test_a_base_that_stays_for_ever_is_still_the_one_after_later_ones() -> None:
    rules = KeepRules(1, every_steps=(100,))
    there: list[int] = []
    for step in range(7, 2000, 7):
        before = {base for _, base in kept(rules, of(there))}
        there = sorted({*before, *there[-1:], step})
        assert before <= {base for _, base in kept(rules, of(there))}
    assert len(kept(rules, of(there))) == 1999 // 100


def test_the_best_stay_and_a_tie_goes_to_the_newest() -> None:
    losses = {BaseId(1, 1): 0.5, BaseId(1, 2): 0.2, BaseId(1, 3): 0.2, BaseId(1, 4): None}
    assert kept(KeepRules(1, best=(BestRule("loss", 1),)), losses) == {(1, 3)}
    assert kept(KeepRules(1, best=(BestRule("loss", 2),)), losses) == {(1, 2), (1, 3)}
    assert kept(KeepRules(1, best=(BestRule("loss", 1, largest=True),)), losses) == {(1, 1)}
    assert kept(KeepRules(1, best=(BestRule("accuracy", 2),)), losses) == set()


def test_abandoned_branches_count_only_where_pinned() -> None:
    losses = {BaseId(1, 10): 0.9, BaseId(1, 30): 0.1, BaseId(2, 30): 0.3}
    rules = KeepRules(1, every_steps=(30,), best=(BestRule("loss", 1),))
    assert kept(rules, losses, branches=TREE) == {(2, 30)}
    pinned = {BaseId(1, 30)}
    assert kept(rules, losses, branches=TREE, pinned=pinned) == {(1, 30), (2, 30)}


# --- What a user may give ---------------------------------------------------------------


def test_policies_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = [KeepNewest(2), KeepEvery(1000), KeepBest(1, "loss")]
    training = Training(tmp_path / "run", keep=policies)
    assert "keep 2, one every 1000 steps, best 1 by loss" in repr(training.ckpt)
    assert "keep 2, one every 1000 steps, best 1 by loss" in capsys.readouterr().err
    training.ckpt.close()


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        (0, "whole number"),
        ("3", "policies"),
        ([3], "policies"),
        ([KeepNewest(1), KeepNewest(2)], "only one"),
    ],
)
def test_what_is_no_policy(tmp_path: Path, keep: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Training(tmp_path / "run", keep=keep)
    assert not (tmp_path / "run").exists()


def test_policies_check_their_fields() -> None:
    for make in (
        lambda: KeepNewest(0),
        lambda: KeepEvery(-1),
        lambda: KeepBest(1, ""),
        lambda: KeepBest(1, "loss", "smallest"),
    ):
        with pytest.raises(OptionError):
            make()


def test_bases_without_a_limit_do_not_fit_into_a_budget(tmp_path: Path) -> None:
    budget = everstep.Budget(disk_bytes=10**9)
    with pytest.raises(OptionError, match="KeepEvery"):
        Training(tmp_path / "run", keep=KeepEvery(10), budget=budget)


def test_policies_of_a_configuration(tmp_path: Path) -> None:
    config = {
        "path": tmp_path / "run",
        "keep": [{"newest": 2}, {"every": 50}, {"best": 1, "metric": "loss", "mode": "max"}],
    }
    with Checkpointer.from_config(config, {"x": torch.zeros(1)}, method="sync") as ckpt:
        assert "keep 2, one every 50 steps, best 1 by loss" in repr(ckpt)
    for wrong in ({"best": 1}, {"newest": 1, "every": 2}, {"latest": 1}, [{"newest": 1}, {}]):
        with pytest.raises(OptionError, match="keep"):
            Checkpointer.from_config({**config, "keep": wrong}, {"x": torch.zeros(1)})


# --- What stays on disk -----------------------------------------------------------------

METHODS = [
    pytest.param({"method": "sync"}, id="sync"),
    pytest.param({"method": "lazy"}, id="lazy, a keeper process"),
    pytest.param(
        {"method": "logged", "keeper": KeeperOptions(process=False)}, id="logged, a thread"
    ),
]


@pytest.mark.parametrize("options", METHODS)
def test_the_best_base_stays_and_can_be_gone_back_to(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    training = Training(run, keep=[KeepNewest(2), KeepBest(1, "loss")], **options)
    training.train(0.9, 0.1)
    best = training.weight
    training.ckpt.wait()
    for _ in range(4):
        training.train(0.5)
        training.ckpt.wait()
    training.ckpt.close()
    assert steps_of(run) == [2, 5, 6]
    again = Training(run, **options)
    assert again.ckpt.rewind(2).step == 2
    assert torch.equal(again.weight, best)
    again.ckpt.close()


def test_one_base_every_so_many_steps_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run, keep=[KeepNewest(1), KeepEvery(4)], every=3)
    training.train(*([0.5] * 18))
    training.ckpt.close()
    assert steps_of(run) == [6, 9, 12, 18]


def test_a_metric_that_is_known_after_the_base_counts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run, keep=[KeepNewest(1), KeepBest(1, "accuracy", "max")])
    for accuracy in (0.3, 0.8, 0.5, 0.4):
        training.train(0.5)
        training.ckpt.save(metrics={"accuracy": accuracy}, note=f"at {accuracy}")
    training.ckpt.close()
    assert steps_of(run) == [2, 4]
    found = scan_base(FILES, run, BaseId(1, 2)).annotations
    assert found is not None
    assert (found.metrics, found.note) == ({"loss": 0.5, "accuracy": 0.8}, "at 0.8")


def test_the_log_after_a_base_that_only_a_policy_keeps_goes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = LogOptions(to="disk", batch_steps=1, audit=False)
    keep = [KeepNewest(2), KeepBest(1, "loss")]
    options = {"method": "logged", "log": log, "keep": keep, "every": 4}
    training = Training(run, keeper=KeeperOptions(process=False), **options)
    for step in range(1, 25):
        training.train(0.1 if step == 4 else 0.5)
        training.ckpt.wait()
    training.ckpt.close()
    assert steps_of(run) == [4, 20, 24]
    logged = sorted(int(one.name.split("-")[1]) for one in (run / "timeline-00001/log").iterdir())
    assert logged == [21, 22, 23, 24], "the steps after the oldest of the newest bases"


def test_history_still_leads_from_a_base_that_a_policy_keeps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = LogOptions(to="disk", batch_steps=1, audit=False, history="all")
    keep = [KeepNewest(2), KeepBest(1, "loss")]
    options = {"method": "logged", "log": log, "keep": keep, "every": 4}
    training = Training(run, keeper=KeeperOptions(process=False), **options)
    at: dict[int, torch.Tensor] = {}
    for step in range(1, 25):
        training.train(0.1 if step == 8 else 0.5)
        training.ckpt.wait()
        at[step] = training.weight
    for step in (6, 9, 15, 23):
        assert training.ckpt.rewind(step).step == step
        assert torch.equal(training.weight, at[step])
    training.ckpt.close()


def test_what_is_durable_has_its_metrics_with_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run, method="lazy", keep=KeepBest(1, "loss"))
    training.train(0.25)
    made = training.ckpt.save(note="kept")
    made.durable.result(20)
    found = scan_base(FILES, run, BaseId(1, 1)).annotations
    assert found is not None
    assert found.metrics == {"loss": 0.25}
    training.ckpt.close()
    assert scan_base(FILES, run, BaseId(1, 1)).annotations.note == "kept"  # type: ignore[union-attr]


def test_a_damaged_annotation_does_not_concern_the_base(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run)
    training.train(0.5)
    training.ckpt.close()
    path = base_dir(run, 1, 1) / ANNOTATIONS
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2] ^= 1
    Path(path).write_bytes(data)
    assert scan_base(FILES, run, BaseId(1, 1)).annotations is None
    assert invoke("verify", run).exit_code == 0
    again = Training(run)
    assert again.step == 1
    again.ckpt.close()


@pytest.mark.parametrize(
    ("metrics", "says"),
    [({"loss": "low"}, "loss"), ({1: 0.5}, "name"), (0.5, "mapping"), ({"x": torch.ones(2)}, "x")],
)
def test_what_is_no_metric_ends_the_step_and_is_said(
    tmp_path: Path, metrics: Any, says: str
) -> None:
    training = Training(tmp_path / "run")
    training.optimizer.step()
    with pytest.raises(OptionError, match=says):
        training.ckpt.step(metrics=metrics)
    assert repr(training.ckpt).count("at step 1") == 1
    training.ckpt.close()
    assert steps_of(tmp_path / "run") == [1]


def test_tensors_are_numbers_and_what_is_not_finite_is_left_out(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run)
    training.optimizer.step()
    training.ckpt.step(metrics={"loss": torch.tensor(0.5), "bad": math.nan, "n": 3})
    training.ckpt.close()
    found = scan_base(FILES, run, BaseId(1, 1)).annotations
    assert found is not None
    assert found.metrics == {"loss": 0.5, "n": 3.0}


# --- Pins -------------------------------------------------------------------------------


def test_a_pinned_base_stays_until_the_pin_goes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run, keep=1)
    training.train(0.5, 0.5)
    assert invoke("pin", run, "--step", 2, "--note", "for the paper").exit_code == 0
    training.train(0.5, 0.5)
    assert steps_of(run) == [2, 4]
    shown = invoke("ls", run).stdout
    assert "pinned" in shown
    assert "loss 0.5" in shown
    rows = {base["step"]: base for base in document("ls", run)["bases"]}
    assert (rows[2]["pinned"], rows[4]["pinned"]) == (True, False)
    assert rows[2]["metrics"] == {"loss": 0.5}
    assert document("inspect", run, "--step", 2)["pinned"] is True
    refused = invoke("rm", run, "--step", 2)
    assert refused.exit_code == 2
    assert "pinned" in refused.stderr
    assert invoke("pin", run, "--step", 2, "--remove").exit_code == 0
    training.train(0.5)
    training.ckpt.close()
    assert steps_of(run) == [5]


def test_rm_can_be_made_to_delete_a_pinned_base(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run, keep=2)
    training.train(0.5, 0.5)
    training.ckpt.close()
    assert invoke("pin", run, "--step", 1).exit_code == 0
    assert invoke("rm", run, "--step", 1, "--force").exit_code == 0
    assert steps_of(run) == [2]
    assert not base_dir(run, 1, 1).exists()  # type: ignore[attr-defined]


def test_a_pin_that_comes_while_the_base_is_being_deleted_saves_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run, keep=3)
    training.train(0.5, 0.5)
    training.ckpt.close()
    base = scan_base(FILES, run, BaseId(1, 1))

    def pin_it() -> int:
        # Read between the two steps of the deletion.
        path = Path(base.path) / PIN_RECORD
        path.write_bytes(PinRecord(1, 1, "", time.time()).encode())
        return 1

    delete_base(FILES, run, base, None, timeline=1, newest=pin_it)
    after = scan_base(FILES, run, BaseId(1, 1))
    assert (after.status, after.is_pinned) == ("committed", True)
    assert invoke("verify", run).exit_code == 0


def test_what_is_being_deleted_cannot_be_pinned(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run, keep=3)
    training.train(0.5, 0.5)
    training.ckpt.close()
    base = Path(base_dir(run, 1, 1))
    os.rename(base / "manifest.json", base / "manifest.condemned")
    refused = invoke("pin", run, "--step", 1)
    assert refused.exit_code == 2
    assert not (base / PIN_RECORD).exists()
    missing = invoke("pin", run, "--step", 7)
    assert missing.exit_code == 2
    assert "nearest" in missing.stderr or "there are" in missing.stderr


# --- Several ranks, and copies ----------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
def test_ranks_keep_the_best_by_what_rank_0_says(tmp_path: Path, shared: bool) -> None:
    paths = folders(tmp_path, shared)
    keep = [KeepNewest(1), KeepBest(1, "loss")]
    with trainings(*paths, method="sync", every=None, keep=keep) as ranks:
        resume(ranks)
        for loss in (0.5, 0.1, 0.7, 0.3):
            train(ranks, 1)
            on_all(
                *(
                    lambda one=one, given=loss + one.rank: one.ckpt.save(  # type: ignore[misc]
                        metrics={"loss": given}
                    ).durable.result(20)
                    for one in ranks
                )
            )
        train(ranks, 1)
        save(ranks)
        on_all(*(one.ckpt.close for one in ranks))
    for path in paths:
        assert steps_of(path) == [2, 5]
    found = scan_base(FILES, paths[0], BaseId(1, 2)).annotations
    assert found is not None
    assert found.metrics == {"loss": 0.1}


def test_copies_keep_what_the_run_keeps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    place = tmp_path / "copies"
    keep = [KeepNewest(1), KeepBest(1, "loss")]
    training = Training(run, method="lazy", keep=keep, tiers=[str(place)])
    for loss in (0.5, 0.1, 0.7, 0.3):
        training.train(loss)
        training.ckpt.wait()
        copied = Path(base_dir(place, 1, training.step)) / "manifest.json"
        assert wait_for(copied.exists)
    training.ckpt.close()
    assert steps_of(run) == [2, 4]
    assert steps_of(place) == [2, 4]
    record = json.loads(Path(base_dir(place, 1, 2) / ANNOTATIONS).read_bytes())
    assert record["metrics"] == {"loss": 0.1}
