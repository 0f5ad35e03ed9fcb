"""Blocks, rows and reports of ``everstep bench stall`` as tests want them."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import typer
from rich.console import Console
from typer.testing import CliRunner

from everstep.cli.common.errors import EverstepGroup
from everstep_bench.cli.bench import app
from everstep_bench.harness.loop import Step
from everstep_bench.harness.machine import Machine
from everstep_bench.harness.report import Facts, Findings
from everstep_bench.harness.session import Turns
from everstep_bench.options import StallOptions
from everstep_bench.stall.figures import Block, Ideal, Interval, Row
from everstep_bench.stall.report import StallReport
from tests.support.displays import Silent

__all__ = [
    "MACHINE",
    "block_of",
    "facts_of",
    "ideal_of",
    "interval_of",
    "invoke",
    "report_of",
    "row_of",
    "saved",
    "session_of",
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


MACHINE = Machine("cpu", 2, 1, "2", "3", "Linux", "ext4", "/dev/x", 1, 0.5, True)


def facts_of(size_bytes: int = 10**9, *, free_core: bool | None = True, **changes: Any) -> Facts:
    """Facts about a run that never was."""
    found: dict[str, Any] = {"machine": MACHINE, "folder": ".", "tensors": 450, "workload": "a GPT"}
    found |= {"load_after": 0.5, "seconds": 1.0}
    return Facts(size_bytes=size_bytes, free_core=free_core, **found | changes)


def session_of(options: Any, display: Any = None, **fields: Any) -> Any:
    """A run in which nothing is kept on cores."""
    shown = display or Silent()
    placement = SimpleNamespace(spread=lambda: None)
    turns = lambda: Turns(shown, options.seed)  # noqa: E731
    known = {"options": options, "display": shown, "placement": placement, "turns": turns}
    return SimpleNamespace(**{**known, "begin_s": 0.0, "machine": MACHINE, **fields})


def report_of(*intervals: Interval, free_core: bool = True, **options: Any) -> StallReport:
    return StallReport(StallOptions(**options), facts_of(free_core=free_core), list(intervals))


def saved(
    stall_s: float, *, window_s: float = 4.0, gate_s: float = 0.0, extra_s: float = 0.0
) -> Block:
    causes = {"capture": stall_s, "gate": gate_s, "back_pressure": 0.0, "persist": 0.0}
    steps = [1.0 + gate_s + extra_s, *[1.0] * 7]
    return block_of(
        10, stall_s, steps, window_s=window_s, causes=causes, staged_s=10.5, persist_s=1.0,
        helper_cpu_s=0.1,
    )  # fmt: skip


def shown_by(report: Findings) -> str:
    stream = io.StringIO()
    report.present(Console(file=stream, width=10_000, no_color=True))
    return stream.getvalue()


def invoke(*words: str) -> Any:
    root = typer.Typer(cls=EverstepGroup)
    root.add_typer(app, name="bench")
    return CliRunner().invoke(root, ["bench", *words])
