"""Runs a drill: all kills and arms, and whatever happens, nothing of it is left."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from everstep.bench.demo.workspace import interruptible, workspace
from everstep.bench.workloads import stdlib_text
from everstep.drill.hosts import Hosts
from everstep.drill.job import CHILD
from everstep.drill.network import Network, choose_network
from everstep.drill.plan import DrillPlan
from everstep.drill.report import DrillReport, Outcome
from everstep.drill.scenario import Drill, median_step_s
from everstep.drill.show import Display, introduce
from everstep.errors import UnavailableError
from everstep.version import __version__

__all__ = ["run_drill"]

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
        plan: from :func:`~everstep.drill.plan.drill_plan`.
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
    begin_s = time.monotonic()
    word = secrets.token_hex(3)
    with interruptible(), workspace(folder, "drill") as place:
        between = (
            choose_network(plan.links, word, plan.hosts, plan.link_bits_per_s)
            if network is None
            else network(word)
        )
        try:
            hosts = Hosts(place, word, plan.hosts, between)
        except BaseException:
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
    text = place / "text.bin"
    text.write_bytes(stdlib_text(_TEXT_BYTES))
    drill = Drill(plan, hosts, place, text, display, child)
    alone = drill.undisturbed()
    display.event(f"undisturbed: {1e3 * median_step_s(alone):.0f} ms a step")
    outcomes: list[Outcome] = []
    refused: dict[str, str] = {}
    for kill in plan.kills:
        for arm in plan.arms:
            outcome = Outcome(arm, kill, refused.get(arm))
            if arm not in refused:  # it does not depend on what is killed
                outcome = drill.run(arm, kill, alone)
            if outcome.refused is not None:
                refused[arm] = outcome.refused
            outcomes.append(outcome)
    losses = [float.fromhex(loss) for _, loss in alone.losses(0)]
    return DrillReport(
        plan,
        hosts.network.describe(),
        hosts.network.name,
        tuple(outcomes),
        median_step_s(alone),
        (losses[0], losses[-1]),
        time.monotonic() - begin_s,
        _machine(),
    )


def _machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "everstep": __version__,
    }
