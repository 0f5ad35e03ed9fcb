"""Measured and modelled, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from everstep.plan.multistep import PARTS_MAX, Overlap, Pipeline, best_cut, fewest, lower_bound_s
from everstep.trainer.multistep.partition import Unit, cut_by_cost, modelled_overlap
from everstep_bench.harness.figures import Spread, plain
from everstep_bench.multistep.training import Lengths
from everstep_bench.options import WAYS, Ratio

AUTO = 0
"""As a number of parts: everstep chooses it."""

_OFF_MAX = 0.15
_OFF_S_MAX = 0.002


def allowed_s(model_s: float) -> float:
    """By how much a measured time may differ from a modelled one."""
    return max(_OFF_MAX * model_s, _OFF_S_MAX)


@dataclass(frozen=True, slots=True)
class MeasuredSave:
    """A save while training goes on.

    Attributes:
        causes: seconds that training was held up, as the library counts them, by cause.
        calls_s: in calls of the library, without what these take while nothing is saved.
        within_s: in its hooks within steps, as it counts them.
        wall_s: from the call until the state was copied and the step under way was over.
        steps: in that time.
        step_s: of one in which nothing is saved.
        parts: in which it was captured; 1 for those that do not say.
        forward_s, backward_s: of a step of it, in the mean: they are longer beside copies.
    """

    causes: Mapping[str, float]
    calls_s: float
    within_s: float
    wall_s: float
    steps: int
    step_s: float
    parts: int
    forward_s: float
    backward_s: float

    @property
    def stall_s(self) -> float:
        """Return the time that the training thread spent in the library."""
        return self.calls_s + self.within_s

    @property
    def other_s(self) -> float:
        """Return the library's own work: the stall without waiting for copies."""
        return self.stall_s - self.causes.get("gate", 0.0) - self.causes.get("gradients", 0.0)

    @property
    def waits_s(self) -> float:
        """Return the part of the stall that is waiting for copies."""
        return self.stall_s - self.other_s

    @property
    def slowdown_s(self) -> float:
        """Return the extra time of its steps over as many steps without a save."""
        return self.wall_s - self.steps * self.step_s


@dataclass(slots=True)
class Row:
    """One way in so many parts.

    Attributes:
        way: ``"gockpt"``, ``"gockpt_o"``, or another method.
        parts: that were asked for; :data:`AUTO`: none.
        lengths: of steps in which nothing was saved.
        error: why nothing was measured.
    """

    way: str
    parts: int
    saves: list[MeasuredSave] = field(default_factory=list)
    lengths: Lengths | None = None
    error: str | None = None

    @property
    def chosen(self) -> int | None:
        """The number of parts of the last save."""
        return self.saves[-1].parts if self.saves else None

    @property
    def count(self) -> int:
        """The number of parts, asked for or chosen."""
        return self.parts or self.chosen or 1

    def spread(self, figure: Callable[[MeasuredSave], float]) -> Spread | None:
        """Return one figure over all saves."""
        return Spread.of([figure(save) for save in self.saves])

    def stall_s(self) -> Spread | None:
        """Return the stall of a save."""
        return self.spread(lambda save: save.stall_s)


