"""Restores one rank's state from a base of several ranks, and says what it needs for that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from everstep.commit.offers import Needs
from everstep.format.records import Manifest
from everstep.format.writer import ChunkRing
from everstep.recover.held import HeldBase
from everstep.recover.load import LoadedBase, load_ranks
from everstep.recover.opened import OpenBase
from everstep.recover.reshard import needs_of
from everstep.recover.scan import BaseFound
from everstep.recover.sources import Place
from everstep.recover.together import Load
from everstep.seams.progress import ProgressSink, progress
from everstep.state.image import State

__all__ = ["loader", "needs_here"]


class _Alive:
    """Progress that others are told of, too."""

    def __init__(self, shown: ProgressSink, alive: Callable[[], None]) -> None:
        self._shown, self._alive = shown, alive

    def advance(self, amount: int) -> None:
        self._alive()
        self._shown.advance(amount)


def needs_here(state: State, disks: Sequence[str], shared: Sequence[bool] | None = None) -> Needs:
    """Which ranks' files of a base a rank reads, of those that its disk has.

    What ranks have in common is written once to each disk, so that a job on the same disks, with
    as many ranks, needs none of the others'.

    Args:
        disks: by rank: a name of the disk that it writes to.
        shared: as for :func:`.reshard.needs_of`; every rank has to come to the same.
    """
    needs = needs_of(state, shared)

    def here(rank: int, manifest: Manifest) -> Collection[int]:
        wanted = needs(rank, manifest)
        if len(set(disks)) == 1 or len(manifest.markers) != len(disks):
            return wanted
        return [other for other in wanted if disks[other] == disks[rank]]

    return here


def loader(
    state: State,
    ring: ChunkRing,
    *,
    strict: bool,
    timeout_s: float,
    on_touch: Callable[[], None],
) -> Load:
    """What restores ``state``."""

    def load(base: BaseFound, places: Mapping[int, Place], alive: Callable[[], None]) -> LoadedBase:
        opened: list[OpenBase] = []
        try:
            for number, place in places.items():
                files = place.files
                if isinstance(files, HeldBase):
                    opened.append(files.open())
                else:
                    opened.append(OpenBase.open(files, base, rank=number))
                alive()
            tiers = ", ".join(sorted({place.source.tier for place in places.values()}))
            label = f"resume from step {base.id.step} ({tiers})"
            with progress(label, sum(one.size_bytes for one in opened)) as bar:
                return load_ranks(
                    opened,
                    state,
                    ring,
                    strict=strict,
                    timeout_s=timeout_s,
                    progress=_Alive(bar, alive),
                    on_touch=on_touch,
                )
        finally:
            for one in opened:
                one.close()

    return load
