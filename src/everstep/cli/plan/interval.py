"""``everstep plan interval``: how often to take a base and to write the log; the command group."""

from __future__ import annotations

from dataclasses import asdict, astuple, fields
from typing import Annotated, Any

import typer
from rich.console import Console

from everstep.cli.common.errors import EverstepGroup, JsonFlag, emit
from everstep.cli.common.output import (
    console,
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
    seconds_in_words,
    table,
)
from everstep.cli.plan.auto import auto
from everstep.cli.plan.multistep import multistep
from everstep.cli.plan.schedule import schedule
from everstep.plan.interval import (
    Choice,
    Costs,
    Optimum,
    Point,
    Waste,
    curve,
    optimum,
    write_costs,
)
from everstep.plan.models import daly_interval_s

app = typer.Typer(
    cls=EverstepGroup,
    name="plan",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Computes intervals, parts and schedules from models, before anything runs.",
)

_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1 / 2**0.5, 1, 2**0.5, 2, 4, 8)


@app.callback()
def _group() -> None:
    pass


app.command()(auto)
app.command()(multistep)
app.command()(schedule)


@app.command()
def interval(
    state_bytes: Annotated[str, typer.Option(help="Size of a base, like 14GB.")],
    write_bw: Annotated[str, typer.Option(help="Bandwidth of writing a base, like 3GB/s.")],
    replay_s: Annotated[str, typer.Option(help="Time to replay one step from the log, like 0.2.")],
    mtbf: Annotated[str, typer.Option(help="Mean time between failures, like 4h.")],
    step_s: Annotated[str, typer.Option(help="Duration of a training step, like 1.1 or 900ms.")],
    load_bw: Annotated[
        str | None, typer.Option(help="Bandwidth of loading a base [default: as writing].")
    ] = None,
    diff_write_s: Annotated[
        str, typer.Option(help="Training time that one write of the log costs.")
    ] = "0",
    merge_s: Annotated[
        str, typer.Option(help="Recovery time for each write of the log, besides its steps.")
    ] = "0",
    base_cost_s: Annotated[
        str | None,
        typer.Option(help="Training time of a base [default: all of its write]."),
    ] = None,
    batch_max: Annotated[
        int | None, typer.Option(min=1, help="Most steps in one write of the log.")
    ] = None,
    accelerators: Annotated[int, typer.Option(min=1, help="Accelerators of the job.")] = 1,
    summed: Annotated[
        bool, typer.Option("--summed", help="Batches are summed: right for plain SGD only.")
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    """Compute how often to take a base and to write the log.

    Minimises the time wasted on failures and on checkpointing, with LowDiff's model and corrections
    to it (docs/PLANNING.md). Sizes like 14GB or 12GiB, bandwidths like 3GB/s, durations like 30s,
    5min, 4h; bare numbers are bytes, bytes/s, seconds. Exit status 3 if no choice helps, with the
    number that would be needed.
    """
    costs = Costs(
        state_bytes=parse_bytes("--state-bytes", state_bytes),
        write_bytes_per_s=parse_bytes_per_s("--write-bw", write_bw),
        replay_s=parse_seconds("--replay-s", replay_s),
        mtbf_s=parse_seconds("--mtbf", mtbf),
        step_s=parse_seconds("--step-s", step_s),
        load_bytes_per_s=None if load_bw is None else parse_bytes_per_s("--load-bw", load_bw),
        merge_s=_or_nothing("--merge-s", merge_s),
        batch_write_s=_or_nothing("--diff-write-s", diff_write_s),
        base_cost_s=None if base_cost_s is None else parse_seconds("--base-cost-s", base_cost_s),
        accelerators=accelerators,
    )
    if summed:
        costs = costs.summed()
    found = optimum(costs, batch_max=batch_max)
    intervals = [round(found.choice.interval_steps * factor) for factor in _FACTORS]
    rows = curve(costs, intervals, batch_max=batch_max)
    if json_output:
        emit(_document(costs, found, rows))
    else:
        _show(console(), costs, found, rows)


def _or_nothing(name: str, text: str) -> float:
    return 0.0 if text.strip() in ("0", "0s") else parse_seconds(name, text)


# --- Output -----------------------------------------------------------------------------


def _document(costs: Costs, found: Optimum, rows: list[Choice]) -> dict[str, Any]:
    return {
        "costs": asdict(costs),
        **_of(found.choice),
        "wasted_accelerators": costs.wasted_accelerator_s(found.choice.waste, 1.0),
        "continuous": _of(found.continuous),
        "closed_form": _of(found.closed_form),
        "without_log": _of(found.without_log),
        "without_log_daly_s": daly_interval_s(write_costs(costs)[0], costs.mtbf_s),
        "curve": [_of(row) for row in rows],
    }


def _of(place: Choice | Point) -> dict[str, Any]:
    """Return intervals, and their waste with its components, as plain data."""
    found = {field.name: getattr(place, field.name) for field in fields(place)}
    found["waste"] = {"total": place.waste.total, **asdict(place.waste)}
    return found


def _show(out: Console, costs: Costs, found: Optimum, rows: list[Choice]) -> None:
    best = found.choice
    out.print(
        f"a base every {_steps(best.interval_steps, best.interval_s)}, the log written every "
        f"{_steps(best.batch_steps, best.batch_s)}: {_percent(best.waste.total)} wasted"
    )
    names = ("interval", "batch", "wasted", "lost", "loads", "replay", "bases", "log")
    shown = table(("", *names), right=names)
    for row in rows:
        chosen = row.interval_steps == best.interval_steps
        shown.add_row(
            ">" if chosen else "",
            *(str(row.interval_steps), str(row.batch_steps), *_parts(row.waste)),
            style="bold" if chosen else "",
        )
    plain_bases = found.without_log
    shown.add_row("", str(plain_bases.interval_steps), "no log", *_parts(plain_bases.waste))
    out.print(shown)
    if costs.accelerators > 1:
        lost = costs.wasted_accelerator_s(best.waste, 1.0)
        out.print(f"of {costs.accelerators} accelerators that is the work of {lost:.3g}")
    continuous = found.continuous
    formula = found.closed_form
    daly_s = daly_interval_s(write_costs(costs)[0], costs.mtbf_s)
    out.print(
        f"without a log: {seconds_in_words(plain_bases.interval_s)} (Young), "
        f"{seconds_in_words(daly_s)} (Daly, with failures during writes and restarts)"
    )
    out.print(
        f"as real numbers: {seconds_in_words(continuous.interval_s)} and "
        f"{seconds_in_words(continuous.batch_s)}, {_percent(continuous.waste.total)}"
    )
    out.print(
        f"LowDiff Eq. 10 (batches summed, writing them free): "
        f"{seconds_in_words(formula.interval_s)} and {seconds_in_words(formula.batch_s)}, "
        f"{_percent(formula.waste.total)}"
    )


def _steps(count: int, seconds: float) -> str:
    steps = "step" if count == 1 else f"{count:,} steps"
    return f"{steps} ({seconds_in_words(seconds)})"


def _parts(wasted: Waste) -> list[str]:
    return [_percent(part) for part in (wasted.total, *astuple(wasted))]


def _percent(share: float) -> str:
    return f"{share:.2%}"
