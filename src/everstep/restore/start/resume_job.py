"""Resume of several ranks: all restore the same step, and open one timeline.

Carries out an :class:`~everstep.commit.job.agreement.Agreement` on this rank: :mod:`.rank_sources`
takes the inventory and opens the timeline, :mod:`.rank_restore` compares and restores. A process
that continues alone after several ranks is a job of one rank, without messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from everstep.commit.job import COORDINATOR, Choice, Needs, Send
from everstep.commit.job.agreement import (
    Agreement,
    AgreementEvent,
    AgreementOut,
    Compare,
    Demand,
    Go,
    InventorySeen,
    Opened,
    OpenTimeline,
    RanksSilent,
    Refuse,
    Restore,
    TakeInventory,
)
from everstep.errors import MismatchError, RecoveryError
from everstep.format import TimelineRecord
from everstep.restore.fetch import Copies, FetchCopies, Meeting, StartChannel
from everstep.restore.fetch.node_reads import NodeReads
from everstep.restore.load import LoadedBase, nonfinite_notice
from everstep.restore.start.rank_log import LogExchange, RankLog
from everstep.restore.start.rank_restore import RankRestore
from everstep.restore.start.rank_sources import RankSources
from everstep.restore.start.report import ELSEWHERE, Resumed, ResumeRequest, why_inexact
from everstep.run import Skipped
from everstep.seams import failpoint
from everstep.seams.fingerprint import fingerprint, merge_fingerprints, process_name
from everstep.tiers import storage_errors

_log = logging.getLogger("everstep")

_HINT_UNLIKE = (
    "build the state that these ranks share as it was saved, the same on all of them; parameters "
    "that are new on one rank (a head, say) can be added to the optimizer after "
    "resume(strict=False), with add_param_group()"
)


class _RankStart:
    """One rank's side of an agreement; arguments as of :func:`resume_all_ranks`."""

    def __init__(
        self,
        request: ResumeRequest,
        meeting: Meeting,
        needs: Needs,
        copies: Copies,
        log: RankLog | None,
        node: NodeReads | None,
        ready: Callable[[], None],
    ) -> None:
        clock = request.seams.clock
        self.sources = RankSources(request, meeting, copies, log, needs, node)
        self.others = StartChannel(meeting, clock, request.run, timeout_s=request.timeout_s)
        self._exchange = LogExchange(self.others, clock, None if log is None else log.encoded)
        self._restore = RankRestore(request, self.sources, node, log, self._exchange)
        self._request = request
        self._meeting = meeting
        self._copies = copies
        self._log = log
        self._ready = ready
        self._went: Go | None = None
        self._refused: Refuse | None = None
        self._agreement = Agreement(
            meeting.rank,
            meeting.world,
            Demand(
                step=request.step,
                needs=needs,
                fetch=False,
                trained=request.trained,
                compares=not meeting.strict,
            ),
            record_of=self._record_of,
            silent_s=request.timeout_s,
        )

    def agree(self) -> Go:
        """Run the agreement; return when all ranks go on.

        Raises:
            RecoveryError: there is no state that all ranks can restore, or not the requested one.
            MismatchError: ranks would leave out different sections of the state that they share.
            DeadlineError: a rank does not respond.
        """
        self._carry_out(self._agreement.start())
        while waits_for := self._agreement.waits_for:
            self.others.doing = f"waits for rank(s) {', '.join(map(str, waits_for))}"
            message = self.others.listen()
            # Other ranks may still replay, with records from here.
            self._exchange.answer()
            if message is not None:
                self._carry_out(self._agreement.receive(*message))
            self._carry_out(self._agreement.tick(self._request.seams.clock.monotonic_s()))
            self.others.is_alive()
            self.others.check(self._agreement.waits_for)
        if self._refused is not None:
            raise self._refusal_error(self._refused)
        assert self._went is not None
        return self._went

    def leave(self, error: BaseException) -> None:
        """Report to the other ranks that this one has failed, unless all of them were refused."""
        if self._refused is None:
            self.others.leave(error)

    def result(self, go: Go) -> Resumed:
        """Return the result of this rank, after all ranks agreed to go on."""
        choice = go.choice
        outcome = self._restore.outcome
        redone = outcome.redone
        loaded = outcome.loaded
        end = choice.end
        reach = choice.reach
        lsn = 0 if loaded is None else loaded.marker.lsn
        problems = self._problems(choice)
        if loaded is not None:
            loaded = replace(loaded, notes=(*loaded.notes, *redone.notes))
            problems += nonfinite_notice(self._request.state, end)
        return Resumed(
            go.timeline,
            choice.base,
            loaded,
            outcome.source,
            outcome.exact and go.exact,
            (
                *(Skipped(base.timeline, base.step, why) for base, why in choice.skipped),
                *self._restore.skipped,
                *(() if self._log is None else self._log.skipped),
            ),
            problems,
            step=0 if end is None else end.step,
            lsn=lsn if reach is None else reach.lsn,
            replayed=0 if reach is None else reach.count,
            inexact=self._why_inexact(go, loaded),
            audit=outcome.audit,
            load_s=outcome.load_s,
            replay_s=redone.replay_s,
            forks=tuple(r.fork_step for r in choice.timelines if r.parent is not None),
            own_exact=outcome.exact,
            by_offsets=bool(choice.readers),
        )

    def _problems(self, choice: Choice) -> tuple[str, ...]:
        passed_over = (self._restore.passed_over,) if self._restore.passed_over else ()
        note = (choice.note,) if choice.note else ()
        if self._meeting.rank == COORDINATOR:
            # The same on all ranks.
            for text in (*note, *passed_over):
                _log.warning("%s", text)
        damaged = (f"{path}: {why}" for path, why in self.sources.inventory.problems)
        return (*damaged, *self._copies.problems, *passed_over, *note)

    def _why_inexact(self, go: Go, loaded: LoadedBase | None) -> str:
        """Return why the state is not exact, on this rank or on another one; "" if it is."""
        outcome = self._restore.outcome
        if outcome.exact and not go.exact:
            return ELSEWHERE
        choice = go.choice
        markers = () if choice.manifest is None else choice.manifest.markers
        return why_inexact(outcome.redone.inexact, outcome.audit, loaded, choice.base, markers)

    def _carry_out(self, outs: Iterable[AgreementOut]) -> None:
        todo = list(outs)
        while todo:
            out = todo.pop(0)
            if isinstance(out, Send):
                self.others.tell(out.rank, out.message)
            elif isinstance(out, Go):
                self._went = out
            elif isinstance(out, Refuse):
                self._refused = out
            elif not isinstance(out, RanksSilent):  # those are reported by StartChannel.check
                todo += self._agreement.done(self._perform(out))

    def _perform(self, out: TakeInventory | Compare | Restore | OpenTimeline) -> AgreementEvent:
        """Perform an action, and return the event that answers it."""
        if isinstance(out, TakeInventory):
            self.others.begin("scans its bases and logs")
            return InventorySeen(self.sources.offer(out))
        if isinstance(out, Compare):
            self.others.begin(f"compares {out.choice.base} with its state")
            return self._restore.compare(out.choice)
        if isinstance(out, Restore):
            self.others.begin(f"restores {out.choice.base or 'nothing'}")
            return self._restore.restore(out.choice)
        self.others.begin(f"opens timeline {out.record.timeline}")
        # The keeper must be ready before the timeline exists: from then on older processes are
        # fenced off.
        self._ready()
        failpoint("resume.before_timeline")
        return Opened(self.sources.open(out))

    def _record_of(self, choice: Choice, number: int) -> TimelineRecord:
        """Return the record of the timeline that all ranks open."""
        assert choice.run is not None, "every disk has the record of the run by now"
        meeting = self._meeting
        # Only a replayed step needs its base named: there is no base of that step to fork from.
        base = None if choice.reach is None else choice.base
        # Of all ranks: where they differ, no replay of this timeline is claimed to be exact (I9).
        known = merge_fingerprints(meeting.fingerprints or (fingerprint(),))
        # Session and process make the bytes unique to this start: of two starts that open the same
        # number, exactly one finds its own record.
        return TimelineRecord(
            run=choice.run,
            timeline=number,
            parent=None if choice.end is None else choice.end.timeline,
            fork_step=0 if choice.end is None else choice.end.step,
            exact=self._restore.outcome.exact,
            world=meeting.world,
            fingerprint={**known, "session": meeting.session, "process": process_name()},
            created_unix_s=self._request.seams.clock.unix_s(),
            base=None if base is None else (base.timeline, base.step),
        )

    def _refusal_error(self, refuse: Refuse) -> RecoveryError | MismatchError:
        """Return the error to raise after all ranks agreed to restore nothing."""
        rank = self._meeting.rank
        run = self._request.run
        if refuse.unlike:
            left_out = self._restore.left_out
            return MismatchError(
                refuse.reason, mismatches=left_out, rank=rank, path=run, hint=_HINT_UNLIKE
            )
        text = "\n".join([refuse.reason, *(f"  {one}" for one in self._restore.unusable)])
        return RecoveryError(text, rank=rank, path=run)


