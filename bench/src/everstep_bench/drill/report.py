"""The outcome of a drill as plain data, and TierCheck's figures of it.

TierCheck's Table 3 (Exp. 4) adds T_rollback and T_rerun. Here T_rollback is the time until the
ranks that live know of the failure, and that of ``resume()``; T_rerun is what the lost steps
take. The start of the job in between (torchrun, Python, torch) is the same for all arms and in
neither; it is given beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.workloads.comparison import Difference
from everstep_bench.drill.arms import OTHERS, OURS
from everstep_bench.drill.plan import DrillPlan, Kill

__all__ = ["DrillReport", "Outcome", "Ratio"]

_DIFFERENCES_KEPT = 50


@dataclass(frozen=True, slots=True)
class Outcome:
    """One arm and one kill.

    Attributes:
        arm: its name.
        kill: what died.
        refused: why the engine does not take this arm with several ranks; None: it does, and only
            then is anything below of meaning.
        dead_hosts: that were lost with all on them, and replaced.
        reached: last step that any rank had finished.
        into: part of the step under way that was lost with the kill.
        recovered: step that was resumed.
        detect_s: from the kill until the last rank that lives knew; None: they did not within the
            timeout, and were ended. With nobody left, 0.
        launch_s: from the launch of the new start until all its ranks were ready to resume.
        restore_s: from then to the end of the last ``resume()``.
        step_s: median of the steps before the kill.
        sources: where each rank's state came from, by rank.
        size_bytes: read and verified by all ranks.
        replayed: steps replayed from a log.
        exact: whether all ranks claim to have their state back bit for bit.
        evidence: of the claim, of rank 0.
        skipped: bases that were passed over.
        differences: from the run that nobody disturbed.
        losses: at the end, the mean of all ranks: of the undisturbed run, and of this one.
    """

    arm: str
    kill: Kill
    refused: str | None = None
    dead_hosts: tuple[int, ...] = ()
    reached: int = 0
    into: float = 0.0
    recovered: int = 0
    detect_s: float | None = 0.0
    launch_s: float = 0.0
    restore_s: float = 0.0
    step_s: float = 0.0
    sources: tuple[str, ...] = ()
    size_bytes: int = 0
    replayed: int = 0
    exact: bool = False
    evidence: str = ""
    skipped: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    losses: tuple[float, float] = (0.0, 0.0)

    @property
    def ran(self) -> bool:
        """Return True if the arm was not refused."""
        return self.refused is None

    @property
    def same(self) -> bool:
        """Return True if every rank ended with the bits of the undisturbed run."""
        return self.ran and not self.differences

    @property
    def as_claimed(self) -> bool:
        """Return True if it is the same, or did not claim to be."""
        return self.same or (self.ran and not self.exact)

    @property
    def lost(self) -> float:
        """Steps that had to be taken again, with the part that was taken of the last one."""
        return self.reached + self.into - self.recovered

    @property
    def rollback_s(self) -> float:
        """To detect the failure and to restore the state."""
        return (self.detect_s or 0.0) + self.restore_s

    @property
    def rerun_s(self) -> float:
        """To take the lost steps again."""
        return self.lost * self.step_s

    @property
    def total_s(self) -> float:
        """Rollback and re-run."""
        return self.rollback_s + self.rerun_s

    @property
    def from_words(self) -> str:
        """``"memory x 3, disk x 1"``."""
        return ", ".join(f"{name} x {n}" for name, n in Counter(self.sources).most_common())

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        if not self.ran:
            return {"arm": self.arm, "kill": self.kill, "refused": self.refused}
        return {
            "arm": self.arm,
            "kill": self.kill,
            "refused": None,
            "dead_hosts": list(self.dead_hosts),
            "reached_step": self.reached,
            "recovered_step": self.recovered,
            "lost_steps": self.lost,
            "replayed_steps": self.replayed,
            "detect_s": self.detect_s,
            "launch_s": self.launch_s,
            "restore_s": self.restore_s,
            "step_s": self.step_s,
            "rollback_s": self.rollback_s,
            "rerun_s": self.rerun_s,
            "total_s": self.total_s,
            "sources": list(self.sources),
            "size_bytes": self.size_bytes,
            "claims_exact": self.exact,
            "evidence": self.evidence,
            "skipped": list(self.skipped),
            "same": self.same,
            "loss_undisturbed": self.losses[0],
            "loss": self.losses[1],
            "differences": [
                {"witness": item.witness, "name": item.name, "detail": item.detail}
                for item in self.differences[:_DIFFERENCES_KEPT]
            ],
        }


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed-up of the recovery of an everstep arm over the best other arm.

    Attributes:
        ours, best: these arms.
        best_s, ours_s: what it cost them: rollback and re-run.
        asked: how many times it has to be; None: nothing is asked.
    """

    kill: Kill
    ours: str
    best: str
    best_s: float
    ours_s: float
    asked: float | None = None

    @property
    def times(self) -> float:
        """The ratio."""
        return self.best_s / self.ours_s if self.ours_s else float("inf")

    @property
    def met(self) -> bool:
        """Return True if it reaches the target."""
        return self.asked is None or self.times >= self.asked

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "kill": self.kill,
            "ours": self.ours,
            "best_other": self.best,
            "best_other_s": self.best_s,
            "ours_s": self.ours_s,
            "times": self.times,
            "asked": self.asked,
            "met": self.met,
        }


