"""Verbs of other distributions, found by their entry points.

A distribution adds a verb by an entry point in the group ``everstep.commands``. The entry point's
name is the verb; its object is a :class:`typer.Typer`, or a function with typer's options.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from everstep.cli.common.errors import JsonFlag
from everstep.errors import UnavailableError

GROUP = "everstep.commands"

# Named in --help even where everstep-bench is missing, so that users learn how to get them.
_OF_BENCH = {
    "drill": "Kills hosts that train together, replaces them, compares every bit.",
    "bench": "Measures, next to the hardware's limit and to others.",
}
_REST = {"allow_extra_args": True, "ignore_unknown_options": True}


def add_plugged_in(app: typer.Typer) -> None:
    """Add the verbs of installed distributions, and a stand-in for each missing one of ours."""
    own = {command.callback.__name__ for command in app.registered_commands if command.callback}
    own |= {group.name for group in app.registered_groups if group.name}
    # The verbs of everstep itself cannot be replaced.
    found = {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in own}
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
