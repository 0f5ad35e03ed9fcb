"""``everstep plan auto``: the method that the next start of a run would choose, and why."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from everstep.cli.common.errors import JsonFlag, emit
from everstep.cli.common.output import console, in_words, label, say, seconds_in_words, table
from everstep.cli.common.runs import RUN_ARGUMENT, open_run, reading
from everstep.events import read_events
from everstep.seams import PosixFileSystem

if TYPE_CHECKING:
    from everstep.plan.auto import Choice, Observed


def auto(run: Annotated[str, RUN_ARGUMENT], json_output: JsonFlag = False) -> None:
    """Shows which method the next start with method="auto" would choose, and why.

    From what the event log of the run has measured: stalls, steps, recoveries and failures. Host
    memory and optimizers, which may rule a log out, are looked at when the run starts.
    """
    from everstep.plan.auto import Observed, choose

    path = open_run(PosixFileSystem(), run).path
    with reading(path):
        observed = Observed.of(read_events(path, rank=0))
    choice = choose(observed)
    if json_output:
        emit(_document(observed, choice))
    else:
        _show(console(), observed, choice)


def _document(observed: Observed | None, choice: Choice) -> dict[str, Any]:
    candidates = [
        {**asdict(one), "wasted": one.wasted if math.isfinite(one.wasted) else None}
        for one in choice.candidates
    ]
    measured = None if observed is None else {**asdict(observed), "mtbf_s": observed.mtbf_s}
    return {
        "method": choice.method,
        "why": choice.why,
        "predicted": None if choice.candidate is None else choice.candidate.wasted,
        "candidates": candidates,
        "measured": measured,
    }


def _show(out: Console, observed: Observed | None, choice: Choice) -> None:
    say(out, f"{choice.method}: {choice.why}", "bold")
    if observed is None or not choice.candidates:
        return
    columns = ("wasted", "of this, bases and log", "lost at a failure")
    made = table(("method", *columns, ""), right=columns)
    for one in choice.candidates:
        possible = math.isfinite(one.wasted)
        made.add_row(
            f"{one.method}, in {one.log_to}" if one.log_to else one.method,
            f"{one.wasted:.2%}" if possible else "-",
            f"{one.overhead:.2%}" if possible else "-",
            seconds_in_words(one.lost_s) if possible else "-",
            label(one.why_not),
        )
    out.print(made)
    shown = {
        "a step": observed.step_s,
        "cost of a base": observed.base_cost_s.get(observed.method),
        "copy of a base": observed.captured_s.get(observed.method),
        "until it is on disk": observed.durable_s.get(observed.method),
        "resume": observed.load_s,
        "replay of a step": observed.replay_s,
        "between failures": observed.mtbf_s,
    }
    figures = ", ".join(f"{name} {seconds_in_words(s)}" for name, s in shown.items() if s)
    say(
        out,
        f"measured in {seconds_in_words(observed.trained_s)}, with {observed.failures} failures: "
        f"{figures}; a base {in_words(round(observed.state_bytes))}, gradients of a step "
        f"{in_words(round(observed.gradient_bytes))}",
    )
