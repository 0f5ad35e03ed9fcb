"""The outcome of a bench, for people and as one JSON document; pictures, where matplotlib is.

Labels (emulated links, a missing core) belong to every figure: they stand in every title.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from everstep.cli.common.output import table
from everstep.cli.plan.schedule_output import check_picture
from everstep.errors import PermissionDeniedError
from everstep_bench.harness.figures import Spread, Verdict, plain
from everstep_bench.harness.machine import Machine

_BUSY_CORES = 0.25
_WORDS = {True: ("met", "green"), False: ("not met", "red"), None: ("-", "dim")}

Cell = str | Text


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a run.

    Attributes:
        size_bytes: of all tensors of the state, each counted once.
        workload: the model in words.
        free_core: whether training had a core of its own, and another was free; None where
            nothing is kept on cores.
    """

    machine: Machine
    folder: str
    size_bytes: int
    tensors: int
    workload: str
    free_core: bool | None
    load_after: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Table:
    """A table for people; one without rows is not shown.

    Attributes:
        words: columns that are flush left.
        verdicts: targets that its figures have to reach, printed below it.
    """

    title: str
    columns: Sequence[str]
    rows: Iterable[Sequence[Cell]]
    words: Sequence[str] = ("arm",)
    verdicts: Sequence[Verdict] = ()

    def made(self) -> RichTable:
        """Return it as rich draws it."""
        right = tuple(name for name in self.columns if name not in self.words)
        found = table(self.columns, right=right)
        for column in found.columns:
            column.no_wrap = True
        for cells in self.rows:
            found.add_row(*cells, *[""] * (len(self.columns) - len(cells)))
        return found


class Findings:
    """Outcome of a bench; a bench overrides what it has."""

    def labels(self) -> list[str]:
        """Return remarks that belong to every figure of this run."""
        return []

    def lines(self) -> Iterator[str]:
        """Yield facts about the run."""
        yield from ()

    def tables(self) -> Iterator[Table]:
        """Yield the tables."""
        yield from ()

    def details(self) -> Iterator[str]:
        """Yield what each arm does, or why it did not run."""
        yield from ()

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield from ()

    def verdicts(self) -> list[Verdict]:
        """Return the targets, each with the measured figure."""
        return []

    def all_met(self) -> bool:
        """Return True if every target is met; one that could not be measured is not."""
        return all(verdict.met for verdict in self.verdicts())

    def write(self) -> None:
        """Write pictures and other files that were asked for."""

    def figures(self) -> dict[str, Any]:
        """Return the figures of the bench as data."""
        return {}

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        found: dict[str, Any] = plain(self.figures())
        return found

    def present(self, console: Console) -> None:
        """Print facts, tables, notes and verdicts."""
        printed(console, self.lines(), self.tables(), self.labels())
        for line in self.details():
            console.print(Text(f"  {line}", style="dim"), soft_wrap=True)
        console.print()
        printed(console, self.notes())
        console.print()
        _print_verdicts(self.verdicts(), console)


@dataclass
class Report(Findings):
    """Outcome of a bench that has measured on this machine."""

    options: Any
    facts: Facts

    def labels(self) -> list[str]:
        """Return remarks that belong to every figure of this run."""
        found = []
        link = getattr(self.options, "link_bytes_per_s", None)
        if link is not None:
            found.append(
                f"EMULATED: everstep's copies go through a link of {link / 1e9:g} GB/s that does "
                "not exist; peers copy as fast as memory allows"
            )
        if self.facts.free_core is False:
            found.append("ONE CORE: training and everything else share it")
        return found

    def rounds(self) -> str:
        """Return in words how often things were measured."""
        return f"{self.options.repeats} rounds, order drawn with seed {self.options.seed}"

    def lines(self) -> Iterator[str]:
        """Yield facts about machine, state and rounds, and all labels."""
        facts = self.facts
        machine = facts.machine
        cores = {
            True: ": training on a core of its own, everything else on the others",
            False: ": training and everything else on one core",
            None: "",
        }[facts.free_core]
        direct = "" if machine.direct else "; no O_DIRECT here: everything is buffered"
        yield (
            f"{machine.cpu}, {machine.cores} cores{cores}; torch {machine.torch}, Python "
            f"{machine.python}, {machine.system}"
        )
        yield (
            f"{facts.folder} on {machine.device}, {machine.file_system}, "
            f"{machine.free_bytes / 1e9:.0f} GB free{direct}"
        )
        yield f"{facts.size_bytes / 1e9:.3f} GB in {facts.tensors} tensors: {facts.workload}"
        yield f"{self.rounds()}; {facts.seconds:.0f} s"
        yield from self.labels()

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        document = {
            "labels": self.labels(),
            **plain(self.facts),
            "rounds": getattr(self.options, "repeats", 1),
            "seed": self.options.seed,
            "targets": self.verdicts(),
            **self.figures(),
        }
        found: dict[str, Any] = plain(document)
        return found


