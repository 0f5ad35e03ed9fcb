"""Trainings that are spread over ranks in any way: killed, resumed, and trained to the end with the
bits of one that nobody disturbed and that knows of no checkpoint; docs/EXACTNESS.md lists them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.matrix import table
from tests.support.ranks import trainings
from tests.support.ranks.parallel import EVERY, LAYOUTS, WAITS_AT
from tests.support.ranks.trainings import STEPS, Run, Said, at, compare, steps_of

run = trainings.run  # the fixture

IN_A_SAVE = ("save.before_write", "save.before_rename", "save.before_marker", "keeper.after_begin")


def drill(run: Run, layout: str, seed: int, **options: Any) -> Said:
    """Killed twice, at random: ranks alone, then ranks with their keepers while a base is saved.
    Returns what the last start says, which nobody disturbs."""
    world, drawn = LAYOUTS[layout].ranks, random.Random(f"{layout} {seed}")
    wanted = steps_of(run.to_the_end(layout, None))
    assert all(len(steps) == STEPS for steps in wanted)
    assert all(len({repr(digests) for digests in steps.values()}) == STEPS for steps in wanted)

    place = drawn.choice(["before_update", "after_step"])
    victim, step = drawn.randrange(world), drawn.randrange(WAITS_AT + 1, WAITS_AT + 3)
    print(f"{layout}: rank {victim} dies in step {step}, {place}")
    dies = {"DIES": f"{victim} {step} {place}"}
    assert compare(run.until_killed(layout, options, victim, dies), wanted) == 0
    assert EVERY in run.committed(), "all ranks have waited for it"

    in_process = options["method"] == "sync"  # the keeper is in the training process
    points = [point for point in IN_A_SAVE if not in_process or point.startswith("save.")]
    point, victim = drawn.choice(points), drawn.randrange(world)
    print(f"{layout}: rank {victim}'s keeper dies at {point}; it dies in step {STEPS - 1}")
    dies = {"DIES": f"{victim} {STEPS - 1} after_step", "EVERSTEP_FAILPOINTS": f"{point}=kill:2"}
    if in_process:
        dies = {"EVERSTEP_FAILPOINTS": f"{point}=kill"}
    first = compare(run.until_killed(layout, options, victim, dies), wanted)
    assert first >= EVERY, "the newest base that all ranks have written is not lost"
    run.kill_keepers()
    known = max(run.committed())

    said = run.to_the_end(layout, options)
    # A log, or captures between bases, in memory, from which the second job may have gone on, are
    # gone with the keepers.
    in_memory = options["method"] in ("logged", "lowdiff_plus", "checkflow")
    assert compare(said, wanted) >= known >= (EVERY if in_memory else first)
    assert all(STEPS in steps for steps in steps_of(said))
    assert STEPS in run.committed()
    return said


@pytest.mark.slow
def test_a_training_with_sharded_state_is_killed_and_resumed(run: Run) -> None:
    """What the first job has done by its end is what the second is compared with."""
    options, dies = {"method": "lazy"}, {"DIES": "1 4 before_update"}
    before = run.until_killed("fsdp", options, 1, dies, world=2)
    wanted = steps_of(before)
    assert compare(before, wanted) == 0
    said = run.to_the_end("fsdp", options, world=2, last=3)
    assert compare(said, wanted) == EVERY
    assert all(3 in steps for steps in steps_of(said))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", [name for name, row in LAYOUTS.items() if row.ranks > 1])
def test_a_training_of_every_row_is_killed_and_resumed(run: Run, layout: str, seed: int) -> None:
    drill(run, layout, seed, method="lazy")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sync", "async", "checkfreq", "checkflow"])
@pytest.mark.parametrize("layout", ["ddp", "zero", "tp"])
def test_other_methods_are_killed_and_resumed(run: Run, layout: str, method: str) -> None:
    drill(run, layout, 0, method=method)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_a_log_of_every_row_is_killed_and_resumed(run: Run, layout: str) -> None:
    """Each rank has logged its part, of what it consumed like others (all ranks, or its stage's),
    too; of ZeRO's, what its own optimizer consumed."""
    drill(run, layout, 1, method="logged")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_replicas_of_every_row_are_killed_and_resumed(run: Run, layout: str) -> None:
    """Each rank's keeper follows what its rank writes, and bases are made of that."""
    said = drill(run, layout, 2, method="lowdiff_plus")
    assert [lines[-1]["captured"] for lines in said] == [1] * len(said), "the first of that start"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "other", "world"),
    [(name, *other) for name, row in LAYOUTS.items() for other in row.others],
)
def test_another_layout_goes_on_with_the_same_tensors(
    run: Run, layout: str, other: str, world: int
) -> None:
    options, last = {"method": "lazy"}, 4
    before = at(run.to_the_end(layout, options, last=last, whole=True), last)
    said = run.to_the_end(other, options, world=world, last=last + 2, whole=True)
    assert [lines[0]["resumed"] for lines in said] == [last] * world
    assert at(said, last) == before
    after = at(said, last + 2)  # and ranks train on together
    assert after.keys() == before.keys()
    assert all(after[name] != digest for name, digest in before.items())


def test_the_document_has_the_rows() -> None:
    wanted = [
        [row.name, str(row.ranks), "; ".join(f"{LAYOUTS[o].name}, {n}" for o, n in row.others)]
        for row in LAYOUTS.values()
        if row.ranks > 1
    ]
    lines = ["| " + " | ".join(row) + " |" for row in wanted]
    assert table("spread as") == wanted, "it should be:\n" + "\n".join(lines)
