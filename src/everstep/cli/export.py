"""``everstep export``: write the state of a step for other programs.

``everstep import``: make a run of a state that another program has written.
"""

from __future__ import annotations

import time
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli.common.errors import JsonFlag, emit
from everstep.cli.common.output import (
    console,
    count_of,
    in_words,
    label,
    parse_bytes,
    say,
)
from everstep.cli.common.runs import RUN_ARGUMENT, absolute
from everstep.cli.restore import new_folder
from everstep.errors import OptionError
from everstep.seams import PosixFileSystem

if TYPE_CHECKING:
    import torch

    from everstep.convert import Exported


class _Format(str, Enum):
    safetensors = "safetensors"
    hf = "hf"
    torch = "torch"
    dcp = "dcp"


_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def export(
    run: Annotated[str, RUN_ARGUMENT],
    to: Annotated[_Format, typer.Option(help="Format to write.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File or folder to create.", show_default=False)],
    step: Annotated[
        int | None, typer.Option(help="Step to write; the newest if not given.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="Part, or pattern on names, to write; repeatable."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Convert floating-point tensors: bf16, fp16, fp32, or a name of torch."),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most bytes in a file of safetensors or hf: 5GB."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="For hf: config.json of the model, or the folder that has it."),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Writes the state of a step for other programs.

    safetensors: tensors by name in one file, or in a folder with --shard-size. hf: a folder that
    from_pretrained opens. torch: a file for torch.load. dcp: a folder for
    torch.distributed.checkpoint.load.

    Of one part named with --only, its state_dict is written; otherwise safetensors and hf take the
    only module of the state, torch and dcp a dict of all parts. Sharded tensors are assembled, tied
    ones appear under each name. Every byte read is verified. The run is not changed, and may be
    training. OUT appears complete or not at all.
    """
    from everstep.convert import ExportOptions, export_state

    start_s = time.monotonic()
    shard_bytes = None if shard_size is None else int(parse_bytes("--shard-size", shard_size))
    options = ExportOptions(only or None, _dtype(dtype), shard_bytes, config)
    where = run if "://" in run else str(absolute(run))
    done = export_state(where, Path(absolute(out)), to.value, step, options)
    if json_output:
        emit(_document(done, to.value) | {"seconds": time.monotonic() - start_s})
    else:
        _show(done)


def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="File or folder.", show_default=False)
    ],
    to: Annotated[
        str, typer.Option(metavar="RUN", help="Run folder to create.", show_default=False)
    ],
    part: Annotated[
        str, typer.Option("--as", help="Name of the model in the state, if SRC has only a model.")
    ] = "model",
    step: Annotated[int, typer.Option(min=0, help="Number of the step.")] = 0,
    json_output: JsonFlag = False,
) -> None:
    """Makes a run of a state that another program has written.

    SRC: a file of torch.save or safetensors, a Hugging Face folder, or a folder of
    torch.distributed.checkpoint. The run has one base. everstep.load(RUN) reads it, and
    resume(initial=RUN) begins another run with it. The state of an optimizer names no parameters
    and is left out; resume(initial=SRC) loads that, too.
    """
    from everstep.convert.importing import import_state
    from everstep.convert.run_folder import write_run
    from everstep.convert.sources import open_source
    from everstep.format.writer import CHUNKS, WRITERS, ChunkRing

    folder = new_folder(to)
    opened = open_source(Path(absolute(source)))
    made = import_state(opened, part=part, step=step)
    with closing(ChunkRing(CHUNKS, WRITERS)) as ring:
        run = write_run(PosixFileSystem(), folder, made.rebuilt, ring)
    state = made.rebuilt.state
    if json_output:
        emit(
            {
                "source": opened.path,
                "kind": opened.kind,
                "path": folder,
                "run": run,
                "step": step,
                "parts": made.parts,
                "left_out": [{"part": name, "reason": why} for name, why in made.left_out],
                "tensors": len(state.entries),
                "size_bytes": state.size_bytes,
            }
        )
        return
    show = console()
    parts = ", ".join(made.parts)
    tensors = count_of(len(state.entries), "tensor")
    say(show, f"{opened.kind}: {parts}: {tensors}, {in_words(state.size_bytes)}")
    for name, why in made.left_out:
        say(show, f"{name!r} is left out: {why}", "yellow")
    say(show, f"written to {folder}")


def _document(done: Exported, to: str) -> dict[str, Any]:
    state = done.state
    return {
        "out": done.out,
        "format": to,
        "step": state.step,
        "timeline": state.timeline,
        "base": state.base_step,
        "replayed": state.replayed,
        "exact": state.exact,
        "tensors": done.tensors,
        "size_bytes": done.size_bytes,
        "files": done.files,
        "skipped": state.skipped,
        "notes": state.notes,
    }


def _show(done: Exported) -> None:
    show = console()
    state = done.state
    show.print(
        label(
            f"step {state.step}: {count_of(done.tensors, 'tensor')}, "
            f"{in_words(done.size_bytes)} in {count_of(done.files, 'file')}, "
            + ("exact" if state.exact else "not exact")
        )
    )
    for note in state.notes:
        say(show, note, "yellow")
    say(show, f"written to {done.out}")


def _dtype(text: str | None) -> torch.dtype | None:
    if text is None:
        return None
    import torch

    found = getattr(torch, _DTYPES.get(text, text), None)
    if not isinstance(found, torch.dtype):
        raise OptionError(f"--dtype {text!r} is not a dtype", hint="bf16, fp16, fp32, ...")
    return found
