"""Scan a run folder: names and records, no data.

The contents are not trusted. Symbolic links are not followed, unknown names are ignored, records
are limited in size and verified by digest, and no memory is allocated on the strength of a size
that a record claims.

Order in which a resume tries the bases, and reasons to skip some of them. No I/O.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal, TypeVar

from everstep.commit import BaseId, split_by_history
from everstep.commit.lineage import Branch, branches_of
from everstep.errors import (
    DamageError,
    EverstepError,
    ForeignDirectoryError,
    NewerFormatError,
    RecoveryError,
)
from everstep.format import (
    MANIFEST,
    Manifest,
    Marker,
    TimelineRecord,
    base_dir,
    digest,
    timeline_dir,
)
from everstep.format.names import (
    ANNOTATIONS,
    AUDIT_RECORD,
    BASE_DIR,
    CONDEMNED,
    DELETING,
    LOG_DIR,
    LOSSY_DIR,
    PIN_RECORD,
    RUN_RECORD,
    TEMPORARY_SUFFIX,
    TIMELINE_RECORD,
    marker_name,
    parse_base,
    parse_marker,
    parse_renamed_part,
    parse_renamed_timeline,
    parse_segment,
    parse_timeline,
)
from everstep.format.reader import read_record_bytes
from everstep.format.records import Annotations, AuditRecord, RunRecord, manifest_of
from everstep.seams import DirEntry, FileSystem

_Record = TypeVar("_Record", RunRecord, TimelineRecord, Marker, Manifest, AuditRecord, Annotations)
BaseStatus = Literal["committed", "complete", "damaged", "incomplete", "condemned"]
_MAY_BE_GOOD: tuple[BaseStatus, ...] = ("committed", "complete", "damaged")
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class BaseFound:
    """A base directory.

    Attributes:
        status: ``committed``: has a manifest. ``complete``: has no manifest, but all markers, so it
            can be rolled forward. ``damaged``: has records that cannot be read; since the base may
            have been good, it is never removed automatically. ``incomplete``: was never finished
            and counts as nonexistent. ``condemned``: is marked for deletion.
        manifest: of ``committed`` and ``complete`` bases; of ``condemned`` ones until the deletion
            of files begins.
        problem: description of damaged records.
        files: all directory entries.
        audit: result of replaying the log from the previous base up to this one, if that was done.
        audit_problem: description of a damaged audit record, which does not affect the base.
        markers: readable markers in a directory without a manifest. If ranks write to separate
            disks, each disk has some of them.
        annotations: metrics and note of the user; None without a readable record of them.
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
    annotations: Annotations | None = None

    @property
    def is_pinned(self) -> bool:
        """True if the user has pinned the base, even if the record cannot be read."""
        return any(file.name == PIN_RECORD for file in self.files)

    @property
    def size_bytes(self) -> int:
        """Total size of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def is_usable(self) -> bool:
        """True if a resume may read the base.

        A condemned base is usable while all its files exist: its deleter may have died before it
        noticed that a newer timeline needs the base (``adr/004``).
        """
        if self.status == "condemned" and self.manifest is not None:
            return all(self.has_files_of(marker) for marker in self.manifest.markers)
        return self.status in ("committed", "complete")

    @property
    def missing_file(self) -> str | None:
        """Name of a data file that the manifest lists and that is missing or has another length;
        None if there is none.

        Of several ranks, a rank without any file here writes to a disk of its own and is not
        checked.
        """
        sizes = {file.name: file.size_bytes for file in self.files if file.kind == "file"}
        markers = () if self.manifest is None else self.manifest.markers
        for marker in markers:
            missing = [one.name for one in marker.files if sizes.get(one.name) != one.length]
            names = {marker_name(marker.rank), *(one.name for one in marker.files)}
            if missing and (len(markers) == 1 or not names.isdisjoint(sizes)):
                return missing[0]
        return None

    def has_files_of(self, marker: Marker) -> bool:
        """Return True if the marker and all files of a rank exist with the recorded lengths."""
        sizes = {file.name: file.size_bytes for file in self.files if file.kind == "file"}
        there = marker_name(marker.rank) in sizes
        return there and all(sizes.get(file.name) == file.length for file in marker.files)


@dataclass(slots=True)
class Inventory:
    """Contents of a run folder.

    Attributes:
        run: id of the run; None if the folder is empty or missing.
        timelines: records by timeline number; None for a damaged record.
        abandoned: numbers of timeline directories without a record: reserved, but never opened.
        logged: timelines without bases, but with log segments, so training took place on them.
        names: names in the directory of each timeline.
        problems: ``(path, problem)`` of damaged records other than those of bases.
    """

    path: PurePath
    run: str | None = None
    timelines: dict[int, TimelineRecord | None] = field(default_factory=dict)
    abandoned: list[int] = field(default_factory=list)
    logged: set[int] = field(default_factory=set)
    names: dict[int, frozenset[str]] = field(default_factory=dict)
    bases: list[BaseFound] = field(default_factory=list)
    problems: list[tuple[PurePath, str]] = field(default_factory=list)

    @property
    def branches(self) -> dict[int, Branch]:
        """Fork point of each timeline (:func:`everstep.commit.lineage.branches_of`)."""
        there = {base.id for base in self.bases if base.status in _MAY_BE_GOOD or base.is_usable}
        return branches_of(self.timelines, there, self.logged)

    @property
    def next_timeline(self) -> int:
        """Smallest timeline number not yet taken."""
        # Reserved numbers count: their processes may be about to create their records.
        return max([*self.timelines, *self.abandoned], default=0) + 1

    def may_hold(self, timeline: int, name: str) -> bool:
        """Return False if a timeline's directory certainly has no usable entry of this name.

        That is so if it was absent when the timeline had already been superseded.
        """
        names = self.names.get(timeline)
        return names is None or name in names or timeline + 1 not in self.names


class TimelineCache:
    """Timeline records that this process has already read.

    Timeline records are created exclusively and never rewritten. A record is read again only if its
    length or modification time has changed.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, float, TimelineRecord]] = {}

    def get(self, timeline: int, entry: DirEntry) -> TimelineRecord | None:
        """Return the cached record for a directory entry, or None if it must be read."""
        size_bytes, time_s, record = self._found.get(timeline, (0, 0.0, None))
        return record if (size_bytes, time_s) == (entry.size_bytes, entry.mtime_s) else None

    def put(self, entry: DirEntry, record: TimelineRecord) -> None:
        """Store the record that was read after ``entry`` was listed."""
        self._found[record.timeline] = entry.size_bytes, entry.mtime_s, record


