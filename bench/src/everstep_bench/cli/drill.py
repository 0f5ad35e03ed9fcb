"""``everstep drill``: hosts that train together are killed, replaced, and compared bit by bit."""

from __future__ import annotations

import typer

from everstep.cli.common.errors import ExitCode, emit
from everstep.cli.common.output import console
from everstep.cli.common.runs import absolute
from everstep_bench.cli.commands import JSON, as_command
from everstep_bench.drill.plan import DrillPlan


def _run(plan: DrillPlan, *, json_output: bool) -> None:
    from everstep.tiers.durable_files import storage_errors
    from everstep_bench.drill.run import run_drill
    from everstep_bench.harness.display import progress_display

    try:
        with (
            storage_errors("run the drill", plan.folder or absolute(".")),
            progress_display(plan.steps) as display,
        ):
            report = run_drill(plan, display, folder=plan.folder)
    except KeyboardInterrupt:
        typer.echo("interrupted: processes are ended, namespaces and files removed", err=True)
        raise
    if json_output:
        emit(report.as_json())
    else:
        report.present(console())
    if not report.same:
        raise typer.Exit(ExitCode.DIFFERENT)
    raise typer.Exit(ExitCode.OK if report.ran and report.met else ExitCode.INFEASIBLE)


drill = as_command(DrillPlan, _run, (JSON,))
