"""Names, URLs, options, retries, and tiers as file systems."""

from __future__ import annotations

import errno
from pathlib import Path, PurePath
from typing import Any

import pytest

from everstep.errors import (
    DeadlineError,
    OptionError,
    OutOfSpaceError,
    PermissionDeniedError,
    UnreachableError,
)
from everstep.seams import ManualClock, PosixFileSystem
from everstep.testing.conformance import walk
from everstep.testing.faultytier import FaultyTier, TierFault
from everstep.tiers.disk_tier import DiskTier
from everstep.tiers.files import TierFileSystem
from everstep.tiers.memory import MemoryFile, MemoryTier
from everstep.tiers.options import TierOptions, UrlPath, is_url
from everstep.tiers.retry import RetryingTier, RetryPolicy
from tests.crash.sim.faults import Fault
from tests.crash.sim.filesystem import SimFileSystem
from tests.support.world import HookedFileSystem

FOREVER = 1 << 40


def source(data: bytes) -> MemoryFile:
    return MemoryFile([memoryview(data)])


# --- Paths that are URLs ----------------------------------------------------------------


def test_a_path_that_is_a_url_shows_it() -> None:
    path = UrlPath("s3://bucket/prefix")
    assert str(path) == "s3://bucket/prefix"
    assert str(path / "a" / "b") == f"{path / 'a/b'}" == "s3://bucket/prefix/a/b"
    assert str((path / "a").parent) == str(path)
    assert (path / "a/b").relative_to(path).as_posix() == "a/b"
    assert path == UrlPath("s3://bucket/prefix/")
    assert hash(path) == hash(UrlPath("s3://bucket/prefix"))
    assert str(UrlPath("/a/b")) == "/a/b"


@pytest.mark.parametrize(
    ("text", "url"), [("s3://b", True), ("gs://b/c", True), ("/a:/b", False), ("a/b", False)]
)
def test_what_is_a_url(text: str, url: bool) -> None:
    assert is_url(text) == url


# --- Options ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"where": ""},
        {"where": 7},
        {"where": "s3://b", "every_s": -1},
        {"where": "s3://b", "keep": 0},
        {"where": "s3://b", "keep": True},
    ],
)
def test_tier_options_that_cannot_be(wrong: dict) -> None:
    with pytest.raises(OptionError):
        TierOptions(**wrong)


# --- Trying again -----------------------------------------------------------------------


