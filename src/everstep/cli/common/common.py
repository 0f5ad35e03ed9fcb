"""What all verbs share: exit codes, errors, JSON, output that no name can steer, finding a run.

Verbs import the rest of the package inside their functions, so that ``--help`` and a typing
error cost no more than they must.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from everstep.cli.common.paths import absolute, kind_of
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

if TYPE_CHECKING:
    from everstep.commit.lineage import BaseId
    from everstep.run.scan import BaseFound, Inventory
    from everstep.seams.files.filesystem import FileSystem

__all__ = [
    "EXIT_STATUS",
    "LINE_CHARS_MAX",
    "RUN_ARGUMENT",
    "EverstepGroup",
    "ExitCode",
    "JsonFlag",
    "console",
    "count_of",
    "emit",
    "filesystem_of",
    "in_words",
    "label",
    "open_run",
    "plain",
    "reading",
    "select_bases",
    "status_of",
    "table",
    "when",
]

RUN_ARGUMENT = typer.Argument(metavar="RUN", help="The run folder.", show_default=False)

LINE_CHARS_MAX = 4000
_NAME_CHARS_MAX = 240
_PIPE_COLUMNS = 10_000  # nothing is folded for a program that reads lines
_JSON_ASKED = "everstep.json"
_ARGUMENTS = "everstep.arguments"
_USAGE_ERROR: Any = typer.BadParameter.__base__  # of whichever click typer brings along
_LOOK_AGAIN = 5
_NEIGHBOURS_MAX = 1000


class ExitCode(IntEnum):
    """What the command's exit status means, as :data:`EXIT_STATUS` says it in words."""

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
"""What each exit status means: the words of ``--help`` and the README."""


def status_of(error: EverstepError) -> ExitCode:
    """The exit status that an error ends the command with."""
    if isinstance(error, (OptionError, ForeignDirectoryError)):
        return ExitCode.USAGE
    # What cannot be replayed, or planned, is no damage.
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
    # A StorageError of no finer kind is what the operating system said of a file.
    if isinstance(error, environment) or type(error) is StorageError:
        return ExitCode.ENVIRONMENT
    return ExitCode.DIFFERENT


# --- Errors and JSON --------------------------------------------------------------------


class EverstepGroup(TyperGroup):
    """Turns what a verb raises on purpose into words and an exit status."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Lists the verbs, each with the whole first sentence of its help."""
        verbs = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [(name, verb.get_short_help_str(limit=200)) for name, verb in verbs.items() if verb]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuses what no path can be; no shell passes it, but a program may."""
        for arg in args:
            if "\0" in arg:
                ctx.fail(f"'{plain(arg)}' has a NUL in it, which no path and no number has")
        ctx.meta.setdefault(_ARGUMENTS, list(args))  # all of them: this group is the outermost
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except _USAGE_ERROR as error:
            _emit_usage(ctx, error)
            raise
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb; errors become words (or JSON) and an exit status."""
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
    """A usage error as the one document, and the end of the command, if one was asked for: what is
    wrong may come before the verb could read its options."""
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
"""The option ``--json``: errors, too, come as a document then."""


def emit(document: Mapping[str, Any]) -> None:
    """Writes one JSON document; pure ASCII, so that no name in it can steer a terminal."""
    print(json.dumps(document, indent=2, ensure_ascii=True), flush=True)


# --- Output for people ------------------------------------------------------------------


