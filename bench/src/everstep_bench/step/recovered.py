"""``python -m everstep_bench.step.recovered``: trains to be killed, or resumes what was killed.

Started by :mod:`.recovery`, not by people. It says what it found in one line on standard output
and waits for its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["main"]

_SAVED_S = 300.0
_SLACK_BYTES = 64 << 20


def main(arguments: list[str]) -> int:
    """Returns the exit status.

    Args:
        arguments: ``train`` or ``resume``, and the order of :func:`.recovery.measure_recovery`.
    """
    verb = arguments[0]
    order = json.loads(arguments[1])
    found = _train(order) if verb == "train" else _resume(order)
    # One write, in the kernel's hands when it returns.
    os.write(sys.stdout.fileno(), json.dumps(found).encode() + b"\n")
    sys.stdin.read()  # until the benchmark ends, or ends us
    os._exit(0)  # nothing more is to be saved


def _train(order: dict[str, Any]) -> dict[str, Any]:
    from everstep.workloads.fingerprint import fingerprint

    loop = _loop(order, order["seed"])
    steps = order["steps"]
    begin_s = time.monotonic()
    for _ in range(steps):
        loop.step()
    training_s = time.monotonic() - begin_s
    ckpt = _checkpointer(order, loop)
    ckpt.resume()
    ckpt.save()
    ckpt.wait(_SAVED_S)
    for _ in range(steps):
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


def _resume(order: dict[str, Any]) -> dict[str, Any]:
    from everstep.workloads.fingerprint import fingerprint

    loop = _loop(order, order["seed"] + 1)
    steps = order["steps"]
    ckpt = _checkpointer(order, loop)
    begin_s = time.monotonic()
    found = ckpt.resume()
    resume_s = time.monotonic() - begin_s
    described = fingerprint(loop.training)
    again = ckpt.resume(step=steps)
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


def _loop(order: dict[str, Any], seed: int) -> Any:
    import torch

    from everstep.workloads import make_deterministic
    from everstep_bench.stall.loop import Loop
    from everstep_bench.step.options import Training

    make_deterministic(seed)
    torch.set_num_threads(order["threads"])
    options = Training(params=order["params"], batch=order["batch"], seed=order["seed"])
    loop = Loop(options, batch=order["batch"])
    for group in loop.training.optimizer.param_groups:
        group["fused"] = order["fused"]
    return loop


def _checkpointer(order: dict[str, Any], loop: Any) -> Any:
    from everstep import Budget, Checkpointer, KeeperOptions, LogOptions, Method

    gradients_bytes = 4 * loop.training.model.config.params * (order["steps"] + 2)
    history = "all" if order["to"] == "disk" else "last"
    return Checkpointer(
        Path(order["folder"]),
        loop.training.state(),
        method=Method(base="lazy", log="dense"),
        every=None,
        # And no base is due: a half of what is left holds all gradients, and what marks have.
        budget=Budget(host_bytes=2 * loop.size_bytes + 3 * gradients_bytes + _SLACK_BYTES),
        log=LogOptions(to=order["to"], batch_steps=1, history=history),
        keeper=KeeperOptions(linger_s=60.0),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
