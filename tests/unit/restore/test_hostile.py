"""Run folders made to do harm: refused without reading or allocating what they claim."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from torch import nn

from everstep.errors import (
    EverstepError,
    ForeignDirectoryError,
    MismatchError,
    RecoveryError,
    StateError,
    StorageError,
)
from everstep.format.digests import digest, digest_of_file
from everstep.format.names import MANIFEST
from everstep.format.records import Manifest, Marker
from everstep.run.scan import newest_timeline
from everstep.seams import PosixFileSystem
from everstep.state.values.objects import TensorRef, encode
from tests.support.world import base_folder, inventory_of, opened, verdict_of

ROOM = 8192
HUGE = 1 << 40


def make_run(run: Path, bases: int = 2) -> None:
    state: dict[str, Any] = {"m": nn.Linear(2, 3), "d": {"n": 0, "t": torch.zeros(4)}}
    with opened(run, state) as ckpt:
        ckpt.resume()
        for step in range(1, bases + 1):
            state["d"]["n"] = step
            ckpt.step()
            ckpt.save()


def resume_into(run: Path, step: int | None = None) -> tuple[int, Any]:
    live: dict[str, Any] = {"m": nn.Linear(2, 3), "d": None}
    with opened(run, live) as ckpt:
        recovery = ckpt.resume(step)
    return recovery.step, live["d"]["n"]


@contextmanager
def little_memory(limit_bytes: int = 64 << 20) -> Iterator[None]:
    """Fails if Python allocates more than the chunks that are read into, and some: torch allocates
    nothing that a test would not see."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()


# Things of another kind where files and folders should be.


def outside(run: Path) -> Path:
    folder = run.parent / "outside"
    folder.mkdir(exist_ok=True)
    return folder


def link_away(run: Path, path: Path) -> None:
    """Moves what is at ``path`` out of the run and puts a symbolic link in its place."""
    elsewhere = outside(run) / path.name
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "000000000002"])
def test_links_are_never_followed(name: str, run_folder: Path) -> None:
    """Not even when what they lead to is perfectly good."""
    make_run(run_folder)
    base = base_folder(run_folder, 2)
    link_away(run_folder, base if name == base.name else base / name)
    assert resume_into(run_folder) == (1, 1)


@pytest.mark.parametrize("name", ["rank-00000.done", MANIFEST])
def test_a_linked_record_counts_as_missing(name: str, run_folder: Path) -> None:
    make_run(run_folder)
    link_away(run_folder, base_folder(run_folder, 2) / name)
    assert resume_into(run_folder) == (2, 2)


def test_a_linked_timeline_is_not_followed(run_folder: Path) -> None:
    """Its contents may be newer than all else: training goes on without it once it is removed."""
    make_run(run_folder)
    make_run(run_folder.with_name("other"), bases=5)
    link = run_folder / "timeline-00009"
    link.symlink_to(run_folder.with_name("other") / "timeline-00001")
    for step in (None, 0, 2):
        with pytest.raises(ForeignDirectoryError, match="timeline-00009 is a symbolic link"):
            resume_into(run_folder, step)
    assert newest_timeline(PosixFileSystem(), run_folder) == 1  # none was opened
    link.unlink()
    assert resume_into(run_folder) == (2, 2)


def test_retention_does_not_delete_through_links(run_folder: Path) -> None:
    make_run(run_folder)
    treasure = outside(run_folder) / "rank-00000.safetensors"
    treasure.write_text("precious")
    (run_folder / "timeline-00001" / "base" / "000000000000").symlink_to(outside(run_folder))
    (base_folder(run_folder, 1) / "rank-00000-00001.safetensors").symlink_to(treasure)
    slots = run_folder / "timeline-00001" / "slots"
    if slots.exists():
        slots.rmdir()
    slots.symlink_to(outside(run_folder))
    live: dict[str, Any] = {"m": nn.Linear(2, 3), "d": None}
    with opened(run_folder, live, keep=1) as ckpt:
        ckpt.resume()
        for _ in range(2):
            ckpt.step()
            ckpt.save()
    assert treasure.read_text() == "precious"


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.done", MANIFEST])
def test_pipes_do_not_hang(name: str, run_folder: Path) -> None:
    make_run(run_folder)
    path = base_folder(run_folder, 2) / name
    path.unlink()
    os.mkfifo(path)
    assert resume_into(run_folder) == ((1, 1) if name.endswith("safetensors") else (2, 2))


