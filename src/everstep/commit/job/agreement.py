"""Agreement of the ranks of a starting job on the state to restore, as a state machine without I/O.

Rank 0 leads all ranks through the same phases; no rank enters the next one before all have
completed this one::

    offer     take inventory and send it
    compare   only with strict=False: report entries that the choice would leave out
    restore   load the choice of rank 0 (after damage: choose again)
    open      open the new timeline on every disk, which fences off older processes
    confirm   take inventory again: does the choice still exist, and is it still the newest?
              (``adr/004``; if not, choose again, with one more timeline)
    go        train

Messages may be lost, late, duplicated and reordered: commands are numbered, repeated until they are
answered, and carried out once. If a rank dies, the launcher restarts the job as another session;
nothing that this session has done is in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from everstep.commit.job.messages import (
    COORDINATOR,
    Answer,
    Command,
    Message,
    Send,
    decode_choice,
    decode_offer,
    encode_choice,
    encode_offer,
)
from everstep.commit.job.offers import Choice, Excluded, Needs, Offer, Source, all_ranks, choose
from everstep.errors import RecoveryError
from everstep.format import TimelineRecord
from everstep.format.message_codec import Decoder, Stored, encode
from everstep.state.layout import ReplicaDigest
from everstep.state.layout.placement import describe_mismatch


@dataclass(frozen=True, slots=True)
class TakeInventory:
    """List all bases and logs that this rank can read; answer with :class:`InventorySeen`.

    Attributes:
        relaid: include logs of the same number of ranks with another layout.
        partly: include markers that manifests list but whose files are missing.
    """

    relaid: bool = False
    partly: bool = False


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare ``choice.base`` with the live state without changing it; answer with
    :class:`Compared`."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class Restore:
    """Load this rank's entries of ``choice.base`` (none on a fresh start), verify their digests,
    and replay this rank's log up to ``choice.reach``; answer with :class:`Restored`."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class OpenTimeline:
    """Create ``record`` on this rank's disk, durably; answer with :class:`Opened`.

    First come the run's record, and the records and manifests of ``choice`` that are missing there.
    Last, exclusively, comes ``record``, the fence.
    """

    record: TimelineRecord
    choice: Choice


@dataclass(frozen=True, slots=True)
class Go:
    """All ranks have restored ``choice`` and opened ``timeline``: train.

    Attributes:
        exact: all ranks have restored the state of training bit for bit.
    """

    timeline: int
    choice: Choice
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Refuse:
    """There is nothing that all ranks can restore, or the requested step does not exist.

    Attributes:
        unlike: a state exists, but some ranks would leave out entries that others restore.
    """

    reason: str
    unlike: bool = False


@dataclass(frozen=True, slots=True)
class RanksSilent:
    """Rank 0 waits for the answers of ``ranks`` in ``phase``; report it."""

    phase: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InventorySeen:
    """Inventory of this rank."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Compared:
    """Entries that this rank would leave out.

    Attributes:
        damaged, unusable: as in :class:`Restored`.
        common: digests of those that it shares with other ranks. They must be equal on all of those
            ranks, or the start is refused.
        why: descriptions.
    """

    damaged: tuple[tuple[int, Source], ...] = ()
    unusable: tuple[int, int] | None = None
    common: tuple[ReplicaDigest, ...] = ()
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a restore.

    Attributes:
        damaged: damaged files: owner and source.
        unusable: timeline and step at which this rank's log proved unusable.
        exact: the state is that of training, bit for bit.
        relaid: the log after the base has another layout than this rank.
    """

    damaged: tuple[tuple[int, Source], ...] = ()
    unusable: tuple[int, int] | None = None
    exact: bool = True
    relaid: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """Result of opening the timeline; ``ours`` is False if another start has taken its number."""

    ours: bool


_COMPARED = Decoder[Compared](Compared, "a comparison with a base")
_RESTORED = Decoder[Restored](Restored, "the result of a restore")
_OPENING = Decoder[tuple[Stored[TimelineRecord], bytes]](
    tuple[Stored[TimelineRecord], bytes], "a timeline to open"
)

AgreementOut = TakeInventory | Compare | Restore | OpenTimeline | Go | Refuse | RanksSilent | Send
AgreementEvent = InventorySeen | Compared | Restored | Opened


NO_WAY_BACK = (
    "there is no base of step 0, and this process has trained: its state is not that of a fresh "
    "start"
)
NO_WAY_BACK_HINT = (
    "build model and optimizer again, make a Checkpointer of them, and call resume(step=0) there"
)
_ROUNDS_MAX = 16
_REPEAT_S = 1.0
"""Seconds between repetitions of an unanswered command."""
_RELAID = b"relaid"
_PARTLY = b"partly"


