"""Reads what a run folder holds: names and records, no data.

A run folder is not trusted: symbolic links are not followed, names that are not ours are
left alone, records are bounded in size and checked by digest, and nothing is allocated by
what they claim.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal, TypeVar

from everstep.commit.lineage import BaseId, Branch, branches_of
from everstep.errors import (
    DamageError,
    EverstepError,
    ForeignDirectoryError,
    NewerFormatError,
)
from everstep.format.digests import digest
from everstep.format.names import (
    AUDIT_RECORD,
    BASE_DIR,
    CONDEMNED,
    DELETING,
    LOG_DIR,
    LOSSY_DIR,
    MANIFEST,
    RUN_RECORD,
    TEMPORARY_SUFFIX,
    TIMELINE_RECORD,
    base_dir,
    marker_name,
    parse_base,
    parse_marker,
    parse_renamed_timeline,
    parse_segment,
    parse_timeline,
    timeline_dir,
)
from everstep.format.reader import read_record_bytes
from everstep.format.records import (
    AuditRecord,
    Manifest,
    Marker,
    RunRecord,
    TimelineRecord,
    manifest_of,
)
from everstep.seams.files.filesystem import DirEntry, FileSystem

__all__ = [
    "BaseFound",
    "Inventory",
    "TimelineCache",
    "bases_keeping_log",
    "newest_timeline",
    "not_a_directory",
    "scan_base",
    "scan_run",
]

_Record = TypeVar("_Record", RunRecord, TimelineRecord, Marker, Manifest, AuditRecord)
BaseStatus = Literal["committed", "complete", "damaged", "incomplete", "condemned"]
_TO_LOSE: tuple[BaseStatus, ...] = ("committed", "complete", "damaged")
_ATTEMPTS = 8
_KNOWN_MAX = 4096
_KNOWN_BYTES_MAX = 4096  # of one: there are larger ones where there are many ranks


@dataclass(frozen=True, slots=True)
class BaseFound:
    """A base directory.

    Attributes:
        status: ``committed``: has its manifest. ``complete``: has not, but its markers yield
            one, so it can be rolled forward. ``damaged``: it has records, but they cannot be
            read; it may have been good, so it is never swept away. ``incomplete``: it was
            never finished; it does not exist. ``condemned``: to be deleted.
        manifest: for ``committed`` and ``complete``; for ``condemned``, until the first of its
            files is going to be removed.
        problem: damage to its records, in words.
        files: everything in the directory.
        audit: what replay from an older base has said of it, if that was tried.
        audit_problem: damage to the record of that, in words; the base is none the worse.
        markers: those that could be read in a directory without a manifest: of a base whose
            ranks write to disks of their own, each disk has some.
    """

    id: BaseId
    path: PurePath
    status: BaseStatus
    manifest: Manifest | None
    problem: str | None
    files: tuple[DirEntry, ...]
    audit: AuditRecord | None = None
    audit_problem: str | None = None
    markers: tuple[Marker, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def is_usable(self) -> bool:
        """Whether a resume may read it. A condemned one counts while nothing of it is gone: its
        deleter may have died before it saw that a newer timeline needs it (``adr/004``)."""
        if self.status == "condemned" and self.manifest is not None:
            return all(self.has_files_of(marker) for marker in self.manifest.markers)
        return self.status in ("committed", "complete")

    @property
    def missing_file(self) -> str | None:
        """The name of a data file that the manifest lists and that is not in the directory with the
        length that it has there; None: there is no such file. A rank of several of which nothing is
        here writes to a disk of its own."""
        sizes = {file.name: file.size_bytes for file in self.files if file.kind == "file"}
        markers = () if self.manifest is None else self.manifest.markers
        for marker in markers:
            missing = [one.name for one in marker.files if sizes.get(one.name) != one.length]
            names = {marker_name(marker.rank), *(one.name for one in marker.files)}
            if missing and (len(markers) == 1 or not names.isdisjoint(sizes)):
                return missing[0]
        return None

    def has_files_of(self, marker: Marker) -> bool:
        """Whether a rank's marker and files are in the directory, by name and length."""
        sizes = {file.name: file.size_bytes for file in self.files if file.kind == "file"}
        there = marker_name(marker.rank) in sizes
        return there and all(sizes.get(file.name) == file.length for file in marker.files)