def scan_run(
    filesystem: FileSystem, path: PurePath, known: TimelineCache | None = None
) -> Inventory:
    """Scan a run folder.

    The scan is repeated if a listed file has disappeared, or if the newest base is being deleted:
    then another process is active and has committed something newer in the meantime.

    Args:
        known: timeline records read by earlier scans of this process.

    Raises:
        ForeignDirectoryError: the directory holds files that are not of everstep.
        NewerFormatError: a record was written by a newer everstep.
        OSError: the directory cannot be read.
    """
    # Another process may delete bases and segments during the scan. Retry until one scan sees a
    # consistent folder.
    for left in reversed(range(_ATTEMPTS)):
        try:
            entries = filesystem.scan(path)
        except FileNotFoundError:
            return Inventory(path)
        scan = _Scan(filesystem, path, known or TimelineCache(), is_last=not left)
        try:
            scan.run(entries)
        except FileNotFoundError:
            if not left:
                raise
            continue
        if not left or not _newest_is_being_deleted(scan.inventory):
            return scan.inventory
    raise AssertionError("unreachable")


def _newest_is_being_deleted(inventory: Inventory) -> bool:
    """Return True if the newest base is being deleted.

    Retention deletes a base only after a newer one is committed, so the scan has missed that one.
    """
    usable = max((base.id for base in inventory.bases if base.is_usable), default=BaseId(0, 0))
    return any(
        base.status == "condemned" and not base.is_usable and base.id > usable
        for base in inventory.bases
    )


