"""The command ``everstep``: one module per verb, or per pair of verbs with one subject.

``ls``, ``inspect``, ``verify``, ``du``  read a run and never write into it
``diff``        compares the states of two steps
``rm``          deletes one base
``restore``     writes the state of any logged step into a new run
``cp``          copies a run that may be training
``pin``         keeps one base for ever
``export``      writes the state of a step for other programs; in the same module ``import`` makes a
                run of what they have written
``watch``       shows a run while it trains
``report``      writes one page about a run
``ps``          lists the keeper processes of this user; in the same module ``stop`` ends them
``doctor``      checks this machine
``plan``        computes intervals and schedules from models, without measurements
``simulate``    simulates a long run with failures, for each method
``demo``        trains, is killed, resumes, compares every bit

``common`` holds shared code: ``errors``, ``output``, ``runs``, ``log``.

A distribution adds a verb by an entry point in the group ``everstep.commands``. The entry point's
name is the verb; its object is a :class:`typer.Typer`, or a function with typer's options.
everstep-bench adds two:

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
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer

from everstep.cli.common.errors import EXIT_STATUS, EverstepGroup, ExitCode, JsonFlag
from everstep.cli.cp import cp
from everstep.cli.demo import demo
from everstep.cli.diff import diff
from everstep.cli.doctor import doctor
from everstep.cli.du import du
from everstep.cli.export import export, import_
from everstep.cli.inspect import inspect
from everstep.cli.ls import ls
from everstep.cli.pin import pin
from everstep.cli.plan.interval import app as _plan
from everstep.cli.plan.simulate import simulate
from everstep.cli.ps import ps, stop
from everstep.cli.report import report
from everstep.cli.restore import restore
from everstep.cli.rm import rm
from everstep.cli.verify import verify
from everstep.cli.watch import watch
from everstep.config.options import DISABLE_VARIABLE
from everstep.errors import UnavailableError

__all__ = ["add_plugged_in", "app", "main"]

# Named in --help even where everstep-bench is missing, so that users learn how to get them.
_OF_BENCH = {
    "drill": "Kills hosts that train together, replaces them, compares every bit.",
    "bench": "Measures, next to the hardware's limit and to others.",
}
_REST = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    cls=EverstepGroup,
    name="everstep",
    no_args_is_help=True,
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


def add_plugged_in(app: typer.Typer) -> None:
    """Add the verbs of installed distributions, and a stand-in for each missing one of ours."""
    own = {one.name or one.callback.__name__ for one in app.registered_commands if one.callback}
    own |= {group.name for group in app.registered_groups if group.name}
    # The verbs of everstep itself cannot be replaced.
    found = {
        entry.name: entry
        for entry in entry_points(group="everstep.commands")
        if entry.name not in own
    }
    for name in [*_OF_BENCH, *sorted(found.keys() - _OF_BENCH.keys())]:
        _add(app, name, found.get(name))


def _add(app: typer.Typer, name: str, entry: EntryPoint | None) -> None:
    if entry is None:
        _add_missing(app, name, _OF_BENCH[name], "everstep-bench is not installed")
        return
    try:
        verb: Any = entry.load()
    except (ImportError, AttributeError) as error:
        # A broken plug-in must not take the other verbs with it.
        summary = _OF_BENCH.get(name, f"Cannot be loaded from {entry.module}.")
        _add_missing(app, name, summary, f"{entry.value} cannot be loaded: {error}")
        return
    if isinstance(verb, typer.Typer):
        app.add_typer(verb, name=name)
    else:
        app.command(name)(verb)


def _add_missing(app: typer.Typer, name: str, summary: str, why: str) -> None:
    """Add a verb that answers every call with the reason why it is missing."""

    @app.command(name, help=summary, context_settings=_REST)
    def missing(json_output: JsonFlag = False) -> None:
        raise UnavailableError(
            f"`everstep {name}` is not available: {why}", hint="pip install everstep-bench"
        )


_VERBS: dict[str, Callable[..., None]] = {
    "ls": ls,
    "inspect": inspect,
    "verify": verify,
    "diff": diff,
    "restore": restore,
    "cp": cp,
    "export": export,
    "import": import_,
    "pin": pin,
    "rm": rm,
    "du": du,
    "watch": watch,
    "report": report,
    "ps": ps,
    "stop": stop,
    "doctor": doctor,
    "simulate": simulate,
    "demo": demo,
}
for _name, _verb in _VERBS.items():
    app.command(_name)(_verb)
app.add_typer(_plan, name="plan")
add_plugged_in(app)


def main() -> int:
    """Run the command; return the exit status.

    If the reader of a pipe has ended (``everstep ls run | head``), the rest is dropped. Any other
    failure of standard output is reported in one line.
    """
    # Only programs that train may be told to do without checkpoints. What a command trains, it
    # trains for their sake.
    os.environ.pop(DISABLE_VARIABLE, None)
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
