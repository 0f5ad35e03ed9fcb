"""The outcome: targets and plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from everstep_bench.persist.machine import Machine
from everstep_bench.persist.report import Spread, Verdict
from everstep_bench.stall.report import facts_as_json
from everstep_bench.step.figures import Row, Rows
from everstep_bench.step.kills import Killed
from everstep_bench.step.options import StepOptions
from everstep_bench.step.rate import ReplicaRate
from everstep_bench.step.recovery import EVERSTEP, RecoveryFigures, ReplayFigures

__all__ = ["StepReport"]

_PARAMS_MIN = 50_000_000
_SLOWER_MAX = {"lowdiff": 0.03, "lowdiff_plus": 0.09}
_PEER = "checkfreq"
_PEER_SHARE = 0.5
_STEPS_BACK = ("logged", "lowdiff", "lowdiff_plus")
_BACK_S_MAX = 2.0
_BACK_BYTES = 10**9
_STATE_BYTES_MIN = 900_000_000
_REPLAY_MIN = 0.9
_FASTER_MIN = 10.0


@dataclass(slots=True)
class StepReport:
    """Everything that was found.

    Attributes:
        size_bytes: of all tensors of the state.
        params: of the model, exactly.
        workload: the model in words.
        free_core: whether training had a core of its own, and another was free.
        rate: of a replica, or why there is no figure; None if there was no replica.
        replay: alone; None if it was left out.
        recoveries: with a log in memory, and on disk.
    """

    options: StepOptions
    machine: Machine
    size_bytes: int
    tensors: int
    params: int
    workload: str
    free_core: bool
    rows: Rows
    kills: list[Killed]
    rate: ReplicaRate | str | None
    replay: ReplayFigures | None
    recoveries: list[RecoveryFigures]
    load_after: float
    seconds: float
    folder: str

    def labels(self) -> list[str]:
        """Return remarks that belong to every figure of this run."""
        found = []
        if not self.free_core:
            found.append("ONE CORE: training and everything else share it")
        if self.params < _PARAMS_MIN:
            found.append(
                f"SMALL MODEL: the targets are for at least {_PARAMS_MIN // 10**6} M parameters"
            )
        return found

    def verdicts(self) -> list[Verdict]:
        """The targets, each with the measured figure."""
        return [
            *self._slowdown_verdicts(),
            *self._peer_verdicts(),
            *self._lost_verdicts(),
            *self._replay_verdicts(),
            *self._back_verdicts(),
        ]

    def all_met(self) -> bool:
        """Return True if every target is met; one that could not be measured is not."""
        return all(verdict.met for verdict in self.verdicts())

    def words(self, row: Row) -> str:
        """The name of a row: the arm, and what it was told otherwise than usual."""
        return row.setting.words(self.options.usual(row.setting.arm))

    def host_bytes(self, row: Row) -> int | None:
        """Memory at most, beyond what training alone takes."""
        alone = self.rows.dense()
        own = row.spread(lambda block: block.host_bytes)
        bare = None if alone is None else alone.spread(lambda block: block.host_bytes)
        return None if own is None or bare is None else max(0, int(own.high - bare.median))

    def as_json(self) -> dict[str, Any]:
        """Everything, every block included."""
        return {
            **facts_as_json(self),
            "params": self.params,
            "arms": [self._row_as_json(row) for row in self.rows.rows],
            "kills": [_killed_as_json(killed) for killed in self.kills],
            "replica": self.rate.as_json() if isinstance(self.rate, ReplicaRate) else self.rate,
            "replay": self.replay and self.replay.as_json(),
            "recoveries": [figures.as_json() for figures in self.recoveries],
            "targets": [
                {"target": v.target, "figure": v.figure, "met": v.met} for v in self.verdicts()
            ],
        }

    def _slowdown_verdicts(self) -> Iterator[Verdict]:
        beside = {"lowdiff": "compressed training", "lowdiff_plus": "dense training"}
        for arm, most in _SLOWER_MAX.items():
            what = f"slow-down by {arm} of each step, next to {beside[arm]}: at most {most:.0%}"
            row = self.rows.first(arm)
            found = None if row is None else self.rows.against_its_own(row)
            if row is None or found is None:
                yield Verdict(what, self._why_not(arm), None)
                continue
            own = self.rows.own(row)
            error = (None if own is None else own.resolution()) or 0.0
            figure = (
                f"{found.median:.1%} ({found.low:.1%} to {found.high:.1%}), good to about "
                f"{error:.1%} in {len(row.blocks)} round(s)"
            )
            met: bool | None = found.median <= most
            if error > most and found.median <= most + error:
                met = None
                figure = f"cannot be told: {figure}"
            yield self._on_a_free_core(Verdict(what, figure, met))

    def _peer_verdicts(self) -> Iterator[Verdict]:
        peer = self.rows.first(_PEER)
        theirs = None if peer is None else self.rows.against_its_own(peer)
        for arm in _SLOWER_MAX:
            what = f"slow-down by {arm}: less than half of {_PEER} at the same frequency"
            row = self.rows.first(arm)
            mine = None if row is None else self.rows.against_its_own(row)
            if mine is None or theirs is None:
                yield Verdict(what, self._why_not(_PEER if theirs is None else arm), None)
                continue
            own = None if peer is None else self.rows.own(peer)
            error = (None if own is None else own.resolution()) or 0.0
            figure = f"{mine.median:.1%} next to {theirs.median:.1%}, good to about {error:.1%}"
            met: bool | None = mine.median < _PEER_SHARE * theirs.median
            if theirs.median <= error:  # nothing to be a half of
                met = None
                figure = f"cannot be told: {figure}"
            yield self._on_a_free_core(Verdict(what, figure, met))

    def _lost_verdicts(self) -> Iterator[Verdict]:
        for killed in self.kills:
            arm = killed.setting.arm
            if arm not in _STEPS_BACK:
                continue
            what = f"SIGKILL with {arm}: nothing but the step in flight is lost, every bit is right"
            if killed.error is not None:
                yield Verdict(what, killed.error, met=False)
                continue
            lost = killed.lost()
            same = all(kill.identical for kill in killed.kills)
            yield Verdict(
                what,
                f"{lost} completed step(s) lost, {'every bit' if same else 'NOT every bit'} is "
                f"that of an uninterrupted training, {len(killed.kills)} kill(s)",
                lost == 0 and same,
            )

    def _back_verdicts(self) -> Iterator[Verdict]:
        size = f"{self.size_bytes / 1e9:.3f} GB"
        for killed in self.kills:
            found = killed.seconds()
            if found is None or killed.setting.arm not in _STEPS_BACK:
                continue
            what = (
                f"resume() after SIGKILL with {killed.setting.arm}: {_BACK_BYTES / 1e9:g} GB "
                f"within {_BACK_S_MAX:g} s"
            )
            figure = f"{found.median:.2f} s for {size} (at most {found.high:.2f} s)"
            big = self.size_bytes >= _STATE_BYTES_MIN
            yield Verdict(what, figure, found.high <= _BACK_S_MAX if big else None)

    def _replay_verdicts(self) -> Iterator[Verdict]:
        replay = self.replay
        for threads in () if replay is None else sorted(replay.copy_bytes_per_s):
            assert replay is not None
            what = (
                f"replay on the CPU, {threads} thread(s): at least {_REPLAY_MIN} of torch's fused "
                "operator in blocks"
            )
            ratio = replay.ratio(threads)
            figure = (
                f"{ratio:.2f}; {replay.speed(EVERSTEP, 'fused', threads) / 1e6:.0f} M "
                f"parameter-steps/s, {replay.of_bandwidth(threads):.0%} of a copy's bandwidth"
            )
            yield Verdict(what, figure, ratio >= _REPLAY_MIN)
        for found in self.recoveries:
            what = (
                f"replay of a dense log, reading it from {found.to} included, {found.variant} "
                f"AdamW: at least {_FASTER_MIN:g} times as fast as training"
            )
            figure = (
                f"{found.faster_than_training:.1f} times; {found.steps} steps in "
                f"{found.replay_s:.3f} s instead of {found.training_s:.3f} s"
            )
            yield Verdict(what, figure, found.faster_than_training >= _FASTER_MIN)

    def _on_a_free_core(self, verdict: Verdict) -> Verdict:
        """The target is for a free core; without one the figure stands beside."""
        if self.free_core:
            return verdict
        return Verdict(verdict.target, f"no core is free; so: {verdict.figure}", None)

    def _why_not(self, arm: str) -> str:
        errors = [row.error for row in self.rows.rows if row.setting.arm == arm and row.error]
        return errors[0] if errors else "-"

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        rows = self.rows
        figures: dict[str, Spread | None] = {
            "step_s": row.steps_s(),
            "slowdown_against_dense": rows.slowdown(row, rows.dense()),
            "slowdown_against_compressed": rows.slowdown(row, rows.compressed(row.setting.ratio)),
            "memory_bytes_per_step": row.per_step(lambda block: block.memory_bytes),
            "written_bytes_per_step": row.per_step(lambda block: block.written_bytes),
            "storage_bytes": row.spread(lambda block: block.storage_bytes),
            "trainer_cpu_s_per_step": row.per_step(lambda block: block.trainer_cpu_s),
            "helper_cpu_s_per_step": row.per_step(lambda block: block.helper_cpu_s),
            "behind_s": row.spread(lambda block: block.behind_s),
        }
        return {
            "name": self.words(row),
            **asdict(row.setting),
            "detail": row.detail,
            "error": row.error,
            **{name: spread and spread.as_json() for name, spread in figures.items()},
            "host_bytes": self.host_bytes(row),
            "noise": row.noise(),
            "blocks": [
                {"round": number, **asdict(block)}
                for number, blocks in sorted(row.blocks.items())
                for block in blocks
            ],
        }


def _killed_as_json(killed: Killed) -> dict[str, Any]:
    return {
        **asdict(killed.setting),
        "error": killed.error,
        "kills": [
            {**asdict(kill), "lost": kill.lost, "identical": kill.identical}
            for kill in killed.kills
        ],
    }
