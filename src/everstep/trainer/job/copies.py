"""The trainer's side of copies in other tiers: a run is resumed from wherever it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import PurePath

from everstep.errors import EverstepError, OptionError, StorageError
from everstep.format.names import base_dir
from everstep.format.records import RunRecord
from everstep.restore.fetch.copies import RunWithCopies
from everstep.restore.start.resume import Resumed
from everstep.run.folder import open_run_folder
from everstep.seams import Seams
from everstep.seams.machine import leads_to
from everstep.tiers.contract import Tier
from everstep.tiers.options import TierOptions
from everstep.tiers.urls import open_tier

__all__ = ["open_places", "seams_with_copies", "with_source"]


def seams_with_copies(tiers: Sequence[TierOptions], seams: Seams, run: PurePath) -> Seams:
    """The seams through which a run is resumed, and its folder made: without tiers, the same.

    A folder that is not there yet becomes one of the run whose copies the tiers hold.

    Raises:
        ForeignDirectoryError: they hold those of another run.
        RecoveryError: they have gone another way than the folder since.
        OptionError, UnavailableError: a tier is none.
        StorageError: it cannot be reached.
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
            if isinstance(inner, EverstepError):  # what a tier said, in its own words
                raise inner from None
        raise
    return dataclasses.replace(seams, filesystem=both)


def open_places(tiers: Sequence[TierOptions], seams: Seams, run: PurePath) -> list[Tier]:
    """The places that keep copies, each of which can be reached.

    Raises:
        OptionError, UnavailableError: one is none, or lies in another one.
        StorageError: it cannot be reached.
    """
    _refuse_overlap([run, *(PurePath(one.where) for one in tiers)])
    _refuse_overlap([_followed(run), *(_followed(PurePath(one.where)) for one in tiers)])
    places = [open_tier(one.where, seams.filesystem, clock=seams.clock) for one in tiers]
    for place in places:
        place.check()
    return places


def _followed(place: PurePath) -> PurePath:
    """Where a path leads; a URL to itself."""
    return place if any(":" in part for part in place.parts[:1]) else leads_to(place)


def _refuse_overlap(places: list[PurePath]) -> None:
    """What cleans up in one place would delete from another."""
    for number, one in enumerate(places):
        for other in places[:number]:
            if one == other or one in other.parents or other in one.parents:
                raise OptionError(
                    f"{one} and {other} are one in the other: a copy needs a place of its own",
                    path=one,
                )


def with_source(resumed: Resumed, seams: Seams, run: PurePath) -> Resumed:
    """Says from which tier a base came, if it was none of the disk's."""
    both = seams.filesystem
    if resumed.source != "disk" or resumed.base is None or not isinstance(both, RunWithCopies):
        return resumed
    directory = base_dir(run, resumed.base.timeline, resumed.base.step)
    kind = both.source_of(directory)
    if kind is None:
        return resumed
    # Never "disk": that would vouch for what this run's own disk holds.
    return dataclasses.replace(resumed, source="copy" if kind == "disk" else kind)
