"""Blocks, rows and reports of ``everstep bench stall`` as tests want them."""

from __future__ import annotations

import io
from typing import Any

import typer
from rich.console import Console
from typer.testing import CliRunner

from everstep.cli.common.errors import EverstepGroup
from everstep_bench.cli.bench import app
from everstep_bench.persist.machine import Machine
from everstep_bench.stall import show
from everstep_bench.stall.figures import Block, Ideal, Interval, Row
from everstep_bench.stall.loop import Step
from everstep_bench.stall.options import StallOptions
from everstep_bench.stall.report import StallReport

__all__ = [
    "block_of",
    "ideal_of",
    "interval_of",
    "invoke",
    "report_of",
    "row_of",
    "saved",
    "shown_by",
]


def block_of(
    begin_s: float,
    call_s: float,
    steps_s: list[float],
    *,
    window_s: float | None = None,
    after_step_s: float = 0.0,
    **fields: Any,
) -> Block:
    """A block with steps of these lengths; its save is done after ``window_s``."""
    at_s = begin_s + call_s
    steps = []
    for length_s in steps_s:
        steps.append(Step(at_s, at_s + length_s))
        at_s += length_s + after_step_s
    fields.setdefault("calls_s", call_s + after_step_s * len(steps_s))
    return Block(
        begin_s=begin_s,
        called_s=begin_s + call_s,
        end_s=at_s,
        steps=tuple(steps),
        done_s=None if window_s is None else begin_s + window_s,
        **fields,
    )


def ideal_of(*steps_s: float, blocks: int = 1) -> Ideal:
    return Ideal(tuple(block_of(100.0 * n, 0.0, list(steps_s)) for n in range(blocks)))


def row_of(name: str, role: str, *blocks: Block, **fields: Any) -> Row:
    return Row(name, role, "what it does", dict(enumerate(blocks, 1)), **fields)  # type: ignore[arg-type]


def interval_of(ideals: list[Ideal], *rows: Row, every: int = 2) -> Interval:
    return Interval(every, dict(enumerate(ideals, 1)), list(rows))


def report_of(*intervals: Interval, free_core: bool = True, **options: Any) -> StallReport:
    facts = Machine("cpu", 2, 1, "2", "3", "Linux", "ext4", "/dev/x", 1, 0.5, True)
    return StallReport(
        options=StallOptions(**options),
        machine=facts,
        size_bytes=10**9,
        tensors=450,
        workload="a GPT",
        python_part_s=0.02 if options.get("python_heavy") else 0.0,
        free_core=free_core,
        intervals=list(intervals),
        load_after=0.5,
        start_s=0.0,
        seconds=1.0,
        folder=".",
    )


def saved(
    stall_s: float, *, window_s: float = 4.0, gate_s: float = 0.0, extra_s: float = 0.0
) -> Block:
    causes = {"capture": stall_s, "gate": gate_s, "back_pressure": 0.0, "persist": 0.0}
    steps = [1.0 + gate_s + extra_s, *[1.0] * 7]
    return block_of(
        10, stall_s, steps, window_s=window_s, causes=causes, staged_s=10.5, persist_s=1.0,
        peak_bytes=5, helper_cpu_s=0.1,
    )  # fmt: skip


def shown_by(report: StallReport) -> str:
    stream = io.StringIO()
    show.present(report, Console(file=stream, width=10_000, no_color=True))
    return stream.getvalue()


def invoke(*words: str) -> Any:
    root = typer.Typer(cls=EverstepGroup)
    root.add_typer(app, name="bench")
    return CliRunner().invoke(root, ["bench", *words])
