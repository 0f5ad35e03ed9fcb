"""Resuming of several ranks: all restore the same base, and open one timeline.

Drives an :class:`~everstep.commit.agreement.Agreement` over a mailbox and this rank's disk. A rank
that says nothing for too long is named; one that is loading says so while it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePath

from everstep.commit.agreement import (
    Agreement,
    AgreementOut,
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
from everstep.commit.cluster import COORDINATOR
from everstep.commit.messages import (
    Answer,
    Command,
    Envelope,
    Message,
    accept,
    encode_message,
)
from everstep.commit.offers import Choice, Needs, Offer, Source
from everstep.errors import (
    DamageError,
    DeadlineError,
    FormatError,
    RecoveryError,
    StateError,
)
from everstep.format.names import base_dir
from everstep.format.records import Manifest, TimelineRecord
from everstep.recover.decide import Skipped
from everstep.recover.held import HeldBase
from everstep.recover.load import LoadedBase
from everstep.recover.nonfinite import nonfinite_parameter
from everstep.recover.ranks import offer_of, open_on_disk
from everstep.recover.resume import Resumed, not_finite
from everstep.recover.scan import BaseFound, Inventory, scan_run
from everstep.seams import Seams
from everstep.seams.failpoints import failpoint
from everstep.seams.fingerprint import fingerprint
from everstep.seams.mailbox import Mailbox
from everstep.state.image import State
from everstep.tiers.disk import storage_errors

__all__ = ["Load", "Meeting", "resume_together"]

_log = logging.getLogger("everstep")
_TICK_S = 0.1
_ALIVE_EVERY_S = 1.0

Load = Callable[[BaseFound, dict[int, HeldBase], Callable[[], None]], LoadedBase]
"""Restores this rank's state from a base: from memory where it is held, else from disk. Calls the
last argument every now and then."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """All ranks at one start of their job, as one of them sees it.

    Attributes:
        session: names the start; no other has the same.
        disks: by rank: a name of the disk that it writes to.
        mailbox: to the other ranks' training processes.
    """

    session: str
    rank: int
    disks: tuple[str, ...]
    mailbox: Mailbox

    @property
    def world(self) -> int:
        return len(self.disks)


@dataclass(slots=True)
class _Outcome:
    """What has become of the live state."""

    loaded: LoadedBase | None = None
    source: str = "fresh"
    exact: bool = True
    load_s: float = 0.0
    inventory: Inventory | None = None


class _Start:
    """One rank's part in an agreement, carried out."""

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        meeting: Meeting,
        held: HeldBase | None,
        load: Load | None,
        *,
        step: int | None,
        needs: Needs,
        timeout_s: float,
    ) -> None:
        self._filesystem, self._clock, self._run = seams.filesystem, seams.clock, run
        self._meeting, self._held, self._load = meeting, held, load
        self._timeout_s = timeout_s
        self._needs = needs
        self.outcome = _Outcome()
        self.went: Go | None = None
        self._refused: str | None = None
        self._agreement = Agreement(
            meeting.rank,
            meeting.world,
            record_of=self._record_of,
            step=step,
            needs=needs,
            fetch=False,
            silent_s=timeout_s,
        )
        now_s = self._clock.monotonic_s()
        self._heard_s = dict.fromkeys(range(meeting.world), now_s)
        self._said_s = now_s

    def agree(self) -> Go:
        """Returns when all ranks go on.

        Raises:
            RecoveryError: there is nothing that all can restore, or not what was asked for.
            DeadlineError: a rank says nothing.
        """
        self._absorb(self._agreement.start())
        while self._agreement.waits_for:
            data = self._meeting.mailbox.receive(_TICK_S)
            if data is not None:
                self._hear(data)
            self._absorb(self._agreement.tick(self._clock.monotonic_s()))
            self._is_alive()
            self._check_others()
        if self._refused is not None:
            raise RecoveryError(self._refused, rank=self._meeting.rank, path=self._run)
        assert self.went is not None
        return self.went

    def _hear(self, data: bytes) -> None:
        try:
            envelope = accept(data, self._meeting.session)
        except FormatError as error:
            _log.warning("a message was passed over: %s", error)
            return
        if envelope is not None:
            self._heard_s[envelope.sender] = self._clock.monotonic_s()
            self._absorb(self._agreement.heard(envelope.sender, envelope.message))

    def _check_others(self) -> None:
        now_s = self._clock.monotonic_s()
        silent = [
            rank
            for rank in self._agreement.waits_for
            if rank != self._meeting.rank and now_s - self._heard_s[rank] > self._timeout_s
        ]
        if silent:
            raise DeadlineError(
                f"rank(s) {', '.join(map(str, silent))} have said nothing for "
                f"{self._timeout_s:g} s while the ranks agreed on what to restore",
                rank=self._meeting.rank,
                path=self._run,
                hint="they have died, hang, or have raised an error: look at what they print",
            )

    def _is_alive(self) -> None:
        """Tells those who wait for this rank that it is there; numbered so that it is no answer."""
        now_s = self._clock.monotonic_s()
        if now_s - self._said_s < _ALIVE_EVERY_S:
            return
        self._said_s = now_s
        if self._meeting.rank != COORDINATOR:
            self._send(COORDINATOR, Answer(0, b""))
            return
        for rank in range(1, self._meeting.world):
            self._send(rank, Command(0, "", b""))

    def _send(self, rank: int, message: Message) -> None:
        envelope = Envelope(self._meeting.session, self._meeting.rank, message)
        self._meeting.mailbox.send(rank, encode_message(envelope))

    def _absorb(self, outs: Iterable[AgreementOut]) -> None:
        todo = list(outs)
        while todo:
            out = todo.pop(0)
            if isinstance(out, Tell):
                self._send(out.rank, out.message)
            elif isinstance(out, TakeInventory):
                todo += self._agreement.done(InventorySeen(self._offer()))
            elif isinstance(out, Restore):
                todo += self._agreement.done(Restored(self._restore(out.choice)))
            elif isinstance(out, OpenTimeline):
                failpoint("resume.before_timeline")
                unique = f"{self._meeting.session}-{self._meeting.rank}"
                ours = open_on_disk(self._filesystem, self._run, out.record, out.choice, unique)
                todo += self._agreement.done(Opened(ours))
            elif isinstance(out, Go):
                self.went = out
            elif isinstance(out, Refuse):
                self._refused = out.reason
            else:
                assert isinstance(out, IsSilent)  # judged by what was heard, see _check_others

    def _offer(self) -> Offer:
        inventory = self.outcome.inventory = scan_run(self._filesystem, self._run)
        rank = self._meeting.rank
        disk, held = self._meeting.disks[rank], []
        if self._held is not None and self._held.id.timeline in inventory.timelines:
            held.append((self._held.marker, "memory"))
        return offer_of(self._filesystem, inventory, rank, disk, held)

    def _restore(self, choice: Choice) -> tuple[tuple[int, Source], ...]:
        """Loads what was chosen; returns which files are damaged, and where."""
        self.outcome = _Outcome(inventory=self.outcome.inventory)
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
        damaged: list[tuple[int, Source]] = []
        for held, source in self._ways(choice, choice.manifest):
            start_s = self._clock.monotonic_s()
            try:
                loaded = self._load(base, held, self._is_alive)
            except (DamageError, FormatError, OSError) as error:
                _log.warning("%s could not be restored from %s: %s", choice.base, source, error)
                damaged += self._spoilt(choice, held, error)
                continue
            exact = not loaded.mismatches and not loaded.notes
            exact = exact and all(marker.exact for marker in choice.manifest.markers)
            load_s = self._clock.monotonic_s() - start_s
            self.outcome = _Outcome(loaded, source, exact, load_s, self.outcome.inventory)
            return ()
        return tuple(damaged)

    def _ways(self, choice: Choice, manifest: Manifest) -> list[tuple[dict[int, HeldBase], str]]:
        """What to restore from, the cheapest first: pieces in memory, by rank; others on disk."""
        ways: list[tuple[dict[int, HeldBase], str]] = []
        held, needed = self._held, tuple(self._needs(self._meeting.rank, manifest))
        held = held if held is not None and held.id == choice.base else None
        mine = {
            rank: {source.tier for source in choice.sources[rank] if self._is_mine(source)}
            for rank in needed
        }
        here = held is not None and "memory" in mine.get(held.marker.rank, ())
        if held is not None and here and held.marker in manifest.markers:
            ways.append(({held.marker.rank: held}, "memory"))
        if all("disk" in tiers for tiers in mine.values()):
            ways.append(({}, "disk"))
        return ways

    def _is_mine(self, source: Source) -> bool:
        return source.rank == self._meeting.rank

    def _spoilt(
        self, choice: Choice, held: dict[int, HeldBase], error: Exception
    ) -> list[tuple[int, Source]]:
        """The pieces that a failed attempt has shown to be damaged: those of the rank that the
        error names, where it names one."""
        assert choice.manifest is not None
        named = getattr(error, "rank", None)
        found = []
        for rank in self._needs(self._meeting.rank, choice.manifest):
            tier = "memory" if rank in held else "disk"
            if named is None or rank == named:
                found += [
                    (rank, source)
                    for source in choice.sources[rank]
                    if self._is_mine(source) and source.tier == tier
                ]
        return found

    def _record_of(self, choice: Choice, number: int) -> TimelineRecord:
        assert choice.run is not None, "every disk has the record of the run by now"
        return TimelineRecord(
            run=choice.run,
            timeline=number,
            parent=None if choice.base is None else choice.base.timeline,
            fork_step=0 if choice.base is None else choice.base.step,
            exact=self.outcome.exact,
            world=self._meeting.world,
            fingerprint={**fingerprint(), "session": self._meeting.session},
            created_unix_s=self._clock.unix_s(),
        )


