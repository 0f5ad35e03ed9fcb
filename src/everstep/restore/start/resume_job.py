"""Resuming of several ranks: all restore the same base, and open one timeline.

Drives an :class:`~everstep.commit.job.agreement.Agreement` over this rank's disk, and a mailbox to
the :class:`~everstep.restore.fetch.others.Others`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar

from everstep.commit.job.agreed import (
    AgreementOut,
    Compare,
    Compared,
    Go,
    InventorySeen,
    IsSilent,
    Opened,
    OpenTimeline,
    Refuse,
    Restore,
    Restored,
    TakeInventory,
    Tell,
)
from everstep.commit.job.agreement import Agreement
from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.job.offers import Choice, Needs, Offer, Source
from everstep.commit.lineage import BaseId
from everstep.commit.logs import LogRun
from everstep.commit.reclaim import VOLATILE_TIERS
from everstep.errors import FormatError, MismatchError, StateError
from everstep.format.names import base_dir
from everstep.format.records import Manifest, Marker, TimelineRecord
from everstep.restore.fetch.files_ahead import Apart, CopiesAhead
from everstep.restore.fetch.held import HeldBase
from everstep.restore.fetch.lent_files import Covers, covered
from everstep.restore.fetch.others import Meeting, Others
from everstep.restore.fetch.peers import Fetch, Fetched, Lent
from everstep.restore.fetch.picking import with_files
from everstep.restore.fetch.rank_copies import Copies
from everstep.restore.fetch.ranks import offer_of, open_on_disk
from everstep.restore.fetch.sources import Place, Places
from everstep.restore.fetch.told import unproven_in
from everstep.restore.load.load import LoadedBase, sections_left_out
from everstep.restore.load.restored import OTHER_STATE
from everstep.restore.start.job_outcome import Outcome, record_of, refused, resumed_of
from everstep.restore.start.log_exchange import LogExchange
from everstep.restore.start.missing_sections import missing_sections, refuse_log_loss
from everstep.restore.start.rank_loader import Compares, Load
from everstep.restore.start.rank_log import RankLog
from everstep.restore.start.resume import Resumed
from everstep.run.candidates import Skipped, candidates
from everstep.run.scan import BaseFound, TimelineCache, scan_run
from everstep.seams import Seams
from everstep.seams.failpoints import failpoint
from everstep.state.ranks.rank_share import SkippedState
from everstep.state.training_state import State
from everstep.tiers.disk import storage_errors

__all__ = ["Load", "Meeting", "resume_all_ranks"]

_log = logging.getLogger("everstep")
_T = TypeVar("_T")
_LOOKS_MAX = 8


class _Start:
    """One rank's part in an agreement, carried out."""

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        meeting: Meeting,
        held: HeldBase | None,
        load: Load | None,
        copies: Copies,
        log: RankLog | None,
        *,
        step: int | None,
        needs: Needs,
        apart: Apart,
        timeout_s: float,
        compare: Compares | None,
    ) -> None:
        self._copies = copies
        self._log = log
        self._compare = compare
        self.ahead = CopiesAhead(run, meeting.rank, needs, apart)
        self.ready: Callable[[], None] = lambda: None
        self.doubts: Callable[[LoadedBase | None], tuple[str, ...]] = lambda loaded: ()
        self.parts: Collection[str] = ()  # of the state
        self.fewer = ""  # why a newer base with fewer parts was passed over
        self._step = step
        self._filesystem = seams.filesystem
        self._clock = seams.clock
        self._run = run
        self._meeting = meeting
        self._held = held
        self._load = load
        self._needs = needs
        self._timelines = TimelineCache()
        self.fetched: list[Fetched] = []
        self.outcome = Outcome()
        self.skipped: list[Skipped] = []
        self.went: Go | None = None
        self._refused: Refuse | None = None
        self.left_out: tuple[tuple[str, str], ...] = ()  # of what was compared last
        self._looked: Offer | None = None
        self._stands: tuple[Manifest, Outcome] | None = None  # restored, and nothing replayed
        self._why: dict[str, None] = {}  # files could not be used
        self._relaid = False  # logs of as many ranks as now are looked at as those of others
        self._partly = False  # what manifests list and is not there is offered, too
        self._only: BaseId | None = None  # all will choose it, unless something is damaged
        self._in_order = True  # nothing was, so far
        self._agreement = Agreement(
            meeting.rank,
            meeting.world,
            record_of=self._record_of,
            step=step,
            needs=needs,
            fetch=False,
            trained=meeting.trained,
            compares=compare is not None,
            silent_s=timeout_s,
        )
        self._others = Others(meeting, seams.clock, run, timeout_s=timeout_s)
        part = (lambda rank, timeline, step: b"") if log is None else log.part
        self._post = LogExchange(self._others, seams.clock, part)

    def agree(self) -> Go:
        """Returns when all ranks go on.

        Raises:
            RecoveryError: there is nothing that all can restore, or not what was asked for.
            MismatchError: ranks would leave out different parts of what they have in common.
            DeadlineError: a rank says nothing.
        """
        self._absorb(self._agreement.start())
        while waits_for := self._agreement.waits_for:
            self._others.doing = f"waits for rank(s) {', '.join(map(str, waits_for))}"
            if (heard := self._others.listen()) is not None:
                self._absorb(self._agreement.heard(*heard))
            self._absorb(self._agreement.tick(self._clock.monotonic_s()))
            self._others.is_alive()
            self._others.check(self._agreement.waits_for)
        if self._refused is not None:
            about = self._refused, self._why, self.left_out
            raise refused(*about, rank=self._meeting.rank, run=self._run)
        assert self.went is not None
        return self.went

    def leave(self, error: BaseException) -> None:
        """Tells the other ranks that this one has failed, unless all of them were refused."""
        if self._refused is None:
            self._others.leave(error)

    def _absorb(self, outs: Iterable[AgreementOut]) -> None:
        todo = list(outs)
        while todo:
            out = todo.pop(0)
            if isinstance(out, Tell):
                self._others.tell(out.rank, out.message)
            elif isinstance(out, TakeInventory):
                self._others.begin("looks at what it can read")
                self._relaid = out.relaid
                self._partly = out.partly
                self._only = self._only if self._in_order else None
                self._in_order = False  # if ranks are asked again, what was chosen did not do
                offer = self._looked or self._offer()
                self._looked = None
                todo += self._agreement.done(InventorySeen(offer))
            elif isinstance(out, Compare):
                self._others.begin(f"compares {out.choice.base} with its state")
                todo += self._agreement.done(self._compared(out.choice))
            elif isinstance(out, Restore):
                self._others.begin(f"restores {out.choice.base or 'nothing'}")
                found = self._restore(out.choice)
                self.outcome.doubt(self.doubts(self.outcome.loaded))
                todo += self._agreement.done(self.outcome.audited(found, out.choice.end))
            elif isinstance(out, OpenTimeline):
                self._others.begin(f"opens timeline {out.record.timeline}")
                self.ready()
                failpoint("resume.before_timeline")
                todo += self._agreement.done(Opened(self._open(out)))
                self._in_order = True
            elif isinstance(out, Go):
                self.went = out
            elif isinstance(out, Refuse):
                self._refused = out
            else:
                assert isinstance(out, IsSilent)  # judged by what was heard, see Others.check

    def _open(self, out: OpenTimeline) -> bool:
        """Opens a timeline, in the copies first, as a run of one rank does (``adr/019``)."""
        leads = self._meeting.rank == COORDINATOR
        if leads:
            self._copies.prepare(out.choice)
        unique = f"{self._meeting.session}-{self._meeting.rank}"
        ours = self._copies.open_timeline(out.record, leads=leads) and open_on_disk(
            self._filesystem, self._run, out.record, out.choice, unique
        )
        if ours and leads and out.choice.base is not None:
            self._copies.take_back(out.choice.base)
        return ours

    def _offer(self, *, lossy: bool = True) -> Offer:
        """What this rank can read. Keepers may still withdraw what the start before has left: where
        something that was listed is gone a moment later, everything is looked at once more."""
        for _ in range(_LOOKS_MAX - 1):
            with contextlib.suppress(FileNotFoundError):
                return self._look(lossy)
        return self._look(lossy)

    def _look(self, lossy: bool) -> Offer:
        inventory = scan_run(self._filesystem, self._run, self._timelines)
        self.outcome.inventory = inventory
        rank = self._meeting.rank
        disk = self._meeting.disks[rank]
        held = []
        if self._held is not None and self._held.id.timeline in inventory.timelines:
            held.append((self._held.marker, "memory"))
        mine = [one for one in self.fetched if one.is_of(inventory)]
        held += [(one.held.marker, one.tier) for one in mine]
        offer = offer_of(self._filesystem, inventory, rank, disk, held, partly=self._partly)
        named = {one.record.timeline: one.record for one in mine}
        named |= {} if self._log is None else self._log.timelines(inventory)
        offer = self._copies.add_to(replace(offer, timelines={**offer.timelines, **named}))
        if self._log is None:
            return offer
        near = [other for other, name in enumerate(self._meeting.disks) if name == disk]
        about = inventory, self._copies.logs, offer.bases
        others = self._log.others(*about, near=near, relaid=self._relaid)
        return replace(offer, log=self._runs(offer, self._only, lossy=lossy), others=others)

    def _runs(self, offer: Offer, only: BaseId | None, *, lossy: bool = True) -> tuple[LogRun, ...]:
        """What there is of this rank's log; of copies, where a base is named, what it needs."""
        assert self._log is not None
        assert self.outcome.inventory is not None
        bases = offer.bases if only is None else (only,)
        about = self.outcome.inventory, self._copies.logs, bases
        return self._log.runs(*about, lossy=lossy, read_from=self.ahead.log_files)

    def fetch(self, fetch: Fetch) -> None:
        """What other nodes hold, and is needed here, comes here: also steps of which copies have
        lossy gradients, as a peer may have them whole. What there is of those is looked at
        meanwhile, behind the base that will be chosen: as all ranks read the same copies, and steps
        behind an older base are steps behind that one, too, others are of use where it turns out to
        be damaged. Where nothing comes, the looks taken are the first of the agreement, too."""
        offer = self._offer(lossy=False)
        looks: list[Future[tuple[LogRun, ...]]] = []

        def left() -> tuple[Offer, Covers]:
            self._partly = True
            found = self._offer(lossy=False)
            self._partly = False  # until the ranks agree on that
            inventory = self.outcome.inventory
            return found, covered(self._filesystem, () if inventory is None else inventory.bases)

        with ThreadPoolExecutor(1, "everstep-look") as thread:

            def meanwhile(choice: Choice) -> None:
                self._only = choice.base
                if self._load is not None:
                    self.ahead.begin(choice, self._copies.places)
                if self._log is not None:
                    self.ahead.begin_log(self._log.in_copies(choice))
                    looks.append(thread.submit(self._runs, offer, self._only))

            known = self.outcome.inventory
            brought = fetch(offer, meanwhile, Lent(unproven_in(known, self._held), left))
        if brought.proven is not None and self._held is not None:
            brought.bases.append(Fetched(self._held, brought.proven, "memory"))
            self._held = None
        if not brought.bases and not brought.logs and self._log is None:
            self._looked = offer
        elif not brought.bases and not brought.logs and looks:
            with contextlib.suppress(FileNotFoundError):  # gone a moment later: once more, then
                self._looked = replace(offer, log=looks[-1].result())
        self.fetched += brought.bases
        if self._log is not None:
            self._log.lent = brought.logs

    def _restore(self, choice: Choice) -> Restored:
        """Loads what was chosen, and replays this rank's log behind it."""
        damaged = self._load_base(choice)
        loaded = self.outcome.loaded
        if damaged or loaded is None or choice.reach is None or self._log is None:
            return Restored(damaged, exact=self.outcome.exact, relaid=self._log_is_there(choice))
        redone = self._log.redo(choice, loaded, together=True, post=self._post)
        if redone.touched:
            self._stands = None
        if redone.spoilt is not None and not redone.sure:
            # Which step it is shows when they are redone one by one, on the base once more.
            damaged = self._load_base(choice)
            loaded = self.outcome.loaded
            if damaged or loaded is None:
                return Restored(damaged, exact=self.outcome.exact)
            redone = self._log.redo(choice, loaded, together=False, post=self._post)
            if redone.touched:
                self._stands = None
        if redone.relaid:
            return Restored(exact=self.outcome.exact, relaid=True)
        self.outcome.redone = redone
        self.skipped += [one for one in redone.skipped if one not in self.skipped]
        self.outcome.exact &= not redone.inexact and not redone.notes
        return Restored((), redone.spoilt, self.outcome.exact)

    def _log_is_there(self, choice: Choice) -> bool:
        """Whether this rank's log may be where its files came from: on another one's disk."""
        if self._relaid or choice.partly or choice.reach is not None or self._log is None:
            return False
        mine = choice.base, self._meeting.rank
        return any((one.held.id, one.held.marker.rank) == mine for one in self.fetched if one.disk)

    def _load_base(self, choice: Choice) -> tuple[tuple[int, Source], ...]:
        """Loads what was chosen, unless that stands; returns which files are damaged, and where."""
        stands = self._stands
        self._stands = None
        inventory = self.outcome.inventory
        self.outcome = Outcome(inventory=inventory)
        self.ahead.only(choice.base)
        if choice.base is None or choice.manifest is None:
            return ()
        if self._load is None:
            raise StateError(
                f"this run has bases, the newest of {choice.base}, and resume() was not called: "
                "training would start over unnoticed",
                path=self._run,
                hint="call ckpt.resume() before the loop (resume(step=0) starts from scratch)",
            )
        path = base_dir(self._run, choice.base.timeline, choice.base.step)
        base = BaseFound(choice.base, path, "committed", choice.manifest, None, ())
        places = self._places(choice, choice.manifest)
        if stands is not None and stands[0] == choice.manifest:
            self._stands = stands
            self.outcome = replace(stands[1], inventory=inventory)
            self._see_layout(choice, base, places)
            return ()
        start_s = self._clock.monotonic_s()

        def load(picked: Mapping[int, Place]) -> LoadedBase:
            nonlocal start_s
            assert self._load is not None
            start_s = self._clock.monotonic_s()
            about = base, picked, self._post.attend
            try:
                return self._load(*about, partly=choice.partly, timelines=choice.timelines)
            except MismatchError as error:
                self._pass_over(base, error)
                raise

        read = self._with_files(choice, choice.manifest, places, load)
        if read is None:
            return tuple(places.damaged)
        self._take(read[0], choice.manifest, read[1], start_s)
        self._see_layout(choice, base, places)
        return ()

    def _pass_over(self, base: BaseFound, cause: Exception | None = None) -> None:
        """Leave a base that lacks parts of the state which an older base has.

        Raises:
            FormatError: it does, so that the ranks choose the next base. A step that was asked for
                is not passed over.
        """
        if self._step is not None:
            return
        inventory = self.outcome.inventory
        older = () if inventory is None else candidates(inventory).ordered
        tried = [base, *(one for one in older if one.id < base.id)]
        if why := missing_sections(self._filesystem, tried, self.parts).get(base.id, ""):
            self.fewer = self.fewer or why
            raise FormatError(why) from cause

    def _with_files(
        self, choice: Choice, manifest: Manifest, places: Places, use: Callable[..., _T]
    ) -> tuple[_T, Mapping[int, Place]] | None:
        """See :func:`.picking.with_files`."""
        assert choice.base is not None
        rank = self._meeting.rank
        wanted = tuple(self._needs(rank, manifest))
        return with_files(
            places,
            (choice.partly and places.readable) or wanted,
            use,
            base=choice.base,
            rank=rank,
            run=self._run,
            failed=lambda why: self._why.update({why: None}),
        )

    def _compared(self, choice: Choice) -> Compared:
        """What would be left out. A log leads on from a whole state alone: where one is to be
        replayed, that is no choice."""
        assert choice.base is not None
        assert choice.manifest is not None
        assert self._compare is not None
        compare = self._compare
        id_ = choice.base
        path = base_dir(self._run, id_.timeline, id_.step)
        base = BaseFound(id_, path, "committed", choice.manifest, None, ())
        places = self._places(choice, choice.manifest)

        def use(picked: Mapping[int, Place]) -> SkippedState:
            self._pass_over(base)
            about = base, picked, self._post.attend
            return compare(*about, partly=choice.partly, timelines=choice.timelines)

        read = self._with_files(choice, choice.manifest, places, use)
        if read is None:
            return Compared(tuple(places.damaged))
        found = self.left_out = read[0].mismatches
        if self._step is None and choice.end is not None and choice.reach is not None:
            refuse_log_loss(sections_left_out(found), id_.step, choice.end.step, self._run)
        spoilt = None
        if found and choice.reach is not None and self._log is not None:
            spoilt = self._log.first_of(choice)
            one = Skipped(*spoilt, OTHER_STATE)
            self.skipped += [one] if one not in self.skipped else []
            self._why[f"step {spoilt[1]}: {OTHER_STATE} ({read[0].words[0]})"] = None
        return Compared((), spoilt, read[0].common, read[0].words)

    def _see_layout(self, choice: Choice, base: BaseFound, places: Places) -> None:
        """Who had what, where another layout has written the log: most starts need not know."""
        loaded = self.outcome.loaded
        if not choice.readers or loaded is None or loaded.layout is not None or self._log is None:
            return
        picked = places.pick(places.readable)
        self.outcome.loaded = self._log.with_layout(loaded, base, picked or {})

    def _take(
        self, loaded: LoadedBase, manifest: Manifest, picked: Mapping[int, Place], start_s: float
    ) -> None:
        """Notes what was restored, and from where."""
        load_s = self._clock.monotonic_s() - start_s
        inventory = self.outcome.inventory
        about = loaded, manifest, picked, self._meeting.rank
        self.outcome = Outcome.of(*about, load_s=load_s, inventory=inventory)
        self._stands = manifest, replace(self.outcome)

    def _places(self, choice: Choice, manifest: Manifest) -> Places:
        """Where this rank can read the files of each rank that wrote some."""
        found: dict[int, list[Place]] = {}
        for marker in manifest.markers:
            for source in choice.sources[marker.rank]:
                if source.rank == self._meeting.rank:
                    found.setdefault(marker.rank, []).extend(self._at(source, marker))
        return Places(found)

    def _at(self, source: Source, marker: Marker) -> list[Place]:
        if source.tier in VOLATILE_TIERS:
            held = [one.held for one in self.fetched if one.tier == source.tier]
            held += [self._held] if self._held and source.tier == "memory" else []
            return [Place(source, one) for one in held if one.marker == marker]
        if source.tier == "disk":
            return [Place(source, self._filesystem, self._meeting.disks[source.rank])]
        copies = [copy for copy in self._copies.places if copy.kind == source.tier]
        found = [(self.ahead.files(copy), copy.tier.url) for copy in copies]
        return [Place(source, files, url) for files, url in found]

    def _record_of(self, choice: Choice, number: int) -> TimelineRecord:
        exact = self.outcome.exact
        unix_s = self._clock.unix_s()
        return record_of(choice, number, self._meeting, exact=exact, unix_s=unix_s)


