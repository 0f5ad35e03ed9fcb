"""The outcome of a drill, and TierCheck's figures of it.

TierCheck's Table 3 (Exp. 4) adds T_rollback and T_rerun. Here T_rollback is the time until the
ranks that live know of the failure, and that of ``resume()``; T_rerun is what the lost steps
take. The start of the job in between (torchrun, Python, torch) is the same for all arms and in
neither; it is given beside them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from everstep.workloads.comparison import Difference
from everstep_bench.drill.plan import ARMS, OTHERS, OURS, DrillPlan, Kill
from everstep_bench.harness.figures import picked, plain
from everstep_bench.harness.report import Findings, Table, number

_DIFFERENCES_KEPT = 50
_DIFFERENCES_SHOWN = 12
_COLUMNS = ("arm", "detect s", "restore s", "rollback s", "lost steps", "re-run s", "total s",
            "start s", "from", "claims exact", "same bits")  # fmt: skip
_WORDS = ("arm", "from", "claims exact", "same bits")
_KEYS = {
    "reached_step": "reached",
    "recovered_step": "recovered",
    "lost_steps": "lost",
    "replayed_steps": "replayed",
    "claims_exact": "exact",
}


@dataclass(frozen=True)
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

    def cells(self) -> tuple[str | Text, ...]:
        """Return its row of the table."""
        if not self.ran:
            return (self.arm, *["-"] * 7, "refused", "-", "-")
        return (
            self.arm,
            "never" if self.detect_s is None else number(self.detect_s),
            number(self.restore_s),
            number(self.rollback_s),
            f"{self.lost:g}",
            number(self.rerun_s),
            number(self.total_s),
            number(self.launch_s, 1),
            self.from_words,
            "yes" if self.exact else "no",
            "yes" if self.same else Text("NO", "bold red") if self.exact else "near",
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        found: dict[str, Any] = {"arm": self.arm, "kill": self.kill, "refused": self.refused}
        if not self.ran:
            return found
        names = (
            "dead_hosts detect_s launch_s restore_s step_s rollback_s rerun_s total_s sources "
            "size_bytes evidence skipped same"
        )
        return {
            **found,
            **plain(picked(self, names)),
            **{key: getattr(self, name) for key, name in _KEYS.items()},
            "loss_undisturbed": self.losses[0],
            "loss": self.losses[1],
            "differences": plain(self.differences[:_DIFFERENCES_KEPT]),
        }

    def verdict(self) -> Iterator[Text]:
        """Yield lines on what differs."""
        if not self.ran or self.same:
            return
        if self.as_claimed:
            undisturbed, here = self.losses
            yield Text.assemble(
                ("NEAR", "bold"),
                f": {self.arm}, {self.kill}, as it says itself: loss at the end {here:.4f}, "
                f"undisturbed {undisturbed:.4f}",
            )
            return
        count = len(self.differences)
        yield Text.assemble(
            ("DIFFERENT", "bold red"),
            f": {self.arm}, {self.kill}: {count} differences (undisturbed != recovered)",
        )
        for item in self.differences[:_DIFFERENCES_SHOWN]:
            yield Text(f"  {item.witness}: {item.name}: {item.detail}")


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
        """Return it as plain data."""
        found = picked(self, "kill ours ours_s times asked met")
        return {**found, "best_other": self.best, "best_other_s": self.best_s}


@dataclass(frozen=True)
class DrillReport(Findings):
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
                    ours_s = here[name].total_s
                    found.append(Ratio(kill, name, best.arm, best.total_s, ours_s, asked))
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
        return bits / plan.store_bits_per_s, bits / plan.link

    def tables(self) -> Iterator[Table]:
        """Yield a table for each kill."""
        plan = self.plan
        for kill in plan.kills:
            dead = ", ".join(map(str, plan.dead_hosts(kill)))
            what = f"host(s) {dead}" if dead else f"the trainer of host {plan.victim}"
            rows = [one.cells() for one in self.outcomes if one.kill == kill]
            yield Table(f"kill {kill}: {what}", _COLUMNS, rows, _WORDS)

    def notes(self) -> Iterator[str]:
        """Yield what ran, what the columns mean, links and intervals in steps, and ratios."""
        for one in self.outcomes:
            if one.refused is not None:
                yield f"{one.arm} refused: {one.refused}"
        yield f"hosts: {self.network}"
        for name in self.plan.arms:
            if any(one.arm == name and one.ran for one in self.outcomes):
                yield f"{name}: {ARMS[name].words}"
        yield "rollback = detect (until the last living rank knows) + restore (resume() of all)"
        yield "re-run = lost steps x median step of that run; total = both (TierCheck, Table 3)"
        yield "start: torchrun, Python and torch of the new start; in none of them"
        runs = {"": (self.step_s, *self.losses), **self.others}
        for name, (step_s, first, last) in runs.items():
            consuming = f", consuming {name} gradients" if name else ""
            loss = f"loss {first:.4f} -> {last:.4f}"
            yield f"undisturbed{consuming}: {1e3 * step_s:.0f} ms a step, {loss}"
        yield f"{self.seconds:.0f} s in all"
        yield from self._scale()
        yield from self._ratios()

    def present(self, console: Console) -> None:
        """Print tables, notes and verdict."""
        super().present(console)
        for outcome in self.outcomes:
            for line in outcome.verdict():
                console.print(line, soft_wrap=True)
        if not self.ran:
            console.print(Text("NOTHING RAN: every arm was refused", "bold"))
        elif self.same:
            count = sum(outcome.same for outcome in self.outcomes)
            console.print(
                Text.assemble(
                    ("IDENTICAL", "bold green"),
                    f": {count} recoveries, and every rank of each ended in the bits of the run "
                    "that nobody disturbed",
                ),
                soft_wrap=True,
            )

    def figures(self) -> dict[str, Any]:
        """Return everything as plain data."""
        plan = self.plan
        names = "hosts parallel batch steps every victim seed timeout_s store host_bytes"
        keys = ("step_s", "loss_first", "loss_last")
        return {
            **picked(plan, names),
            **picked(self, "same emulation network met outcomes ratios machine seconds"),
            "params": plan.model.params,
            "intervals": {arm: plan.every_of(arm) for arm in plan.arms},
            "kill_after_step": plan.at_step,
            "kill_into_step": plan.into,
            "kill_after_steps": {arm: plan.kill_step(arm) for arm in plan.arms},
            "failpoint": plan.at_point,
            "link_cut": plan.cut,
            "link_bits_per_s": plan.link,
            "store_bits_per_s": None if plan.store == "folder" else plan.store_bits_per_s,
            "restore_steps": None if self.scale is None else self.scale[0],
            "undisturbed_step_s": self.step_s,
            "loss_first": self.losses[0],
            "loss_last": self.losses[1],
            "undisturbed_others": {
                name: dict(zip(keys, found, strict=True)) for name, found in self.others.items()
            },
        }

    def _scale(self) -> Iterator[str]:
        """Yield links and intervals in steps, beside TierCheck's."""
        if self.scale is None:
            return
        plan = self.plan
        (store, peer) = self.scale
        slower = [
            f"{arm} {statistics.median(times) / self.step_s:.2f}"
            for arm in plan.arms
            if (times := [o.step_s for o in self.outcomes if o.arm == arm and o.ran])
        ]
        yield (
            f"scale: a host's state, {plan.host_bytes / 1e6:.1f} MB, takes {store:.2f} undisturbed "
            f"steps from the store and {peer:.2f} from another host (TierCheck, Table 3, less what "
            "its local memory takes: 3.3 and 1.5)"
        )
        yield f"bases every {of_arms(plan, plan.every_of)} steps"
        yield f"steps before the kill, in undisturbed ones: {', '.join(slower)}"

    def _ratios(self) -> Iterator[str]:
        """Yield the ratio for each kill, and its target if there is one."""
        for ratio in self.ratios:
            asked = ""
            if ratio.asked is not None:
                asked = f"; asked {ratio.asked:g}: {'met' if ratio.met else 'NOT MET'}"
            yield (
                f"ratio {ratio.kill}: best other {ratio.best} {ratio.best_s:.2f} s / {ratio.ours} "
                f"{ratio.ours_s:.2f} s = {ratio.times:.2f}{asked}"
            )
        there = {ratio.kill for ratio in self.ratios}
        for kill, asked_times in self.plan.checks.items():
            if kill not in there:
                yield f"ratio {kill}: asked {asked_times:g}: NOT MET, there is none"


