"""``everstep du``: show the disk space of a run, and how much of it is reclaimable."""

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
    """Sum over files. Directories are not counted; a file with several names counts its bytes
    once.
    """

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
class _Usage:
    """Disk usage of a timeline's folder, or of files in the run folder itself.

    Attributes:
        bases: files of each base, without temporary ones.
        log: files of segments; ``segments`` of them are finished.
        slots: files of deleted bases, kept to be overwritten.
        temporary: unfinished files of a crashed or running process.
        other: files that everstep did not write.
    """

    bases: list[tuple[BaseFound, _Sum]] = field(default_factory=list)
    records: _Sum = field(default_factory=_Sum)
    log: _Sum = field(default_factory=_Sum)
    segments: int = 0
    slots: _Sum = field(default_factory=_Sum)
    temporary: _Sum = field(default_factory=_Sum)
    other: _Sum = field(default_factory=_Sum)

    @property
    def total(self) -> _Sum:
        total = _total(usage for _, usage in self.bases)
        for usage in (self.records, self.log, self.slots, self.temporary, self.other):
            total.add(usage)
        return total

    @property
    def reclaimable(self) -> _Sum:
        """Files that the next retention or resume may remove: unfinished bases, slots, temporary
        files.
        """
        found = _total(usage for base, usage in self.bases if base.status in _UNFINISHED)
        found.add(self.slots)
        found.add(self.temporary)
        return found


