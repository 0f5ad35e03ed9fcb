"""What there is of a run now, on its disk and in the memory of its keepers, for a process that only
reads it; and which of its states comes first.

The choice is that of :func:`.resume.resume`, without a live state to compare with. Nothing is
written: a base without its manifest is read by what its markers yield.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from everstep.commit.lineage import BaseId
from everstep.errors import (
    AuditError,
    DamageError,
    EverstepError,
    FormatError,
    NewerFormatError,
    ReplayError,
    StorageError,
    UnsupportedStateError,
)
from everstep.format.log import NOT_EXACT
from everstep.format.names import base_dir
from everstep.format.records import Manifest, Marker
from everstep.restore.fetch.held import HeldBase, Recalled
from everstep.restore.fetch.peer_copy import files_over
from everstep.restore.log.reach import Reachable, nothing_restorable, reachable
from everstep.restore.offline.logged import RunLog
from everstep.restore.offline.rebuild import Rebuilder, Rebuilt
from everstep.restore.start.missing_sections import missing_sections
from everstep.run.audits import audit_of, describe_audit
from everstep.run.candidates import Candidates, Skipped
from everstep.run.chain import Chain
from everstep.run.scan import BaseFound, Inventory, scan_base, scan_run
from everstep.seams.files.filesystem import DirEntry, FileSystem, ReadFile
from everstep.tiers.files import ReadingFileSystem

__all__ = ["BaseDeletedError", "RestorePoint", "RunView"]

_NOBODY = Candidates((), ())
_REPLAYS_MAX = 3  # of one base, each up to a step before that at which the last one ended


class BaseDeletedError(Exception):
    """What was being read has been deleted meanwhile: there is something newer."""


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A base, and the steps of the log to redo on it."""

    base: BaseFound
    chain: Chain

    @property
    def step(self) -> int:
        """The step that it leads to."""
        return self.chain.end[1]


class _WithMemory(ReadingFileSystem):
    """A file system with some files that are in memory.

    Args:
        held: by path.
    """

    def __init__(self, filesystem: FileSystem, held: Mapping[PurePath, ReadFile]) -> None:
        self._filesystem = filesystem
        self._held = held

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        held = self._held.get(path)
        return self._filesystem.open(path, direct=direct) if held is None else held

    def scan(self, path: PurePath) -> list[DirEntry]:
        return self._filesystem.scan(path)


