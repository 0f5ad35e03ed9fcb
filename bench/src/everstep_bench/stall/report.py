"""The outcome: targets and plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from everstep_bench.persist.machine import Machine
from everstep_bench.persist.report import Spread, Verdict
from everstep_bench.stall.figures import Block, Interval, Row
from everstep_bench.stall.options import ABLATIONS, NEIGHBOUR, StallOptions
from everstep_bench.stall.recording import Curve

__all__ = ["StallReport", "facts_as_json"]

_OURS = "lazy"
_PEER = "dcp-warm"
_ONE_CORE = "lazy-one-core"
_STALL_S_MAX = 0.002
_SLOWDOWN_MAX = 0.1
_RATE_MIN = 0.98
_LINK_SHARE_MIN = 0.9


@dataclass(slots=True)
class StallReport:
    """Everything that was found.

    Attributes:
        size_bytes: of all tensors of the state.
        tensors: number of them.
        workload: the model in words.
        python_part_s: of each step; 0 where there is none.
        free_core: whether training had a core of its own, and another was free.
        start_s: on the monotonic clock, when the run began.
        curves: of our arms, where they were asked for.
    """

    options: StallOptions
    machine: Machine
    size_bytes: int
    tensors: int
    workload: str
    python_part_s: float
    free_core: bool
    intervals: list[Interval]
    load_after: float
    start_s: float
    seconds: float
    folder: str
    curves: list[Curve] = field(default_factory=list)

    def labels(self) -> list[str]:
        """Return remarks that belong to every figure of this run."""
        found = []
        link = self.options.link_bytes_per_s
        if link is not None:
            found.append(
                f"EMULATED: everstep's copies go through a link of {link / 1e9:g} GB/s that does "
                "not exist; peers copy as fast as memory allows"
            )
        if self.options.writers:
            found.append(
                f"{self.options.writers} OTHER WRITERS: as many processes each flush a state of "
                "the same size through a run of their own (everstep, sync) at every save, "
                "whichever arm makes it"
            )
        if self.options.python_heavy:
            found.append(
                f"PYTHON-HEAVY: {1e3 * self.python_part_s:.0f} ms of pure Python in every step"
            )
        if not self.free_core:
            found.append("ONE CORE: training and everything else share it")
        return found

    def gb_per_s(self, row: Row) -> Spread | None:
        """Bytes of the state for each second that training was held up."""
        return row.spread(
            lambda block: self.size_bytes / 1e9 / block.stall_s if block.stall_s > 0 else None
        )

    def verdicts(self, interval: Interval) -> list[Verdict]:
        """The targets, each with the measured figure."""
        ours = interval.row(_OURS)
        found = [
            self._stall_verdict(ours),
            self._slowdown_verdict(interval, ours),
            self._rate_verdict(interval, ours),
        ]
        return [*found, self._link_verdict(interval, ours)] if self.on_device else found

    @property
    def on_device(self) -> bool:
        """True if the state is in a device's memory."""
        return self.options.device != "cpu"

    def all_met(self) -> bool:
        """Return True if every target is met in every interval."""
        return all(v.met for interval in self.intervals for v in self.verdicts(interval))

    def as_json(self) -> dict[str, Any]:
        """Everything, every block included."""
        options = self.options
        return {
            **facts_as_json(self),
            "device": options.device,
            "dtype": options.dtype,
            "emulated_link_bytes_per_s": options.link_bytes_per_s,
            "writers": options.writers,
            "python_part_s": self.python_part_s,
            "intervals": [self._interval_as_json(interval) for interval in self.intervals],
            "curves": [curve.as_json(self.start_s) for curve in self.curves],
        }

    def _stall_verdict(self, ours: Row | None) -> Verdict:
        what = (
            f"training thread, for each {_OURS} save: at most {1e3 * _STALL_S_MAX:g} ms (state: "
            f"{self.tensors} tensors, {self.size_bytes / 1e9:.3f} GB)"
        )
        found = None if ours is None else ours.spread(lambda block: block.stall_s)
        if ours is None or found is None:
            return Verdict(what, "-", None)
        gate = ours.spread(lambda block: block.causes.get("gate"))
        inside = "" if gate is None else f", of which {1e3 * gate.median:.2f} ms at the gate"
        return Verdict(what, f"{1e3 * found.median:.2f} ms{inside}", found.median <= _STALL_S_MAX)

    def _slowdown_verdict(self, interval: Interval, ours: Row | None) -> Verdict:
        what = f"slow-down by a {_OURS} save: at most 1/{1 / _SLOWDOWN_MAX:g} of {_PEER}"
        peer = interval.row(_PEER)
        mine = None if ours is None else interval.slowdown_s(ours)
        theirs = None if peer is None else interval.slowdown_s(peer)
        if mine is None or theirs is None:
            return Verdict(what, "-", None)
        figure = f"{1e3 * mine.median:.1f} ms next to {1e3 * theirs.median:.1f} ms"
        noise_s = interval.noise_s()
        if noise_s is not None:
            figure += f" (two blocks without a save differ by {1e3 * noise_s:.1f} ms)"
        if theirs.median <= 0:  # nothing to be a tenth of
            return Verdict(what, figure, None)
        return Verdict(what, figure, mine.median <= _SLOWDOWN_MAX * theirs.median)

    def _rate_verdict(self, interval: Interval, ours: Row | None) -> Verdict:
        what = f"loop rate during a {_OURS} save, with a free core: at least {_RATE_MIN}"
        found = None if ours is None else interval.loop_rate(ours)
        if found is None:
            return Verdict(what, "-", None)
        figure = f"{found.median:.3f}"
        control = interval.row(NEIGHBOUR)
        machine = None if control is None else interval.loop_rate(control)
        if machine is not None:
            figure += f" ({machine.median:.3f} beside a process that only copies and digests)"
        if not self.free_core:
            return Verdict(what, f"no core is free; without: {figure}", None)
        one = interval.row(_ONE_CORE)
        beside = None if one is None else interval.loop_rate(one)
        if beside is not None:
            figure += f"; without: {beside.median:.3f}"
        return Verdict(what, figure, found.median >= _RATE_MIN)

    def _link_verdict(self, interval: Interval, ours: Row | None) -> Verdict:
        what = f"from the device by a {_OURS} save: at least {_LINK_SHARE_MIN} of a pinned copy"
        share = None if ours is None else interval.link_share(ours, self.size_bytes)
        limit = Spread.of([rate / 1e9 for rate in interval.pinned_bytes_per_s.values()])
        if share is None or limit is None:
            return Verdict(what, "-", None)
        figure = f"{share.median:.3f} of {limit.median:.1f} GB/s"
        return Verdict(what, figure, share.median >= _LINK_SHARE_MIN)

    def _interval_as_json(self, interval: Interval) -> dict[str, Any]:
        step = interval.step_s()
        return {
            "every": interval.every,
            "ideal_step_s": step and step.as_json(),
            "noise_s": interval.noise_s(),
            "pinned_bytes_per_s": list(interval.pinned_bytes_per_s.values()),
            "arms": [self._row_as_json(interval, row) for row in interval.rows],
            "ablations": [
                {"mechanism": a.mechanism, "without": a.without, "with": a.with_it}
                for a in ABLATIONS
                if interval.row(a.without) is not None and interval.row(a.with_it) is not None
            ],
            "targets": [
                {"target": v.target, "figure": v.figure, "met": v.met}
                for v in self.verdicts(interval)
            ],
        }

    def _row_as_json(self, interval: Interval, row: Row) -> dict[str, Any]:
        split = row.split()
        figures = {
            "stall_s": row.spread(lambda block: block.stall_s),
            "slowdown_s": interval.slowdown_s(row),
            "difference_s": interval.difference_s(row),
            "share_of_training": interval.share(row),
            "gb_per_s_of_stall": self.gb_per_s(row),
            "durable_s": row.spread(lambda block: block.durable_s),
            "after_s": row.spread(lambda block: block.after_s),
            "loop_rate": interval.loop_rate(row),
            "trainer_cpu_s": interval.trainer_cpu_s(row),
            "helper_cpu_s": row.spread(lambda block: block.helper_cpu_s),
            "writers_s": row.spread(lambda block: block.writers_s),
        }
        return {
            "name": row.name,
            "role": row.role,
            "detail": row.detail,
            "error": row.error,
            **{name: spread and spread.as_json() for name, spread in figures.items()},
            "split": {
                "serialise_s": split.serialise_s,
                "copy_s": split.copy_s,
                "file_s": split.file_s,
            },
            "memory_bytes": row.memory_bytes,
            "blocks": [
                self._block_as_json(interval, number, block)
                for number, block in sorted(row.blocks.items())
            ],
        }

    def _block_as_json(self, interval: Interval, number: int, block: Block) -> dict[str, Any]:
        ideal = interval.ideals.get(number)
        return {
            "round": number,
            "steps": len(block.steps),
            "wall_s": block.wall_s,
            "ideal_step_s": None if ideal is None else ideal.step_s,
            "stall_s": block.stall_s,
            "stall_by_cause_s": {**block.causes, "other": block.other_s},
            "device_s": block.device_s,
            "durable_s": block.durable_s,
            "sync_s": block.sync_s,
            "after_s": block.after_s,
            "persist_s": block.persist_s,
            "trainer_cpu_s": block.trainer_cpu_s,
            "helper_cpu_s": block.helper_cpu_s,
            "peak_bytes": block.peak_bytes,
            "helper_bytes": block.helper_bytes,
            "writers_s": block.writers_s,
            "others_cores": block.others_cores,
            "copied_bytes": {
                "state": sum(c.size_bytes for c in block.copies if not c.gradients),
                "gradients": sum(c.size_bytes for c in block.copies if c.gradients),
            },
        }


class _Rounds(Protocol):
    @property
    def repeats(self) -> int: ...

    @property
    def seed(self) -> int: ...


class _Measured(Protocol):
    machine: Machine
    load_after: float
    folder: str
    workload: str
    size_bytes: int
    tensors: int
    free_core: bool
    seconds: float

    @property
    def options(self) -> _Rounds: ...

    def labels(self) -> list[str]: ...


def facts_as_json(report: _Measured) -> dict[str, Any]:
    """Return the facts about the machine as plain data."""
    return {
        "labels": report.labels(),
        "machine": report.machine.as_json(),
        "load_after": report.load_after,
        "folder": report.folder,
        "workload": report.workload,
        "size_bytes": report.size_bytes,
        "tensors": report.tensors,
        "rounds": report.options.repeats,
        "seed": report.options.seed,
        "free_core": report.free_core,
        "seconds": report.seconds,
    }
