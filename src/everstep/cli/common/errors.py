"""Exit codes, errors and JSON of the command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import IntEnum
from pathlib import PurePath
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from typer.core import TyperGroup

from everstep.cli.common.output import LINE_CHARS_MAX, plain
from everstep.errors import (
    DeadlineError,
    EverstepError,
    ForeignDirectoryError,
    InfeasibleError,
    KeeperError,
    NewerFormatError,
    OptionError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
    UnavailableError,
    UnreachableError,
    UnsupportedStateError,
)

_JSON_ASKED = "everstep.json"
_ARGUMENTS = "everstep.arguments"
# Of the click that typer uses, which may be its own copy.
_USAGE_ERROR: Any = typer.BadParameter.__base__


class ExitCode(IntEnum):
    """Exit status of the command; :data:`EXIT_STATUS` describes it for people."""

    OK = 0
    DIFFERENT = 1
    USAGE = 2
    INFEASIBLE = 3
    ENVIRONMENT = 4
    INTERRUPTED = 130


EXIT_STATUS = (
    "0 fine, 1 damage or difference found, 2 usage, 3 infeasible or goal not met, "
    "4 environment, 130 interrupted"
)
"""Description of the exit statuses in ``--help`` and the README."""


def status_of(error: EverstepError) -> ExitCode:
    """Return the exit status for an error."""
    if isinstance(error, (OptionError, ForeignDirectoryError)):
        return ExitCode.USAGE
    # A state that cannot be replayed, or planned, is not damaged.
    if isinstance(error, (InfeasibleError, UnsupportedStateError)):
        return ExitCode.INFEASIBLE
    environment = (
        KeeperError,
        NewerFormatError,
        OutOfSpaceError,
        PermissionDeniedError,
        UnavailableError,
        UnreachableError,
        DeadlineError,
    )
    # A plain StorageError is an error of the operating system.
    if isinstance(error, environment) or type(error) is StorageError:
        return ExitCode.ENVIRONMENT
    return ExitCode.DIFFERENT


class EverstepGroup(TyperGroup):
    """Command group that turns expected exceptions into messages and exit statuses."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs, each with the full first sentence of its help."""
        verbs = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [(name, verb.get_short_help_str(limit=200)) for name, verb in verbs.items() if verb]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Emit errors as JSON if that was asked for."""
        # The outermost group comes first and sees all arguments.
        ctx.meta.setdefault(_ARGUMENTS, list(args))
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except _USAGE_ERROR as error:
            _emit_usage(ctx, error)
            raise
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; turn errors into messages (or JSON) and an exit status."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except _USAGE_ERROR as error:
            _emit_usage(ctx, error)
            raise
        except EverstepError as error:
            _fail(ctx, error)


def _fail(ctx: Any, error: EverstepError) -> NoReturn:
    status = status_of(error)
    if ctx.meta.get(_JSON_ASKED):
        emit({**error.fields(), "exit_code": int(status)})
    else:
        for line in f"error: {error}".split("\n"):
            typer.echo(plain(line, LINE_CHARS_MAX), err=True)
    raise typer.Exit(status) from None


def _emit_usage(ctx: Any, error: Any) -> None:
    """Emit a usage error as JSON and exit, if --json was given. The error may be found before the
    verb's options are parsed, so look at the raw arguments.
    """
    arguments = ctx.meta.get(_ARGUMENTS, [])
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    if "--json" not in arguments:
        return
    document = {"error": "UsageError", "message": error.format_message()}
    emit({**document, "exit_code": int(ExitCode.USAGE)})
    raise typer.Exit(ExitCode.USAGE) from None


def _remember(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[_JSON_ASKED] = value
    return value


JsonFlag = Annotated[
    bool,
    typer.Option("--json", callback=_remember, help="One JSON document on standard output."),
]
"""The option ``--json``: errors are emitted as a document, too."""


def emit(document: Mapping[str, Any]) -> None:
    """Print one JSON document; pure ASCII, so that no name in it can control a terminal.

    Dataclasses, msgspec structs (:class:`.BaseId`) and paths in it become plain data.
    """
    print(json.dumps(document, indent=2, ensure_ascii=True, default=_plain_data), flush=True)


def _plain_data(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
