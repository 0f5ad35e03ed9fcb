"""``everstep bench``: measurements, next to the hardware's limit and to what others do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.common.errors import EverstepGroup, JsonFlag
from everstep.cli.common.paths import checked_path
from everstep.cli.common.units import parse_bytes, parse_bytes_per_s, parse_seconds
from everstep_bench.cli.common import (
    Arms,
    Batch,
    Check,
    Folder,
    FreeCore,
    Link,
    Params,
    Repeats,
    Seed,
    measured,
    tell,
)

__all__ = [
    "app",
    "convergence",
    "crash_interval",
    "frequency",
    "lossy_recovery",
    "multistep",
    "persist",
    "schedule",
    "stall",
    "step",
    "tiers",
]


def lossy_recovery(
    steps: Annotated[int, typer.Option(help="Of each training.")] = 300,
    every: Annotated[int, typer.Option(help="Steps from base to base.")] = 25,
    fail_every: Annotated[int, typer.Option(help="Steps from failure to failure.")] = 24,
    seed: Seed = 0,
    folder: Folder = None,
    json_output: JsonFlag = False,
) -> None:
    """Trains on through failures that are recovered from a log of lossy gradients.

    Loss at the end and on unseen text, next to a training without failures and to one with a dense
    log; and how far each recovered state is from the one that was lost (TierCheck, experiment 8).
    """
    from everstep_bench.lossy import LossyOptions, present, run_lossy

    options = LossyOptions(
        steps=steps, every=every, fail_every=fail_every, seed=seed, folder=folder
    )
    tell(measured(run_lossy, options), present, json_output=json_output)


def tiers(
    steps: Annotated[int, typer.Option(help="Of each of the two trainings.")] = 200,
    ranks: Annotated[int, typer.Option(help="Processes that train together.")] = 2,
    every: Annotated[int, typer.Option(help="Steps from base to base.")] = 10,
    keep: Annotated[int, typer.Option(help="Bases, and copies.")] = 2,
    params: Params = "500k",
    batch: Batch = 4,
    seed: Seed = 1234,
    tier: Annotated[
        str | None,
        typer.Option(help="Where copies go: a URL or an empty folder [default: one of its own]."),
    ] = None,
    folder: Folder = None,
    picture: Annotated[
        Path | None,
        typer.Option(callback=checked_path, help="Draw bytes over steps (needs matplotlib)."),
    ] = None,
    check: Check = False,
    json_output: JsonFlag = False,
) -> None:
    """Trains with bases in memory, peers, disks and copies, and looks how many bytes are where.

    In each step, and between, against what was announced at the start (TierCheck, experiment 9);
    and what tiers add to the training thread and to the processors, next to the same training
    without them. Nodes are EMULATED: processes and folders of this machine.
    """
    from everstep.cli.common.pictures import check_picture
    from everstep_bench.stall.options import parse_params
    from everstep_bench.tiers import show
    from everstep_bench.tiers.options import TiersOptions
    from everstep_bench.tiers.run import run_tiers

    options = TiersOptions(
        steps=steps,
        ranks=ranks,
        every=every,
        keep=keep,
        params=parse_params(params),
        batch=batch,
        seed=seed,
        place=tier,
        folder=folder,
    )
    if picture is not None:
        check_picture(picture)
    report = measured(run_tiers, options)
    if picture is not None:
        show.picture(report, picture)
    tell(report, show.present, json_output=json_output, failed=check and not report.all_met())


def multistep(
    copies: Annotated[
        str, typer.Option(help="Steps that a copy of the whole state takes: 4, or 4,8.")
    ] = "4,8",
    ratios: Annotated[
        str, typer.Option(help="Bytes of gradients to bytes of state: 2/14, or 2/14,4/12.")
    ] = "2/14,4/12",
    parts: Annotated[
        str, typer.Option("--parts", "--k", help="Numbers of parts: 1-24, or 1,2,4,7,12,24.")
    ] = "1-24",
    step_ms: Annotated[float, typer.Option(help="Milliseconds of a step.")] = 100.0,
    state_bytes: Annotated[str, typer.Option(help="Of parameters and moments.")] = "48MB",
    layers: Annotated[int, typer.Option(help="Parameters that are trained.")] = 48,
    held_steps: Annotated[
        int, typer.Option(help="Steps for which gockpt_o keeps gradients, in device memory.")
    ] = 1,
    repeats: Repeats = 3,
    seed: Seed = 1234,
    free_core: FreeCore = True,
    folder: Folder = None,
    check: Check = False,
    json_output: JsonFlag = False,
) -> None:
    """Bases over several steps: how long each number of parts holds training up, and the model.

    Steps are as long as is asked for; copies go through an EMULATED link that takes so many of
    them for the whole state. The model is that of everstep plan multistep. How long all of it
    takes is said before it begins.
    """
    from everstep_bench.multistep.options import (
        MultistepOptions,
        parse_copies,
        parse_parts,
        parse_ratios,
    )
    from everstep_bench.multistep.run import about_s, run_multistep
    from everstep_bench.multistep.show import present

    options = MultistepOptions(
        copies=parse_copies(copies),
        ratios=parse_ratios(ratios),
        parts=parse_parts(parts),
        repeats=repeats,
        step_s=step_ms / 1e3,
        state_bytes=int(parse_bytes("--state-bytes", state_bytes)),
        layers=layers,
        held_steps=held_steps,
        seed=seed,
        free_core=free_core,
        folder=folder,
    )
    typer.echo(f"this takes about {about_s(options) / 60:.1f} minutes", err=True)
    report = measured(run_multistep, options)
    tell(report, present, json_output=json_output, failed=check and not report.all_met())


def crash_interval(
    params: Params = "10M",
    batch: Batch = 4,
    crash_every: Annotated[
        str, typer.Option(help="Seconds from failure to failure: 10s, or 10s,30s,60s.")
    ] = "10s",
    crashes: Annotated[int, typer.Option(help="Failures of each arm.")] = 3,
    link: Link = None,
    spare_keeper: Annotated[
        bool, typer.Option("--spare-keeper", help="Kill training only, not its keeper.")
    ] = False,
    repeats: Repeats = 5,
    seed: Seed = 1234,
    free_core: FreeCore = True,
    arms: Arms = None,
    folder: Folder = None,
    check: Check = False,
    json_output: JsonFlag = False,
) -> None:
    """Trains, is killed every so many seconds, and resumes: GoCkpt's Table 1.

    Each arm saves at its own best interval, which follows from what a save of it costs. Counted
    are the steps that are there in the end, for each second of training and resuming.
    """
    from everstep_bench.crash.options import ARMS, CrashOptions
    from everstep_bench.crash.run import run_crash
    from everstep_bench.crash.show import present
    from everstep_bench.stall.options import parse_arms, parse_params

    options = CrashOptions(
        params=parse_params(params),
        batch=batch,
        repeats=repeats,
        seed=seed,
        free_core=free_core,
        folder=folder,
        crash_every_s=tuple(
            dict.fromkeys(parse_seconds("--crash-every", word) for word in crash_every.split(","))
        ),
        crashes=crashes,
        link_bytes_per_s=None if link is None else parse_bytes_per_s("--link", link),
        spare_keeper=spare_keeper,
        arms=parse_arms(arms, ARMS),
    )
    report = measured(run_crash, options)
    tell(report, present, json_output=json_output, failed=check and not report.all_met())


_EXACT_S = 115.0  # two minutes, with what a solver takes to notice

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


@app.command()
def persist(
    size: Annotated[str, typer.Option(help="Of the state: parameters and moments.")] = "1GiB",
    repeats: Repeats = 5,
    seed: Annotated[int, typer.Option(help="Of the state, and of the order of arms.")] = 1234,
    folder: Folder = None,
    check: Check = False,
    json_output: JsonFlag = False,
) -> None:
    """Saves and loads one state: everstep, the raw disk, torch.save, safetensors, DCP.

    All arms take turns in rounds. Columns: GB/s, CPU seconds per GB from live tensors to
    durable, the share of what the disk gives to raw O_DIRECT transfers, and the speed next
    to torch.save with fsync. Loading is uncached, and ours verifies every byte.
    """
    from everstep_bench.persist.run import PersistOptions, run_persist
    from everstep_bench.persist.show import present

    options = PersistOptions(int(parse_bytes("--size", size)), repeats, seed, folder)
    report = measured(run_persist, options)
    met = all(verdict.met for verdict in report.verdicts())
    tell(report, present, json_output=json_output, failed=check and not met)


@app.command()
def schedule(
    gpu: Annotated[str, typer.Option(help="Whose data sheet gives the times.")] = "rtx3090",
    adam: Annotated[bool, typer.Option("--adam", help="Adam in place of plain SGD.")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Solve integer programs, too, 2 minutes each at most.")
    ] = False,
    executed: Annotated[
        bool, typer.Option("--executed", help="Carry plans out here, and compare, instead.")
    ] = False,
    compute: Annotated[
        bool, typer.Option("--compute", help="With --executed: layers that are not paced.")
    ] = False,
    disk: Annotated[str, typer.Option(help="Bandwidth of the disk, like 3GB/s.")] = "3GB/s",
    folder: Folder = None,
    check: Check = False,
    json_output: JsonFlag = False,
) -> None:
    """Plans a checkpoint of every step for eight networks: Checkflow's Table I and Figure 2.

    Nothing runs on a device: steps are traced without one, and times of operators come from a
    data sheet. The paper's figures stand beside. With --executed a small model is trained here
    with method="checkflow", behind emulated links: how long steps wait, next to the prediction.
    """
    if executed:
        from everstep_bench.schedule import show_executed
        from everstep_bench.schedule.executed import ExecutedOptions, run_executed

        found = measured(run_executed, ExecutedOptions(compute=compute, folder=folder))
        failed = check and not found.all_met()
        tell(found, show_executed.present, json_output=json_output, failed=failed)
        return
    from everstep_bench.schedule.report import ScheduleOptions
    from everstep_bench.schedule.show import present
    from everstep_bench.schedule.tables import run_schedule

    options = ScheduleOptions(
        gpu=gpu,
        adam=adam,
        exact_s=_EXACT_S if exact else None,
        disk_bytes_per_s=parse_bytes_per_s("--disk", disk),
    )
    report = measured(run_schedule, options)
    failed = check and not report.all_met()
    tell(report, present, json_output=json_output, failed=failed)


@app.command()
def stall(
    params: Params = "10M",
    every: Annotated[
        str, typer.Option(help="Steps of a block, each with one save: one number, or 1,10,50.")
    ] = "8",
    repeats: Repeats = 5,
    within: Annotated[
        float | None,
        typer.Option(help="Seconds: rounds that would not be over by then are left out."),
    ] = None,
    seed: Seed = 1234,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Of parameters, gradients and moments: float32 or bfloat16.")
    ] = "float32",
    batch: Annotated[
        int | None,
        typer.Option(help="Sequences of a step [default: 1 on a CPU, 64 on a GPU]."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="Of the model, however wide that makes them [default: as GPT-2's]."),
    ] = None,
    link: Link = None,
    writers: Annotated[int, typer.Option(help="Other processes that flush as much.")] = 0,
    free_core: FreeCore = True,
    python_heavy: Annotated[
        bool, typer.Option("--python-heavy", help="Add pure Python to each step.")
    ] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also with each mechanism off in turn.")
    ] = False,
    arms: Arms = None,
    folder: Folder = None,
    picture: Annotated[
        Path | None,
        typer.Option(callback=checked_path, help="Draw a save of some arms (needs matplotlib)."),
    ] = None,
    curves: Annotated[
        Path | None,
        typer.Option(
            callback=checked_path, help="Draw keeper and link over time (needs matplotlib)."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(callback=checked_path, help="Write all blocks as Chrome trace events."),
    ] = None,
    check: Check = False,
    json_output: JsonFlag = False,
) -> None:
    """Trains and saves: everstep's methods, torch.save, DCP, torchsnapshot, no checkpoint.

    All arms take turns in rounds. For each save: how long the training thread is held up,
    by cause; what training loses by the clock on the wall, next to the same steps without a
    save; how long until the state is durable, and how fast the loop goes meanwhile.
    """
    from everstep.cli.common.pictures import check_picture, check_target
    from everstep_bench.stall import timeline
    from everstep_bench.stall.options import (
        StallOptions,
        parse_arms,
        parse_every,
        parse_params,
    )
    from everstep_bench.stall.run import run_stall
    from everstep_bench.stall.show import present

    options = StallOptions(
        params=parse_params(params),
        every=parse_every(every),
        repeats=repeats,
        within_s=within,
        seed=seed,
        device=device,
        link_bytes_per_s=None if link is None else parse_bytes_per_s("--link", link),
        writers=writers,
        free_core=free_core,
        python_heavy=python_heavy,
        ablate=ablate,
        arms=parse_arms(arms),
        batch=batch,
        dtype=dtype,
        layers=layers,
        curves=curves is not None or json_output or trace is not None,
        folder=folder,
    )
    if picture is not None:
        check_picture(picture)
    if curves is not None:
        check_picture(curves, "--curves")
    if trace is not None:
        check_target(trace)
    report = measured(run_stall, options)
    if trace is not None:
        timeline.trace(report, trace)
    if picture is not None:
        timeline.picture(report, picture)
    if curves is not None:
        timeline.curves(report, curves)
    tell(report, present, json_output=json_output, failed=check and not report.all_met())


@app.command()
def step(
    params: Params = "10M",
    batch: Batch = 4,
    every: Annotated[
        str, typer.Option(help="Steps between whole states, and of a block: 10, or 10,50.")
    ] = "10",
    ratio: Annotated[
        str, typer.Option(help="Share of a gradient that is kept: 0.01, or 0.001,0.01,0.1.")
    ] = "0.01",
    batch_steps: Annotated[
        str, typer.Option(help="Steps of the log that are written at a time: 5, or 1,5,20.")
    ] = "5",
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 5,
    kills: Annotated[int, typer.Option(help="SIGKILLs of each arm; 0 leaves them out.")] = 1,
    replay: Annotated[
        bool, typer.Option("--replay/--no-replay", help="Time replay of the log, too.")
    ] = True,
    seed: Seed = 1234,
    free_core: FreeCore = True,
    arms: Arms = None,
    folder: Folder = None,
    check: Check = False,
    json_output: JsonFlag = False,
) -> None:
    """Trains so that every step can be gone back to: logs, differences, a base each step.

    All arms take turns in rounds, next to dense and to compressed training without a log. Then
    each is killed with SIGKILL and resumed: steps lost, seconds, and whether every bit is that
    of an uninterrupted training. Of several values the first is the usual one.
    """
    from everstep_bench.stall.options import parse_arms, parse_every, parse_params
    from everstep_bench.step.options import ARMS, StepOptions, parse_ratios
    from everstep_bench.step.run import run_step
    from everstep_bench.step.show import present

    options = StepOptions(
        params=parse_params(params),
        batch=batch,
        repeats=repeats,
        seed=seed,
        free_core=free_core,
        folder=folder,
        every=parse_every(every),
        ratio=parse_ratios(ratio),
        batch_steps=parse_every(batch_steps),
        kills=kills,
        replay=replay,
        arms=parse_arms(arms, ARMS),
    )
    report = measured(run_step, options)
    tell(report, present, json_output=json_output, failed=check and not report.all_met())


@app.command()
def frequency(
    params: Params = "10M",
    batch: Batch = 4,
    within: Annotated[str, typer.Option(help="Slow-down at most, like 3.5%.")] = "3.5%",
    every_max: Annotated[int, typer.Option(help="No interval above is tried.")] = 64,
    ratio: Annotated[str, typer.Option(help="Share of a gradient that is kept.")] = "0.01",
    batch_steps: Annotated[
        int, typer.Option(help="Steps of the log that are written at a time.")
    ] = 5,
    repeats: Annotated[int, typer.Option(help="Paired rounds for each interval.")] = 3,
    seed: Seed = 1234,
    free_core: FreeCore = True,
    arms: Arms = None,
    tiers: Annotated[
        str | None,
        typer.Option(help="Everstep's arms copy bases there, too: folders, URLs, with commas."),
    ] = None,
    folder: Folder = None,
    json_output: JsonFlag = False,
) -> None:
    """Looks for the smallest interval that slows training down by no more than so much.

    For each arm 1, 2, 4, ... steps, then bisection; each interval in paired rounds, whose median
    counts (LowDiff, experiment 4).
    """
    from everstep_bench.stall.options import parse_arms, parse_params
    from everstep_bench.step.frequency import present, run_frequency
    from everstep_bench.step.options import ARMS, FrequencyOptions, parse_share, parse_tiers

    options = FrequencyOptions(
        params=parse_params(params),
        batch=batch,
        repeats=repeats,
        seed=seed,
        free_core=free_core,
        folder=folder,
        within=parse_share(within),
        ratio=parse_share(ratio),
        batch_steps=batch_steps,
        every_max=every_max,
        arms=parse_arms(arms, ARMS),
        tiers=parse_tiers(tiers),
    )
    report = measured(run_frequency, options)
    tell(report, present, json_output=json_output)


@app.command()
def convergence(
    steps: Annotated[int, typer.Option(help="Of each training.")] = 400,
    seeds: Annotated[int, typer.Option(help="Trainings of each arm.")] = 2,
    json_output: JsonFlag = False,
) -> None:
    """Trains the demo's model on compressed gradients, next to dense training.

    AdamW and SGD; top-k, sampled threshold and int8, with and without error feedback. Losses at
    the end and on unseen text, and what a step's gradients take in a log.
    """
    from everstep_bench.convergence import ConvergenceOptions, present, run_convergence

    options = ConvergenceOptions(steps=steps, seeds=tuple(range(seeds)))
    report = measured(run_convergence, options)
    tell(report, present, json_output=json_output)


app.command("lossy-recovery")(lossy_recovery)
app.command()(multistep)
app.command()(tiers)
app.command("crash-interval")(crash_interval)
