"""Small files of far places: read once, and anew where a listing shows that they are others."""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import Any

import pytest

from everstep.commit.job.offers import Offer
from everstep.format.names import TIMELINE_RECORD, timeline_dir
from everstep.format.reader import read_record_bytes
from everstep.format.records import TimelineRecord
from everstep.restore.fetch.rank_copies import Copies, SmallFiles
from everstep.seams import PosixFileSystem
from everstep.tiers.memory import MemoryTier


class Counting(PosixFileSystem):
    """Notes what is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def open(self, path: PurePath, *, direct: bool = False) -> Any:
        self.opened.append(path.name)
        return super().open(path, direct=direct)


@pytest.mark.parametrize("change", ["none", "longer", "at another time"])
def test_a_file_is_read_anew_where_it_is_listed_as_another(tmp_path: Path, change: str) -> None:
    files, path = Counting(), tmp_path / "record"
    path.write_bytes(b"one")
    os.utime(path, (1000, 1000))
    small = SmallFiles(files)
    for _ in range(2):
        small.scan(tmp_path)
        assert read_record_bytes(small, path) == b"one"
    assert files.opened == ["record"]
    if change != "none":
        path.write_bytes(b"another" if change == "longer" else b"two")
        os.utime(path, (1000, 1000) if change == "longer" else (1001, 1001))
    small.scan(tmp_path)
    wanted = {"none": b"one", "longer": b"another", "at another time": b"two"}[change]
    assert read_record_bytes(small, path) == wanted
    assert len(files.opened) == (1 if change == "none" else 2)


def test_each_look_at_copies_after_the_first_reads_what_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, tier, opened = PurePath("/run"), MemoryTier(), list[str]()
    own = MemoryTier.open

    def noting(self: MemoryTier, name: str) -> Any:
        opened.append(name)
        return own(self, name)

    monkeypatch.setattr(MemoryTier, "open", noting)
    copies = Copies([tier], run)
    copies.publish("a" * 32)

    def opens(number: int) -> str:
        record = TimelineRecord("a" * 32, number, None, 0, True, 1, {}, 1.0)
        assert copies.open_timeline(record)
        path = timeline_dir(run, number) / TIMELINE_RECORD
        return path.relative_to(run).as_posix()

    def look() -> list[int]:
        opened.clear()
        return sorted(copies.add_to(Offer(0, "disk", "a" * 32, 1, {}, {}, (), ())).timelines)

    first = opens(1)
    assert look() == [1]
    assert opened == ["run.json", first]
    second = opens(2)
    assert look() == [1, 2]
    assert opened == [second]
    copies.forget()
    assert look() == [1, 2]
    assert opened == ["run.json", first, second], "what was let go of is read anew"
