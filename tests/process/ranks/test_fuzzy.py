"""Bases that several ranks leave in parts, over gloo and with keepers: killed, resumed, and trained
to the end with the bits of a training that nobody disturbed (``docs/design/multistep.md``)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.run.open_base import open_ranks
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from tests.support.keepers import end_keepers
from tests.support.logged import document
from tests.support.ranks.multistep import STEPS, Job, check_resumed, over, report, wanted
from tests.support.ranks.parallel import LAYOUTS
from tests.support.ranks.trainings import at, compare, steps_of
from tests.support.world import flip

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    end_keepers(tmp_path)


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.getbasetemp()
    return lambda layout: wanted(layout, folder)


def left(parts: int = 3, *, overlap: bool = True, **options: Any) -> dict[str, Any]:
    """Options of bases that stay as they were captured."""
    found = over(parts, overlap=overlap, **options)
    return {**found, "method": {**found["method"], "rebuild": "recovery"}}


def in_parts(job: Job, step: int) -> list[bool]:
    """By rank: whether its files of a base are of several updates."""
    filesystem = PosixFileSystem()
    (base,) = [one for one in scan_run(filesystem, job.path).bases if one.id.step == step]
    with open_ranks(filesystem, base) as opened:
        return [one.redo is not None for one in opened]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_killed_within_a_base_and_resumed(job: Job, undisturbed: Any, layout: str) -> None:
    """The one before is there, and made whole by all ranks; bases that come behind it, too."""
    before = undisturbed(layout)
    lives = {"DOES": json.dumps({5: "wait"})}
    said = job.killed(layout, left(), 1, STEPS, lives, {**lives, "DIES": "1 7 before_update"})
    assert compare(said, before) == 0
    assert job.committed() == {4}
    assert in_parts(job, 4) == [True, True]
    said = job.train(layout, left())
    assert compare(said, before) == 4
    assert [one["abandoned"] for one in report(said)] == [0, 0]
    assert in_parts(job, 8) == [True, True]
    check_resumed(job, layout, 8, before)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_a_training_of_every_row_is_resumed(job: Job, layout: str) -> None:
    nothing = [{"DOES": "{}"}] * LAYOUTS[layout].ranks
    before = steps_of(job.ended(layout, None, STEPS + 2, *nothing))
    job.ended(layout, left(), STEPS + 1, *nothing)
    assert job.committed() == {4, 8}
    assert any(in_parts(job, 8))
    said = job.ended(layout, {"method": "lazy"}, STEPS + 2, *nothing)
    assert compare(said, before) == 8


@pytest.mark.parametrize(
    ("layout", "world", "other", "others"),
    [
        ("fsdp", 2, "fsdp", 3),
        ("fsdp", 2, "one", 1),
        ("ddp", 2, "ddp", 3),
        ("zero", 2, "zero", 3),
        ("one", 1, "ddp", 2),
    ],
)
def test_another_number_of_ranks_goes_on(
    job: Job, layout: str, world: int, other: str, others: int
) -> None:
    before = at(job.to_the_end(layout, left(), world=world, last=4, whole=True), 4)
    assert in_parts(job, 4) == [True] * world
    said = job.to_the_end(other, {"method": "lazy"}, world=others, last=5, whole=True)
    assert [lines[0]["resumed"] for lines in said] == [4] * others
    assert at(said, 4) == before


@pytest.mark.parametrize("place", ["window.after_assemble", "capture.after_captured"])
def test_killed_behind_the_last_mark_of_a_base(job: Job, undisturbed: Any, place: str) -> None:
    """Whether the other rank had told its keeper, too, is a matter of luck."""
    before = undisturbed("ddp")
    dies = {"DOES": "{}", "EVERSTEP_FAILPOINTS": f"{place}=kill:1"}
    job.killed("ddp", left(), 1, STEPS, {"DOES": "{}"}, dies)
    said = job.train("ddp", left())
    assert compare(said, before) in (0, 4)
    check_resumed(job, "ddp", 8, before)


def test_without_the_gradients_of_one_rank_it_is_no_base(job: Job, undisturbed: Any) -> None:
    """The keeper of one rank dies before it has written its part: no rank has that base, and all
    the next."""
    dies = {"DOES": json.dumps({5: "lose"}), "EVERSTEP_FAILPOINTS": "rebuild.before=kill:1"}
    said = job.ended("ddp", left(), STEPS + 1, {"DOES": "{}"}, dies)
    assert job.committed() == {8}
    assert [one["abandoned"] for one in report(said)] == [0, 0]
    check_resumed(job, "ddp", 8, undisturbed("ddp"))


def test_a_rank_whose_window_is_void_takes_its_part_in_one_step(job: Job, undisturbed: Any) -> None:
    said = job.train("ddp", left(every=4), {}, {5: "spoil"}, last=7)
    assert job.committed() == {6}
    assert [one["abandoned"] for one in report(said)] == [0, 1]
    assert in_parts(job, 6) == [True, False]
    check_resumed(job, "ddp", 6, undisturbed("ddp"))


def test_damaged_gradients_of_one_rank_take_all_back(job: Job, undisturbed: Any) -> None:
    before = undisturbed("ddp")
    job.train("ddp", left())
    assert job.committed() >= {4, 8}
    redo = sorted((job.path / "timeline-00001/base/000000000008").glob("rank-00001*.safetensors"))
    flip(redo[-1], redo[-1].stat().st_size // 2)
    said = job.train("ddp", {"method": "lazy"}, last=6)
    assert compare(said, before) == 4


def test_a_copy_in_another_place_is_made_whole(job: Job, undisturbed: Any, tmp_path: Path) -> None:
    """With its gradients; the folder is gone."""
    tiers = [str(tmp_path / "store")]
    job.train("ddp", left(tiers=tiers))
    job.kill_keepers()
    shutil.rmtree(job.path)
    said = job.train("ddp", {"method": "lazy", "tiers": tiers}, last=STEPS + 1)
    assert compare(said, undisturbed("ddp")) == 8


def test_commands_know_such_a_base(job: Job, tmp_path: Path) -> None:
    """What they restore is what one process has that goes on from it."""
    before = at(job.to_the_end("ddp", left(), last=4, whole=True), 4)
    assert in_parts(job, 4) == [True, True]
    assert document("verify", job.path)["ok"]
    document("restore", job.path, "--step", 4, "--out", tmp_path / "new" / "run")
    alone = Job(tmp_path / "new")
    said = alone.to_the_end("one", {"method": "lazy"}, world=1, last=5, whole=True)
    assert said[0][0]["resumed"] == 4
    assert at(said, 4) == before
