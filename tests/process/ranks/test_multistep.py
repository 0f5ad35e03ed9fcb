"""Bases over several steps of several ranks (``docs/design/multistep.md``): killed, resumed, and
trained to the end
with the bits of a training that nobody disturbed, whatever becomes of one rank's part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.errors import KeeperError
from everstep.testing import inspect
from everstep.trainer.multistep.window import EndTogether
from tests.support.keepers import end_keepers
from tests.support.ranks.multistep import STEPS, Does, Job, check_resumed, over, report, wanted
from tests.support.ranks.parallel import LAYOUTS
from tests.support.ranks.together import bases, on_all, resume, train, trainings
from tests.support.ranks.trainings import at, compare, steps_of
from tests.support.trainers import finish_trainer, start_trainer

_SOON_S = 90.0  # long before ranks stop waiting for each other


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    end_keepers(tmp_path)


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.getbasetemp()
    return lambda layout: wanted(layout, folder)


@pytest.mark.parametrize(
    ("layout", "overlap"),
    [
        ("ddp", True),
        pytest.param("ddp", False, marks=pytest.mark.slow),
        pytest.param("fsdp", False, marks=pytest.mark.slow),
        pytest.param("fsdp", True, marks=pytest.mark.slow),
        pytest.param("fsdp_low", True, marks=pytest.mark.slow),
        pytest.param("zero", False, marks=pytest.mark.slow),
        pytest.param("zero", True, marks=pytest.mark.slow),
        pytest.param("tp", True, marks=pytest.mark.slow),
        pytest.param("pp", True, marks=pytest.mark.slow),
        pytest.param("pp", 3, marks=pytest.mark.slow),
        pytest.param("zero", 3, marks=pytest.mark.slow),
    ],
)
def test_killed_within_a_base_and_resumed(
    job: Job, undisturbed: Any, layout: str, overlap: int
) -> None:
    before = undisturbed(layout)
    options = over(overlap=overlap)
    dies = {"DIES": "1 7 before_update", "DOES": json.dumps({5: "wait"})}
    lives = {"DOES": json.dumps({5: "wait"})}
    said = job.killed(layout, options, 1, STEPS, lives, dies)
    assert compare(said, before) == 0
    assert job.committed() == {4}
    said = job.train(layout, options)
    assert compare(said, before) == 4
    assert [one["windows"] for one in report(said)] == [1, 1]
    assert [one["abandoned"] for one in report(said)] == [0, 0]
    check_resumed(job, layout, 8, before)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp_low", "zero", "tp", "pp"])
def test_killed_within_a_base_beside_a_log(job: Job, undisturbed: Any, layout: str) -> None:
    """The records of the log bring the parts to one step, and every step comes back."""
    before = undisturbed(layout)
    options = over()
    options["method"]["log"] = "dense"
    dies = {"DIES": "1 7 before_update", "DOES": json.dumps({5: "wait"})}
    said = job.killed(layout, options, 1, STEPS, {"DOES": json.dumps({5: "wait"})}, dies)
    assert compare(said, before) == 0
    assert {1, 4} <= job.committed()
    said = job.train(layout, options)
    assert compare(said, before) == 6
    assert [one["abandoned"] for one in report(said)] == [0, 0]
    check_resumed(job, layout, 8, before)


@pytest.mark.slow
def test_a_log_with_a_hole_on_one_rank_ends_the_base_on_all(job: Job, undisturbed: Any) -> None:
    """At step 5, before all parts are captured: the log leads no further than step 3."""
    layout = "fsdp"
    options = over(5, every=3, on_failure="warn")
    options["method"]["log"] = "dense"
    said = job.train(layout, options, {}, {3: "hole"}, last=8)
    assert job.committed() == {1, 5, 8}
    assert [one["abandoned"] for one in report(said)] == [0, 1]
    check_resumed(job, layout, 8, undisturbed(layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "dies", "step"),
    [
        # In the step after wait(), which has ended a base: that base does not lead beyond it.
        ({4: "wait,hole"}, 7, 6),
        # In the very step at which a base is due: the ranks hear of it a step later.
        ({2: "hole"}, 6, 5),
    ],
    ids=["after wait", "when due"],
)
def test_a_hole_is_not_forgotten(
    job: Job, undisturbed: Any, does: dict[int, str], dies: int, step: int
) -> None:
    before = undisturbed("fsdp")
    options = over(5, every=3, on_failure="warn")
    options["method"]["log"] = "dense"
    both = {at: "wait" for at, what in does.items() if "wait" in what}
    environments = [
        {"DOES": json.dumps(both)},
        {"DOES": json.dumps(does), "DIES": f"1 {dies} before_update"},
    ]
    job.killed("fsdp", options, 1, STEPS, *environments)
    said = job.train("fsdp", {"method": "logged"}, last=STEPS)
    assert compare(said, before) == step


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_a_training_of_every_row_is_resumed(job: Job, layout: str) -> None:
    nothing = [{"DOES": "{}"}] * LAYOUTS[layout].ranks
    before = steps_of(job.ended(layout, None, STEPS + 2, *nothing))
    said = job.ended(layout, over(overlap=True), STEPS + 1, *nothing)
    assert job.committed() == {4, 8}
    assert [one["abandoned"] for one in report(said)] == [0] * len(nothing)
    assert any(one["parts"] == 3 for one in report(said))
    said = job.ended(layout, {"method": "lazy"}, STEPS + 2, *nothing)
    assert compare(said, before) == 8


@pytest.mark.slow
@pytest.mark.parametrize("rebuild", ["keeper", "recovery"])
def test_what_others_update_is_captured_at_the_last_step(job: Job, rebuild: str) -> None:
    """On disks of their own ranks write it, too."""
    disks = [{"DISK": f"-{rank}", "DOES": "{}"} for rank in range(2)]
    before = steps_of(job.ended("zero", None, STEPS + 2, *disks))
    options = over(overlap=True)
    options["method"]["rebuild"] = rebuild
    said = job.ended("zero", options, STEPS + 1, *disks)
    assert [(one["parts"], one["windows"], one["abandoned"]) for one in report(said)] == [
        (3, 2, 0)
    ] * 2
    end_keepers(job.path.parent)
    said = job.ended("zero", {"method": "lazy"}, STEPS + 2, *disks)
    assert compare(said, before) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "world", "other", "others"),
    [
        ("fsdp", 2, "fsdp", 3),
        ("fsdp", 2, "one", 1),
        ("ddp", 2, "ddp", 3),
        ("hsdp", 4, "fsdp", 2),
        ("zero", 2, "zero", 3),
        ("zero", 3, "ddp", 2),
    ],
)
def test_another_number_of_ranks_goes_on(
    job: Job, layout: str, world: int, other: str, others: int
) -> None:
    """Counters that several ranks write are found once."""
    last = 4
    before = at(job.to_the_end(layout, over(), world=world, last=last, whole=True), last)
    assert last in job.committed()
    options = {"method": "lazy"}
    said = job.to_the_end(other, options, world=others, last=last + 1, whole=True)
    assert [lines[0]["resumed"] for lines in said] == [last] * others
    assert at(said, last) == before


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "zero"])
@pytest.mark.parametrize("place", ["window.after_assemble", "capture.after_captured"])
def test_killed_behind_the_last_mark_of_a_base(
    job: Job, undisturbed: Any, layout: str, place: str
) -> None:
    """Whether the other rank had told its keeper, too, is a matter of luck."""
    before = undisturbed(layout)
    dies = {"DOES": "{}", "EVERSTEP_FAILPOINTS": f"{place}=kill:1"}
    job.killed(layout, over(), 1, STEPS, {"DOES": "{}"}, dies)
    said = job.train(layout, over())
    assert compare(said, before) in (0, 4)
    check_resumed(job, layout, 8, before)


@pytest.mark.slow
@pytest.mark.parametrize("does", ["kill", "lose"])
def test_a_keeper_that_is_lost_is_replaced(job: Job, undisturbed: Any, does: str) -> None:
    """Within the steps of a base its rank takes its part in one step; while it makes one whole, no
    rank has that one, and all the next."""
    dies = {"DOES": json.dumps({3: does} if does == "kill" else {5: does})}
    if does == "lose":
        dies["EVERSTEP_FAILPOINTS"] = "rebuild.before=kill:1"
    said = job.ended("ddp", over(), STEPS + 1, {"DOES": "{}"}, dies)
    assert job.committed() == ({4, 8} if does == "kill" else {8})
    assert [one["abandoned"] for one in report(said)] == [0, int(does == "kill")]
    check_resumed(job, "ddp", 8, undisturbed("ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("does", ["spoil", pytest.param("tear", marks=pytest.mark.slow)])
def test_a_rank_whose_window_is_void_takes_its_part_in_one_step(
    job: Job, undisturbed: Any, does: str
) -> None:
    """And no other rank hears of it: there is a base of the step that all had agreed on. What is
    torn last is known by then, too, and raised nowhere."""
    options = over(overlap=True, every=4, on_failure="raise" if does == "tear" else "warn")
    said = job.train("ddp", options, {}, {5: does}, last=7)
    assert job.committed() == {6}
    assert [one["windows"] for one in report(said)] == [1, 1]
    assert [one["abandoned"] for one in report(said)] == [0, 1]
    check_resumed(job, "ddp", 6, undisturbed("ddp"))


@pytest.mark.slow
def test_a_rank_that_computes_otherwise_than_when_it_began_takes_its_part_in_one_step(
    job: Job, undisturbed: Any
) -> None:
    """Its updates could not be repeated bit for bit: no window is begun there."""
    said = job.train("ddp", over(every=4, on_failure="raise"), {}, {1: "flush"}, last=7)
    assert job.committed() == {6}
    assert [one["windows"] for one in report(said)] == [1, 0]
    assert [one["abandoned"] for one in report(said)] == [0, 0]
    check_resumed(job, "ddp", 6, undisturbed("ddp"))


@pytest.mark.parametrize(
    ("last", "draws", "step"),
    [
        pytest.param(6, True, 4, marks=pytest.mark.slow),
        pytest.param(6, False, 6, marks=pytest.mark.slow),
        pytest.param(8, False, 8, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_want_different_parts_end_at_one_step(
    job: Job, undisturbed: Any, last: int, draws: bool, step: int
) -> None:
    """A base is due at step 2: rank 1 begins there, and rank 0 at step 3, and both end at step 4.
    One is due at step 6, which would end at 8: when training ends before, all end it there, begun
    or not. Where one rank is not at that step any more, none does, and nobody has failed."""
    own: tuple[dict[str, Any], ...] = ({"parts": 2}, {"parts": 3})
    ends: Does = {last: "draw"} if draws else {}
    said = job.train("ddp", over(on_failure="raise"), ends, {}, last=last, methods=own)
    assert job.committed() == {4, step}
    assert [one["abandoned"] for one in report(said)] == [0, int(draws)]
    assert [one["bases"][0]["parts"] for one in report(said)] == [2, 3]
    check_resumed(job, "ddp", step, undisturbed("ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("does", ["save", "wait"])
def test_all_ranks_end_a_base_where_they_call_for_it(job: Job, undisturbed: Any, does: str) -> None:
    """The next is due at step 4, and ends at 6."""
    both: Does = {3: does}
    said = job.train("ddp", over(on_failure="raise"), both, both, last=7)
    assert job.committed() == {3, 6}
    assert [one["windows"] for one in report(said)] == [2, 2]
    check_resumed(job, "ddp", 6, undisturbed("ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero"])
def test_all_ranks_go_back_within_a_base(job: Job, undisturbed: Any, layout: str) -> None:
    """From step 7 to 4; what they train on is steps 5 to 7 once more, and a base is due at 6."""
    both: Does = {5: "wait", 7: "rewind 4"}
    before = undisturbed(layout)
    said = job.train(layout, over(on_failure="raise"), both, both, last=10)
    for rank, steps in enumerate(steps_of(said)):
        assert [steps[at] for at in (8, 9, 10)] == [before[rank][at] for at in (5, 6, 7)]
    assert [one["windows"] for one in report(said)] == [3, 3]
    assert [one["abandoned"] for one in report(said)] == [1, 1]
    check_resumed(job, layout, 7, before)


@pytest.mark.slow
def test_an_error_within_a_base_leaves_nobody_waiting(job: Job) -> None:
    """Not for what the others would say, nor for a base that they do not take."""
    ranks = job.start("ddp", 2, STEPS, over(), {}, {"DOES": json.dumps({3: "raise"})})
    ended = [finish_trainer(one, _SOON_S) for one in ranks]
    assert all(status == 1 for status, _, _ in ended), ended
    assert "planted" in ended[1][2]
    assert job.committed() == set()


@pytest.mark.slow
def test_a_base_of_which_one_part_is_not_exact_is_not(job: Job) -> None:
    job.train("ddp", over(on_failure="raise"), {}, {1: "doubt"}, last=5)
    assert job.committed() == {4}
    said = job.train("ddp", {"method": "lazy"}, last=5)
    assert [lines[0]["resumed"] for lines in said] == [4, 4]
    assert [lines[0]["exact"] for lines in said] == [False, False]


@pytest.mark.slow
def test_a_rank_whose_step_fails_where_a_base_begins_has_agreed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a caller that goes on ends it with the others."""
    agree = EndTogether.agree  # the model is too small for 3 parts on a rank
    monkeypatch.setattr(EndTogether, "agree", lambda end, step, _: agree(end, step, 3))
    path, method = tmp_path / "run", everstep.Method(base="multistep")
    options = {"method": method, "every": 2, "keeper": everstep.KeeperOptions()}
    try:
        with trainings(path, path, **options) as ranks:
            resume(ranks)
            train(ranks, 1)
            inspect(ranks[1].ckpt).channel.post(KeeperError("of a test"))

            def fails() -> None:
                with pytest.raises(KeeperError, match="of a test"):
                    ranks[1].train(1)

            on_all(lambda: ranks[0].train(1), fails)
            train(ranks, 2)
            on_all(*(lambda one=one: one.ckpt.wait(60) for one in ranks))  # type: ignore[misc]
            assert set(bases(path)) == {4}
            on_all(*(one.ckpt.close for one in ranks))
    finally:
        end_keepers(tmp_path)


