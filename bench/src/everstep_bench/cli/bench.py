"""``everstep bench``: measurements, next to the hardware's limit and to what others do."""

from __future__ import annotations

import typer

from everstep.cli.common.errors import EverstepGroup
from everstep_bench import options
from everstep_bench.cli.commands import add_verb

app = typer.Typer(
    cls=EverstepGroup,
    name="bench",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measures, next to the hardware's limit and to others.",
)


@app.callback()
def _group() -> None:
    pass


add_verb(app, "persist", options.PersistOptions, "persist.run:run_persist")
add_verb(app, "schedule", options.ScheduleOptions, "schedule.tables:run_schedule")
add_verb(app, "stall", options.StallOptions, "stall.run:run_stall")
add_verb(app, "scale", options.ScaleOptions, "scale.run:run_scale")
add_verb(app, "step", options.StepOptions, "step.run:run_step")
add_verb(app, "frequency", options.FrequencyOptions, "step.frequency:run_frequency")
add_verb(app, "convergence", options.ConvergenceOptions, "convergence:run_convergence")
add_verb(app, "lossy-recovery", options.LossyOptions, "lossy:run_lossy")
add_verb(app, "multistep", options.MultistepOptions, "multistep.run:run_multistep")
add_verb(app, "tiers", options.TiersOptions, "tiers.run:run_tiers")
add_verb(app, "crash-interval", options.CrashOptions, "crash:run_crash")
