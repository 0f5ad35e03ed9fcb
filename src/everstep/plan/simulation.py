"""Simulation of a long training run with failures, for each way to take checkpoints.

Training runs in lockstep on all accelerators. Time goes from event to event: the next base, or the
next failure. A base stalls training, and arrives in each tier when the bandwidth left by earlier
bases and by the log allows it. A failure takes tiers with it; training continues from the newest
step that the others lead to, after a restart, reading and replay, which further failures may
interrupt. Failures come at random, with a seed; every method meets the same ones.

Not simulated: stragglers, slow starts, silent corruption, and the effect of traffic on collectives.
Replacement nodes are there at once; waiting for them belongs into ``restart_s``.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from everstep.config import is_number
from everstep.errors import OptionError

FAILURES = ("process", "node", "rack")
LLAMA3_FAILURES: Mapping[str, int] = {"process": 63, "node": 321, "rack": 35}
"""Unexpected interruptions of Llama 3's training by what failed: software; a host or its
accelerators; a switch or cable (*The Llama 3 Herd of Models*, 2024, Table 5): 419 in 54 days on
16,000 accelerators."""
LLAMA3_ACCELERATOR_S = 16_000 * 54 * 86_400.0

MEMORY = "memory"
PEER = "peer"
DISK = "disk"
STORE = "store"
TIERS = (MEMORY, PEER, DISK, STORE)
_LOST: Mapping[str, frozenset[str]] = {
    "process": frozenset(),
    "node": frozenset((MEMORY, DISK)),
    # The next node may be in the same rack.
    "rack": frozenset((MEMORY, PEER, DISK)),
}
_BASES_MAX = 200  # arrivals that are remembered of each tier


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of a job. Bandwidths are those that checkpoints get, in bytes per second.

    Attributes:
        gpus: accelerators.
        gpus_per_node: accelerators of a node.
        nodes_per_rack: nodes that fail together.
        restart_s: seconds from a failure until all processes run again and could read.
        link_bytes_per_s: from one accelerator to host memory, and back.
        peer_bytes_per_s: from the memory of one node to another.
        disk_bytes_per_s: disk of one node.
        store_bytes_per_s: store, of the whole job.
        replay_bytes_per_s: state of one accelerator that is updated per second while a log is
            replayed.
        mtbf_s: mean seconds between two failures of each kind, for the whole job; None: as often
            for each accelerator as in Llama 3's training.
    """

    gpus: int = 16_000
    gpus_per_node: int = 8
    nodes_per_rack: int = 2
    restart_s: float = 300.0
    link_bytes_per_s: float = 20e9
    peer_bytes_per_s: float = 10e9
    disk_bytes_per_s: float = 4e9
    store_bytes_per_s: float = 200e9
    replay_bytes_per_s: float = 5e9
    mtbf_s: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        _check_positive(self)
        for kind, seconds in (self.mtbf_s or {}).items():
            if kind not in FAILURES or not is_number(seconds) or seconds <= 0:
                raise OptionError(f"Cluster.mtbf_s: {kind!r} fails every {seconds!r} s?")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return math.ceil(self.gpus / self.gpus_per_node)

    @property
    def rates(self) -> dict[str, float]:
        """Failures of each kind per second."""
        if self.mtbf_s is not None:
            return {kind: 1 / seconds for kind, seconds in self.mtbf_s.items()}
        each = self.gpus / LLAMA3_ACCELERATOR_S
        return {kind: count * each for kind, count in LLAMA3_FAILURES.items()}

    def bytes_per_s(self, tier: str) -> float:
        """Return the bandwidth of a tier for the whole job."""
        return {
            MEMORY: self.link_bytes_per_s * self.gpus,
            PEER: self.peer_bytes_per_s * self.nodes,
            DISK: self.disk_bytes_per_s * self.nodes,
            # Each node's network is a bound, too.
            STORE: min(self.store_bytes_per_s, self.peer_bytes_per_s * self.nodes),
        }[tier]