def du(run: Annotated[str, RUN_ARGUMENT], json_output: JsonFlag = False) -> None:
    """Adds up the disk space of a run.

    By timeline and base; log, slots, temporary and foreign files are listed separately. Shows
    apparent sizes (contents of the files) and allocated ones (blocks on disk). Writes nothing.
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


def _measure(filesystem: FileSystem, inventory: Inventory) -> tuple[_Usage, dict[int, _Usage]]:
    from everstep.format.names import (
        BASE_DIR,
        LOG_DIR,
        LOSSY_DIR,
        RUN_RECORD,
        SLOTS_DIR,
        TIMELINE_RECORD,
        parse_timeline,
    )

    root = _Usage()
    timelines = {}
    met = set[int]()
    for entry in filesystem.scan(inventory.path):
        number = parse_timeline(entry.name)
        if number is None or entry.kind != "dir":
            _add_file(filesystem, root, inventory.path, entry, records=(RUN_RECORD,))
            continue
        usage = timelines[number] = _Usage()
        directory = inventory.path / entry.name
        known = {base.path.name: base for base in inventory.bases if base.id.timeline == number}
        for item in _scan(filesystem, directory):
            if item.name == SLOTS_DIR and item.kind == "dir":
                usage.slots = _below(filesystem, directory / item.name)
            elif item.name == BASE_DIR and item.kind == "dir":
                _add_bases(filesystem, usage, directory / item.name, known, met)
            elif item.name in (LOG_DIR, LOSSY_DIR) and item.kind == "dir":
                _add_segments(filesystem, usage, directory / item.name)
            else:
                _add_file(filesystem, usage, directory, item, records=(TIMELINE_RECORD,))
    return root, timelines


def _add_bases(
    filesystem: FileSystem,
    usage: _Usage,
    directory: PurePath,
    known: dict[str, BaseFound],
    met: set[int],
) -> None:
    from everstep.format.names import TEMPORARY_SUFFIX

    for entry in _scan(filesystem, directory):
        base = known.get(entry.name)
        if base is None or entry.kind != "dir":
            _add_file(filesystem, usage, directory, entry, records=())
            continue
        whole = _Sum()
        for file in _scan(filesystem, base.path):
            if file.kind == "dir":
                usage.other.add(_below(filesystem, base.path / file.name))
            elif file.name.endswith(TEMPORARY_SUFFIX):
                usage.temporary.add(file)
            elif file.file in met:
                whole.files += 1
            else:
                whole.add(file)
                met.update([file.file] if file.links > 1 else [])
        usage.bases.append((base, whole))


def _add_segments(filesystem: FileSystem, usage: _Usage, directory: PurePath) -> None:
    from everstep.format.names import TEMPORARY_SUFFIX, parse_marker, parse_segment, parse_shard

    for entry in _scan(filesystem, directory):
        if parse_segment(entry.name) is None or entry.kind != "dir":
            _add_file(filesystem, usage, directory, entry, records=())
            continue
        finished = False
        for file in _scan(filesystem, directory / entry.name):
            is_marker = parse_marker(file.name) is not None
            if file.kind == "dir":
                usage.other.add(_below(filesystem, directory / entry.name / file.name))
            elif file.name.endswith(TEMPORARY_SUFFIX):
                usage.temporary.add(file)
            elif is_marker or parse_shard(file.name) is not None:
                usage.log.add(file)
            else:
                usage.other.add(file)
            finished = finished or is_marker
        usage.segments += finished


def _add_file(
    filesystem: FileSystem,
    usage: _Usage,
    directory: PurePath,
    entry: DirEntry,
    *,
    records: tuple[str, ...],
) -> None:
    from everstep.format.names import TEMPORARY_SUFFIX

    if entry.kind == "dir":
        usage.other.add(_below(filesystem, directory / entry.name))
    elif entry.name in records:
        usage.records.add(entry)
    elif entry.name.endswith(TEMPORARY_SUFFIX):
        usage.temporary.add(entry)
    else:
        usage.other.add(entry)


def _below(filesystem: FileSystem, directory: PurePath) -> _Sum:
    """Sum all files below ``directory``; links are counted, not followed."""
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
    except FileNotFoundError:  # deleted by a running process meanwhile
        return []


def _total(usages: Iterable[_Sum]) -> _Sum:
    total = _Sum()
    for usage in usages:
        total.add(usage)
    return total


# --- Showing ----------------------------------------------------------------------------


def _document(
    inventory: Inventory, root: _Usage, timelines: dict[int, _Usage], free_bytes: int
) -> dict[str, Any]:
    usages = [root, *timelines.values()]
    return {
        "path": str(inventory.path),
        "run": inventory.run,
        **_total(usage.total for usage in usages).as_json(),
        "reclaimable": _total(usage.reclaimable for usage in usages).as_json(),
        "free_bytes": free_bytes,
        "records": root.records.as_json(),
        "temporary": root.temporary.as_json(),
        "other": root.other.as_json(),
        "timelines": [
            {
                "timeline": number,
                **usage.total.as_json(),
                "bases": [
                    {"step": base.id.step, "status": base.status, **whole.as_json()}
                    for base, whole in usage.bases
                ],
                "records": usage.records.as_json(),
                "log": {"segments": usage.segments, **usage.log.as_json()},
                "slots": usage.slots.as_json(),
                "temporary": usage.temporary.as_json(),
                "other": usage.other.as_json(),
            }
            for number, usage in timelines.items()
        ],
    }


def _show(out: Console, root: _Usage, timelines: dict[int, _Usage], free_bytes: int) -> None:
    made = table(("what", "files", "size", "allocated"), right=("files", "size", "allocated"))

    def row(what: str, usage: _Sum, style: str = "") -> None:
        made.add_row(
            label(what),
            f"{usage.files:,}",
            in_words(usage.size_bytes),
            in_words(usage.allocated_bytes),
            style=style,
        )

    left_out = max(0, len(timelines) - _ROWS_MAX)
    if left_out:
        older = list(timelines.values())[:left_out]
        row(f"{count_of(left_out, 'older timeline')}", _total(usage.total for usage in older))
    for number, usage in list(timelines.items())[left_out:]:
        row(f"timeline {number}", usage.total, "bold")
        hidden = usage.bases[:-_ROWS_MAX]
        if hidden:
            row(f"  {count_of(len(hidden), 'older base')}", _total(one for _, one in hidden))
        for base, whole in usage.bases[-_ROWS_MAX:]:
            status = "" if base.status == "committed" else f", {STATUS_WORDS[base.status]}"
            row(f"  base {base.id.step}{status}", whole)
        _rows_besides(row, usage)
    row("run folder", root.total, "bold")
    _rows_besides(row, root)
    usages = [root, *timelines.values()]
    whole = _total(p.total for p in usages)
    spare = _total(p.reclaimable for p in usages)
    row("all", whole, "bold")
    out.print(made)
    out.print(
        f"{in_words(spare.allocated_bytes)} of it may go by themselves (unfinished bases, slots, "
        f"temporary files); {in_words(free_bytes)} are free"
    )


def _rows_besides(row: Any, usage: _Usage) -> None:
    for what, found in (
        ("records", usage.records),
        (f"log, {count_of(usage.segments, 'segment')}", usage.log),
        ("slots (to be overwritten)", usage.slots),
        ("temporary", usage.temporary),
        ("other, not written by everstep", usage.other),
    ):
        if found.files:
            row(f"  {what}", found)