RecordOf = Callable[[Choice, int], TimelineRecord]
"""Makes the record of the timeline of that number; no other session's has the same bytes."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Demands of a starting job.

    Attributes:
        step, needs, fetch: as for :func:`everstep.commit.job.offers.choose`.
        trained: the ranks' live state is not that of a fresh start.
        compares: entries of the state may be left out (``strict=False``).
    """

    step: int | None = None
    needs: Needs = all_ranks
    fetch: bool = True
    trained: bool = False
    compares: bool = False


@dataclass(slots=True)
class _Asked:
    """Command of rank 0 that is in progress.

    Attributes:
        answers: payloads of the answers, by rank.
        sent_s: time of the first tick after it was sent.
        reported_silent: the ranks that do not answer were reported.
    """

    command: Command
    answers: dict[int, bytes] = field(default_factory=dict)
    sent_s: float | None = None
    repeated_s: float = 0.0
    reported_silent: bool = False


@dataclass(slots=True)
class _Attempts:
    """Attempts of rank 0 to find a state that all ranks can restore.

    Attributes:
        rounds: number of attempts.
        excluded: data that the ranks have found unusable.
        partly: last resort: bases with files of some ranks only.
        refusal: reason why the last attempt found no state.
        loaded: ranks may have loaded a base: the state is no longer a fresh one.
    """

    rounds: int = 0
    excluded: Excluded = field(default_factory=Excluded)
    partly: bool = False
    refusal: str = ""
    loaded: bool = False