class _Scan:
    """One pass over a run folder.

    Args:
        is_last: there will be no other pass: a listed folder that is missing counts as empty. A
            directory that keeps copies may have an empty one, which the run folder has not.
    """

    def __init__(
        self, filesystem: FileSystem, path: PurePath, known: TimelineCache, *, is_last: bool
    ) -> None:
        self._filesystem = filesystem
        self._is_last = is_last
        self._path = path
        self._known = known
        self.inventory = Inventory(path)

    def run(self, entries: list[DirEntry]) -> None:
        """Fill the inventory from the folder with these entries.

        Raises:
            ForeignDirectoryError: the directory holds files that are not of everstep.
            FileNotFoundError: another process has deleted something meanwhile.
        """
        inventory = self.inventory
        names = {entry.name: entry for entry in entries}
        numbers = [n for entry in entries if (n := parse_timeline(entry.name)) is not None]
        if RUN_RECORD not in names and not numbers:
            self._refuse_foreign(names)
            return
        self._refuse_renamed(entries, numbers)
        if RUN_RECORD in names:
            record = self._record(self._path / RUN_RECORD, RunRecord)
            inventory.run = record.run if record else None
        else:
            inventory.problems.append((self._path / RUN_RECORD, "is missing"))
        for number in sorted(numbers):
            directory = timeline_dir(self._path, number)
            _refuse_irregular(directory, names[directory.name].kind)
            self._scan_timeline(number, directory)
        # The id is in every record, so a damaged run.json loses nothing.
        if inventory.run is None:
            ids = [record.run for record in inventory.timelines.values() if record is not None]
            ids += [base.manifest.markers[0].run for base in inventory.bases if base.manifest]
            inventory.run = ids[0] if ids else None

    def _refuse_foreign(self, names: Iterable[str]) -> None:
        # A process that died while it created the folder leaves a temporary run record.
        foreign = [
            name
            for name in names
            if not (name.endswith(TEMPORARY_SUFFIX) and name.startswith("run."))
        ]
        if foreign:
            raise ForeignDirectoryError(
                f"{self._path} is not an everstep run folder: it contains {foreign[0]!r}"
                + (f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""),
                path=self._path,
                hint="choose a new or empty directory",
            )

    def _refuse_renamed(self, entries: list[DirEntry], numbers: list[int]) -> None:
        for entry in entries:
            number = parse_renamed_timeline(entry.name)
            # A copy beside the original hides nothing.
            if number is not None and number not in numbers:
                _refuse_moved(self._path, entry, timeline_dir(self._path, number).name)

    def _scan(self, directory: PurePath) -> Sequence[DirEntry]:
        """Return the entries of a directory that its parent has listed.

        Raises:
            FileNotFoundError: it is missing, and this is not the last pass.
        """
        try:
            return self._filesystem.scan(directory)
        except FileNotFoundError:
            if not self._is_last:
                raise
            return ()

    def _scan_timeline(self, number: int, directory: PurePath) -> None:
        inventory = self.inventory
        entries = {entry.name: entry for entry in self._filesystem.scan(directory)}
        inventory.names[number] = frozenset(entries)
        if TIMELINE_RECORD in entries:
            inventory.timelines[number] = self._timeline_record(
                number, directory / TIMELINE_RECORD, entries[TIMELINE_RECORD]
            )
        _refuse_moved_parts(directory, entries)
        mine = []
        if BASE_DIR in entries:
            mine = self._bases(number, directory / BASE_DIR)
        inventory.bases += mine
        has_bases = any(base.status in _MAY_BE_GOOD or base.is_usable for base in mine)
        logs = [directory / kind for kind in (LOG_DIR, LOSSY_DIR) if kind in entries]
        # Not listed otherwise: with bases the timeline counts as trained on anyway.
        if not has_bases and any(_holds_segments(self._scan, log) for log in logs):
            inventory.logged.add(number)
        if TIMELINE_RECORD in entries:
            return
        if has_bases:
            # The timeline was opened once. A lost record must not make its bases unreachable.
            inventory.problems.append((directory / TIMELINE_RECORD, "is missing"))
            inventory.timelines[number] = None
        else:
            inventory.abandoned.append(number)

    def _timeline_record(
        self, number: int, path: PurePath, entry: DirEntry
    ) -> TimelineRecord | None:
        record = self._known.get(number, entry)
        if record is not None:
            return record
        record = self._record(path, TimelineRecord)
        # A parent that is not older would make histories endless.
        if record is not None and (
            record.timeline != number or (record.parent is not None and record.parent >= number)
        ):
            self.inventory.problems.append((path, "belongs to another timeline"))
            return None
        # Only plausible records are remembered: a damaged one may be restored by hand meanwhile.
        if record is not None:
            self._known.put(entry, record)
        return record

    def _bases(self, number: int, directory: PurePath) -> list[BaseFound]:
        """Return the bases of a timeline, damaged ones included."""
        found = []
        for entry in self._scan(directory):
            step = parse_base(entry.name)
            if step is None:
                continue
            base = BaseId(number, step)
            path = directory / entry.name
            if entry.kind != "dir":
                reason = f"{path} {not_a_directory(entry.kind)}"
                found.append(BaseFound(base, path, "damaged", None, reason, ()))
                continue
            try:
                one = scan_base(self._filesystem, self._path, base)
            except FileNotFoundError:
                # Deleted meanwhile: the whole scan is repeated.
                raise
            except OSError as error:
                # The other bases may still be readable.
                reason = f"cannot be read: {error.strerror or error}"
                one = BaseFound(base, path, "damaged", None, reason, ())
            found.append(one)
            if one.audit_problem is not None:
                self.inventory.problems.append((one.path, one.audit_problem))
        return found

    def _record(self, path: PurePath, kind: type[_Record]) -> _Record | None:
        problems: list[str] = []
        record = _try(self._filesystem, path, kind, problems)
        self.inventory.problems += [(path, problem) for problem in problems]
        return record


