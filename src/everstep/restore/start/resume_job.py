"""Resume of several ranks: all restore the same step, and open one timeline.

Carries out an :class:`~everstep.commit.job.agreement.Agreement` on this rank: :mod:`.rank_sources`
takes the inventory and opens the timeline, :mod:`.rank_restore` compares and restores. A process
that continues alone after several ranks is a job of one rank, without messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

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
from everstep.format import TimelineRecord
from everstep.restore.fetch import Copies, FetchCopies, Meeting, StartChannel
from everstep.restore.fetch.node_reads import NodeReads
from everstep.restore.start.job_outcome import record_of, refusal_error, resumed_of
from everstep.restore.start.rank_loader import RankLoader
from everstep.restore.start.rank_log import LogExchange, RankLog
from everstep.restore.start.rank_restore import RankRestore
from everstep.restore.start.rank_sources import RankSources
from everstep.restore.start.report import Resumed, ResumeRequest
from everstep.seams import failpoint
from everstep.tiers import storage_errors

_log = logging.getLogger("everstep")


class _RankStart:
    """One rank's side of an agreement.

    Args:
        ready: returns once this rank's keeper is ready.
    """

    def __init__(
        self,
        request: ResumeRequest,
        meeting: Meeting,
        others: StartChannel,
        exchange: LogExchange,
        sources: RankSources,
        restore: RankRestore,
        ready: Callable[[], None],
    ) -> None:
        self._request = request
        self._meeting = meeting
        self._others = others
        self._exchange = exchange
        self._sources = sources
        self._restore = restore
        self._ready = ready
        self._went: Go | None = None
        self._refused: Refuse | None = None
        self._agreement = Agreement(
            meeting.rank,
            meeting.world,
            Demand(
                step=request.step,
                needs=sources.needs,
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
            self._others.doing = f"waits for rank(s) {', '.join(map(str, waits_for))}"
            message = self._others.listen()
            # Other ranks may still replay, with records from here.
            self._exchange.answer()
            if message is not None:
                self._carry_out(self._agreement.receive(*message))
            self._carry_out(self._agreement.tick(self._request.seams.clock.monotonic_s()))
            self._others.is_alive()
            self._others.check(self._agreement.waits_for)
        if self._refused is not None:
            raise refusal_error(
                self._refused,
                self._restore.unusable,
                self._restore.left_out,
                rank=self._meeting.rank,
                run=self._request.run,
            )
        assert self._went is not None
        return self._went

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
            elif isinstance(out, Go):
                self._went = out
            elif isinstance(out, Refuse):
                self._refused = out
            elif not isinstance(out, RanksSilent):  # those are reported by StartChannel.check
                todo += self._agreement.done(self._perform(out))

    def _perform(self, out: TakeInventory | Compare | Restore | OpenTimeline) -> AgreementEvent:
        """Perform an action, and return the event that answers it."""
        if isinstance(out, TakeInventory):
            self._others.begin("scans its bases and logs")
            return InventorySeen(self._sources.offer(out))
        if isinstance(out, Compare):
            self._others.begin(f"compares {out.choice.base} with its state")
            return self._restore.compare(out.choice)
        if isinstance(out, Restore):
            self._others.begin(f"restores {out.choice.base or 'nothing'}")
            return self._restore.restore(out.choice)
        self._others.begin(f"opens timeline {out.record.timeline}")
        # The keeper must be ready before the timeline exists: from then on older processes are
        # fenced off.
        self._ready()
        failpoint("resume.before_timeline")
        return Opened(self._sources.open(out))

    def _record_of(self, choice: Choice, number: int) -> TimelineRecord:
        return record_of(
            choice,
            number,
            self._meeting,
            exact=self._restore.outcome.exact,
            unix_s=self._request.seams.clock.unix_s(),
        )


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
    clock = request.seams.clock
    copies = copies or Copies((), request.run)
    loader = RankLoader(request, node)
    sources = RankSources(request, meeting, copies, log, needs, node)
    others = StartChannel(meeting, clock, request.run, timeout_s=request.timeout_s)
    exchange = LogExchange(others, clock, None if log is None else log.encoded)
    restore = RankRestore(request, sources, loader, log, exchange)
    start = _RankStart(request, meeting, others, exchange, sources, restore, ready)
    try:
        with storage_errors("resume", request.run, rank=meeting.rank):
            if fetch is not None:
                sources.fetch(fetch, others)
            go = start.agree()
    except BaseException as error:
        # KeyboardInterrupt and SystemExit, too: the other ranks would otherwise wait until the
        # timeout.
        start.leave(error)
        raise
    finally:
        sources.close()
    skipped = (*restore.skipped, *(() if log is None else log.skipped))
    passed_over = (restore.passed_over,) if restore.passed_over else ()
    if meeting.rank == COORDINATOR:
        # The same on all ranks.
        for note in filter(None, (go.choice.note, *passed_over)):
            _log.warning("%s", note)
    problems = (*copies.problems, *passed_over)
    inventory = sources.inventory
    resumed = resumed_of(go, restore.outcome, inventory, request.state, skipped, problems)
    return (resumed if log is None else log.with_lent(resumed, go.choice)), go.choice
