"""Every tier keeps the contract; and each check of it finds a tier that does not."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest

from everstep.errors import DamageError, StorageError
from everstep.seams import PosixFileSystem
from everstep.testing import conformance as checks
from everstep.testing.conformance import CHECKS, Check, Place, conformance, walk
from everstep.testing.faultytier import SURVIVED, FaultKind, FaultyTier
from everstep.tiers.contract import Item, Tier, Traits, check_name
from everstep.tiers.disk_tier import DiskTier
from everstep.tiers.memory import MemoryFile, MemoryTier
from everstep.tiers.retry import RetryingTier
from tests.crash.sim.filesystem import SimFileSystem

every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


def one(tier: Tier) -> Place:
    return Place(lambda: tier, large_bytes=1_000_001)


@every_check
def test_memory(check: Check) -> None:
    check(one(MemoryTier()))


@every_check
def test_disk(check: Check, tmp_path: Path) -> None:
    check(Place(lambda: DiskTier(PosixFileSystem(), PurePath(tmp_path) / "tier")))


@every_check
def test_disk_without_direct_io(check: Check, tmpfs_folder: Path) -> None:
    check(Place(lambda: DiskTier(PosixFileSystem(), PurePath(tmpfs_folder) / "tier")))


@every_check
def test_disk_of_a_simulated_machine(check: Check) -> None:
    filesystem = SimFileSystem()
    place = Place(lambda: DiskTier(filesystem, PurePath("/tier")), large_bytes=100_001)
    check(place)


@pytest.mark.parametrize("seed", range(10))
@every_check
def test_faults_behind_retries(check: Check, seed: int) -> None:
    """Every kind of fault that is promised to be survived, about one in three operations."""
    faulty = FaultyTier.seeded(MemoryTier(), seed)
    tier = RetryingTier(faulty, pause=lambda seconds: False, seed=seed)
    try:
        check(one(tier))
    except BaseException:
        print(f"seed {seed}", *faulty.log[-40:], sep="\n")
        raise


@pytest.mark.parametrize("kind", SURVIVED)
def test_each_fault_for_itself_behind_retries(kind: FaultKind) -> None:
    faulty = FaultyTier.seeded(MemoryTier(), 1, kinds=[kind], share=0.4)
    tier = RetryingTier(faulty, pause=lambda seconds: False, seed=1)
    for check in CHECKS:
        check(one(tier))
    assert any(line.endswith(kind) for line in faulty.log), "it never happened"


def test_stale_listings_are_said_to_be() -> None:
    """Nothing can hide them: the traits say so, and the checks then ask nothing of listings."""
    faulty = FaultyTier.seeded(MemoryTier(), 1, kinds=["stale_list"], share=1.0)
    tier = RetryingTier(faulty, pause=lambda seconds: False, seed=1)
    assert not tier.traits.consistent
    for check in (checks.listings_show_what_is_there, checks.what_is_deleted_is_gone):
        check(one(tier))


def test_faults_without_retries_are_noticed() -> None:
    """Else the tests above would prove nothing."""
    for kind in SURVIVED:
        if kind in ("duplicate", "late_duplicate"):
            continue  # harmless by the contract
        tier = FaultyTier.seeded(MemoryTier(), 1, kinds=[kind], share=0.5)
        results = conformance(one(tier))
        assert any(result.problem for result in results), f"{kind} goes unnoticed"


def test_a_report_without_a_test_framework() -> None:
    results = conformance(one(MemoryTier()))
    assert [result.check for result in results] == [check.__name__ for check in CHECKS]
    assert all(result.problem is None and str(result).startswith("ok") for result in results)
    broken = conformance(one(_Forgets()))
    assert any(str(result).startswith("FAIL") for result in broken)


# --- Each check can fail ----------------------------------------------------------------


class _Base(MemoryTier):
    """Memory, of which one thing at a time is broken below."""

    def change(self, name: str, change: Callable[[bytes], bytes]) -> None:
        data, at_s = self._objects[name]
        self._objects[name] = (change(data), at_s)


class _FlipsBits(_Base):
    def put(self, name: Any, source: Any) -> Any:
        super().put(name, source)
        if source.size_bytes:
            self.change(name, lambda data: bytes([data[0] ^ 1]) + data[1:])


class _CutsLarge(_Base):
    def put(self, name: Any, source: Any) -> Any:
        super().put(name, source)
        self.change(name, lambda data: data[:500_000])


class _ReadsPastTheEnd(_Base):
    def open(self, name: Any) -> Any:
        file = super().open(name)

        class Closed:
            size_bytes = file.size_bytes

            def read_into(self, buffer: Any, offset: Any) -> Any:
                return file.read_into(buffer[:-1] if buffer.nbytes == 5_000 else buffer, offset)

            def close(self) -> Any: ...

        return Closed()


class _NeverShrinks(_Base):
    def put(self, name: Any, source: Any) -> Any:
        check_name(name)
        before = self._objects.get(name, (b"", 0.0))[0]
        super().put(name, source)
        self.change(name, lambda data: data + before[len(data) :])


class _LiveReaders(_Base):
    """A reader sees whatever has the name when it reads."""

    def open(self, name: Any) -> Any:
        tier, size_bytes = self, super().open(name).size_bytes

        class Live:
            def __init__(self) -> None:
                self.size_bytes = size_bytes

            def read_into(self, buffer: Any, offset: Any) -> Any:
                return MemoryTier.open(tier, name).read_into(buffer, offset)

            def close(self) -> Any: ...

        return Live()


class _LeavesParts(_Base):
    def put(self, name: Any, source: Any) -> Any:
        check_name(name)
        self._store(name, b"")
        super().put(name, source)


class _BelievesSizes(_Base):
    def put(self, name: Any, source: Any) -> Any:
        check_name(name)
        data = bytearray(source.size_bytes)
        source.read_into(memoryview(data), 0)
        super().put(name, MemoryFile([memoryview(data)]))


class _OwnWords(_Base):
    def put(self, name: Any, source: Any) -> Any:
        try:
            super().put(name, source)
        except DamageError:
            raise
        except Exception as error:
            if type(error).__name__ == "BrokenError":
                raise StorageError("something went wrong") from error
            raise


class _CreatesAlways(_Base):
    def create(self, name: Any, data: Any) -> Any:
        self.put(name, MemoryFile([memoryview(data)]))
        return True


class _CreatesLate(_Base):
    """Looks first and writes then: between the two another may have done the same."""

    def __init__(self) -> None:
        super().__init__()
        self.met = threading.Barrier(8)

    def create(self, name: Any, data: Any) -> Any:
        there = name in self._objects
        if "race" in name:
            self.met.wait(30)
        if there:
            return self._objects[name][0] == data
        self.put(name, MemoryFile([memoryview(data)]))
        return True


class _RepeatsFail(_Base):
    def create(self, name: Any, data: Any) -> Any:
        there = name in self._objects
        return super().create(name, data) and not there


class _OneForAll(_Base):
    """Two writers at once get each other's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = bytearray(60_000)
        self.met = threading.Barrier(8)

    def put(self, name: Any, source: Any) -> Any:
        if not 0 < source.size_bytes <= 60_000 or "/of-" not in name:
            super().put(name, source)
            return
        source.read_into(memoryview(self.shared)[: source.size_bytes], 0)
        self.met.wait(30)
        super().put(name, MemoryFile([memoryview(self.shared)[: source.size_bytes]]))