@dataclass(frozen=True, slots=True)
class Training:
    """Training to simulate. Bytes are those of the whole job.

    Attributes:
        state_bytes: state that a base holds.
        gradient_bytes: gradients that the optimizers consume in a step.
        step_s: seconds of a step.
        overlap: share of a step during which a copy of the state may continue: forward and
            backward.
    """

    state_bytes: float
    gradient_bytes: float
    step_s: float
    overlap: float = 0.9

    def __post_init__(self) -> None:
        _check_positive(self)


def _check_positive(value: Cluster | Training) -> None:
    for one in fields(value):
        number = getattr(value, one.name)
        if one.name != "mtbf_s" and (not is_number(number) or number <= 0):
            kind = type(value).__name__
            raise OptionError(f"{kind}.{one.name} must be a number above 0, not {number!r}")


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to take checkpoints.

    Attributes:
        about: description for people.
        capture: how a base stalls training: ``"sync"`` until it is in its last tier, ``"async"``
            until it is copied, ``"overlapped"`` for what a copy takes beyond forward and backward
            (DataStates-LLM, GoCkpt's Async-O), ``"parts"`` over several steps (GoCkpt),
            ``"parts_held"`` the same without waiting for gradients (GoCkpt-O), ``"replica"`` not at
            all (LowDiff+).
        tiers: tiers that bases go to.
        outlives: memory outlives the training process.
        log_tiers: tiers that the log goes to, with the steps that it may lag there.
        log_share: size of the log relative to the gradients that training consumes.
        far_log_share: the same in all tiers but memory; None: as in memory.
        log_exact: state replayed from the log is that of uninterrupted training.
        each_step: memory also holds a capture of each step (Checkflow).
        rarely: of so many bases one goes to the store.
        partial: after a failure only what was lost is read from afar.
        fixed_s: seconds that each base costs in any case.
        step_cost_s: seconds that each step costs in any case.
    """

    name: str
    about: str
    capture: str
    tiers: tuple[str, ...]
    outlives: bool = True
    log_tiers: tuple[tuple[str, int], ...] = ()
    log_share: float = 1.0
    far_log_share: float | None = None
    log_exact: bool = True
    each_step: bool = False
    rarely: int = 1
    partial: bool = True
    fixed_s: float = 0.005
    step_cost_s: float = 0.0


_EVERYWHERE = (MEMORY, PEER, STORE)
SCHEMES: Mapping[str, Scheme] = {
    one.name: one
    for one in (
        Scheme("torch.save", "training waits for the store", "sync", (STORE,), outlives=False,
               partial=False),
        Scheme("checkfreq", "a copy beside the next step; dies with the process", "overlapped",
               (STORE,), outlives=False, partial=False),
        Scheme("async", "a copy before the next step; dies with the process", "async", (STORE,),
               outlives=False, partial=False),
        Scheme("datastates", "lazy copies; die with the process", "overlapped", (STORE,),
               outlives=False, partial=False),
        Scheme("gemini", "each base in the memory of two nodes, one of ten in the store",
               "overlapped", _EVERYWHERE, rarely=10),
        Scheme("lazy", "lazy copies in a keeper that outlives training", "overlapped",
               (MEMORY, STORE)),
        Scheme("gockpt", "copies over several steps, in a keeper", "parts", (MEMORY, STORE)),
        Scheme("gockpt_o", "the same, gradients copied beside the next step", "parts_held",
               (MEMORY, STORE)),
        Scheme("checkflow", "a capture in each step, in a keeper", "overlapped", (MEMORY, STORE),
               each_step=True),
        Scheme("logged", "a log in the keeper", "overlapped", (MEMORY, STORE),
               log_tiers=((MEMORY, 0),)),
        Scheme("lowdiff", "a log of compressed gradients (1 %) in the store", "overlapped",
               (MEMORY, STORE), log_tiers=((MEMORY, 0), (STORE, 2)), log_share=0.015),
        Scheme("lowdiff_plus", "a log, and a copy of the state in the keeper", "replica",
               (MEMORY, STORE), log_tiers=((MEMORY, 0),)),
        Scheme("tiercheck", "a log in memory, approximate in other nodes and the store",
               "overlapped", _EVERYWHERE, log_tiers=((MEMORY, 0), (PEER, 1), (STORE, 5)),
               far_log_share=0.03, log_exact=False),
        Scheme("logged+peer", "a log in the keeper and in the memory of the next node",
               "overlapped", _EVERYWHERE, log_tiers=((MEMORY, 0), (PEER, 1))),
        Scheme("logged+peer+store", "the same log in the store, too", "overlapped", _EVERYWHERE,
               log_tiers=((MEMORY, 0), (PEER, 1), (STORE, 5))),
    )
}  # fmt: skip
"""Presets of everstep, and the systems that they are compared with."""


@dataclass(slots=True)
class Outcome:
    """Result of a simulated run.

    Attributes:
        interval_steps: steps between two bases.
        wall_s: simulated time.
        steps: useful steps: those that are part of the history at the end.
        failures: number by kind.
        lost_steps: finished steps that were trained again.
        stall_s: time that training waited for bases and the log.
        down_s: time from failures until training went on.
        read_s: of this, reading and replaying.
        written_bytes: bytes written to each tier.
        objects: objects written to the store.
        approximate: recoveries from an approximate log.
        log_missing: tiers whose link is too slow for the log.
    """

    scheme: str
    interval_steps: int
    wall_s: float
    gpus: int
    step_s: float
    steps: float = 0.0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURES, 0))
    lost_steps: float = 0.0
    stall_s: float = 0.0
    down_s: float = 0.0
    read_s: float = 0.0
    written_bytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIERS, 0.0))
    objects: float = 0.0
    approximate: int = 0
    log_missing: tuple[str, ...] = ()

    @property
    def goodput(self) -> float:
        """Share of the time that useful steps took."""
        return self.steps * self.step_s / self.wall_s

    @property
    def lost_shares(self) -> dict[str, float]:
        """Shares of the time without useful steps, by cause; together what goodput lacks."""
        stalled = self.stall_s / self.wall_s
        down = self.down_s / self.wall_s
        read = self.read_s / self.wall_s
        # Also the step in flight at each failure, and the stalls of steps that were trained again.
        again = max(0.0, 1 - self.goodput - stalled - down)
        return {
            "stalled": stalled,
            "trained again": again,
            "reading and replay": read,
            "restarts": down - read,
        }

    @property
    def lost_gpu_hours(self) -> float:
        """Accelerator hours that were not spent in useful steps."""
        return (1 - self.goodput) * self.wall_s * self.gpus / 3600


def failures_of(
    cluster: Cluster, wall_s: float, seed: int, *, periodic: bool = False
) -> list[tuple[float, str]]:
    """Return the failures of a run: ``(time, kind)``, in the order of their times.

    Args:
        periodic: failures come at equal distances, as some experiments make them.
    """
    rates = cluster.rates
    total = sum(rates.values())
    chance = random.Random(seed)
    found = []
    at_s = 0.0
    while total > 0:
        at_s += 1 / total if periodic else chance.expovariate(total)
        if at_s >= wall_s:
            break
        found.append((at_s, chance.choices(list(rates), list(rates.values()))[0]))
    return found


def simulate(
    cluster: Cluster,
    training: Training,
    scheme: Scheme,
    wall_s: float,
    failures: Sequence[tuple[float, str]],
    *,
    interval_steps: int | None = None,
) -> Outcome:
    """Simulate one run.

    Args:
        wall_s: time to simulate.
        failures: as of :func:`failures_of`.
        interval_steps: steps between two bases; None: the best one.
    """
    costs = SchemeCosts(cluster, training, scheme)
    every = costs.best_interval() if interval_steps is None else interval_steps
    return _Run(costs, every, wall_s, failures).play()


class SchemeCosts:
    """Times that a scheme takes on a cluster."""

    def __init__(self, cluster: Cluster, training: Training, scheme: Scheme) -> None:
        self.cluster = cluster
        self.training = training
        self.scheme = scheme
        # A log that is larger than the link takes is not there at all.
        self.log_lags = {
            tier: lag
            for tier, lag in scheme.log_tiers
            if self.log_bytes(tier) <= cluster.bytes_per_s(tier) * training.step_s
        }
        self.copy_s = training.state_bytes / cluster.bytes_per_s(MEMORY)
        self.replay_s = training.state_bytes / cluster.gpus / cluster.replay_bytes_per_s

    def log_bytes(self, tier: str) -> float:
        """Return the bytes of a step of the log in a tier."""
        scheme = self.scheme
        far = scheme.far_log_share if tier != MEMORY else None
        share = scheme.log_share if far is None else far
        return self.training.gradient_bytes * share

    @property
    def step_cost_s(self) -> float:
        """Time that each step waits: gradients are copied before the update that consumes them
        may end."""
        copied_s = 0.0
        if self.scheme.log_tiers:
            copied_s = self.log_bytes(MEMORY) / self.cluster.bytes_per_s(MEMORY)
        if self.scheme.each_step:
            copied_s += max(0.0, self.copy_s - self.training.step_s * self.training.overlap)
        return self.scheme.step_cost_s + copied_s

    @property
    def stall_s(self) -> float:
        """Time that a base stalls training."""
        training = self.training
        if self.scheme.capture == "sync":
            last = self.scheme.tiers[-1]
            return self.scheme.fixed_s + self.copy_s + self.tier_s(last)
        overlap_s = training.step_s * training.overlap
        waits_s = {
            "async": self.copy_s,
            "overlapped": max(0.0, self.copy_s - overlap_s),
            "parts": self._gradients_s(math.ceil(self.copy_s / overlap_s)),
            "parts_held": 0.0,
            "replica": 0.0,
        }[self.scheme.capture]
        return self.scheme.fixed_s + waits_s

    def _gradients_s(self, parts: int) -> float:
        """Return GoCkpt's wait for gradients (section 4.2.3): those of all parts copied so far."""
        each_s = self.training.gradient_bytes / self.cluster.bytes_per_s(MEMORY) / parts
        return each_s * parts * (parts - 1) / 2

    def tier_s(self, tier: str) -> float:
        """Return the time that a base takes to a tier, beside the log."""
        bytes_per_s = self.cluster.bytes_per_s(tier)
        if tier in self.log_lags and tier != MEMORY:
            bytes_per_s -= self.log_bytes(tier) / self.training.step_s
        return self.training.state_bytes / max(bytes_per_s, 1.0)

    def survives(self, tier: str, kind: str) -> bool:
        """Return True if a tier survives a failure."""
        if tier in (MEMORY, PEER) and not self.scheme.outlives:
            return False
        return tier not in _LOST[kind]

    def best_interval(self) -> int:
        """Return the steps between two bases that waste the least time, as far as the slowest tier
        takes them; of first order, as Young's.

        A step after the base costs a step of training, or its replay where the log survives.
        """
        costs = 0.0
        for kind, rate in self.cluster.rates.items():
            logged = any(self.survives(tier, kind) for tier in self.log_lags)
            costs += rate * (self.replay_s if logged else self.training.step_s)
        best = math.sqrt(2 * self.stall_s / (self.training.step_s * costs)) if costs else 1.0
        slowest_s = max(
            self.tier_s(tier) / (self.scheme.rarely if tier == STORE else 1)
            for tier in self.scheme.tiers
        )
        return max(1, round(best), math.ceil(slowest_s / self.training.step_s))

    def read_s(self, tier: str, kind: str) -> float:
        """Return the time to read a base after a failure, from a tier and from what is left."""
        cluster = self.cluster
        state = self.training.state_bytes
        nodes = cluster.nodes
        lost = {"process": 0, "node": 1, "rack": min(nodes, cluster.nodes_per_rack)}[kind]
        alone = not self.scheme.partial or not self.scheme.outlives
        reading = nodes if alone or tier == MEMORY else lost
        if tier == MEMORY or reading == 0:
            return self.copy_s
        share = state * reading / nodes
        # Each node reads its share over its own network, whatever the store could give.
        afar_s = state / nodes / cluster.peer_bytes_per_s
        if tier == STORE:
            afar_s = max(afar_s, share / cluster.bytes_per_s(STORE))
        if tier == DISK:
            afar_s = state / nodes / cluster.disk_bytes_per_s
        return afar_s + self.copy_s

    def replayed_s(self, tier: str, steps: float) -> float:
        """Return the time to replay steps whose log is read from a tier."""
        fetch_s = self.log_bytes(tier) / self.cluster.bytes_per_s(tier)
        return steps * max(self.replay_s, 0.0 if tier == MEMORY else fetch_s)


class _Tier:
    """Bases that have arrived in a tier, and those that are on their way."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._times: list[float] = []
        self._steps: list[float] = []
        self.free_s = 0.0

    def send(self, now_s: float, step: float) -> bool:
        """Send a base, unless the one before it is still on its way."""
        if now_s < self.free_s:
            return False
        self.free_s = now_s + self._seconds
        self._times.append(self.free_s)
        self._steps.append(step)
        if len(self._times) > _BASES_MAX:
            del self._times[: _BASES_MAX // 2], self._steps[: _BASES_MAX // 2]
        return True

    def newest(self, now_s: float) -> float | None:
        """Return the newest step that has arrived."""
        count = bisect.bisect_right(self._times, now_s)
        return self._steps[count - 1] if count else None

    def fail(self, now_s: float, *, all_lost: bool) -> None:
        """Forget bases on their way, or all."""
        count = 0 if all_lost else bisect.bisect_right(self._times, now_s)
        del self._times[count:], self._steps[count:]
        self.free_s = now_s

    def go_back(self, step: float) -> None:
        """Forget bases of steps that are trained again."""
        while self._steps and self._steps[-1] > step:
            self._times.pop()
            self._steps.pop()


@dataclass(frozen=True, slots=True)
class _Found:
    """Step from which training continues, and the time to get there."""

    step: float
    seconds: float
    approximate: bool


class _Run:
    """One simulated run."""

    def __init__(
        self,
        costs: SchemeCosts,
        interval_steps: int,
        wall_s: float,
        failures: Sequence[tuple[float, str]],
    ) -> None:
        self._costs = costs
        self._every = interval_steps
        self._wall_s = wall_s
        self._failures = iter(failures)
        self._tiers = {tier: _Tier(costs.tier_s(tier)) for tier in costs.scheme.tiers}
        self._step = 0.0
        self._now_s = 0.0
        self._taken = 0
        self._due = float(interval_steps)
        training = costs.training
        self._step_s = training.step_s + costs.step_cost_s
        self._stall_s = costs.stall_s
        self.outcome = Outcome(
            costs.scheme.name,
            interval_steps,
            wall_s,
            costs.cluster.gpus,
            training.step_s,
            log_missing=tuple(
                tier for tier, _ in costs.scheme.log_tiers if tier not in costs.log_lags
            ),
        )

    def play(self) -> Outcome:
        """Run to the end."""
        failure = next(self._failures, (math.inf, ""))
        while self._now_s < self._wall_s:
            end_s = min(failure[0], self._wall_s)
            self._train_until(end_s)
            if end_s == self._wall_s:
                break
            failure = self._recover(failure[1])
        self.outcome.steps = self._step
        self._count_log()
        return self.outcome

    def _train_until(self, end_s: float) -> None:
        while True:
            base_s = self._now_s + (self._due - self._step) * self._step_s
            if base_s + self._stall_s > end_s:
                # A step is finished or not; training that waits for a base makes none.
                steps = min(self._due, self._step + (end_s - self._now_s) / self._step_s)
                # Of a base that is cut off, as long as training waited for it.
                self.outcome.stall_s += max(0.0, end_s - base_s)
                self.outcome.stall_s += (steps - self._step) * self._costs.step_cost_s
                self._step = steps
                self._now_s = end_s
                return
            self.outcome.stall_s += (self._due - self._step) * self._costs.step_cost_s
            self._step = self._due
            self._take_base(base_s)
            self._due += self._every

    def _take_base(self, base_s: float) -> None:
        scheme = self._costs.scheme
        self._now_s = base_s + self._stall_s
        self.outcome.stall_s += self._stall_s
        self._taken += 1
        for name, tier in self._tiers.items():
            if name == STORE and self._taken % scheme.rarely:
                continue
            # A base that training waited for is there already.
            begun_s = base_s if scheme.capture == "sync" else self._now_s
            if tier.send(begun_s, self._step):
                self.outcome.written_bytes[name] += self._costs.training.state_bytes
                if name == STORE:
                    self.outcome.objects += 2 * self._costs.cluster.gpus + 1

    def _recover(self, kind: str) -> tuple[float, str]:
        """Recover from a failure, and from those that come meanwhile; return the next one."""
        failed_s = self._now_s
        trained = math.floor(self._step + 1e-9)
        kinds = [kind]
        while True:
            self.outcome.failures[kinds[-1]] += 1
            for name, tier in self._tiers.items():
                tier.fail(self._now_s, all_lost=not self._costs.survives(name, kinds[-1]))
            found = self._found(trained, kinds)
            ready_s = self._now_s + self._costs.cluster.restart_s + found.seconds
            following = next(self._failures, (math.inf, ""))
            if following[0] >= ready_s or ready_s >= self._wall_s:
                break
            kinds.append(following[1])
            self._now_s = following[0]
        self._now_s = min(ready_s, self._wall_s)
        self.outcome.down_s += self._now_s - failed_s
        self.outcome.read_s += found.seconds
        self.outcome.lost_steps += max(0.0, trained - found.step)
        self.outcome.approximate += found.approximate
        self._step = found.step
        for tier in self._tiers.values():
            tier.go_back(found.step)
        # What was lost in memory is taken again at once; otherwise bases go on as before.
        again = any(kind != "process" for kind in kinds) and len(self._tiers) > 1
        self._due = found.step + 1 if again else self._next_due(found.step)
        return following

    def _next_due(self, step: float) -> float:
        return (math.floor(step / self._every + 1e-9) + 1) * self._every

    def _found(self, trained: float, kinds: Sequence[str]) -> _Found:
        """Return the newest step that is left after failures, the nearest tier first."""
        worst = max(kinds, key=FAILURES.index)
        options = list(self._options(trained, kinds, worst))
        if not options:
            return _Found(0.0, 0.0, False)
        return max(options, key=lambda one: (one.step, -one.seconds))

    def _options(self, trained: float, kinds: Sequence[str], worst: str) -> Iterator[_Found]:
        costs = self._costs
        if costs.scheme.each_step and all(costs.survives(MEMORY, kind) for kind in kinds):
            yield _Found(trained, costs.read_s(MEMORY, worst), False)
        for name, tier in self._tiers.items():
            base = tier.newest(self._now_s)
            if base is None:
                continue
            read_s = costs.read_s(name, worst)
            yield _Found(base, read_s, False)
            for where, lag in costs.log_lags.items():
                if all(costs.survives(where, kind) for kind in kinds) and trained - lag > base:
                    steps = trained - lag - base
                    approximate = not costs.scheme.log_exact and where != MEMORY
                    # A replica has applied the log already.
                    replica = costs.scheme.capture == "replica" and name == MEMORY
                    replay_s = 0.0 if replica else costs.replayed_s(where, steps)
                    yield _Found(trained - lag, read_s + replay_s, approximate)

    def _count_log(self) -> None:
        """Count the bytes and objects of the log: of useful steps and of those trained again."""
        costs = self._costs
        steps = self.outcome.steps + self.outcome.lost_steps
        for tier, lag in costs.log_lags.items():
            self.outcome.written_bytes[tier] += steps * costs.log_bytes(tier)
            if tier == STORE:
                self.outcome.objects += 2 * costs.cluster.gpus * steps / max(1, lag)


def compare(
    cluster: Cluster,
    training: Training,
    wall_s: float,
    names: Sequence[str],
    *,
    seed: int = 0,
    interval_steps: int | None = None,
) -> list[Outcome]:
    """Simulate the same failures for each scheme.

    Raises:
        OptionError: a name is unknown.
    """
    for name in names:
        if name not in SCHEMES:
            raise OptionError(f"no scheme {name!r} to simulate; there are: {', '.join(SCHEMES)}")
    failures = failures_of(cluster, wall_s, seed)
    return [
        simulate(cluster, training, SCHEMES[name], wall_s, failures, interval_steps=interval_steps)
        for name in names
    ]