@dataclass(slots=True)
class Inventory:
    """All that a run folder holds.

    Attributes:
        run: the run's id; None in a folder that is empty or not there.
        timelines: records by number; None where the record is damaged.
        abandoned: numbers of timeline directories without a record: taken, but never opened.
        unreachable: by timeline, parts of it that are there and cannot be read: path, and why. A
            symbolic link is one, as none is followed within a run. What they hold may be newer than
            all that can be read (:func:`everstep.run.candidates.newest_unreachable`).
        logged: timelines without bases, but with a log: they were trained on.
        names: what there is in the directory of each timeline.
        problems: ``(path, what is wrong)`` of records other than those of bases.
    """

    path: PurePath
    run: str | None = None
    timelines: dict[int, TimelineRecord | None] = field(default_factory=dict)
    abandoned: list[int] = field(default_factory=list)
    unreachable: dict[int, dict[PurePath, str]] = field(default_factory=dict)
    logged: set[int] = field(default_factory=set)
    names: dict[int, frozenset[str]] = field(default_factory=dict)
    bases: list[BaseFound] = field(default_factory=list)
    problems: list[tuple[PurePath, str]] = field(default_factory=list)

    @property
    def branches(self) -> dict[int, Branch]:
        """Where each timeline forked from (:func:`everstep.commit.lineage.branches_of`)."""
        there = {base.id for base in self.bases if base.status in _TO_LOSE or base.is_usable}
        return branches_of(self.timelines, there, self.logged)

    @property
    def next_timeline(self) -> int:
        """The smallest number that nobody has taken."""
        return max([*self.timelines, *self.abandoned, *self.unreachable], default=0) + 1

    def may_hold(self, timeline: int, name: str) -> bool:
        """Whether it is worth a look if the directory of a timeline has a name: not where it had
        not, and has been left for a newer timeline, nor where it is a link."""
        if timeline_dir(self.path, timeline) / name in self.unreachable.get(timeline, ()):
            return False
        names = self.names.get(timeline)
        return names is None or name in names or timeline + 1 not in self.names


class TimelineCache:
    """Records of timelines of a run that one process has read: they are written once, exclusively.
    One is read anew where its name shows another file, by length and time."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, float, TimelineRecord]] = {}

    def of(self, timeline: int, entry: DirEntry) -> TimelineRecord | None:
        """The record that has a name in the timeline's directory; None if it has to be read."""
        size_bytes, time_s, record = self._found.get(timeline, (0, 0.0, None))
        return record if (size_bytes, time_s) == (entry.size_bytes, entry.mtime_s) else None

    def keep(self, entry: DirEntry, record: TimelineRecord) -> None:
        """It was read, behind the listing that had ``entry``."""
        self._found[record.timeline] = entry.size_bytes, entry.mtime_s, record


def scan_run(
    filesystem: FileSystem, path: PurePath, known: TimelineCache | None = None
) -> Inventory:
    """Takes the inventory of a run folder.

    When something that was listed is gone a moment later, or the newest base is being deleted,
    another process is at work and has something newer instead: then everything is looked at once
    more.

    Args:
        known: of the process that looks, which looks often.

    Raises:
        ForeignDirectoryError: for a directory with other people's files.
        NewerFormatError: when any part was written by a newer everstep.
        OSError: when the directory cannot be read.
    """
    for left in reversed(range(_ATTEMPTS)):
        try:
            entries = filesystem.scan(path)
        except FileNotFoundError:
            return Inventory(path)
        try:
            inventory = _scan(filesystem, path, entries, known or TimelineCache())
        except FileNotFoundError:
            if not left:
                raise
            continue
        if not left or not _overtaken(inventory):
            return inventory
    raise AssertionError("unreachable")


def _overtaken(inventory: Inventory) -> bool:
    """Return whether the newest base is being deleted: then a newer one was committed after its
    directory was looked at, since retention deletes a base only once a newer one is there."""
    usable = max((base.id for base in inventory.bases if base.is_usable), default=BaseId(0, 0))
    return any(
        base.status == "condemned" and not base.is_usable and base.id > usable
        for base in inventory.bases
    )