def printed(
    console: Console,
    lines: Iterable[str],
    tables: Iterable[Table] = (),
    labels: Iterable[str] = (),
) -> None:
    """Print lines, then tables, each with the first words of all labels in its title."""
    for line in lines:
        console.print(line, soft_wrap=True)
    words = "; ".join(label.split(":", 1)[0] for label in labels)
    for one in tables:
        made = one.made()
        if made.row_count:
            console.print()
            title = f"{one.title} [{words}]" if words else one.title
            console.print(Text(title, style="bold"), soft_wrap=True)
            console.print(made)
        _print_verdicts(one.verdicts, console)


def _print_verdicts(verdicts: Iterable[Verdict], console: Console) -> None:
    for verdict in verdicts:
        word, style = _WORDS[verdict.met]
        text = f"{verdict.target}: {verdict.figure}"
        console.print(Text.assemble((f"{word:8}", style), text), soft_wrap=True)


def busy_note(facts: Facts, others_cores: float | None) -> Iterator[str]:
    """Yield a note if other processes kept cores busy."""
    if others_cores is not None and others_cores > _BUSY_CORES:
        yield (
            f"The machine was not idle: other processes kept {others_cores:.1f} of "
            f"{facts.machine.cores} cores busy during the timed runs (load "
            f"{facts.machine.load:.1f} before, {facts.load_after:.1f} after)."
        )


def number(found: Spread | float | None, digits: int = 2, scale: float = 1.0) -> str:
    """Return a figure, or the median of a spread, times ``scale``; a dash for None."""
    value = found.median if isinstance(found, Spread) else found
    return "-" if value is None else f"{scale * value:.{digits}f}"


def ms(found: Spread | float | None, digits: int = 1) -> str:
    """Return seconds as milliseconds."""
    return number(found, digits, 1e3)


def mb(found: Spread | float | None, digits: int = 1) -> str:
    """Return bytes as megabytes."""
    return number(found, digits, 1e-6)


def per_cent(found: Spread | float | None) -> str:
    """Return a share in per cent."""
    return "-" if found is None else f"{number(found, 1, 100)} %"


def range_of(found: Spread | None, digits: int = 1, scale: float = 1.0) -> str:
    """Return the least and the greatest figure."""
    if found is None:
        return ""
    return f"{scale * found.low:.{digits}f} - {scale * found.high:.{digits}f}"


_DPI = 150


@contextlib.contextmanager
def drawn(
    path: Path, title: str, inches: tuple[float, float], *, rows: int, columns: int = 1
) -> Iterator[Any]:
    """A picture of panels, saved at the end of the block; yields their axes, row by row.

    Raises:
        UnavailableError: matplotlib is missing.
        PermissionDeniedError: it cannot be written.
    """
    check_picture(path)
    agg: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=inches, dpi=_DPI, layout="constrained")
    agg.FigureCanvasAgg(figure)  # no window, whatever the user has configured
    yield figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
    figure.suptitle(title, fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise PermissionDeniedError(f"cannot write {path}: {error.strerror}", path=path) from error
