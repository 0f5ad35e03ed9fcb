"""Checks of the contract of a tier, for any implementation.

Each check of :data:`CHECKS` is a function that gets a :class:`Place` and raises
``AssertionError`` where the contract (:mod:`everstep.tiers.contract`) is broken. They need no
test framework::

    for result in conformance(Place(lambda: MyTier("somewhere"))):
        print(result)

and with pytest, each check becomes a test::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_tier(check, tmp_path):
        check(Place(lambda: MyTier(tmp_path)))

A place may hold other objects already: every check works under a prefix of its own.

Helpers of the checks: sources, some of which fail, and concurrent work.
"""

from __future__ import annotations

import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from everstep.errors import EverstepError, OptionError, StorageError
from everstep.seams import ReadFile
from everstep.tiers import MemoryFile, Tier
from everstep.tiers.contract import NAME_BYTES_MAX, PART_BYTES_MAX, Item, read_whole

WRITERS = 8
"""Number of concurrent writers."""

_T = TypeVar("_T")
_TIMEOUT_S = 60.0


class BrokenError(Exception):
    """Error of a source, not of a tier."""


class BrokenSource:
    """A source that fails after its middle."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if offset + buffer.nbytes > self.size_bytes // 2:
            raise BrokenError
        return buffer.nbytes

    def close(self) -> None: ...


class ShortSource:
    """A source that ends at its middle."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return max(0, min(buffer.nbytes, self.size_bytes // 2 - offset))

    def close(self) -> None: ...


def bytes_of(size: int, seed: int = 0) -> bytes:
    """Return bytes of which no two ranges are equal."""
    words = -(-size // 8)
    start = (seed + 1) << 40
    return b"".join((start + n).to_bytes(8, "big") for n in range(words))[:size]


def source_of(data: bytes) -> ReadFile:
    """Return a source of these bytes."""
    return MemoryFile([memoryview(data)])


def read_object(tier: Tier, name: str) -> bytes:
    """Return all bytes of an object."""
    file = tier.open(name)
    try:
        return read_whole(file, name)
    finally:
        file.close()


def read_or_none(tier: Tier, name: str) -> bytes | None:
    """Return all bytes of an object; None if it does not exist."""
    try:
        return read_object(tier, name)
    except FileNotFoundError:
        return None


def walk(tier: Tier, prefix: str = "") -> list[Item]:
    """Return all objects under ``prefix`` at any depth, sorted by name."""
    found: list[Item] = []
    for item in tier.scan(prefix):
        found += [item] if item.size_bytes is not None else walk(tier, item.name)
    return sorted(found)


def read_range(file: ReadFile, begin: int, length: int) -> bytes:
    """Return ``length`` bytes from an offset on, or fewer at the end."""
    buffer = bytearray(length)
    got = file.read_into(memoryview(buffer), begin)
    return bytes(buffer[:got])


def raised_by(call: Callable[[], object]) -> BaseException | None:
    """Return the exception that a call raises, or None."""
    try:
        call()
    except Exception as error:
        return error
    return None


def creating(tiers: list[Tier], name: str, start: threading.Barrier) -> Callable[[int], bool]:
    """Return a writer that creates one name as soon as all other writers are ready to do it."""

    def create(number: int) -> bool:
        start.wait(_TIMEOUT_S)
        return tiers[number].create(name, f"writer {number}".encode())

    return create


def at_once(work: Callable[[int], _T]) -> list[_T]:
    """Run ``work(0)`` to ``work(7)`` in concurrent threads; return their results."""
    results: dict[int, _T] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT_S)
    if errors:
        raise errors[0]
    assert len(results) == WRITERS, f"{WRITERS - len(results)} writers hang"
    return [results[number] for number in range(WRITERS)]


@dataclass(frozen=True, slots=True)
class Place:
    """A tier under test, and access to it.

    Attributes:
        open: a handle; each further one sees what the others wrote. For what exists only as
            one object, the same each time.
        large_bytes: of the largest object that a check writes: more than one transfer of the tier.
    """

    open: Callable[[], Tier]
    large_bytes: int = 9_000_000


