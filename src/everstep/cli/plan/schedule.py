"""``everstep plan schedule``: when to copy each tensor off the device, and the cost of that."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.output import console, parse_bytes, parse_bytes_per_s
from everstep.cli.common.runs import absolute, checked_path, kind_of
from everstep.cli.plan.schedule_output import (
    check_picture,
    check_target,
    document_of,
    draw_plan,
    show,
)
from everstep.config import nearest
from everstep.errors import EverstepError, OptionError, UnavailableError

if TYPE_CHECKING:
    import torch

    from everstep.plan.schedule.exact import Planned
    from everstep.plan.schedule.plan_file import PlanFile
    from everstep.plan.schedule.steps import Device
    from everstep.plan.schedule.trace import Optimizers, Training

_MODULE = "everstep_planned_model"
_OURS = str(Path(__file__).parents[2])

_Half = Literal["bf16", "fp16"]
_Mode = Literal["direct", "paper"]


_ABOUT = "model batch optimizer gpu in_backward autocast scaler ranks".split()
"""Options that are in the document and in the file of a plan."""


def schedule(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A network's name, or FILE.py:factory.")],
    batch: Annotated[int, typer.Option(min=1, help="Samples in a step.")] = 32,
    optimizer: Annotated[
        str,
        typer.Option(help="Of torch.optim, with its defaults, like AdamW; or FILE.py:function."),
    ] = "sgd",
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
    limit: Annotated[
        str | None,
        typer.Option("--memory-limit", help="Most device memory that a step may take, like 24GB."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(callback=checked_path, help="Write the plan for Method(plan=), as JSON."),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Solve the integer program.")] = False,
    limit_s: Annotated[float, typer.Option(min=1, help="Seconds for --exact.")] = 120.0,
    picture: Annotated[
        Path | None,
        typer.Option(
            callback=checked_path, help="Draw memory and copies over the step (needs matplotlib)."
        ),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """When each tensor of a checkpoint of every step leaves the device (Checkflow).

    Traces one training step without a device, and plans its copies so that the peak of memory stays
    low. Operators take the roofline time of the GPU's data sheet; real ones take longer, which
    leaves more time for copies. A factory gets the batch size and returns a model and a function
    that computes its loss. Exit status 3 if the link is too slow, with the bandwidth that would be
    enough, if the peak of memory is above the limit, or if the steps of a model differ.

    Method(base="scheduled", plan=FILE) executes a plan written with --out. Its deadlines are those
    of a run: all tensors of an optimizer leave, or are duplicated, before its update.
    """
    from everstep.plan.schedule.exact import plan_step
    from everstep.plan.schedule.trace import trace_of

    on = _device(gpu, flops, half_flops, memory)
    disk_bytes_per_s = parse_bytes_per_s("--disk", disk)
    network_bytes_per_s = None if network is None else parse_bytes_per_s("--network", network)
    if (ranks is None) != (network is None):
        raise OptionError("--ranks and --network go together")
    bandwidth = _bandwidth(link, on, gpu)
    limit_bytes = None if limit is None else parse_bytes("--memory-limit", limit)
    _check_targets(out, picture, executable=mode == "direct" and ranks is None)
    start_s = time.perf_counter()
    training = _training(model)
    makes = _optimizer(optimizer)
    with _report_user_errors(model) if ":" in model + optimizer else nullcontext():
        trace = trace_of(
            training,
            batch,
            makes,
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
        executed=out is not None,
    ).within(limit_bytes)
    about = {name: context.params[name] for name in _ABOUT}
    about |= {"network_bytes_per_s": network_bytes_per_s, "memory_limit_bytes": limit_bytes}
    document = document_of(found, about, mode, disk_bytes_per_s)
    written = _write(found, about, out, picture)
    if json_output:
        emit(document)
    else:
        show(console(), found, document, written)
    if found.schedule is None:
        raise typer.Exit(ExitCode.INFEASIBLE)


def _bandwidth(link: str | None, on: Device | None, gpu: str) -> float:
    if link is not None:
        return parse_bytes_per_s("--link", link)
    if on is None:
        raise OptionError(f"--gpu {gpu}: no data sheet says how fast the link is", hint="--link")
    return on.link_bytes_per_s


def _check_targets(out: Path | None, picture: Path | None, *, executable: bool) -> None:
    if out is not None:
        check_target(out)
        if not executable:
            raise OptionError("a plan for Method(plan=) is of one rank, and in the mode direct")
    if picture is not None:
        check_picture(picture)


def _write(
    found: Planned, about: Mapping[str, Any], out: Path | None, picture: Path | None
) -> tuple[PlanFile, Path] | None:
    """Write the plan and draw it; return the plan with its path, None if it was not written."""
    from everstep.plan.schedule.plan_file import plan_file
    from everstep.tiers.durable_files import storage_errors

    if found.schedule is None:
        return None
    plan = plan_file(found.trace, found.problem, found.schedule, about)
    if picture is not None:
        with storage_errors("draw the picture", picture):
            draw_plan(found, plan, f"{about['model']}, batch {about['batch']}", picture)
    if out is None:
        return None
    with storage_errors("write the plan", out):
        out.write_bytes(plan.encode())
    return plan, out


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


def _optimizer(name: str) -> Optimizers:
    """Return the function that makes an optimizer of parameters.

    Raises:
        OptionError: there is none of this name; or the file cannot be loaded.
    """
    import torch

    if ":" in name:
        hint = "def optimizer(parameters): return torch.optim.AdamW(parameters)"
        make = _function_of("--optimizer", name, hint)

        def made(parameters: Any) -> torch.optim.Optimizer:
            found = make(parameters)
            if not isinstance(found, torch.optim.Optimizer):
                kind = type(found).__name__
                raise OptionError(f"--optimizer {name!r}: it returned {kind}", hint=hint)
            return found

        return made
    if name == "sgd":
        return lambda found: torch.optim.SGD(found, 0.1)
    known = {
        word.lower(): value
        for word, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    for other in ("optimizer", "lbfgs", "sparseadam"):  # a closure; gradients of another kind
        known.pop(other, None)
    if name.lower() not in known:
        guess = nearest(name.lower(), known)
        raise OptionError(
            f"--optimizer {name!r}: torch.optim has none of this name",
            hint=f"did you mean {guess!r}?" if guess else "like AdamW, or FILE.py:function",
        )
    return known[name.lower()]


def _training(model: str) -> Training:
    """Return the function that makes a model and its loss."""
    if ":" not in model:
        from everstep.workloads.published import published

        return published(model).training
    made: Training = _function_of("--model", model, "def factory(batch): return model, loss")
    return made


def _function_of(flag: str, told: str, hint: str) -> Any:
    """Return the function of ``FILE.py:function``.

    Raises:
        OptionError: there is no such file or function, or the file raises an exception.
    """
    path, _, name = told.rpartition(":")
    if kind_of(absolute(path)) != "other":
        raise OptionError(f"{flag} {told!r}: there is no file {path}", hint=f"FILE.py:{name}")
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{flag} {told!r}: {path} is no Python file", hint=f"FILE.py:{name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses resolve annotations there
    sys.path.insert(0, str(Path(path).absolute().parent))  # as python FILE.py does
    with _report_user_errors(told):
        spec.loader.exec_module(module)
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise OptionError(f"{flag} {told!r}: {path} has no function {name!r}", hint=hint)
    return found


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
