"""The outcome: figures, targets, tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from everstep_bench.harness.figures import Spread, Verdict, at_most, picked
from everstep_bench.harness.report import (
    Report,
    Table,
    busy_note,
    ms,
    number,
    per_cent,
    range_of,
)
from everstep_bench.options import NEIGHBOUR, StallOptions
from everstep_bench.stall import timeline
from everstep_bench.stall.arms import CAUSES
from everstep_bench.stall.figures import Block, Interval, Row

_OURS = "lazy"
_PEER = "dcp-warm"
_STALL_S_MAX = 0.002
_SLOWDOWN_MAX = 0.1
_RATE_MIN = 0.98
_LINK_SHARE_MIN = 0.9
_COST = ("arm", "stall", "capture", "gate", "gradients", "back-pr.", "persist", "other",
         "slow-down", "min - max", "unexplained", "of training", "GB/s")  # fmt: skip
_BEHIND = ("arm", "durable", "loop rate", "min - max", "CPU trainer", "CPU helper")


@dataclass
class StallReport(Report):
    """Everything that was found."""

    options: StallOptions
    intervals: list[Interval]

    @property
    def on_device(self) -> bool:
        """True if the state is in a device's memory."""
        return self.options.device != "cpu"

    def rounds(self) -> str:
        """Return the number of rounds, and why there are fewer than requested."""
        asked = self.options.repeats
        made = {len(interval.ideals): None for interval in self.intervals}
        drawn = f"order drawn with seed {self.options.seed}"
        if self.options.within_s is None or min(made) == asked:
            return f"{asked} rounds, {drawn}"
        found = " and ".join(map(str, made))
        within = f"as many as went into {self.options.within_s:g} s"
        return f"{found} of {asked} rounds, {within}, {drawn}"

    def verdicts(self) -> list[Verdict]:
        """Return the targets of all intervals."""
        return [verdict for interval in self.intervals for verdict in self.verdicts_of(interval)]

    def verdicts_of(self, interval: Interval) -> list[Verdict]:
        """Return the targets, each with the measured figure."""
        ours = interval.row(_OURS)
        found = [
            self._stall_verdict(ours),
            self._slowdown_verdict(interval, ours),
            self._rate_verdict(interval, ours),
        ]
        if self.on_device:
            found.append(self._link_verdict(interval, ours))
        if len(self.intervals) > 1:
            steps = _steps(interval)
            found = [Verdict(f"{steps}: {v.target}", v.figure, v.met) for v in found]
        return found

    def tables(self) -> Iterator[Table]:
        """Yield costs, and what comes after the call, for each interval."""
        for interval in self.intervals:
            step = interval.step_s()
            ideal = "" if step is None else f"; an ideal step takes {ms(step)} ms"
            steps = _steps(interval)
            yield Table(
                f"What a save costs training, ms; {steps}{ideal}",
                (*_COST, *(("on the GPU", "link") if self.on_device else ())),
                [self._cost(interval, row) for row in interval.rows],
            )
            yield Table(
                f"After the return of the call, ms, CPU ms; {steps}",
                _BEHIND,
                [self._behind(interval, row) for row in interval.rows if row.blocks],
            )

    def details(self) -> Iterator[str]:
        """Yield the description of each arm, or why it did not run."""
        for row in self.intervals[0].rows:
            yield f"{row.name}: {row.error or row.detail}"

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            "Medians over the rounds. stall: what the training thread spends in the library (its "
            "calls and its hooks), by cause; gradients: waiting for copies of them. slow-down: "
            "what the steps of a block with a save take more than as many without in the same "
            "round; a block goes on until its save is done. unexplained: their difference, which "
            "is interference and noise."
        )
        yield (
            "durable: until the library's future is done, and until what it leaves unsynced is "
            "synced. loop rate: steps per second in that time, next to training alone. GB/s: of "
            "state for each second of stall. Saves do not overlap: each waits for the one before."
        )
        if self.on_device:
            yield (
                "On the GPU: what the device spent in hooks around the update, waiting for copies "
                "above all, by its own clock. The training thread runs ahead of it there, so of "
                "hooks it is this that counts as stall. link: how fast the state was in host "
                "memory, from the call on, next to a plain copy of 1 GiB into pinned memory in "
                "the same round."
            )
        for interval in self.intervals:
            noise_s = interval.noise_s()
            if noise_s is not None:
                yield (
                    f"Two blocks without a save of {_steps(interval)} differ by {ms(noise_s)} ms: "
                    "less than that means nothing."
                )
        alone = [b for one in self.intervals for ideal in one.ideals.values() for b in ideal.blocks]
        total_s = sum(block.wall_s for block in alone)
        busy_s = sum(block.others_cores * block.wall_s for block in alone)
        yield from busy_note(self.facts, busy_s / total_s if total_s else None)

    def write(self) -> None:
        """Draw the picture."""
        if self.options.picture is not None:
            facts = self.facts
            size = f"{facts.size_bytes / 1e9:.3f} GB, {facts.tensors} tensors"
            title = "\n".join([f"One save while training goes on ({size})", *self.labels()])
            timeline.picture(self.intervals[0], title, self.options.picture)

    def figures(self) -> dict[str, Any]:
        """Return everything, every block included."""
        options = self.options
        return {
            **picked(options, "device dtype"),
            "emulated_link_bytes_per_s": options.link_bytes_per_s,
            "intervals": [
                {
                    "every": interval.every,
                    "ideal_step_s": interval.step_s(),
                    "noise_s": interval.noise_s(),
                    "pinned_bytes_per_s": list(interval.pinned_bytes_per_s.values()),
                    "arms": [self._row_as_json(interval, row) for row in interval.rows],
                    "targets": self.verdicts_of(interval),
                }
                for interval in self.intervals
            ],
        }

    def _stall_verdict(self, ours: Row) -> Verdict:
        what = (
            f"training thread, for each {_OURS} save: at most {1e3 * _STALL_S_MAX:g} ms (state: "
            f"{self.facts.tensors} tensors, {self.facts.size_bytes / 1e9:.3f} GB)"
        )
        gate = ours.spread(lambda block: block.causes.get("gate"))
        inside = "" if gate is None else f", of which {ms(gate, 2)} ms at the gate"
        stall_s = ours.median(lambda block: block.stall_s)
        return at_most(what, stall_s, _STALL_S_MAX, f"{ms(stall_s, 2)} ms{inside}")

    def _slowdown_verdict(self, interval: Interval, ours: Row) -> Verdict:
        what = f"slow-down by a {_OURS} save: at most 1/{1 / _SLOWDOWN_MAX:g} of {_PEER}"
        mine = interval.slowdown_s(ours)
        theirs = interval.slowdown_s(interval.row(_PEER))
        if mine is None or theirs is None:
            return Verdict(what, "-", None)
        figure = f"{ms(mine)} ms next to {ms(theirs)} ms"
        noise_s = interval.noise_s()
        if noise_s is not None:
            figure += f" (two blocks without a save differ by {ms(noise_s)} ms)"
        if theirs.median <= 0:  # nothing to be a tenth of
            return Verdict(what, figure, None)
        return Verdict(what, figure, mine.median <= _SLOWDOWN_MAX * theirs.median)

    def _rate_verdict(self, interval: Interval, ours: Row) -> Verdict:
        what = f"loop rate during a {_OURS} save, with a free core: at least {_RATE_MIN}"
        found = interval.loop_rate(ours)
        if found is None:
            return Verdict(what, "-", None)
        figure = number(found, 3)
        machine = interval.loop_rate(interval.row(NEIGHBOUR))
        if machine is not None:
            figure += f" ({number(machine, 3)} beside a process that only copies and digests)"
        if not self.facts.free_core:
            return Verdict(what, f"no core is free; without: {figure}", None)
        return Verdict(what, figure, found.median >= _RATE_MIN)

    def _link_verdict(self, interval: Interval, ours: Row) -> Verdict:
        what = f"from the device by a {_OURS} save: at least {_LINK_SHARE_MIN} of a pinned copy"
        share = interval.link_share(ours, self.facts.size_bytes)
        limit = Spread.of(list(interval.pinned_bytes_per_s.values()))
        if share is None or limit is None:
            return Verdict(what, "-", None)
        figure = f"{number(share, 3)} of {number(limit, 1, 1e-9)} GB/s"
        return Verdict(what, figure, share.median >= _LINK_SHARE_MIN)

    def _cost(self, interval: Interval, row: Row) -> tuple[str | Text, ...]:
        if not row.blocks:
            return row.name, "-"
        found = interval.figures_of(row, self.facts.size_bytes)
        device = (
            ms(row.spread(lambda block: block.device_s)),
            number(interval.link_share(row, self.facts.size_bytes)),
        )
        return (
            _name(row),
            ms(found["stall_s"], 2),
            *(ms(row.median(lambda b, c=cause: b.causes.get(c)), 2) for cause in CAUSES),  # type: ignore[misc]
            ms(row.spread(lambda block: block.other_s), 2),
            ms(found["slowdown_s"]),
            range_of(found["slowdown_s"], 1, 1e3),
            ms(found["difference_s"]),
            per_cent(found["share_of_training"]),
            number(found["gb_per_s_of_stall"]),
            *(device if self.on_device else ()),
        )

    def _behind(self, interval: Interval, row: Row) -> tuple[str | Text, ...]:
        found = interval.figures_of(row, self.facts.size_bytes)
        return (
            _name(row),
            ms(found["durable_s"]),
            number(found["loop_rate"], 3),
            range_of(found["loop_rate"], 2),
            ms(found["trainer_cpu_s"]),
            ms(found["helper_cpu_s"]),
        )

    def _row_as_json(self, interval: Interval, row: Row) -> dict[str, Any]:
        return {
            **picked(row, "name role detail error"),
            **interval.figures_of(row, self.facts.size_bytes),
            "blocks": [
                _block_as_json(interval, number, block)
                for number, block in sorted(row.blocks.items())
            ],
        }


def _block_as_json(interval: Interval, number: int, block: Block) -> dict[str, Any]:
    ideal = interval.ideals.get(number)
    names = (
        "wall_s stall_s device_s durable_s sync_s after_s persist_s trainer_cpu_s helper_cpu_s "
        "others_cores"
    )
    return {
        "round": number,
        "steps": len(block.steps),
        "ideal_step_s": None if ideal is None else ideal.step_s,
        "stall_by_cause_s": {**block.causes, "other": block.other_s},
        **picked(block, names),
        "copied_bytes": {
            "state": sum(c.size_bytes for c in block.copies if not c.gradients),
            "gradients": sum(c.size_bytes for c in block.copies if c.gradients),
        },
    }


def _steps(interval: Interval) -> str:
    return f"every {interval.every} steps" if interval.every > 1 else "every step"


def _name(row: Row) -> Text:
    return Text(row.name, style="bold" if row.role == "ours" else "")