def test_pauses_grow_and_are_never_longer_than_said() -> None:
    policy = RetryPolicy(first_s=1.0, pause_s_max=5.0)
    assert [policy.pause_s(n, 1.0) for n in (1, 2, 3, 4, 5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert policy.pause_s(3, 0.25) == 1.0


def test_the_pauses_are_made_between_the_attempts() -> None:
    pauses: list[float] = []
    faulty = FaultyTier(MemoryTier(), [TierFault("unavailable", count=FOREVER)])
    tier = RetryingTier(
        faulty,
        RetryPolicy(attempts=4, first_s=1.0),
        pause=lambda seconds: bool(pauses.append(seconds)),
        seed=7,
    )
    with pytest.raises(UnreachableError, match="the last of 4 attempts"):
        tier.open("x")
    assert len(pauses) == 3
    assert 0 <= pauses[0] <= 1 <= 2 + pauses[1]
    assert len(faulty.log) == 4


def test_the_time_for_all_attempts_is_kept_to() -> None:
    clock = ManualClock()
    faulty = FaultyTier(MemoryTier(), [TierFault("timeout", count=FOREVER)])

    def pause(seconds: float) -> bool:
        clock.advance(seconds)
        return False

    policy = RetryPolicy(attempts=10_000, first_s=1.0, pause_s_max=2.0, deadline_s=30.0)
    tier = RetryingTier(faulty, policy, clock=clock, pause=pause, seed=3)
    began_s = clock.monotonic_s()
    with pytest.raises(DeadlineError, match="within 30 s"):
        tier.open("x")
    assert 20 < clock.monotonic_s() - began_s <= 30


def test_closing_ends_all_waiting() -> None:
    faulty = FaultyTier(MemoryTier(), [TierFault("unavailable", count=FOREVER)])
    tier = RetryingTier(faulty, RetryPolicy(attempts=3, first_s=20.0, pause_s_max=20.0))
    tier.close()
    with pytest.raises(DeadlineError, match="before it was closed"):
        tier.open("x")


def test_what_is_refused_for_good_is_not_tried_for_ever() -> None:
    class Denied(MemoryTier):
        asked = refreshed = 0

        def open(self, name: Any) -> Any:
            self.asked += 1
            raise PermissionDeniedError("no")

        def refresh(self) -> Any:
            self.refreshed += 1

    inner = Denied()
    with pytest.raises(PermissionDeniedError):
        RetryingTier(inner, pause=lambda seconds: False).open("x")
    assert (inner.asked, inner.refreshed) == (3, 2)


def test_policies_that_cannot_be() -> None:
    for wrong in ({"attempts": 0}, {"first_s": -1.0}, {"deadline_s": -1.0}):
        with pytest.raises(OptionError):
            RetryPolicy(**wrong)


# --- Memory and disk --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, OutOfSpaceError), (errno.EACCES, PermissionDeniedError)]
)
def test_what_the_disk_says(number: int, kind: type[Exception]) -> None:
    filesystem = SimFileSystem()
    tier = DiskTier(filesystem, PurePath("/tier"))
    tier.put("kept", source(b"kept"))
    filesystem.inject(Fault("error", errno=number, persistent=True, ops=frozenset({"create"})))
    for call in (lambda: tier.put("x", source(b"x")), lambda: tier.create("x", b"x")):
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.tier == "disk"
        assert caught.value.path == "/tier/x"
    assert [item.name for item in walk(tier)] == ["kept"]


def test_what_the_disk_tier_has_said_survives_power_loss() -> None:
    """Whatever subset of unsynced writes and names is lost: what put and create have returned
    for is there, whole, and what delete has returned for is gone."""
    filesystem = SimFileSystem()
    tier = DiskTier(filesystem, PurePath("/a/b/tier"))
    tier.put("deep/one", source(b"1" * 10_000))
    tier.create("deep/er/two", b"2")
    tier.put("gone/three", source(b"3"))
    tier.put("deep/one", source(b"11" * 9_000))
    tier.delete("gone/three")
    count = 0
    for image in filesystem.crash_images(seed=5, count=40):
        count += 1
        after = DiskTier(image, PurePath("/a/b/tier"))
        assert [item.name for item in walk(after)] == ["deep/er/two", "deep/one"]
        assert after.open("deep/one").size_bytes == 18_000
    assert count > 40


def test_the_folder_around_it_may_be_one_that_cannot_be_read(tmp_path: Path) -> None:
    """Another user's, with mode 0711: what is in it can be used, but it cannot be opened."""
    place = tmp_path / "home" / "tier"
    place.mkdir(parents=True)

    def closed(op: str, path: PurePath) -> None:
        if op == "sync_dir" and path == place.parent:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    tier = DiskTier(HookedFileSystem(closed), PurePath(place))
    tier.put("log/one", source(b"1"))
    assert tier.create("two", b"2")
    assert [item.name for item in walk(tier)] == ["log/one", "two"]


def test_a_folder_that_another_rank_has_deleted_meanwhile_is_no_error(tmp_path: Path) -> None:
    """Ranks that share a place delete their own files, and with the last one its folder."""
    filesystem = HookedFileSystem()
    tier = DiskTier(filesystem, PurePath(tmp_path) / "tier")
    for rank in "01":
        tier.put(f"log/{rank}", source(b"x"))

    def the_other_is_faster(op: str, path: PurePath) -> None:
        if op == "sync_dir" and path.name == "log":
            filesystem.hook = lambda op, path: None
            DiskTier(PosixFileSystem(), PurePath(tmp_path) / "tier").delete("log/1")

    filesystem.hook = the_other_is_faster
    tier.delete("log/0")
    assert ("sync_dir", PurePath(tmp_path) / "tier" / "log") in filesystem.seen
    assert walk(tier) == []


def test_a_disk_tier_follows_no_links(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "link").symlink_to(tmp_path / "secret")
    tier = DiskTier(PosixFileSystem(), PurePath(tmp_path) / "tier")
    assert walk(tier) == []
    with pytest.raises(Exception, match="link"):
        tier.open("link")


# --- As a file system -------------------------------------------------------------------


def test_a_tier_as_a_file_system() -> None:
    tier = MemoryTier()
    tier.put("a/b", source(b"12345"))
    tier.put("c", source(b""))
    root = UrlPath("s3://bucket/prefix")
    files = TierFileSystem(tier, root)
    assert [(e.name, e.kind, e.size_bytes) for e in files.scan(root)] == [
        ("a", "dir", 0),
        ("c", "file", 0),
    ]
    assert files.scan(root / "nothing") == []
    buffer = bytearray(3)
    assert files.open(root / "a" / "b").read_into(memoryview(buffer), 1) == 3
    assert buffer == b"234"
    for missing in (root / "a", root / "x", root / "a.tmp"):
        with pytest.raises(FileNotFoundError):
            files.open(missing)
    for write in (
        lambda: files.create(root / "x"),
        lambda: files.rename(root / "c", root / "d"),
        lambda: files.link(root / "c", root / "d"),
        lambda: files.unlink(root / "c"),
        lambda: files.make_dir(root / "d"),
        lambda: files.remove_dir(root / "a"),
    ):
        with pytest.raises(OSError, match="read-only") as caught:
            write()
        assert caught.value.errno == errno.EROFS
    assert files.reuse(root / "c") is None
    assert files.free_bytes(root) == 0


@pytest.mark.parametrize(
    ("kind", "number"), [("unavailable", errno.EIO), ("expired", errno.EACCES)]
)
def test_a_tier_that_fails_is_a_file_system_that_does(kind: Any, number: int) -> None:
    inner = MemoryTier()
    inner.put("x", source(b"x"))
    files = TierFileSystem(FaultyTier(inner, [TierFault(kind, count=FOREVER)]), PurePath("/r"))
    for call in (lambda: files.open(PurePath("/r/x")), lambda: files.scan(PurePath("/r"))):
        with pytest.raises(OSError, match=r"500|expired") as caught:
            call()
        assert caught.value.errno == number
