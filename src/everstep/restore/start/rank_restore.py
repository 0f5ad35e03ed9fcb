"""Restore of one rank, as the ranks of a job have chosen: compare its share of a base, load it, and
replay the log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from everstep.commit import BaseId
from everstep.commit.job import Choice, Source
from everstep.commit.job.agreement import Compared, Restored
from everstep.errors import DamageError, FormatError, MismatchError, StateError
from everstep.format import Manifest, TimelineRecord, base_dir
from everstep.format.records import AuditRecord
from everstep.restore.fetch import HeldBase
from everstep.restore.fetch.node_reads import NodeReads
from everstep.restore.fetch.sources import Place, Places, read_from_places, source_name
from everstep.restore.load import (
    OTHER_STATE,
    LoadedBase,
    Reads,
    SavedLayout,
    SavedRanks,
    load_ranks,
)
from everstep.restore.load.load import CompleteRank, compare_ranks, sections_left_out
from everstep.restore.load.saved_ranks import HoleError
from everstep.restore.offline.rank_files import complete_rank_files
from everstep.restore.start.rank_log import LogExchange, RankLog, Redone
from everstep.restore.start.rank_sources import RankSources
from everstep.restore.start.report import ResumeRequest, missing_sections, refuse_log_loss
from everstep.run import BaseFound, Inventory, OpenBase, Skipped
from everstep.run.verify import audit_of
from everstep.seams.progress import ProgressSink, progress, silent
from everstep.state.ranks import SkippedState

_log = logging.getLogger("everstep")
_T = TypeVar("_T")


@dataclass(slots=True)
class Outcome:
    """Live state of this rank during the resume.

    Attributes:
        loaded: result of loading the base; None on a fresh start.
        source: source of the base.
        exact: True if the state is bit for bit that of training.
        load_s: seconds spent loading.
        redone: result of replay.
        audit: audit that the state rests on (see :func:`.verify.audit_of`).
    """

    loaded: LoadedBase | None = None
    source: str = "fresh"
    exact: bool = True
    load_s: float = 0.0
    redone: Redone = field(default_factory=Redone)
    audit: AuditRecord | None = None

    def audited(self, restored: Restored, inventory: Inventory, end: BaseId | None) -> Restored:
        """Apply audits to the result: a state that rests on a base which audits found different is
        not exact (I9).

        Args:
            end: timeline and step of the state.
        """
        if end is not None:
            self.audit = audit_of(inventory, end)
            if self.audit is not None and self.audit.verdict == "different":
                self.exact = False
        return replace(restored, exact=restored.exact and self.exact)

    def doubt(self, notes: tuple[str, ...]) -> None:
        """Note why the next step may differ from that of an uninterrupted training."""
        if notes and self.loaded is not None:
            self.loaded = replace(self.loaded, notes=(*self.loaded.notes, *notes))
            self.exact = False


class RankRestore:
    """Live state of this rank while the ranks agree.

    Args:
        node: reads shared with the other ranks of this node; None: this rank reads by itself.
        log: log of this rank; None: there is none.
        exchange: log records of other ranks.

    Attributes:
        outcome: what was restored last.
        skipped: steps that cannot be used, with the reason.
        unusable: files and steps that could not be used, in words.
        left_out: differences found by the last comparison.
        passed_over: message about a newer base that lacks sections of the state; "" if none does.
    """

    def __init__(
        self,
        request: ResumeRequest,
        sources: RankSources,
        node: NodeReads | None,
        log: RankLog | None,
        exchange: LogExchange,
    ) -> None:
        self.outcome = Outcome()
        self.skipped: list[Skipped] = []
        self.unusable: dict[str, None] = {}
        self.left_out: tuple[tuple[str, str], ...] = ()
        self.passed_over = ""
        self._request = request
        self._sources = sources
        self._loader = RankLoader(request, node)
        self._log = log
        self._exchange = exchange
        # Loaded, with nothing replayed on it: a choice of the same base need not load it again.
        self._loaded_base: tuple[Manifest, Outcome] | None = None

    def compare(self, choice: Choice) -> Compared:
        """Return the state that would be left out.

        A log can only be replayed on a complete state, so a choice that needs the log is rejected
        if anything is left out.
        """
        assert choice.manifest is not None
        base = self._base_of(choice)
        places = self._sources.places(choice, choice.manifest)

        def use(picked: Mapping[int, Place]) -> SkippedState:
            self._pass_over(base)
            return self._loader.compare(
                base,
                picked,
                self._exchange.serve,
                partly=choice.partly,
                timelines=choice.timelines,
            )

        read = self._with_files(choice, choice.manifest, places, use)
        if read is None:
            return Compared(tuple(places.damaged))
        left_out, _ = read
        self.left_out = left_out.mismatches
        if self._request.step is None and choice.end is not None and choice.reach is not None:
            sections = sections_left_out(self.left_out)
            refuse_log_loss(sections, base.id.step, choice.end.step, self._request.run)
        unusable = None
        if self.left_out and choice.reach is not None and self._log is not None:
            unusable = self._log.first_of(choice)
            self._skip(Skipped(*unusable, OTHER_STATE))
            self.unusable[f"step {unusable[1]}: {OTHER_STATE} ({left_out.words[0]})"] = None
        return Compared((), unusable, left_out.common, left_out.words)

    def restore(self, choice: Choice) -> Restored:
        """Load the chosen base, and replay this rank's log on it."""
        found = self._restore(choice)
        loaded = self.outcome.loaded
        if loaded is not None:
            state = self._request.state
            as_many = loaded.marker.world == state.ranks.world
            self.outcome.doubt(state.buckets.settle(as_many=as_many))
        return self.outcome.audited(found, self._sources.inventory, choice.end)

    def _restore(self, choice: Choice) -> Restored:
        damaged = self._load(choice)
        loaded = self.outcome.loaded
        if damaged or loaded is None or choice.reach is None or self._log is None:
            elsewhere = self._sources.log_may_be_elsewhere(choice)
            return Restored(damaged, exact=self.outcome.exact, relaid=elsewhere)
        # First all steps in few passes. If one fails, load the base again, and replay step by step
        # to find the failing one, which all ranks then exclude.
        for together in (True, False):
            redone = self._log.redo(choice, loaded, together=together, exchange=self._exchange)
            # The live state is no longer that of the base: a later choice has to load it again.
            if redone.touched:
                self._loaded_base = None
            if redone.unusable is None or redone.sure:
                break
            damaged = self._load(choice)
            loaded = self.outcome.loaded
            if damaged or loaded is None:
                return Restored(damaged, exact=self.outcome.exact)
        if redone.relaid:
            return Restored(exact=self.outcome.exact, relaid=True)
        self.outcome.redone = redone
        for one in redone.skipped:
            self._skip(one)
        self.outcome.exact &= not redone.inexact and not redone.notes
        return Restored((), redone.unusable, self.outcome.exact)

    def _load(self, choice: Choice) -> tuple[tuple[int, Source], ...]:
        """Load the chosen base, unless it is loaded already; return the damaged files and their
        sources."""
        loaded_base = self._loaded_base
        # Until the load succeeds: one that fails may have overwritten parts of the state
        # (``adr/006``).
        self._loaded_base = None
        self.outcome = Outcome()
        self._sources.stop_reading_ahead(but=choice.base)
        if choice.base is None or choice.manifest is None:
            return ()
        if not self._request.restores:
            raise StateError(
                f"this run has bases, the newest of {choice.base}, and resume() was not called: "
                "training would silently start over",
                path=self._request.run,
                hint="call ckpt.resume() before the loop (resume(step=0) starts from scratch)",
            )
        base = self._base_of(choice)
        places = self._sources.places(choice, choice.manifest)
        if loaded_base is not None and loaded_base[0] == choice.manifest:
            self._loaded_base = loaded_base
            # A copy, here and below: replay and audits change the outcome, but not that of the base
            # alone.
            self.outcome = replace(loaded_base[1])
            self._add_layout(choice, base, places)
            return ()
        clock = self._request.seams.clock
        start_s = clock.monotonic_s()

        def load(picked: Mapping[int, Place]) -> LoadedBase:
            nonlocal start_s
            # Again at each attempt: a damaged file was read before, which is not time of this load.
            start_s = clock.monotonic_s()
            try:
                return self._loader.load(
                    base,
                    picked,
                    self._exchange.serve,
                    partly=choice.partly,
                    timelines=choice.timelines,
                )
            except MismatchError as error:
                self._pass_over(base, error)
                raise

        read = self._with_files(choice, choice.manifest, places, load)
        if read is None:
            return tuple(places.damaged)
        loaded, picked = read
        load_s = clock.monotonic_s() - start_s
        self.outcome = Outcome(
            loaded,
            source_name({place.source.tier for place in picked.values()}),
            choice.manifest.exact and not loaded.mismatches and not loaded.notes,
            load_s,
        )
        self._loaded_base = choice.manifest, replace(self.outcome)
        self._add_layout(choice, base, places)
        return ()

    def _with_files(
        self, choice: Choice, manifest: Manifest, places: Places, use: Callable[..., _T]
    ) -> tuple[_T, Mapping[int, Place]] | None:
        """Call ``use`` with the files of a base; see :func:`.sources.read_from_places`."""
        assert choice.base is not None
        wanted = tuple(self._sources.needs(self._sources.rank, manifest))
        return read_from_places(
            places,
            # Of remains, all files that can be read here are used, whichever rank wrote them.
            (choice.partly and places.readable) or wanted,
            use,
            base=choice.base,
            rank=self._sources.rank,
            run=self._request.run,
            failed=lambda why: self.unusable.update({why: None}),
        )

    def _pass_over(self, base: BaseFound, cause: Exception | None = None) -> None:
        """Skip a base that lacks sections of the state which an older base has.

        Raises:
            FormatError: it does, so the ranks choose the next base. An explicitly requested step is
                not skipped.
        """
        if self._request.step is not None:
            return
        tried = [base, *self._sources.older_than(base.id)]
        sections = self._request.state.providers.keys()
        lacking = missing_sections(self._request.seams.filesystem, tried, sections)
        if base.id in lacking:
            self.passed_over = self.passed_over or lacking[base.id]
            raise FormatError(lacking[base.id]) from cause

    def _add_layout(self, choice: Choice, base: BaseFound, places: Places) -> None:
        """Read the saved layout if another layout wrote the log; most starts do not need it."""
        loaded = self.outcome.loaded
        if not choice.readers or loaded is None or loaded.layout is not None or self._log is None:
            return
        picked = places.pick(places.readable)
        layout = read_layout(base, picked or {}, self._request.state.optimizers)
        self.outcome.loaded = replace(loaded, layout=layout)

    def _base_of(self, choice: Choice) -> BaseFound:
        assert choice.base is not None
        path = base_dir(self._request.run, choice.base.timeline, choice.base.step)
        return BaseFound(choice.base, path, "committed", choice.manifest, None, ())

    def _skip(self, one: Skipped) -> None:
        if one not in self.skipped:
            self.skipped.append(one)


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


