"""The outcome: targets and plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from everstep.bench.multistep.figures import AUTO, Measurement, allowed_s, least
from everstep.bench.multistep.options import WAYS, MultistepOptions
from everstep.bench.persist.machine import Machine
from everstep.bench.persist.report import Verdict
from everstep.bench.stall.report import facts_as_json

__all__ = ["MultistepReport"]

_BOUNDED = "gockpt_o"  # updates that wait for gradients cannot come near it
_ZERO_OF_ASYNC = 0.05
_OF_BEST = 1.05


@dataclass(slots=True)
class MultistepReport:
    """Everything that was found.

    Attributes:
        size_bytes: of the state, about.
        tensors: number of those in it.
        workload: the training in words.
        free_core: whether training had a core of its own, and another was free.
    """

    options: MultistepOptions
    machine: Machine
    size_bytes: int
    tensors: int
    workload: str
    free_core: bool
    found: list[Measurement]
    load_after: float
    seconds: float
    folder: str

    def labels(self) -> list[str]:
        """What everyone who sees a figure of this run must know."""
        found = [
            "EMULATED: everstep's copies go through a link that does not exist, and that takes so "
            "many steps for the whole state"
        ]
        if not self.free_core:
            found.append("ONE CORE: training and everything else share it")
        return found

    def verdicts(self, measurement: Measurement) -> list[Verdict]:
        """The targets, each with the measured figure."""
        return [
            *(self._model_verdict(measurement, way) for way in WAYS),
            self._bound_verdict(measurement, _BOUNDED),
            *(self._auto_verdict(measurement, way) for way in WAYS),
            *self._zero_verdicts(measurement),
        ]

    def summary(self, measurement: Measurement, way: str) -> Verdict:
        """All targets of one way in one line: how many rows are as modelled, the best of them next
        to the lower bound, everstep's choice next to it, and both next to async."""
        own = [
            self._model_verdict(measurement, way),
            *([self._bound_verdict(measurement, way)] if way == _BOUNDED else ()),
            self._auto_verdict(measurement, way),
            *(v for v in self._zero_verdicts(measurement) if v.target.startswith(f"{way} in")),
        ]
        what = f"{way}, a copy of {measurement.copy_steps:g} steps, gradients {measurement.ratio}"
        best, auto = measurement.best_measured(way), measurement.row(way, AUTO)
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

    def all_met(self) -> bool:
        """Whether every target is met; one that could not be measured is not."""
        return all(verdict.met for found in self.found for verdict in self.verdicts(found))

    def as_json(self) -> dict[str, Any]:
        """Everything, every save included."""
        return {
            **facts_as_json(self),
            "step_s": self.options.step_s,
            "measurements": [
                {
                    **found.as_json(),
                    "targets": [
                        {"target": v.target, "figure": v.figure, "met": v.met}
                        for v in self.verdicts(found)
                    ],
                }
                for found in self.found
            ],
        }

    def _model_verdict(self, measurement: Measurement, way: str) -> Verdict:
        what = f"{way}: stall within 15 % (or 2 ms) of the model, for each number of parts"
        rows = measurement.of(way)
        failed = [row for row in measurement.rows if row.way == way and row.error]
        if not rows:
            return Verdict(what, failed[0].error or "-" if failed else "-", None)
        worst: tuple[float, int, float, float] | None = None
        off = waits_off = 0
        for row in rows:
            stall, model_s = row.stall_s(), measurement.modelled_s(row)
            waits = row.spread(lambda save: save.stall_s - save.other_s)
            assert stall is not None
            assert waits is not None
            beyond = abs(stall.median - model_s) / allowed_s(model_s)
            off += beyond > 1
            waits_off += abs(waits.median - model_s) > allowed_s(model_s)
            worst = max(worst or (0.0, 0, 0.0, 0.0), (beyond, row.parts, stall.median, model_s))
        assert worst is not None
        _, parts, stall_s, model_s = worst
        figure = (
            f"{len(rows) - off} of {len(rows)}; at worst {1e3 * stall_s:.1f} ms in {parts} "
            f"part(s), and the model says {1e3 * model_s:.1f} ms (waiting for copies alone: "
            f"{len(rows) - waits_off} of {len(rows)})"
        )
        if failed:
            figure += f"; {len(failed)} could not be measured ({failed[0].error})"
        return Verdict(what, figure, not off and not failed)

    def _bound_verdict(self, measurement: Measurement, way: str) -> Verdict:
        what = f"{way}: at its best number of parts no more than that above the lower bound"
        best = measurement.best_measured(way)
        if best is None:
            return Verdict(what, "-", None)
        parts, stall_s = best
        row = measurement.row(way, parts)
        assert row is not None
        bound_s = measurement.bound_s(row)
        figure = f"{1e3 * stall_s:.1f} ms next to {1e3 * bound_s:.1f} ms, in {parts} part(s)"
        return Verdict(what, figure, stall_s <= bound_s + allowed_s(bound_s))

    def _auto_verdict(self, measurement: Measurement, way: str) -> Verdict:
        what = f'{way}: parts="auto" within 5 % of the best (and what the model allows)'
        row, best = measurement.row(way, AUTO), measurement.best_measured(way)
        stall = None if row is None else row.stall_s()
        if row is None or stall is None or best is None:
            return Verdict(what, "-", None)
        parts, best_s = best
        chosen = row.chosen or 1
        modelled = measurement.best_modelled(way)
        assert modelled is not None
        figure = (
            f"{1e3 * stall.median:.1f} ms in {chosen} part(s) next to {1e3 * best_s:.1f} ms in "
            f"{parts}; the model says {1e3 * measurement.modelled_s(row, chosen):.1f} ms, and "
            f"{1e3 * modelled[1]:.1f} ms in {modelled[0]}"
        )
        return Verdict(what, figure, stall.median <= _OF_BEST * best_s + allowed_s(0.0))

    def _zero_verdicts(self, measurement: Measurement) -> Iterator[Verdict]:
        """Where the model says that training is not held up at all."""
        for way in WAYS:
            found = least(measurement.free(way))
            if found is None:
                continue
            parts, stall_s = found
            what = (
                f"{way} in {parts} parts, which the model says holds nothing up: at most "
                f"{_ZERO_OF_ASYNC} of async"
            )
            share = self._of_async(measurement, stall_s)
            if share is None:
                yield Verdict(what, "-", None)
                continue
            yield Verdict(what, f"{share:.3f} ({1e3 * stall_s:.1f} ms)", share <= _ZERO_OF_ASYNC)

    def _of_async(self, measurement: Measurement, stall_s: float) -> float | None:
        reference = measurement.row("async")
        blocked = None if reference is None else reference.stall_s()
        return None if blocked is None else stall_s / blocked.median
