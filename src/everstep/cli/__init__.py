"""The command ``everstep``: one module per verb.

``ls``, ``inspect``, ``verify``, ``du``  read a run and never write into it
``rm``          deletes one base
``restore``     writes the state of any logged step into a new run
``replay``      replays a run without the updates of some steps
``ps``, ``stop``  list and end the keeper processes of this user
``doctor``      checks this machine
``plan``        computes intervals and schedules from models, without measurements
``demo``        trains, is killed, resumes, compares every bit

``common`` holds shared code: ``errors``, ``output``, ``runs``, ``paths``, ``log``, ``audit``.

Other distributions add verbs (``plugins``); everstep-bench adds two:

``drill``   kills hosts that train together, replaces them, compares every bit
``bench``   measures, next to the disk's limit and to other libraries

Exit status: 0 fine, 1 damage or difference found, 2 usage, 3 infeasible or goal not met, 4
environment, 130 interrupted. With ``--json`` standard output carries one document, also for errors;
none if the command is interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from everstep.cli.common.errors import EXIT_STATUS, EverstepGroup, ExitCode
from everstep.cli.demo import demo
from everstep.cli.doctor import doctor
from everstep.cli.du import du
from everstep.cli.inspect import inspect
from everstep.cli.ls import ls
from everstep.cli.plan.interval import app as _plan
from everstep.cli.plugins import add_plugged_in
from everstep.cli.ps import ps
from everstep.cli.replay import replay
from everstep.cli.restore import restore
from everstep.cli.rm import rm
from everstep.cli.stop import stop
from everstep.cli.verify import verify

__all__ = ["app", "main"]

app = typer.Typer(
    cls=EverstepGroup,
    name="everstep",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Every training step, recoverable: looks at runs, checks them, measures.",
    epilog=f"Exit status: {EXIT_STATUS}.",
)


def _version(requested: bool) -> None:
    if requested:
        from everstep import __version__

        typer.echo(f"everstep {__version__}")
        raise typer.Exit(ExitCode.OK)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


for _verb in (ls, inspect, verify, restore, replay, rm, du, ps, stop, doctor, demo):
    app.command()(_verb)
app.add_typer(_plan, name="plan")
add_plugged_in(app)


def main() -> int:
    """Run the command; return the exit status.

    If the reader of a pipe has ended (``everstep ls run | head``), the rest is dropped. Any other
    failure of standard output is reported in one line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            # Characters missing in the terminal's encoding are escaped, never an error.
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _run()
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes once more when it ends, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return ExitCode.OK
        typer.echo(f"error: could not write standard output: {error.strerror}", err=True)
        return ExitCode.ENVIRONMENT
    return status


def _run() -> int:
    try:
        app()
    except KeyboardInterrupt:  # outside any verb
        return ExitCode.INTERRUPTED
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else ExitCode.OK
    return ExitCode.OK
