"""``everstep replay``: replay a run without the updates of some steps."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from everstep.cli.common.errors import JsonFlag, emit
from everstep.cli.common.output import console, count_of, label, table
from everstep.cli.common.runs import RUN_ARGUMENT, open_run
from everstep.cli.restore import check_out, given_up, rebuilding, write_run
from everstep.errors import OptionError

if TYPE_CHECKING:
    from everstep.restore.offline.rebuild import Change, Rebuilt


_ROWS_MAX = 30
_DROP_MAX = 1_000_000
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_CAVEAT = (
    "never exact: gradients are those of the logged run, computed with the dropped updates in "
    "place; buffers, schedules and random generators are as logged"
)


def replay(
    run: Annotated[str, RUN_ARGUMENT],
    to: Annotated[
        int, typer.Option("--to", help="Step to compare the states at.", show_default=False)
    ],
    begin: Annotated[
        int | None,
        typer.Option("--from", help="Begin at the newest base up to this step."),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            "--drop",
            metavar="STEP",
            help="Leave out the updates of this step; also 104-107.",
        ),
    ] = None,
    timeline: Annotated[
        int | None, typer.Option(help="Timeline of the step --to, if several have it.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write the result as a new run, as restore does."),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Replays the log without the updates of some steps, and shows the effect.

    A counterfactual: the remaining gradients are those that were logged, so the result is never
    exactly the result of such a training, and is marked as not exact. Shows which entries differ
    from the logged run at --to, and by how much. Writes nothing without --out. Exit status 3 if the
    optimizer cannot be replayed here.
    """
    from everstep.restore.offline.rebuild import changes
    from everstep.seams import PosixFileSystem

    filesystem = PosixFileSystem()
    start_s = time.monotonic()
    dropped = _steps(drop or [])
    inventory = open_run(filesystem, run)
    folder = None if out is None else check_out(out, inventory)
    with rebuilding(filesystem, inventory) as (rebuilder, ring):
        logged, other = rebuilder.without(to, dropped, begin, timeline)
        found = changes(logged.state, other.state)
        written = None if folder is None else write_run(filesystem, folder, other, ring)
    if json_output:
        emit(
            {
                "path": str(inventory.path),
                "run": inventory.run,
                "step": logged.step,
                "timeline": logged.timeline,
                "base": {"timeline": logged.base.timeline, "step": logged.base.step},
                "replayed": logged.replayed,
                "dropped": sorted(dropped),
                "exact": False,
                "why": other.why,
                "logged_exact": logged.exact,
                "logged_why": logged.why,
                "given_up": given_up(inventory, logged, timeline),
                "entries": _entries(logged),
                "changes": [
                    {"entry": one.entry, "max_abs": one.max_abs, "relative": one.relative}
                    for one in found
                ],
                "out": None if folder is None else str(folder),
                "out_run": written,
                "seconds": time.monotonic() - start_s,
            }
        )
        return
    show = console()
    _show(show, logged, dropped, found)
    if note := given_up(inventory, logged, timeline):
        show.print(label(note, "yellow", 4000), soft_wrap=True)
    if folder is not None:
        show.print(label(f"written to {folder}, as a state that is not exact"), soft_wrap=True)


def _steps(drop: list[str]) -> set[int]:
    found: set[int] = set()
    for text in drop:
        match = _RANGE.fullmatch(text)
        first = int(match[1]) if match else 1
        last = int(match[2] or match[1]) if match else 0
        if first > last or first < 1:
            raise OptionError(f"--drop {text!r} is neither a step nor a range of steps, like 4-7")
        if last - first >= _DROP_MAX:
            raise OptionError(f"--drop {text!r}: at most {_DROP_MAX} steps")
        found.update(range(first, last + 1))
    return found


def _entries(rebuilt: Rebuilt) -> int:
    return len(rebuilt.state.entries) + len(rebuilt.state.objects)


def _show(out: Console, logged: Rebuilt, dropped: set[int], found: list[Change]) -> None:
    left = f"without the updates of {count_of(len(dropped), 'step')}" if dropped else "as logged"
    out.print(
        label(
            f"step {logged.step} of timeline {logged.timeline}, from base {logged.base.step} and "
            f"{count_of(logged.replayed, 'step')} of the log, {left}"
        )
    )
    shown: Any = table(("entry", "max abs", "relative"), right=("max abs", "relative"))
    ordered = sorted(found, key=lambda one: -1.0 if one.relative is None else -one.relative)
    for one in ordered[:_ROWS_MAX]:
        shown.add_row(label(one.entry), _number(one.max_abs), _number(one.relative))
    if found:
        out.print(shown)
    if len(found) > _ROWS_MAX:
        out.print(f"... and {len(found) - _ROWS_MAX:,} more; --json has them all")
    out.print(f"{len(found)} of {_entries(logged)} entries differ from the logged run")
    if logged.why:
        out.print(label(f"the logged run itself: not exact: {logged.why}", "yellow"))
    out.print(label(_CAVEAT, "yellow"), soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
