"""Restores one rank's state from a base of several ranks, and says what it needs for that."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from everstep.commit.job.offers import Needs
from everstep.errors import DamageError, FormatError
from everstep.format.records import Manifest, TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.restore.fetch.held import HeldBase
from everstep.restore.fetch.node_reads import NodeReads
from everstep.restore.fetch.sources import Place
from everstep.restore.load.load import LoadedBase, compare_ranks, load_ranks
from everstep.restore.load.saved_ranks import HoleError, SavedLayout, SavedRanks, needs_of
from everstep.restore.offline.whole_ranks import made_whole
from everstep.run.open_base import OpenBase
from everstep.run.scan import BaseFound
from everstep.seams.progress import ProgressSink, progress, silent
from everstep.state.ranks.rank_share import SkippedState
from everstep.state.training_state import State

__all__ = [
    "Compares",
    "Load",
    "LoadWithNode",
    "loader",
    "make_comparer",
    "needs_on_disk",
    "read_layout",
]

_log = logging.getLogger("everstep")


class Load(Protocol):
    """Restores this rank's state from a base."""

    def __call__(
        self,
        base: BaseFound,
        places: Mapping[int, Place],
        alive: Callable[[], None],
        *,
        partly: bool = False,
        timelines: Sequence[TimelineRecord] = (),
    ) -> LoadedBase:
        """
        Args:
            places: the files of these ranks, each where it says.
            alive: called every now and then.
            partly: those of the other ranks are gone.
            timelines: records of the history: where it was trained.
        """
        ...


class Compares(Protocol):
    """Says what of a base this rank would leave out. Arguments as of :class:`Load`."""

    def __call__(
        self,
        base: BaseFound,
        places: Mapping[int, Place],
        alive: Callable[[], None],
        *,
        partly: bool = False,
        timelines: Sequence[TimelineRecord] = (),
    ) -> SkippedState: ...


class LoadWithNode(Protocol):
    """A :class:`Load` that may read with the other ranks of its node."""

    def __call__(
        self,
        base: BaseFound,
        places: Mapping[int, Place],
        alive: Callable[[], None],
        node: NodeReads | None = None,
        *,
        partly: bool = False,
        timelines: Sequence[TimelineRecord] = (),
    ) -> LoadedBase: ...


class _Alive:
    """Progress that others are told of, too."""

    def __init__(self, shown: ProgressSink, alive: Callable[[], None]) -> None:
        self._shown = shown
        self._alive = alive

    def advance(self, amount: int) -> None:
        self._alive()
        self._shown.advance(amount)


def needs_on_disk(
    state: State, disks: Sequence[str], shared: Sequence[bool] | None = None
) -> Needs:
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


def read_layout(
    base: BaseFound, places: Mapping[int, Place], optimizers: Collection[str]
) -> SavedLayout | None:
    """Who had what of a base, as its headers say; None: they cannot be read any more.

    Args:
        optimizers: their sections.
    """
    opened: list[OpenBase] = []
    try:
        for number, place in places.items():
            opened.append(_open(base, number, place))
        return SavedLayout.of(SavedRanks(opened), opened, optimizers)
    except (DamageError, FormatError, OSError) as error:
        _log.warning("%s: who had what of it cannot be read: %s", base.id, error)
        return None
    finally:
        for one in opened:
            one.close()


def _open(base: BaseFound, number: int, place: Place) -> OpenBase:
    files = place.files
    return files.open() if isinstance(files, HeldBase) else OpenBase.open(files, base, rank=number)


def make_comparer(state: State, ring: ChunkRing, *, strict: bool, timeout_s: float) -> Compares:
    """What compares ``state``. With ``strict`` nothing may be left out (``MismatchError``)."""

    def compare(
        base: BaseFound,
        places: Mapping[int, Place],
        alive: Callable[[], None],
        *,
        partly: bool = False,
        timelines: Sequence[TimelineRecord] = (),
    ) -> SkippedState:
        trained = next((one for one in timelines if one.timeline == base.id.timeline), None)
        about: dict[str, Any] = {"ring": ring, "trained": trained, "timeout_s": timeout_s}
        complete = partial(made_whole, **about, progress=silent, alive=alive)
        with contextlib.ExitStack() as stack:
            opened: list[OpenBase] = []
            for number, place in places.items():
                opened.append(_open(base, number, place))
                stack.callback(opened[-1].close)
                alive()
            return compare_ranks(opened, state, strict=strict, partly=partly, complete=complete)

    return compare


def loader(
    state: State,
    ring: ChunkRing,
    *,
    strict: bool,
    timeout_s: float,
    on_touch: Callable[[], None],
) -> LoadWithNode:
    """What restores ``state``; with ``node=``, reading with the other ranks of this node."""

    def load(
        base: BaseFound,
        places: Mapping[int, Place],
        alive: Callable[[], None],
        node: NodeReads | None = None,
        *,
        partly: bool = False,
        timelines: Sequence[TimelineRecord] = (),
    ) -> LoadedBase:
        trained = next((one for one in timelines if one.timeline == base.id.timeline), None)
        if partly or node is None or not node.begin(base, places):
            return load_from(base, places, alive, trained, None, partly)
        try:
            return load_from(base, places, alive, trained, node)
        except DamageError as error:
            if isinstance(error, HoleError):
                raise
            # Only what this rank has read itself says that a file is damaged.
            _log.warning("%s: this rank reads it without its neighbours: %s", base.id, error)
        finally:
            node.end()
        return load_from(base, places, alive, trained, None)

    def load_from(
        base: BaseFound,
        places: Mapping[int, Place],
        alive: Callable[[], None],
        trained: TimelineRecord | None,
        node: NodeReads | None,
        partly: bool = False,
    ) -> LoadedBase:
        opened: list[OpenBase] = []
        try:
            for number, place in places.items():
                opened.append(_open(base, number, place))
                if node is not None and not isinstance(place.files, HeldBase):
                    node.share(opened[-1], place)
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
                    partly=partly,
                    complete=partial(
                        made_whole,
                        ring=ring,
                        trained=trained,
                        timeout_s=timeout_s,
                        progress=bar,
                        alive=alive,
                    ),
                )
        finally:
            for one in opened:
                one.close()

    return load
