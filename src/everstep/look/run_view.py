"""View of a run as it is now, on disk and in the memory of keepers, for a process that only reads
it.

The choice of the state is that of :func:`everstep.restore.start.resume.resume`, without a live
state to compare with. Nothing is written: a base without a manifest is read through its markers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from everstep.commit import BaseId
from everstep.errors import (
    AuditError,
    DamageError,
    EverstepError,
    FormatError,
    ReplayError,
    UnsupportedStateError,
)
from everstep.format import Manifest, Marker, base_dir
from everstep.format.log import NOT_EXACT
from everstep.restore.fetch import HeldBase, KeeperContents
from everstep.restore.fetch.held import files_over
from everstep.restore.log import (
    Reachable,
    base_is_there,
    nothing_restorable,
    reachable,
    why_unusable,
)
from everstep.restore.offline.rebuild import Rebuilder, Rebuilt
from everstep.restore.offline.run_log import RunLog
from everstep.restore.start.report import missing_sections
from everstep.run import BaseFound, Chain, Inventory, Skipped, scan_run
from everstep.run.scan import Candidates
from everstep.run.verify import audit_of, describe_audit
from everstep.seams import DirEntry, FileSystem, ReadFile
from everstep.tiers.files import ReadingFileSystem

_NOBODY = Candidates((), ())
_REPLAYS_MAX = 3  # of one base, each ending before the step at which the previous one failed


class BaseDeletedError(Exception):
    """The base being read was deleted: there is a newer one."""


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A base, and the log steps to replay on it."""

    base: BaseFound
    chain: Chain

    @property
    def step(self) -> int:
        """Step that it leads to."""
        return self.chain.end[1]


