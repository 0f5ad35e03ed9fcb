"""How the ranks of a job that starts agree on what to restore, as a state machine without I/O.

Rank 0 leads all ranks through the same steps, one after the other; nobody is in the next one
before all are done with this one::

    offer     take inventory, say what can be read
    compare   only where parts may be left out: say which, of what rank 0 chose from all offers
    restore   load what rank 0 chose (what is damaged: choose again)
    open      open the new timeline on every disk: from now on older processes are fenced off
    confirm   take inventory once more: is the choice still there, and still the newest?
              (``adr/004``; if not, choose again, with one more timeline)
    go        train

Messages may be lost, late, doubled and in any order: commands are numbered, repeated until they
are answered, and done once. A rank that dies is the launcher's business: it starts the job anew,
as another session, and nothing that this one has done is in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.commit.job.actions import Send
from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.job.messages import Answer, Command, Message
from everstep.commit.job.offer_codec import (
    decode_choice,
    decode_compared,
    decode_offer,
    decode_restored,
    encode_choice,
    encode_compared,
    encode_offer,
    encode_restored,
)
from everstep.commit.job.offers import Choice, Needs, Offer, Source, all_ranks, choose
from everstep.commit.lineage import BaseId
from everstep.errors import RecoveryError
from everstep.format.records import TimelineRecord
from everstep.state.layout.replica_digest import ReplicaDigest, describe_mismatch

__all__ = [
    "NO_WAY_BACK",
    "NO_WAY_BACK_HINT",
    "Agreement",
    "AgreementEvent",
    "AgreementOut",
    "Compare",
    "Compared",
    "Go",
    "InventorySeen",
    "OpenTimeline",
    "Opened",
    "RanksSilent",
    "Refuse",
    "Restore",
    "Restored",
    "TakeInventory",
]


@dataclass(frozen=True, slots=True)
class TakeInventory:
    """Look at what this rank can read; answer with :class:`InventorySeen`.

    Attributes:
        relaid: also at the logs of as many ranks as there are now, as at those of another number.
        partly: say also what manifests list and is not there.
    """

    relaid: bool = False
    partly: bool = False


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare ``choice.base`` with the live state, and touch nothing; answer with
    :class:`Compared`."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class Restore:
    """Load what this rank needs of ``choice.base`` (nothing on a fresh start), check its digests,
    and replay this rank's log up to ``choice.reach``; answer with :class:`Restored`."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class OpenTimeline:
    """Create, on this rank's disk and durably: the record of the run, those of the timelines of
    ``choice`` that are missing there, its manifests where they are missing, and last, exclusively,
    ``record``, the fence. Answer with :class:`Opened`."""

    record: TimelineRecord
    choice: Choice


@dataclass(frozen=True, slots=True)
class Go:
    """All ranks have restored ``choice`` and opened ``timeline``: train.

    Attributes:
        exact: what all of them have restored is bit for bit what training had.
    """

    timeline: int
    choice: Choice
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Refuse:
    """There is nothing that all ranks can restore, or what was asked for is not there.

    Attributes:
        unlike: they can, but some of them would leave out what others would not.
    """

    reason: str
    unlike: bool = False


@dataclass(frozen=True, slots=True)
class RanksSilent:
    """Rank 0 waits for the answers of ``ranks`` in ``phase``; to be reported."""

    phase: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InventorySeen:
    """What this rank can read."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Compared:
    """What this rank would leave out.

    Attributes:
        damaged, unusable: as of :class:`Restored`.
        common: of what it has in common with others: the same on all of these, or none restores.
        why: in words.
    """

    damaged: tuple[tuple[int, Source], ...] = ()
    unusable: tuple[int, int] | None = None
    common: tuple[ReplicaDigest, ...] = ()
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """The state is that of the step that was chosen; or not.

    Attributes:
        damaged: files that are damaged: of which rank, and where.
        unusable: timeline and step at which this rank's log turned out to be of no use.
        exact: it is bit for bit what training had.
        relaid: the log behind the base is of another layout than this rank has now.
    """

    damaged: tuple[tuple[int, Source], ...] = ()
    unusable: tuple[int, int] | None = None
    exact: bool = True
    relaid: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """Whether the timeline is this session's on this rank's disk; else its number was taken by
    another start of the job."""

    ours: bool


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
_WIRE = PurePath("message")
_RELAID = b"relaid"
_PARTLY = b"partly"


RecordOf = Callable[[Choice, int], TimelineRecord]
"""Makes the record of the timeline of that number; no other session's has the same bytes."""