def resume_together(
    seams: Seams,
    run: PurePath,
    state: State,
    meeting: Meeting,
    held: HeldBase | None,
    load: Load | None,
    *,
    step: int | None,
    needs: Needs,
    timeout_s: float,
) -> tuple[Resumed, Choice]:
    """Restores, on every rank, the newest base that all of them can read, and opens a timeline.

    Args:
        held: what is in the memory of this rank's keeper.
        load: restores the state; None: there may be nothing to restore.
        step: restore a base of this step; 0 with no such base: start afresh.
        needs: which ranks' files a rank has to read.
        timeout_s: a rank that says nothing for so long is reported.

    Raises:
        RecoveryError: when there are bases and none can be used by all, or none of ``step``.
        MismatchError: when the chosen one is of another model.
        StateError: without ``load``, when there is something to restore.
        DeadlineError: a rank is silent.
    """
    with storage_errors("resume", run, rank=meeting.rank):
        start = _Start(seams, run, meeting, held, load, step=step, needs=needs, timeout_s=timeout_s)
        go = start.agree()
    return _resumed(go, start.outcome, state), go.choice


def _resumed(go: Go, outcome: _Outcome, state: State) -> Resumed:
    choice, loaded = go.choice, outcome.loaded
    inventory = outcome.inventory
    assert inventory is not None
    problems = tuple(f"{path}: {problem}" for path, problem in inventory.problems)
    if loaded is not None and (bad := nonfinite_parameter(state)):
        problems += (not_finite(bad, choice.base),)
    return Resumed(
        go.timeline,
        choice.base,
        loaded,
        outcome.source,
        outcome.exact,
        tuple(Skipped(base.timeline, base.step, why) for base, why in choice.skipped),
        problems,
        step=0 if choice.base is None else choice.base.step,
        lsn=0 if loaded is None else loaded.marker.lsn,
        load_s=outcome.load_s,
        forks=tuple(r.fork_step for r in choice.timelines if r.parent is not None),
    )
