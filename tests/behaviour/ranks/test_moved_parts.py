"""Run folders that somebody has moved about by hand: parts behind symbolic links, renamed, left out
of a copy. Training goes on where it was, or the error names what cannot be used; it is never
started over, nor set back, because a part was not looked at."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from everstep.cli.common.errors import ExitCode
from everstep.errors import EverstepError, ForeignDirectoryError, RecoveryError
from everstep.format.names import (
    BASE_DIR,
    LOG_DIR,
    RUN_RECORD,
    parse_renamed_part,
    parse_renamed_timeline,
    timeline_dir,
)
from everstep.run.scan import scan_run
from everstep.seams.posix import PosixFileSystem
from tests.support import logged
from tests.support.logged import World, invoke
from tests.support.ranks.logs import ON_DISK
from tests.support.ranks.together import resume, save, trainings
from tests.support.ranks.together import train as train_all
from tests.support.resuming import look, train_on
from tests.support.world import base_folder, opened


def timeline(run: Path, number: int) -> Path:
    return Path(timeline_dir(run, number))


def link_away(path: Path) -> None:
    """Move ``path`` out of the run, and leave a symbolic link to it."""
    run = next(parent for parent in path.parents if parent.name == "run")
    elsewhere = run.with_name("other disk") / "-".join(path.relative_to(run).parts)
    elsewhere.parent.mkdir(exist_ok=True)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def put_back(path: Path) -> None:
    elsewhere = path.readlink()
    path.unlink()
    elsewhere.rename(path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Bases of steps 1 and 2 in timeline 1, of 3 and 4 in timeline 2."""
    folder = tmp_path / "run"
    train_on(folder, until=2)
    train_on(folder, until=4)
    return folder


def refused(run: Path, named: Path) -> str:
    """Check that no way of starting goes on, and that resume() and the tools name the same path."""
    files = sorted(run.rglob("*"))
    with pytest.raises(ForeignDirectoryError) as caught:
        look(run)
    told = str(caught.value)
    assert str(named) in told
    assert "go on without it" in told
    with pytest.raises(ForeignDirectoryError), opened(run, {"n": -1}) as ckpt:
        ckpt.step()
    for verb in ("ls", "verify"):
        shown = invoke(verb, run)
        assert shown.exit_code == ExitCode.USAGE
        assert named.name in shown.stderr
    assert sorted(run.rglob("*")) == files, "nothing was changed"
    return told


@pytest.mark.parametrize(
    "part", ["timeline-00001", "timeline-00002", "timeline-00002/base", "timeline-00002/log"]
)
def test_a_part_behind_a_link(run: Path, part: str) -> None:
    if part.endswith("log"):
        (run / part).mkdir()
    link_away(run / part)
    assert "symbolic link" in refused(run, run / part)
    put_back(run / part)
    assert look(run)[1] == 4


def test_a_link_that_leads_nowhere(run: Path) -> None:
    shutil.rmtree(timeline(run, 2))
    timeline(run, 2).symlink_to(run / "no such place")
    refused(run, timeline(run, 2))


def test_the_run_folder_itself_may_be_a_link(run: Path) -> None:
    real = run.with_name("real")
    run.rename(real)
    run.symlink_to(real)
    assert look(run)[1] == 4


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("timeline-00002", "timeline-00002.bak"),
        ("timeline-00002", "old-timeline-00002"),
        ("timeline-00002/base", "timeline-00002/base.bak"),
        ("timeline-00002/log", "timeline-00002/Copy of log"),
    ],
)
def test_a_renamed_part(run: Path, part: str, name: str) -> None:
    (run / part).mkdir(exist_ok=True)
    (run / part).rename(run / name)
    assert f"renamed from {Path(part).name}" in refused(run, run / name)
    (run / name).rename(run / part)
    assert look(run)[1] == 4


def test_the_only_timeline_renamed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_on(run, until=2)
    timeline(run, 1).rename(run / "timeline-00001.bak")
    refused(run, run / "timeline-00001.bak")


def test_the_only_bases_renamed(tmp_path: Path) -> None:
    """Without its bases, the timeline looks like one that nothing was saved in."""
    run = tmp_path / "run"
    train_on(run, until=2)
    bases = timeline(run, 1) / BASE_DIR
    bases.rename(bases.with_name("base.bak"))
    refused(run, bases.with_name("base.bak"))


def test_a_second_copy_of_a_timeline_is_in_nobodys_way(run: Path) -> None:
    shutil.copytree(timeline(run, 2), run / "timeline-00002.bak")
    (run / "timeline-00007.json").write_text("a profile of the user's")
    shutil.copytree(timeline(run, 2) / BASE_DIR, timeline(run, 2) / "base.bak")
    (timeline(run, 2) / "log.txt").write_text("notes of the user's")
    recovery, value = look(run)
    assert (recovery.notes, value) == ((), 4)
    assert timeline(run, 3).exists()