def _doubts(state: State, loaded: LoadedBase | None) -> tuple[str, ...]:
    """Return why the next step may differ from that of an uninterrupted training."""
    if loaded is None:
        return ()
    return state.buckets.settle(as_many=loaded.marker.world == state.ranks.world)


def resume_all_ranks(
    seams: Seams,
    run: PurePath,
    state: State,
    meeting: Meeting,
    held: HeldBase | None,
    load: Load | None,
    *,
    own: Sequence[Fetched] = (),
    step: int | None,
    needs: Needs,
    timeout_s: float,
    copies: Copies | None = None,
    log: RankLog | None = None,
    fetch: Fetch | None = None,
    apart: Apart = lambda number, manifest: True,
    ready: Callable[[], None] = lambda: None,
    compare: Compares | None = None,
) -> tuple[Resumed, Choice]:
    """Restores, on every rank, the newest step that all of them reach, by a base that all can read
    and the log of each of them, and opens a timeline.

    Args:
        held: what is in the memory of this rank's keeper.
        load: restores the state; None: there may be nothing to restore.
        own: bases of this rank that live in the memory of its keeper.
        step: restore a base of this step; 0 with no such base: start afresh.
        needs: which ranks' files a rank has to read.
        timeout_s: a rank that says nothing for so long is reported.
        copies: in other tiers, which every rank can read; None: there are none.
        log: of this rank; None: there is none.
        fetch: gets what this rank needs of copies in the memory of other nodes; None: there are
            none.
        apart: of what is read by several ranks of a node together nothing is read ahead.
        ready: returns when this rank's keeper is there; without one no timeline is opened.
        compare: where parts may be left out: says which; nothing is touched before all that have
            something in common leave out the same of it. None, on all ranks: nothing may be.

    Raises:
        RecoveryError: when there are bases and none can be used by all, or none of ``step``; or
            another rank has failed.
        MismatchError: when the chosen one is of another model, or ranks would leave out different
            parts of what they have in common.
        StateError: without ``load``, when there is something to restore.
        DeadlineError: a rank is silent.
    """
    copies = copies or Copies((), run)
    about = seams, run, meeting, held, load, copies, log
    limits: dict[str, Any] = {"apart": apart, "timeout_s": timeout_s, "compare": compare}
    start = _Start(*about, step=step, needs=needs, **limits)
    start.ready = ready
    start.parts = state.providers.keys()
    start.doubts = partial(_doubts, state)
    start.fetched += own
    try:
        with storage_errors("resume", run, rank=meeting.rank):
            if fetch is not None:
                start.fetch(fetch)
            go = start.agree()
    except BaseException as error:
        start.leave(error)
        raise
    finally:
        start.ahead.close()
    if go.choice.note and meeting.rank == COORDINATOR:  # the same on all of them
        _log.warning("%s", go.choice.note)
    skipped = (*start.skipped, *(() if log is None else log.skipped))
    fewer = (start.fewer,) if start.fewer else ()
    if fewer and meeting.rank == COORDINATOR:
        _log.warning("%s", start.fewer)
    resumed = resumed_of(go, start.outcome, state, skipped, (*copies.problems, *fewer))
    return (resumed if log is None else log.with_lent(resumed, go.choice)), go.choice
