"""``everstep du``: show the disk space of a run, and how much of it is reclaimable."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.console import Console

from everstep.cli.common.errors import JsonFlag, emit
from everstep.cli.common.output import console, count_of, in_words, label, table
from everstep.cli.common.runs import RUN_ARGUMENT, open_run, reading
from everstep.cli.ls import STATUS_WORDS
from everstep.commit.lineage import BaseId
from everstep.events.log import EVENTS_DIR
from everstep.format.names import (
    BASE_DIR,
    LOG_DIR,
    LOSSY_DIR,
    RUN_RECORD,
    SLOTS_DIR,
    TEMPORARY_SUFFIX,
    TIMELINE_RECORD,
    parse_marker,
    parse_rank,
    parse_segment,
    parse_timeline,
)
from everstep.seams import PosixFileSystem
from everstep.seams.filesystem import DirEntry, FileSystem

if TYPE_CHECKING:
    from everstep.run.scan import Inventory


_ROWS_MAX = 50
_KINDS = {
    "records": "records",
    "log": "log",
    "events": "event log",
    "slots": "slots (to be overwritten)",
    "temporary": "temporary",
    "other": "other, not written by everstep",
}
"""Files that belong to no base, in words."""


class _Sum(NamedTuple):
    """Sum over files. Directories are not counted; a file with several names counts its bytes
    once.
    """

    files: int = 0
    size_bytes: int = 0
    allocated_bytes: int = 0


@dataclass(slots=True)
class _Usage:
    """Disk usage of a timeline's folder, or of files in the run folder itself.

    Attributes:
        sums: files of each kind (:data:`_KINDS`).
        bases: files of each base, without temporary ones.
        segments: number of finished segments.
    """

    sums: dict[str, _Sum] = field(default_factory=lambda: dict.fromkeys(_KINDS, _Sum()))
    bases: dict[BaseId, _Sum] = field(default_factory=dict)
    segments: set[PurePath] = field(default_factory=set)

    @property
    def total(self) -> _Sum:
        return _total([*self.bases.values(), *self.sums.values()])

    def reclaimable(self, unfinished: Collection[BaseId]) -> _Sum:
        """Files that the next retention or resume may remove."""
        bases = [found for base, found in self.bases.items() if base in unfinished]
        return _total([*bases, self.sums["slots"], self.sums["temporary"]])


def du(run: Annotated[str, RUN_ARGUMENT], json_output: JsonFlag = False) -> None:
    """Adds up the disk space of a run.

    By timeline and base; log, slots, temporary and foreign files are listed separately. Shows
    apparent sizes (contents of the files) and allocated ones (blocks on disk). Writes nothing.
    """
    filesystem = PosixFileSystem()
    inventory = open_run(filesystem, run)
    with reading(inventory.path):
        usages = _measure(filesystem, inventory)
        free_bytes = filesystem.free_bytes(inventory.path)
    if json_output:
        emit(_document(inventory, usages, free_bytes))
    else:
        _show(console(), inventory, usages, free_bytes)


# --- Measuring --------------------------------------------------------------------------


def _measure(filesystem: FileSystem, inventory: Inventory) -> dict[int, _Usage]:
    """Return the usage of each timeline, and of the run folder itself under 0."""
    usages = {0: _Usage()} | {number: _Usage() for number in sorted(inventory.names)}
    bases = {base.path: base.id for base in inventory.bases}
    met = set[int]()
    for path, entry in _files(filesystem, inventory.path):
        number, kind = _classify(path.relative_to(inventory.path).parts)
        usage = usages[number if number in usages else 0]
        found = _Sum(1, entry.size_bytes, entry.allocated_bytes)
        if entry.links > 1 and entry.file in met:
            found = _Sum(1)
        met.add(entry.file)
        if kind == "log" and parse_marker(path.name) is not None:
            usage.segments.add(path.parent)
        if kind == "base" and path.parent in bases:
            base = bases[path.parent]
            usage.bases[base] = _total([usage.bases.get(base, _Sum()), found])
        else:
            kind = "other" if kind == "base" else kind
            usage.sums[kind] = _total([usage.sums[kind], found])
    return usages


def _classify(parts: Sequence[str]) -> tuple[int, str]:
    """Return the timeline and the kind of a file, given its path in the run folder."""
    number = parse_timeline(parts[0])
    if number is not None:
        return number, _kind_in_timeline(parts[1:])
    if parts == (RUN_RECORD,):
        return 0, "records"
    if parts[0] == EVENTS_DIR:
        return 0, "events"
    return 0, "temporary" if parts[-1].endswith(TEMPORARY_SUFFIX) else "other"


def _kind_in_timeline(parts: Sequence[str]) -> str:
    if parts == (TIMELINE_RECORD,):
        return "records"
    if parts[0] == SLOTS_DIR:
        return "slots"
    if parts[-1].endswith(TEMPORARY_SUFFIX):
        return "temporary"
    if len(parts) == 3 and parts[0] == BASE_DIR:
        return "base"
    if len(parts) == 3 and parts[0] in (LOG_DIR, LOSSY_DIR):
        ours = parse_segment(parts[1]) is not None and parse_rank(parts[2]) is not None
        return "log" if ours else "other"
    return "other"


def _files(filesystem: FileSystem, directory: PurePath) -> Iterator[tuple[PurePath, DirEntry]]:
    """Yield all files below a directory; links are not followed."""
    try:
        entries = filesystem.scan(directory)
    except FileNotFoundError:  # deleted by a running process meanwhile
        return
    for entry in entries:
        if entry.kind == "dir":
            yield from _files(filesystem, directory / entry.name)
        else:
            yield directory / entry.name, entry


def _total(usages: Iterable[_Sum]) -> _Sum:
    return _Sum(*map(sum, zip(_Sum(), *usages, strict=True)))


def _unfinished(inventory: Inventory) -> set[BaseId]:
    return {base.id for base in inventory.bases if base.status in ("incomplete", "condemned")}


# --- Showing ----------------------------------------------------------------------------


def _document(inventory: Inventory, usages: dict[int, _Usage], free_bytes: int) -> dict[str, Any]:
    unfinished = _unfinished(inventory)
    statuses = {base.id: base.status for base in inventory.bases}
    root = usages[0]
    return {
        "path": inventory.path,
        "run": inventory.run,
        **_total(usage.total for usage in usages.values())._asdict(),
        "reclaimable": _total(one.reclaimable(unfinished) for one in usages.values())._asdict(),
        "free_bytes": free_bytes,
        **{kind: root.sums[kind]._asdict() for kind in ("records", "events", "temporary", "other")},
        "timelines": [
            {
                "timeline": number,
                **usage.total._asdict(),
                "bases": [
                    {"step": base.step, "status": statuses[base], **found._asdict()}
                    for base, found in usage.bases.items()
                ],
                **{kind: found._asdict() for kind, found in usage.sums.items()},
                "log": {"segments": len(usage.segments), **usage.sums["log"]._asdict()},
            }
            for number, usage in usages.items()
            if number
        ],
    }


def _show(out: Console, inventory: Inventory, usages: dict[int, _Usage], free_bytes: int) -> None:
    made = table(("what", "files", "size", "allocated"), right=("files", "size", "allocated"))
    statuses: dict[BaseId, str] = {base.id: base.status for base in inventory.bases}

    def row(what: str, usage: _Sum, style: str = "") -> None:
        made.add_row(
            label(what),
            f"{usage.files:,}",
            in_words(usage.size_bytes),
            in_words(usage.allocated_bytes),
            style=style,
        )

    numbers = [number for number in usages if number]
    if older := numbers[:-_ROWS_MAX]:
        row(count_of(len(older), "older timeline"), _total(usages[one].total for one in older))
    for number in (*numbers[-_ROWS_MAX:], 0):
        row(f"timeline {number}" if number else "run folder", usages[number].total, "bold")
        for what, found in _rows(usages[number], statuses):
            row(f"  {what}", found)
    row("all", _total(usage.total for usage in usages.values()), "bold")
    out.print(made)
    spare = _total(usage.reclaimable(_unfinished(inventory)) for usage in usages.values())
    out.print(
        f"{in_words(spare.allocated_bytes)} of it may go by themselves (unfinished bases, slots, "
        f"temporary files); {in_words(free_bytes)} are free"
    )


def _rows(usage: _Usage, statuses: dict[BaseId, str]) -> Iterator[tuple[str, _Sum]]:
    bases = list(usage.bases.items())
    if hidden := bases[:-_ROWS_MAX]:
        yield count_of(len(hidden), "older base"), _total(found for _, found in hidden)
    for base, found in bases[-_ROWS_MAX:]:
        status = STATUS_WORDS[statuses[base]]
        yield f"base {base.step}" + ("" if status == "committed" else f", {status}"), found
    for kind, found in usage.sums.items():
        if found.files:
            count = f", {count_of(len(usage.segments), 'segment')}" if kind == "log" else ""
            yield _KINDS[kind] + count, found
