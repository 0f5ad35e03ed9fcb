"""One rank's share of a base of several ranks: load it, compare it, and determine the files it
needs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

from everstep.commit.job.offers import Needs
from everstep.errors import DamageError, FormatError
from everstep.format.records import Manifest, TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.restore.fetch.held import HeldBase
from everstep.restore.fetch.node_reads import NodeReads
from everstep.restore.fetch.sources import Place
from everstep.restore.load.load import LoadedBase, compare_ranks, load_ranks
from everstep.restore.load.saved_ranks import HoleError, SavedLayout, SavedRanks, needs_of
from everstep.restore.offline.rank_files import complete_rank_files
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
    """Protocol: restore this rank's state from a base."""

    def __call__(
        self,
        base: BaseFound,
        places: Mapping[int, Place],
        alive: Callable[[], None],
        *,
        partly: bool = False,
        timelines: Sequence[TimelineRecord] = (),
    ) -> LoadedBase:
        """Restore the base.

        Args:
            places: location of the files of each rank.
            alive: called every now and then.
            partly: the files of the other ranks are missing.
            timelines: timeline records of the history.
        """
        ...


class Compares(Protocol):
    """Protocol: return the state of a base that this rank would leave out. Arguments as of
    :class:`Load`."""

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
    """Protocol: a :class:`Load` that can share its reads with the other ranks of the node."""

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


class _ReportedProgress:
    """Progress that is also reported to the other ranks."""

    def __init__(self, shown: ProgressSink, alive: Callable[[], None]) -> None:
        self._shown = shown
        self._alive = alive

    def advance(self, amount: int) -> None:
        self._alive()
        self._shown.advance(amount)


def needs_on_disk(
    state: State, disks: Sequence[str], shared: Sequence[bool] | None = None
) -> Needs:
    """Return a function giving the ranks whose files this rank reads, of those on its disk.

    Shared tensors are written once to each disk. So a job on the same disks with as many ranks
    needs no files from other disks.

    Args:
        disks: name of the disk of each rank.
        shared: as for :func:`.saved_ranks.needs_of`; must be the same on every rank.
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
    """Return the layout of a base from its headers; None if they can no longer be read.

    Args:
        optimizers: sections of optimizers.
    """
    opened: list[OpenBase] = []
    try:
        for number, place in places.items():
            opened.append(_open(base, number, place))
        return SavedLayout.of(SavedRanks(opened), opened, optimizers)
    except (DamageError, FormatError, OSError) as error:
        _log.warning("%s: its layout cannot be read: %s", base.id, error)
        return None
    finally:
        for one in opened:
            one.close()


def _open(base: BaseFound, number: int, place: Place) -> OpenBase:
    files = place.files
    return files.open() if isinstance(files, HeldBase) else OpenBase.open(files, base, rank=number)


def make_comparer(state: State, ring: ChunkRing, *, strict: bool, timeout_s: float) -> Compares:
    """Return a function that compares a base with ``state``.

    With ``strict`` it raises ``MismatchError`` on any difference.
    """

    def compare(
        base: BaseFound,
        places: Mapping[int, Place],
        alive: Callable[[], None],
        *,
        partly: bool = False,
        timelines: Sequence[TimelineRecord] = (),
    ) -> SkippedState:
        trained = next((one for one in timelines if one.timeline == base.id.timeline), None)
        complete = partial(
            complete_rank_files,
            ring=ring,
            trained=trained,
            timeout_s=timeout_s,
            progress=silent,
            alive=alive,
        )
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
    """Return a function that restores ``state``; with ``node=`` it shares reads with the other
    ranks of the node."""

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
            # The bytes came through another rank: read them directly before calling them damaged.
            _log.warning(
                "%s: this rank reads it without the other ranks of its node: %s", base.id, error
            )
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
                    progress=_ReportedProgress(bar, alive),
                    on_touch=on_touch,
                    partly=partly,
                    complete=partial(
                        complete_rank_files,
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
