"""What a base costs in a run that has gone on for long: no more than in a young one, and what is
remembered for that never stands for what is not there any more."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest

import everstep
from everstep import LogOptions
from everstep.format.names import TIMELINE_RECORD, marker_name, parse_shard
from everstep.keeper.ship.courier import CopyPlace
from everstep.run import segments
from everstep.run.folder import open_timeline
from everstep.run.scan import Inventory, scan_run
from everstep.run.segments import SegmentCache, SegmentFound, scan_logs
from everstep.seams import PosixFileSystem, Seams
from everstep.tiers.disk_tier import DiskTier
from tests.support.log.budget import Trained
from tests.support.world import HookedFileSystem, flip, forget, opened

FILES = PosixFileSystem()
LOG = LogOptions(to="disk", batch_steps=1, history="all", audit=False)
AGAIN = 2  # segments that are read anew at each base


@pytest.fixture(autouse=True)
def few_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_REREAD", AGAIN)


def options_of(keep: int) -> dict[str, object]:
    keeper = everstep.KeeperOptions(process=False)
    return {"log": LOG, "every": None, "keep": keep, "keeper": keeper}


def folders(run: Path) -> list[Path]:
    return sorted((run / "timeline-00001" / "log").iterdir())


def data_of(segment: Path) -> Path:
    (found,) = (path for path in segment.iterdir() if parse_shard(path.name) is not None)
    return found


def grow_old(run: Path) -> None:
    """Else what is changed at once may have the time of what it takes the place of."""
    for number, path in enumerate(folders(run)):
        os.utime(path, (1e9, 1e9 + number))


# --- Of the log that history= keeps -----------------------------------------------------


def test_a_base_reads_no_segment_that_an_earlier_one_has_read(run_folder: Path) -> None:
    fs = HookedFileSystem()
    costs: list[list[tuple[str, PurePath]]] = []
    with Trained(run_folder, fs=fs, **options_of(2)) as run:
        for steps in (8, 1, 1, 12, 1):
            run.train_slowly(steps)
            fs.seen.clear()
            run.ckpt.save()
            run.ckpt.wait()
            costs.append(list(fs.seen))
    assert len(folders(run_folder)) == 22
    read = [
        {p.parent.name for op, p in seen if op == "open" and "log" in p.parts} for seen in costs
    ]
    assert [len(names) for names in read] == [0, 8, 1 + AGAIN, 12 + AGAIN, 1 + AGAIN]
    assert len(costs[4]) == len(costs[2])  # as many operations as with few segments


@pytest.fixture
def run(run_folder: Path) -> Path:
    """With a log of seven segments."""
    with Trained(run_folder, **options_of(9)) as training:
        training.train_slowly(1)
        training.ckpt.save()
        training.train_slowly(7)
    grow_old(run_folder)
    return run_folder


def inventory_of(run: Path) -> Inventory:
    return scan_run(FILES, PurePath(run))


def looks(run: Path, known: SegmentCache | None) -> dict[int, list[SegmentFound]]:
    inventory = inventory_of(run)
    return scan_logs(FILES, inventory.path, inventory.timelines, known)[1]


def remove_marker(segment: Path) -> None:
    (segment / marker_name(0)).unlink()


def remove(segment: Path) -> None:
    shutil.rmtree(segment)


def damage(segment: Path) -> None:
    """The same length, and other bytes."""
    data = data_of(segment)
    other = segment.parent / "other"
    shutil.copy(data, other)
    flip(other, 20)
    os.replace(other, data)


def cut(segment: Path) -> None:
    data = data_of(segment)
    other = segment.parent / "other"
    other.write_bytes(data.read_bytes()[:-1])
    os.replace(other, data)


def exchange(segment: Path) -> None:
    """Another segment has its name."""
    other = next(path for path in folders(segment.parents[2]) if path != segment)
    shutil.rmtree(segment)
    shutil.copytree(other, segment)


CHANGES = [remove_marker, remove, damage, cut, exchange]


@pytest.mark.thinned(6)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_segment_that_was_replaced_is_read_anew(
    run: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_REREAD", 0)
    known = SegmentCache()
    assert looks(run, known) == looks(run, None)
    assert looks(run, known) == looks(run, None)
    change(folders(run)[-1])
    now = looks(run, None)
    assert looks(run, known) == now
    assert looks(run, known) == now  # what was bad is not taken for good the next time
    assert not all(one.problem is None for one in now[0]) or len(now[0]) < 7


def test_one_that_comes_back_is_another_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that is put back as it was once, and trained in again."""
    monkeypatch.setattr(segments, "_REREAD", 0)
    known = SegmentCache()
    last = folders(run)[-1]
    looks(run, known)
    shutil.move(last, run / "aside")
    assert len(looks(run, known)[0]) == 6
    shutil.move(run / "aside", last)
    damage(last)
    os.utime(last, (0, 0))
    assert looks(run, known)[0][-1].problem is not None


