"""A place that keeps copies of a run, as the process of one timeline sees it."""

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

__all__ = ["ROOT", "CopyPlace", "newest_timeline_in", "tier_errors"]

ROOT = PurePath("/")
"""What stands for the place in paths of its files."""


class CopyPlace:
    """Writes records and looks at the fence.

    Args:
        timeline: of the process that writes.
        rate: told of every object.

    Attributes:
        files: the place as a file system to read from, under :data:`ROOT`.
    """

    def __init__(self, tier: Tier, timeline: int, rate: ObjectRate) -> None:
        self.tier = tier
        self.timeline = timeline
        self.rate = rate
        self.files = TierFileSystem(tier, ROOT)
        self._timelines = TimelineCache()

    def check_fence(self) -> None:
        """Returns if no newer timeline was opened here (I11).

        Raises:
            FencedError
        """
        newest = newest_timeline_in(self.tier)
        if newest > self.timeline:
            raise FencedError(
                f"this process writes timeline {self.timeline}, but timeline {newest} has taken "
                f"the run over in {self.tier.url}: it may not write there any more",
                tier=self.tier.traits.kind,
                path=self.tier.url,
                hint="another process resumed this run; end this one, or use another place",
            )

    def create(self, name: str, data: bytes) -> None:
        """Writes a record, or finds it written.

        Raises:
            StorageError: there is another one of that name.
        """
        self.rate.wrote(1)
        if not self.tier.create(name, data):
            raise StorageError(
                f"{self.tier.url}/{name} holds something else already",
                tier=self.tier.traits.kind,
                path=f"{self.tier.url}/{name}",
                hint="another process has written there: give each run a place of its own",
            )

    def size_of(self, name: str) -> int | None:
        """Bytes of an object; None: there is none."""
        try:
            file = self.tier.open(name)
        except FileNotFoundError:
            return None
        with contextlib.closing(file):
            return file.size_bytes

    def has_rank_files(self, directory: str, marker: Marker) -> bool:
        """Whether a rank's files and its marker are in the directory of a base, asked for by
        name: no listing from the past says so."""
        name = f"{directory}/{marker_name(marker.rank)}"
        try:
            file = self.tier.open(name)
        except FileNotFoundError:
            return False
        with contextlib.closing(file):
            if read_record(file, name) != marker.encode():
                return False
        sizes = ((self.size_of(f"{directory}/{one.name}"), one.length) for one in marker.files)
        return all(there == length for there, length in sizes)

    def inventory(self) -> Inventory:
        """What the copies are."""
        with tier_errors():
            return scan_run(self.files, ROOT, self._timelines)


def newest_timeline_in(tier: Tier) -> int:
    """The newest timeline that was opened in a tier; 0: none was.

    A listing may be some time old, so the next numbers are looked for by name.
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
    """What a tier has said through a file system's errors, in its own words again."""
    try:
        yield
    except OSError as error:
        if isinstance(error.__cause__, EverstepError):
            raise error.__cause__ from None
        raise StorageError(f"could not read a copy: {error}") from error
