"""Verbs made of the options of benches, and their common start and end."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.output import console
from everstep.cli.common.runs import checked_path
from everstep_bench.harness.options import Options, declared, from_words

_Options = TypeVar("_Options", bound="Options")


def as_command(
    options: type[_Options], run: Callable[..., None], more: Sequence[inspect.Parameter] = ()
) -> Callable[..., None]:
    """Return a function for typer, with the options of a bench.

    Args:
        run: called with the options, and with the values of ``more``.
        more: other options of the command.
    """
    known = declared(options)
    hints = get_type_hints(options)
    parameters = []
    for name, one in known.items():
        kind: Any = hints[name]
        if one.parse is not None:
            kind = str if one.text is not None else str | None
        callback = checked_path if kind == Path | None else None
        found = typer.Option(*one.flags, help=one.help, callback=callback)
        annotation: Any = Annotated[kind, found]
        parameters.append(_parameter(name, one.text, annotation))
    parameters += more

    def command(**words: Any) -> None:
        rest = {one.name: words.pop(one.name) for one in more}
        run(from_words(options, **words), **rest)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = options.__doc__
    return command


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


JSON = _parameter("json_output", False, JsonFlag)
_CHECK = _parameter(
    "check", False, Annotated[bool, typer.Option(help="Exit with 3 if a target is missed.")]
)


def add_verb(app: typer.Typer, name: str, options: type[Options], place: str) -> None:
    """Add a verb that measures, and prints a :class:`~everstep_bench.harness.report.Report`.

    Args:
        place: ``"module:function"`` below this package; imported when the verb is called, since
            torch takes seconds.
    """

    def run(chosen: Options, *, check: bool, json_output: bool) -> None:
        chosen.begin()
        module, _, function = place.partition(":")
        measure = getattr(importlib.import_module(f"everstep_bench.{module}"), function)
        report = _measured(measure, chosen)
        report.write()
        if json_output:
            emit(report.as_json())
        else:
            report.present(console())
        if check and not report.all_met():
            raise typer.Exit(ExitCode.INFEASIBLE)

    app.command(name)(as_command(options, run, (_CHECK, JSON)))


def _measured(run: Callable[[Any, Any], Any], options: object) -> Any:
    """Run a benchmark; an interruption ends it in good order."""
    from everstep_bench.harness.display import progress_display

    try:
        with progress_display() as display:
            return run(options, display)
    except KeyboardInterrupt:
        typer.echo("interrupted: processes are ended, what was written is removed", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