class _Mixes(_Base):
    """What was there before shows through."""

    def put(self, name: Any, source: Any) -> Any:
        check_name(name)
        before = self._objects.get(name, (b"", 0.0))[0]
        super().put(name, source)
        if "/same" in name and before:
            self.change(name, lambda data: before[:10] + data[10:])


class _FindsFolders(_Base):
    def open(self, name: Any) -> Any:
        if self.scan(name) and name not in self._objects:
            return MemoryFile([])
        return super().open(name)


class _ListsByLetters(_Base):
    def scan(self, prefix: Any = "") -> Any:
        beside = super().scan(prefix.rpartition("/")[0])
        more = [item for item in beside if item.name.startswith(prefix) and item.name != prefix]
        return sorted({*super().scan(prefix), *more})


class _ListsUnsorted(_Base):
    def scan(self, prefix: Any = "") -> Any:
        return super().scan(prefix)[::-1]


class _DeletesOnce(_Base):
    def delete(self, name: Any) -> Any:
        if name not in self._objects:
            check_name(name)
            raise FileNotFoundError(name)
        super().delete(name)


class _Forgets(_Base):
    def delete(self, name: Any) -> Any:
        check_name(name)


class _SweepsAll(_Base):
    def sweep(self, prefix: Any) -> Any:
        check_name(prefix)
        for item in walk(self, prefix):
            self.delete(item.name)


