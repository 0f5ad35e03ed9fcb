"""Restore of one rank, as the ranks of a job have chosen: compare, load, and replay the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from everstep.commit.job import Choice, Source
from everstep.commit.job.agreement import Compared, Restored
from everstep.errors import FormatError, MismatchError, StateError
from everstep.format import Manifest, base_dir
from everstep.restore.fetch.sources import Place, Places, read_from_places
from everstep.restore.load import OTHER_STATE, LoadedBase
from everstep.restore.load.load import sections_left_out
from everstep.restore.start.job_outcome import Outcome
from everstep.restore.start.rank_loader import RankLoader
from everstep.restore.start.rank_log import LogExchange, RankLog
from everstep.restore.start.rank_sources import RankSources
from everstep.restore.start.report import ResumeRequest, missing_sections, refuse_log_loss
from everstep.run import BaseFound, Skipped
from everstep.run.scan import candidates
from everstep.state.ranks import SkippedState

_log = logging.getLogger("everstep")
_T = TypeVar("_T")


class RankRestore:
    """Live state of this rank while the ranks agree.

    Args:
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
        loader: RankLoader,
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
        self._loader = loader
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
        self.outcome = Outcome.of(
            loaded, choice.manifest, picked, self._sources.rank, load_s=load_s
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
        older = candidates(self._sources.inventory).ordered
        tried = [base, *(one for one in older if one.id < base.id)]
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
        self.outcome.loaded = self._log.with_layout(loaded, base, picked or {})

    def _base_of(self, choice: Choice) -> BaseFound:
        assert choice.base is not None
        path = base_dir(self._request.run, choice.base.timeline, choice.base.step)
        return BaseFound(choice.base, path, "committed", choice.manifest, None, ())

    def _skip(self, one: Skipped) -> None:
        if one not in self.skipped:
            self.skipped.append(one)
