"""``python -m everstep_bench.scale.child``: one rank, which saves with all arms in turn.

Started by the benchmark, not by people. All ranks draw the same order of arms. After each save all
meet, so that no arm pays for another one.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from everstep.workloads import GPT
from everstep_bench.harness.children import EXIT_ORPHANED, TIMEOUT_S, Order, say
from everstep_bench.harness.loop import Loop, seeded_single_thread
from everstep_bench.harness.placement import Placement
from everstep_bench.harness.running import quiet
from everstep_bench.harness.session import in_a_line
from everstep_bench.options import IDEAL, ScaleOptions, StallOptions
from everstep_bench.stall.arms import Arm, Ideal
from everstep_bench.stall.dcp import Dcp
from everstep_bench.stall.ours import Ours
from everstep_bench.stall.peers import TorchSave, TorchSnapshot

WARM_UPS = 3  # from then on files are recycled, and buffers and stagers are warm


@dataclass(frozen=True)
class RankOrder(Order):
    """Order for one rank.

    Attributes:
        params: of the model.
        world: number of ranks.
        folder: where all ranks write.
    """

    options: ScaleOptions
    params: int
    rank: int
    world: int
    folder: str


def main(arguments: list[str]) -> int:
    """Trains and saves; returns the exit status."""
    order = RankOrder.decode(arguments[0])
    folder = Path(order.folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meet'}",
        rank=order.rank,
        world_size=order.world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    with seeded_single_thread(order.options.seed), quiet():
        rank = Rank(order, folder)
        say(
            "ready",
            size_bytes=rank.loop.size_bytes,
            tensors=rank.loop.tensors,
            workload=rank.loop.description,
        )
        try:
            for number in range(1 - WARM_UPS, order.options.repeats + 1):
                rank.round(number)
                if order.is_orphaned:
                    return EXIT_ORPHANED
        finally:
            rank.close()
    say("done")
    dist.destroy_process_group()
    return 0


class Rank:
    """One rank, its model and its arms."""

    def __init__(self, order: RankOrder, folder: Path) -> None:
        options = order.options
        self._order = order
        self._every = options.every
        self._random = random.Random(options.seed)
        stall = StallOptions(params=order.params, batch=options.batch, seed=options.seed)
        self.loop = Loop(stall, wrap=_wrapped if order.world > 1 else None)
        self._arms: list[Arm] = []
        placement = Placement(free_core=False)
        placement.others = tuple(sorted(os.sched_getaffinity(0)))  # nothing is kept on cores
        for name in options.names():
            arm = _made(name, self.loop, folder, placement, stall)
            with self._together(arm):
                arm.open()
                self._arms.append(arm)

    def round(self, number: int) -> None:
        """Let each arm save once; rounds below 1 do not count."""
        order = list(self._arms)
        self._random.shuffle(order)
        for arm in order:
            found: dict[str, Any] = {}
            with self._together(arm):
                found = self._block(arm)
            if arm in self._arms:
                say("block", arm=arm.name, round=number, **found)

    def close(self) -> None:
        """Close all arms."""
        with contextlib.ExitStack() as rest:
            for arm in self._arms:
                rest.callback(arm.close)

    def _block(self, arm: Arm) -> dict[str, Any]:
        """Let an arm save, and train. A peer that fails on one rank is given up at the end, where
        all ranks meet: until then they exchange gradients."""
        errors: list[Exception] = []

        @contextlib.contextmanager
        def noted() -> Iterator[None]:
            try:
                yield
            except Exception as error:
                if arm.role != "peer":
                    raise
                errors.append(error)

        pending = None
        durable_s = None
        with noted():
            arm.prepare()
        dist.barrier()
        before_s = sum(arm.stalls().values())
        begin_s = time.monotonic()
        with noted():
            pending = arm.save()
        call_s = time.monotonic() - begin_s
        for _ in range(self._every):
            self.loop.step()
            arm.after_step()
        wall_s = time.monotonic() - begin_s
        stall_s = sum(arm.stalls().values()) - before_s
        if pending is not None:
            with noted():
                synced_s = arm.settle(pending)
                durable_s = (pending.done_s or begin_s) - begin_s + synced_s
        dist.barrier()
        if self._order.rank == 0:
            arm.clean()
        dist.barrier()
        if errors:
            raise errors[0]
        return {
            "wall_s": wall_s,
            "call_s": call_s,
            "stall_s": stall_s,
            "durable_s": durable_s,
        }

    @contextlib.contextmanager
    def _together(self, arm: Arm) -> Iterator[None]:
        """Give up a peer on all ranks where it fails on one; ours must work."""
        why = ""
        try:
            yield
        except Exception as error:
            if arm.role != "peer":
                raise
            why = in_a_line(error)
        failed = torch.tensor([float(bool(why))])
        dist.all_reduce(failed)
        if failed.item():
            self._arms = [one for one in self._arms if one is not arm]
            say("failed", arm=arm.name, error=why)


def _made(name: str, loop: Loop, folder: Path, placement: Placement, options: StallOptions) -> Arm:
    """Return an arm of this rank; all ranks make them in the same order."""
    if name == IDEAL:
        return Ideal()
    if name == "torch.save":
        first = dist.get_rank() == 0
        return TorchSave(loop, folder) if first else Ideal(name, "rank 0 saves")
    if name.startswith("dcp"):
        return Dcp(name, loop, folder, dist.new_group(backend="gloo"))
    if name == "torchsnapshot":
        return TorchSnapshot(loop, folder, replicated=dist.get_world_size() > 1)
    return Ours(name, loop, folder, placement, options)


def _wrapped(model: GPT) -> GPT:
    return cast("GPT", torch.nn.parallel.DistributedDataParallel(model))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
