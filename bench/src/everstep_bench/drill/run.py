"""Run a drill: all kills and arms, and whatever happens, nothing of it is left.

For each arm and kill: train, kill, replace what died, resume, train on, compare.
"""

from __future__ import annotations

import dataclasses
import itertools
import platform
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from everstep.errors import UnavailableError
from everstep.seams.processes.processes import PidWatch, available_cores
from everstep.version import __version__
from everstep.workloads import stdlib_text
from everstep.workloads.comparison import Difference, compare_fingerprints, compare_losses
from everstep.workloads.processes import interruptible, workspace
from everstep_bench.drill.hosts import Hosts
from everstep_bench.drill.job import CHILD, TEXT, Start, order_of
from everstep_bench.drill.network import Namespaces, Network, Store, choose_network, weed
from everstep_bench.drill.plan import ARMS, Consumes, DrillPlan, Kill
from everstep_bench.drill.processes import DrillError
from everstep_bench.drill.report import Display, DrillReport, Outcome, introduce

_WARM_STEPS = 2
_DETECT_MORE_S = 15.0


class Drill:
    """Common parts of the kills and arms of one drill.

    Args:
        place: for text, orders, journals and logs.
        child: how torchrun starts a training process.
    """

    def __init__(
        self,
        plan: DrillPlan,
        hosts: Hosts,
        place: Path,
        display: Display,
        child: Sequence[str] = CHILD,
    ) -> None:
        self._plan = plan
        self._hosts = hosts
        self._place = place
        self._display = display
        self._child = child

    def replan(self, plan: DrillPlan) -> None:
        """Goes on with other rates."""
        self._plan = plan

    def undisturbed(self, consumes: Consumes = "whole") -> Start:
        """The run that all others whose optimizer consumes the same are compared with: no kill,
        and no Checkpointer."""
        self._hosts.reset()
        name = "undisturbed" if consumes == "whole" else f"undisturbed-{consumes}"
        alone = self._start(name, None, {}, CHILD, scenario=name, consumes=consumes)
        try:
            alone.follow(lambda: alone.all_found("finished"))
        finally:
            alone.end()
        return alone

    def run(self, arm: str, kill: Kill, alone: Start) -> Outcome:
        """Goes through one scenario.

        Raises:
            DrillError: something else happened than the drill says.
        """
        plan = self._plan
        self._hosts.reset()
        scenario = f"{arm}-{kill}"
        first = self._start(
            f"{scenario}-1", arm, self._failpoints(arm), self._child, scenario=scenario
        )
        try:
            refused = self._train_to_the_kill(first, arm)
            if refused is not None:
                return Outcome(arm, kill, refused)
            killed_s = self._kill(first, kill)
            detect_s = self._detected(first, kill, killed_s)
        finally:
            first.end()
        dead = plan.dead_hosts(kill)
        for host in dead:
            self._hosts.replace(host)
        if self._hosts.store is not None and ARMS[arm].staged:
            self._hosts.drop_runs()
        self._display.event(
            f"{arm}, {kill}: killed after step {first.reached}; "
            + (f"host(s) {', '.join(map(str, dead))} replaced, " if dead else "")
            + "starting again"
        )
        again = self._start(f"{scenario}-2", arm, {}, self._child, scenario=scenario)
        try:
            again.follow(lambda: again.all_found("resumed"))
            again.follow(lambda: again.all_found("finished"))
        finally:
            again.end()
        end = plan.end_step(arm)
        differences = compare(plan, alone, (first, again), end)
        times = killed_s, detect_s
        outcome = _outcome(plan, arm, kill, first, again, times, differences)
        outcome = replace(outcome, losses=(_loss(plan, alone, end), _loss(plan, again, end)))
        said = "the same bits" if outcome.same else f"{len(outcome.differences)} DIFFERENCES"
        if not (outcome.same or outcome.exact):
            said = "near it, as it says itself"
        self._display.event(
            f"{arm}, {kill}: back at step {outcome.recovered} from {outcome.from_words}; at the "
            f"end {said}"
        )
        return outcome

    # --- Below --------------------------------------------------------------------------

    def _start(
        self,
        name: str,
        arm: str | None,
        failpoints: dict[int, str],
        child: Sequence[str],
        *,
        scenario: str,
        consumes: Consumes = "whole",
    ) -> Start:
        order = order_of(
            self._plan,
            self._hosts,
            name,
            arm,
            self._place,
            consumes=consumes,
            scenario=scenario,
        )
        return Start(
            self._hosts,
            order,
            self._place,
            failpoints=failpoints,
            child=child,
            progress=self._display.progress,
        )

    def _failpoints(self, arm: str) -> dict[int, str]:
        plan = self._plan
        point = self._plan.at_point
        if point is None:
            return {}
        hit = plan.kill_step(arm) // plan.every_of(arm)  # a visit for each base
        return {plan.victim: f"{point}=kill:{hit}"}

    def _train_to_the_kill(self, start: Start, arm: str) -> str | None:
        """Returns when the kill is due, or with why the arm is refused."""
        plan = self._plan
        victim = self._plan.victim
        start.follow(
            lambda: start.all_found("resumed") or start.found(victim, "refused") is not None
        )
        refused = start.found(victim, "refused")
        if refused is not None:
            return str(refused["why"])
        if plan.at_point is None:
            start.follow(lambda: start.step(victim) >= plan.kill_step(arm))
            time.sleep(plan.into * median_step_s(start))
            return None
        self._to_the_failpoint(start)
        return None

    def _to_the_failpoint(self, start: Start) -> None:
        """Returns when a process of the victim has died at the failpoint.

        Raises:
            DrillError: none did, an interval after the base.
        """
        plan = self._plan
        victim = self._plan.victim
        keepers = [item.pid for item in self._hosts.processes(victim) if item.is_keeper]
        watches = [PidWatch(pid) for pid in (start.pid(victim), *keepers)]
        try:
            # Whoever dies there takes its agent along: an end that is none of ours is found here.
            while not any(watch.ended() for watch in watches):
                start.poll()
                if start.step(victim) >= plan.at_step + plan.every:
                    raise DrillError(
                        f"host {victim} has not come to {plan.at_point} within the base of step "
                        f"{plan.at_step}",
                        hint="a shared folder's manifest is rank 0's: --victim 0; a keeper that is "
                        "a process does not die with this arm, perhaps",
                    )
                if start.silent():
                    raise DrillError(f"{start.name}: nothing happens on the way to {plan.at_point}")
                time.sleep(0.005)
        finally:
            for watch in watches:
                watch.close()

    def _kill(self, start: Start, kill: Kill) -> float:
        """Kills; returns when."""
        plan = self._plan
        dead = plan.dead_hosts(kill)
        if not dead:
            killed_s = time.monotonic()
            self._hosts.kill_process(plan.victim, start.pid(plan.victim))
            return killed_s
        if plan.cut:
            for host in dead:
                self._hosts.network.cut(host)
        killed_s = time.monotonic()
        for host in dead:
            self._hosts.kill(host)
        return killed_s

    def _detected(self, start: Start, kill: Kill, killed_s: float) -> float | None:
        dead = self._plan.dead_hosts(kill) or (self._plan.victim,)
        living = [rank for rank in range(self._plan.hosts) if rank not in dead]
        if not living:
            return 0.0
        knew_s = start.await_loss(living, self._plan.timeout_s + _DETECT_MORE_S)
        if knew_s is None:
            self._display.event("the ranks that live have not noticed in time, and are ended")
            return None
        return max(0.0, knew_s - killed_s)


