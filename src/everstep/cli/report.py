"""``everstep report``: one page about a run, for a browser."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.output import console, count_of, in_words, say
from everstep.cli.common.runs import RUN_ARGUMENT, absolute, checked_path, open_run, reading
from everstep.cli.plan.schedule_output import check_target
from everstep.events import read_events
from everstep.seams import PosixFileSystem
from everstep.seams.progress import progress

if TYPE_CHECKING:
    from everstep.run.scan import Inventory


def report(
    run: Annotated[str, RUN_ARGUMENT],
    out: Annotated[
        Path | None,
        typer.Option(
            callback=checked_path,
            help="File to write; without it everstep-report.html in this folder.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all bases back, and show which are good.")
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    """Writes one page of HTML about a run: steps, tiers, stalls, recoveries, failures.

    The page is complete in itself and needs no network. Its figures come from the event log in the
    run folder and from the records of its bases. The run may be training. Exit status 1 if
    --verify finds damage.
    """
    from everstep.report import RunReport, page_of
    from everstep.tiers import storage_errors

    target = Path(absolute(out or Path("everstep-report.html")))
    check_target(target)
    filesystem = PosixFileSystem()
    inventory = open_run(filesystem, run)
    with reading(inventory.path):
        events = read_events(inventory.path)
    verdicts = _verdicts(filesystem, inventory) if verify else None
    made = RunReport.of(events, inventory, verdicts)
    page = page_of(made, time.time()).encode()
    with storage_errors("write the report", target):
        target.write_bytes(page)
    damaged = [key for key, verdict in (verdicts or {}).items() if verdict != "good"]
    if json_output:
        emit(
            {
                "path": target,
                "size_bytes": len(page),
                "events": len(events),
                "steps": made.step,
                "failures": made.failures,
                "lost_steps": made.lost_steps,
                "trained_s": made.trained_s,
                "stall_s": made.stall_s,
                "comparisons": made.comparisons,
                "damaged": [{"timeline": one[0], "step": one[1]} for one in damaged],
            }
        )
    else:
        shown = console()
        say(
            shown,
            f"{target}: {in_words(len(page))}, {count_of(len(events), 'event')}, "
            f"{count_of(len(made.recoveries), 'start')}, {count_of(len(made.bases), 'base')}",
        )
        if damaged:
            say(shown, f"damaged: {', '.join(f'step {step}' for _, step in damaged)}", "red")
    raise typer.Exit(ExitCode.DIFFERENT if damaged else ExitCode.OK)


def _verdicts(filesystem: PosixFileSystem, inventory: Inventory) -> dict[tuple[int, int], str]:
    """Read all bases back; return ``"good"`` or the damage, by timeline and step."""
    from everstep.cli.verify import bytes_to_read, check_base
    from everstep.format.writer import CHUNKS, WRITERS, ChunkRing

    found: dict[tuple[int, int], str] = {}
    bases = [base for base in inventory.bases if base.is_usable or base.status == "damaged"]
    with (
        contextlib.closing(ChunkRing(CHUNKS, WRITERS)) as ring,
        progress("verify", sum(map(bytes_to_read, bases))) as bar,
    ):
        for base in bases:
            checked = check_base(filesystem, inventory, base, ring, bar)
            words = "; ".join(damage.problem for damage in checked.damages)
            found[base.id.timeline, base.id.step] = "good" if checked.ok else words
    return found
