"""Output for people: facts, tables, verdicts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from everstep_bench.persist.machine import Machine
from everstep_bench.persist.report import Spread, Verdict
from everstep_bench.stall.arms import CAUSES
from everstep_bench.stall.figures import Interval, Row
from everstep_bench.stall.options import ABLATIONS
from everstep_bench.stall.report import StallReport

__all__ = ["machine_facts", "plain_table", "present", "print_verdicts", "titled"]

_BUSY_CORES = 0.25
_COST = ("arm", "stall", "capture", "gate", "gradients", "back-pr.", "persist", "other",
         "slow-down", "min - max", "unexplained", "of training", "GB/s")  # fmt: skip
_BEHIND = ("arm", "durable", "loop rate", "min - max", "serialise", "copy", "file", "CPU trainer",
           "CPU helper", "memory")  # fmt: skip
_LEFT = ("arm", "mechanism", "without", "with")
_WORDS = {True: ("met", "green"), False: ("not met", "red"), None: ("-", "dim")}


def present(report: StallReport, console: Console) -> None:
    """Prints facts, tables and verdicts; labels stand in every title."""
    for line in _facts(report):
        console.print(line)
    for interval in report.intervals:
        for made in (_cost, _behind, _ablations):
            title, table = made(report, interval)
            if table.row_count:
                console.print()
                console.print(Text(titled(title, report.labels()), style="bold"), soft_wrap=True)
                console.print(table)
    for line in _details(report.intervals[0].rows):
        console.print(Text(line, style="dim"))
    console.print()
    for line in _notes(report):
        console.print(line)
    for interval in report.intervals:
        console.print()
        if len(report.intervals) > 1 or report.labels():
            console.print(titled(f"Targets, {_steps(interval)}", report.labels()))
        print_verdicts(report.verdicts(interval), console)


def print_verdicts(verdicts: Iterable[Verdict], console: Console) -> None:
    """One line for each target."""
    for verdict in verdicts:
        word, style = _WORDS[verdict.met]
        text = f"{verdict.target}: {verdict.figure}"
        console.print(Text.assemble((f"{word:8}", style), text))


def machine_facts(machine: Machine, folder: str, *, free_core: bool) -> list[str]:
    """Description of the machine."""
    cores = "training on a core of its own, everything else on the others"
    if not free_core:
        cores = "training and everything else on one core"
    return [
        f"{machine.cpu}, {machine.cores} cores: {cores}; torch {machine.torch}, "
        f"Python {machine.python}, {machine.system}",
        f"{folder} on {machine.device}, {machine.file_system}"
        + ("" if machine.direct else "; no O_DIRECT here: everything is buffered"),
    ]


def _facts(report: StallReport) -> list[str]:
    options = report.options
    return [
        *machine_facts(report.machine, report.folder, free_core=report.free_core),
        f"{report.size_bytes / 1e9:.3f} GB in {report.tensors} tensors: {report.workload}",
        f"{_rounds(report)}, order drawn with seed {options.seed}; {report.seconds:.0f} s",
        *report.labels(),
    ]


def _rounds(report: StallReport) -> str:
    """Return the number of rounds, and why there are fewer than requested."""
    asked = report.options.repeats
    within_s = report.options.within_s
    made = [len(interval.ideals) for interval in report.intervals]
    if within_s is None or min(made) == asked:
        return f"{asked} rounds"
    found = " and ".join(map(str, dict.fromkeys(made)))
    return f"{found} of {asked} rounds, as many as went into {within_s:g} s"


def _cost(report: StallReport, interval: Interval) -> tuple[str, Table]:
    step = interval.step_s()
    ideal = "" if step is None else f"; an ideal step takes {1e3 * step.median:.1f} ms"
    title = f"What a save costs training, ms; {_steps(interval)}{ideal}"
    made = plain_table((*_COST, "on the GPU", "link") if report.on_device else _COST)
    for row in interval.rows:
        if not row.blocks:
            made.add_row(row.name, "-", *[""] * (len(_COST) - 2))
            continue
        slowdown = interval.slowdown_s(row)
        share = interval.share(row)
        causes = [
            row.spread(lambda block, cause=cause: block.causes.get(cause))  # type: ignore[misc]
            for cause in CAUSES
        ]
        made.add_row(
            _name(row),
            _ms(row.spread(lambda block: block.stall_s), 2),
            *(_ms(cause, 2) for cause in causes),
            _ms(row.spread(lambda block: block.other_s), 2),
            _ms(slowdown),
            _range_ms(slowdown),
            _ms(interval.difference_s(row)),
            "-" if share is None else f"{100 * share.median:.1f} %",
            _plain(report.gb_per_s(row), 2),
            *(_of_device(report, interval, row) if report.on_device else ()),
        )
    return title, made


def _of_device(report: StallReport, interval: Interval, row: Row) -> tuple[str, str]:
    held = row.spread(lambda block: block.device_s)
    return _ms(held), _plain(interval.link_share(row, report.size_bytes), 2)


def _behind(report: StallReport, interval: Interval) -> tuple[str, Table]:
    title = f"After the return of the call, ms, CPU ms, MB; {_steps(interval)}"
    columns = _BEHIND + (("writers",) if report.options.writers else ())
    made = plain_table(columns)
    for row in interval.rows:
        if not row.blocks:
            continue
        rate = interval.loop_rate(row)
        split = row.split()
        memory = row.memory_bytes
        cells = [
            _ms(row.spread(lambda block: block.durable_s)),
            _plain(rate, 3),
            "" if rate is None else f"{rate.low:.2f} - {rate.high:.2f}",
            *(_one_ms(part) for part in (split.serialise_s, split.copy_s, split.file_s)),
            _ms(interval.trainer_cpu_s(row)),
            _ms(row.spread(lambda block: block.helper_cpu_s)),
            "-" if memory is None else f"{memory / 1e6:.0f}",
        ]
        if report.options.writers:
            cells.append(_ms(row.spread(lambda block: block.writers_s)))
        made.add_row(_name(row), *cells)
    return title, made


def _ablations(report: StallReport, interval: Interval) -> tuple[str, Table]:
    columns = ("mechanism", "without", "stall", "slow-down", "loop rate", "with", "stall",
               "slow-down", "loop rate")  # fmt: skip
    title = f"Each mechanism off in turn, ms; {_steps(interval)}"
    made = plain_table(columns)
    for ablation in ABLATIONS if report.options.ablate else ():
        cells: list[str] = [ablation.mechanism]
        for name in (ablation.without, ablation.with_it):
            row = interval.row(name)
            if row is None:
                cells += [name, "-", "-", "-"]
                continue
            stall = row.spread(lambda block: block.stall_s)
            slowdown = interval.slowdown_s(row)
            rate = interval.loop_rate(row)
            cells += [name, _ms(stall, 2), _ms(slowdown), _plain(rate, 3)]
        made.add_row(*cells)
    return title, made


def _details(rows: list[Row]) -> Iterator[str]:
    """Print the description of each arm, or why it did not run."""
    for row in rows:
        yield f"  {row.name}: {row.error if row.error else row.detail}"


def _notes(report: StallReport) -> list[str]:
    notes = [
        "Medians over the rounds. stall: what the training thread spends in the library (its "
        "calls and its hooks), by cause; gradients: waiting for copies of them. slow-down: what "
        "the steps of a block with a save take more than as many without in the same round; a "
        "block goes on until its save is done. unexplained: their difference, which is "
        "interference and noise.",
        "durable: until the library's future is done, and until what it leaves unsynced is "
        "synced. loop rate: steps per second in that time, next to training alone. GB/s: of "
        "state for each second of stall. Saves do not overlap: each waits for the one before.",
        "serialise, copy, file: as far as they can be told apart, and they may overlap. For "
        "torch.save serialise is tried without a file; for DCP and torchsnapshot it is part of "
        "file. memory: of host memory at most, kept and in passing, processes beside included.",
    ]
    if report.on_device:
        notes.append(
            "On the GPU: what the device spent in hooks around the update, waiting for copies "
            "above all, by its own clock. The training thread runs ahead of it there, so of "
            "hooks it is this that counts as stall. link: how fast the state was in host memory, "
            "from the call on, next to a plain copy of 1 GiB into pinned memory in the same round."
        )
    for interval in report.intervals:
        noise_s = interval.noise_s()
        if noise_s is not None:
            notes.append(
                f"Two blocks without a save of {_steps(interval)} differ by "
                f"{1e3 * noise_s:.1f} ms: less than that means nothing."
            )
    others = _others_cores(report)
    if others > _BUSY_CORES:
        notes.append(
            f"The machine was not idle: other processes kept {others:.1f} of "
            f"{report.machine.cores} cores busy while nothing was saved (load "
            f"{report.machine.load:.1f} before, {report.load_after:.1f} after)."
        )
    return notes


def _others_cores(report: StallReport) -> float:
    """Cores that others kept busy during blocks without a save, on average."""
    blocks = [
        block
        for interval in report.intervals
        for ideal in interval.ideals.values()
        for block in ideal.blocks
    ]
    total_s = sum(block.wall_s for block in blocks)
    return sum(block.others_cores * block.wall_s for block in blocks) / total_s if total_s else 0.0


def plain_table(columns: tuple[str, ...], words: Collection[str] = _LEFT) -> Table:
    """A table without lines; columns of words are flush left."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="underline")
    for column in columns:
        made.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    return made


def titled(text: str, labels: Iterable[str]) -> str:
    """With the first word of each label: no table is read without it."""
    words = [label.split(":", 1)[0] for label in labels]
    return f"{text} [{'; '.join(words)}]" if words else text


def _steps(interval: Interval) -> str:
    return f"every {interval.every} steps" if interval.every > 1 else "every step"


def _name(row: Row) -> Text:
    return Text(row.name, style="bold" if row.role == "ours" else "")


def _ms(spread: Spread | None, digits: int = 1) -> str:
    return _one_ms(None if spread is None else spread.median, digits)


def _one_ms(seconds: float | None, digits: int = 1) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{digits}f}"


def _range_ms(spread: Spread | None) -> str:
    return "" if spread is None else f"{1e3 * spread.low:.1f} - {1e3 * spread.high:.1f}"


def _plain(spread: Spread | None, digits: int) -> str:
    return "-" if spread is None else f"{spread.median:.{digits}f}"
