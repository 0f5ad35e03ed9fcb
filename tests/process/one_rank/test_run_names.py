"""A run whose folder has several names is one run: its keeper is found under each of them."""

from __future__ import annotations

import signal
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, cast

import pytest

import everstep
from everstep import KeeperOptions
from everstep.errors import KeeperError, StorageError
from everstep.link.registry import keeper_files, keepers_left_by_a_move, keepers_of, list_keepers
from everstep.link.spawn import SpawnOptions
from everstep.run.folder import run_path
from everstep.seams import ManualClock
from everstep.trainer.attach import attach as attach_module
from everstep.trainer.attach.attach import attach, is_there
from tests.support.fakekeeper import running
from tests.support.keeper_process import finish, keepers_gone, start
from tests.support.keepers import terms_of
from tests.support.logged import invoke

THREAD = KeeperOptions(process=False)

LOGGED = """
ckpt = everstep.Checkpointer(run, state, method="logged", every=100)
report(ckpt.resume())
for step in range(1, 6):
    train_step()
    ckpt.step()
ckpt.wait()
say(digest=digest())
os.kill(os.getpid(), signal.SIGKILL)
"""

# Of an everstep that did not follow links; a bind mount, which takes root, is seen like this, too.
UNFOLLOWED = """
import pathlib
import everstep.checkpointer
everstep.trainer.job.place.run_path = pathlib.PurePath
"""

AGAIN = """
import logging
logging.basicConfig(level=logging.INFO)
ckpt = everstep.Checkpointer(run, state, method="logged", every=100)
report(ckpt.resume())
ckpt.close()
"""


@pytest.fixture
def alias(run_folder: Path) -> Path:
    """Another name of the run folder, through a link above it; neither is there yet."""
    link = run_folder.with_name("link")
    link.symlink_to(run_folder.parent)
    return link / run_folder.name


@pytest.mark.thinned(3)
@pytest.mark.usefixtures("no_keeper_stays")
@pytest.mark.parametrize("before", ["link above", "link", "real"])
def test_the_keeper_of_a_killed_process_is_found_under_another_name(
    before: str, run_folder: Path, alias: Path
) -> None:
    run_folder.mkdir()
    itself = run_folder.with_name("itself")
    itself.symlink_to(run_folder.name)
    first = {"link above": alias, "link": itself, "real": run_folder}[before]
    second = alias if before == "real" else run_folder
    status, (_, trained), err = finish(start(first, LOGGED))
    assert status == -signal.SIGKILL, err
    (keeper,) = list_keepers()
    assert keeper.run == str(run_folder)
    status, (said,), err = finish(start(second, AGAIN))
    assert status == 0, err
    assert (said["step"], said["source"], said["exact"]) == (5, "memory", True)
    assert said["digest"] == trained["digest"]
    keepers_gone()


@pytest.mark.usefixtures("no_keeper_stays")
def test_a_keeper_that_knows_the_folder_under_another_name_is_found(
    run_folder: Path, alias: Path
) -> None:
    status, (_, trained), err = finish(start(alias, UNFOLLOWED + LOGGED))
    assert status == -signal.SIGKILL, err
    (keeper,) = list_keepers()
    assert keeper.run == str(alias)
    status, (said,), err = finish(start(run_folder, AGAIN))
    assert status == 0, err
    assert (said["step"], said["source"], said["exact"]) == (5, "memory", True)
    assert said["digest"] == trained["digest"]
    assert f"process {keeper.pid}, started in {alias}" in err
    keepers_gone()


def test_whose_keepers_are_those_of_a_run(run_folder: Path, alias: Path) -> None:
    """One of another run in this folder, and one of this run in another folder (a copy), are not;
    of two of one rank it is that which knows the folder under this very name."""
    run_folder.mkdir()
    copied = run_folder.with_name("copied")
    copied.mkdir()
    gone = run_folder.with_name("gone")

    def options(run: Path, rank: int, run_id: str = "id") -> SpawnOptions:
        return SpawnOptions(str(run), run_id, rank, detach=False)

    with (
        running(options(alias, 0)),
        running(options(alias, 1)),
        running(options(run_folder, 1)),
        running(options(alias, 2, "other")),
        running(options(copied, 3)),
        running(options(gone, 4)),
    ):
        found = [(info.rank, info.run) for info in keepers_of(run_folder, "id")]
        assert found == [(0, str(alias)), (1, str(run_folder))]
        assert [is_there(run_folder, "id", rank) for rank in range(5)] == [True] * 2 + [False] * 3
        assert [info.rank for info in keepers_of(gone, "id")] == [4]
        assert [info.rank for info in keepers_left_by_a_move("id")] == [4]