Check = Callable[[Place], None]


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one check.

    Attributes:
        problem: None if all is well, else where and why not.
    """

    check: str
    problem: str | None
    seconds: float

    def __str__(self) -> str:
        return f"{'ok  ' if self.problem is None else 'FAIL'} {self.check} {self.seconds:.2f} s" + (
            f"\n{self.problem}" if self.problem else ""
        )


def conformance(place: Place, checks: Sequence[Check] | None = None) -> list[Result]:
    """Run all checks on a tier, whatever one of them finds."""
    return run_checks(CHECKS if checks is None else checks, place)


def run_checks(checks: Sequence[Callable[[_T], None]], subject: _T) -> list[Result]:
    """Run checks on a subject, whatever one of them finds."""
    results = []
    for check in checks:
        began_s = time.monotonic()
        problem = None
        try:
            check(subject)
        except Exception:
            problem = traceback.format_exc()
        results.append(Result(check.__name__, problem, time.monotonic() - began_s))
    return results


# --- Writing and reading ----------------------------------------------------------------


def what_is_put_is_read(place: Place) -> None:
    """All sizes around nothing, one and a few."""
    tier, prefix = _open(place)
    for size in (0, 1, 7, 4096, 4097, 100_000):
        data = bytes_of(size)
        tier.put(f"{prefix}/size-{size}", source_of(data))
        assert read_object(tier, f"{prefix}/size-{size}") == data, f"{size} bytes come back changed"


def large_objects_come_back_whole(place: Place) -> None:
    """More than goes in one transfer, and not a whole number of them."""
    tier, prefix = _open(place)
    data = bytes_of(place.large_bytes)
    tier.put(f"{prefix}/large", source_of(data))
    file = tier.open(f"{prefix}/large")
    try:
        assert file.size_bytes == len(data), "its size is another"
        assert read_whole(file, "large") == data, "its bytes are others"
    finally:
        file.close()


def ranges_are_half_open(place: Place) -> None:
    """A read from an offset returns the bytes up to the end; none after the end."""
    tier, prefix = _open(place)
    data = bytes_of(10_000)
    tier.put(f"{prefix}/ranges", source_of(data))
    file = tier.open(f"{prefix}/ranges")
    try:
        for begin, length in ((0, 1), (0, 10_000), (1, 4096), (9_999, 1), (5_000, 5_000)):
            assert read_range(file, begin, length) == data[begin : begin + length], (begin, length)
        assert read_range(file, 9_990, 100) == data[9_990:], "a range over the end is cut there"
        assert read_range(file, 10_000, 10) == b"", "there is nothing after the end"
        assert read_range(file, 10_500, 10) == b"", "there is nothing after the end"
        assert read_range(file, 3, 5) == data[3:8], "a range may be read again, and in any order"
    finally:
        file.close()


def put_replaces(place: Place) -> None:
    """Shorter, longer, and to nothing; whoever reads the old object gets no mixture."""
    tier, prefix = _open(place)
    name = f"{prefix}/replaced"
    first = bytes_of(50_000)
    tier.put(name, source_of(first))
    reader = tier.open(name)
    try:
        assert read_range(reader, 0, 10) == first[:10]
        for data in (bytes_of(20_000, 1), bytes_of(60_000, 2), b""):
            tier.put(name, source_of(data))
            assert read_object(tier, name) == data, "what was put last is what is there"
        try:
            rest = read_range(reader, 10, 49_990)
        except (StorageError, FileNotFoundError):
            return  # it may say that it is another object now
        assert rest == first[10:], "a reader got bytes of an object that it had not opened"
    finally:
        reader.close()


def a_source_that_breaks_leaves_nothing(place: Place) -> None:
    """Its own error comes back; the name has what it had before."""
    tier, prefix = _open(place)
    name = f"{prefix}/broken"
    kept = bytes_of(1000)
    for size in (100_000, place.large_bytes):
        for before in (None, kept):
            if before is not None:
                tier.put(name, source_of(before))
            raised = raised_by(lambda n=size: tier.put(name, BrokenSource(n)))  # type: ignore[misc]
            assert isinstance(raised, BrokenError), f"its own error is lost: {raised!r}"
            assert read_or_none(tier, name) == before, "a part of it is there"
            tier.delete(name)


def a_source_that_is_too_short_leaves_nothing(place: Place) -> None:
    """It says that it has more bytes than it gives."""
    tier, prefix = _open(place)
    for size in (100_000, place.large_bytes):
        name = f"{prefix}/short-{size}"
        raised = raised_by(lambda n=size: tier.put(f"{prefix}/short-{n}", ShortSource(n)))  # type: ignore[misc]
        assert isinstance(raised, EverstepError), f"not noticed: {raised!r}"
        assert read_or_none(tier, name) is None, "it is there all the same"


# --- Who was first ----------------------------------------------------------------------


def create_keeps_what_is_there(place: Place) -> None:
    """True for what is there with these bytes, False for others; nothing changes."""
    tier, prefix = _open(place)
    name = f"{prefix}/created"
    assert tier.create(name, b"first") is True, "nothing was there"
    assert tier.create(name, b"other") is False, "something else was there"
    assert tier.create(name, b"first-") is False, "longer is something else"
    assert tier.create(name, b"") is False, "nothing is something else"
    assert tier.create(name, b"first") is True, "repeating it is harmless"
    assert read_object(tier, name) == b"first", "it was changed"
    tier.delete(name)
    assert tier.create(name, b"other") is True, "after it was deleted, nothing was there"
    tier.put(f"{prefix}/put", source_of(b"put"))
    assert tier.create(f"{prefix}/put", b"created") is False, "put counts, too"


def of_many_at_once_one_creates(place: Place) -> None:
    """Several writers with handles of their own, bytes of their own, and one name."""
    prefix = _prefix()
    for turn in range(5):
        name = f"{prefix}/race-{turn}"
        tiers = [place.open() for _ in range(WRITERS)]
        write = creating(tiers, name, threading.Barrier(WRITERS))
        won = [number for number, first in enumerate(at_once(write)) if first]
        assert len(won) == 1, f"{len(won)} of {WRITERS} writers were first"
        there = read_object(place.open(), name)
        assert there == f"writer {won[0]}".encode(), f"{won[0]} was first, but {there!r} is there"


def many_write_at_once(place: Place) -> None:
    """Each its own object, each whole."""
    tier, prefix = _open(place)

    def write(number: int) -> bytes:
        data = bytes_of(50_000, number)
        tier.put(f"{prefix}/of-{number}", source_of(data))
        return data

    for number, data in enumerate(at_once(write)):
        assert read_object(tier, f"{prefix}/of-{number}") == data


def of_many_puts_one_is_there_whole(place: Place) -> None:
    """The same name, as many other bytes: in the end it has those of one of them."""
    tier, prefix = _open(place)

    def write(number: int) -> bytes:
        data = bytes([number + 1]) * 20_000
        tier.put(f"{prefix}/same", source_of(data))
        return data

    written = at_once(write)
    assert read_object(tier, f"{prefix}/same") in written, "a mixture of several"


# --- Names ------------------------------------------------------------------------------


def missing_names_are_missing(place: Place) -> None:
    """``FileNotFoundError``, for what never was and for what only others begin with."""
    tier, prefix = _open(place)
    tier.put(f"{prefix}/folder/object", source_of(b"x"))
    for name in ("nothing", "folder", "folder/objec", "folder/object-2", "nowhere/nothing"):
        raised = raised_by(lambda n=name: tier.open(f"{prefix}/{n}"))  # type: ignore[misc]
        assert isinstance(raised, FileNotFoundError), f"{name}: {raised!r}"


def listings_show_what_is_there(place: Place) -> None:
    """One level or all, by whole parts of names, sorted, with sizes."""
    tier, prefix = _open(place)
    sizes = {"a": 1, "b/1": 2, "b/12": 3, "b/2/x": 0, "b-1": 4, "c": 5}
    for name, size in sizes.items():
        tier.put(f"{prefix}/{name}", source_of(bytes_of(size)))
    if not tier.traits.consistent:
        return
    everything = [(item.name, item.size_bytes) for item in walk(tier, prefix)]
    assert everything == sorted((f"{prefix}/{n}", s) for n, s in sizes.items()), everything
    top = [(item.name, item.size_bytes) for item in tier.scan(prefix)]
    expected = [("a", 1), ("b", None), ("b-1", 4), ("c", 5)]
    assert top == [(f"{prefix}/{n}", s) for n, s in expected], top
    inside = [item.name for item in tier.scan(f"{prefix}/b")]
    assert inside == [f"{prefix}/b/1", f"{prefix}/b/12", f"{prefix}/b/2"], inside
    assert [item.name for item in walk(tier, f"{prefix}/b")] == [
        f"{prefix}/b/1",
        f"{prefix}/b/12",
        f"{prefix}/b/2/x",
    ]
    assert not tier.scan(f"{prefix}/none"), "nothing is no error"
    assert not walk(tier, f"{prefix}/none"), "nothing is no error"


def what_is_deleted_is_gone(place: Place) -> None:
    """From names and listings; deleting twice is no error."""
    tier, prefix = _open(place)
    tier.put(f"{prefix}/kept", source_of(b"kept"))
    tier.put(f"{prefix}/deep/er/gone", source_of(b"gone"))
    tier.delete(f"{prefix}/deep/er/gone")
    tier.delete(f"{prefix}/deep/er/gone")
    tier.delete(f"{prefix}/never")
    assert read_or_none(tier, f"{prefix}/deep/er/gone") is None, "it can still be opened"
    if tier.traits.consistent:
        names = [item.name for item in walk(tier, prefix)]
        assert names == [f"{prefix}/kept"], f"still listed: {names}"
        assert not tier.scan(f"{prefix}/deep/er"), "still listed"
    tier.put(f"{prefix}/deep/er/gone", source_of(b"back"))
    assert read_object(tier, f"{prefix}/deep/er/gone") == b"back"


def cleaning_up_takes_nothing_that_is_whole(place: Place) -> None:
    """Nor does it mind where there is nothing."""
    tier, prefix = _open(place)
    tier.put(f"{prefix}/a/b", source_of(b"whole"))
    for under in (prefix, f"{prefix}/a", f"{prefix}/a/b", f"{prefix}/nothing/there"):
        tier.sweep(under)
        tier.sweep(under)
    assert read_object(tier, f"{prefix}/a/b") == b"whole"
    raised = raised_by(lambda: tier.sweep("../a"))
    assert isinstance(raised, OptionError), f"a prefix that is none is taken: {raised!r}"


def names_of_every_kind(place: Place) -> None:
    """Whatever a name may hold comes back from a listing as it was given."""
    tier, prefix = _open(place)
    names = [
        "plain-name_1.safetensors",
        "with space",
        "per%20cent+plus",
        "ask?me#now&then=1",
        "d\u00e9j\u00e0 vu \u6b65",
        "~tilde'quote\"(x)[y]{z}",
        "x" * PART_BYTES_MAX,
        "timeline-00002/base/000000001200/rank-00000.done",
    ]
    for number, name in enumerate(names):
        tier.put(f"{prefix}/{name}", source_of(bytes_of(10, number)))
    for number, name in enumerate(names):
        assert read_object(tier, f"{prefix}/{name}") == bytes_of(10, number), f"{name!r} is another"
    if tier.traits.consistent:
        listed = [item.name for item in walk(tier, prefix)]
        assert listed == sorted(f"{prefix}/{name}" for name in names), listed


def what_is_no_name_is_refused(place: Place) -> None:
    """By every method, before anything is asked of the tier."""
    tier, prefix = _open(place)
    bad = ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.", "a\0b", "a\nb", "a\\b", "a.tmp"]
    bad += ["x" * (PART_BYTES_MAX + 1), "/".join("x" * 100 for _ in range(9)), "e\u0301"]
    assert len(bad[-2]) > NAME_BYTES_MAX
    for name in bad:
        for refused in (
            lambda n: tier.put(n, source_of(b"")),
            lambda n: tier.create(n, b""),
            lambda n: tier.open(n),
            lambda n: tier.delete(n),
        ):
            raised = raised_by(lambda n=name, call=refused: call(n))  # type: ignore[misc]
            assert isinstance(raised, OptionError), f"{name!r} is taken: {raised!r}"
    assert not walk(tier, prefix), "and something was written"


# --- What it says of itself -------------------------------------------------------------


def other_handles_see_it(place: Place) -> None:
    """As soon as the call has returned, and after the writer's handle is closed."""
    prefix = _prefix()
    writer = place.open()
    reader = place.open()
    writer.put(f"{prefix}/shared", source_of(b"shared"))
    assert read_object(reader, f"{prefix}/shared") == b"shared"
    assert writer.create(f"{prefix}/record", b"record")
    assert reader.create(f"{prefix}/record", b"other") is False
    writer.close()
    assert read_object(place.open(), f"{prefix}/shared") == b"shared"


