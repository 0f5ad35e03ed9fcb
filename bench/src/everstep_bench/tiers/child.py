"""``python -m everstep_bench.tiers.child``: one rank that trains, and says what each step took.

Started by the benchmark, not by people. After each step rank 0 waits for a line: until everything
has been looked at.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

import everstep
from everstep.testing import inspect
from everstep.tiers.options import PeerOptions, TierOptions
from everstep.workloads import (
    GPT,
    Training,
    TrainingConfig,
    gpt_of,
    make_deterministic,
    stdlib_text,
    training_of,
)
from everstep_bench.harness.children import EXIT_ORPHANED, Order, say
from everstep_bench.harness.running import keepers_of, quiet
from everstep_bench.options import TiersOptions

_TEXT_BYTES = 1 << 20
_CONTEXT = 64
_TIMEOUT_S = 120.0
_MORE_SHARE = 64  # headers, records and control areas, beside a state
_MORE_BYTES = 512 << 10


@dataclass(frozen=True)
class RankOrder(Order):
    """Order for one rank.

    Attributes:
        run: its run folder.
        meet: file over which the ranks find each other.
        place: where copies go; None: no tiers.
    """

    options: TiersOptions
    rank: int
    run: str
    meet: str
    place: str | None


def main(arguments: list[str]) -> int:
    """Trains; returns the exit status."""
    order = RankOrder.decode(arguments[0])
    together = order.options.ranks > 1
    if together:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{order.meet}",
            rank=order.rank,
            world_size=order.options.ranks,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
    with quiet():
        training = _training(order)
        with _checkpointer(order, training) as checkpointer:
            checkpointer.resume()
            footprint = inspect(checkpointer).footprint
            bounds = {**asdict(footprint.memory), **asdict(footprint.bounds)}
            say(
                "ready",
                bounds=bounds,
                keepers=keepers_of(Path(order.run)),
                tensors=4 * sum(1 for _ in training.model.parameters()),
                state_bytes=_state_bytes(training),
            )
            cpu_s = time.process_time()
            for step in range(1, order.options.steps + 1):
                if order.is_orphaned:
                    return EXIT_ORPHANED
                begin_s = time.monotonic()
                thread_s = time.thread_time()
                training.step()
                trained_s = time.thread_time()
                checkpointer.step()
                end_s = time.thread_time()
                say(
                    "step",
                    step=step,
                    trained_s=trained_s - thread_s,
                    saved_s=end_s - trained_s,
                    wall_s=time.monotonic() - begin_s,
                )
                if order.rank == 0 and not sys.stdin.readline():
                    return EXIT_ORPHANED
            checkpointer.wait()
            cpu_s = time.process_time() - cpu_s
        stats = checkpointer.stats()
        fields = "committed failed keeper_restarts copies peered peers_passed_over".split()
        say("done", cpu_s=cpu_s, **{name: getattr(stats, name) for name in fields})
    if together:
        dist.destroy_process_group()
    return 0


def _training(order: RankOrder) -> Training:
    """The same weights and data on all ranks: what they compute does not matter."""
    options = order.options
    make_deterministic(options.seed)

    def wrap(model: GPT) -> GPT:
        if options.ranks == 1:
            return model
        return cast(GPT, torch.nn.parallel.DistributedDataParallel(model))

    training = training_of(
        gpt_of(options.params, context=_CONTEXT),
        TrainingConfig(options.steps + 1, batch=options.batch, seed=options.seed),
        stdlib_text(_TEXT_BYTES),
        wrap=wrap,
    )
    training.step()  # makes the optimizer's state: what is announced must know of it
    return training


def _state_bytes(training: Training) -> int:
    """Of parameters and both moments."""
    return 3 * sum(p.numel() * p.element_size() for p in training.model.parameters())


def _checkpointer(order: RankOrder, training: Training) -> Any:
    """With budgets that hold just what is needed: two states and their logs, and as much of
    another rank."""
    options = order.options
    state_bytes = _state_bytes(training)
    two = 2 * (state_bytes + state_bytes // _MORE_SHARE + _MORE_BYTES)
    if options.log != "none":
        two += 2 * (options.every + 1) * (state_bytes // 3 + _MORE_BYTES)
    tiers: list[TierOptions | PeerOptions] = []
    host_bytes = two
    if order.place is not None:
        tiers.append(TierOptions(order.place, log=options.log))
        if options.ranks > 1:
            peer = PeerOptions(host_bytes=two, emulated_node=str(order.rank), log=options.log)
            tiers.append(peer)
            host_bytes += two
    return everstep.Checkpointer(
        order.run,
        training.state(),
        method="lazy" if options.log == "none" else "logged",
        every=options.every,
        keep=options.keep,
        budget=everstep.Budget(host_bytes=host_bytes),
        tiers=tiers,
        progress_timeout_s=_TIMEOUT_S,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
