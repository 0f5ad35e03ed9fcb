"""``everstep plan multistep``: the number of parts of a multi-step base."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from everstep.cli.common.errors import JsonFlag, emit
from everstep.cli.common.output import (
    console,
    in_words,
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
    table,
)
from everstep.errors import OptionError
from everstep.plan.multistep import PAPER_PARTS, Overlap, Pipeline, best_cut, fewest, lower_bound_s

_PARTS_MAX = 1000


def multistep(
    state_bytes: Annotated[str, typer.Option(help="Size of a base, like 14GB.")],
    grad_bytes: Annotated[str, typer.Option(help="Size of all gradients, like 2GB.")],
    link: Annotated[str, typer.Option(help="Bandwidth from device to host, like 25GB/s.")],
    step_ms: Annotated[float, typer.Option(help="Milliseconds of a training step.")],
    update_ms: Annotated[
        float, typer.Option(help="Milliseconds of the step in the optimizer.")
    ] = 0.0,
    forward_ms: Annotated[
        float | None,
        typer.Option(help="Milliseconds of the step in forward [default: a third of the rest]."),
    ] = None,
    held_steps: Annotated[
        int, typer.Option(min=1, help="Steps for which gradients may be kept, in device memory.")
    ] = 1,
    part_ms: Annotated[
        float,
        typer.Option(
            help="Milliseconds of the training thread's own work for each part, as "
            "stats().multistep.part_s of a run has them."
        ),
    ] = 0.0,
    parts_max: Annotated[int, typer.Option(min=1, max=_PARTS_MAX, help="Most parts.")] = 24,
    write_bw: Annotated[
        str | None, typer.Option(help="Bandwidth of writing a base, for sync, like 3GB/s.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Compute how long training waits for a base that is copied over several steps.

    A base is copied in as many parts as steps, cut so that each part fills its step (GoCkpt section
    4.2 with corrections: docs/PLANNING.md), and compared with sync, async and lazy bases. gockpt:
    the update waits for gradients; gockpt_o: the next backward does; held: gradients are kept for
    more steps in additional device memory. These are waits for copies. With --part-ms the work of
    the training thread is shown beside them, and counts for the best number of parts.
    """
    link_bytes_per_s = parse_bytes_per_s("--link", link)
    state = parse_bytes("--state-bytes", state_bytes)
    gradients = parse_bytes("--grad-bytes", grad_bytes)
    pipeline = Pipeline(
        state / link_bytes_per_s,
        gradients / link_bytes_per_s,
        *_step(step_ms, update_ms, forward_ms),
        part_s=part_ms / 1e3,
    )
    ways = {"gockpt": None, "gockpt_o": 0, "held": held_steps}
    rows: dict[str, list[Overlap]] = {
        name: [best_cut(pipeline, parts, held).overlap for parts in range(1, parts_max + 1)]
        for name, held in ways.items()
    }
    bounds = [lower_bound_s(pipeline, parts) for parts in range(1, parts_max + 1)]
    write_s = None
    if write_bw is not None:
        write_s = state / parse_bytes_per_s("--write-bw", write_bw)
    document = _document(pipeline, rows, bounds, write_s, held_steps)
    if json_output:
        emit(document)
    else:
        _show(console(), document, link_bytes_per_s)


def _step(step_ms: float, update_ms: float, forward_ms: float | None) -> tuple[float, float, float]:
    """Return seconds of forward, backward and update."""
    step_s = parse_seconds("--step-ms", f"{step_ms}ms")
    if not 0 <= update_ms < step_ms:
        raise OptionError(f"--update-ms {update_ms:g} does not fit into a step of {step_ms:g} ms")
    update_s = update_ms / 1e3
    forward_s = (step_s - update_s) / 3 if forward_ms is None else forward_ms / 1e3
    if not 0 <= forward_s <= step_s - update_s:
        raise OptionError(
            f"--forward-ms {forward_ms:g} exceeds a step of {step_ms:g} ms without its update"
        )
    return forward_s, step_s - update_s - forward_s, update_s


def _document(
    pipeline: Pipeline,
    rows: dict[str, list[Overlap]],
    bounds: list[float],
    write_s: float | None,
    held_steps: int,
) -> dict[str, Any]:
    return {
        "pipeline": asdict(pipeline),
        "held_steps": held_steps,
        "sync": {"stall_s": write_s},
        "async": {"stall_s": pipeline.state_s},
        "lazy": {"stall_s": rows["gockpt"][0].stall_s},
        "lower_bound_s": bounds,
        **{name: [_row(row) for row in rows[name]] for name in rows},
        "best": {name: _best(rows[name]) for name in rows},
    }


def _best(rows: list[Overlap]) -> int:
    """Return the fewest parts whose loss is close to the least."""
    return fewest([row.lost_s for row in rows])


def _row(row: Overlap) -> dict[str, Any]:
    return {"stall_s": row.stall_s, "lost_s": row.lost_s, **asdict(row)}


def _show(out: Console, found: dict[str, Any], link_bytes_per_s: float) -> None:
    steps = found["held_steps"]
    names = {"gockpt": "gockpt", "gockpt_o": "gockpt_o", "held": f"held {steps}"}
    best = found["best"]
    with_work = found["pipeline"]["part_s"] > 0
    out.print("milliseconds that training waits for a base; > is the best of its column")
    figures = ("parts", *names.values(), "bound", *(("own work",) if with_work else ()))
    shown = table((*figures, ""), right=figures)
    for number, bound_s in enumerate(found["lower_bound_s"], start=1):
        cells = []
        for name in names:
            mark = "> " if best[name] == number else ""
            cells.append(mark + _ms(found[name][number - 1]["stall_s"]))
        note = "lazy" if number == 1 else "the paper's" if number == PAPER_PARTS else ""
        cells.append(_ms(bound_s))
        if with_work:
            cells.append(_ms(found["gockpt"][number - 1]["work_s"]))
        shown.add_row(str(number), *cells, note)
    out.print(shown)
    sync_s = found["sync"]["stall_s"]
    sync = "as long as the disk takes (--write-bw)" if sync_s is None else _ms(sync_s)
    out.print(f"sync: {sync}; async: {_ms(found['async']['stall_s'])}; lazy: one part")
    out.print("parts are cut so that each fills its step; bound: of equal parts, which have copied")
    out.print("all by the end of the last step")
    if with_work:
        out.print("own work comes on top: it counts for which is the best, and is in no bound")
    held = found["held"][best["held"] - 1]
    kept = in_words(round(held["held_s"] * link_bytes_per_s))
    out.print(f"held {steps}: gradients of {kept} are kept on the device, where it is best")
    if best["gockpt_o"] == 1:
        out.print("lazy is best: copying gradients would take more time than it saves")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