@pytest.mark.parametrize("name", ["run.json", "timeline-00001/timeline.json"])
def test_pipes_in_place_of_records_of_the_run(name: str, run_folder: Path) -> None:
    make_run(run_folder)
    (run_folder / name).unlink()
    os.mkfifo(run_folder / name)
    assert resume_into(run_folder) == (2, 2)


def test_a_device_in_place_of_a_shard(run_folder: Path) -> None:
    make_run(run_folder)
    path = base_folder(run_folder, 2) / "rank-00000.safetensors"
    path.unlink()
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("needs root")
    assert resume_into(run_folder) == (1, 1)


def test_folders_in_place_of_files(run_folder: Path) -> None:
    make_run(run_folder, bases=3)
    for step, name in ((3, "rank-00000.safetensors"), (2, MANIFEST)):
        path = base_folder(run_folder, step) / name
        path.unlink()
        path.mkdir()
    assert resume_into(run_folder) == (2, 2)


def test_a_file_in_place_of_a_base(run_folder: Path) -> None:
    make_run(run_folder)
    (run_folder / "timeline-00001/base/000000000009").write_text("x")
    assert resume_into(run_folder) == (2, 2)


@pytest.mark.parametrize("name", ["timeline-00002", "timeline-00001/base"])
def test_a_file_in_place_of_a_folder(name: str, run_folder: Path) -> None:
    """Neither passed over nor taken for a run in which nothing was saved."""
    make_run(run_folder)
    path = run_folder / name
    aside = run_folder / "aside"
    if path.exists():
        path.rename(aside)
    path.write_text("x")
    for step in (None, 0, 2):
        with pytest.raises(ForeignDirectoryError, match=f"{path.name} is not a directory"):
            resume_into(run_folder, step)
    path.unlink()
    if aside.exists():
        aside.rename(path)
    assert resume_into(run_folder) == (2, 2)


# Sizes and counts that are claimed.


@pytest.mark.parametrize("name", ["run.json", "timeline.json", MANIFEST, "rank-00000.done"])
def test_a_record_of_a_terabyte(name: str, run_folder: Path) -> None:
    make_run(run_folder)
    path = max(run_folder.rglob(name))
    with path.open("r+b") as file:
        file.truncate(HUGE)
    with little_memory():
        assert resume_into(run_folder) == (2, 2)


def test_a_shard_of_a_terabyte(run_folder: Path) -> None:
    make_run(run_folder)
    with (base_folder(run_folder, 2) / "rank-00000.safetensors").open("r+b") as file:
        file.truncate(HUGE)
    with little_memory():
        assert resume_into(run_folder) == (1, 1)
        assert verdict_of(inventory_of(run_folder).bases[1]).damages


def test_a_timeline_of_a_huge_number(run_folder: Path) -> None:
    """Never opened: it fences nobody off; the next one gets a larger number, if there is one."""
    make_run(run_folder)
    (run_folder / "timeline-99999").mkdir()
    assert resume_into(run_folder) == (2, 2)
    assert resume_into(run_folder) == (2, 2)
    assert newest_timeline(PosixFileSystem(), run_folder) == 100_001
    (run_folder / "timeline-999999999").mkdir()
    with pytest.raises(StorageError, match="the largest possible number"):
        resume_into(run_folder)


def test_thousands_of_names(run_folder: Path) -> None:
    make_run(run_folder)
    for number in range(3000):
        (base_folder(run_folder, 2) / f"rank-{number + 1:05d}.safetensors").touch()
        (run_folder / f"x{number}").touch()
    assert resume_into(run_folder) == (2, 2)


# Forged bases: every digest is right, what they say is not.

Change = Callable[[dict[str, Any], dict[str, Any], bytearray], int | None]


def forge(run: Path, step: int, change: Change) -> None:
    """Rewrites a base with good digests.

    Args:
        change: may alter header, metadata and body; returns the length that the file is made
            (sparse), if it is not that of the body.
    """
    folder = base_folder(run, step)
    marker = Marker.decode((folder / "rank-00000.done").read_bytes(), PurePath("x"))
    path = folder / marker.files[0].name
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = json.loads(header.pop("__metadata__")["everstep"])
    body = bytearray(data[8 + length :])
    size = change(header, metadata, body)
    digests = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found = digest(memoryview(body)[begin:end]) if end <= len(body) else "0" * 32
        metadata["entries"][name]["digest"] = found
        digests.append(found)
    text = json.dumps({"__metadata__": {"everstep": json.dumps(metadata)}, **header}).encode()
    assert len(text) <= ROOM - 8
    head = struct.pack("<Q", ROOM - 8) + text.ljust(ROOM - 8)
    path.write_bytes(head + body)
    total = ROOM + len(body) if size is None else ROOM + size
    os.truncate(path, total)
    record = replace(
        marker.files[0],
        length=total,
        header_length=ROOM,
        header_digest=digest(head),
        digest=digest_of_file(digest(head), digests),
    )
    marker = replace(marker, files=(record,))
    (folder / "rank-00000.done").write_bytes(marker.encode())
    (folder / MANIFEST).write_bytes(Manifest((marker,)).encode())


