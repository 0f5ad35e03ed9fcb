"""docs/FORMAT.md says what the code does: every table is compared with the constants."""

from __future__ import annotations

import json
import re
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path, PurePath

import torch

from everstep.events.log import event_file
from everstep.format import digests, header, names, records
from everstep.format.header import ShardIdentity, encode_header, header_size_bytes
from everstep.format.records import (
    Annotations,
    AuditRecord,
    FileRecord,
    Marker,
    PinRecord,
    RunRecord,
    TimelineRecord,
    manifest_of,
)
from everstep.seams import filesystem
from everstep.state.layout import entries, shards
from everstep.state.layout import entries as entry_names
from everstep.state.layout.entries import Entry
from everstep.state.layout.placement import ReplicaDigest
from everstep.state.values import tensors
from everstep.state.values.tensors import tensor_entry

DOCUMENT = (Path(__file__).parents[3] / "docs" / "FORMAT.md").read_text()


def table(heading: str) -> list[list[str]]:
    """Rows of the table whose header row begins with ``heading``."""
    rows: list[list[str]] = []
    lines = iter(DOCUMENT.splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    return rows
                rows.append([cell.strip().replace("`", "") for cell in row.strip("|").split("|")])
    raise AssertionError(f"no table {heading!r} in docs/FORMAT.md")


def test_constants() -> None:
    modules = (names, filesystem, header, shards, records, digests, entry_names)
    for name, value, _ in table("constant"):
        found = [getattr(module, name) for module in modules if hasattr(module, name)]
        assert found, f"{name} is in the document, not in the code"
        assert all(str(item) == value for item in found), (name, value, found)


def test_dtypes() -> None:
    documented = {row[0]: (row[1], int(row[2])) for row in table("code")}
    assert {code: size for code, (_, size) in documented.items()} == entries.DTYPE_BYTES
    for dtype, code in tensors.DTYPE_CODES.items():
        assert documented[code][0] == str(dtype).removeprefix("torch.")
        assert torch.empty(0, dtype=dtype).element_size() == documented[code][1]


def test_files() -> None:
    paths = {row[0] for row in table("path in the run")}
    run = PurePath(".")
    base = names.base_dir(run, 2, 1200)
    expected = {
        run / names.RUN_RECORD,
        run / ".metadata",  # only of checkpoints that torch.distributed.checkpoint has saved
        names.timeline_dir(run, 2) / names.TIMELINE_RECORD,
        base / names.shard_name(0),
        base / names.shard_name(0, 1),
        base / names.marker_name(0),
        base / names.MANIFEST,
        base / names.CONDEMNED,
        base / names.DELETING,
        base / names.ANNOTATIONS,
        base / names.AUDIT_RECORD,
        base / names.PIN_RECORD,
        names.segment_dir(run, 2, 1200, 1205) / names.shard_name(0),
        names.segment_dir(run, 2, 1200, 1205) / names.marker_name(0),
        names.segment_dir(run, 2, 1200, 1205, lossy=True),
        names.timeline_dir(run, 2) / names.SLOTS_DIR / "slot-00000",
        event_file(run, 2, 0),
    }
    assert paths == {str(path) for path in expected} | {"*" + names.TEMPORARY_SUFFIX}


def test_fields_of_records() -> None:
    file = FileRecord(names.shard_name(0), 4096, 4096, "0" * 32, "0" * 32)
    marker = Marker("r", 1, 2, 3, 0, 1, True, (file,))
    manifest = manifest_of({0: marker})
    assert manifest is not None
    audit = AuditRecord("r", 1, 2, "0" * 32, (1, 1), "equal", "", 1, 1, 1, 0, (), {}, 0.0)
    encoded = {
        "annotations": Annotations(1, 2, {}, "").encode(),
        "audit": audit.encode(),
        "pin": PinRecord(1, 2, "", 0.0).encode(),
        "run": RunRecord("r").encode(),
        "timeline": TimelineRecord("r", 1, None, 0, True, 1, {}, 0.0).encode(),
        "marker": marker.encode(),
        "manifest": manifest.encode(),
    }
    forked = TimelineRecord("r", 2, 1, 5, True, 1, {}, 0.0, base=(1, 4)).encode()
    extra = set(json.loads(forked)) - set(json.loads(encoded["timeline"]))
    assert extra == {"base"}
    assert "also has\n`base`: timeline and step" in DOCUMENT
    said = ReplicaDigest("0-1", "model", 2, "0" * 32)
    of_several = set(json.loads(replace(marker, world=2, common=(said,)).encode()))
    assert of_several - set(json.loads(encoded["marker"])) == {"common"}
    assert all(f"`{field.name}`" in DOCUMENT for field in fields_of(said))
    for kind, listed in table("record"):
        fields = set(json.loads(encoded.pop(kind))) - {"kind", "format", "digest"}
        assert fields == set(listed.split(", ")), kind
    assert not encoded, f"records that are not documented: {list(encoded)}"


def test_fields_of_the_header() -> None:
    identity = ShardIdentity("r", 1, 2, 3, 0, 1, True, behind_mark=True, static=True)
    tensor = torch.zeros(2, 3, dtype=torch.complex128).t()
    entry = tensor_entry("section/name", tensor)
    assert isinstance(entry, Entry)
    (shard,) = shards.plan_shards([entry])
    room = header_size_bytes(identity, shard.placed, [], {})
    data = encode_header(identity, shard.placed, ["0" * 32], {"other": "section/name"}, room)
    metadata = json.loads(json.loads(data[8:])["__metadata__"][header.METADATA_KEY])
    assert set(metadata) == {row[0] for row in table("field")}
    assert set(metadata["entries"]["section/name"]) == {
        row[0] for row in table("field of an entry")
    }


def test_the_documents_name_files_that_exist() -> None:
    root = Path(__file__).parents[3]
    for document in (root / "docs").glob("*.md"):
        for path in re.findall(
            r"`((?:src|tests|docs|adr)/[\w/.-]+\.(?:py|md))`", document.read_text()
        ):
            base = root / "docs" if path.startswith("adr/") else root
            assert (base / path).exists(), f"{document.name} names {path}, which is not there"
