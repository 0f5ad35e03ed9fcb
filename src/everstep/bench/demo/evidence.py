"""What a kill left on disk, seen with plain directory listings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everstep.bench.demo.plan import Kill
from everstep.errors import RecoveryError
from everstep.format.names import (
    BASE_DIR,
    CONDEMNED,
    MANIFEST,
    TEMPORARY_SUFFIX,
    marker_name,
    parse_base,
    parse_timeline,
    shard_name,
)

__all__ = ["Survey", "final_base", "survey"]


@dataclass(frozen=True, slots=True)
class Survey:
    """The bases of a run folder, by what their file names say.

    Attributes:
        committed: newest step with a manifest; 0 if there is none. This much is promised.
        complete: newest step with a manifest or a marker; of one rank, either is enough.
        unfinished: newest base without a manifest that was being written, or None.
        files: names in that base's directory, sorted.
    """

    committed: int
    complete: int
    unfinished: int | None
    files: tuple[str, ...]

    def describe(self) -> str:
        """What of an unfinished base is there, in few words."""
        if self.unfinished is None:
            return "nothing unfinished"
        kinds = ["no manifest"]
        if marker_name(0) in self.files:
            kinds.insert(0, "marker")
        if shard_name(0) in self.files:
            kinds.insert(0, "data")
        if any(name.endswith(TEMPORARY_SUFFIX) for name in self.files):
            kinds.insert(0, "temporary file")
        return ", ".join(kinds)

    def contradicts(self, kill: Kill) -> str | None:
        """Why the process cannot have died at ``kill``'s failpoint; None if it can."""
        if not kill.is_failpoint:
            return None
        has_marker = marker_name(0) in self.files
        if kill.where == "save.before_rename":
            wanted = "a temporary file, no marker and no manifest"
            found = not has_marker and any(n.endswith(TEMPORARY_SUFFIX) for n in self.files)
        else:
            wanted = "data and marker, but no manifest"
            found = has_marker and shard_name(0) in self.files
        if found:
            return None
        return f"{kill.where} leaves {wanted}; on disk is: {', '.join(self.files) or 'nothing'}"


def survey(run: Path) -> Survey:
    """Looks at the run folder ``run``, which may not exist yet; opens no file."""
    committed = complete = 0
    unfinished: int | None = None
    files: tuple[str, ...] = ()
    for step, folder in sorted(_bases(run), key=lambda base: base[0]):
        names = tuple(sorted(item.name for item in folder.iterdir()))
        if CONDEMNED in names:
            continue
        if MANIFEST in names:
            committed = complete = max(committed, step)
            continue
        if marker_name(0) in names:
            complete = max(complete, step)
        unfinished, files = step, names
    return Survey(committed, complete, unfinished, files)


def final_base(run: Path, step: int) -> Path:
    """The directory of the committed base of ``step``, in the newest timeline that has one.

    Raises:
        RecoveryError: when there is none.
    """
    found = [folder for at, folder in _bases(run) if at == step and (folder / MANIFEST).is_file()]
    if not found:
        raise RecoveryError(f"{run} holds no committed base of step {step}", step=step)
    return max(found)


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