def bases_keeping_log(
    bases: Iterable[BaseFound], archived: Collection[BaseId] = (), newest: int = 1
) -> list[BaseId]:
    """Return the bases whose log retention must keep.

    These are all committed bases, and unfinished or damaged ones no older than the oldest committed
    base. Older remains of a crash do not count: they would keep all later segments for ever.

    Args:
        archived: bases that stay for their own step only. The oldest bases are left out while they
            are among these.
        newest: number of newest committed bases that are never left out.
    """
    found = list(bases)
    committed = sorted(base.id for base in found if base.status == "committed")
    while len(committed) > newest and committed[0] in archived:
        del committed[0]
    oldest = committed[0] if committed else None
    return [base.id for base in found if oldest is None or base.id >= oldest]


def newest_timeline(filesystem: FileSystem, path: PurePath) -> int:
    """Return the newest timeline that has been opened, or 0. This is the fence (I11)."""
    directories = {
        number: path / entry.name
        for entry in filesystem.scan(path)
        if entry.kind == "dir" and (number := parse_timeline(entry.name)) is not None
    }
    # A directory without a record is only reserved. Its process has not fenced anybody off yet.
    for number in sorted(directories, reverse=True):
        if any(item.name == TIMELINE_RECORD for item in filesystem.scan(directories[number])):
            return number
    return 0


def scan_base(filesystem: FileSystem, run: PurePath, base: BaseId) -> BaseFound:
    """Scan one base.

    Raises:
        OSError: the directory is missing or cannot be read.
        NewerFormatError: the base was written by a newer everstep.
    """
    path = base_dir(run, base.timeline, base.step)
    files = tuple(filesystem.scan(path))
    names = {entry.name for entry in files if entry.kind == "file"}
    # Before the manifest: in a tier, which cannot rename, both records exist at once.
    if CONDEMNED in names or DELETING in names:
        return _scan_condemned(filesystem, base, path, files)
    problems: list[str] = [
        f"{entry.name} is a {entry.kind}" for entry in files if entry.kind != "file"
    ]
    manifest: Manifest | None = None
    if MANIFEST in names:
        manifest = _try(filesystem, path / MANIFEST, Manifest, problems)
        if manifest is not None and _base_of(manifest.markers[0]) != base:
            problems.append(f"{MANIFEST} belongs to another base")
            manifest = None
    status: BaseStatus = "committed"
    markers: dict[int, Marker] = {}
    if manifest is None:
        # All markers make a base as good as its manifest would, which is a function of them.
        status = "complete"
        markers = _markers(filesystem, path, names, base, problems)
        manifest = manifest_of(markers)
    if manifest is None:
        # Records appear atomically, so an unreadable record means damage, not an unfinished write.
        status = "damaged" if problems else "incomplete"
        problems.append(_how_many_markers(names))
    problem = "; ".join(problems) or None
    audit, why = _audit(filesystem, path, manifest, names)
    found = tuple(markers[rank] for rank in sorted(markers))
    notes = _annotations(filesystem, path, base, names)
    return BaseFound(base, path, status, manifest, problem, files, audit, why or None, found, notes)


