"""The simulated file system: its contract, its durability rules, and its likeness to Linux."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.seams.filesystem import FileSystem
from everstep.seams.posix import PosixFileSystem
from tests.crash.sim.faults import Fault, SimulatedCrash
from tests.crash.sim.filesystem import SimFileSystem

A, B, D = PurePath("/a"), PurePath("/b"), PurePath("/d")
ROOT = PurePath("/")


def put(fs: FileSystem, path: PurePath, data: bytes, *, durable: bool = False) -> None:
    handle = fs.create(path)
    handle.write(memoryview(data), 0)
    if durable:
        handle.sync()
        fs.sync_dir(path.parent)
    handle.close()


def get(fs: SimFileSystem, path: PurePath) -> bytes | None:
    return fs.read_bytes(path) if str(path) in fs.paths() else None


def images(fs: SimFileSystem, count: int = 60) -> list[SimFileSystem]:
    return list(fs.crash_images(seed=1, count=count))


def outcomes(fs: SimFileSystem, look: Callable[[SimFileSystem], Any], count: int = 60) -> set[Any]:
    """What ``look`` sees on the crash images of ``fs``."""
    return {look(image) for image in images(fs, count)}


class TestDurability:
    def test_neither_name_nor_bytes_survive_without_syncs(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello")
        assert outcomes(fs, lambda i: get(i, A)) >= {None, b"", b"hello"}

    def test_file_sync_makes_bytes_durable_but_not_the_name(self) -> None:
        fs = SimFileSystem()
        handle = fs.create(A)
        handle.write(memoryview(b"hello"), 0)
        handle.sync()
        assert outcomes(fs, lambda i: get(i, A)) == {None, b"hello"}

    def test_dir_sync_makes_the_name_durable_but_not_the_bytes(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello")
        fs.sync_dir(ROOT)
        assert outcomes(fs, lambda i: get(i, A)) >= {b"", b"hello"}
        assert None not in outcomes(fs, lambda i: get(i, A))

    def test_both_syncs_make_it_certain(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello", durable=True)
        assert outcomes(fs, lambda i: get(i, A)) == {b"hello"}
        assert fs.survive_all().fingerprint() == next(fs.crash_images(0, 0)).fingerprint()

    def test_extremes_come_first(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello")
        nothing, everything, names, data = fs.crash_images(seed=0, count=2)
        assert [get(i, A) for i in (nothing, everything, names, data)] == [
            None,
            b"hello",
            b"",
            None,
        ]

    def test_writes_survive_one_by_one(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"....", durable=True)
        handle = fs.reuse(A)
        assert handle is not None
        for offset, data in ((0, b"x"), (2, b"y")):
            handle.write(memoryview(data), offset)
        assert outcomes(fs, lambda i: get(i, A)) == {b"....", b"x...", b"..y.", b"x.y."}

    def test_a_write_tears_at_sectors_only(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"." * 1500, durable=True)
        handle = fs.reuse(A)
        assert handle is not None
        handle.write(memoryview(b"x" * 1400), 100)
        seen = outcomes(fs, lambda i: get(i, A), count=200)
        parts = [(100, 512), (512, 1024), (1024, 1500)]
        allowed = set()
        for keep in itertools.product((False, True), repeat=3):
            content = bytearray(b"." * 1500)
            for (start, end), kept in zip(parts, keep, strict=True):
                if kept:
                    content[start:end] = b"x" * (end - start)
            allowed.add(bytes(content))
        assert seen == allowed

    def test_the_size_may_survive_without_the_data(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"", durable=True)
        handle = fs.reuse(A)
        assert handle is not None
        handle.write(memoryview(b"xyz"), 0)
        assert outcomes(fs, lambda i: get(i, A), count=200) == {b"", b"xyz", bytes(3)}

    def test_truncation_is_pending_too(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello", durable=True)
        handle = fs.reuse(A)
        assert handle is not None
        handle.truncate(2)
        assert outcomes(fs, lambda i: get(i, A)) == {b"hello", b"he"}
        handle.sync()
        assert outcomes(fs, lambda i: get(i, A)) == {b"he"}

    def test_rename_is_atomic(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"new", durable=True)
        put(fs, B, b"old", durable=True)
        fs.rename(A, B)
        both = outcomes(fs, lambda i: (get(i, A), get(i, B)))
        assert both == {(b"new", b"old"), (None, b"new")}
        fs.sync_dir(ROOT)
        assert outcomes(fs, lambda i: (get(i, A), get(i, B))) == {(None, b"new")}

    @pytest.mark.parametrize(
        ("synced", "allowed"),
        [
            (None, {(b"x", None), (None, b"x")}),
            (D, {(b"x", b"x"), (None, b"x")}),
            (ROOT, {(None, None), (None, b"x")}),
        ],
    )
    def test_rename_between_directories_is_certain_only_where_synced(
        self, synced: PurePath | None, allowed: set[Any]
    ) -> None:
        fs = SimFileSystem()
        fs.make_dir(D)
        put(fs, A, b"x", durable=True)
        fs.rename(A, D / "b")
        if synced:
            fs.sync_dir(synced)
        assert outcomes(fs, lambda i: (get(i, A), get(i, D / "b"))) == allowed

    def test_unlink_and_link_are_pending_until_the_directory_is_synced(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"x", durable=True)
        fs.link(A, B)
        fs.unlink(A)
        assert outcomes(fs, lambda i: (get(i, A), get(i, B))) == {
            (b"x", None),
            (b"x", b"x"),
            (None, None),
            (None, b"x"),
        }
        fs.sync_dir(ROOT)
        assert outcomes(fs, lambda i: (get(i, A), get(i, B))) == {(None, b"x")}

    def test_a_lost_directory_takes_everything_below_with_it(self) -> None:
        fs = SimFileSystem()
        fs.make_dir(D)
        put(fs, D / "a", b"x", durable=True)
        assert outcomes(fs, lambda i: tuple(i.paths())) == {(), ("/d", "/d/a")}
        fs.sync_dir(ROOT)
        assert outcomes(fs, lambda i: tuple(i.paths())) == {("/d", "/d/a")}

    def test_a_removed_directory_may_come_back(self) -> None:
        fs = SimFileSystem()
        fs.make_dir(D)
        fs.sync_dir(ROOT)
        fs.remove_dir(D)
        assert outcomes(fs, lambda i: tuple(i.paths())) == {(), ("/d",)}

    def test_overwriting_a_slot_shows_through_a_rename_that_was_lost(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"old", durable=True)
        fs.rename(A, B)
        handle = fs.reuse(B)
        assert handle is not None
        handle.write(memoryview(b"new"), 0)
        handle.sync()
        assert outcomes(fs, lambda i: (get(i, A), get(i, B))) == {(b"new", None), (None, b"new")}

    def test_a_process_kill_loses_nothing_but_leaves_it_unsynced(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello")
        after = fs.survive_all()
        assert get(after, A) == b"hello"
        assert outcomes(after, lambda i: get(i, A)) >= {None, b"", b"hello"}

    def test_an_image_is_durable(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello")
        for image in images(fs):
            assert {again.fingerprint() for again in images(image, 4)} == {image.fingerprint()}

    def test_same_seed_same_images(self) -> None:
        fs = SimFileSystem()
        fs.make_dir(D)
        for path in (A, B, D / "a"):
            put(fs, path, b"x" * 2000)
        first = [(i.origin, i.fingerprint()) for i in fs.crash_images(7, 30)]
        again = [(i.origin, i.fingerprint()) for i in fs.clone().crash_images(7, 30)]
        other = [(i.origin, i.fingerprint()) for i in fs.crash_images(8, 30)]
        assert first == again
        assert first != other

    def test_a_clone_goes_its_own_way(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello", durable=True)
        copy = fs.clone()
        put(copy, B, b"only there")
        handle = copy.reuse(A)
        assert handle is not None
        handle.write(memoryview(b"J"), 0)
        assert get(fs, A) == b"hello"
        assert get(copy, A) == b"Jello"
        assert copy.clone().reuse(A) is not None  # the copy's open file is not open there
        assert get(fs, B) is None
        again = fs.reuse(A)
        assert again is not None
        again.write(memoryview(b"C"), 0)
        assert (get(fs, A), get(copy, A)) == (b"Cello", b"Jello")


class TestFilesAndHandles:
    def test_an_unlinked_file_works_while_it_is_open(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello", durable=True)
        reader = fs.open(A)
        fs.unlink(A)
        fs.sync_dir(ROOT)
        buffer = bytearray(8)
        assert reader.read_into(memoryview(buffer), 1) == 4
        assert bytes(buffer[:4]) == b"ello"
        assert fs.scan(ROOT) == []

    def test_reuse_refuses_what_anybody_may_be_looking_at(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello")
        reader = fs.open(A)
        assert fs.reuse(A) is None
        reader.close()
        reader.close()
        mapped = fs.map(A)
        assert fs.reuse(A) is None
        mapped.close()
        fs.link(A, B)
        assert fs.reuse(A) is None
        assert fs.reuse(B) is None
        fs.unlink(B)
        assert fs.reuse(PurePath("/nothing")) is None
        assert fs.reuse(ROOT) is None
        writer = fs.reuse(A)
        assert writer is not None
        assert fs.reuse(A) is None
        writer.close()
        assert fs.reuse(A) is not None

    def test_a_mapping_is_a_live_view(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello")
        handle = fs.reuse(A)
        assert handle is not None
        mapped = fs.map(A)
        handle.write(memoryview(b"J"), 0)
        assert mapped.read() == b"Jello"
        fs.unlink(A)
        handle.truncate(1)
        assert mapped.read() == b"J"

    def test_reading_stops_at_the_end(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello")
        reader = fs.open(A)
        assert reader.size_bytes == 5
        assert reader.read_into(memoryview(bytearray(3)), 5) == 0
        assert reader.read_into(memoryview(bytearray(3)), 99) == 0
        reader.close()
        with pytest.raises(OSError, match="descriptor") as caught:
            reader.read_into(memoryview(bytearray(3)), 0)
        assert caught.value.errno == errno.EBADF

    def test_typed_memoryviews_are_bytes(self) -> None:
        fs = SimFileSystem()
        handle = fs.create(A)
        handle.write(memoryview(bytes(range(16))).cast("I"), 0)
        assert get(fs, A) == bytes(range(16))

    def test_holes_take_no_room(self) -> None:
        fs = SimFileSystem(capacity_bytes=3 * 4096)
        handle = fs.create(A)
        handle.write(memoryview(b"x"), 1 << 20)
        [entry] = fs.scan(ROOT)
        assert (entry.size_bytes, entry.allocated_bytes) == ((1 << 20) + 1, 4096)
        assert fs.free_bytes(ROOT) == 2 * 4096
        handle.truncate(10)
        assert fs.free_bytes(ROOT) == 3 * 4096

    def test_corruption_is_durable(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"\x00\x00", durable=True)
        fs.corrupt(A, 1, 0x10)
        assert outcomes(fs, lambda i: get(i, A)) == {b"\x00\x10"}

    def test_threads_may_write_at_once(self) -> None:
        fs = SimFileSystem()
        handle = fs.create(A)

        def write(worker: int) -> None:
            for piece in range(50):
                handle.write(memoryview(bytes([worker]) * 10), (piece * 4 + worker) * 10)

        workers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=30)
        assert get(fs, A) == b"".join(bytes([worker]) * 10 for worker in range(4)) * 50
        assert [operation.number for operation in fs.log] == list(range(1, 202))


class TestFaults:
    def test_operations_are_numbered_and_reads_apart(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello", durable=True)
        fs.scan(ROOT)
        fs.rename(A, B)
        assert [(o.number, o.op, o.path, o.detail) for o in fs.log] == [
            (1, "create", "/a", ""),
            (2, "write", "/a", "[0, 5)"),
            (3, "sync", "/a", ""),
            (4, "sync_dir", "/", ""),
            (5, "rename", "/a", "-> /b"),
        ]
        assert [o.op for o in fs.reads] == ["scan"]
        assert fs.clone().log == []

    @pytest.mark.parametrize(
        ("action", "expected"),
        [("crash_before", b""), ("crash_partly", b"x" * 512), ("crash_after", b"x" * 1500)],
    )
    def test_crash_and_then_nothing_works(self, action: Any, expected: bytes) -> None:
        fs = SimFileSystem()
        fs.inject(Fault(action, at=2))
        handle = fs.create(A)
        with pytest.raises(SimulatedCrash):
            handle.write(memoryview(b"x" * 1500), 0)
        assert fs.crashed
        after = fs.survive_all()
        assert get(after, A) == expected
        for call in (lambda: fs.scan(ROOT), lambda: fs.unlink(A), handle.sync):
            with pytest.raises(SimulatedCrash):
                call()
        handle.close()
        assert fs.survive_all().fingerprint() == after.fingerprint()
        assert after.scan(ROOT)

    def test_crash_before_and_after_every_kind_of_operation(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"x", durable=True)
        for fault, names in ((Fault("crash_before"), ["a"]), (Fault("crash_after"), ["b"])):
            other = fs.clone()
            other.inject(fault)
            with pytest.raises(SimulatedCrash):
                other.rename(A, B)
            assert [entry.name for entry in other.survive_all().scan(ROOT)] == names

    def test_errors_once_and_for_good(self) -> None:
        fs = SimFileSystem()
        fs.inject(Fault("error", at=2, errno=errno.EACCES))
        fs.make_dir(D)
        with pytest.raises(PermissionError, match="/a"):
            fs.create(A)
        fs.create(A)
        fs.inject(Fault("error", persistent=True, ops=frozenset({"unlink"}), path="*/a"))
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                fs.unlink(A)
        fs.create(B)
        fs.unlink(B)

    def test_a_failing_write_lands_in_part(self) -> None:
        fs = SimFileSystem()
        handle = fs.create(A)
        fs.inject(Fault("error", errno=errno.ENOSPC, ops=frozenset({"write"})))
        with pytest.raises(OSError, match="No space"):
            handle.write(memoryview(b"x" * 2048), 0)
        assert get(fs, A) == b"x" * 1024

    def test_what_a_failed_sync_lost_no_later_sync_brings_back(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"....", durable=True)
        handle = fs.reuse(A)
        assert handle is not None
        handle.write(memoryview(b"x"), 0)
        fs.inject(Fault("error", ops=frozenset({"sync"})))
        with pytest.raises(OSError, match="Input/output"):
            handle.sync()
        handle.write(memoryview(b"y"), 1)
        handle.sync()
        assert get(fs, A) == b"xy.."
        assert outcomes(fs, lambda i: get(i, A)) == {b"xy..", b".y.."}

    def test_a_lying_sync_does_nothing(self) -> None:
        fs = SimFileSystem()
        fs.inject(Fault("lie", persistent=True))
        put(fs, A, b"hello", durable=True)
        assert outcomes(fs, lambda i: get(i, A)) >= {None, b"", b"hello"}

    def test_reads_can_fail_too(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello")
        fs.inject(Fault("error", ops=frozenset({"read"})))
        reader = fs.open(A)
        buffer = bytearray(5)
        with pytest.raises(OSError, match="Input/output"):
            reader.read_into(memoryview(buffer), 0)
        assert reader.read_into(memoryview(buffer), 0) == 5

    def test_a_full_disk_takes_what_fits(self) -> None:
        fs = SimFileSystem(capacity_bytes=2 * 4096)
        handle = fs.create(A)
        with pytest.raises(OSError, match="No space") as caught:
            handle.write(memoryview(b"x" * 10_000), 100)
        assert caught.value.errno == errno.ENOSPC
        assert get(fs, A) == bytes(100) + b"x" * (2 * 4096 - 100)
        handle.write(memoryview(b"y" * 4096), 0)  # taken already
        assert fs.free_bytes(ROOT) == 0
        fs.unlink(A)
        assert fs.free_bytes(ROOT) == 0  # still open
        handle.close()
        assert fs.free_bytes(ROOT) == 2 * 4096

    def test_read_only(self) -> None:
        fs = SimFileSystem()
        put(fs, A, b"hello")
        fs.read_only = True
        for call in (lambda: fs.create(B), lambda: fs.unlink(A), lambda: fs.sync_dir(ROOT)):
            with pytest.raises(OSError, match="Read-only"):
                call()
        assert fs.reuse(A) is None
        assert fs.open(A).size_bytes == 5


# A plain model of the durability rules, which tries every subset.


class Model:
    """Files as byte strings and lists of pending changes; names as a dict and a list."""

    def __init__(self) -> None:
        self.stable: dict[str, bytes] = {}
        self.pending: dict[str, list[tuple[int, bytes | None]]] = {}
        self.names: dict[PurePath, str] = {}
        self.stable_names: dict[PurePath, str] = {}
        self.pending_names: list[list[tuple[PurePath, str | None]]] = []

    def rename(self, *changes: tuple[PurePath, str | None]) -> None:
        self.pending_names.append(list(changes))
        _change_names(self.names, changes)

    def sync_dir(self, path: PurePath) -> None:
        for effect in self.pending_names:
            _change_names(self.stable_names, [c for c in effect if c[0].parent == path])
            effect[:] = [c for c in effect if c[0].parent != path]

    def possible_contents(self, file: str) -> set[bytes]:
        return {_content(self.stable[file], subset) for subset in _subsets(self.pending[file])}

    def possible_bytes(self, file: str, position: int) -> set[int]:
        """With torn writes: what may be at ``position``, if the file is that long."""
        values = {0, *self.stable[file][position : position + 1]}
        for offset, data in self.pending[file]:
            if data is not None and offset <= position < offset + len(data):
                values.add(data[position - offset])
        return values

    def possible_names(self) -> list[dict[PurePath, str]]:
        found = []
        for subset in _subsets(self.pending_names):
            names = dict(self.stable_names)
            for effect in subset:
                _change_names(names, effect)
            found.append(names)
        return found


def _subsets(items: list[Any]) -> Iterator[tuple[Any, ...]]:
    return itertools.chain.from_iterable(
        itertools.combinations(items, size) for size in range(len(items) + 1)
    )


def _change_names(names: dict[PurePath, str], changes: Any) -> None:
    for path, file in changes:
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file


def _content(stable: bytes, changes: tuple[tuple[int, bytes | None], ...]) -> bytes:
    content = stable
    for offset, data in changes:
        if data is None:
            content = content[:offset].ljust(offset, b"\0")
        else:
            content = content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]
    return content


PLACES = [PurePath(p) for p in ("/a", "/b", "/d/a", "/d/b")]
place = st.sampled_from(PLACES)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), place),
        st.tuples(st.just("write"), place, st.integers(0, 700), st.sampled_from([1, 90, 1100])),
        st.tuples(st.just("truncate"), place, st.sampled_from([0, 3, 600])),
        st.tuples(st.just("sync"), place),
        st.tuples(st.just("rename"), place, place),
        st.tuples(st.just("link"), place, place),
        st.tuples(st.just("unlink"), place),
        st.tuples(st.just("sync_dir"), st.sampled_from([ROOT, D])),
    ),
    max_size=12,
)


def run_with_model(steps: list[Any]) -> tuple[SimFileSystem, Model]:
    fs, model = SimFileSystem(), Model()
    fs.make_dir(D)
    fs.sync_dir(ROOT)
    handles: dict[str, Any] = {}
    for number, (op, path, *rest) in enumerate(steps):
        file = model.names.get(path)
        if op == "create" and file is None:
            new = f"file {number}"
            handles[new] = fs.create(path)
            model.stable[new], model.pending[new] = b"", []
            model.rename((path, new))
        elif op == "write" and file is not None:
            data = bytes([number + 1]) * rest[1]
            handles[file].write(memoryview(data), rest[0])
            model.pending[file].append((rest[0], data))
        elif op == "truncate" and file is not None:
            handles[file].truncate(rest[0])
            model.pending[file].append((rest[0], None))
        elif op == "sync" and file is not None:
            handles[file].sync()
            model.stable[file] = _content(model.stable[file], tuple(model.pending[file]))
            model.pending[file] = []
        elif op == "rename" and file is not None and model.names.get(rest[0]) != file:
            fs.rename(path, rest[0])
            model.rename((path, None), (rest[0], file))
        elif op == "link" and file is not None and rest[0] not in model.names:
            fs.link(path, rest[0])
            model.rename((rest[0], file))
        elif op == "unlink" and file is not None:
            fs.unlink(path)
            model.rename((path, None))
        elif op == "sync_dir":
            fs.sync_dir(path)
            model.sync_dir(path)
    return fs, model


@settings(max_examples=120)
@given(STEPS, st.integers(0, 1000))
def test_crash_images_are_what_the_plain_model_allows(steps: list[Any], seed: int) -> None:
    fs, model = run_with_model(steps)
    for path, file in model.names.items():
        now = _content(model.stable[file], tuple(model.pending[file]))
        assert fs.read_bytes(path) == now
    possible = {frozenset(names.items()) for names in model.possible_names()}
    contents = {file: model.possible_contents(file) for file in model.stable}
    for image in fs.crash_images(seed, 12):
        found = {
            PurePath(p): image.read_bytes(PurePath(p))
            for p, k in image.paths().items()
            if k == "file"
        }
        torn = "torn: " in image.origin

        def fits(file: str, data: bytes, torn: bool = torn) -> bool:
            if not torn:
                return data in contents[file]
            return all(v in model.possible_bytes(file, n) for n, v in enumerate(data))

        assert any(
            dict(names).keys() == found.keys()
            and all(fits(file, found[path]) for path, file in names)
            for names in possible
        ), image.origin


@settings(max_examples=40)
@given(STEPS)
def test_every_subset_of_names_turns_up(steps: list[Any]) -> None:
    fs, model = run_with_model(steps[:5])
    expected = {frozenset(names) for names in model.possible_names()}
    seen = set()
    for image in fs.crash_images(3, 400):
        seen.add(frozenset(PurePath(p) for p, k in image.paths().items() if k == "file"))
    assert seen == expected


# The same calls on a real file system.

NAMES = [PurePath(p) for p in ("a", "b", "d", "d/a", "d/e", "d/e/a", ".")]
name = st.sampled_from(NAMES)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), name),
        st.tuples(st.just("make_dir"), name),
        st.tuples(st.just("make_dir"), name),
        st.tuples(st.just("reuse"), name),
        st.tuples(st.just("read"), name),
        st.tuples(st.just("rename"), name, name),
        st.tuples(st.just("rename"), name, name),
        st.tuples(st.just("link"), name, name),
        st.tuples(st.just("unlink"), name),
        st.tuples(st.just("remove_dir"), st.sampled_from(NAMES[:-1])),
        st.tuples(st.just("sync_dir"), name),
        st.tuples(st.just("scan"), name),
        st.tuples(st.just("write"), st.integers(0, 3), st.integers(0, 9000), st.binary(max_size=9)),
        st.tuples(st.just("truncate"), st.integers(0, 3), st.integers(0, 9000)),
        st.tuples(st.just("close"), st.integers(0, 3)),
    ),
    max_size=25,
)


def perform(fs: FileSystem, root: PurePath, calls: list[Any]) -> list[Any]:
    """What a program sees that makes ``calls`` below ``root``."""
    open_files: list[Any] = []
    seen: list[Any] = []
    for op, *rest in calls:
        paths = [root / arg for arg in rest if isinstance(arg, PurePath)]
        try:
            if op in ("create", "reuse"):
                handle = getattr(fs, op)(*paths)
                seen.append(handle is not None)
                if handle is not None:
                    open_files.append(handle)
            elif op == "read":
                reader = fs.open(*paths)
                buffer = bytearray(reader.size_bytes + 7)
                got = reader.read_into(memoryview(buffer), 0)
                reader.close()
                seen.append((reader.size_bytes, bytes(buffer[:got])))
            elif op == "scan":
                listed = fs.scan(*paths)
                files = [e.size_bytes if e.kind == "file" else None for e in listed]
                seen.append([(e.name, e.kind, f) for e, f in zip(listed, files, strict=True)])
            elif op in ("write", "truncate", "close"):
                if rest[0] < len(open_files):
                    args = [memoryview(rest[2]), rest[1]] if op == "write" else rest[1:]
                    seen.append(getattr(open_files[rest[0]], op)(*args))
            else:
                seen.append(getattr(fs, op)(*paths))
        except OSError as error:
            seen.append(errno.errorcode[error.errno or 0])
    for handle in open_files:
        handle.close()
    seen.append(sorted(_tree(fs, root, root)))
    return seen


def _tree(fs: FileSystem, root: PurePath, folder: PurePath) -> Iterator[tuple[str, Any]]:
    for entry in fs.scan(folder):
        path = folder / entry.name
        yield str(path.relative_to(root)), entry.kind
        if entry.kind == "dir":
            yield from _tree(fs, root, path)


@pytest.fixture(scope="module")
def real_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("posix")
    fs = PosixFileSystem()
    put(fs, folder / "probe", b"x")
    handle = fs.reuse(folder / "probe")
    if handle is None:
        pytest.skip("this file system has no leases, so nothing can be reused on it")
    handle.close()
    return folder


def in_a_word(text: str) -> list[Any]:
    """``"make_dir d; rename a b"`` as calls."""
    words = [part.split() for part in text.split(";")]
    return [(op, *(PurePath(word) for word in args)) for op, *args in words]


@pytest.mark.parametrize(
    "text",
    [
        "create a; create a; create d/a; make_dir a",
        "create a; make_dir a/x; create a/x; scan a; sync_dir a; remove_dir a; read a/x",
        "make_dir d; create d; make_dir d; unlink d; read d; reuse d; link d a; sync_dir d",
        "make_dir d; create d/a; remove_dir d; unlink d/a; remove_dir d; remove_dir d",
        "make_dir d; make_dir d/e; rename d d/e; rename d d/e/a; rename d/e d; rename d d",
        "make_dir d; make_dir d/e; create d/e/a; rename d/e/a d; rename d/e/a d/e; rename d b",
        "make_dir d; make_dir b; rename d b; make_dir d; create d/a; rename b d; rename d b",
        "create a; make_dir d; rename a d; rename d a; rename a b; rename a b; rename b d/a",
        "create a; link a b; link a b; rename a b; unlink a; rename a b; read b; link b x/y",
        "create a; create b; rename a b; scan .; read b; read a; link a b; link x y; unlink x",
        f"create {'n' * 255}; create {'n' * 256}; read {'n' * 256}; rename a {'n' * 256}",
        "scan x; sync_dir x; remove_dir x; unlink x; reuse x; rename x y; rename x/y z; link x y",
    ],
)
def test_every_refusal_is_that_of_linux(real_folder: Path, text: str) -> None:
    calls = in_a_word(text.replace("", ""))
    folder = real_folder / f"run-{len(os.listdir(real_folder))}"  # nothing here is removed
    folder.mkdir()
    fs = SimFileSystem()
    fs.make_dir(PurePath("/run"))
    assert perform(fs, PurePath("/run"), calls) == perform(PosixFileSystem(), folder, calls)


@settings(max_examples=150)
@given(calls=CALLS)
def test_a_program_sees_the_same_as_on_linux(real_folder: Path, calls: list[Any]) -> None:
    folder = real_folder / f"run-{len(os.listdir(real_folder))}"  # nothing here is removed
    folder.mkdir()
    fs = SimFileSystem()
    fs.make_dir(PurePath("/run"))
    assert perform(fs, PurePath("/run"), calls) == perform(PosixFileSystem(), folder, calls)