class _EscapesNames(_Base):
    def scan(self, prefix: Any = "") -> Any:
        return [
            Item(item.name.replace("%20", " "), item.size_bytes) for item in super().scan(prefix)
        ]


class _TakesAnyName(_Base):
    def open(self, name: Any) -> Any:
        if name not in self._objects:
            raise FileNotFoundError(name)
        return super().open(name)


class _Alone(_Base):
    """A new one each time."""


class _ForgetsOnRefresh(_Base):
    def refresh(self) -> Any:
        self._objects.clear()


class _SaysNothing(_Base):
    traits = Traits("", 0)


class _ShowsUsers(_Base):
    url = "memory://user:secret@host/"


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        (checks.what_is_put_is_read, _FlipsBits),
        (checks.large_objects_come_back_whole, _CutsLarge),
        (checks.ranges_are_half_open, _ReadsPastTheEnd),
        (checks.put_replaces, _NeverShrinks),
        (checks.put_replaces, _LiveReaders),
        (checks.a_source_that_breaks_leaves_nothing, _LeavesParts),
        (checks.a_source_that_breaks_leaves_nothing, _OwnWords),
        (checks.a_source_that_is_too_short_leaves_nothing, _BelievesSizes),
        (checks.create_keeps_what_is_there, _CreatesAlways),
        (checks.create_keeps_what_is_there, _RepeatsFail),
        (checks.of_many_at_once_one_creates, _CreatesLate),
        (checks.many_write_at_once, _OneForAll),
        (checks.of_many_puts_one_is_there_whole, _Mixes),
        (checks.missing_names_are_missing, _FindsFolders),
        (checks.listings_show_what_is_there, _ListsByLetters),
        (checks.listings_show_what_is_there, _ListsUnsorted),
        (checks.what_is_deleted_is_gone, _DeletesOnce),
        (checks.what_is_deleted_is_gone, _Forgets),
        (checks.cleaning_up_takes_nothing_that_is_whole, _SweepsAll),
        (checks.names_of_every_kind, _EscapesNames),
        (checks.what_is_no_name_is_refused, _TakesAnyName),
        (checks.it_says_what_it_is, _ForgetsOnRefresh),
        (checks.it_says_what_it_is, _SaysNothing),
        (checks.it_says_what_it_is, _ShowsUsers),
    ],
)
def test_a_check_finds_what_it_is_for(check: Check, broken: type[_Base]) -> None:
    with pytest.raises((AssertionError, FileNotFoundError)):
        check(one(broken()))


def test_handles_that_see_nothing_of_each_other_are_found() -> None:
    with pytest.raises((AssertionError, FileNotFoundError)):
        checks.other_handles_see_it(Place(_Alone))


def test_every_check_is_shown_to_be_able_to_fail() -> None:
    shown = {
        mark.args[1][number][0]
        for mark in test_a_check_finds_what_it_is_for.pytestmark
        for number in range(len(mark.args[1]))
    }
    assert shown | {checks.other_handles_see_it} == set(CHECKS)


def test_the_document_counts_the_checks() -> None:
    text = (Path(__file__).parents[3] / "docs" / "TIERS.md").read_text(encoding="utf-8")
    assert f"Each of the {len(CHECKS)} checks" in text
    passed = set(re.findall(r"\| (\d+ of \d+)", text))
    assert passed == {f"{len(CHECKS)} of {len(CHECKS)}"}
