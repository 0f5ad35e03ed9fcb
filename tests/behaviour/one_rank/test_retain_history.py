"""``LogOptions(history=...)``: every step that it promises can be gone back to, whatever goes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import everstep
from everstep import LogOptions
from everstep.commit.lineage import BaseId
from everstep.errors import OptionError
from everstep.format.log import RecordHead
from everstep.format.records import TimelineRecord
from everstep.keeper.retain.history import HistoryWindow, SegmentAges
from everstep.options import History
from everstep.run.chain import LogIndex, path_of
from everstep.run.scan import scan_run
from everstep.seams import ManualClock, PosixFileSystem
from tests.support.log.budget import Trained
from tests.support.log.every_step import World, opened, run_steps

FILES = PosixFileSystem()
HOUR_S = 3600.0


def record(timeline: int, parent: int | None, fork_step: int) -> TimelineRecord:
    return TimelineRecord("r", timeline, parent, fork_step, True, 1, {}, 0.0)


# --- What is asked for ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("last", History()),
        ("all", History(age_s=math.inf)),
        ("2h", History(age_s=2 * HOUR_S)),
        ("1.5 min", History(age_s=90.0)),
        ("7d", History(age_s=7 * 24 * HOUR_S)),
        ("50GB", History(size_bytes=50 * 10**9)),
        ("20 GiB", History(size_bytes=20 * 2**30)),
    ],
)
def test_what_it_means(text: str, wanted: History) -> None:
    assert History.parse(text) == wanted
    assert wanted.is_more == (text != "last")
    assert LogOptions(to="disk", history=text).history == text


@pytest.mark.parametrize("text", ["", "first", "0h", "0GB", "-2h", "50", "2 weeks", "GB", "5gb", 3])
def test_what_it_cannot_mean(text: str) -> None:
    with pytest.raises(OptionError, match="history="):
        LogOptions(to="disk", history=text)


# --- Which bases stay -------------------------------------------------------------------


def log_of(spans: list[tuple[int, int, int]], shapes: dict[tuple[int, int], str]) -> LogIndex:
    """One update in each step; the number of the update is that of the step."""
    heads = []
    for timeline, after, last in spans:
        for step in range(after + 1, last + 1):
            shape = shapes.get((timeline, step), "a")
            heads.append(RecordHead("update", timeline, step, step, shape, True))
            heads.append(RecordHead("mark", timeline, step, step, shape, True))
    return LogIndex(heads)


def reached(
    bases: set[BaseId], spans: list[tuple[int, int, int]], forks: dict[int, tuple[int, int]],
    shapes: dict[tuple[int, int], str],
) -> set[tuple[int, int]]:  # fmt: skip
    """The oracle: walks from each base, step by step, along every timeline that goes on from it."""
    logged = {(t, step) for t, after, last in spans for step in range(after + 1, last + 1)}
    found = set()
    todo = [(b.timeline, b.step, shapes.get((b.timeline, b.step), "a")) for b in bases]
    seen = set()
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        timeline, step, shape = at
        found.add((timeline, step))
        nexts = [timeline]
        younger = [timeline]
        while younger:  # a fork of a fork at this very step goes on from here, too
            parent = younger.pop()
            for child, (of, fork_step) in forks.items():
                if of == parent and fork_step == step:
                    nexts.append(child)
                    younger.append(child)
        for one in nexts:
            there = shapes.get((one, step + 1), "a")
            if (one, step + 1) in logged and shape == there:
                todo.append((one, step + 1, there))
    return found & logged


_spans = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 9), st.integers(1, 4)).map(
        lambda t: (t[0], t[1], t[1] + t[2])
    ),
    max_size=6,
)
_bases = st.sets(st.builds(BaseId, st.integers(1, 3), st.integers(0, 12)), max_size=6)


@given(
    spans=_spans,
    first=_bases,
    later=st.lists(_bases, min_size=1, max_size=4),
    keep=st.integers(1, 3),
    forks=st.tuples(st.integers(0, 8), st.sampled_from([1, 2]), st.integers(0, 8)),
    odd=st.sets(st.tuples(st.integers(1, 3), st.integers(1, 12)), max_size=2),
    floor=st.integers(0, 6),
)
def test_no_promised_step_is_lost(
    spans: list[tuple[int, int, int]],
    first: set[BaseId],
    later: list[set[BaseId]],
    keep: int,
    forks: tuple[int, int, int],
    odd: set[tuple[int, int]],
    floor: int,
) -> None:
    """Through any sequence of bases and retentions, with holes, forks and changes of the state;
    ``floor``: the older steps are not promised, or not any more."""
    fork_2, parent_3, fork_3 = forks
    if parent_3 == 2:  # whoever goes back to before a fork goes on from the parent
        fork_3 = max(fork_2, fork_3)
    tree = {2: (1, fork_2), 3: (parent_3, fork_3)}
    records = {1: record(1, None, 0), 2: record(2, 1, fork_2), 3: record(3, parent_3, fork_3)}
    spans = [  # nobody trains on before the fork
        (t, after, last) for t, after, last in spans if t == 1 or after >= tree[t][1]
    ]
    shapes = dict.fromkeys(odd, "b")
    index = log_of(spans, shapes)
    promised = {(t, s) for t, after, last in spans for s in range(after + 1, last + 1) if s > floor}
    there: set[BaseId] = set()
    # Where the state begins to consist of something else, a base is taken.
    changed = {BaseId(t, s + more) for t, s in odd for more in (0, 1)}
    for new in [first | changed, *later]:
        there |= {base for base in new if base.timeline == 1 or base.step > tree[base.timeline][1]}
        before = reached(there, spans, tree, shapes) & promised
        going = sorted(there)[: max(0, len(there) - keep)]
        promise = HistoryWindow(promised, index, records)
        needed = promise.needed({base: base.step for base in there}, going)
        assert needed <= set(going)
        there -= set(going) - needed
        assert reached(there, spans, tree, shapes) & promised == before
        if any((base.timeline, base.step) not in index.marks for base in there):
            continue  # of what such a state consists nobody knows
        for base in needed:  # and none of them stays for nothing
            assert reached(there - {base}, spans, tree, shapes) & promised != before


def test_the_oldest_of_one_chain_is_enough() -> None:
    bases = {BaseId(1, step): step for step in (1, 4, 8, 12)}
    promise = HistoryWindow(
        {(1, s) for s in range(2, 13)}, log_of([(1, 1, 12)], {}), {1: record(1, None, 0)}
    )
    assert promise.needed(bases, [BaseId(1, 1), BaseId(1, 4), BaseId(1, 8)]) == {BaseId(1, 1)}


class Looks(list[tuple[int, int | None]]):
    """A history that counts how often it is gone through."""

    count = 0

    def __iter__(self) -> Iterator[tuple[int, int | None]]:
        self.count += 1
        return super().__iter__()

    def __reversed__(self) -> Iterator[tuple[int, int | None]]:
        self.count += 1
        return super().__reversed__()


def test_a_long_history_is_not_gone_through_for_each_step() -> None:
    """Each rewind makes it longer by one."""
    records = {n: record(n, n - 1 or None, 3 * (n - 1)) for n in range(1, 41)}
    index = log_of([(n, 3 * (n - 1), 3 * n) for n in range(1, 41)], {})
    path = Looks(path_of(40, records))
    chain = index.follow(BaseId(1, 0), 0, None, path)
    assert chain.steps == tuple((1 + (step - 1) // 3, step) for step in range(1, 121))
    assert path.count <= 2


@pytest.mark.parametrize("own", [True, False])
def test_a_base_behind_which_the_state_is_another_leads_nowhere(own: bool) -> None:
    """Whether its own mark is there, or has gone with the steps before: the next base stays."""
    bases = {BaseId(1, step): step for step in (2, 3, 12)}
    index = log_of([(1, 1 if own else 2, 12)], {(1, 2): "before"})
    promise = HistoryWindow({(1, s) for s in range(3, 13)}, index, {1: record(1, None, 0)})
    assert promise.needed(bases, [BaseId(1, 3)]) == {BaseId(1, 3)}  # the first one is verified


@pytest.mark.parametrize("moves_on", [True, False])
def test_where_less_will_be_promised_one_stays_that_takes_over(moves_on: bool) -> None:
    """Else the oldest would have to stay for ever: those behind it would all have gone."""
    bases = {BaseId(1, step): step for step in (1, 4, 8, 12)}
    going = [BaseId(1, 1), BaseId(1, 4), BaseId(1, 8)]
    promise = HistoryWindow(
        {(1, s) for s in range(2, 13)},
        log_of([(1, 1, 12)], {}),
        {1: record(1, None, 0)},
        moves_on=moves_on,
    )
    assert promise.kept(bases, going) == set(going[: 1 + moves_on])
    assert promise.kept(bases, going[:1]) == set(going[:1])
    assert HistoryWindow((), log_of([], {}), {}, moves_on=moves_on).kept(bases, going) == set()


def test_a_log_of_bounded_size_stays_bounded(run_folder: Path) -> None:
    log = LogOptions(to="disk", batch_steps=1, history="200kB", audit=False)
    with Trained(run_folder, log=log, every=4, keep=1) as run:
        for _ in range(15):
            run.train_slowly(4)
            segments = list((run_folder / "timeline-00001" / "log").iterdir())
            size_bytes = sum(f.stat().st_size for path in segments for f in path.iterdir())
            assert size_bytes < 2 * 200_000
    assert size_bytes > 200_000
    assert len(steps_there(run_folder)) == 3


def test_where_less_is_promised_a_younger_one_is_enough() -> None:
    bases = {BaseId(1, step): step for step in (1, 4, 8, 12)}
    promise = HistoryWindow(
        {(1, s) for s in range(7, 13)}, log_of([(1, 1, 12)], {}), {1: record(1, None, 0)}
    )
    assert promise.needed(bases, [BaseId(1, 1), BaseId(1, 4), BaseId(1, 8)]) == {BaseId(1, 4)}


# --- Trained ----------------------------------------------------------------------------


def steps_there(run: Path) -> set[int]:
    return {base.id.step for base in scan_run(FILES, PurePath(run)).bases}


def test_every_step_of_a_training_can_be_gone_back_to(run_folder: Path) -> None:
    world = World()
    log = LogOptions(to="disk", batch_steps=2, history="all")
    with opened(run_folder, world, log=log, every=3, keep=1) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 12)
    first = min(steps_there(run_folder))
    assert len(steps_there(run_folder)) == 2
    for step in range(first, 13, 4):
        other = World(seed=9)
        with opened(run_folder, other, log=log, keep=1) as ckpt:
            assert ckpt.resume(step=step).step == step
            assert other.snapshot() == states[step]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
def test_no_base_takes_the_place_of_steps_that_are_not_written_yet(
    run_folder: Path, process: bool
) -> None:
    """A batch of more steps than lie between the bases that are kept, and no audit of them."""
    world = World()
    log = LogOptions(to="disk", batch_steps=10, history="all", audit=False)
    options = {"log": log, "keep": 2, "keeper": everstep.KeeperOptions(process=process)}
    with opened(run_folder, world, every=2, **options) as ckpt:
        ckpt.resume()
        states: dict[int, Any] = {}
        for _ in range(13):
            states |= run_steps(ckpt, world, 1)
            ckpt.wait()
    for step in (2, 3, 4, 9, 13):
        other = World(seed=9)
        with opened(run_folder, other, **options) as ckpt:
            assert ckpt.resume(step=step).step == step
            assert other.snapshot() == states[step]


def test_only_so_much_of_it(run_folder: Path) -> None:
    """By age and by size: the oldest base that is still needed moves on."""
    world = World()
    log = LogOptions(to="disk", batch_steps=1, lag_steps=0, history="all")
    with opened(run_folder, world, log=log, every=3, keep=8) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 12)
    inventory = scan_run(FILES, PurePath(run_folder))
    segments = sorted((run_folder / "timeline-00001" / "log").iterdir())
    for number, segment in enumerate(segments):
        os.utime(segment, (0.0, 1_000.0 * number))
    ages = SegmentAges(FILES, ManualClock())
    ages.observe(inventory)
    lsns = {b.id: b.manifest.markers[0].lsn for b in inventory.bases if b.manifest is not None}
    going = sorted(lsns)[:-1]

    def needed(history: str) -> list[int]:
        promise = HistoryWindow.of(FILES, inventory, History.parse(history), ages=ages)
        return [base.step for base in sorted(promise.needed(lsns, going))]

    first_young = int(segments[-4].name.split("-")[1])
    assert needed("all") == [going[0].step]
    assert needed("1h") == [max(base.step for base in going if base.step <= first_young)]
    assert needed("5h") == needed("all")
    size_bytes = sum(path.stat().st_size for last in segments[-2:] for path in last.iterdir())
    assert needed(f"{size_bytes}B") == [going[-1].step]
