"""The documentation site: its navigation is complete, and the blocks of its pages are executed.

``make docs`` builds the site, in an environment of its own; nothing here needs that.
"""

from __future__ import annotations

import ast
import re
import shlex
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import everstep
import everstep.testing
from everstep.cli import app
from everstep_bench.cli import commands
from everstep_bench.cli.bench import app as bench
from tests.support.documents import masked, run_command, run_program
from tests.support.trainers import run_trainer

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text()
API = (DOCS / "API.md").read_text()
PAPERS = sorted(DOCS.glob("papers/*.md"))
PAGES = [
    *(DOCS / name for name in ("PROMISES.md", "QUICKSTART.md", "RECIPES.md")),
    *PAPERS,
]
TIMEOUT_S = 120

Block = tuple[str, str]
"""Language and contents."""


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


# --- Navigation -------------------------------------------------------------------------


def in_navigation() -> list[str]:
    """The pages that mkdocs.yml lists."""
    return re.findall(r"^ +- (?:.*: )?(\S+\.md)$", CONFIG.partition("\nnav:\n")[2], re.M)


def test_each_page_of_the_navigation_exists() -> None:
    """Those below ``repository/`` are files outside ``docs/``; see ``scripts/docs_links.py``."""
    for page in in_navigation():
        outside = page.removeprefix("repository/")
        assert (ROOT / outside if outside != page else DOCS / page).is_file(), page


def test_each_document_is_in_the_navigation_once() -> None:
    listed = [page for page in in_navigation() if not page.startswith("repository/")]
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_nothing_is_fetched_from_elsewhere() -> None:
    assert re.search(r"^  font: false$", CONFIG, re.M)
    assert "http" not in CONFIG


# --- API --------------------------------------------------------------------------------

PUBLIC = (everstep, everstep.options, everstep.data, everstep.errors, everstep.testing)
OF_TIERS = ("Tier", "TierOptions", "PeerOptions")
"""The rest of the facade of tiers is for everstep's own packages."""


def public_names() -> set[str]:
    """Names that users import, in full, without those that need other libraries."""
    names = {f"{module.__name__}.{name}" for module in PUBLIC for name in module.__all__}
    names |= {f"everstep.tiers.{name}" for name in OF_TIERS}
    return (names | {"everstep.compress.Compressor"}) - {"everstep.__version__", "everstep.errors"}


SHARED = ("checkpoint_files", "loops", "parts")
"""Modules that integrations share; users import nothing from them."""


def integrations() -> Iterator[str]:
    """The same of the integrations, whose libraries are not installed here."""
    folder = ROOT / "src/everstep/integrations"
    for path in sorted(folder.glob("[a-z]*.py")):
        for node in ast.parse(path.read_text()).body if path.stem not in SHARED else []:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield f"everstep.integrations.{path.stem}.{node.name}"
    for path in sorted(folder.glob("*/__init__.py")):
        found = re.search(r"^__all__ = (\[.*?\])", path.read_text(), re.M | re.S)
        assert found is not None, path
        for name in ast.literal_eval(found[1]):
            yield f"everstep.integrations.{path.parent.name}.{name}"


def described() -> set[str]:
    """Names that API.md describes, in full; members of a module are listed below it."""
    found = set()
    for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", API, re.M):
        members = re.findall(r"^ +- (\w+)$", options, re.M)
        found |= {f"{name}.{member}" for member in members} or {name}
    return found


def test_public_names_are_described() -> None:
    """Under any of their names: some are in two modules."""
    of_others = set(integrations())
    assert of_others <= described()
    known = [resolve_name(name) for name in described() - of_others]
    for name in public_names():
        assert any(resolve_name(name) is one for one in known), name


# --- Blocks -----------------------------------------------------------------------------

SAVED = re.compile(r"[Ss]ave this program as `(\w+\.py)`")