def of_arms(plan: DrillPlan, figure: Callable[[str], int]) -> str:
    """Return ``"10"``, if it is the same for all arms; else ``"11 (gemini), 21 (checkfreq)"``."""
    found = {arm: figure(arm) for arm in plan.arms}
    if len(set(found.values())) == 1:
        return str(found.popitem()[1])
    return ", ".join(f"{value} ({arm})" for arm, value in found.items())


class Display(Protocol):
    """Receiver of the progress of a drill."""

    def event(self, text: str) -> None:
        """Something happened that is worth a line."""
        ...

    def progress(self, name: str, step: int) -> None:
        """Show the position of the start of this name; called often."""
        ...


def introduce(plan: DrillPlan, network: str) -> list[str]:
    """Return the lines that announce the plan."""
    when = f"after step {of_arms(plan, plan.kill_step)}"
    if plan.into:
        when = f"{plan.into:g} of a step {when}"
    if plan.at_point is not None:
        when = f"at {plan.at_point} in the base of step {plan.at_step}"
    return [
        f"{plan.hosts} hosts: {network}",
        f"a GPT of {plan.model.params:,} parameters under {plan.parallel}, {plan.steps} steps, a "
        f"base every {of_arms(plan, plan.every_of)}; killed {when}; seed {plan.seed}",
        f"arms {', '.join(plan.arms)}; kills {', '.join(plan.kills)}; first a run that nobody "
        "disturbs",
    ]