def test_one_that_was_cut_in_its_place_is_found_in_its_turn(run: Path) -> None:
    """No name has changed: of these a few are read anew in each look."""
    known = SegmentCache()
    looks(run, known)
    count = len(folders(run))
    for path in folders(run):
        os.truncate(data_of(path), 5000)
    bad = []
    for _ in range(-(-count // AGAIN)):
        bad.append(sum(one.problem is not None for one in looks(run, known)[0]))
    assert bad == [min(count, AGAIN * (n + 1)) for n in range(len(bad))]
    assert looks(run, known) == looks(run, None)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("change", [remove_marker, damage, cut], ids=lambda it: it.__name__)
def test_no_base_goes_on_account_of_a_segment_that_is_gone(
    run_folder: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base behind it is the only way to the steps that follow it."""
    monkeypatch.setattr(segments, "_REREAD", 0)
    with Trained(run_folder, **options_of(1)) as run:
        for _ in range(4):
            run.train_slowly(3)
            if run.step == 6:
                grow_old(run_folder)
            run.ckpt.save()
            run.ckpt.wait()
            if run.step == 6:
                change(folders(run_folder)[3])  # of step 4 or 5, which was looked at before
                bad = int(folders(run_folder)[3].name.split("-")[-1])
    steps = sorted(base.id.step for base in inventory_of(run_folder).bases)
    assert 3 < bad <= 6
    assert steps == [1, 6, 12]


# --- Of the timelines that restarts and rewinds leave -----------------------------------


def recall_leftovers(run: Path, count: int) -> None:
    """Starts that came to nothing, as where a node fails again and again."""
    inventory = inventory_of(run)
    for _ in range(count):
        parent = inventory.bases[-1].id
        number = open_timeline(Seams(), PurePath(run), inventory, parent=parent, exact=True)
        inventory.timelines[number] = None


def operations(run: Path) -> list[Counter[str]]:
    """File operations of a resume, and of a base that takes the place of another."""
    fs, state = HookedFileSystem(), {"n": 0}
    found: list[Counter[str]] = []
    with opened(run, state, fs=fs, keep=2) as ckpt:
        ckpt.resume()
        found.append(Counter(op for op, _ in fs.seen))
        for _ in range(4):
            ckpt.step()
            fs.seen.clear()
            ckpt.save()
            ckpt.wait()
        found.append(Counter(op for op, _ in fs.seen))
    forget(run)
    return found


def test_what_each_timeline_costs_a_resume_and_a_base(run_folder: Path) -> None:
    """Its directory is listed: twice for a base, which looks again behind what it has deleted. Its
    record is read by who makes the folder ready, who restores, and who cleans up, once by each."""
    count = 20
    operations(run_folder)
    before = operations(run_folder)
    recall_leftovers(run_folder, count - 1)  # and the one of ``before`` is there, too
    resume, base = operations(run_folder)
    more = base - before[1]
    assert set(more) == {"scan"}
    assert more["scan"] <= 2 * (count + 1)  # in one there were bases
    more = resume - before[0]
    assert more["open"] == 3 * count
    assert more["scan"] <= 4 * (count + 1)
    assert set(more) == {"open", "scan"}


def test_what_older_timelines_have_left_is_removed_whenever_it_comes(run_folder: Path) -> None:
    """Who was fenced off may have been about to park a file."""
    state = {"n": 0}
    with opened(run_folder, state) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.save()
    recall_leftovers(run_folder, 1)
    forget(run_folder)
    with opened(run_folder, state) as ckpt:
        ckpt.resume()
        for number in (1, 2):
            path = run_folder / f"timeline-{number:05}"
            (path / "slots").mkdir()
            (path / "slots" / "slot-00000").write_bytes(b"parked")
            (path / "some.tmp").write_bytes(b"half")
            ckpt.step()
            ckpt.save()
            ckpt.wait()
            assert not {"slots", "some.tmp"} & {entry.name for entry in path.iterdir()}


def test_copies_of_timelines_are_read_once(run_folder: Path) -> None:
    """Of a store, each would be a request."""
    fs = HookedFileSystem()
    operations(run_folder)
    recall_leftovers(run_folder, 3)
    tier = DiskTier(fs, PurePath(run_folder))
    place = CopyPlace(tier, 1)
    first = place.inventory()
    assert [path.name for op, path in fs.seen if op == "open"].count(TIMELINE_RECORD) == 4
    fs.seen.clear()
    assert place.inventory() == first
    assert TIMELINE_RECORD not in [path.name for op, path in fs.seen if op == "open"]
