"""Measured and modelled, side by side: targets, tables, plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from everstep.plan.multistep import PARTS_MAX, Overlap, Pipeline, best_cut, fewest, lower_bound_s
from everstep.trainer.multistep.partition import Unit, cut_by_cost, modelled_overlap
from everstep_bench.harness.figures import Spread, Verdict, picked, plain
from everstep_bench.harness.report import Report, Table, ms, range_of
from everstep_bench.multistep.training import Lengths
from everstep_bench.options import WAYS, MultistepOptions, Ratio

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
        names = "copy_steps state_bytes gradient_bytes link_bytes_per_s held_steps"
        return {
            **picked(self, names),
            "ratio": str(self.ratio),
            "rows": [self._row_as_json(row) for row in self.rows],
            "own": [plain(picked(row, "way parts error saves")) for row in self.own],
        }

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        known = bool(row.saves)
        return {
            **plain(picked(row, "way chosen error lengths saves")),
            "parts": "auto" if row.parts == AUTO else row.parts,
            "modelled_stall_s": self.modelled_s(row) if known else None,
            "modelled_lost_s": self.expected_s(row) if known else None,
            "own_s": self.own_s(row.way, row.count) if known else None,
            "bound_s": self.bound_s(row) if known else None,
            "stall_s": plain(row.stall_s()),
            "slowdown_s": plain(row.spread(lambda save: save.slowdown_s)),
        }


_BOUNDED = "gockpt_o"  # updates that wait for gradients cannot come near it
_OF_BEST = 1.05
_COLUMNS = ("way", "parts", "copies", "own work", "model", "measured", "min - max", "off",
            "waits: state", "gradients", "other", "slow-down", "bound", "")  # fmt: skip


def _near(found_s: float, best_s: float) -> bool:
    return found_s <= _OF_BEST * best_s + allowed_s(0.0)


def _own(measurement: Measurement, way: str, parts: int) -> str:
    """In words, how much of it is the training thread's own work."""
    own_s = measurement.own_s(way, parts)
    return "" if own_s is None else f"; own work {1e3 * own_s:.1f} ms"


