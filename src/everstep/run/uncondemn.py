"""Withdraw the pending deletion of a base (``adr/004``).

A module of its own, as keepers use it: :mod:`everstep.run.folder` loads torch.
"""

from __future__ import annotations

from pathlib import PurePath

from everstep.format import MANIFEST
from everstep.format.names import CONDEMNED
from everstep.seams import FileSystem
from everstep.tiers import Tier, read_record


def uncondemn(filesystem: FileSystem, directory: PurePath) -> bool:
    """Rename the manifest of a condemned base back, durably.

    A process that goes on to delete files renames the same file first, so only one of the two
    succeeds.

    Args:
        directory: directory of the base.

    Returns:
        False if nothing was changed: files are being deleted, or another process has withdrawn the
            deletion.
    """
    try:
        filesystem.rename(directory / CONDEMNED, directory / MANIFEST)
    except FileNotFoundError:
        return False
    # Durable before the caller opens a timeline on this base: after a crash it must not be
    # condemned again.
    filesystem.sync_dir(directory)
    return True


def uncondemn_in_tier(tier: Tier, directory: str) -> bool:
    """Withdraw the deletion of a base in a tier, where the condemned record lies beside the
    manifest.

    A tier cannot rename, so a deleter that has passed its last fence check is not stopped. The copy
    is then deleted, as it would be if it had stayed condemned.

    Args:
        directory: directory of the base, relative to the root of the tier.

    Returns:
        False if the base is not condemned, or the record belongs to another base.

    Raises:
        EverstepError: from the tier.
    """
    name = f"{directory}/{CONDEMNED}"
    record = read_record(tier, name)
    if record is None:
        return False
    # Create the manifest before the condemned record is deleted, so the base always has one of
    # them.
    if not tier.create(f"{directory}/{MANIFEST}", record):
        return False
    tier.delete(name)
    return True