def console() -> Console:
    """Standard output; as wide as needed where nobody sees its edge."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    width = _PIPE_COLUMNS if piped else None
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=False, width=width)


def plain(text: str, chars_max: int = _NAME_CHARS_MAX) -> str:
    """``text`` without anything that could steer a terminal, and not too long.

    Names come from the folder, which is not trusted: escapes, line ends, marks that turn
    the direction of writing are spelled out.
    """
    if len(text) > chars_max:
        text = text[: chars_max - 3] + "..."
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def label(text: str, style: str = "", chars_max: int = _NAME_CHARS_MAX) -> Text:
    """``text`` for a table or tree: :func:`plain`, and never read as markup."""
    return Text(plain(text, chars_max), style=style, overflow="fold")


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the style of all verbs; a pipe gets lines and nothing that is folded.

    Args:
        right: columns of numbers, which are never folded.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="underline")
    for column in columns:
        number = column in right
        made.add_column(
            column, justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    return made


def in_words(size_bytes: int) -> str:
    """Return a size for people: ``"1.5 GB"``, in powers of 1000 as in all messages and options."""
    return decimal(size_bytes) if size_bytes >= 1000 else f"{size_bytes} B"


def count_of(count: int, what: str, plural: str | None = None) -> str:
    """``"1 base"``, ``"3 bases"``."""
    return f"{count:,} {what if count == 1 else plural or what + 's'}"


def when(unix_s: float | None) -> str:
    """A time for people, in the zone of this machine; ``"?"`` for what is none."""
    if unix_s is None:
        return "?"
    try:
        moment = datetime.datetime.fromtimestamp(unix_s, datetime.timezone.utc)
        return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "?"


# --- Finding a run and its bases --------------------------------------------------------


@contextlib.contextmanager
def reading(path: PurePath) -> Iterator[None]:
    """Turns an ``OSError`` while reading below ``path`` into an error in words."""
    try:
        yield
    except OSError as error:
        if isinstance(error.__cause__, EverstepError):  # an object store says what is wrong itself
            raise error.__cause__ from None
        if isinstance(error, PermissionError):
            raise PermissionDeniedError(
                f"may not read {error.filename or path}",
                path=path,
                hint="run folders are private: read them as the user who trained",
            ) from error
        raise StorageError(
            f"could not read {error.filename or path}: {error.strerror or error}",
            path=path,
            hint="look at the disk or the network file system (dmesg, df, mount)",
        ) from error


def open_run(filesystem: FileSystem, run: str) -> Inventory:
    """The inventory of the run that a user has named; reads records, no data.

    Raises:
        OptionError: there is no such folder, it is empty, or it is no folder.
        PermissionDeniedError: nobody can tell, for this user may not look.
        ForeignDirectoryError: it holds something else.
        NewerFormatError: it was written by a newer everstep.
    """
    from everstep.run.scan import scan_run
    from everstep.seams import PosixFileSystem

    if not run or ("://" in run and isinstance(filesystem, PosixFileSystem)):
        hint = "a directory on this machine; ls, verify and restore take s3://bucket/prefix, too"
        raise OptionError(f"{run!r} is no run folder", hint=hint)
    if "://" in run:
        return _open_copy(filesystem, run)
    path = absolute(run)
    with reading(path):
        for attempt in range(_LOOK_AGAIN):
            if (kind := kind_of(path)) != "directory":
                raise _no_folder(path, kind)
            try:
                inventory = scan_run(filesystem, path)
                break
            except ForeignDirectoryError as error:
                hint = _hint(path)
                raise ForeignDirectoryError(error.message, path=path, hint=hint) from None
            except FileNotFoundError:  # a process at work deleted a base while we looked
                if attempt == _LOOK_AGAIN - 1:
                    raise
    if not inventory.timelines and not inventory.abandoned and inventory.run is None:
        broken = [f"{where.name}: {problem}" for where, problem in inventory.problems]
        if not broken:
            raise OptionError(f"{path} is empty: there is no run", path=path, hint=_hint(path))
    return inventory


def filesystem_of(run: str) -> FileSystem:
    """Through which the run that a user has named is read: a folder, or a copy in a store.

    Raises:
        OptionError: a URL of nothing that is known.
        UnavailableError: what reads it is not installed.
    """
    from everstep.seams import PosixFileSystem
    from everstep.tiers.files import TierFileSystem
    from everstep.tiers.urls import UrlPath, is_url, open_tier

    if not is_url(run):
        return PosixFileSystem()
    tier = open_tier(run, PosixFileSystem())
    return TierFileSystem(tier, UrlPath(tier.url))


def _open_copy(filesystem: FileSystem, run: str) -> Inventory:
    from everstep.run.scan import scan_run
    from everstep.tiers.urls import UrlPath

    path = UrlPath(run.rstrip("/"))
    with reading(path):
        inventory = scan_run(filesystem, path)
    if inventory.run is None and not inventory.timelines and not inventory.problems:
        raise OptionError(f"{path} is empty: there is no run", path=path)
    return inventory


def select_bases(
    inventory: Inventory, *, step: int | None = None, timeline: int | None = None
) -> list[BaseFound]:
    """The bases that a user has named; those of the current history first, newest first.

    Raises:
        OptionError: when a step or timeline was named and there is no such base.
    """
    from everstep.commit.lineage import split_by_history

    bases = {base.id: base for base in inventory.bases}
    here, elsewhere = split_by_history(bases, inventory.branches)
    ordered = here + elsewhere
    chosen = [
        base for base in ordered if step in (None, base.step) and timeline in (None, base.timeline)
    ]
    if not chosen and (step is not None or timeline is not None):
        what = "no base" + ("" if step is None else f" of step {step}")
        what += "" if timeline is None else f" in timeline {timeline}"
        raise OptionError(
            f"there is {what}", step=step, path=inventory.path, hint=_bases_there(ordered, step)
        )
    return [bases[base] for base in chosen]


def _bases_there(ordered: list[BaseId], step: int | None) -> str:
    if not ordered:
        return "the run holds no base yet"
    wanted = ordered[0].step if step is None else step
    near = sorted(ordered, key=lambda base: abs(base.step - wanted))[:8]
    return ("nearest: " if len(near) < len(ordered) else "there are: ") + ", ".join(map(str, near))


def _no_folder(path: PurePath, kind: str | None) -> OptionError:
    if kind is not None:
        hint = _hint(path)
        if path.suffix == ".safetensors":
            hint = f"everstep inspect {path}"
        return OptionError(f"{path} is no run folder but a file", path=path, hint=hint)
    return OptionError(f"there is no run {path}", path=path, hint=_hint(path))


def _hint(path: PurePath) -> str:
    """Where the run is that was probably meant: inside, around, or beside ``path``."""
    inside = _runs_in(path)
    if inside:
        more = f", and {len(inside) - 8} more" if len(inside) > 8 else ""
        return "runs in it: " + ", ".join(plain(name) for name in sorted(inside)[:8]) + more
    for parent in list(path.parents)[:3]:
        if _is_run(parent):
            return f"the run is {parent}"
    close = difflib.get_close_matches(path.name, _runs_in(path.parent), n=1, cutoff=0.4)
    if close:
        return f"did you mean {path.parent / close[0]}?"
    return "a run folder is one that a Checkpointer has made: run.json, timeline-00001, ..."


def _runs_in(path: PurePath) -> list[str]:
    try:
        names = os.listdir(path)[:_NEIGHBOURS_MAX]
    except OSError:
        return []
    return [name for name in names if _is_run(path / name)]


def _is_run(path: PurePath) -> bool:
    return os.path.isfile(path / "run.json")
