"""What is said at the start about a disk budget; not in the keeper, which shows nothing."""

from __future__ import annotations

from pathlib import PurePath

from rich.filesize import decimal

from everstep.config.options import Options
from everstep.keeper.log.log_room import folder_bytes
from everstep.seams.files.filesystem import FileSystem
from everstep.state.ranks.ranks import RankInfo
from everstep.tiers.disk import storage_errors
from everstep.trainer.budget.disk import Bounds
from everstep.trainer.budget.log_limits import LogLimits

__all__ = ["disk_announcement", "free_bytes"]


def free_bytes(filesystem: FileSystem, run: PurePath) -> int:
    """Of the disk of a run.

    Raises:
        StorageError
    """
    with storage_errors("look at the disk", run):
        return filesystem.free_bytes(run)


def disk_announcement(
    filesystem: FileSystem,
    run: PurePath,
    options: Options,
    bounds: Bounds,
    limits: LogLimits,
    ranks: RankInfo,
) -> str | None:
    """The line printed at start about a disk budget: what of the log fits, and what is there beyond
    it; None: there is nothing to say.

    Raises:
        StorageError
    """
    budget_bytes = options.budget.disk_bytes
    if budget_bytes is None:
        return None
    said = []
    if limits.disk_bytes is not None and limits.interval_bytes is not None:
        said.append(
            f"the log on disk has up to {decimal(limits.interval_bytes)} between two bases; with "
            "more, a base is taken early"
        )
    with storage_errors("look at the run", run):
        there_bytes = sum(folder_bytes(filesystem, run, ranks.rank, ranks.world))
    if there_bytes + bounds.base_bytes > budget_bytes:
        said.append(
            f"{decimal(there_bytes)} are there already: with the first base that is more than "
            "Budget(disk_bytes=); what is beyond keep= goes behind it"
        )
    return "; ".join(said) or None