def _scan_condemned(
    filesystem: FileSystem, base: BaseId, path: PurePath, files: tuple[DirEntry, ...]
) -> BaseFound:
    """Scan a condemned base.

    Its manifest counts until a deleter records that it is removing files.
    """
    manifest = None
    names = {entry.name for entry in files if entry.kind == "file"}
    if DELETING not in names:
        manifest = _try(filesystem, path / CONDEMNED, Manifest, [])
    if manifest is None or _base_of(manifest.markers[0]) != base:
        return BaseFound(base, path, "condemned", None, None, files)
    audit = _audit(filesystem, path, manifest, names)[0]
    notes = _annotations(filesystem, path, base, names)
    return BaseFound(base, path, "condemned", manifest, None, files, audit, annotations=notes)


def not_a_directory(kind: str) -> str:
    """Return why a path named like a directory of everstep is not read, given its kind."""
    if kind == "link":
        return "is a symbolic link; links inside a run folder are not followed"
    return f"is not a directory (but a {'file' if kind == 'file' else 'special file'})"


def _refuse_irregular(path: PurePath, kind: str) -> None:
    """Refuse a run of which a part lies elsewhere: its contents may be newer than all the rest.

    Raises:
        ForeignDirectoryError: the path of a timeline, or of its bases or logs, is not a directory.
    """
    if kind != "dir":
        raise ForeignDirectoryError(
            f"{path} {not_a_directory(kind)}: its contents may be newer than everything readable",
            path=path,
            hint="move it back to its place (a symbolic link to the entire run folder works), or "
            "remove it to go on without it",
        )


def _refuse_moved_parts(directory: PurePath, entries: Mapping[str, DirEntry]) -> None:
    """Refuse a timeline whose bases or logs lie elsewhere, or under another name.

    Raises:
        ForeignDirectoryError: one of them is a link or a file, or was renamed.
    """
    for entry in entries.values():
        if entry.name in (BASE_DIR, LOG_DIR, LOSSY_DIR):
            _refuse_irregular(directory / entry.name, entry.kind)
        original = parse_renamed_part(entry.name)
        if original is not None and original not in entries:
            _refuse_moved(directory, entry, original)


def _refuse_moved(folder: PurePath, entry: DirEntry, original: str) -> None:
    """Refuse a run in which ``original`` is missing and ``entry`` seems to be what it was.

    Raises:
        ForeignDirectoryError: the entry is a directory, or a link to one.
    """
    if entry.kind in ("dir", "link"):
        path = folder / entry.name
        raise ForeignDirectoryError(
            f"{path} looks as if renamed from {original}: its contents may be newer than "
            "everything readable",
            path=path,
            hint="rename it back, or move it out of the run folder to go on without it",
        )


def _holds_segments(scan: Callable[[PurePath], Sequence[DirEntry]], log: PurePath) -> bool:
    """Return True if the log has a finished segment; the newest are checked first."""
    named = (entry for entry in scan(log) if parse_segment(entry.name) is not None)
    for one in sorted(named, key=lambda entry: entry.name, reverse=True):
        # Retention of a running process may delete a segment between the two listings.
        with contextlib.suppress(FileNotFoundError):
            files = scan(log / one.name) if one.kind == "dir" else []
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
        if marker is not None and _base_of(marker) == base and marker.rank == rank:
            markers[rank] = marker
        elif marker is not None:
            problems.append(f"{name} belongs to another base or rank")
    return markers


def _audit(
    filesystem: FileSystem, path: PurePath, manifest: Manifest | None, names: Collection[str]
) -> tuple[AuditRecord | None, str]:
    """Return the audit record of the base with this manifest, and a description of any damage to
    it."""
    if manifest is None or AUDIT_RECORD not in names:
        return None, ""
    problems: list[str] = []
    found = _try(filesystem, path / AUDIT_RECORD, AuditRecord, problems)
    if found is None:
        return None, "; ".join(problems)
    first = manifest.markers[0]
    if (found.run, found.timeline, found.step) != (first.run, first.timeline, first.step):
        return None, f"{AUDIT_RECORD} belongs to another base"
    if found.manifest != digest(manifest.encode()):
        return None, f"{AUDIT_RECORD} belongs to another version of this base"
    return found, ""


