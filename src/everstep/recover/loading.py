"""Restores one rank's state from a base of several ranks, and says what it needs for that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from everstep.commit.offers import Needs
from everstep.format.records import Manifest
from everstep.format.writer import ChunkRing
from everstep.recover.held import HeldBase
from everstep.recover.load import LoadedBase, load_ranks
from everstep.recover.opened import OpenBase
from everstep.recover.reshard import needs_of
from everstep.recover.scan import BaseFound
from everstep.recover.together import Load
from everstep.seams import Seams
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


def needs_here(state: State, disks: Sequence[str]) -> Needs:
    """Which ranks' files of a base a rank reads, of those that its disk has.

    What ranks have in common is written once to each disk, so that a job on the same disks, with
    as many ranks, needs none of the others'.

    Args:
        disks: by rank: a name of the disk that it writes to.
    """
    needs = needs_of(state)

    def here(rank: int, manifest: Manifest) -> Collection[int]:
        wanted = needs(rank, manifest)
        if len(set(disks)) == 1 or len(manifest.markers) != len(disks):
            return wanted
        return [other for other in wanted if disks[other] == disks[rank]]

    return here


def loader(
    seams: Seams,
    state: State,
    needs: Needs,
    ring: ChunkRing,
    *,
    strict: bool,
    timeout_s: float,
    on_touch: Callable[[], None],
) -> Load:
    """What restores ``state``."""
    rank = state.ranks.rank

    def load(base: BaseFound, held: dict[int, HeldBase], alive: Callable[[], None]) -> LoadedBase:
        assert base.manifest is not None
        opened: list[OpenBase] = []
        try:
            for number in needs(rank, base.manifest):
                mine = held.get(number)
                one = mine.open() if mine else OpenBase.open(seams.filesystem, base, rank=number)
                opened.append(one)
            label = f"resume from step {base.id.step} ({'memory' if held else 'disk'})"
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