def compare(
    plan: DrillPlan, alone: Start, starts: Sequence[Start], end: int | None = None
) -> tuple[Difference, ...]:
    """Compare the losses and final states of every rank with the undisturbed run.

    The live state is described by :mod:`everstep.workloads.comparison`, which shares no code with
    everstep.

    Args:
        end: last step of the run that was disturbed, if not that of the plan.
    """
    found: list[Difference] = []
    last = plan.steps if end is None else end
    for rank in range(plan.hosts):
        ends = [_description(alone, rank, last), _description(starts[-1], rank, last)]
        if not all(ends):
            found.append(Difference("live state", f"rank {rank}", "has not come to the end"))
        losses = [item for item in alone.losses(rank) if item[0] <= last]
        here = [
            *compare_fingerprints(*ends),
            *compare_losses(last, losses, [start.losses(rank) for start in starts]),
        ]
        found += [Difference(one.witness, f"rank {rank}: {one.name}", one.detail) for one in here]
    return tuple(found)


def _loss(plan: DrillPlan, start: Start, step: int) -> float:
    """The mean of all ranks in a step."""
    found = [
        float.fromhex(loss)
        for rank in range(plan.hosts)
        for number, loss in start.losses(rank)
        if number == step
    ]
    return statistics.fmean(found) if found else float("nan")


def _description(start: Start, rank: int, step: int) -> dict[str, str]:
    """The state of a rank after a step, in words; nothing if it has not come there."""
    for item in start.events[rank]:
        named = (item["event"], item.get("number", item.get("step")))
        if named in (("described", step), ("finished", step)):
            return dict(item["fingerprint"])
    return {}


def median_step_s(start: Start) -> float:
    """Seconds from one step of rank 0 to the next, without the first ones; 0 if there are none."""
    times = [item["at_s"] for item in start.events[0] if item["event"] == "step"][_WARM_STEPS:]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0


def _into(start: Start, killed_s: float) -> float:
    """Return the fraction of a step that had passed since the last one ended, on any rank."""
    ends = [item["at_s"] for events in start.events for item in events if item["event"] == "step"]
    step_s = median_step_s(start)
    if not ends or not step_s:
        return 0.0
    return round(min(1.0, max(0.0, killed_s - float(max(ends))) / step_s), 2)