def put_object(section: str, tree: Any) -> Change:
    """Replaces a section's object tree."""

    def change(header: dict[str, Any], metadata: dict[str, Any], body: bytearray) -> None:
        name = f"everstep/objects/{section}"
        parts = {n: bytes(body[slice(*e["data_offsets"])]) for n, e in header.items()}
        data = parts[name] = tree if isinstance(tree, bytes) else encode(tree)
        header[name]["shape"] = metadata["entries"][name]["global_shape"] = [len(data)]
        body.clear()
        for entry_name, entry in header.items():
            entry["data_offsets"] = [len(body), len(body) + len(parts[entry_name])]
            body += parts[entry_name]

    return change


def append_entry(name: str, size: int, dtype: str = "U8", shape: list[int] | None = None) -> Change:
    """Adds an entry of ``size`` bytes at the end, without bytes of its own."""

    def change(header: dict[str, Any], metadata: dict[str, Any], body: bytearray) -> int:
        end = len(body) + size
        header[name] = {
            "dtype": dtype,
            "shape": shape or [size],
            "data_offsets": [len(body), end],
        }
        some = next(iter(metadata["entries"].values()))
        metadata["entries"][name] = {
            **some,
            "global_shape": shape or [size],
            "global_offset": [0] * len(shape or [size]),
        }
        metadata["entries"][name].pop("stride", None)
        return end

    return change


def both(*changes: Change) -> Change:
    def change(header: dict[str, Any], metadata: dict[str, Any], body: bytearray) -> int | None:
        size = None
        for one in changes:
            size = one(header, metadata, body)
        return size

    return change


def test_the_forger_is_good(run_folder: Path) -> None:
    make_run(run_folder)
    forge(run_folder, 2, put_object("d", {"n": 77, "t": TensorRef("d/t")}))
    assert resume_into(run_folder) == (2, 77)


def set_entry(name: str, **fields: Any) -> Change:
    def change(header: dict[str, Any], metadata: dict[str, Any], body: bytearray) -> None:
        metadata["entries"][name] |= fields

    return change


def twin(header: dict[str, Any], metadata: dict[str, Any], body: bytearray) -> None:
    metadata["aliases"]["d/u"] = "d/t"


