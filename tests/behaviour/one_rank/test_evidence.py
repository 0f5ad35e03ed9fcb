"""Where a recovery is not exact its evidence says why, whatever the reason is (I9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import everstep
from tests.support.ranks.together import on_all, trainings
from tests.support.world import opened


def resumed(run: Path, state: dict[str, Any], **options: Any) -> everstep.Recovery:
    """Goes on for a step, and leaves a base of it."""
    with opened(run, state, **options) as ckpt:
        found = ckpt.resume(strict=False)
        ckpt.step()
        ckpt.save()
    return found


def test_what_was_left_out_and_what_descends_from_it(run_folder: Path) -> None:
    fresh = resumed(run_folder, {"a": 1, "gone": 2, "lost": 3})
    assert (fresh.exact, fresh.evidence) == (True, "nothing to restore")
    left_out = resumed(run_folder, {"a": 1})
    assert not left_out.exact
    assert left_out.evidence.endswith(
        "; not exact: 'gone' was left out, or may differ: in the checkpoint, not in the state "
        "(and 1 more, see Recovery.mismatched)"
    )
    for timeline in (2, 3):
        found = resumed(run_folder, {"a": 1})
        assert not found.exact
        assert found.evidence.endswith(
            f"; not exact: the base of step {timeline} of timeline {timeline} is marked as not "
            "exact: it was not saved from the complete, exact state of training: 'gone' was left "
            "out, or may differ: in the checkpoint, not in the state (and 1 more, see "
            "Recovery.mismatched)"
        )


def test_what_does_not_come_back_as_it_was(run_folder: Path) -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False)] * 2)
    resumed(run_folder, {"model": model})
    model[1] = nn.Linear(2, 2, bias=False)
    found = resumed(run_folder, {"model": model})
    assert not found.exact
    assert len(found.notes) == 1
    assert found.evidence.endswith(f"; not exact: {found.notes[0]}")


def test_what_could_not_be_saved_as_it_was(run_folder: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(
        lambda module, tree, *_: tree.update({k: v.bfloat16() for k, v in tree.items()})
    )
    resumed(run_folder, {"model": model})
    found = resumed(run_folder, {"model": model})
    assert not found.exact
    assert (
        "not exact: the base of step 1 of timeline 1 is marked as not exact: it was not saved "
        "from the complete, exact state of training"
    ) in found.evidence


def test_the_rank_that_is_the_cause_says_why(tmp_path: Path) -> None:
    """The others say which it is; of a base that is not exact all say whose part of it is not."""
    path = tmp_path / "run"
    for start in range(3):
        with trainings(path, path, method="sync", every=2) as ranks:
            weight = ranks[1].model.weight.detach()  # what was one tensor is two
            ranks[1].model.register_buffer("twin", weight.clone() if start else weight)
            found = on_all(*(one.ckpt.resume for one in ranks))
            on_all(*(lambda one=one: one.train(2) for one in ranks))  # type: ignore[misc]
        if start == 0:
            continue
        assert [one.exact for one in found] == [False, False]
        whys = [one.evidence.split("; not exact: ")[1] for one in found]
        if start == 1:
            said = "the state that rank(s) 1 restored is not exact: see their evidence"
            assert whys == [said, found[1].notes[0]]
        else:
            lineage = "the base of step 4 of timeline 2 (rank(s) 0, 1) is marked as not exact: it "
            assert all(why.startswith(lineage) for why in whys), whys
