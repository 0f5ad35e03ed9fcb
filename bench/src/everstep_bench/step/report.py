"""The outcome: figures, targets, tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from everstep_bench.harness.figures import Spread, Verdict, picked, plain
from everstep_bench.harness.report import (
    Report,
    Table,
    busy_note,
    mb,
    ms,
    number,
    per_cent,
    range_of,
)
from everstep_bench.options import ADAPTIVE, IN_FLIGHT, StepOptions
from everstep_bench.step.arms import recovers_each_step, usual
from everstep_bench.step.kills import Killed
from everstep_bench.step.recovery import EVERSTEP, RecoveryFigures, ReplayFigures
from everstep_bench.step.rounds import Row, Rows

_PARAMS_MIN = 50_000_000
_SLOWER_MAX = {"lowdiff": 0.03, "lowdiff_plus": 0.09}
_PEER = "checkfreq"
_PEER_SHARE = 0.5
_BACK_S_MAX = 2.0
_BACK_BYTES = 10**9
_STATE_BYTES_MIN = 900_000_000
_REPLAY_MIN = 0.9
_FASTER_MIN = 10.0
_COST = ("arm", "step ms", "to dense", "min - max", "to compressed", "min - max", "CPU trainer",
         "CPU helper", "lag ms")  # fmt: skip
_BYTES = ("arm", "in memory", "to disk")
_KILLED = ("arm", "killed in step", "goes on from", "steps lost", "seconds", "from", "base",
           "replayed", "claims", "every bit")  # fmt: skip
_REPLAYED = ("way", "threads", "M parameter-steps/s")
_BACK = ("log in", "AdamW", "steps", "log MB", "resume()", "base alone", "replay", "training",
         "M p-s/s", "claims", "every bit")  # fmt: skip
_WORDS = ("arm", "from", "claims", "every bit", "way", "log in")
_CLAIMS = {True: "exact", False: "not exact", None: "-"}


@dataclass
class StepReport(Report):
    """Everything that was found.

    Attributes:
        params: of the model, exactly.
        replay: alone; None if it was left out.
        recoveries: with a log in memory, and on disk.
    """

    options: StepOptions
    params: int
    rows: Rows
    kills: list[Killed]
    replay: ReplayFigures | None
    recoveries: list[RecoveryFigures]

    def labels(self) -> list[str]:
        """Return remarks that belong to every figure of this run."""
        found = super().labels()
        if self.params < _PARAMS_MIN:
            found.append(
                f"SMALL MODEL: the targets are for at least {_PARAMS_MIN // 10**6} M parameters"
            )
        return found

    def verdicts(self) -> list[Verdict]:
        """Return the targets, each with the measured figure."""
        return [
            *self._slowdown_verdicts(),
            *self._peer_verdicts(),
            *self._lost_verdicts(),
            *self._replay_verdicts(),
            *self._back_verdicts(),
        ]

    def tables(self) -> Iterator[Table]:
        """Yield costs, bytes, kills and replay."""
        saving = [r for r in self.rows.rows if r.blocks and not r.setting.is_reference]
        title = "Replay alone"
        replay = self.replay
        if replay is not None:
            rates = sorted(replay.copy_bytes_per_s.items())
            copies = ", ".join(f"{rate / 1e9:.1f} ({threads})" for threads, rate in rates)
            title += (
                f": fused AdamW, {replay.params / 1e6:.1f} M parameters, {replay.steps} steps of "
                f"bfloat16 gradients; a copy moves {copies} GB/s (threads)"
            )
        for name, columns, rows in (
            (
                "What a step takes, and how much longer than without; CPU ms per step",
                _COST,
                map(self._cost, self.rows.rows),
            ),
            (
                "Bytes: MB per step into memory and to disk, bases included",
                _BYTES,
                map(self._bytes, saving),
            ),
            ("SIGKILL of training; resume() in a new process", _KILLED, self._kills()),
            (title, _REPLAYED, self._replayed()),
            (
                "A dense log replayed in a new process, reading included; seconds",
                _BACK,
                map(_back, self.recoveries),
            ),
        ):
            yield Table(name, columns, rows, _WORDS)

    def details(self) -> Iterator[str]:
        """Yield what each arm does, or why it did not run."""
        first: dict[str, Row] = {}
        for row in self.rows.rows:
            first.setdefault(row.name, row)
        for name, row in first.items():
            yield f"{name}: {row.error or row.detail}"

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            "Medians over the rounds. to dense, to compressed: how much longer a step takes than "
            "in the blocks of the same round that train alone, or with compressed gradients and "
            "without a log. lag: from the last step of a block until nothing is under way. "
            "CPU: of this process, and of those beside it."
        )
        yield (
            "in memory, to disk: what is taken into host memory, and what all processes send to "
            "storage, for each step."
        )
        if self.kills:
            yield (
                "steps lost: completed ones that have to be repeated; the one in flight is not "
                "counted. seconds: from the call of resume() until it came back. every bit: "
                "training goes on to its end, and all of the state is compared with that of a "
                "training that nobody interrupted."
            )
        for row in self.rows.rows:
            noise = row.noise()
            if noise is not None:
                yield (
                    f"Two blocks of {self.words(row)} in one round differ by {per_cent(noise)}: "
                    "less than that means nothing."
                )
        others = self.rows.dense().each(lambda block: block.others_cores)
        yield from busy_note(self.facts, None if others is None else others.median)

    def words(self, row: Row) -> str:
        """Return the name of a row: the arm, and what it was told otherwise than usual."""
        return row.setting.words(usual(self.options, row.name))

    def figures(self) -> dict[str, Any]:
        """Return everything, every block included."""
        return {
            "params": self.params,
            "arms": [self._row_as_json(row) for row in self.rows.rows],
            "kills": [
                {
                    **asdict(killed.setting),
                    "error": killed.error,
                    "kills": [
                        {**plain(kill), "lost": kill.lost, "identical": kill.identical}
                        for kill in killed.kills
                    ],
                }
                for killed in self.kills
            ],
            "replay": self.replay,
            "recoveries": self.recoveries,
        }

    def _slowdown_verdicts(self) -> Iterator[Verdict]:
        beside = {"lowdiff": "compressed training", "lowdiff_plus": "dense training"}
        for arm, most in _SLOWER_MAX.items():
            what = f"slow-down by {arm} of each step, next to {beside[arm]}: at most {most:.0%}"
            row = self.rows.first(arm)
            found = self.rows.against_its_own(row)
            if found is None:
                yield Verdict(what, self._why_not(arm), None)
                continue
            error = self.rows.own(row).resolution()
            figure = (
                f"{found.median:.1%} ({found.low:.1%} to {found.high:.1%}), good to about "
                f"{error:.1%} in {len(row.blocks)} round(s)"
            )
            hidden = error > most and found.median <= most + error
            yield self._told(what, figure, found.median <= most, hidden=hidden)

    def _peer_verdicts(self) -> Iterator[Verdict]:
        peer = self.rows.first(_PEER)
        theirs = self.rows.against_its_own(peer)
        for arm in _SLOWER_MAX:
            what = f"slow-down by {arm}: less than half of {_PEER} at the same frequency"
            mine = self.rows.against_its_own(self.rows.first(arm))
            if mine is None or theirs is None:
                yield Verdict(what, self._why_not(_PEER if theirs is None else arm), None)
                continue
            error = self.rows.own(peer).resolution()
            figure = f"{mine.median:.1%} next to {theirs.median:.1%}, good to about {error:.1%}"
            met = mine.median < _PEER_SHARE * theirs.median
            # There may be nothing to be a half of.
            yield self._told(what, figure, met, hidden=theirs.median <= error)

    def _told(self, what: str, figure: str, met: bool, *, hidden: bool) -> Verdict:
        """Return a verdict that noise may hide, and that is for a free core."""
        if hidden:
            figure = f"cannot be told: {figure}"
        if not self.facts.free_core:
            figure = f"no core is free; so: {figure}"
        return Verdict(what, figure, met if self.facts.free_core and not hidden else None)

    def _lost_verdicts(self) -> Iterator[Verdict]:
        for killed in self.kills:
            arm = killed.setting.arm
            if not recovers_each_step(arm):
                continue
            lossy = arm == ADAPTIVE
            # Processors and devices round differently: a replay here may not be bit-exact there.
            inexact = lossy or self.options.device != "cpu"
            bits = "every bit is right" + (", or the recovery says that it is not" * inexact)
            most = int(arm == IN_FLIGHT)
            spared = "at most one completed step" if most else "nothing but the step in flight"
            what = f"SIGKILL with {arm}: {spared} is lost, {bits}"
            if killed.error is not None:
                yield Verdict(what, killed.error, met=False)
                continue
            lost = killed.lost()
            same = all(kill.identical for kill in killed.kills)
            said = all(kill.identical or kill.recovered.exact is False for kill in killed.kills)
            if lossy:  # must not claim more than it does
                said = not any(kill.recovered.exact for kill in killed.kills)
            yield Verdict(
                what,
                f"{lost} completed step(s) lost, {'every bit' if same else 'NOT every bit'} is "
                f"that of an uninterrupted training, {len(killed.kills)} kill(s)",
                lost <= most and (said if inexact else same),
            )

    def _back_verdicts(self) -> Iterator[Verdict]:
        size = f"{self.facts.size_bytes / 1e9:.3f} GB"
        for killed in self.kills:
            found = killed.seconds()
            if found is None or not recovers_each_step(killed.setting.arm):
                continue
            what = (
                f"resume() after SIGKILL with {killed.setting.arm}: {_BACK_BYTES / 1e9:g} GB "
                f"within {_BACK_S_MAX:g} s"
            )
            figure = f"{found.median:.2f} s for {size} (at most {found.high:.2f} s)"
            big = self.facts.size_bytes >= _STATE_BYTES_MIN
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
                f"{ratio:.2f}; {replay.speed(EVERSTEP, threads) / 1e6:.0f} M "
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

    def _why_not(self, arm: str) -> str:
        errors = [row.error for row in self.rows.rows if row.name == arm and row.error]
        return errors[0] if errors else "-"

    def _figures_of(self, row: Row) -> dict[str, Spread | None]:
        rows = self.rows
        compressed = rows.first("compressed", row.setting.ratio)
        return {
            "step_s": row.steps_s(),
            "slowdown_against_dense": rows.slowdown(row, rows.dense()),
            "slowdown_against_compressed": rows.slowdown(row, compressed),
            "memory_bytes_per_step": row.per_step(lambda block: block.memory_bytes),
            "written_bytes_per_step": row.per_step(lambda block: block.written_bytes),
            "trainer_cpu_s_per_step": row.per_step(lambda block: block.trainer_cpu_s),
            "helper_cpu_s_per_step": row.per_step(lambda block: block.helper_cpu_s),
            "behind_s": row.each(lambda block: block.behind_s),
        }

    def _cost(self, row: Row) -> tuple[str, ...]:
        if not row.blocks:
            return self.words(row), "-"
        found = self._figures_of(row)
        compressed = found["slowdown_against_compressed"] if row.setting.compresses else None
        return (
            self.words(row),
            ms(found["step_s"]),
            per_cent(found["slowdown_against_dense"]),
            range_of(found["slowdown_against_dense"], 1, 100),
            per_cent(compressed),
            range_of(compressed, 1, 100),
            ms(found["trainer_cpu_s_per_step"]),
            ms(found["helper_cpu_s_per_step"]),
            ms(found["behind_s"]),
        )

    def _bytes(self, row: Row) -> tuple[str, ...]:
        found = self._figures_of(row)
        return (
            self.words(row),
            mb(found["memory_bytes_per_step"], 3),
            mb(found["written_bytes_per_step"], 3),
        )

    def _replayed(self) -> Iterator[tuple[str, ...]]:
        replay = self.replay
        for way, threads in () if replay is None else replay.seconds:
            assert replay is not None
            yield way, f"{threads}", number(replay.speed(way, threads), 0, 1e-6)

    def _kills(self) -> Iterator[tuple[str, ...]]:
        for killed in self.kills:
            if killed.error is not None:
                yield killed.setting.arm, killed.error
            for kill in killed.kills:
                found = kill.recovered
                same = "yes" if kill.identical else f"no, {kill.different} of {kill.parts} differ"
                yield (
                    killed.setting.arm,
                    f"{kill.completed + 1}",
                    f"{found.step}",
                    f"{kill.lost}",
                    f"{kill.seconds:.3f}",
                    found.source,
                    number(found.base_step, 0),
                    f"{found.replayed}",
                    _CLAIMS[found.exact],
                    same,
                )

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        return {
            "name": self.words(row),
            **asdict(row.setting),
            **picked(row, "detail error"),
            **self._figures_of(row),
            "noise": row.noise(),
            "blocks": [
                {"round": number, **asdict(block)}
                for number, blocks in sorted(row.blocks.items())
                for block in blocks
            ],
        }


def _back(found: RecoveryFigures) -> tuple[str, ...]:
    return (
        found.to,
        found.variant,
        f"{found.steps}",
        mb(found.log_bytes),
        *(number(s, 3) for s in (found.resume_s, found.load_s, found.replay_s, found.training_s)),
        number(found.parameter_steps_per_s, 0, 1e-6),
        _CLAIMS[found.exact],
        "yes" if found.identical else "no",
    )