@dataclass(slots=True)
class Measurement:
    """All rows of one length of a copy, and one share of gradients.

    Attributes:
        copy_steps: steps that a copy of the whole state takes.
        state_bytes, gradient_bytes: of the training.
        link_bytes_per_s: of the emulated link.
        rows: both ways, by parts; then others.
        own: both ways, by parts, through the same link once more: what the training thread does
            itself, measured apart from what it is compared with.
        units: bytes of what is captured together, in the order of the state; empty: anything can
            be cut.
        held_steps: for which ``gockpt_o`` keeps gradients.
    """

    copy_steps: float
    ratio: Ratio
    state_bytes: int
    gradient_bytes: int
    link_bytes_per_s: float
    rows: Sequence[Row] = ()
    own: Sequence[Row] = ()
    units: Sequence[int] = ()
    held_steps: int = 1

    def held(self, way: str) -> int | None:
        """For how many steps gradients are kept, in words of
        :func:`everstep.plan.multistep.overlap`."""
        return self.held_steps if way == "gockpt_o" else None

    def row(self, way: str, parts: int = 1) -> Row | None:
        """The row, if it has a figure."""
        return next(
            (row for row in self.rows if (row.way, row.parts) == (way, parts) and row.saves), None
        )

    def of(self, way: str) -> list[Row]:
        """The rows of a way that have a figure, by parts; without the choice of everstep."""
        return [row for row in self.rows if row.way == way and row.saves and row.parts != AUTO]

    def pipeline(self, row: Row) -> Pipeline:
        """Return the input of the model for a row."""
        assert row.lengths is not None
        speed = self.link_bytes_per_s
        return row.lengths.pipeline(self.state_bytes / speed, self.gradient_bytes / speed)

    def own_s(self, way: str, parts: int) -> float | None:
        """The training thread's own work for a base in so many parts; between numbers of parts that
        were measured, in proportion. None: it was not measured."""
        return self._apart(way, parts, lambda save: save.other_s)

    def _apart(self, way: str, parts: int, figure: Callable[[MeasuredSave], float]) -> float | None:
        """A figure as it was measured apart."""
        found = sorted(
            (row.parts, spread.median)
            for row in self.own
            if row.way == way and (spread := row.spread(figure))
        )
        if not found:
            return None
        measured, seconds = zip(*found, strict=True)
        return max(0.0, float(np.interp(parts, measured, seconds)))

    def modelled_s(self, row: Row, parts: int | None = None) -> float:
        """That training waits for copies, as the model says that knows of nothing else (the
        paper's, its errors mended).

        Args:
            parts: other than those of the row.
        """
        pipeline = self.pipeline(row)
        if row.way == "async":
            return pipeline.state_s
        return self.overlap(pipeline, parts or row.count, self.held(row.way)).stall_s

    def expected(self, row: Row, parts: int | None = None) -> Overlap | None:
        """Return the modelled stall of a base, including the training thread's own work.

        Forward and backward are as long as they are beside copies. None if own work was
        not measured separately.
        """
        count = parts or row.count
        own_s = self.own_s(row.way, count)
        forward_s = self._apart(row.way, count, lambda save: save.forward_s)
        backward_s = self._apart(row.way, count, lambda save: save.backward_s)
        if own_s is None or forward_s is None or backward_s is None:
            return None
        lengths = replace(self.pipeline(row), forward_s=forward_s, backward_s=backward_s)
        pipeline = replace(lengths, part_s=own_s / count, behind_update=True)
        return self.overlap(pipeline, count, self.held(row.way))

    def expected_s(self, row: Row, parts: int | None = None) -> float | None:
        """That training is held up, as :meth:`expected` says; of what has no parts, as
        :meth:`modelled_s` does."""
        if row.way not in WAYS:
            return self.modelled_s(row)
        found = self.expected(row, parts)
        return None if found is None else found.lost_s

    def overlap(self, pipeline: Pipeline, parts: int, held_steps: int | None) -> Overlap:
        """Return the modelled cost of a base that is split between parameters, as everstep does."""
        if not self.units:
            return best_cut(pipeline, parts, held_steps).overlap
        units = [Unit("", "", (), size_bytes) for size_bytes in self.units]
        return modelled_overlap(
            cut_by_cost(units, pipeline, parts, held_steps), pipeline, held_steps
        )

    def bound_s(self, row: Row) -> float:
        """No way with so many parts holds training up less."""
        return lower_bound_s(self.pipeline(row), row.count)

    def best_modelled(self, way: str) -> tuple[int, float] | None:
        """The best number of parts as the model says, own work included, and what it holds training
        up; None where that work was not measured."""
        rows = self.of(way)
        if not rows:
            return None
        found = [self.expected_s(rows[0], parts) for parts in range(1, PARTS_MAX + 1)]
        lost_s = [seconds for seconds in found if seconds is not None]
        if len(lost_s) < len(found):
            return None
        parts = fewest(lost_s)
        return parts, lost_s[parts - 1]

    def best_measured(self, way: str) -> tuple[int, float] | None:
        """The best number of parts that was measured, and what it held training up."""
        found = [(stall.median, row.parts) for row in self.of(way) if (stall := row.stall_s())]
        return min(found)[::-1] if found else None

    def as_json(self) -> dict[str, Any]:
        """Return everything, every save included."""
        names = "copy_steps state_bytes gradient_bytes link_bytes_per_s held_steps".split()
        return {
            **{name: getattr(self, name) for name in names},
            "ratio": str(self.ratio),
            "rows": [self._row_as_json(row) for row in self.rows],
            "own": [
                {"way": row.way, "parts": row.parts, "error": row.error, "saves": plain(row.saves)}
                for row in self.own
            ],
        }

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        known = bool(row.saves)
        return {
            "way": row.way,
            "parts": "auto" if row.parts == AUTO else row.parts,
            "chosen": row.chosen,
            "error": row.error,
            "modelled_stall_s": self.modelled_s(row) if known else None,
            "modelled_lost_s": self.expected_s(row) if known else None,
            "own_s": self.own_s(row.way, row.count) if known else None,
            "bound_s": self.bound_s(row) if known else None,
            "stall_s": plain(row.stall_s()),
            "slowdown_s": plain(row.spread(lambda save: save.slowdown_s)),
            "lengths": plain(row.lengths),
            "saves": plain(row.saves),
        }
