"""The outcome: targets and plain data."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from everstep_bench.crash.interval import SaveCosts, share_of
from everstep_bench.crash.lives import Lives, Losses
from everstep_bench.crash.options import CrashOptions
from everstep_bench.persist.machine import Machine
from everstep_bench.persist.report import Verdict
from everstep_bench.stall.report import facts_as_json
from everstep_bench.step.options import NONE

__all__ = ["PEERS", "CrashReport", "CrashTable"]

PEERS = ("torch.save", "dcp-warm")


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
        """Useful steps in a second, next to training without failures."""
        if lives.error is not None or self.ideal.error is not None or not self.ideal.reached:
            return None
        return lives.steps_per_s / self.ideal.steps_per_s


@dataclass(slots=True)
class CrashReport:
    """Everything that was found.

    Attributes:
        size_bytes: of all tensors of the state.
        tensors: number of them.
        workload: the model in words.
        free_core: whether training had a core of its own, and another was free.
        costs: of a save, by arm; in words why they are not known.
        losses: of all steps of all arms.
    """

    options: CrashOptions
    machine: Machine
    size_bytes: int
    tensors: int
    workload: str
    free_core: bool
    costs: dict[str, SaveCosts | str]
    tables: list[CrashTable]
    losses: Losses
    load_after: float
    seconds: float
    folder: str

    def labels(self) -> list[str]:
        """Return remarks that belong to every figure of this run."""
        found = []
        link = self.options.link_bytes_per_s
        if link is not None:
            found.append(
                f"EMULATED: everstep's copies go through a link of {link / 1e9:g} GB/s that does "
                "not exist; peers copy as fast as memory allows"
            )
        if self.options.spare_keeper:
            found.append(
                "KEEPER SPARED: only the training process is killed; everstep goes on from memory"
            )
        if not self.free_core:
            found.append("ONE CORE: training and everything else share it")
        return found

    def modelled_share(self, table: CrashTable, lives: Lives) -> float | None:
        """Return :meth:`CrashTable.share` according to the formula."""
        costs = self.costs.get(lives.arm)
        loads_s = lives.loads_s()
        if not isinstance(costs, SaveCosts) or not loads_s:
            return None
        return share_of(costs, lives.every, table.mtbf_s, statistics.mean(loads_s))

    def verdicts(self) -> list[Verdict]:
        """The targets, each with the measured figure."""
        return [self._same_verdict(), *map(self._peers_verdict, self.tables)]

    def all_met(self) -> bool:
        """Return True if every target is met; one that could not be measured is not."""
        return all(verdict.met for verdict in self.verdicts())

    def as_json(self) -> dict[str, Any]:
        """Everything, every process included."""
        return {
            **facts_as_json(self),
            "emulated_link_bytes_per_s": self.options.link_bytes_per_s,
            "keeper_spared": self.options.spare_keeper,
            "costs": {
                name: costs if isinstance(costs, str) else costs.as_json()
                for name, costs in self.costs.items()
            },
            "tables": [
                {
                    "mtbf_s": table.mtbf_s,
                    "ideal": self._lives_as_json(table, table.ideal),
                    "arms": [self._lives_as_json(table, lives) for lives in table.rows],
                }
                for table in self.tables
            ],
            "steps_trained_again": self.losses.again,
            "of_these_different": [list(found) for found in self.losses.different],
            "targets": [
                {"target": v.target, "figure": v.figure, "met": v.met} for v in self.verdicts()
            ],
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

    def _lives_as_json(self, table: CrashTable, lives: Lives) -> dict[str, Any]:
        known = lives.error is None
        return {
            "name": lives.arm,
            "every": lives.every,
            "error": lives.error,
            "steps_per_s": lives.steps_per_s if known else None,
            "share_of_ideal": table.share(lives),
            "modelled_share": self.modelled_share(table, lives),
            "lost": lives.lost(),
            "lives": [asdict(life) for life in lives.lives],
        }
