"""Opens the places that hold copies of a run, so that a resume can read from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import PurePath

from everstep.errors import EverstepError, OptionError, StorageError
from everstep.format import base_dir
from everstep.format.records import RunRecord
from everstep.restore.fetch.copies import RunWithCopies
from everstep.restore.start import Resumed
from everstep.run.folder import open_run_folder
from everstep.seams import Seams
from everstep.seams.machine import resolve_path
from everstep.tiers import Tier, TierOptions
from everstep.tiers.options import open_tier


def seams_with_copies(tiers: Sequence[TierOptions], seams: Seams, run: PurePath) -> Seams:
    """Return seams whose file system also reads from the tiers; make the run folder.

    A new folder becomes one of the run whose copies the tiers contain. Without tiers, the seams are
    returned unchanged.

    Raises:
        ForeignDirectoryError: The tiers contain copies of another run.
        RecoveryError: The histories of the tiers and the folder have diverged.
        OptionError, UnavailableError: A tier is invalid.
        StorageError: A tier cannot be reached.
    """
    if not tiers:
        return seams
    places = open_places(tiers, seams, run)
    both = RunWithCopies(seams.filesystem, run, places)
    try:
        inventory = open_run_folder(both, run)
        both.check_run(RunRecord(run=inventory.run or "").encode())
        both.check_timelines(inventory.timelines)
    except StorageError as error:
        if isinstance(error.__cause__, OSError):
            inner = error.__cause__.__cause__
            if isinstance(inner, EverstepError):  # the tier's own error is more precise
                raise inner from None
        raise
    return dataclasses.replace(seams, filesystem=both)


def open_places(tiers: Sequence[TierOptions], seams: Seams, run: PurePath) -> list[Tier]:
    """Open all places for copies, and check that they can be reached.

    Raises:
        OptionError, UnavailableError: A place is invalid, or is inside of another one.
        StorageError: A place cannot be reached.
    """
    # As written and with links followed: either way one place may lie inside another.
    _refuse_overlap([run, *(PurePath(one.where) for one in tiers)])
    _refuse_overlap([_followed(run), *(_followed(PurePath(one.where)) for one in tiers)])
    places = [open_tier(one.where, seams.filesystem, clock=seams.clock) for one in tiers]
    for place in places:
        place.check()
    return places


def _followed(place: PurePath) -> PurePath:
    """Return the target of a path through links; a URL is returned unchanged."""
    return place if any(":" in name for name in place.parts[:1]) else resolve_path(place)


def _refuse_overlap(places: list[PurePath]) -> None:
    """Refuse places inside of each other: cleaning up one would delete files of the other."""
    for number, one in enumerate(places):
        for other in places[:number]:
            if one == other or one in other.parents or other in one.parents:
                raise OptionError(
                    f"{one} and {other} overlap: each copy needs a separate place",
                    path=one,
                )


def with_source(resumed: Resumed, seams: Seams, run: PurePath) -> Resumed:
    """Set the kind of tier that a base was read from, if it was not the run folder."""
    both = seams.filesystem
    if resumed.source != "disk" or resumed.base is None or not isinstance(both, RunWithCopies):
        return resumed
    directory = base_dir(run, resumed.base.timeline, resumed.base.step)
    kind = both.source_of(directory)
    if kind is None:
        return resumed
    # Never "disk": that would mean that the base is complete on the run's own disk.
    return dataclasses.replace(resumed, source="copy" if kind == "disk" else kind)
