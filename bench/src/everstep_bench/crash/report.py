"""The outcome: targets and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from everstep_bench.crash.interval import SaveCosts, share_of
from everstep_bench.crash.lives import Lives, Losses
from everstep_bench.harness.figures import Verdict, plain
from everstep_bench.harness.report import Report, Table, ms, number, per_cent
from everstep_bench.options import IDEAL, NONE, CrashOptions

PEERS = ("torch.save", "dcp-warm")
_COLUMNS = ("arm", "T_ckpt ms", "durable ms", "every", "steps/s", "of ideal", "model",
            "lost steps", "load ms", "from")  # fmt: skip


@dataclass(slots=True)
class CrashTable:
    """All arms under the same failures.

    Attributes:
        mtbf_s: seconds from one to the next, on average.
        ideal: training without failures, and without a save.
    """

    mtbf_s: float
    ideal: Lives
    rows: list[Lives]

    def share(self, lives: Lives) -> float | None:
        """Return useful steps in a second, next to training without failures."""
        if lives.error is not None or self.ideal.error is not None or not self.ideal.reached:
            return None
        return lives.steps_per_s / self.ideal.steps_per_s


@dataclass
class CrashReport(Report):
    """Everything that was found.

    Attributes:
        costs: of a save, by arm; in words why they are not known.
        losses: of all steps of all arms.
    """

    options: CrashOptions
    costs: dict[str, SaveCosts | str]
    crashes: list[CrashTable]
    losses: Losses

    def modelled_share(self, table: CrashTable, lives: Lives) -> float | None:
        """Return :meth:`CrashTable.share` according to the formula."""
        costs = self.costs.get(lives.arm)
        loads_s = lives.loads_s()
        if not isinstance(costs, SaveCosts) or not loads_s:
            return None
        return share_of(costs, lives.every, table.mtbf_s, statistics.mean(loads_s))

    def rounds(self) -> str:
        """Return how often arms fail, and how costs were measured."""
        options = self.options
        return (
            f"{options.crashes} failures of each arm, their moments drawn with seed "
            f"{options.seed}; costs measured in {options.repeats} rounds"
        )

    def verdicts(self) -> list[Verdict]:
        """Return the targets, each with the measured figure."""
        return [self._same_verdict(), *map(self._peers_verdict, self.crashes)]

    def tables(self) -> Iterator[Table]:
        """Yield one table for each distance of failures."""
        for table in self.crashes:
            title = f"A failure every {table.mtbf_s:g} s on average, each arm at its best interval"
            rows = [self._cells(table, lives) for lives in (table.ideal, *table.rows)]
            yield Table(title, _COLUMNS, rows, words=("arm", "from"))

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            "T_ckpt: what a save takes from training: the time of its thread in the library, or "
            "the slow-down of steps where that is more. every: floor(sqrt(2 T_ckpt / p) / "
            "T_step), but one save is durable before the next begins; with a log, the interval "
            "that wastes the least, replay included. steps/s: useful steps, those that are there "
            "in the end, for each second of training and resuming. model: what the same formula "
            "promises. lost steps: that were completed, and had to be repeated, for each failure."
        )
        yield (
            "Real: training, saves, SIGKILL of the training process and of its keeper, resume() "
            "in a new process. Left out: what it takes to start that process. Made up: that "
            "something fails, and when. Page caches survive."
        )

    def figures(self) -> dict[str, Any]:
        """Return everything, every process included."""
        return {
            "emulated_link_bytes_per_s": self.options.link_bytes_per_s,
            "costs": self.costs,
            "tables": [
                {
                    "mtbf_s": table.mtbf_s,
                    "ideal": self._lives_as_json(table, table.ideal),
                    "arms": [self._lives_as_json(table, lives) for lives in table.rows],
                }
                for table in self.crashes
            ],
            "steps_trained_again": self.losses.again,
            "of_these_different": self.losses.different,
        }

    def _same_verdict(self) -> Verdict:
        what = "a step that is trained again has the same loss, bit for bit, whichever arm"
        again = self.losses.again
        different = self.losses.different
        figure = f"{again} step(s) trained again, {len(different)} with another loss"
        if different:
            arm, step = different[0]
            figure += f", the first of them step {step} of {arm}"
        return Verdict(what, figure, not different if again else None)

    def _peers_verdict(self, table: CrashTable) -> Verdict:
        what = (
            f"a failure every {table.mtbf_s:g} s: useful steps of everstep's best arm, next to "
            "those of the best peer: more"
        )
        found = [(lives.steps_per_s, lives.arm) for lives in table.rows if lives.error is None]
        ours = [one for one in found if one[1] not in (*PEERS, NONE)]
        peers = [one for one in found if one[1] in PEERS]
        if not ours or not peers:
            return Verdict(what, "-", None)
        (mine, arm) = max(ours)
        (other, peer) = max(peers)
        figure = f"{mine:.2f} a second ({arm}) next to {other:.2f} ({peer})"
        return Verdict(what, figure, mine > other)

    def _cells(self, table: CrashTable, lives: Lives) -> tuple[str | Text, ...]:
        ours = lives.arm not in (*PEERS, NONE, IDEAL)
        name = Text(lives.arm, style="bold" if ours else "")
        if lives.error is not None:
            return name, lives.error
        costs = self.costs.get(lives.arm)
        known = isinstance(costs, SaveCosts)
        save_s = costs.save_s if isinstance(costs, SaveCosts) else None
        durable_s = costs.durable_s if isinstance(costs, SaveCosts) else None
        lost = lives.lost()
        loads_s = lives.loads_s()
        sources = sorted({life.recovered.source for life in lives.lives[1:]})
        return (
            name,
            ms(save_s, 2),
            ms(durable_s),
            f"{lives.every}" if known else "-",
            number(lives.steps_per_s),
            per_cent(table.share(lives)),
            per_cent(self.modelled_share(table, lives)),
            number(statistics.mean(lost) if lost else None, 1),
            ms(statistics.mean(loads_s) if loads_s else None, 0),
            ", ".join(sources) or "-",
        )

    def _lives_as_json(self, table: CrashTable, lives: Lives) -> dict[str, Any]:
        return {
            "name": lives.arm,
            "every": lives.every,
            "error": lives.error,
            "steps_per_s": lives.steps_per_s if lives.error is None else None,
            "share_of_ideal": table.share(lives),
            "modelled_share": self.modelled_share(table, lives),
            "lost": lives.lost(),
            "lives": plain(lives.lives),
        }