def _scan(
    filesystem: FileSystem, path: PurePath, entries: list[DirEntry], known: TimelineCache
) -> Inventory:
    inventory = Inventory(path)
    names = {entry.name: entry for entry in entries}
    numbers = [n for entry in entries if (n := parse_timeline(entry.name)) is not None]
    ours = [name for name in names if name.endswith(TEMPORARY_SUFFIX) and name.startswith("run.")]
    if RUN_RECORD not in names and not numbers:
        foreign = [name for name in names if name not in ours]
        if foreign:
            raise ForeignDirectoryError(
                f"{path} is not a run of everstep: it holds {foreign[0]!r}"
                + (f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""),
                path=path,
                hint="choose a new or empty directory",
            )
        return inventory
    if RUN_RECORD in names:
        record = _record(filesystem, path / RUN_RECORD, RunRecord, inventory)
        inventory.run = record.run if record else None
    else:
        inventory.problems.append((path / RUN_RECORD, "it is missing"))
    for number in sorted(numbers):
        directory = timeline_dir(path, number)
        if names[directory.name].kind != "dir":
            _note_unreachable(inventory, number, directory, names[directory.name].kind)
            continue
        _scan_timeline(filesystem, inventory, number, directory, known)
    for entry in entries:
        renamed = parse_renamed_timeline(entry.name)
        if renamed is None or renamed in numbers or entry.kind not in ("dir", "link"):
            continue
        if entry.kind == "link" or _holds_timeline(filesystem, path / entry.name):
            why = f"seems to be timeline {renamed}, renamed from {timeline_dir(path, renamed).name}"
            inventory.unreachable.setdefault(renamed, {})[path / entry.name] = why
            inventory.problems.append((path / entry.name, why))
    if inventory.run is None:  # a damaged run.json loses nothing: every record has the id
        ids = [record.run for record in inventory.timelines.values() if record is not None]
        ids += [base.manifest.markers[0].run for base in inventory.bases if base.manifest]
        inventory.run = ids[0] if ids else None
    return inventory


def bases_keeping_log(bases: Iterable[BaseFound]) -> list[BaseId]:
    """Those of which retention leaves the log: the committed ones, and what is none, or none yet,
    unless all of these are newer. What a process that died has left, or what is damaged, would
    else keep all segments since, for ever."""
    found = list(bases)
    oldest = min((base.id for base in found if base.status == "committed"), default=None)
    return [base.id for base in found if oldest is None or base.id >= oldest]


def newest_timeline(filesystem: FileSystem, path: PurePath) -> int:
    """The newest timeline that has been opened; 0 if there is none. The fence (I11)."""
    directories = {
        number: path / entry.name
        for entry in filesystem.scan(path)
        if entry.kind == "dir" and (number := parse_timeline(entry.name)) is not None
    }
    for number in sorted(directories, reverse=True):
        if any(item.name == TIMELINE_RECORD for item in filesystem.scan(directories[number])):
            return number
    return 0


def scan_base(filesystem: FileSystem, run: PurePath, base: BaseId) -> BaseFound:
    """What there is of one base.

    Raises:
        OSError: when the directory is not there (any more) or cannot be read.
        NewerFormatError: when it was written by a newer everstep.
    """
    path = base_dir(run, base.timeline, base.step)
    files = tuple(filesystem.scan(path))
    names = {entry.name for entry in files if entry.kind == "file"}
    if CONDEMNED in names or DELETING in names:
        return _scan_condemned(filesystem, base, path, files)
    problems: list[str] = [
        f"{entry.name} is a {entry.kind}" for entry in files if entry.kind != "file"
    ]
    manifest: Manifest | None = None
    if MANIFEST in names:
        manifest = _try(filesystem, path / MANIFEST, Manifest, problems)
        if manifest is not None and _claims(manifest.markers[0]) != base:
            problems.append(f"{MANIFEST} is of another base")
            manifest = None
    status: BaseStatus = "committed"
    markers: dict[int, Marker] = {}
    if manifest is None:
        status = "complete"
        markers = _markers(filesystem, path, names, base, problems)
        manifest = manifest_of(markers)
    if manifest is None:
        # Records appear whole or not at all, so one that cannot be read is damage.
        status = "damaged" if problems else "incomplete"
        problems.append(_how_many_markers(names))
    problem = "; ".join(problems) or None
    audit = None
    why = ""
    if manifest is not None and AUDIT_RECORD in names:
        audit, why = _audit(filesystem, path, manifest)
    found = tuple(markers[rank] for rank in sorted(markers))
    return BaseFound(base, path, status, manifest, problem, files, audit, why or None, found)


