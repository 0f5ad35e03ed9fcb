"""``everstep inspect``: show the contents of a base, or of one of its files."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.log import (
    run_log,
    segment_as_json,
    show_records,
    show_segments,
)
from everstep.cli.common.output import console, count_of, in_words, label, say, table
from everstep.cli.common.runs import (
    absolute,
    kind_of,
    open_run,
    reading,
    refuse_irregular,
    select_bases,
)
from everstep.cli.ls import (
    STATUS_WORDS,
    annotations_as_json,
    annotations_in_words,
    look,
    record_as_json,
)
from everstep.commit.lineage import BaseId
from everstep.config.given import did_you_mean
from everstep.errors import DamageError, FormatError, OptionError, RecoveryError
from everstep.format.header import HEADER_SIZE_BYTES_MAX, LENGTH_BYTES, ShardHeader, decode_header
from everstep.format.names import marker_name, parse_shard
from everstep.format.records import AuditRecord, Marker
from everstep.seams import PosixFileSystem
from everstep.seams.filesystem import FileSystem
from everstep.state.layout.entries import OBJECT_PREFIX, Entry

if TYPE_CHECKING:
    from everstep.format.log import RecordHead
    from everstep.run.scan import BaseFound
    from everstep.run.segments import SegmentFound


_ROWS_MAX = 1000
_OF_RECORDS = ("kind", "step", "lsn", "exact", "declared")


@dataclass(frozen=True, slots=True)
class _Row:
    """One entry and the place of its bytes.

    Attributes:
        offset: offset of its first byte in the file.
        lsn: last update of its base.
    """

    entry: Entry
    file: str
    rank: int
    offset: int
    digest: str
    aliases: tuple[str, ...]
    is_object: bool
    lsn: int


@dataclass(slots=True)
class _Found:
    """Inspected base or file.

    Attributes:
        vouched: True if a marker or manifest vouches for the header.
        segments: segments of the log, if a run is inspected.
        records: records of the segment, if the file is one, or of the log of a multi-step base.
        audit: result of the keeper's audit of the base.
        base: the base, if a run is inspected.
        skipped: newer bases that ``resume()`` would skip, with the reason, if no base was
            requested.
    """

    path: PurePath
    status: str
    vouched: bool
    headers: list[tuple[str, ShardHeader]] = field(default_factory=list)
    segments: list[SegmentFound] = field(default_factory=list)
    records: tuple[RecordHead, ...] = ()
    audit: AuditRecord | None = None
    base: BaseFound | None = None
    skipped: dict[BaseId, str] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """True if the state of every rank is exact."""
        return all(header.identity.exact for _, header in self.headers)

    @property
    def is_damaged(self) -> bool:
        """True if the output reports damage."""
        broken = any(segment.problem is not None for segment in self.segments)
        failed = self.audit is not None and self.audit.verdict == "different"
        return bool(self.skipped) or broken or failed


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FILE", help="A run folder, or one .safetensors file.", show_default=False
        ),
    ],
    step: Annotated[int | None, typer.Option(help="Base of this step.")] = None,
    timeline: Annotated[int | None, typer.Option(help="Base of this timeline.")] = None,
    entry: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Only names with this in them, or like this (*, ?)."),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Shows the entries of a base: names, shapes, dtypes, sizes.

    For a run: the base that resume() would choose, unless one is given, and the segments of its
    log. For a segment file: its records, too. Reads headers only and writes nothing. Exit status 1
    if newer bases are skipped, if segments are damaged, or if the keeper's audit of the base has
    found a difference.
    """
    filesystem = PosixFileSystem()
    is_file = target.endswith(".safetensors") and kind_of(absolute(target)) != "directory"
    if is_file and (step is not None or timeline is not None):
        raise OptionError("--step and --timeline choose a base of a run; this is a file")
    if is_file:
        found = _of_file(filesystem, absolute(target))
    else:
        found = _of_run(filesystem, target, step, timeline)
    rows = _rows(found)
    shown = rows if entry is None else _matching(rows, entry)
    if json_output:
        emit(_document(found, rows, shown))
    else:
        _show(console(), found, rows, shown)
    raise typer.Exit(ExitCode.DIFFERENT if found.is_damaged else ExitCode.OK)


# --- Reading ----------------------------------------------------------------------------