@dataclass(slots=True)
class RunView:
    """A run as it is now.

    Attributes:
        filesystem: reads what is on disk and what is in memory.
        in_memory: bases of which a part is in memory only.
        log: on disk and in memory.
        skipped: what was passed over so far, and why.
        damaged: something of it is, as its digest tells.
        lacking: bases without parts that older ones have, which come after these, and why.
    """

    filesystem: FileSystem
    inventory: Inventory
    log: RunLog
    in_memory: frozenset[BaseId]
    skipped: list[Skipped] = field(default_factory=list)
    damaged: bool = False
    lacking: Mapping[BaseId, str] = field(default_factory=dict)

    @classmethod
    def of(cls, filesystem: FileSystem, run: PurePath, memory: Mapping[int, Recalled]) -> RunView:
        """Take the inventory.

        Args:
            memory: what keepers have, by rank.

        Raises:
            ForeignDirectoryError, NewerFormatError, OSError: as of :func:`.scan.scan_run`.
        """
        inventory = scan_run(filesystem, run)
        found, files = _bases_in(memory, inventory)
        held = {base.id for base in found}
        inventory.bases = [base for base in inventory.bases if base.id not in held] + found
        both = _WithMemory(filesystem, files)
        records = {
            rank: [one for one in mine.records if one.head.timeline in inventory.timelines]
            for rank, mine in memory.items()
        }
        return cls(both, inventory, RunLog.of(both, inventory, records), frozenset(held))

    @property
    def is_there(self) -> bool:
        """Whether there is a run at all."""
        inventory = self.inventory
        return bool(inventory.run or inventory.timelines or inventory.bases or inventory.problems)

    def world_of(self, timeline: int) -> int:
        """The number of ranks that a timeline is of."""
        record = self.inventory.timelines.get(timeline)
        return 1 if record is None else record.world

    def why_not_exact(self, way: RestorePoint) -> str:
        """Return why a state is not exact, as far as records tell; "" if it is."""
        base = way.base
        chain = way.chain
        if base.manifest is None or not base.manifest.exact:
            return f"the base of {base.id} is marked as not exact"
        if not all(self.log.index.marks[at].exact for at in chain.steps):
            return NOT_EXACT
        audit = audit_of(self.inventory, BaseId(*chain.end))
        wrong = audit is not None and audit.verdict == "different"
        return describe_audit(audit) if wrong and audit is not None else ""

    def ways(self, step: int | None) -> list[RestorePoint]:
        """Return what leads to a step, best first: None: to the newest one that can be reached.

        A base with fewer parts than one before it comes after that: a state of fewer parts was
        saved there, from which no full one could be restored.

        Raises:
            RecoveryError: nothing does, and there is, or has been, something.
        """
        chosen = reachable(self.inventory, self.log.index, step=step)
        self.skipped += chosen.candidates.skipped
        found = [RestorePoint(base, self._fitting(base, chain)) for base, chain in chosen.ordered]
        found = [way for way in found if step in (None, way.step)]
        if not found:
            self._refuse(chosen, step)
        return self._with_all_parts(found)

    def with_files(self, ways: Iterable[RestorePoint], step: int | None) -> list[RestorePoint]:
        """Return the ways whose base has all of its files, by name and length.

        Raises:
            RecoveryError: none has.
        """
        found = list[RestorePoint]()
        for way in ways:
            missing = None if way.base.id in self.in_memory else way.base.missing_file
            if missing is None:
                found.append(way)
            else:
                self._skip(way.base.id, f"{way.base.path / missing}: missing, or of another length")
        if not found:
            self._refuse(Reachable(tuple((w.base, w.chain) for w in ways), _NOBODY), step)
        return found

    def restore(
        self,
        rebuilder: Rebuilder,
        ways: Iterable[RestorePoint],
        step: int | None,
        wanted: Callable[[str], bool] | None,
    ) -> Rebuilt:
        """Build the first state that verifies.

        Args:
            step: nothing but this one will do; None: as far as a log can be replayed.
            wanted: says by name which tensors are needed, where none is replayed; None: all.

        Raises:
            BaseDeletedError: what was chosen was deleted meanwhile.
            RecoveryError: none of them can be used; with all reasons.
            UnsupportedStateError: it takes the program that trained it.
        """
        refused: UnsupportedStateError | None = None
        ways = list(ways)
        for way in ways:
            chain = way.chain
            for _ in range(_REPLAYS_MAX):
                try:
                    return self._rebuilt(rebuilder, way.base, chain, wanted)
                except NewerFormatError:
                    raise
                except OSError as error:
                    if isinstance(error, FileNotFoundError) and not self._still_there(way.base):
                        raise BaseDeletedError from error
                    reason = f"{error.filename or way.base.path}: {error.strerror or error}"
                    self._skip(way.base.id, reason)
                    break
                except _NotReplayedError as error:
                    cause = error.cause
                    self.damaged |= isinstance(cause, DamageError)
                    refused = cause if isinstance(cause, UnsupportedStateError) else refused
                    reason = f"log: it cannot be replayed: {cause.message}"
                    self._skip(BaseId(*error.at), reason)
                    if step is not None:
                        break
                    chain = replace(chain, steps=chain.steps[: error.reached])
                except (AuditError, DamageError, FormatError, ReplayError) as error:
                    self.damaged |= isinstance(error, DamageError)
                    self._skip(way.base.id, error.message)
                    break
                except UnsupportedStateError as error:
                    refused = error
                    self._skip(way.base.id, error.message)
                    break
                except StorageError as error:
                    if type(error) is not StorageError:  # no memory: not this base's fault
                        raise
                    self._skip(way.base.id, error.message)
                    break
        if refused is not None:
            raise refused
        self._refuse(Reachable(tuple((w.base, w.chain) for w in ways), _NOBODY), step)
        raise AssertionError("unreachable")

    def _rebuilt(
        self,
        rebuilder: Rebuilder,
        base: BaseFound,
        chain: Chain,
        wanted: Callable[[str], bool] | None,
    ) -> Rebuilt:
        state = rebuilder.load(base, chain, wanted)
        try:
            played = rebuilder.play(chain, state)
        except (DamageError, FormatError, ReplayError, UnsupportedStateError) as error:
            reached = sum(step <= state.step for _, step in chain.steps)
            # What failed may be an update that was waiting since an earlier step.
            again = reached if reached < len(chain.steps) else 0
            raise _NotReplayedError(error, chain.steps[again], again) from error
        except AuditError as error:  # how long before, samples cannot tell
            raise _NotReplayedError(error, chain.end, 0) from error
        return rebuilder.rebuilt(base, chain, state, played.why, self.skipped)

    def _fitting(self, base: BaseFound, chain: Chain) -> Chain:
        """Return the chain of a base, if it is of the same state; else one without steps."""
        if not chain.steps:
            return chain
        shape = self.log.shape(base)
        if shape == self.log.index.marks[chain.steps[0]].shape:
            return chain
        why = "the log after it belongs to a state of another composition"
        self._skip(BaseId(*chain.steps[0]), why)
        return Chain(base.id, (), why)

    def _with_all_parts(self, ways: Sequence[RestorePoint]) -> list[RestorePoint]:
        bases = [way.base for way in ways]
        self.lacking = missing_sections(self.filesystem, bases)
        for base, reason in self.lacking.items():
            self._skip(base, reason)
        return sorted(ways, key=lambda way: way.base.id in self.lacking)

    def _skip(self, at: BaseId, reason: str) -> None:
        one = Skipped(at.timeline, at.step, reason)
        if one not in self.skipped:
            self.skipped.append(one)

    def _refuse(self, chosen: Reachable, step: int | None) -> None:
        skipped = [*self.skipped, *self._unusable]
        error = nothing_restorable(self.inventory, chosen, skipped, step=step)
        if error is not None:
            raise error

    @property
    def _unusable(self) -> list[Skipped]:
        segments = (one for one in self.log.segments if one.problem is not None)
        return [Skipped(one.timeline, one.last, one.problem or "") for one in segments]

    def _still_there(self, base: BaseFound) -> bool:
        if base.id in self.in_memory:
            return True
        try:
            return scan_base(self.filesystem, self.inventory.path, base.id).is_usable
        except FileNotFoundError:
            return False