class _WithMemory(ReadingFileSystem):
    """File system with some files replaced by memory.

    Args:
        held: files in memory, by path.
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
        filesystem: reads files on disk and in memory.
        in_memory: bases of which some files are only in memory.
        log: gradient log, on disk and in memory.
        skipped: bases and steps skipped so far, with the reason.
        damaged: True if a digest did not match.
        lacking: bases that lack sections of older ones, which are tried after these, with the
            reason.
    """

    filesystem: FileSystem
    inventory: Inventory
    log: RunLog
    in_memory: frozenset[BaseId]
    skipped: list[Skipped] = field(default_factory=list)
    damaged: bool = False
    lacking: Mapping[BaseId, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, filesystem: FileSystem, run: PurePath, memory: Mapping[int, KeeperContents]
    ) -> RunView:
        """Scan the run.

        Args:
            memory: bases and logs recalled from keepers, by rank.

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
        """True if the run exists."""
        inventory = self.inventory
        return bool(inventory.run or inventory.timelines or inventory.bases or inventory.problems)

    def world_of(self, timeline: int) -> int:
        """Return the number of ranks of a timeline."""
        record = self.inventory.timelines.get(timeline)
        return 1 if record is None else record.world

    def why_not_exact(self, point: RestorePoint) -> str:
        """Return why a state is not exact, judging by records; "" if it is exact."""
        base = point.base
        chain = point.chain
        if base.manifest is None or not base.manifest.exact:
            return f"the base of {base.id} is marked as not exact"
        if not all(self.log.index.marks[at].exact for at in chain.steps):
            return NOT_EXACT
        audit = audit_of(self.inventory, BaseId(*chain.end))
        wrong = audit is not None and audit.verdict == "different"
        return describe_audit(audit) if wrong and audit is not None else ""

    def points(self, step: int | None) -> list[RestorePoint]:
        """Return the restore points for a step, or for the newest reachable state, best first.

        A base with fewer sections than an older one comes last: it was saved from an incomplete
        state.

        Raises:
            RecoveryError: there are none, although there is or has been a state.
        """
        chosen = reachable(self.inventory, self.log.index, step=step)
        self.skipped += chosen.candidates.skipped
        found = [
            RestorePoint(base, self._matching_chain(base, chain)) for base, chain in chosen.ordered
        ]
        found = [point for point in found if step in (None, point.step)]
        if not found:
            self._refuse(chosen, step)
        return self._complete_first(found)

    def with_files(self, points: Iterable[RestorePoint], step: int | None) -> list[RestorePoint]:
        """Return the points whose bases have all files, by name and length.

        Raises:
            RecoveryError: there are none.
        """
        found = list[RestorePoint]()
        for point in points:
            missing = None if point.base.id in self.in_memory else point.base.missing_file
            if missing is None:
                found.append(point)
            else:
                self._skip(
                    point.base.id, f"{point.base.path / missing}: missing, or has another length"
                )
        if not found:
            self._refuse(Reachable(tuple((w.base, w.chain) for w in points), _NOBODY), step)
        return found

    def restore(
        self,
        rebuilder: Rebuilder,
        points: Iterable[RestorePoint],
        step: int | None,
        wanted: Callable[[str], bool] | None,
    ) -> Rebuilt:
        """Build the first state that verifies.

        Args:
            step: accept only this step; None: as far as the log can be replayed.
            wanted: returns True for tensors needed if nothing is replayed; None: all.

        Raises:
            BaseDeletedError: the chosen base was deleted meanwhile.
            RecoveryError: no point can be used; with all reasons.
            UnsupportedStateError: replay needs the training program.
        """
        refused: UnsupportedStateError | None = None
        points = list(points)
        for point in points:
            chain = point.chain
            # Each attempt loads the base again: a failed replay leaves a mixture of steps.
            for _ in range(_REPLAYS_MAX):
                try:
                    return self._rebuilt(rebuilder, point.base, chain, wanted)
                except _NotReplayedError as error:
                    cause = error.cause
                    self.damaged |= isinstance(cause, DamageError)
                    refused = cause if isinstance(cause, UnsupportedStateError) else refused
                    reason = f"the log cannot be replayed: {cause.message}"
                    self._skip(BaseId(*error.at), reason)
                    if step is not None:
                        break
                    chain = replace(chain, steps=chain.steps[: error.reached])
                except UnsupportedStateError as error:
                    refused = error
                    self._skip(point.base.id, error.message)
                    break
                except (EverstepError, OSError) as error:
                    if isinstance(error, FileNotFoundError) and not self._still_there(point.base):
                        raise BaseDeletedError from error
                    self.damaged |= isinstance(error, DamageError)
                    self._skip(point.base.id, why_unusable(error, point.base))
                    break
        if refused is not None:
            raise refused
        self._refuse(Reachable(tuple((w.base, w.chain) for w in points), _NOBODY), step)
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
            # Updates are applied in batches, so the failing one may belong to an earlier step.
            again = reached if reached < len(chain.steps) else 0
            raise _NotReplayedError(error, chain.steps[again], again) from error
        except AuditError as error:  # samples do not show at which earlier step it went wrong
            raise _NotReplayedError(error, chain.end, 0) from error
        return rebuilder.rebuilt(base, chain, state, played.why, self.skipped)

    def _matching_chain(self, base: BaseFound, chain: Chain) -> Chain:
        """Return the chain if its log fits the base; else an empty one."""
        if not chain.steps:
            return chain
        shape = self.log.shape(base)
        if shape == self.log.index.marks[chain.steps[0]].shape:
            return chain
        why = "the log after it belongs to a state of another composition"
        self._skip(BaseId(*chain.steps[0]), why)
        return Chain(base.id, (), why)

    def _complete_first(self, points: Sequence[RestorePoint]) -> list[RestorePoint]:
        bases = [point.base for point in points]
        self.lacking = missing_sections(self.filesystem, bases)
        for base, reason in self.lacking.items():
            self._skip(base, reason)
        return sorted(points, key=lambda point: point.base.id in self.lacking)

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
        return base.id in self.in_memory or base_is_there(
            self.filesystem, self.inventory.path, base.id
        )


class _NotReplayedError(Exception):
    """The log cannot be replayed to its end.

    Attributes:
        at: timeline and step at which replay failed.
        reached: number of steps that can probably be replayed.
    """

    def __init__(self, cause: EverstepError, at: tuple[int, int], reached: int) -> None:
        super().__init__(cause.message)
        self.cause = cause
        self.at = at
        self.reached = reached


def _bases_in(
    memory: Mapping[int, KeeperContents], inventory: Inventory
) -> tuple[list[BaseFound], dict[PurePath, ReadFile]]:
    """Return the bases that are complete only with files in memory, and these files."""
    there = {base.id: base for base in inventory.bases}
    held = dict[BaseId, dict[int, HeldBase]]()
    for recalled in memory.values():
        copies = (
            HeldBase(one.marker, files_over(one.marker, one.memory), durable=False)
            for one in recalled.copies
            # Records are compared, not numbers: two starts may have opened the same timeline
            # number.
            if one.timeline == inventory.timelines.get(one.marker.timeline)
        )
        for one in (*copies, *([] if recalled.base is None else [recalled.base])):
            if one.marker.run == inventory.run and one.id.timeline in inventory.timelines:
                held.setdefault(one.id, {})[one.marker.rank] = one
    found = list[BaseFound]()
    files = dict[PurePath, ReadFile]()
    for id_, parts in held.items():
        known = there.get(id_)
        # The files are preferred: a running trainer may reuse memory while it is read.
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