def _of_run(filesystem: FileSystem, run: str, step: int | None, timeline: int | None) -> _Found:
    choice = None
    if step is None and timeline is None:
        inventory, choice = look(filesystem, run)
    else:
        inventory = open_run(filesystem, run)
    if choice is not None:
        if choice.base is None:
            reasons = [f"  {base}: {reason}" for base, reason in choice.skipped.items()]
            if not inventory.bases and choice.had is None:
                raise OptionError("the run holds no base yet", path=inventory.path)
            raise RecoveryError(
                "\n".join([choice.reason or "there is no base", *reasons]),
                path=inventory.path,
                hint="everstep ls lists what is there, --step chooses",
            )
        found = _of_base(filesystem, choice.base)
        found.skipped = choice.skipped
    else:
        found = _of_base(filesystem, select_bases(inventory, step=step, timeline=timeline)[0])
    log = run_log(filesystem, inventory)
    segments = [] if log is None else log.segments
    found.segments = [one for one in segments if timeline in (None, one.timeline)]
    return found


def _of_base(filesystem: FileSystem, base: BaseFound) -> _Found:
    from everstep.run.open_base import OpenBase

    if base.manifest is None:
        raise RecoveryError(
            f"{base.id} is {STATUS_WORDS[base.status]}"
            + (f": {base.problem}" if base.problem else ""),
            step=base.id.step,
            path=base.path,
        )
    found = _Found(base.path, base.status, vouched=True, audit=base.audit, base=base)
    with reading(base.path):
        for marker in base.manifest.markers:
            opened = OpenBase.open(filesystem, base, marker.rank)
            opened.close()
            found.headers += [(path.name, header) for _, _, header, path in opened.files]
            found.records += opened.heads
    return found


def _of_file(filesystem: FileSystem, path: PurePath) -> _Found:
    """Read one shard; its marker beside it, if present, vouches for its header."""
    from everstep.format.reader import read_header, read_record_bytes
    from everstep.run.open_base import is_redo_file
    from everstep.run.segments import read_heads

    if kind_of(path) is None:
        hint = "everstep inspect RUN lists the entries of a run, --json their files"
        raise OptionError(f"there is no file {path}", path=path, hint=hint)
    refuse_irregular(path)
    shard = parse_shard(path.name)
    record = None
    if shard is not None:
        where = path.with_name(marker_name(shard[0]))
        if os.path.isfile(where):
            with reading(where):
                marker = Marker.decode(read_record_bytes(filesystem, where), where)
            record = next((file for file in marker.files if file.name == path.name), None)
    with reading(path), contextlib.closing(filesystem.open(path)) as file:
        header = read_header(file, record, path) if record else _unvouched(file, path)
        records = read_heads(file, header, path) if is_redo_file(header) else ()
    found = _Found(path, "file", vouched=record is not None, records=records)
    found.headers.append((path.name, header))
    return found


def _unvouched(file: Any, path: PurePath) -> ShardHeader:
    """Read a header without a marker: its size is bounded first, then its contents are checked."""
    length = bytearray(LENGTH_BYTES)
    file.read_into(memoryview(length), 0)
    room = int.from_bytes(length, "little") + LENGTH_BYTES
    if not LENGTH_BYTES < room <= min(HEADER_SIZE_BYTES_MAX, file.size_bytes):
        zeros = "" if any(length) else ": it begins with zeros, so its writing was not finished"
        raise FormatError(f"{path}: not a whole shard{zeros}", path=path)
    data = bytearray(room)
    if file.read_into(memoryview(data), 0) != room:
        raise DamageError(f"{path}: it ends within its header", path=path)
    return decode_header(bytes(data), file.size_bytes, path)


def _rows(found: _Found) -> list[_Row]:
    from everstep.format.log import LOG_OBJECT

    rows = []
    for file, header in found.headers:
        aliases: dict[str, list[str]] = {}
        for other, name in header.aliases.items():
            aliases.setdefault(name, []).append(other)
        for place, hex_ in zip(header.placed, header.digests, strict=True):
            name = place.entry.name
            rows.append(
                _Row(
                    place.entry,
                    file,
                    header.identity.rank,
                    header.room_bytes + place.begin,
                    hex_,
                    tuple(aliases.get(name, ())),
                    name.startswith(OBJECT_PREFIX) or name == LOG_OBJECT,
                    header.identity.lsn,
                )
            )
    return rows


def _matching(rows: list[_Row], pattern: str) -> list[_Row]:
    def matches(name: str) -> bool:
        return pattern in name or fnmatch.fnmatchcase(name, pattern)

    found = [row for row in rows if any(map(matches, (row.entry.name, *row.aliases)))]
    if not found:
        guess = did_you_mean(pattern, (row.entry.name for row in rows[:_ROWS_MAX]))
        hint = guess or "without --entry all are shown"
        raise OptionError(f"no entry is like {pattern!r}", hint=hint)
    return found


