"""The outcome: targets and plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from everstep_bench.harness.figures import Verdict, plain
from everstep_bench.harness.report import Report, Table, ms, range_of
from everstep_bench.multistep.figures import AUTO, Measurement, Row, allowed_s
from everstep_bench.options import WAYS, MultistepOptions

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