def blocks(page: Path) -> list[Block]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_of_languages_that_are_executed(page: Path) -> None:
    found = blocks(page)
    assert {language for language, _ in found} <= {"python", "console"}
    assert found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    """In order, in one folder; Python continues what stands before it on the page."""
    programs: list[str] = []
    before: list[str] = []

    def run_programs() -> None:
        if programs:
            run_program("\n".join([*before, *programs]), tmp_path)
            before.extend(programs)
            programs.clear()

    saved = SAVED.search(page.read_text())
    for language, code in blocks(page):
        if language == "python" and saved and not (tmp_path / saved[1]).exists():
            (tmp_path / saved[1]).write_text(code)
            before.append(code)
        elif language == "python":
            programs.append(code)
        else:
            run_programs()
            first, _, shown = code.partition("\n")
            run_line(first.removeprefix("$ "), shown, tmp_path)
    run_programs()


def run_line(line: str, shown: str, folder: Path) -> None:
    """Run a command and compare what it prints with what is shown, if anything is."""
    words = shlex.split(line)
    environment = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if words[0] == "everstep":
        found, mask = run_command(words, folder), masked
    else:
        assert words[0] == "python"
        found, mask = run_python(words[1:], folder, environment), without_fractions
    if shown:
        assert mask(found) == mask(shown)


def run_python(words: Sequence[str], folder: Path, environment: dict[str, str]) -> str:
    (name,) = words
    code = f"import os; os.chdir({str(folder)!r})\n{(folder / name).read_text()}"
    status, out, err = run_trainer(code, timeout_s=TIMEOUT_S, **environment)
    assert status == (-signal.SIGKILL if "KILL_AT" in environment else 0), err
    return out


def without_fractions(text: str) -> list[str]:
    """Lines, without the figures that another processor rounds in another way."""
    return re.sub(r"\d+\.\d+", "#", text).splitlines()


# --- Commands ---------------------------------------------------------------------------


def inline_commands(page: Path) -> list[str]:
    return re.findall(r"`(everstep [a-z][^`]*)`", page.read_text())


@pytest.mark.parametrize("page", [*PAGES, DOCS / "FAQ.md", DOCS / "README.md"], ids=name_of)
def test_options_of_commands_exist(page: Path) -> None:
    root = typer.main.get_command(app)
    for line in inline_commands(page):
        words = shlex.split(line)[1:]
        if words[0] == "drill":
            continue
        command: Any = typer.main.get_command(bench) if words[0] == "bench" else root
        rest = words[1:] if words[0] == "bench" else words
        while rest and hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        assert {word for word in rest if word.startswith("--")} <= known, line


class BeginsError(Exception):
    """A benchmark would begin here."""


@pytest.mark.parametrize("page", PAPERS, ids=name_of)
def test_benchmarks_accept_their_options(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begins(*_: object) -> None:
        raise BeginsError

    # matplotlib may be missing here.
    for module in ("schedule", "schedule_output"):
        monkeypatch.setattr(f"everstep.cli.plan.{module}.check_picture", str)
    monkeypatch.setattr(commands, "_measured", begins)
    lines = [line for line in inline_commands(page) if line.startswith("everstep bench ")]
    assert lines
    for line in lines:
        result = CliRunner().invoke(bench, shlex.split(line)[2:])
        assert isinstance(result.exception, BeginsError), f"{line}\n{result.output}"


# --- Figures ----------------------------------------------------------------------------

MEASURED = "\n".join((DOCS / name).read_text() for name in ("benchmarks/README.md", "DRILLS.md"))


@pytest.mark.parametrize("page", PAPERS, ids=name_of)
def test_measured_figures_are_those_of_the_benchmarks(page: Path) -> None:
    """Numbers with a fraction in the last column of the table of figures."""
    figures = page.read_text().partition("\n## Figures\n")[2]
    rows = re.findall(r"^\| .* \| ([^|]*) \|$", figures, re.M)
    assert len(rows) >= 6
    for number in re.findall(r"\d+\.\d+", "\n".join(rows)):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", MEASURED), number
