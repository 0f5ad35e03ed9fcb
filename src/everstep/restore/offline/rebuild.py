"""Build the state of any logged step from files alone; also a state that training never had.

The state of a step comes from the base that needs least replay; if base or log are damaged, from
the next older base. A *counterfactual* state leaves out the updates of some steps. The other
gradients are those that training computed with these updates in place, so it is never the state
that training would have reached.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

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

_Way = tuple[BaseFound, Chain]


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


@dataclass(frozen=True, slots=True)
class Change:
    """Difference of an entry between two states.

    Attributes:
        entry: name of the entry.
        max_abs: largest absolute difference; None if it is not numeric or not finite.
        relative: norm of the difference divided by the norm of the first; None if that is zero.
    """

    entry: str
    max_abs: float | None
    relative: float | None


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
        return self._first(self._ways(step, timeline), step, frozenset(), twice=False)[0]

    def without(
        self, step: int, drop: Collection[int], begin: int | None, timeline: int | None = None
    ) -> tuple[Rebuilt, Rebuilt]:
        """The state at the end of ``step`` as training had it, and the one without the updates
        of the steps ``drop``; on the same base.

        Args:
            begin: replay begins at the newest base that is no later than this step; None: than
                the first step to drop.

        Raises:
            OptionError: steps that are not replayed cannot be dropped; otherwise as
                :meth:`state_at`.
        """
        latest = min([step, *(number - 1 for number in drop)])
        if begin is not None and begin > latest:
            what = f"step {latest + 1}" if latest < step else "the state"
            raise OptionError(f"replay from step {begin} on comes too late for {what}", step=step)
        latest = latest if begin is None else begin
        late = [number for number in drop if number > step]
        if late:
            raise OptionError(f"step {late[0]} comes after step {step}: it has no part in it")
        begin_early = (way for way in self._ways(step, timeline) if way[0].id.step <= latest)
        ways = _unless_empty(begin_early)
        if ways is None:
            raise OptionError(
                f"no base at or before step {latest} leads to step {step}",
                step=step,
                path=self.log.inventory.path,
                hint=self._hint(),
            )
        logged, other = self._first(ways, step, frozenset(drop), twice=True)
        assert other is not None
        return logged, other

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
        logged: JobState,
        other: JobState | None = None,
        drop: Collection[int] = (),
        on_step: Callable[[int], None] = lambda step: None,
    ) -> ReplayResult:
        """Replay a chain.

        Args:
            chain: steps to replay.
            logged: gets all updates.
            other: gets all updates except those of the steps ``drop``.
            drop: steps to leave out.
            on_step: called after each step.

        Raises:
            DamageError, FormatError, ReplayError, StorageError: the log cannot be replayed
                further; both
                states are unusable then.
            AuditError: replay, which must give the bits of training, gives others.
        """
        updates_seen = 0
        lineage = "" if logged.marker.exact else "the base is not exact"
        world = logged.marker.world
        found = self.log.steps(chain, logged.lsn, world, self.ring, self.timeout_s)
        with (
            progress("replay", len(chain.steps)) as bar,
            Prefetch(found, count=1) as steps,  # as much again as is being replayed: a segment
        ):
            for step in steps:
                # An item of the thread that reads ahead: the steps before it were taken.
                if isinstance(step, EverstepError):
                    raise step
                # Both states take a step from the same records, which are read once.
                logged.take(step)
                if other is not None:
                    other.take(step, drop=logged.step in drop)
                if not all(mark.head.exact for _, mark in step.values()):
                    lineage = lineage or NOT_EXACT
                updates_seen += sum(len(updates) for updates, _ in step.values())
                on_step(logged.step)
                bar.advance(1)
        logged.finish()
        if other is not None:
            other.finish(counterfactual=True)
        replay = logged.doubt or logged.exactness.why
        if updates_seen:
            records = [self.log.inventory.timelines.get(timeline) for timeline, _ in chain.steps]
            replay = replay_conditions(records)[1] or replay
        # Where replay must give the bits of training, a difference is a write that the log does
        # not hold, or damage.
        if not replay:
            logged.compare()
        return ReplayResult(lineage, replay, logged.surprises[0] if logged.surprises else "")

    def _ways(self, step: int, timeline: int | None) -> Iterator[tuple[BaseFound, Chain]]:
        found = _unless_empty(self.log.ways(step, timeline))
        if found is None:
            where = "" if timeline is None else f" of timeline {timeline}"
            if why := self.log.why_not(step, timeline):
                raise RecoveryError(
                    f"the log does not lead to step {step}{where}: {why}",
                    step=step,
                    path=self.log.inventory.path,
                    hint=self._hint(),
                )
            raise OptionError(
                f"neither a base nor the log on disk has step {step}{where}",
                step=step,
                path=self.log.inventory.path,
                hint=self._hint(),
            )
        return found

    def _hint(self) -> str:
        logged = {step for _, step in self.log.replayable()}
        known = existing_steps(logged.union(key.step for key in self.log.usable))
        if logged:
            return known
        if self.log.segments:
            return f"{known}; the log on disk leads on from none of its bases"
        return f'{known}; more with a log on disk: method="logged", log=LogOptions(to="disk")'

    def _first(
        self,
        ways: Iterable[tuple[BaseFound, Chain]],
        step: int,
        drop: frozenset[int],
        *,
        twice: bool,
    ) -> tuple[Rebuilt, Rebuilt | None]:
        """Return the state from the first base and log that can be replayed completely."""
        skipped: list[Skipped] = []
        for base, chain in ways:
            try:
                logged = self.load(base, chain)
                other = self.load(base, chain) if twice else None
                why = self.play(chain, logged, other, drop).why
            except (EverstepError, OSError) as error:
                reason = why_unusable(error, base)
                skipped.append(Skipped(base.id.timeline, base.id.step, reason))
                continue
            found = self.rebuilt(base, chain, logged, why, skipped)
            if other is None:
                return found, None
            listed = ", ".join(map(str, sorted(drop)[:5])) + (", ..." if len(drop) > 5 else "")
            left = f"the updates of step {listed} were left out" if drop else "a counterfactual"
            return found, replace(found, state=other.whole()[0], exact=False, why=left)
        reasons = "\n".join(f"  {BaseId(s.timeline, s.step)}: {s.reason}" for s in skipped)
        raise RecoveryError(
            f"step {step} exists, but no intact base and log lead to it:\n{reasons}",
            step=step,
            path=self.log.inventory.path,
            hint="everstep verify lists the damage",
        )


def _unless_empty(ways: Iterator[_Way]) -> Iterator[_Way] | None:
    """The same, found one by one; None if there is none."""
    first = next(ways, None)
    return None if first is None else itertools.chain([first], ways)


def changes(before: OfflineState, after: OfflineState) -> list[Change]:
    """Return the entries in which two states differ, in the order of the first."""
    found = []
    theirs = after.digests()
    for name, mine in before.digests().items():
        if theirs.get(name) == mine:
            continue
        max_abs = relative = None
        if name in before.tensors and name in after.tensors:
            max_abs, relative = _distance(before.tensors[name], after.tensors[name])
        found.append(Change(name, max_abs, relative))
    known = {*before.entries, *before.objects}
    found += [Change(name, None, None) for name in theirs if name not in known]
    return found


def _distance(one: torch.Tensor, other: torch.Tensor) -> tuple[float | None, float | None]:
    """Largest absolute difference, and the norm of the difference by the norm of the first."""
    if one.shape != other.shape or one.dtype != other.dtype or not one.numel():
        return None, None
    wide = torch.complex128 if one.is_complex() else torch.float64
    try:
        first = one.to(wide)
        apart = other.to(wide) - first
    except RuntimeError:  # no conversion of this dtype
        return None, None
    norm = float(torch.linalg.vector_norm(first))
    size = float(torch.linalg.vector_norm(apart))
    largest = float(apart.abs().max())
    share = size / norm if norm else math.inf
    return largest if math.isfinite(largest) else None, share if math.isfinite(share) else None