def _annotations(
    filesystem: FileSystem, path: PurePath, base: BaseId, names: Collection[str]
) -> Annotations | None:
    """Return the annotations of a base; None if they are damaged or belong to another base."""
    if ANNOTATIONS not in names:
        return None
    found = _try(filesystem, path / ANNOTATIONS, Annotations, [])
    if found is None or BaseId(found.timeline, found.step) != base:
        return None
    return found


def _how_many_markers(names: set[str]) -> str:
    count = sum(parse_marker(name) is not None for name in names)
    return f"no readable manifest, and {count or 'no'} marker{'' if count == 1 else 's'}"


def _base_of(marker: Marker) -> BaseId:
    return BaseId(marker.timeline, marker.step)


def _try(
    filesystem: FileSystem, path: PurePath, kind: type[_Record], problems: list[str]
) -> _Record | None:
    """Read and decode a record; append a description of any damage to ``problems``."""
    try:
        return kind.decode(read_record_bytes(filesystem, path), path)
    # A missing file restarts the scan. A newer format must not be taken for damage.
    except (NewerFormatError, FileNotFoundError):
        raise
    except DamageError:
        problems.append(f"{path.name} is damaged: its digest does not match")
    except EverstepError as error:
        problems.append(f"{path.name}: {error.message.removeprefix(f'{path}: ')}")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror or error}")
    return None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A base or log step that was skipped.

    Attributes:
        reason: why, in words.
    """

    timeline: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """Bases to try, best first, and bases skipped without being read.

    Attributes:
        damaged: those of ``skipped`` that belong to the history and may have been good. If nothing
            else can be tried, starting afresh would silently discard them.
    """

    ordered: tuple[BaseFound, ...]
    skipped: tuple[Skipped, ...]
    damaged: tuple[Skipped, ...] = ()


def candidates(inventory: Inventory, *, step: int | None = None) -> Candidates:
    """Return the bases along the history of the newest timeline, newest (timeline, step) first.

    Args:
        step: only bases of this step, in any timeline; those of the history come first.

    Raises:
        RecoveryError: no base has ``step``.
    """
    usable: dict[BaseId, BaseFound] = {}
    skipped: list[Skipped] = []
    damaged: dict[BaseId, Skipped] = {}
    for base in inventory.bases:
        if base.is_usable:
            usable[base.id] = base
        else:
            reason = "is being deleted" if base.status == "condemned" else base.problem
            skipped.append(Skipped(base.id.timeline, base.id.step, reason or "incomplete"))
            # Only these may have been good; incomplete bases never existed.
            if base.status == "damaged":
                damaged[base.id] = skipped[-1]
    here, elsewhere = split_by_history(usable, inventory.branches)
    lost, _ = split_by_history(damaged, inventory.branches)
    if step is None:
        chosen = here
        skipped += [
            Skipped(base.timeline, base.step, "not in the history of the newest timeline")
            for base in elsewhere
        ]
    else:
        chosen = [base for base in here + elsewhere if base.step == step]
        if not chosen:
            raise RecoveryError(
                f"there is no base of step {step}",
                step=step,
                path=inventory.path,
                hint="existing bases: " + (_listed(here + elsewhere) or "none"),
            )
    ordered = tuple(usable[base] for base in chosen)
    return Candidates(ordered, tuple(skipped), tuple(damaged[base] for base in lost))


def starts_with_job_base(inventory: Inventory, *, step: int | None = None) -> bool:
    """Return True if the first base to try was saved by several ranks.

    Args:
        step: ignore bases after this step, then consider other timelines as well; None: the newest
            base of the history.
    """
    worlds = {
        base.id: base.manifest.markers[0].world  # of a base in memory, only one marker is here
        for base in inventory.bases
        if base.is_usable and base.manifest is not None
    }
    here, elsewhere = split_by_history(worlds, inventory.branches)
    ordered = here if step is None else [base for base in here + elsewhere if base.step <= step]
    return bool(ordered) and worlds[ordered[0]] > 1


def _listed(bases: list[BaseId]) -> str:
    return ", ".join(str(base) for base in bases[:20]) + (", ..." if len(bases) > 20 else "")