def it_says_what_it_is(place: Place) -> None:
    """Kind, cost; an address without credentials; it can be read, and reached anew."""
    tier, prefix = _open(place)
    traits = tier.traits
    assert traits.kind, "it has no kind"
    assert traits.cost >= 0
    assert "@" not in tier.url, "its address has a user in it"
    tier.check()
    tier.put(f"{prefix}/kept", source_of(b"kept"))
    tier.refresh()
    assert read_object(tier, f"{prefix}/kept") == b"kept", (
        "what was there is not, with new connections"
    )


CHECKS: tuple[Check, ...] = (
    what_is_put_is_read,
    large_objects_come_back_whole,
    ranges_are_half_open,
    put_replaces,
    a_source_that_breaks_leaves_nothing,
    a_source_that_is_too_short_leaves_nothing,
    create_keeps_what_is_there,
    of_many_at_once_one_creates,
    many_write_at_once,
    of_many_puts_one_is_there_whole,
    missing_names_are_missing,
    listings_show_what_is_there,
    what_is_deleted_is_gone,
    cleaning_up_takes_nothing_that_is_whole,
    names_of_every_kind,
    what_is_no_name_is_refused,
    other_handles_see_it,
    it_says_what_it_is,
)
"""Every check, in the order in which they are best read."""


def _prefix() -> str:
    return f"conformance-{uuid.uuid4().hex[:12]}"


def _open(place: Place) -> tuple[Tier, str]:
    return place.open(), _prefix()
