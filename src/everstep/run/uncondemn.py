"""Lifts the mark of a base that was to be deleted (``adr/004``)."""

from __future__ import annotations

import contextlib
from pathlib import PurePath

from everstep.format.names import CONDEMNED, MANIFEST
from everstep.seams.files.filesystem import FileSystem
from everstep.tiers.contract import Tier
from everstep.tiers.streams import read_record

__all__ = ["uncondemn", "uncondemn_in_tier"]


def uncondemn(filesystem: FileSystem, directory: PurePath) -> bool:
    """Gives the manifest of a condemned base its name back, durably.

    Whoever goes on to remove files renames the mark first, too: only one of the two succeeds.

    Args:
        directory: of the base.

    Returns:
        False, having changed nothing: there is no mark any more. Its files are being removed,
        or somebody else has lifted it.
    """
    try:
        filesystem.rename(directory / CONDEMNED, directory / MANIFEST)
    except FileNotFoundError:
        return False
    filesystem.sync_dir(directory)
    return True


def uncondemn_in_tier(tier: Tier, directory: str) -> bool:
    """The same in a tier, where the mark is a record beside the manifest.

    Nothing can be renamed there, so whoever is past its last look at the fence is not stopped:
    then the copy is gone in the end, as it would be with its mark.

    Args:
        directory: of the base, from the root of the tier.

    Returns:
        False: there is no mark any more, or it is of another base.

    Raises:
        EverstepError: of the tier.
    """
    name = f"{directory}/{CONDEMNED}"
    try:
        file = tier.open(name)
    except FileNotFoundError:
        return False
    with contextlib.closing(file):
        record = read_record(file, name)
    if not tier.create(f"{directory}/{MANIFEST}", record):
        return False
    tier.delete(name)
    return True
