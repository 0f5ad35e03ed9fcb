"""Runs the two trainings, and looks at them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from everstep.arena import CONTROL_BYTES
from everstep.errors import DeadlineError, EverstepError, OptionError
from everstep.link.registry import kill_keeper, list_keepers
from everstep.seams.processes.processes import process_ended
from everstep_bench.harness.children import TIMEOUT_S, Child
from everstep_bench.harness.display import Display
from everstep_bench.harness.session import session
from everstep_bench.options import TiersOptions
from everstep_bench.tiers.child import RankOrder
from everstep_bench.tiers.report import Occupied, TiersReport, Trained
from everstep_bench.tiers.sampling import COPIES, DISK, MEMORY, PEER, Sampler, place_bytes

_LOOK_EVERY_S = 0.005
_STATE_BYTES_PER_PARAM = 12
_PROCESS_BYTES = 400 << 20  # torch, in each of two processes of a rank


def run_tiers(options: TiersOptions, display: Display) -> TiersReport:
    """Measures; every process is ended and everything of its own is removed, whatever happens.

    Copies in a store that was named stay there: it is the user's.

    Raises:
        OptionError: the place is not empty.
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: a rank fails, or is killed.
    """
    if options.place is not None and place_bytes(options.place):
        raise OptionError(f"{options.place} is not empty", hint="name a place with nothing in it")
    with session(options, display) as run:
        state_bytes = _STATE_BYTES_PER_PARAM * options.params
        run.refuse_without_room(
            disk_bytes=3 * (options.keep + 2) * options.ranks * state_bytes,
            memory_bytes=options.ranks * (8 * state_bytes + _PROCESS_BYTES),
            hint="smaller --params, or fewer --ranks",
        )
        trained = []
        for tiers in (False, True):
            name = "with" if tiers else "without"
            display.begin(f"training {name} tiers", options.steps)
            trained.append(_Job(options, run.folder / name, tiers).run(display))
        size_bytes = trained[1].state_bytes
        facts = run.facts(size_bytes, trained[1].tensors, "parameters and moments of each rank")
        return TiersReport(options, facts, trained[0].found, trained[1].found)


class _Job:
    """All ranks of one training.

    Attributes:
        state_bytes, tensors: of a rank, as it says.
    """

    def __init__(self, options: TiersOptions, folder: Path, tiers: bool) -> None:
        self._options = options
        self._folder = folder
        self._tiers = tiers
        self._runs = [folder / f"host{rank}" / "run" for rank in range(options.ranks)]
        self._place: str | None = None
        if tiers:
            self._place = options.place or str(folder / "place")
        self.state_bytes = self.tensors = 0
        self.found = Trained(tiers)

    def run(self, display: Display) -> _Job:
        """Trains to the end."""
        options = self._options
        self._folder.mkdir()
        for run in self._runs:
            run.parent.mkdir()
        if self._tiers and options.place is None:
            Path(str(self._place)).mkdir()
        with self._ended(), contextlib.ExitStack() as stack:
            ranks = [
                stack.enter_context(Child("tiers.child", self._order(rank).encode()))
                for rank in range(options.ranks)
            ]
            self._follow(ranks, display)
        return self

    def _order(self, rank: int) -> RankOrder:
        meet = str(self._folder / "meet")
        return RankOrder(os.getpid(), self._options, rank, str(self._runs[rank]), meet, self._place)

    def _follow(self, ranks: Sequence[Child], display: Display) -> None:
        found = self.found
        ready = [process.next("ready") for process in ranks]
        self.state_bytes = ready[0]["state_bytes"]
        self.tensors = ready[0]["tensors"]
        bounds = [one["bounds"] for one in ready]
        if any(len(one["keepers"]) != 1 for one in ready):
            raise EverstepError("a rank has no keeper, or several")
        keepers = [one["keepers"][0] for one in ready]
        sampler = Sampler(self._runs, keepers, [one["arena_bytes"] for one in bounds], self._place)
        sampler.look(1)
        began_s = dict(sampler.cpu_s)
        steps = self._steps(ranks, sampler, display)
        found.done = [process.next("done") for process in ranks]
        self._refuse_failed()
        _await_keepers(keepers, sampler, self._options.steps)
        slowest = max(steps, key=lambda said: sum(one["saved_s"] for one in said))
        for name in ("saved_s", "trained_s", "wall_s"):
            setattr(found, name, [one[name] for one in slowest])
        found.trainer_cpu_s = sum(done["cpu_s"] for done in found.done)
        found.keeper_cpu_s = sum(sampler.cpu_s[keeper] - began_s[keeper] for keeper in keepers)
        found.looked = sampler.looked
        found.occupied = [
            Occupied(tier, _bound(tier, bounds), most) for tier, most in sampler.most.items()
        ]

    def _steps(
        self, ranks: Sequence[Child], sampler: Sampler, display: Display
    ) -> list[list[dict[str, Any]]]:
        """Return what each rank says of each step; look at everything meanwhile."""
        steps: list[list[dict[str, Any]]] = [[] for _ in ranks]
        for step in range(1, self._options.steps + 1):
            for rank, process in enumerate(ranks):
                _look_until(process, sampler, step)
                steps[rank].append(process.next("step", step))
            sampler.look(step)
            display.advance(f"step {step}")
            ranks[0].tell()
        _look_until(ranks[0], sampler, self._options.steps)
        return steps

    def _refuse_failed(self) -> None:
        for rank, done in enumerate(self.found.done):
            if done["failed"] or done["keeper_restarts"]:
                raise EverstepError(
                    f"rank {rank}: {done['failed']} bases have failed, {done['keeper_restarts']} "
                    "keepers were lost: nothing that was measured means anything",
                    rank=rank,
                )

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """No keeper is left of a training that has failed."""
        try:
            yield
        except BaseException:
            mine = {str(run.resolve()) for run in self._runs}
            for info in list_keepers():
                if info.run in mine:
                    kill_keeper(info)
            raise


def _bound(tier: str, bounds: Sequence[dict[str, Any]]) -> int:
    """Return the announced bound. An arena has a control area in front of the requested bytes."""
    if tier == COPIES:
        return sum(size for bound in bounds for _, size in bound["copies"])
    field = {MEMORY: "arena_bytes", PEER: "peer_bytes", DISK: "disk_bytes"}[tier]
    more = CONTROL_BYTES if tier == MEMORY else 0
    return int(min(bound[field] for bound in bounds)) + more


def _look_until(process: Child, sampler: Sampler, step: int) -> None:
    """Look again and again until it has said something, or has ended."""
    while not process.wait(_LOOK_EVERY_S):
        sampler.look(step)


def _await_keepers(keepers: Sequence[int], sampler: Sampler, step: int) -> None:
    """End them after the last copy."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not all(process_ended(keeper, 0.0) for keeper in keepers):
        if time.monotonic() > deadline_s:
            raise DeadlineError(f"a keeper has not ended within {TIMEOUT_S:g} s")
        sampler.look(step)
