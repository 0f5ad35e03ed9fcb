"""Evidence of a kill: files on disk, seen in plain directory listings, and bases in memory.

A keeper that survived keeps writing during the survey. Then two facts stay true: the base that it
holds in memory, and that a file which was seen existed. Files that are missing prove nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everstep.errors import RecoveryError
from everstep.format.names import (
    BASE_DIR,
    CONDEMNED,
    DELETING,
    MANIFEST,
    TEMPORARY_SUFFIX,
    marker_name,
    parse_base,
    shard_name,
)


@dataclass(frozen=True, slots=True)
class Survey:
    """The bases of a run: on disk, by their file names, and in memory.

    Attributes:
        committed: newest step with a manifest, which must be recoverable; 0 if there is none.
        unfinished: a newer base without a manifest, whose write was interrupted, or None.
        files: names in that base's directory, sorted.
        held: step of the base in the memory of a keeper that survived, which must be
            recoverable, too; None without a keeper.
    """

    committed: int
    unfinished: int | None
    files: tuple[str, ...]
    held: int | None = None

    def describe(self) -> str:
        """Return the newest base on disk, the state of an unfinished one, the base in memory."""
        parts = [f"base {self.committed} on disk" if self.committed else "no base on disk"]
        if self.unfinished is not None and self.unfinished != self.held:
            found = {
                "temporary file": any(name.endswith(TEMPORARY_SUFFIX) for name in self.files),
                "data": shard_name(0) in self.files,
                "marker": marker_name(0) in self.files,
                "no manifest": True,
            }
            kinds = ", ".join(kind for kind, there in found.items() if there)
            parts.append(f"base {self.unfinished}: {kinds}")
        if self.held is not None:
            parts.append(f"base {self.held} in memory")
        return "; ".join(parts)


def survey(run: Path, held: int | None = None) -> Survey:
    """List the run folder ``run``, which may not exist yet; open no file.

    Args:
        held: step of the base that the keeper reports to have in memory.
    """
    committed = 0
    unfinished: int | None = None
    files: tuple[str, ...] = ()
    for step, folder in sorted(_bases(run)):
        try:
            names = tuple(sorted(item.name for item in folder.iterdir()))
        except FileNotFoundError:
            continue  # deleted by a living keeper, which has newer ones
        if MANIFEST in names:
            committed = max(committed, step)
        elif CONDEMNED not in names and DELETING not in names:
            unfinished = step
            files = names
    if unfinished is None or unfinished <= committed:
        # An older one was abandoned for a newer base, or is being deleted.
        return Survey(committed, None, (), held)
    return Survey(committed, unfinished, files, held)


def final_base(run: Path, step: int) -> Path:
    """Return the directory of the committed base of ``step`` in the newest timeline with one.

    Raises:
        RecoveryError: when there is none.
    """
    found = [folder for at, folder in _bases(run) if at == step and (folder / MANIFEST).is_file()]
    if not found:
        raise RecoveryError(f"{run} holds no committed base of step {step}", step=step)
    return max(found)


def _bases(run: Path) -> list[tuple[int, Path]]:
    folders = run.glob(f"timeline-*/{BASE_DIR}/*")
    return [(step, path) for path in folders if (step := parse_base(path.name)) is not None]