def _scan_condemned(
    filesystem: FileSystem, base: BaseId, path: PurePath, files: tuple[DirEntry, ...]
) -> BaseFound:
    """Its manifest still counts for something until a deleter says that it removes files now."""
    manifest = None
    names = {entry.name for entry in files if entry.kind == "file"}
    if DELETING not in names:
        manifest = _try(filesystem, path / CONDEMNED, Manifest, [])
    if manifest is None or _claims(manifest.markers[0]) != base:
        return BaseFound(base, path, "condemned", None, None, files)
    audit = _audit(filesystem, path, manifest)[0] if AUDIT_RECORD in names else None
    return BaseFound(base, path, "condemned", manifest, None, files, audit)


def _scan_timeline(
    filesystem: FileSystem,
    inventory: Inventory,
    number: int,
    directory: PurePath,
    known: TimelineCache,
) -> None:
    entries = {entry.name: entry for entry in filesystem.scan(directory)}
    names = {name: entry.kind for name, entry in entries.items()}
    inventory.names[number] = frozenset(names)
    if TIMELINE_RECORD in names:
        entry = entries[TIMELINE_RECORD]
        record = known.of(number, entry)
        if record is None:
            path = directory / TIMELINE_RECORD
            record = _record(filesystem, path, TimelineRecord, inventory)
            if record is not None and not _plausible(record, number):
                inventory.problems.append((path, "is of another timeline"))
                record = None
            if record is not None:
                known.keep(entry, record)
        inventory.timelines[number] = record
    for kind in (BASE_DIR, LOG_DIR, LOSSY_DIR):
        if names.get(kind, "dir") != "dir":
            _note_unreachable(inventory, number, directory / kind, names[kind])
    found = filesystem.scan(directory / BASE_DIR) if names.get(BASE_DIR) == "dir" else []
    before = len(inventory.bases)
    for entry in found:
        step = parse_base(entry.name)
        if step is None:
            continue
        base = BaseId(number, step)
        if entry.kind != "dir":
            path = directory / BASE_DIR / entry.name
            reason = not_a_directory(entry.kind)
            inventory.bases.append(BaseFound(base, path, "damaged", None, f"{path} {reason}", ()))
            continue
        try:
            one = scan_base(filesystem, inventory.path, base)
            inventory.bases.append(one)
            if one.audit_problem is not None:
                inventory.problems.append((one.path, one.audit_problem))
        except FileNotFoundError:
            raise
        except OSError as error:  # this one cannot be read; the others may be fine
            reason = f"cannot be read: {error.strerror or error}"
            path = directory / BASE_DIR / entry.name
            inventory.bases.append(BaseFound(base, path, "damaged", None, reason, ()))
    mine = inventory.bases[before:]
    has_bases = any(base.status in _TO_LOSE or base.is_usable for base in mine)
    logs = [directory / kind for kind in (LOG_DIR, LOSSY_DIR) if names.get(kind) == "dir"]
    if not has_bases and any(_holds_segments(filesystem, log) for log in logs):
        inventory.logged.add(number)
    if TIMELINE_RECORD in names:
        return
    if has_bases:
        # It was opened once: losing its record must not lose its bases.
        inventory.problems.append((directory / TIMELINE_RECORD, "it is missing"))
        inventory.timelines[number] = None
    else:
        inventory.abandoned.append(number)


def _note_unreachable(inventory: Inventory, number: int, path: PurePath, kind: str) -> None:
    """Record a part of a timeline that is no directory."""
    inventory.unreachable.setdefault(number, {})[path] = not_a_directory(kind)
    inventory.problems.append((path, not_a_directory(kind)))


