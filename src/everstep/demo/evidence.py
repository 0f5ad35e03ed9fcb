"""What a kill left: on disk, seen with plain directory listings, and in a keeper's memory.

A keeper that was spared goes on writing while we look. Then only what it says of its memory
stays true, and that what is on disk has been there; which of its files are there already is
a matter of luck, and nothing is concluded from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everstep.demo.plan import AFTER_CAPTURED, BEFORE_RENAME, Kill
from everstep.errors import RecoveryError
from everstep.format.names import (
    BASE_DIR,
    CONDEMNED,
    DELETING,
    LOG_DIR,
    MANIFEST,
    TEMPORARY_SUFFIX,
    marker_name,
    parse_base,
    parse_segment,
    parse_timeline,
    shard_name,
)

__all__ = ["Survey", "final_base", "survey"]


@dataclass(frozen=True, slots=True)
class Survey:
    """The bases of a run: on disk, by what their file names say, and in memory.

    Attributes:
        committed: newest step with a manifest; 0 if there is none. This much is promised.
        complete: newest step with a manifest or a marker; of one rank, either is enough.
        unfinished: newer base without a manifest, which was being written, or None.
        files: names in that base's directory, sorted.
        held: step of the base in the memory of a keeper that was spared; None without one.
            This is promised, too.
        logged: newest step with a whole segment of the log, 0 if there is none.
    """

    committed: int
    complete: int
    unfinished: int | None
    files: tuple[str, ...]
    held: int | None = None
    logged: int = 0

    def describe(self) -> str:
        """The newest base on disk, what there is of an unfinished one, and what is in memory."""
        parts = [f"base {self.committed} on disk" if self.committed else "no base on disk"]
        if self.unfinished is not None and self.unfinished != self.held:
            parts.append(f"base {self.unfinished}: {self._kinds()}")
        if self.held is not None:
            parts.append(f"base {self.held} in memory")
        return "; ".join(parts)

    def contradicts(self, kill: Kill) -> str | None:
        """Why the process cannot have died at ``kill``'s failpoint; None if it can."""
        if not kill.is_failpoint:
            return None
        if kill.where == AFTER_CAPTURED:
            return self._contradicts_captured()
        has_marker = marker_name(0) in self.files
        if kill.where == BEFORE_RENAME:
            wanted = "a temporary file, no marker and no manifest"
            found = not has_marker and any(n.endswith(TEMPORARY_SUFFIX) for n in self.files)
        else:
            wanted = "data and marker, but no manifest"
            found = has_marker and shard_name(0) in self.files
        if found:
            return None
        return f"{kill.where} leaves {wanted}; on disk is: {', '.join(self.files) or 'nothing'}"

    def _contradicts_captured(self) -> str | None:
        # The keeper writes on: of the base that it holds, anything may be on disk by now, from
        # nothing to all of it. A newer one was never captured, and cannot be.
        if self.held is None:
            return f"{AFTER_CAPTURED} leaves a base in the keeper's memory; it says it has none"
        if self.complete > self.held:
            return (
                f"{AFTER_CAPTURED} leaves the newest base in the keeper's memory; it has base "
                f"{self.held}, and base {self.complete} is on disk"
            )
        return None

    def _kinds(self) -> str:
        kinds = ["no manifest"]
        if marker_name(0) in self.files:
            kinds.insert(0, "marker")
        if shard_name(0) in self.files:
            kinds.insert(0, "data")
        if any(name.endswith(TEMPORARY_SUFFIX) for name in self.files):
            kinds.insert(0, "temporary file")
        return ", ".join(kinds)


def survey(run: Path, *, held: int | None = None) -> Survey:
    """Looks at the run folder ``run``, which may not exist yet; opens no file.

    Args:
        held: what the keeper has said that it has in memory.
    """
    committed = complete = 0
    unfinished: int | None = None
    files: tuple[str, ...] = ()
    for step, folder in sorted(_bases(run), key=lambda base: base[0]):
        try:
            names = tuple(sorted(item.name for item in folder.iterdir()))
        except FileNotFoundError:
            continue  # deleted by a keeper that lives, which has newer ones
        if CONDEMNED in names or DELETING in names:
            continue
        if MANIFEST in names:
            committed = max(committed, step)
            complete = max(complete, step)
            continue
        if marker_name(0) in names:
            complete = max(complete, step)
        unfinished = step
        files = names
    if unfinished is not None and unfinished <= committed:
        unfinished = None  # given up when a newer one was begun, or being deleted
        files = ()
    return Survey(committed, complete, unfinished, files, held, _logged(run))


def final_base(run: Path, step: int) -> Path:
    """The directory of the committed base of ``step``, in the newest timeline that has one.

    Raises:
        RecoveryError: when there is none.
    """
    found = [folder for at, folder in _bases(run) if at == step and (folder / MANIFEST).is_file()]
    if not found:
        raise RecoveryError(f"{run} holds no committed base of step {step}", step=step)
    return max(found)


def _logged(run: Path) -> int:
    segments = [
        steps[1]
        for folder in run.glob(f"timeline-*/{LOG_DIR}/*")
        if (steps := parse_segment(folder.name)) is not None and (folder / marker_name(0)).is_file()
    ]
    return max(segments, default=0)


def _bases(run: Path) -> list[tuple[int, Path]]:
    found = []
    for timeline in run.glob("timeline-*"):
        if parse_timeline(timeline.name) is None or not (timeline / BASE_DIR).is_dir():
            continue
        for folder in (timeline / BASE_DIR).iterdir():
            step = parse_base(folder.name)
            if step is not None:
                found.append((step, folder))
    return found
