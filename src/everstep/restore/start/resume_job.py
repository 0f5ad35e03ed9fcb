"""Resume of several ranks: all restore the same step, and open one timeline.

Carries out an :class:`~everstep.commit.job.agreement.Agreement` on this rank's disk, with a mailbox
to the :class:`~everstep.restore.fetch.start_channel.StartChannel`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import PurePath
from typing import TypeVar

from everstep.commit.job.actions import Send
from everstep.commit.job.agreement import (
    Agreement,
    AgreementOut,
    Compare,
    Compared,
    Go,
    InventorySeen,
    Opened,
    OpenTimeline,
    RanksSilent,
    Refuse,
    Restore,
    Restored,
    TakeInventory,
)
from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.job.offers import Choice, Needs, Offer, Source
from everstep.commit.lineage import BaseId
from everstep.commit.log_reach import LogRun
from everstep.commit.retention import VOLATILE_TIERS
from everstep.errors import FormatError, MismatchError, StateError
from everstep.format.names import base_dir
from everstep.format.records import Manifest, Marker, TimelineRecord
from everstep.restore.fetch.copy_inventory import unproven_marker
from everstep.restore.fetch.files_ahead import CopiesAhead, SoleReader
from everstep.restore.fetch.held import HeldBase
from everstep.restore.fetch.peers import FetchCopies, FetchedBase, OfferExtras
from everstep.restore.fetch.rank_copies import Copies
from everstep.restore.fetch.rank_offers import offer_of, open_on_disk
from everstep.restore.fetch.served_files import Coverage, coverage_on_disk
from everstep.restore.fetch.sources import Place, Places, read_from_places
from everstep.restore.fetch.start_channel import Meeting, StartChannel
from everstep.restore.load.load import LoadedBase, sections_left_out
from everstep.restore.load.restored import OTHER_STATE
from everstep.restore.start.job_outcome import Outcome, record_of, refusal_error, resumed_of
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
from everstep.tiers.durable_files import storage_errors

__all__ = ["Load", "Meeting", "resume_all_ranks"]

_log = logging.getLogger("everstep")
_T = TypeVar("_T")
_LOOKS_MAX = 8


class _JobStart:
    """One rank's side of an agreement."""

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        state: State,
        meeting: Meeting,
        held: HeldBase | None,
        load: Load | None,
        copies: Copies,
        log: RankLog | None,
        *,
        step: int | None,
        needs: Needs,
        apart: SoleReader,
        timeout_s: float,
        compare: Compares | None,
        ready: Callable[[], None],
    ) -> None:
        self._copies = copies
        self._log = log
        self._compare = compare
        self.ahead = CopiesAhead(run, meeting.rank, needs, apart)
        self._ready = ready
        self._state = state
        self.passed_over = ""  # message about a skipped newer base that lacks sections
        self._step = step
        self._filesystem = seams.filesystem
        self._clock = seams.clock
        self._run = run
        self._meeting = meeting
        self._held = held
        self._load = load
        self._needs = needs
        self._timelines = TimelineCache()
        self.fetched: list[FetchedBase] = []
        self.outcome = Outcome()
        self.skipped: list[Skipped] = []
        self.went: Go | None = None
        self._refused: Refuse | None = None
        self.left_out: tuple[tuple[str, str], ...] = ()  # differences found by the last comparison
        self._early_offer: Offer | None = None
        self._loaded_base: tuple[Manifest, Outcome] | None = (
            None  # loaded, with nothing replayed on it
        )
        self._why: dict[str, None] = {}  # files that could not be used
        self._other_layouts = False  # treat logs of as many ranks as now as those of another layout
        self._partly = False  # offer incomplete bases, too
        self._only: BaseId | None = (
            None  # the base that all will choose, unless something is damaged
        )
        self._in_order = True  # nothing was damaged so far
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
        self._others = StartChannel(meeting, seams.clock, run, timeout_s=timeout_s)
        part = (lambda rank, timeline, step: b"") if log is None else log.part
        self._exchange = LogExchange(self._others, seams.clock, part)

    def agree(self) -> Go:
        """Run the agreement; return when all ranks go on.

        Raises:
            RecoveryError: there is no state that all ranks can restore, or not the requested one.
            MismatchError: ranks would leave out different sections of the state that they share.
            DeadlineError: a rank does not respond.
        """
        self._carry_out(self._agreement.start())
        while waits_for := self._agreement.waits_for:
            self._others.doing = f"waits for rank(s) {', '.join(map(str, waits_for))}"
            if (message := self._others.listen()) is not None:
                self._carry_out(self._agreement.receive(*message))
            self._carry_out(self._agreement.tick(self._clock.monotonic_s()))
            self._others.is_alive()
            self._others.check(self._agreement.waits_for)
        if self._refused is not None:
            raise refusal_error(
                self._refused,
                self._why,
                self.left_out,
                rank=self._meeting.rank,
                run=self._run,
            )
        assert self.went is not None
        return self.went

    def leave(self, error: BaseException) -> None:
        """Report to the other ranks that this one has failed, unless all of them were refused."""
        if self._refused is None:
            self._others.leave(error)

    def _carry_out(self, outs: Iterable[AgreementOut]) -> None:
        todo = list(outs)
        while todo:
            out = todo.pop(0)
            if isinstance(out, Send):
                self._others.tell(out.rank, out.message)
            elif isinstance(out, TakeInventory):
                self._others.begin("scans its bases and logs")
                self._other_layouts = out.relaid
                self._partly = out.partly
                self._only = self._only if self._in_order else None
                self._in_order = False  # asked again, the previous choice has failed
                offer = self._early_offer or self._offer()
                self._early_offer = None
                todo += self._agreement.done(InventorySeen(offer))
            elif isinstance(out, Compare):
                self._others.begin(f"compares {out.choice.base} with its state")
                todo += self._agreement.done(self._compared(out.choice))
            elif isinstance(out, Restore):
                self._others.begin(f"restores {out.choice.base or 'nothing'}")
                found = self._restore(out.choice)
                self.outcome.doubt(_doubts(self._state, self.outcome.loaded))
                todo += self._agreement.done(self.outcome.audited(found, out.choice.end))
            elif isinstance(out, OpenTimeline):
                self._others.begin(f"opens timeline {out.record.timeline}")
                self._ready()
                # The keeper must be ready before the timeline exists: from then on older processes
                # are fenced off.
                failpoint("resume.before_timeline")
                todo += self._agreement.done(Opened(self._open(out)))
                self._in_order = True
            elif isinstance(out, Go):
                self.went = out
            elif isinstance(out, Refuse):
                self._refused = out
            else:
                assert isinstance(out, RanksSilent)  # reported by Others.check

    def _open(self, out: OpenTimeline) -> bool:
        """Open a timeline, in the copies first, as a run of one rank does (``adr/019``)."""
        leads = self._meeting.rank == COORDINATOR
        # The coordinator opens the timeline in the copies first. A copy with an older timeline
        # would let another process continue there.
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
        """Return the bases and logs that this rank can read.

        Keepers may still withdraw captures of the previous process. If a listed file disappears
        meanwhile, the scan is repeated.
        """
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
        others = self._log.others(
            inventory, self._copies.logs, offer.bases, near=near, relaid=self._other_layouts
        )
        return replace(offer, log=self._runs(offer, self._only, lossy=lossy), others=others)

    def _runs(self, offer: Offer, only: BaseId | None, *, lossy: bool = True) -> tuple[LogRun, ...]:
        """Return the runs of steps of this rank's log; of copies, only those after ``only`` if
        it is given."""
        assert self._log is not None
        assert self.outcome.inventory is not None
        bases = offer.bases if only is None else (only,)
        return self._log.runs(
            self.outcome.inventory,
            self._copies.logs,
            bases,
            lossy=lossy,
            read_from=self.ahead.log_files,
        )

    def fetch(self, fetch: FetchCopies) -> None:
        """Fetch bases and log records that this rank needs from other nodes.

        Records of which copies have only lossy versions are fetched as well, since a peer may have
        the exact ones. Meanwhile the log in copies is scanned after the base that will be chosen:
        all ranks read the same copies, so other steps matter only if that base is damaged. If
        nothing was fetched, the agreement uses this scan.
        """
        offer = self._offer(lossy=False)
        looks: list[Future[tuple[LogRun, ...]]] = []

        def left() -> tuple[Offer, Coverage]:
            self._partly = True
            found = self._offer(lossy=False)
            self._partly = False  # not offered before the ranks agree on it
            inventory = self.outcome.inventory
            return found, coverage_on_disk(
                self._filesystem, () if inventory is None else inventory.bases
            )

        with ThreadPoolExecutor(1, "everstep-look") as thread:

            def meanwhile(choice: Choice) -> None:
                self._only = choice.base
                if self._load is not None:
                    self.ahead.begin(choice, self._copies.places)
                if self._log is not None:
                    self.ahead.begin_log(self._log.in_copies(choice))
                    looks.append(thread.submit(self._runs, offer, self._only))

            known = self.outcome.inventory
            brought = fetch(offer, meanwhile, OfferExtras(unproven_marker(known, self._held), left))
        if brought.proven is not None and self._held is not None:
            brought.bases.append(FetchedBase(self._held, brought.proven, "memory"))
            self._held = None
        if not brought.bases and not brought.logs and self._log is None:
            self._early_offer = offer
        elif not brought.bases and not brought.logs and looks:
            with contextlib.suppress(FileNotFoundError):  # a file disappeared: scan again later
                self._early_offer = replace(offer, log=looks[-1].result())
        self.fetched += brought.bases
        if self._log is not None:
            self._log.lent = brought.logs

    def _restore(self, choice: Choice) -> Restored:
        """Load the chosen base, and replay this rank's log on it."""
        damaged = self._load_base(choice)
        loaded = self.outcome.loaded
        if damaged or loaded is None or choice.reach is None or self._log is None:
            return Restored(
                damaged, exact=self.outcome.exact, relaid=self._log_may_be_elsewhere(choice)
            )
        redone = self._log.redo(choice, loaded, together=True, exchange=self._exchange)
        if redone.touched:
            self._loaded_base = None
        if redone.unusable is not None and not redone.sure:
            # Load the base again, and replay step by step to find the failing step.
            damaged = self._load_base(choice)
            loaded = self.outcome.loaded
            if damaged or loaded is None:
                return Restored(damaged, exact=self.outcome.exact)
            redone = self._log.redo(choice, loaded, together=False, exchange=self._exchange)
            if redone.touched:
                self._loaded_base = None
        if redone.relaid:
            return Restored(exact=self.outcome.exact, relaid=True)
        self.outcome.redone = redone
        self.skipped += [one for one in redone.skipped if one not in self.skipped]
        self.outcome.exact &= not redone.inexact and not redone.notes
        return Restored((), redone.unusable, self.outcome.exact)

    def _log_may_be_elsewhere(self, choice: Choice) -> bool:
        """Return True if this rank's log may be on the disk of another rank, as its files were."""
        if self._other_layouts or choice.partly or choice.reach is not None or self._log is None:
            return False
        mine = choice.base, self._meeting.rank
        return any((one.held.id, one.held.marker.rank) == mine for one in self.fetched if one.disk)

    def _load_base(self, choice: Choice) -> tuple[tuple[int, Source], ...]:
        """Load the chosen base, unless it is loaded already; return the damaged files and their
        sources."""
        loaded_base = self._loaded_base
        self._loaded_base = None
        inventory = self.outcome.inventory
        self.outcome = Outcome(inventory=inventory)
        self.ahead.only(choice.base)
        if choice.base is None or choice.manifest is None:
            return ()
        if self._load is None:
            raise StateError(
                f"this run has bases, the newest of {choice.base}, and resume() was not called: "
                "training would silently start over",
                path=self._run,
                hint="call ckpt.resume() before the loop (resume(step=0) starts from scratch)",
            )
        path = base_dir(self._run, choice.base.timeline, choice.base.step)
        base = BaseFound(choice.base, path, "committed", choice.manifest, None, ())
        places = self._places(choice, choice.manifest)
        if loaded_base is not None and loaded_base[0] == choice.manifest:
            self._loaded_base = loaded_base
            self.outcome = replace(loaded_base[1], inventory=inventory)
            self._add_layout(choice, base, places)
            return ()
        start_s = self._clock.monotonic_s()

        def load(picked: Mapping[int, Place]) -> LoadedBase:
            nonlocal start_s
            assert self._load is not None
            start_s = self._clock.monotonic_s()
            try:
                return self._load(
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
        self._note_loaded(read[0], choice.manifest, read[1], start_s)
        self._add_layout(choice, base, places)
        return ()

    def _pass_over(self, base: BaseFound, cause: Exception | None = None) -> None:
        """Skip a base that lacks sections of the state which an older base has.

        Raises:
            FormatError: it does, so the ranks choose the next base. An explicitly requested step is
                not skipped.
        """
        if self._step is not None:
            return
        inventory = self.outcome.inventory
        older = () if inventory is None else candidates(inventory).ordered
        tried = [base, *(one for one in older if one.id < base.id)]
        if why := missing_sections(self._filesystem, tried, self._state.providers.keys()).get(
            base.id, ""
        ):
            self.passed_over = self.passed_over or why
            raise FormatError(why) from cause

    def _with_files(
        self, choice: Choice, manifest: Manifest, places: Places, use: Callable[..., _T]
    ) -> tuple[_T, Mapping[int, Place]] | None:
        """Call ``use`` with the files of a base; see :func:`.picking.with_files`."""
        assert choice.base is not None
        rank = self._meeting.rank
        wanted = tuple(self._needs(rank, manifest))
        return read_from_places(
            places,
            (choice.partly and places.readable) or wanted,
            use,
            base=choice.base,
            rank=rank,
            run=self._run,
            failed=lambda why: self._why.update({why: None}),
        )

    def _compared(self, choice: Choice) -> Compared:
        """Return the state that would be left out.

        A log can only be replayed on a complete state, so a choice that needs the log is rejected
        if anything is left out.
        """
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
            return compare(
                base,
                picked,
                self._exchange.serve,
                partly=choice.partly,
                timelines=choice.timelines,
            )

        read = self._with_files(choice, choice.manifest, places, use)
        if read is None:
            return Compared(tuple(places.damaged))
        found = self.left_out = read[0].mismatches
        if self._step is None and choice.end is not None and choice.reach is not None:
            refuse_log_loss(sections_left_out(found), id_.step, choice.end.step, self._run)
        unusable = None
        if found and choice.reach is not None and self._log is not None:
            unusable = self._log.first_of(choice)
            one = Skipped(*unusable, OTHER_STATE)
            self.skipped += [one] if one not in self.skipped else []
            self._why[f"step {unusable[1]}: {OTHER_STATE} ({read[0].words[0]})"] = None
        return Compared((), unusable, read[0].common, read[0].words)

    def _add_layout(self, choice: Choice, base: BaseFound, places: Places) -> None:
        """Read the saved layout if another layout wrote the log; most starts do not need it."""
        loaded = self.outcome.loaded
        if not choice.readers or loaded is None or loaded.layout is not None or self._log is None:
            return
        picked = places.pick(places.readable)
        self.outcome.loaded = self._log.with_layout(loaded, base, picked or {})

    def _note_loaded(
        self, loaded: LoadedBase, manifest: Manifest, picked: Mapping[int, Place], start_s: float
    ) -> None:
        """Record the restored base and its sources."""
        load_s = self._clock.monotonic_s() - start_s
        inventory = self.outcome.inventory
        self.outcome = Outcome.of(
            loaded, manifest, picked, self._meeting.rank, load_s=load_s, inventory=inventory
        )
        self._loaded_base = manifest, replace(self.outcome)

    def _places(self, choice: Choice, manifest: Manifest) -> Places:
        """Return the locations where this rank can read the files of each rank."""
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
    own: Sequence[FetchedBase] = (),
    step: int | None,
    needs: Needs,
    timeout_s: float,
    copies: Copies | None = None,
    log: RankLog | None = None,
    fetch: FetchCopies | None = None,
    apart: SoleReader = lambda number, manifest: True,
    ready: Callable[[], None] = lambda: None,
    compare: Compares | None = None,
) -> tuple[Resumed, Choice]:
    """Restore on every rank the newest step that all ranks can reach, and open a timeline.

    Each rank uses a base that all can read, and its own log.

    Args:
        held: base in the memory of this rank's keeper.
        load: restores the state; None: there may be nothing to restore.
        own: bases of this rank that are only in the memory of its keeper.
        step: restore a base of this step; 0 without such a base: start afresh.
        needs: returns the ranks whose files a rank has to read.
        timeout_s: seconds without a message after which a rank is reported.
        copies: copies in other tiers, readable by every rank; None: there are none.
        log: log of this rank; None: there is none.
        fetch: fetches copies from the memory of other nodes; None: there are none.
        apart: returns False for bases that several ranks of a node read together; these are not
            read ahead.
        ready: returns once this rank's keeper is ready; no timeline is opened before.
        compare: returns the state that would be left out, if that is allowed. Nothing is modified
            before all ranks that share a section leave out the same of it. None on all ranks:
            nothing may be left out.

    Raises:
        RecoveryError: there are bases, and none can be used by all ranks, or none of ``step``; or
            another rank has failed.
        MismatchError: the chosen base belongs to another model, or ranks would leave out different
            sections of the state that they share.
        StateError: without ``load``, if there is something to restore.
        DeadlineError: a rank does not respond.
    """
    copies = copies or Copies((), run)
    start = _JobStart(
        seams,
        run,
        state,
        meeting,
        held,
        load,
        copies,
        log,
        step=step,
        needs=needs,
        apart=apart,
        timeout_s=timeout_s,
        compare=compare,
        ready=ready,
    )
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
    if go.choice.note and meeting.rank == COORDINATOR:  # the same on all ranks
        _log.warning("%s", go.choice.note)
    skipped = (*start.skipped, *(() if log is None else log.skipped))
    passed_over = (start.passed_over,) if start.passed_over else ()
    if passed_over and meeting.rank == COORDINATOR:
        _log.warning("%s", start.passed_over)
    resumed = resumed_of(go, start.outcome, state, skipped, (*copies.problems, *passed_over))
    return (resumed if log is None else log.with_lent(resumed, go.choice)), go.choice