@pytest.mark.parametrize(
    ("name", "number", "part"),
    [
        ("timeline-00002.bak", 2, None),
        ("Copy of timeline-00012", 12, None),
        ("timeline-00002", None, None),
        ("timeline-2", None, None),
        ("base", None, None),
        ("base_old", None, "base"),
        ("log (1)", None, "log"),
        ("database", None, None),
        ("logs", None, None),
    ],
)
def test_names_that_have_one_of_ours_within_them(
    name: str, number: int | None, part: str | None
) -> None:
    assert parse_renamed_timeline(name) == number
    assert parse_renamed_part(name) == part


def test_a_copy_without_a_timeline_of_the_history(run: Path) -> None:
    """Timeline 3 began in timeline 2, and nobody has trained on it yet."""
    look(run)
    shutil.rmtree(timeline(run, 2))
    with pytest.raises(RecoveryError, match="had step 4"):
        look(run)
    assert look(run, step=2)[1] == 2
    assert look(run)[1] == 2


def test_a_copy_without_timelines_that_are_not_needed(run: Path) -> None:
    shutil.rmtree(timeline(run, 1))
    recovery, value = look(run)
    assert (recovery.notes, value) == ((), 4)


def test_a_copy_without_the_record_of_the_run(run: Path) -> None:
    before = scan_run(PosixFileSystem(), run).run
    (run / RUN_RECORD).unlink()
    assert look(run)[1] == 4
    assert scan_run(PosixFileSystem(), run).run == before


@pytest.mark.parametrize("what", ["the base", "its data"])
def test_a_base_behind_a_link_counts_as_damaged(run: Path, what: str) -> None:
    base = Path(base_folder(run, 4, 2))
    link_away(base if what == "the base" else base / "rank-00000.safetensors")
    recovery, value = look(run)
    assert (recovery.step, value) == (3, 3)
    assert "symbolic link" in str(recovery.skipped)
    found = logged.document("verify", run, status=1)
    (bad,) = [one for one in found["bases"] if not one["ok"]]
    assert "symbolic link" in str(bad["damages"])
    for step, number in ((1, 1), (2, 1), (3, 2)):
        shutil.rmtree(base_folder(run, step, number))
    with pytest.raises(RecoveryError, match="symbolic link"):
        look(run)


def test_a_linked_base_is_not_deleted(run: Path) -> None:
    base = Path(base_folder(run, 4, 2))
    link_away(base)
    assert invoke("rm", run, "--step", "4", "--force").exit_code == ExitCode.USAGE
    assert len(list(base.readlink().iterdir())) == 3
    put_back(base)
    assert look(run)[1] == 4


def test_a_base_of_another_run(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "b" / "run"
    train_on(other, until=2, value=100)
    for number in (1, 2):
        shutil.rmtree(timeline(run, number) / BASE_DIR)
    shutil.copytree(timeline(other, 1) / BASE_DIR, timeline(run, 2) / BASE_DIR)
    with pytest.raises(RecoveryError, match="another"):
        look(run)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("part", ["segment", "data"])
def test_a_log_behind_links(tmp_path: Path, part: str) -> None:
    """The base of step 6 alone would be taken for all that there is."""
    run = tmp_path / "run"
    logged.train(run, World(), 9, every=6)
    base = Path(base_folder(run, 9))
    if base.exists():
        shutil.rmtree(base)
    log = timeline(run, 1) / LOG_DIR
    for one in sorted(log.iterdir()):
        link_away(one if part != "data" else one / "rank-00000.safetensors")
    shown = invoke("verify", run)
    assert shown.exit_code == 1
    assert "symbolic link" in " ".join(shown.stdout.split())
    assert invoke("ls", run).exit_code == 1
    with logged.opened(run, World()) as ckpt:
        assert "symbolic link" in str(ckpt.resume().skipped)
    logged.forget(run)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("how", ["link", "renamed"])
def test_several_ranks(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run"
    for _ in range(2):
        with trainings(path, path, **ON_DISK) as ranks:
            resume(ranks)
            train_all(ranks, 3)
            save(ranks)
    moved = timeline(path, 2)
    if how == "link":
        link_away(moved)
    else:
        moved = moved.rename(path / "timeline-00002.bak")

    with pytest.raises(EverstepError) as caught, trainings(path, path, **ON_DISK):
        pass
    assert moved.name in str(caught.value)
