"""Plans carried out on this machine, next to what they predict.

A training with ``method="checkflow"`` behind an EMULATED link: faster than the state needs, as
fast, and too slow. How long steps wait for copies is compared with the prediction, and when each
tensor has left with when it was planned. Then what the keeper holds is compared, bit for bit, with
the state at the step mark.

The layers are real (their gradients and updates are computed), and each takes a given time,
sleeping for the rest of it, as a device would that computes while the host waits. ``compute=True``
leaves that away: then copies and training share the processor, and its noise. torch has one thread.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everstep.checkpointer import Checkpointer
from everstep.errors import EverstepError
from everstep.restore.fetch.held import HeldBase
from everstep.seams import Seams
from everstep.state.values.tensors import host_bytes
from everstep.testing import inspect
from everstep.testing.emulated_link import EmulatedLink
from everstep.trainer.schedule.scheduler import ScheduleStats
from everstep.workloads.processes import interruptible
from everstep_bench.harness.display import Display
from everstep_bench.harness.loop import flatten, seeded_single_thread
from everstep_bench.harness.machine import workspace
from everstep_bench.harness.report import Findings, Table, mb, ms, number

CLOSE = 0.1
CLOSE_S = 2e-3
"""Waiting is as predicted if it differs by no more than one of these."""

_COLUMNS = ("updates", "link", "GB/s", "alone", "predicted", "waited", "", "step", "copies late",
            "most", "duplicated", "plans", "followed", "torn")  # fmt: skip
_FACTORS = (2.0, 1.05, 0.7, 0.4)
_ORDERS = ("after", "inside")
_ALONE_STEPS = 8


@dataclass(frozen=True, slots=True)
class ExecutedOptions:
    """Options of the benchmark.

    Attributes:
        layers, width: of the model: linear layers of so many inputs and outputs.
        layer_s: seconds that a layer takes forward; twice as long backward.
        compute: the layers take as long as this machine needs, instead.
        steps: of each training that count; some more are for learning.
        checked_steps: of which captures are compared with the state.
        folder: where runs are put.
    """

    layers: int = 8
    width: int = 512
    layer_s: float = 5e-3
    compute: bool = False
    steps: int = 16
    checked_steps: int = 6
    folder: Path | None = None
    seed: int = 1234


@dataclass(frozen=True, slots=True)
class ExecutedRow:
    """One training.

    Attributes:
        order: ``"after"``: one optimizer, after backward; ``"inside"``: one for each parameter.
        factor: bandwidth of the link, as a multiple of what moves the state within a step.
        alone_s: of a step without checkpoints.
        predicted_wait_s, waited_s: of a step; the median of those that followed the last plan.
        step_s: of a step with captures, the step mark included; median.
        late_s: how much later than planned tensors have left: median, and most.
        plans, strayed_steps: plans made; steps that did not go as expected.
        duplicated_bytes: memory that was taken for duplicates.
        compared, torn: captures that were compared, and those that differ.
    """

    order: str
    factor: float
    link_bytes_per_s: float
    state_bytes: int
    alone_s: float
    predicted_wait_s: float
    waited_s: float
    step_s: float
    late_s: tuple[float, float]
    plans: int
    strayed_steps: int
    followed_steps: int
    duplicated_bytes: int
    compared: int
    torn: int

    @property
    def met(self) -> bool:
        """Return True if training waits as predicted and no capture is torn."""
        off_s = abs(self.waited_s - self.predicted_wait_s)
        close = off_s <= max(CLOSE * self.predicted_wait_s, CLOSE_S)
        return close and self.compared > 0 and not self.torn


@dataclass(frozen=True)
class ExecutedReport(Findings):
    """All trainings."""

    options: ExecutedOptions
    rows: tuple[ExecutedRow, ...]

    def all_met(self) -> bool:
        """Return True if all rows reach their targets."""
        return all(row.met for row in self.rows)

    def figures(self) -> dict[str, Any]:
        """Return everything as plain data."""
        rows = [{**asdict(row), "met": row.met} for row in self.rows]
        return {"options": self.options, "link": "EMULATED", "rows": rows}

    def lines(self) -> Iterator[str]:
        """Yield what was trained."""
        options = self.options
        pace = "as fast as this machine computes them"
        if not options.compute:
            pace = f"PACED: {options.layer_s * 1e3:g} ms forward, twice as long backward"
        yield (
            f"{options.layers} linear layers of {options.width}, {pace}; AdamW, "
            f"{mb(self.rows[0].state_bytes)} MB captured at every step; the link is EMULATED"
        )

    def tables(self) -> Iterator[Table]:
        """Yield the table."""
        yield Table("Captures by a plan", _COLUMNS, map(_cells, self.rows), words=("updates",))

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            "milliseconds. link: of what moves the state within a step alone. predicted, waited: "
            f"how long a step waits for copies; yes: within {CLOSE:.0%} or {CLOSE_S * 1e3:g} ms, "
            "and no capture differs from the state at its mark. step: with captures, the mark "
            "included. late: after the planned end of a tensor's copy"
        )


def _cells(row: ExecutedRow) -> tuple[str, ...]:
    return (
        f"{row.order} backward",
        f"{row.factor:.0%}",
        number(row.link_bytes_per_s, 3, 1e-9),
        *map(ms, (row.alone_s, row.predicted_wait_s, row.waited_s)),
        "yes" if row.met else "NO",
        *map(ms, (row.step_s, *row.late_s)),
        f"{mb(row.duplicated_bytes)} MB",
        str(row.plans),
        str(row.followed_steps),
        f"{row.torn} of {row.compared}",
    )


def run_executed(options: ExecutedOptions, display: Display) -> ExecutedReport:
    """Trains behind each link, with updates in each order."""
    rows = []
    display.begin("executed plans", len(_ORDERS) * len(_FACTORS))
    with interruptible(), workspace(options.folder) as folder:
        for order in _ORDERS:
            for factor in _FACTORS:
                display.advance(f"updates {order} backward, a link of {factor:g} times the needed")
                with seeded_single_thread(options.seed):
                    rows.append(_row(folder / f"{order}-{factor}", options, order, factor))
    return ExecutedReport(options, tuple(rows))


class _Pace(torch.autograd.Function):
    """Takes a given time, forward, and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, end_s: float, layer_s: float) -> Tensor:
        ctx.layer_s = layer_s
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.layer_s)
        return gradients[0], None, None


