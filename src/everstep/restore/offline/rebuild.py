"""Build the state of any logged step from files alone.

It comes from the base that needs least replay; if base or log are damaged, from the next older
base.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.commit import BaseId
from everstep.errors import EverstepError, FormatError, OptionError, RecoveryError
from everstep.format.log import NOT_EXACT
from everstep.format.records import AuditRecord
from everstep.format.writer import ChunkRing
from everstep.replay import ReplayOptions
from everstep.restore.load import Reads
from everstep.restore.log import existing_steps, why_unusable
from everstep.restore.offline.job_state import JobState
from everstep.restore.offline.load import load_job
from everstep.restore.offline.memory import OfflineState
from everstep.restore.offline.run_log import RunLog
from everstep.restore.redo import replay_conditions
from everstep.run import BaseFound, Chain, Skipped
from everstep.run.log_reads import Prefetch
from everstep.run.verify import audit_of, describe_audit
from everstep.seams import FileSystem
from everstep.seams.progress import progress


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A state that was built from files.

    Attributes:
        base: that it was built on.
        timeline: of the step.
        replayed: steps of the log.
        exact: bit for bit the state that training had (I9).
        why: why not; ``""`` if it is.
        skipped: bases that were tried first, and why they would not do.
        own: by part of the state: what of several ranks is not in it, in words.
        inexact: why it is not exact, besides that; "" if it is.
        audit: what the state rests on (see :func:`.verify.audit_of`).
    """

    state: OfflineState
    base: BaseId
    timeline: int
    replayed: int
    exact: bool
    why: str
    skipped: tuple[Skipped, ...] = ()
    own: Mapping[str, str] = field(default_factory=dict)
    inexact: str = ""
    audit: AuditRecord | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """State of several ranks that is left out, as text."""
        return tuple(self.own.values())

    @property
    def step(self) -> int:
        return self.state.step


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Exactness of a replay; all ``""`` if it was exact.

    Attributes:
        lineage: why the state was inexact in training already.
        replay: why replay need not give the bits of training.
        surprise: difference between replay and the last mark of the log.
    """

    lineage: str
    replay: str
    surprise: str

    @property
    def why(self) -> str:
        """The first reason."""
        return self.lineage or self.replay or self.surprise


@dataclass(slots=True)
class Rebuilder:
    """Builds states of one run.

    Args:
        timeout_s: a transfer that takes longer counts as hung.
        threads: Python threads that share the work of replay.
    """

    filesystem: FileSystem
    log: RunLog
    ring: ChunkRing
    timeout_s: float = 120.0
    threads: int = field(default=1)

    def state_at(self, step: int, timeline: int | None = None) -> Rebuilt:
        """The state at the end of ``step``, as training had it.

        Args:
            timeline: of the state; None: that of the newest history that has it.

        Raises:
            OptionError: neither a base nor the log has the step.
            RecoveryError: they have, or had, but it cannot be reached; with all reasons.
            UnsupportedStateError: it takes the program that trained it to replay its updates.
        """
        skipped: list[Skipped] = []
        for base, chain in self.log.ways(step, timeline):
            try:
                state = self.load(base, chain)
                why = self.play(chain, state).why
            except (EverstepError, OSError) as error:
                reason = why_unusable(error, base)
                skipped.append(Skipped(base.id.timeline, base.id.step, reason))
                continue
            return self.rebuilt(base, chain, state, why, skipped)
        if not skipped:
            raise self._unreachable(step, timeline)
        reasons = "\n".join(f"  {BaseId(s.timeline, s.step)}: {s.reason}" for s in skipped)
        raise RecoveryError(
            f"step {step} exists, but no intact base and log lead to it:\n{reasons}",
            step=step,
            path=self.log.inventory.path,
            hint="everstep verify lists the damage",
        )

    def rebuilt(
        self,
        base: BaseFound,
        chain: Chain,
        state: JobState,
        why: str,
        skipped: Sequence[Skipped] = (),
    ) -> Rebuilt:
        """Return the result of :meth:`load` and :meth:`play`, as a state of one process.

        Args:
            base: base that was loaded.
            chain: replayed steps.
            state: resulting state.
            why: reason why it is inexact; "" if it is exact.
            skipped: bases that were tried before.
        """
        timeline, step = chain.end
        merged, own = state.whole()
        audit = audit_of(self.log.inventory, BaseId(timeline, step))
        if audit is not None and audit.verdict == "different":  # as resume() says
            why = why or describe_audit(audit)
        inexact = why  # as where fewer ranks go on (I9)
        why = why or next(iter(own.values()), "")
        return Rebuilt(
            state=merged,
            base=base.id,
            timeline=timeline,
            replayed=len(chain.steps),
            exact=not why,
            why=why,
            skipped=tuple(skipped),
            own=own,
            inexact=inexact,
            audit=audit,
        )

    def load(
        self, base: BaseFound, chain: Chain, wanted: Callable[[str], bool] | None = None
    ) -> JobState:
        """Load a base, ready for the updates of a chain.

        Args:
            base: base to load.
            chain: steps to replay.
            wanted: predicate on names that selects tensors, if nothing is replayed; None: all.

        Raises:
            FormatError: the base belongs to another run; otherwise as :func:`.load_job`.
        """
        inventory = self.log.inventory
        # Files of another run, put here by hand, may have the timeline and step of any base of this
        # run. Their digests would match.
        if base.manifest is not None and base.manifest.markers[0].run != inventory.run:
            raise FormatError(f"{base.path} belongs to another run", path=base.path)
        records = [inventory.timelines.get(timeline) for timeline, _ in chain.steps]
        with progress(f"read {base.id}", base.size_bytes) as bar:
            return load_job(
                self.filesystem,
                base,
                Reads(self.ring, self.timeout_s, bar),
                inventory.timelines.get(base.id.timeline),
                ReplayOptions(self.threads, replay_conditions(records)[0]),
                wanted=None if chain.steps else wanted,
            )

    def play(
        self,
        chain: Chain,
        state: JobState,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> ReplayResult:
        """Replay a chain.

        Args:
            chain: steps to replay.
            state: state to replay to.
            on_step: called after each step.

        Raises:
            DamageError, FormatError, ReplayError, StorageError: the log cannot be replayed
                further; the state is unusable then.
            AuditError: replay, which must give the bits of training, gives others.
        """
        updates_seen = 0
        lineage = "" if state.marker.exact else "the base is not exact"
        world = state.marker.world
        found = self.log.steps(chain, state.lsn, world, self.ring, self.timeout_s)
        with (
            progress("replay", len(chain.steps)) as bar,
            Prefetch(found, count=1) as steps,  # as much again as is being replayed: a segment
        ):
            for step in steps:
                # An item of the thread that reads ahead: the steps before it were taken.
                if isinstance(step, EverstepError):
                    raise step
                state.take(step)
                if not all(mark.head.exact for _, mark in step.values()):
                    lineage = lineage or NOT_EXACT
                updates_seen += sum(len(updates) for updates, _ in step.values())
                on_step(state.step)
                bar.advance(1)
        state.finish()
        replay = state.doubt or state.exactness.why
        if updates_seen:
            records = [self.log.inventory.timelines.get(timeline) for timeline, _ in chain.steps]
            replay = replay_conditions(records)[1] or replay
        # Where replay must give the bits of training, a difference is a write that the log does
        # not hold, or damage.
        if not replay:
            state.compare()
        return ReplayResult(lineage, replay, state.surprises[0] if state.surprises else "")

    def _unreachable(self, step: int, timeline: int | None) -> EverstepError:
        """Return the error of a step to which no base leads."""
        where = "" if timeline is None else f" of timeline {timeline}"
        path = self.log.inventory.path
        if why := self.log.why_not(step, timeline):
            what = f"the log does not lead to step {step}{where}: {why}"
            return RecoveryError(what, step=step, path=path, hint=self._hint())
        what = f"neither a base nor the log on disk has step {step}{where}"
        return OptionError(what, step=step, path=path, hint=self._hint())

    def _hint(self) -> str:
        logged = {step for _, step in self.log.replayable()}
        known = existing_steps(logged.union(key.step for key in self.log.usable))
        if logged:
            return known
        if self.log.segments:
            return f"{known}; the log on disk leads on from none of its bases"
        return f'{known}; more with a log on disk: method="logged", log=LogOptions(to="disk")'