@pytest.mark.slow
def test_the_first_base_of_several_ranks_measures_the_link(tmp_path: Path) -> None:
    """It has one part; without its measurement so would have all bases after it."""
    path = tmp_path / "run"
    method = everstep.Method(base="multistep", parts="auto")
    options = {"method": method, "every": 2, "keeper": everstep.KeeperOptions()}
    try:
        with trainings(path, path, **options) as ranks:
            resume(ranks)
            train(ranks, 2)
            for rank in ranks:
                assert inspect(rank.ckpt).multistep.planner.timed is not None
            on_all(*(one.ckpt.close for one in ranks))
    finally:
        end_keepers(tmp_path)


PRESET = """
import sys, torch, torch.distributed as dist
import everstep
from everstep.seams import Seams
from everstep.testing import EmulatedLink
from torch import nn

run, method, rank, meet = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
trained = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
seams = Seams(lane=lambda: EmulatedLink(40e6))
state = {"model": trained, "optimizer": optimizer}
with everstep.Checkpointer(run, state, method=method, every=10, seams=seams) as ckpt:
    ckpt.resume()
    for _ in range(100):
        trained(torch.randn(64, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
    ckpt.wait()
    print(ckpt.stats().multistep.windows)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gockpt", "gockpt_o"])
def test_the_presets_take_bases_over_several_steps(method: str, tmp_path: Path) -> None:
    """Behind a slow link the first bases measure it, and the others are spread over steps."""
    run, meet = str(tmp_path / "run"), str(tmp_path / "meet")
    ranks = [start_trainer(PRESET, run, method, str(rank), meet) for rank in range(2)]
    for one in ranks:
        status, out, err = finish_trainer(one, _SOON_S)
        assert status == 0, err
        assert int(out) >= 3
    end_keepers(tmp_path)