class _Layer(nn.Module):
    def __init__(self, width: int, layer_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self._layer_s = layer_s

    def forward(self, x: Tensor) -> Tensor:
        end_s = time.perf_counter() + self._layer_s
        result: Tensor = self.linear(x).relu()
        if self._layer_s:
            result = _Pace.apply(result, end_s, self._layer_s)  # type: ignore[no-untyped-call]
        return result


class _Training:
    """A model, and optimizers of it."""

    def __init__(self, options: ExecutedOptions, order: str) -> None:
        layer_s = 0.0 if options.compute else options.layer_s
        self._model = nn.Sequential(
            *(_Layer(options.width, layer_s) for _ in range(options.layers))
        )
        self._batch = torch.randn(256 if options.compute else 8, options.width)
        self._wanted = torch.randn(options.width)
        self._optimizers: list[torch.optim.Optimizer] = []
        self.state: dict[str, Any] = {"model": self._model}
        if order == "after":
            self._optimizers.append(torch.optim.AdamW(self._model.parameters()))
            self.state["optimizer"] = self._optimizers[0]
            return
        for position, parameter in enumerate(self._model.parameters()):
            one = torch.optim.AdamW([parameter])
            self.state[f"optimizer {position}"] = one
            register: Any = parameter.register_post_accumulate_grad_hook
            register(functools.partial(_update, one))

    def step(self) -> None:
        loss = (self._model(self._batch) - self._wanted).square().mean()
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _update(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _row(run: Path, options: ExecutedOptions, order: str, factor: float) -> ExecutedRow:
    training = _Training(options, order)
    training.step()
    alone_s = statistics.median(_timed(training, None) for _ in range(_ALONE_STEPS))
    state = {name: part.state_dict() for name, part in training.state.items()}
    size_bytes = sum(tensor.nbytes for tensor in flatten(state).values())
    link = factor * size_bytes / alone_s
    seams = Seams(lane=lambda: EmulatedLink(link))
    with Checkpointer(
        run, training.state, method="checkflow", every=None, seams=seams
    ) as checkpointer:
        checkpointer.resume()
        learnt = 0
        steps_s = list[float]()
        while len(steps_s) < options.steps:
            steps_s.append(_timed(training, checkpointer))
            found = _schedule_of(checkpointer)
            if found.plans != learnt:
                learnt = found.plans
                steps_s = []
            if found.captures > 10 * options.steps:
                raise EverstepError(f"no plan holds for {options.steps} steps")
        compared, torn = _compare(training, checkpointer, options.checked_steps)
    late_s = [
        times.end_s - times.planned_end_s
        for times in found.tensors.values()
        if times.planned_end_s is not None
    ]
    return ExecutedRow(
        order,
        factor,
        link,
        size_bytes,
        alone_s,
        found.predicted_wait_s or 0.0,
        statistics.median(found.waited_s) if found.waited_s else math.nan,
        statistics.median(steps_s),
        (statistics.median(late_s), max(late_s)) if late_s else (math.nan, math.nan),
        found.plans,
        found.strayed_steps,
        found.followed_steps,
        found.duplicated_bytes,
        compared,
        torn,
    )


def _timed(training: _Training, checkpointer: Checkpointer | None) -> float:
    start_s = time.perf_counter()
    training.step()
    if checkpointer is not None:
        checkpointer.step()
    return time.perf_counter() - start_s


def _schedule_of(checkpointer: Checkpointer) -> ScheduleStats:
    found = checkpointer.stats().schedule
    assert found is not None
    return found


def _bytes_of(tensor: torch.Tensor) -> bytes:
    contiguous = tensor.contiguous()  # kept as long as it is read
    return bytes(host_bytes(contiguous))


def _compare(training: _Training, checkpointer: Checkpointer, steps: int) -> tuple[int, int]:
    """Return the number of captures compared with their state, and of those that differ."""
    states: dict[int, Mapping[str, bytes]] = {}
    compared = torn = 0
    for _ in range(steps):
        for _ in range(2):  # during the second, the first is copied if the link is fast enough
            training.step()
            state = {
                name: _bytes_of(tensor)
                for name, tensor in inspect(checkpointer).state.survey().tensors.items()
            }
            checkpointer.step()
            states[checkpointer.stats().step] = state
        held = inspect(checkpointer).keepers.recall_leftovers(own=True).base
        if held is not None and held.id.step in states:
            found = dict(contents_of(held))
            compared += 1
            torn += any(found[name] != data for name, data in states[held.id.step].items())
    return compared, torn


def contents_of(held: HeldBase) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each entry of a held base."""
    opened = held.open()
    for file, _, header, _ in opened.shards:
        for place in header.placed:
            data = bytearray(place.end - place.begin)
            file.read_into(memoryview(data), header.room_bytes + place.begin)
            yield place.entry.name, bytes(data)
    opened.close()
