"""Trainings that are spread over ranks in any way: killed, resumed, and trained to the end with the
bits of one that nobody disturbed and that knows of no checkpoint; docs/EXACTNESS.md lists them."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.link.registry import KeeperInfo, kill_keeper, list_keepers
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from tests.support.keepers import end_keepers
from tests.support.ranks.parallel import EVERY, LAYOUTS, WAITS_AT
from tests.support.trainers import Trainer, finish_trainer, start_trainer, whole_lines
from tests.unit.replay.test_matrix_rows import table

PROGRAM = "from tests.support.ranks.parallel import main; main()"
STEPS = 8
_HANGS_S = 300.0
IN_A_SAVE = ("save.before_write", "save.before_rename", "save.before_marker", "keeper.after_begin")
Said = list[list[dict[str, Any]]]


class Run:
    """Jobs on one run folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run"
        self._folder, self._starts = folder, 0

    def start(
        self, layout: str, world: int, last: int, options: Any, *environments: dict[str, str]
    ) -> list[Trainer]:
        self._starts += 1
        meet = str(self._folder / f"meet-{self._starts}")
        found = environments or ({},) * world
        return [
            start_trainer(
                PROGRAM,
                *(str(self.path), meet, layout, str(rank), str(world), str(last)),
                json.dumps(options),
                **found[rank],
            )
            for rank in range(world)
        ]

    def to_the_end(
        self, layout: str, options: Any, *, world: int = 0, last: int = STEPS, whole: bool = False
    ) -> Said:
        """What each rank says."""
        environments = [{"WHOLE": "1"} if whole else {}] * (world or LAYOUTS[layout].ranks)
        return self.ended(layout, options, last, *environments)

    def ended(self, layout: str, options: Any, last: int, *environments: dict[str, str]) -> Said:
        """What each rank says, to its end."""
        ranks = self.start(layout, len(environments), last, options, *environments)
        ended = [finish_trainer(one, _HANGS_S) for one in ranks]
        assert [status for status, _, _ in ended] == [0] * len(ranks), ended
        return [_decoded(out) for _, out, _ in ended]

    def until_killed(
        self, layout: str, options: Any, victim: int, env: dict[str, str], *, world: int = 0
    ) -> Said:
        """When one rank has died all are killed, as a launcher does."""
        ranks = range(world or LAYOUTS[layout].ranks)
        environments = [env if rank == victim else {} for rank in ranks]
        return self.killed(layout, options, victim, STEPS, *environments)

    def killed(
        self, layout: str, options: Any, victim: int, last: int, *environments: dict[str, str]
    ) -> Said:
        """Likewise, each rank with its own environment."""
        ranks = self.start(layout, len(environments), last, options, *environments)
        status, out, err = finish_trainer(ranks[victim], _HANGS_S)
        for one in ranks:
            one.kill()
        others = [finish_trainer(one, _HANGS_S) for one in ranks if one is not ranks[victim]]
        assert status == -signal.SIGKILL, [err, *(theirs for _, _, theirs in others)]
        said = [out for _, out, _ in others]
        return [_decoded(each) for each in [*said[:victim], out, *said[victim:]]]

    def kill_keepers(self) -> None:
        for info in self.keepers():
            kill_keeper(info)

    def keepers(self) -> list[KeeperInfo]:
        return [info for info in list_keepers() if info.run == str(self.path)]

    def committed(self) -> set[int]:
        """Steps of the bases that have a manifest."""
        bases = scan_run(PosixFileSystem(), self.path).bases
        return {base.id.step for base in bases if base.status == "committed"}


def _decoded(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(out)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    end_keepers(tmp_path)


def steps_of(said: Said) -> list[dict[int, Any]]:
    """By rank: digests of everything after each step."""
    return [{one["step"]: one["digests"] for one in lines if "step" in one} for lines in said]


def compare(said: Said, wanted: list[dict[int, Any]]) -> int:
    """All ranks have resumed the same step and gone on as if nothing had been; returns it."""
    resumed = {(lines[0]["resumed"], lines[0]["timeline"]) for lines in said}
    assert len(resumed) == 1, resumed
    step: int = resumed.pop()[0]
    for rank, (lines, steps) in enumerate(zip(said, steps_of(said), strict=True)):
        if step:
            assert lines[0]["digests"] == wanted[rank][step], f"rank {rank} resumed from {step}"
        assert lines[0]["exact"]
        assert list(steps) == [*range(step + 1, step + 1 + len(steps))]
        for at, digests in steps.items():
            assert digests == wanted[rank][at], f"rank {rank} at step {at}"
    return step


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
    # A log in memory, which the second job may have gone on from, is gone with the keepers.
    logs = options["method"] in ("logged", "lowdiff_plus")
    assert compare(said, wanted) >= known >= (EVERY if logs else first)
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


def at(said: Said, step: int) -> dict[str, str]:
    """Digests of tensors as torch puts them together, at a step, of all ranks."""
    found: dict[str, str] = {}
    for lines in said:
        whole = next(one["whole"] for one in lines if one.get("at") == step)
        assert all(found.setdefault(name, digest) == digest for name, digest in whole.items())
    return found


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
