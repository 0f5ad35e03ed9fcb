"""What each guarantee of the log is for: without it, the wrong state comes back, and is seen to.

The first part spoils logs on disk; replay stops before what is spoiled, and says so. The second
part removes one guarantee at a time from the very same recoveries: each then ends in a state that
no training had (I1 to I4, I8).
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.capture.mark_samples import MarkSampler
from everstep.format.log import LogRecord
from everstep.restore import log as logs_module
from everstep.restore.log import LogFound, LogReader
from everstep.restore.start.report import Recovery
from everstep.run import chain as chain_module
from everstep.run.chain import LogIndex
from everstep.state.ownership import Owner
from everstep.testing import inspect
from everstep.trainer.log import update_inputs as consumed_module
from everstep.trainer.log.recorder import Recorder
from tests.support.log.late import LateTransfer
from tests.support.log.late import opened as late
from tests.support.logged import World, opened, record, rewrite_segment, segments_of, train
from tests.support.matrix import CASES, LOOPS
from tests.support.matrix import World as MatrixWorld
from tests.support.serving import Bench, die, serving
from tests.support.world import flip

States = Mapping[int, Mapping[str, Any]]
Spoil = Callable[[Path], None]


def without_last_base(run: Path) -> Path:
    """What is left when a process ends without its last base: base 1, and the log."""
    for base in (run / "timeline-00001" / "base").iterdir():
        if int(base.name) > 1:
            shutil.rmtree(base)
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    """Base 1, segments of steps 1-2, 3-4, 5-6, 7-8; and the state after each step."""
    run = tmp_path_factory.mktemp("trained") / "run"
    states = train(run, World(), 8, every=1000)
    return without_last_base(run), states


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, trained on other data by somebody else."""
    run = tmp_path_factory.mktemp("other") / "run"
    train(run, World(seed=5), 8, every=1000)
    return run


def recovered(run: Path) -> tuple[Recovery, dict[str, Any]]:
    """What a new process gets back."""
    world = World(seed=9)
    with opened(run, world, every=None) as ckpt:
        recovery = ckpt.resume()
        found = world.snapshot()
        inspect(ckpt).skip_last_base()  # no base at the end
    return recovery, found


def rewritten(change: Callable[[list[LogRecord]], Sequence[LogRecord]]) -> Spoil:
    """Other records in the segment of steps 5 and 6, with digests that vouch for them."""
    return lambda run: rewrite_segment(run, segments_of(run)[2], change)


def branched(run: Path, step: int) -> States:
    """Two steps in timeline 2, from a step of timeline 1 on and with other data; its log, and no
    base."""
    world = World()
    with opened(run, world, every=None) as ckpt:
        ckpt.resume(step=step)
        torch.manual_seed(77)
        states = {}
        for number in (step + 1, step + 2):
            world.train()
            ckpt.step()
            states[number] = world.snapshot()
    shutil.rmtree(run / "timeline-00002" / "base")
    return states


def torn(run: Path) -> None:
    path = Path(segments_of(run)[2].path) / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def flipped(run: Path) -> None:
    flip(Path(segments_of(run)[2].path) / "rank-00000.safetensors", 4096 + 100)


def altered(records: list[LogRecord]) -> list[LogRecord]:
    """One bit of a gradient is another than when the record was made."""
    records[0].data[0] ^= 1
    return records


def of_another_timeline(run: Path) -> None:
    """Timeline 2 goes on from step 4 with other data; then its segment lies in timeline 1."""
    branched(run, 4)
    theirs, mine = segments_of(run, 2)[0], segments_of(run)[2]
    assert theirs.path.name == mine.path.name
    shutil.rmtree(mine.path)
    shutil.copytree(theirs.path, mine.path)
    shutil.rmtree(run / "timeline-00002")


def of_another_run(other: Path) -> Spoil:
    def spoil(run: Path) -> None:
        mine = segments_of(run)[2].path
        shutil.rmtree(mine)
        shutil.copytree(segments_of(other)[2].path, mine)

    return spoil