@pytest.mark.slow
@pytest.mark.usefixtures("no_keeper_stays")
def test_what_the_keeper_of_a_renamed_run_has_in_memory_is_restored(run_folder: Path) -> None:
    """It knows the folder by a path where it is no more: a base without the steps after it was all
    that was found in the new place."""
    status, (_, trained), err = finish(start(run_folder, LOGGED))
    assert status == -signal.SIGKILL, err
    moved = run_folder.with_name("moved")
    run_folder.rename(moved)
    for source in ("memory", "disk"):
        status, (said,), err = finish(start(moved, AGAIN))
        assert status == 0, err
        assert (said["step"], said["source"], said["exact"]) == (5, source, True)
        assert said["digest"] == trained["digest"]
        assert f"{moved} was moved from {run_folder}" in err
    assert not run_folder.exists()
    assert invoke("stop", "--all", "--now").exit_code == 0
    keepers_gone()


def test_one_under_another_name_that_does_not_listen_is_waited_for_and_named(
    run_folder: Path, alias: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is started beside it: it may have what this process is looking for."""
    run_folder.mkdir()
    started: list[SpawnOptions] = []
    monkeypatch.setattr(attach_module, "spawn_keeper", started.append)
    clock = ManualClock()
    slept = SimpleNamespace(sleep=lambda _: clock.advance(5.0))
    monkeypatch.setattr(attach_module, "time", slept)
    options = SpawnOptions(str(alias), "id", 0, detach=False)
    with running(options):
        Path(keeper_files(options.key).socket).unlink()
        with pytest.raises(KeeperError, match=f"the keeper of {alias} does not accept"):
            attach(terms_of(run_folder, clock=clock, timeout_s=1.0), cast("Any", None))
    assert started == []


def test_training_stays_in_its_folder_where_a_link_is_led_elsewhere(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to("first")
    with everstep.Checkpointer(link / "run", {"n": 1}, keeper=THREAD, every=1) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.wait()
        link.unlink()
        link.symlink_to("second")
        ckpt.step()
        ckpt.wait()
    assert list(folders[1].iterdir()) == []
    with everstep.Checkpointer(folders[0] / "run", {"n": 1}, keeper=THREAD) as ckpt:
        assert ckpt.resume().step == 2


@pytest.mark.parametrize("name", ["nowhere", "nowhere/run"])
def test_nothing_is_made_where_a_link_leads_nowhere(name: str, tmp_path: Path) -> None:
    """It may mean a disk that is not mounted."""
    (tmp_path / "nowhere").symlink_to(tmp_path / "mnt")
    with pytest.raises(StorageError):
        everstep.Checkpointer(tmp_path / name, {"n": 1}, keeper=THREAD)
    assert not (tmp_path / "mnt").exists()


def test_where_the_names_of_a_run_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/deep")
    (tmp_path / "circle").symlink_to("circle")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "link"))
    led = {
        "link": "a/deep",
        "link/": "a/deep",
        "./link/run/": "a/deep/run",
        "link/x/../run": "a/deep/run",
        "~/run": "a/deep/run",
        "link/../run": "a/run",  # as the system takes it
        "a/deep/../../run": "run",
        "circle/run": "circle/run",
        "new/run": "new/run",
    }
    for name, real in led.items():
        assert run_path(name) == PurePath(tmp_path / real), name
    # And what a command is told of is the same run.
    everstep.Checkpointer("link/../run", {"n": 1}, keeper=THREAD).close()
    assert (tmp_path / "a" / "run" / "run.json").is_file()
    for words in (["ls", "link/../run"], ["stop", "link/../run"]):
        assert invoke(*words).exit_code == 0, words
