"""Output for people: facts, tables, verdicts."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from everstep_bench.persist.report import Spread
from everstep_bench.stall.show import machine_facts, plain_table, print_verdicts, titled
from everstep_bench.step.figures import Row
from everstep_bench.step.report import StepReport

__all__ = ["per_cent", "present", "range_per_cent"]

_COST = ("arm", "step ms", "to dense", "min - max", "to compressed", "min - max", "CPU trainer",
         "CPU helper", "behind ms")  # fmt: skip
_BYTES = ("arm", "in memory", "to disk", "storage MB", "host memory MB")
_KILLED = ("arm", "killed in step", "goes on from", "steps lost", "seconds", "from", "base",
           "replayed", "claims", "every bit")  # fmt: skip
_REPLAYED = ("way", "AdamW", "threads", "M parameter-steps/s")
_BACK = ("log in", "AdamW", "steps", "log MB", "resume()", "base alone", "replay", "training",
         "M p-s/s", "claims", "every bit")  # fmt: skip
_BUSY_CORES = 0.25


def present(report: StepReport, console: Console) -> None:
    """Prints facts, tables and verdicts; labels stand in every title."""
    for line in _facts(report):
        console.print(line, soft_wrap=True)
    labels = report.labels()
    made = (_costs(report), _sizes(report), _kills(report), _replay(report), _back(report))
    for title, columns, lines in made:
        table = plain_table(columns, words=("arm", "from", "claims", "every bit", "way", "log in"))
        for cells in lines:
            table.add_row(*cells)
        if table.row_count:
            console.print()
            console.print(Text(titled(title, labels), style="bold"), soft_wrap=True)
            console.print(table)
    for line in _details(report):
        console.print(Text(line, style="dim"), soft_wrap=True)
    console.print()
    for line in _notes(report):
        console.print(line, soft_wrap=True)
    console.print()
    print_verdicts(report.verdicts(), console)


def per_cent(spread: Spread | None) -> str:
    """The median of shares."""
    return "-" if spread is None else f"{100 * spread.median:.1f} %"


def range_per_cent(spread: Spread | None) -> str:
    """From the least to the greatest share."""
    return "" if spread is None else f"{100 * spread.low:.1f} - {100 * spread.high:.1f}"


def _facts(report: StepReport) -> list[str]:
    options = report.options
    return [
        *machine_facts(report.machine, report.folder, free_core=report.free_core),
        f"{report.size_bytes / 1e9:.3f} GB in {report.tensors} tensors: {report.workload}",
        f"{options.repeats} rounds, order drawn with seed {options.seed}; {report.seconds:.0f} s",
        *report.labels(),
    ]


_Table = tuple[str, tuple[str, ...], Iterator[tuple[str, ...]]]


def _costs(report: StepReport) -> _Table:
    def lines() -> Iterator[tuple[str, ...]]:
        rows = report.rows
        for row in rows.rows:
            if not row.blocks:
                yield report.words(row), "-", *[""] * (len(_COST) - 2)
                continue
            dense = rows.slowdown(row, rows.dense())
            compressed = None
            if row.setting.compresses:
                compressed = rows.slowdown(row, rows.compressed(row.setting.ratio))
            yield (
                report.words(row),
                _ms(row.steps_s()),
                per_cent(dense),
                range_per_cent(dense),
                per_cent(compressed),
                range_per_cent(compressed),
                _ms(row.per_step(lambda block: block.trainer_cpu_s)),
                _ms(row.per_step(lambda block: block.helper_cpu_s)),
                _ms(row.spread(lambda block: block.behind_s)),
            )

    return "What a step takes, and how much longer than without; CPU ms per step", _COST, lines()


def _sizes(report: StepReport) -> _Table:
    def lines() -> Iterator[tuple[str, ...]]:
        for row in report.rows.rows:
            if row.blocks and not row.setting.is_reference:
                yield (
                    report.words(row),
                    _mb(row.per_step(lambda block: block.memory_bytes), 3),
                    _mb(row.per_step(lambda block: block.written_bytes), 3),
                    _mb(row.spread(lambda block: block.storage_bytes)),
                    _mb(_one(report.host_bytes(row))),
                )

    return "Bytes: MB per step into memory and to disk, bases included", _BYTES, lines()


def _kills(report: StepReport) -> _Table:
    def lines() -> Iterator[tuple[str, ...]]:
        for killed in report.kills:
            if killed.error is not None:
                yield killed.setting.arm, killed.error, *[""] * (len(_KILLED) - 2)
            for kill in killed.kills:
                found = kill.recovered
                claims = {True: "exact", False: "not exact", None: "-"}[found.exact]
                same = "yes" if kill.identical else f"no, {kill.different} of {kill.parts} differ"
                yield (
                    killed.setting.arm,
                    f"{kill.completed + 1}",
                    f"{found.step}",
                    f"{kill.lost}",
                    f"{kill.seconds:.3f}",
                    found.source,
                    "-" if found.base_step is None else f"{found.base_step}",
                    f"{found.replayed}",
                    claims,
                    same,
                )

    return "SIGKILL of training; resume() in a new process", _KILLED, lines()


def _replay(report: StepReport) -> _Table:
    def lines() -> Iterator[tuple[str, ...]]:
        found = report.replay
        for way, variant, threads in () if found is None else found.seconds:
            assert found is not None
            yield way, variant, f"{threads}", f"{found.speed(way, variant, threads) / 1e6:.0f}"

    found = report.replay
    title = "Replay alone"
    if found is not None:
        copies = (f"{rate / 1e9:.1f} ({n})" for n, rate in sorted(found.copy_bytes_per_s.items()))
        title += (
            f": AdamW, {found.params / 1e6:.1f} M parameters, {found.steps} steps of bfloat16 "
            f"gradients; a copy moves {', '.join(copies)} GB/s (threads)"
        )
    return title, _REPLAYED, lines()


def _back(report: StepReport) -> _Table:
    def lines() -> Iterator[tuple[str, ...]]:
        for found in report.recoveries:
            yield (
                found.to,
                found.variant,
                f"{found.steps}",
                f"{found.log_bytes / 1e6:.1f}",
                f"{found.resume_s:.3f}",
                f"{found.load_s:.3f}",
                f"{found.replay_s:.3f}",
                f"{found.training_s:.3f}",
                f"{found.parameter_steps_per_s / 1e6:.0f}",
                "exact" if found.exact else "not exact",
                "yes" if found.identical else "no",
            )

    return "A dense log replayed in a new process, reading included; seconds", _BACK, lines()


def _details(report: StepReport) -> Iterator[str]:
    usual: dict[str, Row] = {}
    for row in report.rows.rows:
        usual.setdefault(row.setting.arm, row)
    for name, row in usual.items():
        yield f"  {name}: {row.error or row.detail}"


def _notes(report: StepReport) -> Iterator[str]:
    yield (
        "Medians over the rounds. to dense, to compressed: how much longer a step takes than in "
        "the blocks of the same round that train alone, or with compressed gradients and without "
        "a log. behind: from the last step of a block until nothing is under way. CPU: of this "
        "process, and of those beside it."
    )
    yield (
        "in memory, to disk: what is taken into host memory, and what all processes send to "
        "storage, for each step. storage: files at the end of a block. host memory: at most, of "
        "this process beyond training alone, and of those beside it."
    )
    if report.kills:
        yield (
            "steps lost: completed ones that have to be repeated; the one in flight is not "
            "counted. seconds: from the call of resume() until it came back. every bit: training "
            "goes on to its end, and all of the state is compared with that of a training that "
            "nobody interrupted."
        )
    rate = report.rate
    if isinstance(rate, str):
        yield f"What a replica keeps up with could not be measured: {rate}"
    elif rate is not None:
        speed = f"{rate.parameter_steps_per_s / 1e6:.0f} million parameters times steps a second"
        least = "at least " if rate.kept_up else ""
        yield (
            f"A replica keeps up with {least}{speed}: {rate.updates} updates of "
            f"{rate.params / 1e6:.1f} M parameters, made in {rate.given_s:.2f} s by a trainer that "
            f"does nothing else, were applied after {rate.applied_s:.2f} s."
        )
    for row in report.rows.rows:
        noise = row.noise()
        if noise is not None:
            yield (
                f"Two blocks of {report.words(row)} in one round differ by {100 * noise:.1f} %: "
                "less than that means nothing."
            )
    others = _others_cores(report)
    if others > _BUSY_CORES:
        yield (
            f"The machine was not idle: other processes kept {others:.1f} of "
            f"{report.machine.cores} cores busy while nothing was saved (load "
            f"{report.machine.load:.1f} before, {report.load_after:.1f} after)."
        )


def _others_cores(report: StepReport) -> float:
    alone = report.rows.dense()
    found = None if alone is None else alone.spread(lambda block: block.others_cores)
    return 0.0 if found is None else found.median


def _one(value: float | None) -> Spread | None:
    return None if value is None else Spread.of([value])


def _ms(spread: Spread | None) -> str:
    return "-" if spread is None else f"{1e3 * spread.median:.1f}"


def _mb(spread: Spread | None, digits: int = 1) -> str:
    return "-" if spread is None else f"{spread.median / 1e6:.{digits}f}"
