"""Invariants of every disk that a crash may leave, checked without everstep's own readers."""

from __future__ import annotations

import json
import struct
from pathlib import PurePath
from typing import Any

import safetensors
import xxhash

from tests.crash.sim.filesystem import SimFileSystem

__all__ = ["assert_nothing_vouches_for_torn_bytes"]

_RECORDS = (".json", ".done", ".condemned", ".deleting")


def assert_nothing_vouches_for_torn_bytes(fs: SimFileSystem) -> None:
    """Checks every file on a disk against what its name or header claims.

    - A record that has its final name is whole, and so is a shard.
    - A file that safetensors accepts, whatever its name, has the bytes its digests are of:
      the header is the last thing written and the first thing invalidated.
    - A base with a manifest has every marker and shard that the manifest lists (I5).

    Raises:
        AssertionError: naming the file.
    """
    files = [PurePath(path) for path, kind in fs.paths().items() if kind == "file"]
    for path in files:
        data = fs.read_bytes(path)
        if path.name.endswith(_RECORDS):
            _assert_record(path, data)
        elif not _assert_digests(path, data):
            assert path.suffix != ".safetensors", f"{path} has its final name and is torn"
    for path in files:
        if path.name == "manifest.json":
            _assert_complete(path, json.loads(fs.read_bytes(path)), set(files))


def _assert_record(path: PurePath, data: bytes) -> None:
    try:
        whole = "digest" in json.loads(data)
    except ValueError:
        whole = False
    assert whole, f"{path} has its final name and is torn"


def _assert_digests(path: PurePath, data: bytes) -> bool:
    """Return True if safetensors accepts the file; then its entries must match their digests."""
    try:
        entries = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return False
    (size,) = struct.unpack_from("<Q", data)
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    described: dict[str, Any] = json.loads(metadata["everstep"])["entries"]
    for name, entry in entries.items():
        found = xxhash.xxh3_128_hexdigest(bytes(entry["data"]))
        assert found == described[name]["digest"], f"{path} is accepted, but {name} is torn"
    return True


def _assert_complete(path: PurePath, manifest: dict[str, Any], files: set[PurePath]) -> None:
    for marker in manifest["ranks"]:
        listed = [f"rank-{marker['rank']:05d}.done", *(file["name"] for file in marker["files"])]
        for name in listed:
            assert path.with_name(name) in files, f"{path} lists {name}, which is not there"
