"""``everstep plan schedule``: when to copy each tensor off the device, and the cost of that.

Pictures: check that one can be drawn, and draw the memory of a step.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.output import console, in_words, parse_bytes_per_s, seconds_in_words
from everstep.cli.common.runs import absolute, checked_path, kind_of
from everstep.errors import EverstepError, OptionError, UnavailableError

if TYPE_CHECKING:
    import torch

    from everstep.plan.schedule.exact import Planned
    from everstep.plan.schedule.steps import Device
    from everstep.plan.schedule.trace import Optimizers, Training

_MODULE = "everstep_planned_model"
_OURS = str(Path(__file__).parents[2])

_Optimizer = Literal["sgd", "adam"]
_Half = Literal["bf16", "fp16"]
_Mode = Literal["direct", "paper"]


def schedule(
    model: Annotated[str, typer.Option(help="A network's name, or FILE.py:factory.")],
    batch: Annotated[int, typer.Option(min=1, help="Samples in a step.")] = 32,
    optimizer: Annotated[_Optimizer, typer.Option(help="Plain, with its defaults.")] = "sgd",
    in_backward: Annotated[
        bool,
        typer.Option("--in-backward", help="Update each parameter once its gradient is computed."),
    ] = False,
    autocast: Annotated[
        _Half | None, typer.Option(help="The loss is computed under autocast to this type.")
    ] = None,
    scaler: Annotated[
        bool, typer.Option("--scaler", help="A GradScaler scales the loss, as fp16 needs it.")
    ] = False,
    gpu: Annotated[
        str,
        typer.Option(help="GPU whose data sheet gives operator times; cpu, cuda: measured."),
    ] = "rtx3090",
    flops: Annotated[
        str | None, typer.Option(help="FLOP/s in float32 instead of the data sheet's, like 60e12.")
    ] = None,
    half_flops: Annotated[
        str | None, typer.Option(help="FLOP/s in 16-bit floats on tensor cores, like 900e12.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Bandwidth of the GPU's memory, like 3TB/s.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Bandwidth to the host, like 40GB/s [default: of the GPU].")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=2, help="Number of ranks under DistributedDataParallel (with --network)."),
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Bandwidth of each rank to the others, like 25GB/s.")
    ] = None,
    disk: Annotated[str, typer.Option(help="Bandwidth of the disk, like 3GB/s.")] = "3GB/s",
    mode: Annotated[
        _Mode, typer.Option(help="direct: offload from live tensors; paper: always duplicate.")
    ] = "direct",
    exact: Annotated[bool, typer.Option("--exact", help="Solve the integer program.")] = False,
    limit_s: Annotated[float, typer.Option(min=1, help="Seconds for --exact.")] = 120.0,
    picture: Annotated[
        Path | None,
        typer.Option(callback=checked_path, help="Draw memory over the step (needs matplotlib)."),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """When each tensor of a checkpoint of every step leaves the device (Checkflow).

    Traces one training step without a device, and plans its copies so that the peak of memory stays
    low. Operators take the roofline time of the GPU's data sheet; real ones take longer, which
    leaves more time for copies. A factory gets the batch size and returns a model and a function
    that computes its loss. Exit status 3 if the link is too slow, with the bandwidth that would be
    enough, or if the steps of a model differ.
    """
    from everstep.plan.schedule.exact import plan_step
    from everstep.plan.schedule.trace import trace_of

    on = _device(gpu, flops, half_flops, memory)
    disk_bytes_per_s = parse_bytes_per_s("--disk", disk)
    network_bytes_per_s = None if network is None else parse_bytes_per_s("--network", network)
    if (ranks is None) != (network is None):
        raise OptionError("--ranks and --network go together")
    if link is not None:
        bandwidth = parse_bytes_per_s("--link", link)
    elif on is not None:
        bandwidth = on.link_bytes_per_s
    else:
        raise OptionError(f"--gpu {gpu}: no data sheet says how fast the link is", hint="--link")
    if picture is not None:
        check_picture(picture)
    training = _training(model)
    of_a_file = ":" in model
    start_s = time.perf_counter()
    with _report_user_errors(model) if of_a_file else nullcontext():
        trace = trace_of(
            training,
            batch,
            _optimizer(optimizer),
            in_backward=in_backward,
            autocast=_dtype(autocast),
            scaled=scaler,
            ranks=ranks,
            measured_on=gpu if on is None else None,
        )
    found = plan_step(
        trace,
        time.perf_counter() - start_s,
        on,
        bandwidth,
        mode,
        exact_s=limit_s if exact else None,
        network_bytes_per_s=network_bytes_per_s,
    )
    about: dict[str, Any] = {
        "model": model,
        "batch": batch,
        "optimizer": optimizer,
        "gpu": gpu,
        "in_backward": in_backward,
        "autocast": autocast,
        "scaler": scaler,
        "ranks": ranks,
        "network_bytes_per_s": network_bytes_per_s,
    }
    document = _document(found, about, mode, disk_bytes_per_s)
    if picture is not None and found.schedule is not None:
        from everstep.tiers.durable_files import storage_errors

        with storage_errors("draw the picture", picture):
            draw_memory(found, f"{model}, batch {batch}", picture)
    if json_output:
        emit(document)
    else:
        _show(console(), found, document)
    if found.schedule is None:
        raise typer.Exit(ExitCode.INFEASIBLE)


def _device(
    name: str, flops: str | None, half_flops: str | None, memory: str | None
) -> Device | None:
    """Return the device of that name with the given figures replaced; None: measure on this
    machine.
    """
    import torch

    from everstep.plan.schedule.steps import device

    given = {
        "flops_per_s": None if flops is None else parse_bytes_per_s("--flops", flops),
        "half_flops_per_s": (
            None if half_flops is None else parse_bytes_per_s("--half-flops", half_flops)
        ),
        "memory_bytes_per_s": None if memory is None else parse_bytes_per_s("--memory", memory),
    }
    changed = {key: value for key, value in given.items() if value is not None}
    if name in ("cpu", "cuda"):
        if changed:
            raise OptionError(f"--gpu {name} is measured: nothing can be put in its place")
        if name == "cuda" and not torch.cuda.is_available():
            raise UnavailableError(
                "--gpu cuda: there is no CUDA device here", hint="a data sheet's name, or cpu"
            )
        return None
    return device(name).with_figures(**changed) if changed else device(name)


def _dtype(half: _Half | None) -> torch.dtype | None:
    import torch

    return None if half is None else {"bf16": torch.bfloat16, "fp16": torch.float16}[half]


def _optimizer(name: _Optimizer) -> Optimizers:
    import torch

    return torch.optim.Adam if name == "adam" else lambda found: torch.optim.SGD(found, 0.1)


def _training(model: str) -> Training:
    """Return the function that makes a model and its loss."""
    path, colon, name = model.rpartition(":")
    if not colon:
        from everstep.workloads.published import published

        return published(model).training
    if kind_of(absolute(path)) != "other":
        raise OptionError(f"--model {model!r}: there is no file {path}", hint="FILE.py:factory")
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"--model {model!r}: {path} is no Python file", hint="FILE.py:factory")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses resolve annotations there
    sys.path.insert(0, str(Path(path).absolute().parent))  # as python FILE.py does
    with _report_user_errors(model):
        spec.loader.exec_module(module)
    factory: Any = getattr(module, name, None)
    if not callable(factory):
        raise OptionError(
            f"--model {model!r}: {path} has no function {name!r}",
            hint="def factory(batch): return model, loss",
        )
    made: Training = factory
    return made


@contextmanager
def _report_user_errors(model: str) -> Iterator[None]:
    """Report exceptions of a user's file as an error with its line; exceptions of our own code
    pass.

    Raises:
        OptionError: the file, its model or its loss raised an exception.
    """
    path = str(Path(model.rpartition(":")[0]).absolute())
    try:
        yield
    except EverstepError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if frame.filename == path]
        if frames[-1].filename.startswith(_OURS) and isinstance(error, Exception):
            raise
        where = f", line {theirs[-1].lineno}" if theirs else ""
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise OptionError(f"--model {model!r}{where}: {text}") from error


def _document(
    found: Planned, about: dict[str, Any], mode: str, disk_bytes_per_s: float
) -> dict[str, Any]:
    problem = found.problem
    plan = found.schedule
    needed = found.needed_bytes_per_s
    return {
        **about,
        "mode": mode,
        "times": found.times,
        "traced_on": found.trace.device,
        "notes": list(found.trace.notes),
        "method": found.method,
        "operators": len(found.trace.operators),
        "step_s": problem.step_s,
        "link_bytes_per_s": problem.link_bytes_per_s,
        "needed_bytes_per_s": needed if needed < math.inf else None,
        "margin": problem.link_bytes_per_s / needed - 1,
        "snapshot_bytes": problem.size_bytes,
        "peak_bytes": {
            "without": problem.peak_bytes,
            "all_at_once": found.blocking_peak_bytes,
            "planned": None if plan is None else plan.peak_bytes,
            "bound": None if plan is None else plan.bound_bytes,
        },
        "gap": None if plan is None else plan.gap,
        "chunk_bytes": None if plan is None else plan.chunk_bytes,
        "chunks": None if plan is None else len(plan.placements),
        "duplicated_bytes": None if plan is None else _duplicated(found),
        "disk_bytes_per_s": found.disk_bytes_per_s,
        "persist_every_steps": found.every_steps(disk_bytes_per_s),
        "trace_s": found.trace_s,
        "plan_s": found.plan_s,
        "infeasible": None if found.infeasible is None else found.infeasible.message,
    }


def _duplicated(found: Planned) -> int:
    assert found.schedule is not None
    places = found.schedule.placements
    return sum(place.chunk.size_bytes for place in places if place.snapshot is not None)


def _show(out: Console, found: Planned, document: dict[str, Any]) -> None:
    problem = found.problem
    plan = found.schedule
    step = seconds_in_words(problem.step_s)
    out.print(
        f"{document['model']}, batch {document['batch']}, {document['optimizer']}: "
        f"{document['operators']} operators in {step} ({found.times})"
    )
    for note in found.trace.notes:
        out.print(note)
    needed = found.needed_bytes_per_s / 1e9
    link = problem.link_bytes_per_s / 1e9
    out.print(
        f"checkpoint of {in_words(problem.size_bytes)} each step: takes {needed:.1f} GB/s of the "
        f"link's {link:.1f} ({document['margin']:+.0%})"
    )
    if plan is None:
        assert found.infeasible is not None
        out.print(f"infeasible: {found.infeasible.message}")
        return
    extra = plan.peak_bytes - problem.peak_bytes
    out.print(
        f"peak of memory {in_words(plan.peak_bytes)}: {in_words(extra)} more than without "
        f"checkpoints, {in_words(found.blocking_peak_bytes - plan.peak_bytes)} less than with a "
        "duplicate of everything at once"
    )
    out.print(
        f"no plan has a peak below {in_words(plan.bound_bytes)}: gap {plan.gap:.2%}, with chunks "
        f"of {in_words(plan.chunk_bytes)}; {in_words(document['duplicated_bytes'])} are duplicated "
        f"({found.method})"
    )
    out.print(
        f"persisting each takes {found.disk_bytes_per_s / 1e9:.1f} GB/s of a disk; "
        f"it keeps up with one in {document['persist_every_steps']}"
    )
    out.print(
        f"traced on {document['traced_on']} in {seconds_in_words(found.trace_s)}, "
        f"planned in {seconds_in_words(found.plan_s)}"
    )


_INCHES = (10.0, 4.0)
_DPI = 150


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn, before anything is computed for it.

    Raises:
        UnavailableError: matplotlib is missing.
        OptionError: there is no such folder, or no such kind of picture.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError(
            "a picture needs matplotlib, which is not installed",
            hint="pip install matplotlib, or leave out --picture",
        )
    check_target(path)
    canvas: Any = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    kinds = canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise OptionError(
            f"--picture: no picture is drawn as {path.suffix!r}", hint=f"one of {', '.join(kinds)}"
        )


def check_target(path: Path) -> None:
    """Check that a file can be written to ``path``, before anything is computed for it.

    Raises:
        OptionError: there is no such folder, or it is one.
    """
    if not path.absolute().parent.is_dir():
        raise OptionError(f"there is no folder {path.absolute().parent}", hint="make it first")
    if path.is_dir():
        raise OptionError(f"{path} is a folder", hint="name a file in it")


def draw_memory(found: Planned, title: str, path: Path) -> None:
    """Draw memory over the time of a step, with the plan's snapshots and without."""
    from everstep.plan.schedule.schedule import memory_of

    assert found.schedule is not None
    agg: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    ends_ms = [s * 1e3 for s in accumulate(found.problem.seconds)]
    planned = memory_of(found.problem, found.schedule.placements)
    for label, values in (("with checkpoints", planned), ("without", found.problem.live_bytes)):
        axes.step([0.0, *ends_ms], [v / 1e6 for v in (values[0], *values)], label=label)
    at_once = found.blocking_peak_bytes / 1e6
    axes.axhline(at_once, linestyle=":", color="grey", label="all duplicated at once (peak)")
    axes.set(xlabel="ms of the step", ylabel="MB", title=title, ylim=(0, at_once * 1.05))
    axes.legend(loc="lower right")
    agg.FigureCanvasAgg(figure).print_figure(str(path), dpi=_DPI)