class Agreement:
    """One rank in the start of a job.

    Args:
        rank, world: rank and number of ranks of the starting job.
        record_of: makes the record of the new timeline; used on rank 0.
        silent_s: seconds without an answer after which silent ranks are reported.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        demand: Demand,
        *,
        record_of: RecordOf,
        silent_s: float = 60.0,
    ) -> None:
        self.rank = rank
        self.world = world
        self.over = False  # this rank trains, or was refused
        self._demand = demand
        self._record_of = record_of
        self._silent_s = silent_s
        # State of every rank: the command in progress, and the answer to it.
        self._at = 0
        self._answer: Answer | None = None
        # State of rank 0.
        self._asked: _Asked | None = None
        self._attempts = _Attempts()
        self._choice: Choice | None = None
        self._record: TimelineRecord | None = None
        self._exact = True
        self._opened: set[int] = set()
        self._taken = 0

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks whose message is expected next; empty if this rank waits for none."""
        if self.rank != COORDINATOR:
            return () if self.over else (COORDINATOR,)
        if self._asked is None:
            return ()
        return tuple(rank for rank in range(self.world) if rank not in self._asked.answers)

    def start(self) -> list[AgreementOut]:
        """Begin on rank 0; the other ranks wait for its first command."""
        return self._request_offers("offer") if self.rank == COORDINATOR else []

    def receive(self, sender: int, message: Message) -> list[AgreementOut]:
        """Process a message of this session."""
        if isinstance(message, Command) and sender == COORDINATOR:
            return self._obey(message)
        if isinstance(message, Answer) and self.rank == COORDINATOR:
            return self._on_answer(sender, message)
        return []

    def done(self, event: AgreementEvent) -> list[AgreementOut]:
        """Process the event that answers an action."""
        if isinstance(event, InventorySeen):
            return self._answer_command(encode_offer(event.offer))
        if isinstance(event, Compared | Restored):
            return self._answer_command(encode(event))
        return self._answer_command(b"ours" if event.ours else b"")

    def tick(self, now_s: float) -> list[AgreementOut]:
        """Advance the clock: rank 0 repeats unanswered commands and reports silent ranks."""
        asked = self._asked
        if asked is None:
            return []
        silent = self.waits_for
        if asked.sent_s is None:
            asked.sent_s = asked.repeated_s = now_s
        out: list[AgreementOut] = []
        if now_s - asked.repeated_s >= _REPEAT_S:
            asked.repeated_s = now_s
            out += [Send(rank, asked.command) for rank in silent if rank != self.rank]
        if silent and now_s - asked.sent_s >= self._silent_s and not asked.reported_silent:
            asked.reported_silent = True
            out.append(RanksSilent(asked.command.phase, silent))
        return out

    # Every rank.

    def _obey(self, command: Command) -> list[AgreementOut]:
        # A late or repeated command is never carried out twice; only its answer is sent again.
        if command.number < self._at:
            return []
        if command.number == self._at:
            return [] if self._answer is None else [Send(COORDINATOR, self._answer)]
        self._at = command.number
        self._answer = None
        if command.phase in ("offer", "confirm"):
            flags = command.payload.split()
            return [TakeInventory(_RELAID in flags, _PARTLY in flags)]
        if command.phase == "compare":
            return [Compare(decode_choice(command.payload))]
        if command.phase == "restore":
            return [Restore(decode_choice(command.payload))]
        if command.phase == "open":
            choice, record = _split(command.payload)
            return [OpenTimeline(record, choice)]
        self.over = True
        # Answered as well: rank 0 repeats the command until every rank has received it.
        said = self._answer_command(b"")
        if command.phase == "go":
            choice, record = _split(command.payload)
            return [Go(record.timeline, choice, record.exact), *said]
        reason = command.payload.decode("utf-8", "replace")
        return [Refuse(reason, command.phase == "unlike"), *said]

    def _answer_command(self, payload: bytes) -> list[AgreementOut]:
        self._answer = Answer(self._at, payload)
        if self.rank == COORDINATOR:
            return self._on_answer(self.rank, self._answer)
        return [Send(COORDINATOR, self._answer)]

    # Rank 0.

    def _request_offers(self, phase: str) -> list[AgreementOut]:
        """Ask all ranks for their inventories."""
        attempts = self._attempts
        flags = (_RELAID if attempts.excluded.relaid else b"", _PARTLY if attempts.partly else b"")
        return self._lead(phase, b" ".join(flags).strip())

    def _lead(self, phase: str, payload: bytes) -> list[AgreementOut]:
        """Begin the next phase on all ranks."""
        # Numbers are never reused, so a late answer to an earlier phase is recognised.
        command = Command(self._at + 1, phase, payload)
        self._asked = _Asked(command)
        others = [rank for rank in range(self.world) if rank != self.rank]
        tell: list[AgreementOut] = [Send(rank, command) for rank in others]
        # The messages come first: in the last phase _obey() also produces the answer of this rank.
        return tell + self._obey(command)

    def _on_answer(self, sender: int, answer: Answer) -> list[AgreementOut]:
        asked = self._asked
        if asked is None or answer.number != asked.command.number:
            return []
        asked.answers[sender] = answer.payload
        if len(asked.answers) < self.world:
            return []
        return self._next(asked.command.phase, [asked.answers[r] for r in range(self.world)])

    def _next(self, phase: str, answers: Sequence[bytes]) -> list[AgreementOut]:
        if phase == "offer":
            return self._choose(answers)
        if phase == "compare":
            return self._on_compared(answers)
        if phase == "restore":
            return self._on_restored(answers)
        if phase == "open":
            return self._on_opened(answers)
        if phase == "confirm":
            return self._on_confirmed(answers)
        self._asked = None  # all ranks have acknowledged the result
        return []

    def _choose(self, answers: Collection[bytes]) -> list[AgreementOut]:
        attempts = self._attempts
        attempts.rounds += 1
        try:
            if attempts.rounds > _ROUNDS_MAX:
                raise RecoveryError(
                    "another process repeatedly deletes the bases that this job chooses, or all of "
                    "them are damaged",
                    hint="stop the other process that uses this run, and check the bases with "
                    "everstep verify",
                )
            self._choice = self._decide(answers)
        except RecoveryError as error:
            # Inventories are not taken at the same moment: while an older start of the job still
            # commits, one rank may see a base that another could not see yet. So ask once more, and
            # refuse only if the same result comes twice.
            again = str(error) == attempts.refusal
            if attempts.rounds > _ROUNDS_MAX or (again and attempts.partly):
                return self._lead("refuse", str(error).encode("utf-8"))
            # Replicas on other ranks are the last resort.
            attempts.partly = attempts.partly or again
            attempts.refusal = str(error)
            return self._request_offers("offer")
        compares = self._demand.compares and self._choice.base is not None
        return self._lead("compare", encode_choice(self._choice)) if compares else self._load()

    def _load(self) -> list[AgreementOut]:
        assert self._choice is not None
        self._attempts.loaded = self._attempts.loaded or self._choice.base is not None
        return self._lead("restore", encode_choice(self._choice))

    def _decide(self, answers: Collection[bytes]) -> Choice:
        offers = [self._without_ours(decode_offer(answer)) for answer in answers]
        choice = choose(
            offers,
            step=self._demand.step,
            needs=self._demand.needs,
            fetch=self._demand.fetch,
            excluded=self._attempts.excluded,
            partly=self._attempts.partly,
        )
        if choice.base is None and self._demand.trained:
            raise RecoveryError(NO_WAY_BACK, hint=NO_WAY_BACK_HINT)
        if choice.base is None and self._attempts.loaded:
            unusable = self._attempts.excluded.files
            damaged = ", ".join(sorted({str(base) for base, _, _ in unusable}))
            raise RecoveryError(
                f"{damaged or 'the chosen base'} cannot be restored on every rank, and some ranks "
                "have already loaded data of it, so their state is no longer that of a fresh start",
                hint="remove the base with everstep rm, then restart the program with "
                "resume(step=0)",
            )
        # A number that was taken on one disk cannot be opened on all, so each round uses a new one.
        return replace(choice, timeline=max(choice.timeline, self._taken + 1))

    def _without_ours(self, offer: Offer) -> Offer:
        """Remove the timelines that this start itself has opened: they are not history."""
        timelines = {n: r for n, r in offer.timelines.items() if n not in self._opened}
        return replace(offer, timelines=timelines)

    def _on_compared(self, answers: Collection[bytes]) -> list[AgreementOut]:
        assert self._choice is not None
        results = [_COMPARED.decode(answer) for answer in answers]
        # A rank that found damage lists no omitted entries, so there is nothing to compare.
        damaged = any(one.damaged for one in results)
        if not damaged and (
            differ := describe_mismatch({r: one.common for r, one in enumerate(results)})
        ):
            listed = [f"\n  rank {r}: {why}" for r, one in enumerate(results) for why in one.why]
            text = (
                f"with strict=False, some ranks would leave out entries of {self._choice.base} "
                f"that other ranks share and restore, so their replicas would diverge ({differ}):"
            )
            return self._lead("unlike", "".join([text, *listed]).encode("utf-8"))
        return self._load() if self._all_can(results) else self._request_offers("offer")

    def _all_can(self, results: Sequence[Compared | Restored], *, relaid: bool = False) -> bool:
        """Return True if no rank reported damage; what is damaged is excluded from the next choice.

        Args:
            relaid: the log has another layout. Its unusable records are found again when it is
            replayed in
                the layout in which it was written.
        """
        assert self._choice is not None
        damaged = {found for one in results for found in one.damaged}
        log = {
            (rank, *one.unusable) for rank, one in enumerate(results) if one.unusable is not None
        }
        if not damaged and not log and not relaid:
            return True
        base = self._choice.base
        assert base is not None
        excluded = self._attempts.excluded
        excluded.files |= {(base, rank, source) for rank, source in damaged}
        if relaid:
            excluded.relaid.add(base.timeline)
        else:
            excluded.log |= log
        return False

    def _on_restored(self, answers: Collection[bytes]) -> list[AgreementOut]:
        assert self._choice is not None
        results = [_RESTORED.decode(answer) for answer in answers]
        if not self._all_can(results, relaid=any(one.relaid for one in results)):
            return self._request_offers("offer")
        self._exact = all(one.exact for one in results)
        return self._open(self._choice)

    def _open(self, choice: Choice) -> list[AgreementOut]:
        record = self._record_of(choice, choice.timeline)
        self._choice = choice
        self._record = replace(record, exact=record.exact and self._exact)
        return self._lead("open", _join(choice, self._record))

    def _on_opened(self, answers: Collection[bytes]) -> list[AgreementOut]:
        assert self._choice is not None
        number = self._choice.timeline
        self._taken = max(self._taken, number)
        if not all(answers):  # taken on some disk: use the next number on all disks
            return self._open(replace(self._choice, timeline=number + 1))
        self._opened.add(number)
        return self._request_offers("confirm")

    def _on_confirmed(self, answers: Collection[bytes]) -> list[AgreementOut]:
        """Go if the choice is still the best: no other process can commit or delete any more."""
        assert self._choice is not None
        try:
            now = self._decide(answers)
        except RecoveryError:
            return self._request_offers("offer")
        # An older process may have committed, logged or deleted something until the fence was on
        # every disk.
        if now.base != self._choice.base or now.manifest != self._choice.manifest:
            return self._request_offers("offer")
        if now.end != self._choice.end:
            return self._request_offers("offer")
        if any(number not in self._opened for number in _newer(answers, self._choice.timeline)):
            return self._request_offers("offer")
        assert self._record is not None
        return self._lead("go", _join(self._choice, self._record))


def _newer(answers: Collection[bytes], timeline: int) -> set[int]:
    """Return timelines newer than ``timeline``: another start of the job has overtaken this one."""
    return {n for answer in answers for n in decode_offer(answer).timelines if n > timeline}


def _join(choice: Choice, record: TimelineRecord) -> bytes:
    return encode((Stored(record), encode_choice(choice)))


def _split(payload: bytes) -> tuple[Choice, TimelineRecord]:
    stored, choice = _OPENING.decode(payload)
    return decode_choice(choice), stored.record