def resume_all_ranks(
    request: ResumeRequest,
    meeting: Meeting,
    *,
    needs: Needs,
    copies: Copies | None = None,
    log: RankLog | None = None,
    node: NodeReads | None = None,
    fetch: FetchCopies | None = None,
    ready: Callable[[], None] = lambda: None,
) -> tuple[Resumed, Choice]:
    """Restore on every rank the newest step that all ranks can reach, and open a timeline.

    Each rank uses a base that all can read, and its own log.

    Args:
        needs: returns the ranks whose files a rank has to read.
        copies: copies in other tiers, readable by every rank; None: there are none.
        log: log of this rank; None: there is none.
        node: reads shared with other ranks of the node; None: each rank reads by itself.
        fetch: fetches copies from the memory of other nodes; None: there are none.
        ready: returns once this rank's keeper is ready; no timeline is opened before.

    Raises:
        RecoveryError: there are bases, and none can be used by all ranks, or none of the requested
            step; or another rank has failed.
        MismatchError: the chosen base belongs to another model, or ranks would leave out different
            sections of the state that they share.
        StateError: there is something to restore, and ``resume()`` was not called.
        DeadlineError: a rank does not respond.
    """
    copies = copies or Copies((), request.run)
    start = _RankStart(request, meeting, needs, copies, log, node, ready)
    try:
        with storage_errors("resume", request.run, rank=meeting.rank):
            if fetch is not None:
                start.sources.fetch(fetch, start.others)
            go = start.agree()
    except BaseException as error:
        # KeyboardInterrupt and SystemExit, too: the other ranks would otherwise wait until the
        # timeout.
        start.leave(error)
        raise
    finally:
        start.sources.close()
    return start.result(go), go.choice