def read_layout(
    base: BaseFound, places: Mapping[int, Place], optimizers: Collection[str]
) -> SavedLayout | None:
    """Return the layout of a base from its headers; None if they can no longer be read.

    Args:
        optimizers: sections of optimizers.
    """
    try:
        # The layout only uses headers, so closed files suffice.
        with _opened(base, places) as opened:
            return SavedLayout.of(SavedRanks(opened), opened, optimizers)
    except (DamageError, FormatError, OSError) as error:
        _log.warning("%s: its layout cannot be read: %s", base.id, error)
        return None


@contextlib.contextmanager
def _opened(
    base: BaseFound, places: Mapping[int, Place], alive: Callable[[], None] = lambda: None
) -> Iterator[list[OpenBase]]:
    """Open the files of each rank in ``places``; close them at the end."""
    with contextlib.ExitStack() as stack:
        found: list[OpenBase] = []
        for rank, place in places.items():
            files = place.files
            if isinstance(files, HeldBase):
                found.append(files.open())
            else:
                found.append(OpenBase.open(files, base, rank=rank))
            stack.callback(found[-1].close)
            alive()
        yield found


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
        with _opened(base, places, alive) as opened:
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
        with _opened(base, places, alive) as opened:
            if node is not None:
                for one, place in zip(opened, places.values(), strict=True):
                    node.share(one, place)
            tiers = ", ".join(sorted({place.source.tier for place in places.values()}))
            label = f"resume from step {base.id.step} ({tiers})"
            with progress(label, sum(one.size_bytes for one in opened)) as bar:
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