SPOILS: dict[str, tuple[Spoil, int, str]] = {
    "an update is lost": (rewritten(lambda r: r[1:]), 4, "update 5 of step 5 is missing"),
    "a later update is lost": (rewritten(lambda r: [r[0], r[1], r[3]]), 5, "update 6 of step 6"),
    "a mark is lost": (rewritten(lambda r: [r[0], r[2], r[3]]), 4, "step 5 has no mark"),
    "a segment is lost": (lambda run: shutil.rmtree(segments_of(run)[2].path), 4, "has no mark"),
    "a flipped bit": (flipped, 4, "its digest does not match"),
    "a bit flipped before it was written": (rewritten(altered), 4, "update 5 of step 5"),
    "a torn tail": (torn, 4, "in its marker"),
    "steps swapped": (rewritten(lambda r: [*r[2:], *r[:2]]), 4, "out of order"),
    "an update twice": (rewritten(lambda r: [r[0], *r]), 4, "out of order"),
    "a mark before its update": (rewritten(lambda r: [r[1], r[0], *r[2:]]), 4, "out of order"),
    "another timeline": (of_another_timeline, 4, "belongs to another segment"),
    "another shape": (
        rewritten(lambda r: [*r[:3], record(r[3], shape="x")]),
        5,
        "at step 6 the state has another composition",
    ),
}


@pytest.mark.parametrize("name", SPOILS)
def test_replay_stops_before_what_is_spoiled_and_says_so(
    name: str, trained: tuple[Path, States], run_folder: Path
) -> None:
    spoil, last, told = SPOILS[name]
    template, states = trained
    shutil.copytree(template, run_folder)
    spoil(run_folder)
    recovery, found = recovered(run_folder)
    assert recovery.step == last
    assert found == states[last]
    assert any(told in item.reason for item in recovery.skipped), recovery.skipped


# --- One guarantee less -----------------------------------------------------------------

Remove = Callable[[pytest.MonkeyPatch], None]
Scenario = Callable[[Path, tuple[Path, States], Path], bool]


def spoiled(spoil: Callable[[Path], Spoil], last: int) -> Scenario:
    """Whether a spoiled log gives the state of a step up to the last that is whole."""

    def right(run: Path, trained: tuple[Path, States], other_run: Path) -> bool:
        template, states = trained
        shutil.copytree(template, run)
        spoil(other_run)(run)
        recovery, found = recovered(run)
        return recovery.step == last and found == states[last]

    return right


def two_timelines(run: Path, trained: tuple[Path, States], other_run: Path) -> bool:
    """Whether a history that has left timeline 1 at step 5 is followed."""
    shutil.copytree(trained[0], run)
    states = branched(run, 5)
    recovery, found = recovered(run)
    return recovery.step == 7 and found == states[7]


def killed(case: str, loop: str, *, hooked: int = 0) -> Scenario:
    """Whether a training that was killed at step 7 comes back as it was, from a lane that copies
    as late as it may; and no audit has objected.

    Args:
        hooked: before this step somebody registers one more hook on the optimizer.
    """

    def right(run: Path, trained: tuple[Path, States], other_run: Path) -> bool:
        with serving(run) as served:
            return _killed(served, case, loop, hooked)

    return right


def _killed(served: Bench, case: str, loop: str, hooked: int) -> bool:
    world, other = (MatrixWorld(CASES[case], LOOPS[loop], seed=seed) for seed in (1, 9))
    noticed: list[Exception] = []
    ckpt = late(served.run, world, on_failure=noticed.append)
    ckpt.resume()
    for step in range(1, 8):
        if step == hooked:
            world.optimizer.register_step_pre_hook(lambda *_: None)
        world.train()
        ckpt.step()
    inspect(ckpt).saver.finish_captures()
    wanted = world.snapshot()
    die(ckpt)
    again = late(served.run, other)
    recovery = again.resume()
    again.close()
    return recovery.step == 7 and other.snapshot() == wanted and not noticed


