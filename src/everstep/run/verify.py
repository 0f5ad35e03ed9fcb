"""Verification of a base: read back every byte, and check records, digests and contents.

Audits of the bases that a state descends from. No I/O and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everstep.commit import BaseId
from everstep.commit.lineage import history
from everstep.errors import DamageError, FormatError
from everstep.format import Marker
from everstep.format.names import marker_name
from everstep.format.reader import read_body, read_record_bytes
from everstep.format.records import AuditRecord
from everstep.format.writer import ChunkRing
from everstep.run.open_base import OpenBase, open_ranks
from everstep.run.scan import BaseFound, Inventory
from everstep.seams import FileSystem
from everstep.seams.progress import ProgressSink

_BAD = (DamageError, FormatError, OSError)

_UNFIT = (
    "the bytes are as they were written, but when the ranks wrote the base they disagreed about "
    "the tensors that they share"
)


@dataclass(frozen=True, slots=True)
class Damage:
    """A problem found in a base.

    Attributes:
        path: the file.
        entry: the damaged entry; None if the problem concerns the whole file.
        unreadable: the file system returned no bytes, so their condition is unknown.
        unfit: all bytes are as written, but the files of the ranks contradict each other.
    """

    path: str
    entry: str | None
    problem: str
    unreadable: bool = False
    unfit: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of reading a base back; the base is good if ``damages`` is empty."""

    entries: int
    size_bytes: int
    damages: tuple[Damage, ...]


def verify_base(
    filesystem: FileSystem,
    base: BaseFound,
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink,
    contents: Callable[[Sequence[OpenBase]], object] = lambda opened: None,
) -> Verdict:
    """Read and verify every byte of a base that has a manifest, or whose markers yield one.

    Args:
        contents: called with the files of all ranks, to check the meaning of the bytes as well
            (:func:`everstep.restore.load.load.check_contents`, which needs torch); raises the same
            errors as :class:`OpenBase`.
    """
    assert base.manifest is not None
    found = _Reading(filesystem, base, ring, timeout_s, progress)
    if base.problem:
        found.damages.append(Damage(str(base.path), None, base.problem))
    for marker in base.manifest.markers:
        found.read_marker(marker)
        found.read_files(marker.rank)
    # The meaning of damaged bytes would only add noise.
    if not found.damages:
        found.check(contents, len(base.manifest.markers))
    return Verdict(found.entries, found.size_bytes, tuple(found.damages))


@dataclass(slots=True)
class _Reading:
    """One reading of all files of a base."""

    filesystem: FileSystem
    base: BaseFound
    ring: ChunkRing
    timeout_s: float
    progress: ProgressSink
    damages: list[Damage] = field(default_factory=list)
    entries: int = 0
    size_bytes: int = 0

    def read_marker(self, marker: Marker) -> None:
        """Compare a marker on disk with that in the manifest."""
        path = self.base.path / marker_name(marker.rank)
        try:
            if read_record_bytes(self.filesystem, path) != marker.encode():
                raise DamageError(f"{path}: differs from the marker listed in the manifest")
        except _BAD as error:
            self._note(str(path), error)

    def read_files(self, rank: int) -> None:
        """Read every byte of a rank's files."""
        try:
            opened = OpenBase.open(self.filesystem, self.base, rank)
        except _BAD as error:
            of = error.filename if isinstance(error, OSError) else error.path
            self._note(str(of or self.base.path), error)
            return
        try:
            for shard in opened.files:
                self.entries += len(shard.header.placed)
                self.size_bytes += shard.record.length
                # All damaged entries of a file are listed, not only the first.
                found: list[DamageError] = []
                try:
                    read_body(
                        shard,
                        self.ring,
                        timeout_s=self.timeout_s,
                        progress=self.progress,
                        on_damage=found.append,
                    )
                except _BAD as error:
                    self._note(str(shard.path), error)
                for damage in found:
                    self._note(str(shard.path), damage)
        except _BAD as error:
            self._note(str(self.base.path), error)
        finally:
            opened.close()

    def check(self, contents: Callable[[Sequence[OpenBase]], object], world: int) -> None:
        """Check the meaning of the bytes, with the files of all ranks open at once."""
        base = self.base
        try:
            with open_ranks(self.filesystem, base) as opened:
                contents(opened)
        except _BAD as error:
            # The files of a single rank cannot contradict others.
            if world == 1 or isinstance(error, OSError):
                self._note(str(base.path), error)
            else:
                problem = f"{_UNFIT}: {error.message}"
                entry = getattr(error, "entry", None)
                self.damages.append(Damage(str(base.path), entry, problem, unfit=True))

    def _note(self, path: str, error: DamageError | FormatError | OSError) -> None:
        entry = error.entry if isinstance(error, DamageError) else None
        if isinstance(error, OSError):
            # No bytes came back, so nothing is known about them: the storage may recover.
            problem = error.strerror or str(error)
            self.damages.append(Damage(path, entry, problem, unreadable=True))
        else:
            self.damages.append(Damage(path, entry, error.message))


NAMES_MAX = 20
"""Maximum number of entries that an audit record names."""

_NAMES_IN_WORDS = 5


def audit_of(inventory: Inventory, state: BaseId) -> AuditRecord | None:
    """Return the audit that a state rests on.

    Of the bases in its history, this is the newest audit that found a difference, else the newest
    audit (I9).

    Args:
        state: timeline and step of the state; there need not be a base of it.
    """
    limits = dict(history(state.timeline, inventory.branches))
    # Later steps of the same timeline are not among the ancestors of the state.
    limits[state.timeline] = state.step
    found: list[AuditRecord] = []
    for base in sorted(inventory.bases, key=lambda base: base.id):
        limit = limits.get(base.id.timeline, -1)
        if base.audit is not None and (limit is None or base.id.step <= min(limit, state.step)):
            found.append(base.audit)
    # A difference is inherited: an equal audit after it only shows that replay repeats the wrong
    # state.
    wrong = [record for record in found if record.verdict == "different"]
    return max(wrong or found, key=lambda one: (one.step, one.timeline), default=None)


def describe_audit(record: AuditRecord) -> str:
    """Return one line for the user: the bases, the number of steps, and the verdict."""
    before = record.before[1]
    steps = f"{record.steps} step{'' if record.steps == 1 else 's'}"
    if record.verdict == "unchecked":
        return f"not audited: base {record.step}: {record.reason}"
    log = f"base {before} + log of {steps}"
    text = f"audited: {log} = base {record.step}, bit for bit, {record.entries} entries"
    if record.verdict == "different":
        text = f"audit failed: {log} is not base {record.step}"
    if record.count:
        shown = record.differing[:_NAMES_IN_WORDS]
        more = record.count - len(shown)
        text += f": {record.count} of {record.entries} entries differ: "
        text += ", ".join(map(repr, shown)) + (f" and {more} more" if more else "")
    return text + (f" ({record.reason})" if record.reason else "")