# --- Showing ----------------------------------------------------------------------------


def _document(found: _Found, rows: list[_Row], shown: list[_Row]) -> dict[str, Any]:
    first = found.headers[0][1].identity
    return {
        "path": found.path,
        "status": found.status,
        "vouched": found.vouched,
        "run": first.run,
        "timeline": first.timeline,
        "step": first.step,
        "lsn": first.lsn,
        "world": first.world,
        "exact": found.exact,
        "audit": record_as_json(found.audit),
        **({} if found.base is None else annotations_as_json(found.base)),
        "skipped": [
            {**msgspec.structs.asdict(base), "reason": reason}
            for base, reason in found.skipped.items()
        ],
        "segments": [segment_as_json(segment) for segment in found.segments],
        "records": [{name: getattr(head, name) for name in _OF_RECORDS} for head in found.records],
        "entries_total": len(rows),
        "entries_bytes_total": _bytes_of(rows),
        "entries": [
            {
                "name": row.entry.name,
                "kind": "object" if row.is_object else "tensor",
                "dtype": row.entry.dtype,
                "shape": row.entry.shape,
                "size_bytes": row.entry.size_bytes,
                "global_shape": row.entry.global_shape,
                "global_offset": row.entry.global_offset,
                "placement": row.entry.placement,
                "stride": row.entry.stride,
                "logical_dtype": row.entry.logical_dtype,
                "lsn": row.entry.lsn,
                "aliases": row.aliases,
                "rank": row.rank,
                "file": row.file,
                "offset": row.offset,
                "digest": row.digest,
            }
            for row in shown
        ],
    }


def _show(out: Console, found: _Found, rows: list[_Row], shown: list[_Row]) -> None:
    from everstep.run.verify import describe_audit

    first = found.headers[0][1].identity
    for base, reason in found.skipped.items():
        say(out, f"passed over {base}: {reason}", "yellow")
    out.print(
        label(
            f"step {first.step} of timeline {first.timeline} (update {first.lsn}): "
            f"{count_of(len(rows), 'entry', 'entries')}, {in_words(_bytes_of(rows))}, "
            f"{'exact' if found.exact else 'not exact'}"
        )
    )
    if found.base is not None and (words := annotations_in_words(found.base)):
        say(out, ", ".join(words))
    if found.audit is not None:
        style = "green" if found.audit.verdict == "equal" else "yellow"
        say(out, describe_audit(found.audit), style)
    if not found.vouched:
        out.print(label("no marker beside the file: nothing vouches for its header", "yellow"))
    _show_table(out, shown[:_ROWS_MAX])
    if len(shown) > _ROWS_MAX:
        left = count_of(len(shown) - _ROWS_MAX, "more entry", "more entries")
        out.print(f"... {left}: --entry narrows the list, --json has them all")
    show_segments(out, found.segments)
    show_records(out, found.records)


def _show_table(out: Console, rows: list[_Row]) -> None:
    files = len({row.file for row in rows}) > 1
    columns = ("entry", "dtype", "shape", "size", *(("file",) if files else ()), "note")
    made = table(columns, right=("size",))
    for row in rows:
        made.add_row(
            label(row.entry.name),
            _dtype(row),
            _shape(row),
            in_words(row.entry.size_bytes),
            *((label(row.file),) if files else ()),
            label(_note(row), "dim"),
        )
    out.print(made)


def _bytes_of(rows: Iterable[_Row]) -> int:
    return sum(row.entry.size_bytes for row in rows)


def _dtype(row: _Row) -> str:
    return "object" if row.is_object else row.entry.logical_dtype or row.entry.dtype


def _shape(row: _Row) -> str:
    shape = row.entry.shape if row.entry.logical_dtype is None else row.entry.shape[:-1]
    return "x".join(map(str, shape)) if shape else "scalar"


def _note(row: _Row) -> str:
    notes = [f"= {other}" for other in row.aliases[:3]]
    if len(row.aliases) > 3:
        notes.append(f"= {len(row.aliases) - 3} more")
    if row.entry.stride is not None:
        notes.append("strides " + ",".join(map(str, row.entry.stride)))
    if row.entry.lsn != row.lsn:
        notes.append(f"has seen update {row.entry.lsn}")
    if row.entry.global_shape != row.entry.shape:
        offset = ",".join(map(str, row.entry.global_offset))
        notes.append(f"at {offset} of " + "x".join(map(str, row.entry.global_shape)))
    if row.entry.placement != "whole":
        notes.append(row.entry.placement)
    return ", ".join(notes)