class Agreement:
    """One rank's part in the start of a job.

    Args:
        rank, world: of the job that starts.
        record_of: for rank 0: makes the record of the new timeline.
        step, needs, fetch: of :func:`everstep.commit.job.offers.choose`.
        trained: the ranks' state is not that of a fresh start.
        compares: parts of the state may be left out.
        repeat_s: until what was not answered is said again.
        silent_s: until ranks that do not answer are reported.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        record_of: RecordOf,
        step: int | None = None,
        needs: Needs = all_ranks,
        fetch: bool = True,
        trained: bool = False,
        compares: bool = False,
        repeat_s: float = 1.0,
        silent_s: float = 60.0,
    ) -> None:
        self.rank = rank
        self.world = world
        self.over = False  # this rank trains, or was refused
        self._record_of = record_of
        self._step = step
        self._needs = needs
        self._fetch = fetch
        self._repeat_s = repeat_s
        self._silent_s = silent_s
        # What every rank knows: the command under way, and the answer to the last one.
        self._at = 0
        self._phase = ""
        self._answer: Answer | None = None
        # What rank 0 knows.
        self._command: Command | None = None
        self._answers: dict[int, bytes] = {}
        self._choice: Choice | None = None
        self._record: TimelineRecord | None = None
        self._unusable: set[tuple[BaseId, int, Source]] = set()
        self._unusable_log: set[tuple[int, int, int]] = set()  # rank, timeline, step
        self._relaid: set[int] = set()  # timelines: their ranks had another layout
        self._partly = False  # nothing else is left
        self._exact = True
        self._trained = trained
        self._compares = compares
        self._loaded = False  # ranks were told to load a base: so their state is not, either
        self._opened: set[int] = set()
        self._taken = 0
        self._rounds = 0
        self._refusal = ""
        self._asked_s: float | None = None
        self._repeated_s = 0.0
        self._told_silent = False

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The ranks that have to say something next; none: nobody waits for this one either."""
        if self.rank != COORDINATOR:
            return () if self.over else (COORDINATOR,)
        if self._command is None:
            return ()
        return tuple(rank for rank in range(self.world) if rank not in self._answers)

    def start(self) -> list[AgreementOut]:
        """Rank 0 begins; the others wait for it."""
        return self._ask("offer") if self.rank == COORDINATOR else []

    def receive(self, sender: int, message: Message) -> list[AgreementOut]:
        """A message of this session has come from ``sender``."""
        if isinstance(message, Command) and sender == COORDINATOR:
            return self._obey(message)
        if isinstance(message, Answer) and self.rank == COORDINATOR:
            return self._on_answer(sender, message)
        return []

    def done(self, event: AgreementEvent) -> list[AgreementOut]:
        """What an action has led to."""
        if isinstance(event, InventorySeen):
            return self._say(encode_offer(event.offer))
        if isinstance(event, Compared):
            about = event.damaged, event.unusable, event.common, event.why
            return self._say(encode_compared(*about))
        if isinstance(event, Restored):
            return self._say(
                encode_restored(event.damaged, event.unusable, event.exact, event.relaid)
            )
        return self._say(b"ours" if event.ours else b"")

    def tick(self, now_s: float) -> list[AgreementOut]:
        """Some time has passed: rank 0 repeats what was not answered."""
        if self._command is None:
            return []
        silent = tuple(rank for rank in range(self.world) if rank not in self._answers)
        if self._asked_s is None:
            self._asked_s = self._repeated_s = now_s
        out: list[AgreementOut] = []
        if now_s - self._repeated_s >= self._repeat_s:
            self._repeated_s = now_s
            out += [Send(rank, self._command) for rank in silent if rank != self.rank]
        if silent and now_s - self._asked_s >= self._silent_s and not self._told_silent:
            self._told_silent = True
            out.append(RanksSilent(self._command.phase, silent))
        return out

    # Every rank.

    def _obey(self, command: Command) -> list[AgreementOut]:
        if command.number < self._at:
            return []
        if command.number == self._at:
            return [] if self._answer is None else [Send(COORDINATOR, self._answer)]
        self._at = command.number
        self._phase = command.phase
        self._answer = None
        if command.phase in ("offer", "confirm"):
            asked = command.payload.split()
            return [TakeInventory(_RELAID in asked, _PARTLY in asked)]
        if command.phase == "compare":
            return [Compare(decode_choice(command.payload))]
        if command.phase == "restore":
            return [Restore(decode_choice(command.payload))]
        if command.phase == "open":
            choice, record = _split(command.payload)
            return [OpenTimeline(record, choice)]
        self.over = True
        said = self._say(b"")
        if command.phase == "go":
            choice, record = _split(command.payload)
            return [Go(record.timeline, choice, record.exact), *said]
        reason = command.payload.decode("utf-8", "replace")
        return [Refuse(reason, command.phase == "unlike"), *said]

    def _say(self, payload: bytes) -> list[AgreementOut]:
        self._answer = Answer(self._at, payload)
        if self.rank == COORDINATOR:
            return self._on_answer(self.rank, self._answer)
        return [Send(COORDINATOR, self._answer)]

    # Rank 0.

    def _ask(self, phase: str) -> list[AgreementOut]:
        """Asks all ranks what they can read."""
        asked = (_RELAID if self._relaid else b"", _PARTLY if self._partly else b"")
        return self._lead(phase, b" ".join(asked).strip())

    def _lead(self, phase: str, payload: bytes) -> list[AgreementOut]:
        """Begins the next step on all ranks."""
        self._command = Command(self._at + 1, phase, payload)
        self._answers = {}
        self._asked_s = None
        self._told_silent = False
        others = [rank for rank in range(self.world) if rank != self.rank]
        tell: list[AgreementOut] = [Send(rank, self._command) for rank in others]
        return tell + self._obey(self._command)

    def _on_answer(self, sender: int, answer: Answer) -> list[AgreementOut]:
        if self._command is None or answer.number != self._command.number:
            return []
        self._answers[sender] = answer.payload
        if len(self._answers) < self.world:
            return []
        return self._next(self._command.phase)

    def _next(self, phase: str) -> list[AgreementOut]:
        answers = [self._answers[rank] for rank in range(self.world)]
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
        self._command = None  # all ranks know
        return []

    def _choose(self, answers: Collection[bytes]) -> list[AgreementOut]:
        self._rounds += 1
        try:
            if self._rounds > _ROUNDS_MAX:
                raise RecoveryError(
                    "another process keeps deleting the bases that this job chooses, or all of "
                    "them are damaged",
                    hint="end the other process that works on this run; everstep verify",
                )
            self._choice = self._decide(answers)
        except RecoveryError as error:
            # Inventories are not taken at the same moment: while an older start of the job still
            # commits, what one rank saw another could not see yet. Twice the same is the truth.
            again = str(error) == self._refusal
            if self._rounds > _ROUNDS_MAX or (again and self._partly):
                return self._lead("refuse", str(error).encode("utf-8"))
            self._partly = self._partly or again  # replicas that are left are the last resort
            self._refusal = str(error)
            return self._ask("offer")
        compares = self._compares and self._choice.base is not None
        return self._lead("compare", encode_choice(self._choice)) if compares else self._load()

    def _load(self) -> list[AgreementOut]:
        assert self._choice is not None
        self._loaded = self._loaded or self._choice.base is not None
        return self._lead("restore", encode_choice(self._choice))

    def _decide(self, answers: Collection[bytes]) -> Choice:
        offers = [self._without_ours(decode_offer(answer)) for answer in answers]
        choice = choose(
            offers,
            step=self._step,
            needs=self._needs,
            fetch=self._fetch,
            unusable=self._unusable,
            unusable_log=self._unusable_log,
            relaid=self._relaid,
            partly=self._partly,
        )
        if choice.base is None and self._trained:
            raise RecoveryError(NO_WAY_BACK, hint=NO_WAY_BACK_HINT)
        if choice.base is None and self._loaded:
            damaged = ", ".join(sorted({str(base) for base, _, _ in self._unusable}))
            raise RecoveryError(
                f"{damaged or 'what was chosen'} cannot be restored on every rank, and ranks have "
                "loaded some of it: their state is not that of a fresh start any more",
                hint="everstep rm removes it; then start the program anew, with resume(step=0)",
            )
        return replace(choice, timeline=max(choice.timeline, self._taken + 1))

    def _without_ours(self, offer: Offer) -> Offer:
        """Timelines that this very start has opened are no history."""
        timelines = {n: r for n, r in offer.timelines.items() if n not in self._opened}
        return replace(offer, timelines=timelines)

    def _on_compared(self, answers: Collection[bytes]) -> list[AgreementOut]:
        assert self._choice is not None
        told = [Compared(*decode_compared(answer)) for answer in answers]
        damaged = any(one.damaged for one in told)
        if not damaged and (
            differ := describe_mismatch({r: one.common for r, one in enumerate(told)})
        ):
            listed = [f"\n  rank {r}: {why}" for r, one in enumerate(told) for why in one.why]
            text = (
                f"with strict=False some ranks leave out of {self._choice.base} what others, that "
                f"have it in common with them, restore: their replicas would part ({differ}):"
            )
            return self._lead("unlike", "".join([text, *listed]).encode("utf-8"))
        return self._load() if self._all_can(told) else self._ask("offer")

    def _all_can(self, told: Sequence[Compared | Restored], *, relaid: bool = False) -> bool:
        """Whether nothing is in the way of the choice; what is, is not chosen again.

        Args:
            relaid: the log is of another layout: what is unusable of it shows when it is replayed
            as
                it was written.
        """
        assert self._choice is not None
        damaged = {found for one in told for found in one.damaged}
        log = {(rank, *one.unusable) for rank, one in enumerate(told) if one.unusable is not None}
        if not damaged and not log and not relaid:
            return True
        assert self._choice.base is not None
        self._unusable |= {(self._choice.base, rank, source) for rank, source in damaged}
        if relaid:
            self._relaid.add(self._choice.base.timeline)
        else:
            self._unusable_log |= log
        return False

    def _on_restored(self, answers: Collection[bytes]) -> list[AgreementOut]:
        assert self._choice is not None
        told = [Restored(*decode_restored(answer)) for answer in answers]
        if not self._all_can(told, relaid=any(one.relaid for one in told)):
            return self._ask("offer")
        self._exact = all(one.exact for one in told)
        return self._open(self._choice)

    def _open(self, choice: Choice) -> list[AgreementOut]:
        record = self._record_of(choice, choice.timeline)
        self._choice, self._record = choice, replace(record, exact=record.exact and self._exact)
        return self._lead("open", _join(choice, self._record))

    def _on_opened(self, answers: Collection[bytes]) -> list[AgreementOut]:
        assert self._choice is not None
        number = self._choice.timeline
        self._taken = max(self._taken, number)
        if not all(answers):  # taken on some disk: the next number, on all of them
            return self._open(replace(self._choice, timeline=number + 1))
        self._opened.add(number)
        return self._ask("confirm")

    def _on_confirmed(self, answers: Collection[bytes]) -> list[AgreementOut]:
        """Nobody else can commit or delete now: the choice must be what it would be now."""
        assert self._choice is not None
        try:
            now = self._decide(answers)
        except RecoveryError:
            return self._ask("offer")
        if now.base != self._choice.base or now.manifest != self._choice.manifest:
            return self._ask("offer")
        if now.end != self._choice.end:
            return self._ask("offer")
        if any(number not in self._opened for number in _newer(answers, self._choice.timeline)):
            return self._ask("offer")
        assert self._record is not None
        return self._lead("go", _join(self._choice, self._record))


def _newer(answers: Collection[bytes], timeline: int) -> set[int]:
    """Timelines newer than ``timeline``: another start of the job has overtaken this one."""
    return {n for answer in answers for n in decode_offer(answer).timelines if n > timeline}


def _join(choice: Choice, record: TimelineRecord) -> bytes:
    data = record.encode()
    return len(data).to_bytes(4, "little") + data + encode_choice(choice)


def _split(payload: bytes) -> tuple[Choice, TimelineRecord]:
    size = int.from_bytes(payload[:4], "little")
    record = TimelineRecord.decode(payload[4 : 4 + size], _WIRE)
    return decode_choice(payload[4 + size :]), record