def _outcome(
    plan: DrillPlan,
    arm: str,
    kill: Kill,
    first: Start,
    again: Start,
    times: tuple[float, float | None],
    differences: tuple[Difference, ...],
) -> Outcome:
    ready = [item["at_s"] for events in again.events for item in events if item["event"] == "ready"]
    back = [item for events in again.events for item in events if item["event"] == "resumed"]
    return Outcome(
        arm,
        kill,
        dead_hosts=plan.dead_hosts(kill),
        reached=first.reached,
        into=_into(first, times[0]) if plan.into else 0.0,
        recovered=back[0]["step"],
        detect_s=times[1],
        launch_s=max(ready) - again.launched_s,
        restore_s=max(item["at_s"] for item in back) - max(ready),
        step_s=median_step_s(first),
        sources=tuple(item["source"] for item in back),
        size_bytes=sum(item["size_bytes"] for item in back),
        replayed=max(item["replayed"] for item in back),
        exact=all(item["exact"] for item in back),
        evidence=back[0]["evidence"],
        skipped=tuple(back[0]["skipped"]),
        differences=differences,
    )


_TEXT_BYTES = 1 << 19


def run_drill(
    plan: DrillPlan,
    display: Display,
    *,
    folder: Path | None = None,
    child: Sequence[str] = CHILD,
    network: Callable[[str], Network] | None = None,
) -> DrillReport:
    """Runs the drill; whatever happens, no process, no namespace and no temporary folder is left.

    Args:
        plan: from :func:`~everstep_bench.drill.plan.drill_plan`.
        display: where progress is shown.
        folder: kept with orders, journals and logs; must be new or empty (default: temporary).
        child: how torchrun starts a training process.
        network: makes the network of a random word (default: what the plan says).

    Raises:
        DrillError: when anything else happens than the drill says.
        UnavailableError: this machine lacks what was asked for.
        OptionError: ``folder`` holds something already.
        KeyboardInterrupt: on Ctrl-C, SIGTERM or SIGHUP, after the clean-up.
    """
    if not Path("/proc/self/environ").exists():
        raise UnavailableError("drills find their processes in /proc, which is not here")
    if plan.store != "folder":
        weed()
    begin_s = time.monotonic()
    word = secrets.token_hex(3)
    with interruptible(), workspace(folder, "drill") as place:
        store_rate = None if plan.store == "folder" else plan.store_bits_per_s
        between = (
            choose_network(plan.links, word, plan.hosts, plan.link, store_bits_per_s=store_rate)
            if network is None
            else network(word)
        )
        store: Store | None = None
        try:
            if store_rate is not None and isinstance(between, Namespaces):
                store = Store(place / "store", word, between)
            hosts = Hosts(place, word, plan.hosts, between, store=store)
        except BaseException:
            if store is not None:
                store.close()
            between.close()
            raise
        try:
            for line in introduce(plan, between.describe()):
                display.event(line)
            return _run(plan, display, hosts, place, child, begin_s)
        finally:
            hosts.close()


def _run(
    plan: DrillPlan,
    display: Display,
    hosts: Hosts,
    place: Path,
    child: Sequence[str],
    begin_s: float,
) -> DrillReport:
    (place / TEXT).write_bytes(stdlib_text(_TEXT_BYTES))
    drill = Drill(plan, hosts, place, display, child)
    consumed: list[Consumes] = ["whole", *(ARMS[arm].consumes for arm in plan.arms)]
    alone = {consumes: drill.undisturbed(consumes) for consumes in dict.fromkeys(consumed)}
    step_s = median_step_s(alone["whole"])
    display.event(f"undisturbed: {1e3 * step_s:.0f} ms a step")
    network = hosts.network
    if plan.restore_steps is not None and isinstance(network, Namespaces):
        link, to_store = plan.rates_for(step_s)
        plan = dataclasses.replace(plan, link=link, store_link=to_store)
        network.limit(link, to_store)
        drill.replan(plan)
        display.event(f"links from now on: {network.describe()}")
    outcomes: list[Outcome] = []
    refused: dict[str, str] = {}
    for kill in plan.kills:
        for arm in plan.arms:
            outcome = Outcome(arm, kill, refused.get(arm))
            if arm not in refused:  # it does not depend on what is killed
                outcome = drill.run(arm, kill, alone[ARMS[arm].consumes])
            if outcome.refused is not None:
                refused[arm] = outcome.refused
            outcomes.append(outcome)
    others = {name: start for name, start in alone.items() if name != "whole"}
    store = "" if hosts.store is None else f"; {hosts.store.describe()}"
    return DrillReport(
        plan=plan,
        network=network.describe() + store,
        emulation=network.name,
        outcomes=tuple(outcomes),
        step_s=step_s,
        losses=_losses(alone["whole"]),
        seconds=time.monotonic() - begin_s,
        others={name: (median_step_s(start), *_losses(start)) for name, start in others.items()},
        machine=_machine(),
    )


def _losses(start: Start) -> tuple[float, float]:
    """The first and the last of rank 0."""
    found = [float.fromhex(loss) for _, loss in start.losses(0)]
    return found[0], found[-1]


def _machine() -> dict[str, Any]:
    return {
        "cores": len(available_cores()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "everstep": __version__,
    }
