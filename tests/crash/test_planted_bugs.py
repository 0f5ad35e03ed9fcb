"""Every kind of mistake that crash enumeration is for, planted: each must be found.

The same scenarios without the mistake pass; ``test_enumeration`` shows it, and here
:func:`test_nothing_is_found_where_nothing_is_planted` with these very settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, cast

import pytest

import everstep.format.reader
import everstep.tiers.durable_files
from everstep.commit.base_commit import Action, Event, WriteMarker
from everstep.format.digests import Digester
from everstep.format.records import manifest_of
from everstep.keeper.persist.committer import OneRankCommit
from everstep.seams import FileSystem, WriteFile
from everstep.tiers.durable_files import write_durably
from tests.crash.sim.crashes import Report, watch_crashes
from tests.crash.sim.faults import Fault
from tests.crash.sim.filesystem import SimFileSystem
from tests.crash.sim.training import TrainingScenario

Wrap = Callable[[SimFileSystem], FileSystem]


@pytest.fixture(autouse=True)
def park_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data files as tiny as these are worth recycling, too."""
    monkeypatch.setattr(everstep.tiers.durable_files, "_WORTH_BYTES", 1)


def lying(*ops: str, path: str | None = None) -> Wrap:
    """Syncs that report success and do nothing."""

    def wrap(fs: SimFileSystem) -> FileSystem:
        fs.inject(Fault("lie", ops=frozenset(ops), path=path, persistent=True))
        return fs

    return wrap


class Wrapped:
    """A file system in front of another one; what is not overridden goes through."""

    def __init__(self, fs: SimFileSystem) -> None:
        self.fs = fs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fs, name)


class RenamesFirst(Wrapped):
    """Files of a base get their final names before they are written."""

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        file = self.fs.create(path, direct=direct)
        if self._early(path):
            self.fs.rename(path, path.with_suffix(""))
        return file

    def rename(self, source: PurePath, target: PurePath) -> None:
        if not self._early(source):
            self.fs.rename(source, target)

    def _early(self, path: PurePath) -> bool:
        return "base" in path.parts and path.suffix == ".tmp"


class FirstSyncLies(Wrapped):
    """The first sync of each data file does nothing."""

    opened_by = "create"

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.fs, name)
        if name != self.opened_by:
            return found

        def opens(path: PurePath, *, direct: bool = False) -> Any:
            file = found(path, direct=direct)
            if file is None or (
                not path.match("*.safetensors.tmp") and path.parent.name != "slots"
            ):
                return cast("WriteFile | None", file)
            return cast(WriteFile, _FirstSyncLies(file))

        return opens


class FirstSyncOfReusedLies(FirstSyncLies):
    """The invalidation of a recycled file's header is not synced."""

    opened_by = "reuse"


class _FirstSyncLies:
    def __init__(self, file: WriteFile) -> None:
        self._file, self._lied = file, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def sync(self) -> None:
        if self._lied:
            self._file.sync()
        self._lied = True


class OnlyTheDisk(TrainingScenario):
    """Checks what lies on the disk without resuming from it, which is much quicker."""

    def check_resuming(self, fs: SimFileSystem, promised: tuple[int, int]) -> None:
        pass


def wrapped(kind: type[Wrapped]) -> Wrap:
    return lambda fs: cast(FileSystem, kind(fs))


def search(wrap: Wrap | None, **options: int) -> Report:
    """Looks at many disks, and if they are in order, resumes from some."""
    report = watch_crashes(_scenario(OnlyTheDisk, wrap, **options), images_per_point=40)
    if report.violations:
        return report
    return watch_crashes(_scenario(TrainingScenario, wrap, **options), violations_max=1)


def _scenario(
    kind: type[TrainingScenario], wrap: Wrap | None, *, saves: int = 1
) -> TrainingScenario:
    return kind(done=1, saves=saves, keep=1, wrap=wrap)


PLANTED: dict[str, tuple[Wrap, str]] = {
    "file sync left out": (lying("sync"), "torn"),
    "directory sync left out": (lying("sync_dir"), ""),
    "every sync left out": (lying("sync", "sync_dir"), ""),
    "names in the base not synced": (lying("sync_dir", path="*/base/000000000002"), ""),
    "condemned mark not synced": (
        lying("sync_dir", path="*/base/000000000001"),
        "which is not there",
    ),
    "rename before write": (wrapped(RenamesFirst), "has its final name and is torn"),
    "header written before the body was synced": (wrapped(FirstSyncLies), "is accepted, but"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(name: str) -> None:
    wrap, complaint = PLANTED[name]
    report = search(wrap)
    assert report.violations, f"nothing found in {report}"
    print(report.violations[0])
    assert complaint in report.violations[0].problem


def test_an_invalidation_that_was_not_synced_is_found() -> None:
    report = search(wrapped(FirstSyncOfReusedLies), saves=2)
    assert report.violations, f"nothing found in {report}"
    assert "is accepted, but" in report.violations[0].problem


def test_a_manifest_before_the_marker_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    perform = OneRankCommit.perform

    def hasty(self: OneRankCommit, action: Action) -> Event:
        if isinstance(action, WriteMarker):
            manifest = manifest_of({action.marker.rank: action.marker})
            assert manifest is not None
            path = self.directory / "manifest.json"
            write_durably(self.filesystem, path, manifest.encode())
        return perform(self, action)

    monkeypatch.setattr(OneRankCommit, "perform", hasty)
    report = search(None)
    assert report.violations
    assert "lists rank-00000.done, which is not there" in report.violations[0].problem


class FlippedBit(TrainingScenario):
    """Before anyone resumes, one bit of the newest base's model is flipped on the disk."""

    def check(self, fs: SimFileSystem, promised: tuple[int, int]) -> None:
        durable, begun = promised
        shards = [p for p, kind in fs.paths().items() if kind == "file" and "/base/" in p]
        newest = max(p for p in shards if p.endswith(".safetensors"))
        self._flip(fs, PurePath(newest))
        self.check_resuming(fs, (durable - 1, begun))

    def _flip(self, fs: SimFileSystem, path: PurePath) -> None:
        data = fs.read_bytes(path)
        start = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:start])
        begin, _ = next(e["data_offsets"] for n, e in entries.items() if n.startswith("model/"))
        fs.corrupt(path, start + begin, mask=0x01)


def test_a_flipped_bit_is_passed_over_and_if_not_that_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = FlippedBit(done=2, saves=0)
    watch_crashes(scenario, images_per_point=0).raise_if_any()
    # Entries are digested but no digest is compared.
    monkeypatch.setattr(
        everstep.format.reader, "Digester", lambda placed, on_entry=None: Digester(placed)
    )
    with pytest.raises(AssertionError, match="model came back changed"):
        watch_crashes(scenario, images_per_point=0).raise_if_any()


@pytest.mark.slow
@pytest.mark.parametrize("saves", [1, 2])
def test_nothing_is_found_where_nothing_is_planted(saves: int) -> None:
    search(None, saves=saves).raise_if_any()
