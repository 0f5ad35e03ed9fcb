"""``python -m everstep_bench.step.recovered``: trains to be killed, or resumes what was killed.

Started by :mod:`.recovery`, not by people. It says what it found and waits for its end.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from everstep import Budget, Checkpointer, KeeperOptions, LogOptions, Method
from everstep.workloads import make_deterministic
from everstep.workloads.comparison import fingerprint
from everstep_bench.harness.children import Order, say
from everstep_bench.harness.loop import Loop
from everstep_bench.options import Training

_SAVED_S = 300.0
_SLACK_BYTES = 64 << 20


@dataclass(frozen=True)
class RecoveryOrder(Order):
    """Order for a process; see :func:`.recovery.measure_recovery`."""

    options: Training
    folder: str
    steps: int
    to: str
    threads: int
    fused: bool


def main(arguments: list[str]) -> int:
    """Return the exit status.

    Args:
        arguments: ``train`` or ``resume``, and an order, encoded.
    """
    order = RecoveryOrder.decode(arguments[1])
    if arguments[0] == "train":
        say("trained", **_train(order))
    else:
        say("resumed", **_resume(order))
    sys.stdin.read()  # until the benchmark ends, or ends us
    os._exit(0)  # nothing more is to be saved


def _train(order: RecoveryOrder) -> dict[str, Any]:
    loop = _loop(order, order.options.seed)
    begin_s = time.monotonic()
    for _ in range(order.steps):
        loop.step()
    training_s = time.monotonic() - begin_s
    ckpt = _checkpointer(order, loop)
    ckpt.resume()
    ckpt.save()
    ckpt.wait(_SAVED_S)
    for _ in range(order.steps):
        loop.step()
        ckpt.step()
    ckpt.wait(_SAVED_S)
    return {
        "training_s": training_s,
        "params": loop.training.model.config.params,
        "state_bytes": loop.size_bytes,
        "log_bytes": ckpt.stats().log_bytes,
        "fingerprint": fingerprint(loop.training),
    }


def _resume(order: RecoveryOrder) -> dict[str, Any]:
    loop = _loop(order, order.options.seed + 1)
    ckpt = _checkpointer(order, loop)
    begin_s = time.monotonic()
    found = ckpt.resume()
    resume_s = time.monotonic() - begin_s
    described = fingerprint(loop.training)
    again = ckpt.resume(step=order.steps)
    return {
        "resume_s": resume_s,
        "load_s": again.load_s,
        "replay_s": again.replay_s,
        "step": found.step,
        "replayed": found.replayed,
        "source": found.source,
        "exact": found.exact,
        "fingerprint": described,
    }


def _loop(order: RecoveryOrder, seed: int) -> Loop:
    make_deterministic(seed)
    torch.set_num_threads(order.threads)
    loop = Loop(order.options)
    for group in loop.training.optimizer.param_groups:
        group["fused"] = order.fused
    return loop


def _checkpointer(order: RecoveryOrder, loop: Loop) -> Checkpointer:
    gradients_bytes = 4 * loop.training.model.config.params * (order.steps + 2)
    history = "all" if order.to == "disk" else "last"
    return Checkpointer(
        Path(order.folder),
        loop.training.state(),
        method=Method(base="lazy", log="dense"),
        every=None,
        # And no base is due: a half of what is left holds all gradients, and what marks have.
        budget=Budget(host_bytes=2 * loop.size_bytes + 3 * gradients_bytes + _SLACK_BYTES),
        log=LogOptions(to=order.to, batch_steps=1, history=history),
        keeper=KeeperOptions(linger_s=60.0),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