REFUSED: dict[str, Change] = {
    "a tensor that nothing refers to": put_object("d", {"n": 9}),
    "a terabyte that nothing refers to": append_entry("x", HUGE),
    "a terabyte of plain data": both(
        put_object("d", {"n": 9, "t": TensorRef("d/t"), "u": TensorRef("d/u")}),
        append_entry("d/u", HUGE),
    ),
    "a terabyte of an optimizer": both(
        put_object("d", [TensorRef("d/t"), *[TensorRef("d/u")] * 1000]),
        append_entry("d/u", HUGE, "F64", [HUGE // 8]),
    ),
    "an object of a terabyte": append_entry("everstep/objects/x", HUGE),
    "a reference to nothing": put_object("d", {"n": 9, "t": TensorRef("d/t"), "u": TensorRef("x")}),
    "objects that are none": put_object("d", b"\xc1"),
    "objects with a tail": put_object("d", encode({"n": 9}) + b"\0"),
    "endless nesting": put_object("d", b"\x91" * 100_000),
    "a list that claims to be long": put_object("d", b"\xdd\xff\xff\xff\xff"),
    "a text that claims to be long": put_object("d", b"\xdb\xff\xff\xff\xff"),
    "entries as of another update": set_entry("d/t", lsn=5),
    "an empty entry that no tensor is as large as": both(
        put_object("d", {"n": 9, "t": TensorRef("d/t"), "u": TensorRef("d/u")}),
        append_entry("d/u", 0, "F32", [0, 1 << 40, 1 << 40]),
    ),
    "an entry that is only a part": set_entry("d/t", global_shape=[8]),
    "an entry that begins elsewhere": set_entry("d/t", global_offset=[2]),
    "an entry that is spread": set_entry("d/t", placement="shard(0)"),
    "generators that are none": put_object("everstep/rng", {"python": 5}),
    "a generator of another kind": put_object(
        "everstep/rng",
        {"python": {"version": 3}, "numpy": {}, "torch": TensorRef("everstep/rng/torch")},
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_forged_bases_are_passed_over(what: str, run_folder: Path) -> None:
    """In a moment, with little memory; the older base is used and the reason told."""
    make_run(run_folder)
    forge(run_folder, 2, REFUSED[what])
    live: dict[str, Any] = {"m": nn.Linear(2, 3), "d": None}
    with little_memory(), opened(run_folder, live) as ckpt:
        recovery = ckpt.resume()
    assert (recovery.step, live["d"]["n"]) == (1, 1)
    ((skipped),) = recovery.skipped
    assert skipped.step == 2
    assert len(skipped.reason) > 20


@pytest.mark.parametrize("what", REFUSED)
def test_forged_bases_alone_are_an_error(what: str, run_folder: Path) -> None:
    make_run(run_folder, bases=1)
    forge(run_folder, 1, REFUSED[what])
    live: dict[str, Any] = {"m": nn.Linear(2, 3), "d": None}
    with little_memory(), opened(run_folder, live) as ckpt:
        with pytest.raises(RecoveryError):
            ckpt.resume()
        with pytest.raises(StateError):
            ckpt.save()


def test_what_is_no_tensor_where_a_module_has_one_is_a_mismatch(run_folder: Path) -> None:
    """Before anything is written: torch would say so half-way."""
    make_run(run_folder)
    tree = {"weight": (TensorRef("m/weight"),), "bias": TensorRef("m/bias")}
    forge(run_folder, 2, put_object("m", tree))
    live = nn.Linear(2, 3)
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    with opened(run_folder, {"m": live, "d": None}) as ckpt:
        with pytest.raises(MismatchError, match="m/weight: the checkpoint has no tensor here"):
            ckpt.resume()
        assert all(torch.equal(tensor, before[name]) for name, tensor in live.state_dict().items())
        found = ckpt.resume(strict=False)
    assert found.mismatched == (
        ("m/weight", "the checkpoint has no tensor here, the model has one"),
    )
    assert torch.equal(live.weight, before["weight"])


def test_a_model_of_a_terabyte_is_a_mismatch(run_folder: Path) -> None:
    """Its shape is compared before a byte of it is read."""
    make_run(run_folder)

    def grow(header: dict[str, Any], metadata: dict[str, Any], body: bytearray) -> int:
        last = list(header)[-1]
        assert last.startswith("everstep/objects/")
        tree = {"weight": TensorRef("m/big"), "bias": TensorRef("m/bias")}
        put_object("m", tree)(header, metadata, body)
        header.pop("m/weight")
        metadata["entries"].pop("m/weight")
        parts = list(header.items())
        old = bytes(body)
        body.clear()
        for _, entry in parts:
            begin, end = entry["data_offsets"]
            entry["data_offsets"] = [len(body), len(body) + end - begin]
            body += old[begin:end]
        return append_entry("m/big", HUGE, "F32", [2, HUGE // 8])(header, metadata, body) or 0

    forge(run_folder, 2, grow)
    live = nn.Linear(2, 3)
    with (
        little_memory(),
        opened(run_folder, {"m": live, "d": None}) as ckpt,
        pytest.raises(MismatchError, match=r"m/weight: saved F32 \[2, 137438953472\]"),
    ):
        ckpt.resume()


@pytest.mark.parametrize("tree", [5, "x", [1], None, {"state": 5}, {"param_groups": [5]}])
def test_a_forged_section_of_an_optimizer(tree: Any, run_folder: Path) -> None:
    model = nn.Linear(1, 1)
    state = {"o": torch.optim.SGD(model.parameters(), lr=0.1)}
    with opened(run_folder, state) as ckpt:
        ckpt.step()
        ckpt.save()
    forge(run_folder, 1, put_object("o", tree))
    with opened(run_folder, state) as ckpt, pytest.raises(EverstepError):
        ckpt.resume()


def test_a_folder_that_cannot_be_read_at_all(run_folder: Path) -> None:
    from tests.support.world import HookedFileSystem, raising

    make_run(run_folder)
    fs = HookedFileSystem()
    with opened(run_folder, {"d": None}, fs=fs) as ckpt:
        fs.hook = raising(OSError(5, "Input/output error"), "scan", "*/timeline-00001")
        with pytest.raises(StorageError, match="Input/output error"):
            ckpt.resume()
