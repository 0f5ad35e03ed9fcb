"""One rank's share of a base of several ranks: load it, compare it, and determine the files it
needs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from everstep.commit.job import Needs
from everstep.errors import DamageError, FormatError
from everstep.format import Manifest, TimelineRecord
from everstep.restore.fetch import HeldBase
from everstep.restore.fetch.node_reads import NodeReads
from everstep.restore.fetch.sources import Place
from everstep.restore.load import LoadedBase, Reads, SavedLayout, SavedRanks, load_ranks
from everstep.restore.load.load import CompleteRank, compare_ranks
from everstep.restore.load.saved_ranks import HoleError, needs_of
from everstep.restore.offline.rank_files import complete_rank_files
from everstep.restore.start.report import ResumeRequest
from everstep.run import BaseFound, OpenBase
from everstep.seams.progress import ProgressSink, progress, silent
from everstep.state.ranks import SkippedState
from everstep.state.training_state import State

_log = logging.getLogger("everstep")


class _ReportedProgress:
    """Progress that is also reported to the other ranks."""

    def __init__(self, shown: ProgressSink, alive: Callable[[], None]) -> None:
        self._shown = shown
        self._alive = alive

    def advance(self, amount: int) -> None:
        # Loading may take longer than the timeout of the other ranks, and they may wait for log
        # records.
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
        # The layout only uses headers, so closed files suffice.
        for one in opened:
            one.close()


def _open(base: BaseFound, number: int, place: Place) -> OpenBase:
    files = place.files
    return files.open() if isinstance(files, HeldBase) else OpenBase.open(files, base, rank=number)


class RankLoader:
    """Loads this rank's share of a base, or compares it with the live state.

    Args:
        request: live state, and what is accepted.
        node: reads shared with the other ranks of this node; None: this rank reads by itself.
    """

    def __init__(self, request: ResumeRequest, node: NodeReads | None = None) -> None:
        self._request = request
        self._node = node

    def load(
        self,
        base: BaseFound,
        places: Mapping[int, Place],
        alive: Callable[[], None],
        *,
        partly: bool = False,
        timelines: Sequence[TimelineRecord] = (),
    ) -> LoadedBase:
        """Restore the live state from a base.

        Args:
            places: location of the files of each rank.
            alive: called every now and then.
            partly: the files of the other ranks are missing.
            timelines: timeline records of the history.
        """
        trained = _trained(base, timelines)
        node = self._node
        if not partly and node is not None and node.begin(base, places):
            try:
                return self._load(base, places, alive, trained, node)
            except HoleError:
                # A DamageError, but files that were read directly would have the same hole.
                raise
            except DamageError as error:
                # The bytes came through another rank: read them directly before calling them
                # damaged.
                _log.warning(
                    "%s: this rank reads it without the other ranks of its node: %s", base.id, error
                )
            finally:
                # Other ranks of the node wait for cells that this one claimed: end before reading
                # again.
                node.end()
        return self._load(base, places, alive, trained, None, partly=partly)

    def compare(
        self,
        base: BaseFound,
        places: Mapping[int, Place],
        alive: Callable[[], None],
        *,
        partly: bool = False,
        timelines: Sequence[TimelineRecord] = (),
    ) -> SkippedState:
        """Return the state of a base that :meth:`load` would leave out; same arguments.

        Raises:
            MismatchError: in strict mode, on any difference.
        """
        with contextlib.ExitStack() as stack:
            opened: list[OpenBase] = []
            for number, place in places.items():
                opened.append(_open(base, number, place))
                stack.callback(opened[-1].close)
                alive()
            return compare_ranks(
                opened,
                self._request.state,
                strict=self._request.strict,
                partly=partly,
                complete=self._complete(_trained(base, timelines), silent, alive),
            )

    def _load(
        self,
        base: BaseFound,
        places: Mapping[int, Place],
        alive: Callable[[], None],
        trained: TimelineRecord | None,
        node: NodeReads | None,
        *,
        partly: bool = False,
    ) -> LoadedBase:
        request = self._request
        with contextlib.ExitStack() as stack:
            opened: list[OpenBase] = []
            for number, place in places.items():
                opened.append(_open(base, number, place))
                stack.callback(opened[-1].close)
                if node is not None:
                    node.share(opened[-1], place)
                alive()
            tiers = ", ".join(sorted({place.source.tier for place in places.values()}))
            label = f"resume from step {base.id.step} ({tiers})"
            bar = stack.enter_context(progress(label, sum(one.size_bytes for one in opened)))
            return load_ranks(
                opened,
                request.state,
                Reads(request.ring, request.timeout_s, _ReportedProgress(bar, alive)),
                strict=request.strict,
                on_touch=request.on_touch,
                partly=partly,
                complete=self._complete(trained, bar, alive),
            )

    def _complete(
        self, trained: TimelineRecord | None, bar: ProgressSink, alive: Callable[[], None]
    ) -> CompleteRank:
        """Return the function that completes files of a multi-step base from their redo files."""
        return partial(
            complete_rank_files,
            reads=Reads(self._request.ring, self._request.timeout_s, bar),
            trained=trained,
            alive=alive,
        )


def _trained(base: BaseFound, timelines: Iterable[TimelineRecord]) -> TimelineRecord | None:
    return next((one for one in timelines if one.timeline == base.id.timeline), None)
