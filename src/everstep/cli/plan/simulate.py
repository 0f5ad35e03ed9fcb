"""``everstep simulate``: a long run on many accelerators, with failures, for each method."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from everstep.cli.common.errors import JsonFlag, emit
from everstep.cli.common.output import (
    console,
    in_words,
    label,
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
    say,
    seconds_in_words,
    table,
)
from everstep.cli.common.runs import checked_path
from everstep.cli.plan.schedule_output import check_picture
from everstep.config.given import one_of
from everstep.errors import OptionError

if TYPE_CHECKING:
    from everstep.plan.simulation import Cluster, Outcome, Training

_DAY_S = 86_400.0
_DAYS_MAX = 3650.0
_DPI = 120
_BANDWIDTHS = ("link", "peer", "disk", "store", "replay")


_Methods = Annotated[
    list[str] | None, typer.Option(help="Only this method; may be repeated. Default: all.")
]
_Every = Annotated[
    int | None,
    typer.Option(min=1, help="Steps between two bases [default: the best of each method]."),
]
_Failures = Annotated[
    list[str] | None,
    typer.Option(
        help="Mean time between failures of one kind in the whole job, like node=4h; process, "
        "node and rack. Default: as often for each accelerator as in Llama 3's training."
    ),
]
_Bandwidths = Annotated[
    list[str] | None,
    typer.Option(
        help="Like store=1TB/s, of the whole job; link=20GB/s, of an accelerator to host memory; "
        "peer=10GB/s and disk=4GB/s, of a node."
    ),
]
_Picture = Annotated[
    Path | None,
    typer.Option(
        callback=checked_path, help="Also draw where the time went: FILE.png or FILE.svg."
    ),
]


def simulate(
    gpus: Annotated[int, typer.Option(min=1, help="Accelerators of the job.")] = 16_000,
    days: Annotated[float, typer.Option(help="Days to simulate.")] = 54.0,
    method: _Methods = None,
    every: _Every = None,
    state: Annotated[str, typer.Option(help="State of the whole job, like 5.7TB.")] = "5.67TB",
    gradients: Annotated[str, typer.Option(help="Gradients of a step, of the job.")] = "1.62TB",
    step_s: Annotated[str, typer.Option(help="Duration of a step, like 6s or 900ms.")] = "6s",
    mtbf: _Failures = None,
    restart: Annotated[str, typer.Option(help="From a failure until all could read.")] = "5min",
    node: Annotated[int, typer.Option(min=1, help="Accelerators of a node.")] = 8,
    rack: Annotated[int, typer.Option(min=1, help="Nodes that fail together.")] = 2,
    bandwidth: _Bandwidths = None,
    seed: Annotated[int, typer.Option(help="Seed of the failures.")] = 0,
    picture: _Picture = None,
    json_output: JsonFlag = False,
) -> None:
    """Simulates a long training run with failures, with each way to take checkpoints.

    The defaults are a model of 405 billion parameters on 16,000 accelerators for 54 days, with the
    failures of Llama 3's training. Every method meets the same failures. Nothing is trained and no
    device is used; docs/SIMULATION.md has the model, its assumptions, and how far it agrees with
    measurements.
    """
    from everstep.plan.simulation import SCHEMES, Cluster, Training, compare

    if picture is not None:
        check_picture(picture)
    if not 0 < days <= _DAYS_MAX:
        raise OptionError(f"--days {days:g}: more than 0, and at most {_DAYS_MAX:g}")
    cluster = Cluster(
        gpus=gpus,
        gpus_per_node=node,
        nodes_per_rack=rack,
        restart_s=parse_seconds("--restart", restart),
        mtbf_s=None if mtbf is None else dict(map(_failure, mtbf)),
        **dict(map(_bandwidth, bandwidth or ())),
    )
    training = Training(
        parse_bytes("--state", state),
        parse_bytes("--gradients", gradients),
        parse_seconds("--step-s", step_s),
    )
    names = list(SCHEMES) if method is None else method
    outcomes = compare(cluster, training, days * _DAY_S, names, seed=seed, interval_steps=every)
    if picture is not None:
        _draw(outcomes, f"{gpus:,} accelerators, {days:g} days", picture)
    if json_output:
        emit(_document(cluster, training, days, seed, outcomes))
    else:
        _show(console(), cluster, training, days, outcomes)


def _failure(text: str) -> tuple[str, float]:
    kind, _, seconds = text.partition("=")
    return kind, parse_seconds(f"--mtbf {kind}=", seconds)


def _bandwidth(text: str) -> tuple[str, Any]:
    kind, _, bytes_per_s = text.partition("=")
    one_of("bandwidth", kind, _BANDWIDTHS)
    return f"{kind}_bytes_per_s", parse_bytes_per_s(f"--bandwidth {kind}=", bytes_per_s)


def _document(
    cluster: Cluster, training: Training, days: float, seed: int, outcomes: list[Outcome]
) -> dict[str, Any]:
    return {
        "cluster": asdict(cluster),
        "failures_per_day": {kind: rate * _DAY_S for kind, rate in cluster.rates.items()},
        "training": asdict(training),
        "days": days,
        "seed": seed,
        "outcomes": [
            {**asdict(one), "goodput": one.goodput, "lost_gpu_hours": one.lost_gpu_hours}
            for one in outcomes
        ],
    }


def _show(
    out: Console, cluster: Cluster, training: Training, days: float, outcomes: list[Outcome]
) -> None:
    from everstep.plan.simulation import SCHEMES, STORE

    kinds = outcomes[0].failures if outcomes else {}
    failures = ", ".join(f"{count:,} of a {kind}" for kind, count in kinds.items())
    say(
        out,
        f"{cluster.gpus:,} accelerators, {days:g} days; steps of "
        f"{seconds_in_words(training.step_s)}, state {in_words(round(training.state_bytes))}, "
        f"gradients {in_words(round(training.gradient_bytes))} a step; failures: {failures}",
    )
    columns = (
        "method",
        "every",
        "goodput",
        "lost steps",
        "stalled",
        "down",
        "lost",
        "to store",
        "",
    )
    made = table(columns, right=columns[1:-1])
    for one in sorted(outcomes, key=lambda one: -one.goodput):
        made.add_row(
            one.scheme,
            f"{one.interval_steps:,}",
            f"{one.goodput:.2%}",
            f"{one.lost_steps:,.0f}",
            seconds_in_words(one.stall_s) if one.stall_s else "0 s",
            seconds_in_words(one.down_s) if one.down_s else "0 s",
            f"{one.lost_gpu_hours:,.0f} h",
            in_words(round(one.written_bytes[STORE])),
            label(SCHEMES[one.scheme].about + _notes(one)),
        )
    out.print(made)
    say(
        out,
        "every: steps between two bases. lost: accelerator hours without a useful step. down: "
        f"restarts of {seconds_in_words(cluster.restart_s)} each, reading and replay",
    )


def _notes(one: Outcome) -> str:
    notes = f"; {one.approximate} recoveries not exact" if one.approximate else ""
    if one.log_missing:
        notes += f"; without a log in: {', '.join(one.log_missing)} (larger than its link takes)"
    return notes


def _draw(outcomes: list[Outcome], title: str, path: Path) -> None:
    """Draw one bar for each method: the share of the time without useful steps, by cause."""
    from everstep.tiers import storage_errors

    agg: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    shown = sorted(outcomes, key=lambda one: one.goodput)
    figure = figures.Figure(figsize=(9, 0.8 + 0.36 * len(shown)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(shown)
    for cause in shown[0].lost_shares:
        widths = [100 * one.lost_shares[cause] for one in shown]
        axes.barh([one.scheme for one in shown], widths, left=left, label=cause)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("percent of the time without useful steps")
    axes.set_title(title)
    axes.legend(loc="upper right", fontsize="small")
    with storage_errors("draw the picture", path):
        agg.FigureCanvasAgg(figure).print_figure(str(path), dpi=_DPI)