class _NotReplayedError(Exception):
    """A log cannot be replayed to its end.

    Attributes:
        at: timeline and step at which that shows.
        reached: so many of its steps can be redone, perhaps.
    """

    def __init__(self, cause: EverstepError, at: tuple[int, int], reached: int) -> None:
        super().__init__(cause.message)
        self.cause = cause
        self.at = at
        self.reached = reached


def _bases_in(
    memory: Mapping[int, Recalled], inventory: Inventory
) -> tuple[list[BaseFound], dict[PurePath, ReadFile]]:
    """Return the bases that are whole only with what is in memory, and their files there."""
    there = {base.id: base for base in inventory.bases}
    held = dict[BaseId, dict[int, HeldBase]]()
    for recalled in memory.values():
        copies = (
            HeldBase(one.marker, files_over(one.marker, one.memory), durable=False)
            for one in recalled.copies
            if one.timeline == inventory.timelines.get(one.marker.timeline)
        )
        for one in (*copies, *([] if recalled.base is None else [recalled.base])):
            if one.marker.run == inventory.run and one.id.timeline in inventory.timelines:
                held.setdefault(one.id, {})[one.marker.rank] = one
    found = list[BaseFound]()
    files = dict[PurePath, ReadFile]()
    for id_, parts in held.items():
        known = there.get(id_)
        if known is not None and known.is_usable:
            continue
        directory = base_dir(inventory.path, id_.timeline, id_.step)
        markers: dict[int, Marker] = {}
        names = () if known is None else known.files
        if known is not None:
            markers = {one.rank: one for one in known.markers if known.has_files_of(one)}
        markers |= {rank: one.marker for rank, one in parts.items()}
        world = next(iter(parts.values())).marker.world
        if sorted(markers) != list(range(world)):
            continue
        mine = {record.name: file for one in parts.values() for file, record in one.files}
        entries = [DirEntry(n, "file", f.size_bytes, 0, 0.0) for n, f in mine.items()]
        entries += [one for one in names if one.name not in mine]
        manifest = Manifest(tuple(markers[rank] for rank in range(world)))
        found.append(BaseFound(id_, directory, "committed", manifest, None, tuple(entries)))
        files.update({directory / name: file for name, file in mine.items()})
    return found, files