@dataclass
class MultistepReport(Report):
    """Everything that was found."""

    options: MultistepOptions
    found: list[Measurement]

    def labels(self) -> list[str]:
        """Return remarks that belong to every figure of this run."""
        return [
            "EMULATED: everstep's copies go through a link that does not exist, and that takes so "
            "many steps for the whole state",
            *super().labels(),
        ]

    def rounds(self) -> str:
        """Return how often each number of parts was measured."""
        options = self.options
        return (
            f"{options.repeats} saves of each number of parts, order drawn with seed {options.seed}"
        )

    def verdicts(self) -> list[Verdict]:
        """Return the targets of each way in one line."""
        return [self.summary(found, way) for found in self.found for way in WAYS]

    def all_met(self) -> bool:
        """Return True if every target is met; one that could not be measured is not."""
        return all(verdict.met for found in self.found for verdict in self.verdicts_of(found))

    def tables(self) -> Iterator[Table]:
        """Yield one table for each length of a copy and share of gradients, with its targets."""
        for found in self.found:
            held = f"; gockpt_o keeps them for {found.held_steps} steps"
            title = (
                "Milliseconds that a base holds training up: a copy takes "
                f"{found.copy_steps:g} steps (link of {found.link_bytes_per_s / 1e9:.3g} GB/s), "
                f"gradients are {found.ratio} of the state{held if found.held_steps > 1 else ''}"
            )
            verdicts = self.verdicts_of(found)
            yield Table(title, _COLUMNS, _rows(found), words=("way", ""), verdicts=verdicts)

    def details(self) -> Iterator[str]:
        """Yield what failed."""
        for found in self.found:
            for row in (*found.rows, *found.own):
                if row.error:
                    yield f"{row.way}, {row.parts or 'auto'}: {row.error}"

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            "copies: everstep.plan.multistep as the paper has it, errors mended: waiting for "
            "copies and nothing else, from the link's bandwidth, bytes, and the lengths of "
            "forward, backward and update while nothing is saved. own work: of the training "
            "thread, in as many parts, of another run through the same link: all that is no "
            "waiting. model: both, with the link copying during that work, and gradients of "
            "gockpt copied after their update. measured: what the training thread spends in the "
            "library, in calls and in hooks, from the beginning of a base until it is in host "
            "memory, and beyond what steps without a base take there; the median of the saves. "
            "state, gradients: waiting for copies of these; other: the work of the library "
            "itself. slow-down: the same by the clock on the wall, the steps next to as many "
            "without a save. bound: of copies alone, no way in so many equal parts does better. "
            "OFF: more than 15 % and more than 2 ms from the model."
        )

    def figures(self) -> dict[str, Any]:
        """Return everything, every save included."""
        return {
            "step_s": self.options.step_s,
            "measurements": [
                {**found.as_json(), "targets": plain(self.verdicts_of(found))}
                for found in self.found
            ],
        }

    def verdicts_of(self, measurement: Measurement) -> list[Verdict]:
        """The targets, each with the measured figure."""
        return [
            *(self._model_verdict(measurement, way) for way in WAYS),
            self._bound_verdict(measurement, _BOUNDED),
            *(self._auto_verdict(measurement, way) for way in WAYS),
        ]

    def summary(self, measurement: Measurement, way: str) -> Verdict:
        """All targets of one way in one line: how many rows are as modelled, the best of them next
        to the lower bound, everstep's choice next to it, and both next to async."""
        own = [
            self._model_verdict(measurement, way),
            *([self._bound_verdict(measurement, way)] if way == _BOUNDED else ()),
            self._auto_verdict(measurement, way),
        ]
        what = f"{way}, a copy of {measurement.copy_steps:g} steps, gradients {measurement.ratio}"
        best = measurement.best_measured(way)
        auto = measurement.row(way, AUTO)
        words = [own[0].figure.split(";")[0] + " rows as modelled"]
        if best is not None:
            row = measurement.row(way, best[0])
            assert row is not None
            bound_ms = 1e3 * measurement.bound_s(row)
            words.append(f"best {1e3 * best[1]:.1f} ms in {best[0]} (bound {bound_ms:.1f})")
        chosen = None if auto is None else auto.stall_s()
        if auto is not None and chosen is not None:
            words.append(f"auto {1e3 * chosen.median:.1f} ms in {auto.chosen}")
        share = None if best is None else self._of_async(measurement, best[1])
        if share is not None:
            words.append(f"{share:.3f} of async")
        known = [verdict.met for verdict in own]
        met = None if None in known and False not in known else all(known)
        return Verdict(what, ", ".join(words), met)

    def _model_verdict(self, measurement: Measurement, way: str) -> Verdict:
        what = f"{way}: stall within 15 % (or 2 ms) of the model, for each number of parts"
        rows = measurement.of(way)
        failed = [row for row in (*measurement.rows, *measurement.own) if row.way == way]
        failed = [row for row in failed if row.error]
        compared = [
            (stall.median, model_s, row.parts)
            for row in rows
            if (stall := row.stall_s()) and (model_s := measurement.expected_s(row)) is not None
        ]
        if not compared:
            return Verdict(what, failed[0].error or "-" if failed else "-", None)
        beyond = [abs(stall_s - model_s) / allowed_s(model_s) for stall_s, model_s, _ in compared]
        stall_s, model_s, parts = compared[beyond.index(max(beyond))]
        met = sum(one <= 1 for one in beyond)
        figure = (
            f"{met} of {len(rows)}; at worst {ms(stall_s)} ms in {parts} part(s), and the model "
            f"says {ms(model_s)} ms"
        )
        if failed:
            figure += f"; {len(failed)} could not be measured ({failed[0].error})"
        return Verdict(what, figure, met == len(rows) and not failed)

    def _bound_verdict(self, measurement: Measurement, way: str) -> Verdict:
        what = f"{way}: at its best number of parts no more than that above the lower bound"
        best = measurement.best_measured(way)
        if best is None:
            return Verdict(what, "-", None)
        parts, stall_s = best
        row = measurement.row(way, parts)
        assert row is not None
        bound_s = measurement.bound_s(row)
        figure = (
            f"{1e3 * stall_s:.1f} ms next to {1e3 * bound_s:.1f} ms, in {parts} part(s)"
            f"{_own(measurement, way, parts)}"
        )
        waits = row.spread(lambda save: save.waits_s)
        if waits is not None:
            figure += f"; waiting alone {1e3 * waits.median:.1f} ms"
        return Verdict(what, figure, stall_s <= bound_s + allowed_s(bound_s))

    def _auto_verdict(self, measurement: Measurement, way: str) -> Verdict:
        what = f'{way}: parts="auto" within 5 % (or 2 ms) of the best, measured and modelled'
        row = measurement.row(way, AUTO)
        best = measurement.best_measured(way)
        stall = None if row is None else row.stall_s()
        modelled = measurement.best_modelled(way)
        if row is None or stall is None or best is None or modelled is None:
            return Verdict(what, "-", None)
        chosen_s = measurement.expected_s(row)
        assert chosen_s is not None
        figure = (
            f"{1e3 * stall.median:.1f} ms in {row.chosen} part(s) next to {1e3 * best[1]:.1f} ms "
            f"in {best[0]}; the model says {1e3 * chosen_s:.1f} ms, and {1e3 * modelled[1]:.1f} ms "
            f"in {modelled[0]}"
        )
        met = _near(stall.median, best[1]) and _near(chosen_s, modelled[1])
        return Verdict(what, figure, met)

    def _of_async(self, measurement: Measurement, stall_s: float) -> float | None:
        reference = measurement.row("async")
        blocked = None if reference is None else reference.stall_s()
        return None if blocked is None else stall_s / blocked.median


def _rows(found: Measurement) -> Iterator[tuple[str, ...]]:
    rows = [found.row(name) for name in ("async", "lazy")]
    for way in WAYS:
        rows += [*found.of(way), found.row(way, AUTO)]
    for row in rows:
        if row is not None:
            yield _cells(found, row)


def _cells(found: Measurement, row: Row) -> tuple[str, ...]:
    stall = row.stall_s()
    assert stall is not None
    model_s = found.expected_s(row)
    has_parts = row.way in WAYS
    notes = []
    if has_parts and row.parts == AUTO:
        notes.append(f"everstep's choice: {row.chosen}")
    elif has_parts and (best := found.best_modelled(row.way)) and best[0] == row.parts:
        notes.append("the model's best")
    if model_s is not None and abs(stall.median - model_s) > allowed_s(model_s):
        notes.append("OFF")
    return (
        row.way,
        ("auto" if row.parts == AUTO else f"{row.parts}") if has_parts else "-",
        ms(found.modelled_s(row)),
        ms(found.own_s(row.way, row.count)),
        ms(model_s),
        ms(stall),
        range_of(stall, 1, 1e3),
        "-" if model_s is None else f"{1e3 * (stall.median - model_s):+.1f}",
        ms(row.spread(lambda save: save.causes.get("gate", 0.0))),
        ms(row.spread(lambda save: save.causes.get("gradients", 0.0))),
        ms(row.spread(lambda save: save.other_s)),
        ms(row.spread(lambda save: save.slowdown_s)),
        ms(found.bound_s(row)) if has_parts else "-",
        ", ".join(notes),
    )
