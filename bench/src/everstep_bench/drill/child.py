"""One rank of a job: joins the others, resumes what its run folder holds, trains to the last step.

Started by torchrun as ``python -m everstep_bench.drill.child ORDER``, where ORDER is a JSON file;
knows nothing of kills. But for the journal it is what any user's script is.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist

import everstep
from everstep.compress.compressor import Compressor
from everstep.config.options import LogOptions
from everstep.errors import EverstepError, OptionError, UnavailableError
from everstep.seams.processes.processes import PidWatch
from everstep.tiers.options import PeerOptions, TierOptions
from everstep.workloads import (
    GPT,
    GPTConfig,
    Training,
    TrainingConfig,
    make_deterministic,
    training_of,
)
from everstep.workloads.comparison import JournalWriter, fingerprint

_EXIT_LOST = 71
_LINGER_S = 120.0  # longer than any restart takes
_KEEPER_THREADS = 2
_INT8_BELOW = 1000  # a hundredth of a large tensor's part of a small GPT, as TierCheck's 100,000 is


def main(
    arguments: Sequence[str] | None = None, *, resumed: Callable[[Training], None] | None = None
) -> int:
    """Trains; returns the exit status.

    Args:
        resumed: called with the training when its state is restored.
    """
    words = sys.argv[1:] if arguments is None else arguments
    order: dict[str, Any] = json.loads(Path(words[0]).read_bytes())
    rank = int(os.environ["RANK"])
    journal = JournalWriter(Path(order["journals"], f"{order['name']}-{rank}.jsonl"))
    journal.write("started", pid=os.getpid())
    with PidWatch(order["drill"]) as drill:
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=order["timeout_s"]))
            training = trained(order, rank)
            state = training.state()
            if order["consumes"] != "whole":
                # Without error feedback: residuals are state, each step's as large as a dense log.
                state["compressor"] = Compressor(
                    training.optimizer, kind=order["consumes"], error_feedback=False
                )
            with _checkpointer(order, rank, state, journal) as checkpointer:
                try:
                    _train(order, training, checkpointer, journal, drill, resumed)
                except (EverstepError, RuntimeError) as error:
                    _lost(journal, error)
            dist.destroy_process_group()
        except (EverstepError, RuntimeError) as error:
            _lost(journal, error)
    return 0


def _lost(journal: JournalWriter, error: Exception) -> NoReturn:
    """Another rank is gone, most likely. A launcher that notices ends this one; how far it would
    come in closing its Checkpointer until then is luck, and so it does not begin."""
    journal.write("lost", what=str(error))
    print(error, file=sys.stderr, flush=True)
    os._exit(_EXIT_LOST)


def trained(order: dict[str, Any], rank: int) -> Training:
    """Model, optimizer and data of this rank; the same weights on all, other data and noise."""
    seed = order["seed"]
    world = dist.get_world_size()
    make_deterministic(seed)

    def wrap(model: GPT) -> GPT:
        if order["parallel"] == "ddp":
            # Buckets stay as they are in the first step. Rebuilt ones add the ranks' gradients in
            # another order: a resumed run would be one rebuild behind, and differ in the last bit.
            ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
            return cast(GPT, ddp)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    training = training_of(
        GPTConfig(**order["model"]),
        TrainingConfig(
            order["steps"],
            batch=order["batch"],
            seed=seed + rank,
            warmup_steps=max(1, order["steps"] // 8),
        ),
        Path(order["text"]).read_bytes(),
        wrap=wrap,
    )
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    return training


@contextlib.contextmanager
def _checkpointer(
    order: dict[str, Any], rank: int, state: dict[str, Any], journal: JournalWriter
) -> Iterator[everstep.Checkpointer | None]:
    arm = order["arm"]
    if arm is None:
        yield None
        return
    try:
        made = everstep.Checkpointer(
            order["runs"][rank],
            state,
            method=arm["method"],
            every=order["every"],
            keeper=everstep.KeeperOptions(
                process=arm["keeper"] == "process", threads=_KEEPER_THREADS, linger_s=_LINGER_S
            ),
            log=LogOptions(**arm["log"]) if arm["log"] else None,
            tiers=[_place(tier, rank, arm) for tier in arm["tiers"]],
            progress_timeout_s=order["timeout_s"],
        )
    except (OptionError, UnavailableError) as error:
        journal.write("refused", why=error.message)
        sys.exit(0)
    with made:
        yield made


def _place(tier: str, rank: int, arm: Mapping[str, Any]) -> Any:
    """A tier as the Checkpointer takes it: to peers, each host of a drill is a node."""
    copied: str = arm["copied"]
    if tier != "peer":
        steps = arm["copied_steps"]
        return TierOptions(tier, log=copied, log_steps=steps, log_int8_below=_INT8_BELOW)
    return PeerOptions(
        bytes_per_s=arm["peer_bytes_per_s"],
        emulated_node=f"host {rank}",
        log="adaptive" if copied == "adaptive" else "whole",
        log_int8_below=_INT8_BELOW,
    )


def _train(
    order: dict[str, Any],
    training: Training,
    checkpointer: everstep.Checkpointer | None,
    journal: JournalWriter,
    drill: PidWatch,
    resumed: Callable[[Training], None] | None,
) -> None:
    dist.barrier()  # then nobody's resume() waits for others that are still being made
    journal.write("ready")
    first = 1
    if checkpointer is not None:
        recovery = checkpointer.resume()
        if training.progress["steps"] != recovery.step:
            raise RuntimeError(
                f"resumed at step {recovery.step} with the progress of step "
                f"{training.progress['steps']}"
            )
        journal.write(
            "resumed",
            step=recovery.step,
            base_step=recovery.base_step,
            replayed=recovery.replayed,
            exact=recovery.exact,
            evidence=str(recovery.evidence),
            source=str(recovery.source),
            timeline=recovery.timeline,
            seconds=recovery.seconds,
            size_bytes=recovery.size_bytes,
            skipped=[str(item) for item in recovery.skipped],
        )
        first = recovery.step + 1
        if recovery.step and resumed is not None:
            resumed(training)
    for step in range(first, order["until"] + 1):
        if drill.ended():
            raise RuntimeError("the drill is gone: nobody is left to compare the result")
        # Twice: who dies in the checkpointer has taken the step, and has not finished it.
        journal.write("taken", number=step, loss=training.step().hex())
        if checkpointer is not None:
            checkpointer.step()
        journal.write("step", step=step)
        if step in order["describe"]:
            journal.write("described", number=step, fingerprint=fingerprint(training))
    journal.write("finished", step=order["until"], fingerprint=fingerprint(training))


if __name__ == "__main__":
    sys.exit(main())
