"""Runs a drill: all kills and arms, and whatever happens, nothing of it is left."""

from __future__ import annotations

import dataclasses
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from everstep.errors import UnavailableError
from everstep.seams.processes.processes import available_cores
from everstep.version import __version__
from everstep.workloads import stdlib_text
from everstep.workloads.processes import interruptible, workspace
from everstep_bench.drill.arms import ARMS, Consumes
from everstep_bench.drill.hosts import Hosts
from everstep_bench.drill.job import CHILD, TEXT, Start
from everstep_bench.drill.network import Namespaces, Network, choose_network
from everstep_bench.drill.plan import DrillPlan
from everstep_bench.drill.report import DrillReport, Outcome
from everstep_bench.drill.scenario import Drill, median_step_s
from everstep_bench.drill.show import Display, introduce
from everstep_bench.drill.store import Store, weed

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