def not_a_directory(kind: str) -> str:
    """Return why what has the name of a directory of everstep's is not read, by its kind."""
    if kind == "link":
        return "is a symbolic link, and none is followed within a run"
    return f"is no directory (a {'file' if kind == 'file' else 'special file'})"


def _holds_timeline(filesystem: FileSystem, directory: PurePath) -> bool:
    names = {entry.name for entry in filesystem.scan(directory)}
    return not names.isdisjoint((TIMELINE_RECORD, BASE_DIR, LOG_DIR))


def _holds_segments(filesystem: FileSystem, log: PurePath) -> bool:
    """Whether any is finished; the newest are looked at first."""
    named = (entry for entry in filesystem.scan(log) if parse_segment(entry.name) is not None)
    for one in sorted(named, key=lambda entry: entry.name, reverse=True):
        with contextlib.suppress(FileNotFoundError):  # a process at work deletes it
            files = filesystem.scan(log / one.name) if one.kind == "dir" else []
            if any(parse_marker(file.name) is not None for file in files):
                return True
    return False


def _markers(
    filesystem: FileSystem, path: PurePath, names: set[str], base: BaseId, problems: list[str]
) -> dict[int, Marker]:
    markers: dict[int, Marker] = {}
    for name in sorted(names):
        rank = parse_marker(name)
        if rank is None:
            continue
        marker = _try(filesystem, path / name, Marker, problems)
        if marker is not None and _claims(marker) == base and marker.rank == rank:
            markers[rank] = marker
        elif marker is not None:
            problems.append(f"{name} is of another base or rank")
    return markers


def _audit(
    filesystem: FileSystem, path: PurePath, manifest: Manifest
) -> tuple[AuditRecord | None, str]:
    """The audit of the base with this manifest, or what is wrong with its record."""
    problems: list[str] = []
    found = _try(filesystem, path / AUDIT_RECORD, AuditRecord, problems)
    if found is None:
        return None, "; ".join(problems)
    first = manifest.markers[0]
    if (found.run, found.timeline, found.step) != (first.run, first.timeline, first.step):
        return None, f"{AUDIT_RECORD} is of another base"
    if found.manifest != digest(manifest.encode()):
        return None, f"{AUDIT_RECORD} is of other contents of this base"
    return found, ""


def _how_many_markers(names: set[str]) -> str:
    count = sum(parse_marker(name) is not None for name in names)
    return f"no manifest that can be read, and {count or 'no'} marker{'' if count == 1 else 's'}"


def _claims(marker: Marker) -> BaseId:
    return BaseId(marker.timeline, marker.step)


def _plausible(record: TimelineRecord, number: int) -> bool:
    return record.timeline == number and (record.parent is None or record.parent < number)


def _record(
    filesystem: FileSystem, path: PurePath, kind: type[_Record], inventory: Inventory
) -> _Record | None:
    problems: list[str] = []
    record = _try(filesystem, path, kind, problems)
    inventory.problems += [(path, problem) for problem in problems]
    return record


@functools.lru_cache(_KNOWN_MAX)
def _known(decode: Callable[[bytes, PurePath], _Record], data: bytes) -> _Record:
    return decode(data, PurePath())


def _decoded(kind: type[_Record], data: bytes, path: PurePath) -> _Record:
    """A record, which is a function of its bytes: a start looks at those of each timeline several
    times, and what has been verified needs only to be compared."""
    if len(data) > _KNOWN_BYTES_MAX:
        return kind.decode(data, path)
    try:
        found: _Record = _known(kind.decode, data)
    except EverstepError:
        return kind.decode(data, path)  # raises with the path
    return found


def _try(
    filesystem: FileSystem, path: PurePath, kind: type[_Record], problems: list[str]
) -> _Record | None:
    """Decodes a record; damage becomes a line in ``problems``."""
    try:
        return _decoded(kind, read_record_bytes(filesystem, path), path)
    except (NewerFormatError, FileNotFoundError):
        raise
    except DamageError:
        problems.append(f"{path.name} is damaged: its digest does not match")
    except EverstepError as error:
        problems.append(f"{path.name}: {error.message.removeprefix(f'{path}: ')}")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror or error}")
    return None