@dataclass(frozen=True, slots=True)
class DrillReport:
    """All of a drill.

    Attributes:
        network: what lay between the hosts, in words.
        emulation: ``"network namespaces"`` or ``"process groups"``.
        step_s: median step of the run that nobody disturbed, which takes no bases.
        losses: first and last of its rank 0.
        others: step in seconds and losses likewise of runs that nobody disturbed and that consume
            something else than whole gradients, by what it is.
        machine: cores, versions.
    """

    plan: DrillPlan
    network: str
    emulation: str
    outcomes: tuple[Outcome, ...]
    step_s: float
    losses: tuple[float, float]
    seconds: float
    others: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def ran(self) -> bool:
        """Return True if any arm was not refused."""
        return any(outcome.ran for outcome in self.outcomes)

    @property
    def same(self) -> bool:
        """Return True if all arms that claim exactness ended with the same bits."""
        return all(outcome.as_claimed for outcome in self.outcomes if outcome.ran)

    @property
    def ratios(self) -> tuple[Ratio, ...]:
        """For each kill that arms of ours and others of TierCheck's systems have gone through."""
        found = []
        for kill in self.plan.kills:
            here = {one.arm: one for one in self.outcomes if one.kill == kill and one.ran}
            others = [here[name] for name in OTHERS if name in here]
            if not others:
                continue
            best = min(others, key=lambda one: one.total_s)
            asked = self.plan.checks.get(kill)
            for name in OURS:
                if name in here:
                    found.append(
                        Ratio(
                            kill=kill,
                            ours=name,
                            best=best.arm,
                            best_s=best.total_s,
                            ours_s=here[name].total_s,
                            asked=asked,
                        )
                    )
        return tuple(found)

    @property
    def met(self) -> bool:
        """Return True if an everstep arm reaches the target ratio for each kill that has one."""
        found = {ratio.kill for ratio in self.ratios if ratio.met}
        return set(self.plan.checks) <= found

    @property
    def scale(self) -> tuple[float, float] | None:
        """Steps of the undisturbed run that a host's state takes over the link to the store, and
        over that to another host; None: there is no store, or there were no steps."""
        plan = self.plan
        if plan.store == "folder" or not self.step_s:
            return None
        bits = 8 * plan.host_bytes / self.step_s
        return bits / plan.store_bits_per_s, bits / plan.link_bits_per_s

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        plan = self.plan
        return {
            "same": self.same,
            "hosts": plan.hosts,
            "emulation": self.emulation,
            "network": self.network,
            "parallel": plan.parallel,
            "params": plan.model.params,
            "batch": plan.batch,
            "steps": plan.steps,
            "every": plan.every,
            "intervals": {arm: plan.every_of(arm) for arm in plan.arms},
            "kill_after_step": plan.at_step,
            "kill_into_step": plan.into,
            "kill_after_steps": {arm: plan.kill_step(arm) for arm in plan.arms},
            "failpoint": plan.at_point,
            "victim": plan.victim,
            "link_cut": plan.cut,
            "seed": plan.seed,
            "timeout_s": plan.timeout_s,
            "store": plan.store,
            "link_bits_per_s": plan.link_bits_per_s,
            "store_bits_per_s": None if plan.store == "folder" else plan.store_bits_per_s,
            "host_bytes": plan.host_bytes,
            "restore_steps": None if self.scale is None else self.scale[0],
            "ratios": [ratio.as_json() for ratio in self.ratios],
            "met": self.met,
            "undisturbed_step_s": self.step_s,
            "loss_first": self.losses[0],
            "loss_last": self.losses[1],
            "undisturbed_others": {
                name: dict(zip(("step_s", "loss_first", "loss_last"), found, strict=True))
                for name, found in self.others.items()
            },
            "outcomes": [outcome.as_json() for outcome in self.outcomes],
            "machine": self.machine,
            "seconds": self.seconds,
        }
