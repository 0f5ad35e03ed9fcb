"""Verbs of other distributions, and those of everstep-bench where it is not installed."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import pytest
import typer
from typer.testing import CliRunner

import everstep_bench
from everstep import __version__, cli
from everstep.cli.common.errors import EverstepGroup, ExitCode


def app_with(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint) -> typer.Typer:
    """Build a command with one verb of its own and those of the entry points."""
    app = typer.Typer(cls=EverstepGroup, rich_markup_mode=None)

    @app.command()
    def ls() -> None:
        typer.echo("own")

    monkeypatch.setattr(cli, "entry_points", lambda group: list(entries))
    cli.add_plugged_in(app)
    return app


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group="everstep.commands")


def greet(name: str = "you") -> None:
    """Greet somebody."""
    typer.echo(f"hello {name}")


@pytest.mark.parametrize(
    "words",
    [["drill"], ["drill", "--hosts", "4"], ["bench"], ["bench", "stall", "--every=10", "--check"]],
)
def test_verbs_of_bench_where_it_is_missing(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_with(monkeypatch)
    assert f"  {words[0]}" in CliRunner().invoke(app, ["--help"]).stdout
    result = CliRunner().invoke(app, words)
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert result.stderr.splitlines() == [
        f"error: `everstep {words[0]}` is not available: everstep-bench is not installed",
        "  hint: pip install everstep-bench",
    ]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (found["error"], found["exit_code"]) == ("UnavailableError", 4)


def test_verbs_of_bench_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_with(
        monkeypatch,
        entry("bench", "everstep_bench.cli.bench:app"),
        entry("drill", "everstep_bench.cli.drill:drill"),
    )
    assert "--restore-steps" in CliRunner().invoke(app, ["drill", "--help"]).stdout
    assert "crash-interval" in CliRunner().invoke(app, ["bench", "--help"]).stdout


def test_a_verb_of_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_with(monkeypatch, entry("greet", f"{__name__}:greet"), entry("ls", "nowhere:ls"))
    assert CliRunner().invoke(app, ["greet", "--name", "all"]).stdout == "hello all\n"
    assert CliRunner().invoke(app, ["ls"]).stdout == "own\n", "no plug-in replaces a verb"


@pytest.mark.parametrize("value", ["nowhere.at.all:f", "everstep.errors:no_such_name"])
def test_a_plug_in_that_is_broken(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_with(monkeypatch, entry("greet", value))
    assert CliRunner().invoke(app, ["ls"]).stdout == "own\n"
    result = CliRunner().invoke(app, ["greet"])
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert f"{value} cannot be loaded" in result.stderr


def test_both_distributions_have_one_version() -> None:
    assert everstep_bench.__version__ == __version__
