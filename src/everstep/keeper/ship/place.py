"""A place that keeps copies of a run, as seen by the process of one timeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import PurePath

from everstep.errors import EverstepError, FencedError, StorageError
from everstep.format.names import TIMELINE_RECORD, marker_name, timeline_dir
from everstep.format.records import Marker
from everstep.run.scan import Inventory, TimelineCache, newest_timeline, scan_run
from everstep.tiers.contract import Tier
from everstep.tiers.files import TierFileSystem
from everstep.tiers.rate import ObjectRate
from everstep.tiers.streams import read_record

ROOT = PurePath("/")
"""Root of the paths of files in a place."""


class CopyPlace:
    """Writes records of a run to a tier, and checks the fence there.

    Args:
        timeline: timeline of the writing process.
        rate: counts all objects that are written.

    Attributes:
        files: the tier as a file system for reading, under :data:`ROOT`.
    """

    def __init__(self, tier: Tier, timeline: int, rate: ObjectRate) -> None:
        self.tier = tier
        self.timeline = timeline
        self.rate = rate
        self.files = TierFileSystem(tier, ROOT)
        self._timelines = TimelineCache()

    @property
    def kind(self) -> str:
        """Kind of the tier, for errors."""
        return self.tier.traits.kind

    @property
    def url(self) -> str:
        """URL or directory of the tier."""
        return self.tier.url

    def check_fence(self) -> None:
        """Raise if a newer timeline was opened in this place (I11).

        Raises:
            FencedError: a newer timeline has taken the run over.
        """
        # Read anew each time: the other process may have opened its timeline a moment ago.
        newest = newest_timeline_in(self.tier)
        if newest > self.timeline:
            raise FencedError(
                f"this process writes timeline {self.timeline}, but timeline {newest} has taken "
                f"the run over in {self.url}: nothing more is written there",
                tier=self.kind,
                path=self.url,
                hint="another process has resumed this run: stop this one, or use another place",
            )

    def create(self, name: str, data: bytes) -> None:
        """Write a record, unless it exists already with the same content.

        Raises:
            StorageError: the name has other content.
        """
        # Counted before the attempt: a request that fails costs as much.
        self.rate.wrote(1)
        # Exclusive: of two processes that write a record, one learns that it differs.
        if not self.tier.create(name, data):
            raise StorageError(
                f"{self.url}/{name} already has other content",
                tier=self.kind,
                path=f"{self.url}/{name}",
                hint="another process has written there: use a separate place for each run",
            )

    def size_of(self, name: str) -> int | None:
        """Return the size of an object in bytes; None: it does not exist."""
        try:
            # Opened, not listed: a listing of a store may be outdated.
            file = self.tier.open(name)
        except FileNotFoundError:
            return None
        with contextlib.closing(file):
            return file.size_bytes

    def has_rank_files(self, directory: str, marker: Marker) -> bool:
        """Return True if a rank's files and its marker are in the directory of a base.

        Opens each name: a listing may be outdated.
        """
        name = f"{directory}/{marker_name(marker.rank)}"
        try:
            file = self.tier.open(name)
        except FileNotFoundError:
            return False
        with contextlib.closing(file):
            if read_record(file, name) != marker.encode():
                return False
        return all(
            self.size_of(f"{directory}/{record.name}") == record.length for record in marker.files
        )

    def inventory(self) -> Inventory:
        """Return the inventory of all copies in this place."""
        with tier_errors():
            return scan_run(self.files, ROOT, self._timelines)


def newest_timeline_in(tier: Tier) -> int:
    """Return the number of the newest timeline in a tier; 0: there is none.

    A listing may be outdated, so the numbers that follow are opened by name.
    """
    with tier_errors():
        number = newest_timeline(TierFileSystem(tier, ROOT), ROOT)
    while True:
        path = timeline_dir(ROOT, number + 1) / TIMELINE_RECORD
        try:
            tier.open(path.relative_to(ROOT).as_posix()).close()
        except FileNotFoundError:
            return number
        number += 1


@contextlib.contextmanager
def tier_errors() -> Iterator[None]:
    """Turn file system errors that a tier's error caused into the tier's error again."""
    try:
        yield
    except OSError as error:
        if isinstance(error.__cause__, EverstepError):
            raise error.__cause__ from None
        raise StorageError(f"could not read a copy: {error}") from error
