"""``everstep du``: what a run takes on disk, and what of it could go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from everstep.cli.common.errors import JsonFlag, emit
from everstep.cli.common.output import console, count_of, in_words, label, table
from everstep.cli.common.runs import RUN_ARGUMENT, open_run, reading
from everstep.cli.ls import STATUS_WORDS

if TYPE_CHECKING:
    from everstep.run.scan import BaseFound, Inventory
    from everstep.seams.files.filesystem import DirEntry, FileSystem

__all__ = ["du"]

_ROWS_MAX = 50
_UNFINISHED = ("incomplete", "condemned")


@dataclass(slots=True)
class _Sum:
    """Files added up; directories themselves are not counted, and of a file with several names the
    bytes only under the first one that was met."""

    files: int = 0
    size_bytes: int = 0
    allocated_bytes: int = 0

    def add(self, other: _Sum | DirEntry) -> None:
        self.files += other.files if isinstance(other, _Sum) else 1
        self.size_bytes += other.size_bytes
        self.allocated_bytes += other.allocated_bytes

    def as_json(self) -> dict[str, int]:
        return {
            "files": self.files,
            "size_bytes": self.size_bytes,
            "allocated_bytes": self.allocated_bytes,
        }


@dataclass(slots=True)
class _Part:
    """A timeline's folder, or what lies in the run folder itself.

    Attributes:
        bases: files of each base, without temporary ones.
        log: files of segments; ``segments`` of them are finished.
        slots: files of deleted bases, kept to be overwritten.
        temporary: what a crash, or a process at work, has left half-written.
        other: files that everstep has not written.
    """

    bases: list[tuple[BaseFound, _Sum]] = field(default_factory=list)
    records: _Sum = field(default_factory=_Sum)
    log: _Sum = field(default_factory=_Sum)
    segments: int = 0
    slots: _Sum = field(default_factory=_Sum)
    temporary: _Sum = field(default_factory=_Sum)
    other: _Sum = field(default_factory=_Sum)

    @property
    def whole(self) -> _Sum:
        total = _total(part for _, part in self.bases)
        for part in (self.records, self.log, self.slots, self.temporary, self.other):
            total.add(part)
        return total

    @property
    def reclaimable(self) -> _Sum:
        """What the next retention or resume may remove: unfinished bases, slots, temporary."""
        found = _total(part for base, part in self.bases if base.status in _UNFINISHED)
        found.add(self.slots)
        found.add(self.temporary)
        return found


def du(run: Annotated[str, RUN_ARGUMENT], json_output: JsonFlag = False) -> None:
    """Adds up what a run takes on disk.

    By timeline and base; the log, slots, temporary and foreign files apart. Apparent sizes (what
    the files hold) and allocated ones (what the disk gives for them). Writes nothing.
    """
    from everstep.seams import PosixFileSystem

    filesystem = PosixFileSystem()
    inventory = open_run(filesystem, run)
    with reading(inventory.path):
        root, timelines = _measure(filesystem, inventory)
        free_bytes = filesystem.free_bytes(inventory.path)
    if json_output:
        emit(_document(inventory, root, timelines, free_bytes))
    else:
        _show(console(), root, timelines, free_bytes)


# --- Measuring --------------------------------------------------------------------------


def _measure(filesystem: FileSystem, inventory: Inventory) -> tuple[_Part, dict[int, _Part]]:
    from everstep.format.names import (
        BASE_DIR,
        LOG_DIR,
        LOSSY_DIR,
        RUN_RECORD,
        SLOTS_DIR,
        TIMELINE_RECORD,
        parse_timeline,
    )

    root = _Part()
    timelines = {}
    met = set[int]()
    for entry in filesystem.scan(inventory.path):
        number = parse_timeline(entry.name)
        if number is None or entry.kind != "dir":
            _add_file(filesystem, root, inventory.path, entry, records=(RUN_RECORD,))
            continue
        part = timelines[number] = _Part()
        directory = inventory.path / entry.name
        known = {base.path.name: base for base in inventory.bases if base.id.timeline == number}
        for item in _scan(filesystem, directory):
            if item.name == SLOTS_DIR and item.kind == "dir":
                part.slots = _below(filesystem, directory / item.name)
            elif item.name == BASE_DIR and item.kind == "dir":
                _add_bases(filesystem, part, directory / item.name, known, met)
            elif item.name in (LOG_DIR, LOSSY_DIR) and item.kind == "dir":
                _add_segments(filesystem, part, directory / item.name)
            else:
                _add_file(filesystem, part, directory, item, records=(TIMELINE_RECORD,))
    return root, timelines


def _add_bases(
    filesystem: FileSystem,
    part: _Part,
    directory: PurePath,
    known: dict[str, BaseFound],
    met: set[int],
) -> None:
    from everstep.format.names import TEMPORARY_SUFFIX

    for entry in _scan(filesystem, directory):
        base = known.get(entry.name)
        if base is None or entry.kind != "dir":
            _add_file(filesystem, part, directory, entry, records=())
            continue
        whole = _Sum()
        for file in _scan(filesystem, base.path):
            if file.kind == "dir":
                part.other.add(_below(filesystem, base.path / file.name))
            elif file.name.endswith(TEMPORARY_SUFFIX):
                part.temporary.add(file)
            elif file.file in met:
                whole.files += 1
            else:
                whole.add(file)
                met.update([file.file] if file.links > 1 else [])
        part.bases.append((base, whole))


def _add_segments(filesystem: FileSystem, part: _Part, directory: PurePath) -> None:
    from everstep.format.names import TEMPORARY_SUFFIX, parse_marker, parse_segment, parse_shard

    for entry in _scan(filesystem, directory):
        if parse_segment(entry.name) is None or entry.kind != "dir":
            _add_file(filesystem, part, directory, entry, records=())
            continue
        finished = False
        for file in _scan(filesystem, directory / entry.name):
            is_marker = parse_marker(file.name) is not None
            if file.kind == "dir":
                part.other.add(_below(filesystem, directory / entry.name / file.name))
            elif file.name.endswith(TEMPORARY_SUFFIX):
                part.temporary.add(file)
            elif is_marker or parse_shard(file.name) is not None:
                part.log.add(file)
            else:
                part.other.add(file)
            finished = finished or is_marker
        part.segments += finished


def _add_file(
    filesystem: FileSystem,
    part: _Part,
    directory: PurePath,
    entry: DirEntry,
    *,
    records: tuple[str, ...],
) -> None:
    from everstep.format.names import TEMPORARY_SUFFIX

    if entry.kind == "dir":
        part.other.add(_below(filesystem, directory / entry.name))
    elif entry.name in records:
        part.records.add(entry)
    elif entry.name.endswith(TEMPORARY_SUFFIX):
        part.temporary.add(entry)
    else:
        part.other.add(entry)


def _below(filesystem: FileSystem, directory: PurePath) -> _Sum:
    """All files below ``directory``; links are counted, not followed."""
    found = _Sum()
    waiting = [directory]
    while waiting:
        here = waiting.pop()
        for entry in _scan(filesystem, here):
            if entry.kind == "dir":
                waiting.append(here / entry.name)
            else:
                found.add(entry)
    return found


def _scan(filesystem: FileSystem, directory: PurePath) -> list[DirEntry]:
    try:
        return filesystem.scan(directory)
    except FileNotFoundError:  # a process at work has deleted it since
        return []


def _total(parts: Iterable[_Sum]) -> _Sum:
    total = _Sum()
    for part in parts:
        total.add(part)
    return total


# --- Showing ----------------------------------------------------------------------------


def _document(
    inventory: Inventory, root: _Part, timelines: dict[int, _Part], free_bytes: int
) -> dict[str, Any]:
    parts = [root, *timelines.values()]
    return {
        "path": str(inventory.path),
        "run": inventory.run,
        **_total(part.whole for part in parts).as_json(),
        "reclaimable": _total(part.reclaimable for part in parts).as_json(),
        "free_bytes": free_bytes,
        "records": root.records.as_json(),
        "temporary": root.temporary.as_json(),
        "other": root.other.as_json(),
        "timelines": [
            {
                "timeline": number,
                **part.whole.as_json(),
                "bases": [
                    {"step": base.id.step, "status": base.status, **whole.as_json()}
                    for base, whole in part.bases
                ],
                "records": part.records.as_json(),
                "log": {"segments": part.segments, **part.log.as_json()},
                "slots": part.slots.as_json(),
                "temporary": part.temporary.as_json(),
                "other": part.other.as_json(),
            }
            for number, part in timelines.items()
        ],
    }


def _show(out: Console, root: _Part, timelines: dict[int, _Part], free_bytes: int) -> None:
    made = table("what", "files", "size", "allocated", right=("files", "size", "allocated"))

    def row(what: str, part: _Sum, style: str = "") -> None:
        sizes = in_words(part.size_bytes), in_words(part.allocated_bytes)
        made.add_row(label(what), f"{part.files:,}", *sizes, style=style)

    left_out = max(0, len(timelines) - _ROWS_MAX)
    if left_out:
        older = list(timelines.values())[:left_out]
        row(f"{count_of(left_out, 'older timeline')}", _total(part.whole for part in older))
    for number, part in list(timelines.items())[left_out:]:
        row(f"timeline {number}", part.whole, "bold")
        hidden = part.bases[:-_ROWS_MAX]
        if hidden:
            row(f"  {count_of(len(hidden), 'older base')}", _total(one for _, one in hidden))
        for base, whole in part.bases[-_ROWS_MAX:]:
            status = "" if base.status == "committed" else f", {STATUS_WORDS[base.status]}"
            row(f"  base {base.id.step}{status}", whole)
        _rows_besides(row, part)
    row("run folder", root.whole, "bold")
    _rows_besides(row, root)
    parts = [root, *timelines.values()]
    whole = _total(p.whole for p in parts)
    spare = _total(p.reclaimable for p in parts)
    row("all", whole, "bold")
    out.print(made)
    out.print(
        f"{in_words(spare.allocated_bytes)} of it may go by themselves (unfinished bases, slots, "
        f"temporary files); {in_words(free_bytes)} are free"
    )


def _rows_besides(row: Any, part: _Part) -> None:
    for what, found in (
        ("records", part.records),
        (f"log, {count_of(part.segments, 'segment')}", part.log),
        ("slots (to be overwritten)", part.slots),
        ("temporary", part.temporary),
        ("other, not ours", part.other),
    ):
        if found.files:
            row(f"  {what}", found)
