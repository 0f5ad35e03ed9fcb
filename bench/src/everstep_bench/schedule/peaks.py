"""Peak of memory of plans that are executed, next to the predicted one, for eight networks.

Each network is traced in real steps on the CPU, and planned for an EMULATED link that is hardly
fast enough. Then it is trained with that plan (``Method(plan=...)``). torch's profiler counts what
its allocator hands out on the CPU in a step, from mark to mark; the state is there before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from everstep.checkpointer import Checkpointer
from everstep.config.method import Method
from everstep.errors import EverstepError
from everstep.plan.schedule.exact import Planned, plan_step
from everstep.plan.schedule.plan_file import PlanFile, plan_file
from everstep.plan.schedule.trace import trace_of
from everstep.seams import Seams
from everstep.testing.emulated_link import EmulatedLink
from everstep.workloads.processes import interruptible
from everstep.workloads.published import PUBLISHED, published
from everstep_bench.harness.display import Display
from everstep_bench.harness.loop import seeded_single_thread
from everstep_bench.harness.machine import workspace
from everstep_bench.harness.report import Findings, Table, mb, number
from everstep_bench.harness.running import quiet

_MARGIN = 1.05
_SLOWEST_BYTES_PER_S = 1.0
_STEPS = 4  # until the plan is followed
_COLUMNS = ("network", "state MB", "alone", "measured", "with copies", "measured ", "all at once",
            "duplicated", "followed")  # fmt: skip


@dataclass(frozen=True, slots=True)
class PeakRow:
    """Bytes of one network beyond its state, at the peak of a step.

    Attributes:
        state_bytes: parameters, buffers, optimizer state and the batch.
        without, with_copies: predicted and measured: training alone, and with the plan.
        all_at_once: with a duplicate of the whole state, as CheckFreq makes it; predicted.
        duplicated_bytes: of the plan that was executed.
        followed: True if the measured step followed the plan from the file.
    """

    network: str
    state_bytes: int
    without: tuple[int, int]
    with_copies: tuple[int, int]
    all_at_once: int
    duplicated_bytes: int
    followed: bool


@dataclass(frozen=True)
class PeaksReport(Findings):
    """All networks."""

    optimizer: str
    rows: tuple[PeakRow, ...]

    def all_met(self) -> bool:
        """Return True if every plan was followed."""
        return all(row.followed for row in self.rows)

    def figures(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "optimizer": self.optimizer,
            "link": "EMULATED",
            "rows": list(map(asdict, self.rows)),
        }

    def lines(self) -> Iterator[str]:
        """Yield what was trained."""
        yield f"one sample a step, {self.optimizer}, on the CPU; the link is EMULATED"

    def tables(self) -> Iterator[Table]:
        """Yield the table."""
        title = "Peak of memory in a step, MB beyond the state"
        yield Table(title, _COLUMNS, map(_cells, self.rows), words=("network", "followed"))

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            "alone: training without captures, predicted, and measured next to it. with copies: "
            "predicted for the plan, and measured while it is executed. all at once: predicted, "
            "with a duplicate of the whole state"
        )


def _cells(row: PeakRow) -> tuple[str, ...]:
    sizes = (*row.without, *row.with_copies, row.all_at_once, row.duplicated_bytes)
    return (
        row.network,
        mb(row.state_bytes),
        *(number(size, 1, 1e-6) for size in sizes),
        "yes" if row.followed else "NO",
    )


def run_peaks(folder: Path | None, *, adam: bool, display: Display) -> PeaksReport:
    """Plan and train each network."""
    rows = []
    display.begin("peaks", len(PUBLISHED))
    with interruptible(), workspace(folder) as found:
        for name in PUBLISHED:
            display.advance(name)
            with seeded_single_thread(1234), quiet():
                rows.append(network_peak(found / name, name, adam=adam))
            gc.collect()
    return PeaksReport("Adam" if adam else "SGD", tuple(rows))


def _optimizer(parameters: Any, *, adam: bool) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters) if adam else torch.optim.SGD(parameters, 0.1)


def _planned(name: str, *, adam: bool) -> tuple[Planned, PlanFile]:
    """Plan for a link that is just fast enough."""
    trace = trace_of(
        published(name).training, 1, lambda found: _optimizer(found, adam=adam), measured_on="cpu"
    )
    slow = plan_step(trace, 0.0, None, _SLOWEST_BYTES_PER_S, "direct", executed=True)
    link = _MARGIN * slow.needed_bytes_per_s
    found = plan_step(trace, 0.0, None, link, "direct", executed=True)
    if found.schedule is None:
        raise EverstepError(f"{name}: {found.infeasible}")
    return found, plan_file(trace, found.problem, found.schedule, {"model": name, "batch": 1})


def network_peak(folder: Path, name: str, *, adam: bool) -> PeakRow:
    """Plan a network, train it with the plan, and return the peaks."""
    found, plan = _planned(name, adam=adam)
    folder.mkdir()
    path = folder / "plan.json"
    path.write_bytes(plan.encode())
    state_bytes = sum(x.size_bytes for x in found.trace.tensors if x.begin < 0)
    model, loss = published(name).training(1)
    optimizer = _optimizer(model.parameters(), adam=adam)

    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    step()
    alone = allocated_bytes(step)
    seams = Seams(lane=lambda: EmulatedLink(plan.link_bytes_per_s))
    method = Method(base="scheduled", plan=str(path))
    with Checkpointer(
        folder / "run", {"model": model, "optimizer": optimizer},
        method=method, every=None, seams=seams,
    ) as checkpointer:  # fmt: skip
        checkpointer.resume()

        def captured() -> None:
            step()
            checkpointer.step()

        for _ in range(_STEPS):
            captured()
        before = checkpointer.stats().schedule
        copied = allocated_bytes(captured)
        stats = checkpointer.stats().schedule
    assert before is not None
    assert stats is not None
    peaks = plan.peak_bytes
    return PeakRow(
        name,
        state_bytes,
        (peaks["without"] - state_bytes, alone),
        (peaks["planned"] - state_bytes, copied),
        peaks["all_at_once"] - state_bytes,
        stats.duplicated_bytes,
        stats.misfit is None and stats.followed_steps > before.followed_steps,
    )


def allocated_bytes(step: Callable[[], None]) -> int:
    """Return the most that torch's allocator hands out during a step, beyond what is there before.

    Frees by other threads are not seen: duplicates count until the end of the step.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    results: Any = found.profiler
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]"
    )
    now = most = 0
    for _, size_bytes in changes:
        now += size_bytes
        most = max(most, now)
    return most