def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is copied behind a step is copied when all of that step is over, or after a second:
    training itself waits for some of it."""
    wait, train, over = LateTransfer.wait, MatrixWorld.train, threading.Event()
    over.set()

    def late_wait(self: LateTransfer, timeout_s: float) -> bool:
        over.wait(1.0)
        return wait(self, timeout_s)

    def trained(self: MatrixWorld) -> None:
        over.clear()
        train(self)
        over.set()

    monkeypatch.setattr(LateTransfer, "gate", lambda self, end, timeout_s: True)
    monkeypatch.setattr(LateTransfer, "wait", late_wait)
    monkeypatch.setattr(MatrixWorld, "train", trained)


def is_there(found: LogFound, key: Any) -> bool:
    try:
        found.nearest(key)
    except KeyError:
        return False
    return True


def takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts updates."""

    class Everything(set[Any]):
        def __contains__(self, item: object) -> bool:
            return True

    made = LogIndex.__init__

    def init(self: LogIndex, heads: Iterable[Any]) -> None:
        made(self, heads)
        self.updates = Everything()

    def steps(self: LogReader, chain: Any, lsn: int) -> Iterator[Any]:
        for timeline, step in chain.steps:
            mark = self.found.index.marks[timeline, step]
            there = [
                number
                for number in range(lsn + 1, mark.lsn + 1)
                if is_there(self.found, ("update", timeline, number))
            ]
            updates = [self.record("update", timeline, number) for number in there]
            yield updates, self.record("mark", timeline, step)
            lsn = mark.lsn

    monkeypatch.setattr(LogIndex, "__init__", init)
    monkeypatch.setattr(LogReader, "steps", steps)


def forks_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step comes from the oldest timeline that has it."""
    monkeypatch.setattr(chain_module, "_timelines_of", lambda path: lambda step: path[-1][0])


def updates_of_any_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update is an update, if only its number is right."""
    record_of = LogReader.record

    def found(self: LogReader, kind: str, timeline: int, number: int) -> LogRecord:
        return record_of(self, kind, 1 if kind == "update" else timeline, number)

    monkeypatch.setattr(LogReader, "record", found)


def over_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients count as consumed as they are behind the update, too."""
    consumed = Recorder.consumed

    def late_or_not(self: Recorder, key: str, lsn: int, step: int, *, over: bool) -> None:
        consumed(self, key, lsn, step)

    monkeypatch.setattr(Recorder, "consumed", late_or_not)


def patched(target: Any, name: str, value: Any) -> Remove:
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


REMOVED: dict[str, tuple[Scenario, Remove]] = {
    "gate: what waits for copies does not": (
        killed("AdamW-for-loop", "zeroed"),
        nothing_waits,
    ),
    "gate: an update that writes to its gradients does not wait": (
        killed("SGD-nesterov-foreach", "plain"),
        patched(consumed_module, "writes_gradients", lambda kind, groups: False),
    ),
    "gate: gradients are taken when the update is over": (
        killed("SGD-nesterov-foreach", "plain", hooked=6),
        over_is_no_matter,
    ),
    "LSN check: a hole is passed over": (
        spoiled(lambda other: SPOILS["a later update is lost"][0], 5),
        takes_what_is_there,
    ),
    "timeline check: forks are ignored": (two_timelines, forks_are_ignored),
    "timeline check: updates of any timeline will do": (two_timelines, updates_of_any_timeline),
    "run check: records of any run will do": (
        spoiled(of_another_run, 4),
        patched(logs_module, "validated", lambda segment, run: segment),
    ),
    "digest: a bit that was flipped is replayed": (
        spoiled(lambda other: rewritten(altered), 4),
        patched(LogRecord, "verify", lambda self: None),
    ),
    "ownership: what no optimizer replays is not recorded": (
        killed("AdamW-for-loop", "norm"),
        patched(Owner, "in_marks", property(lambda self: False)),
    ),
    "skip flag: found_inf is not recorded": (
        killed("AdamW-fused", "scaler"),
        patched(consumed_module, "_SCALER", ("grad_scale",)),
    ),
    "skip flag: grad_scale is not recorded": (
        killed("Adam-fused", "scaler"),
        patched(consumed_module, "_SCALER", ("found_inf",)),
    ),
}


@pytest.mark.parametrize("name", REMOVED)
@pytest.mark.parametrize("removed", [False, True])
def test_without_it_the_wrong_state_comes_back(
    name: str,
    removed: bool,
    trained: tuple[Path, States],
    other_run: Path,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario, remove = REMOVED[name]
    if removed:
        remove(monkeypatch)
        # Behind each of them stand the samples in the marks.
        monkeypatch.setattr(MarkSampler, "other", lambda self, step, values: None)
    assert scenario(run_folder, trained, other_run) is not removed
