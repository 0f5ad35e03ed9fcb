"""Training process of the demo: resumes from its run folder and trains to the last step.

Started as ``python -m everstep.demo.child ORDER PARENT``: ORDER is a JSON file, PARENT the process
id of the supervisor. It does the same as any training script: build, :meth:`Checkpointer.resume`,
loop.
The only additions are the journal, a keeper that waits less long for its trainer, and the
failpoint at which the process dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import everstep
from everstep.config.options import LogOptions
from everstep.seams.failpoints import arm
from everstep.workloads import GPTConfig, Training, TrainingConfig, make_deterministic, training_of
from everstep.workloads.comparison import JournalWriter, fingerprint

EXIT_ORPHANED = 70
_DURABLE_TIMEOUT_S = 60.0
_LINGER_S = 120.0  # longer than any restart takes; an orphaned keeper exits after it


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as ordered; return the exit status."""
    path, parent = sys.argv[1:] if arguments is None else arguments
    order = json.loads(Path(path).read_bytes())
    make_deterministic(order["training"]["seed"])
    training = training_of(
        GPTConfig(**order["model"]),
        TrainingConfig(**order["training"]),
        Path(order["text"]).read_bytes(),
    )
    with contextlib.closing(JournalWriter(Path(order["journal"]))) as journal:
        return _train(order, int(parent), training, journal)


def _train(order: dict[str, Any], parent: int, training: Training, journal: JournalWriter) -> int:
    steps = order["training"]["steps"]
    logs = everstep.presets[order["method"]].log != "none"
    with everstep.Checkpointer(
        order["run"],
        training.state(),
        method=order["method"],
        every=order["every"],
        keeper=everstep.KeeperOptions(process=order["keeper"] == "process", linger_s=_LINGER_S),
        log=LogOptions(to="disk", batch_steps=1, lag_steps=0) if logs else None,
    ) as checkpointer:
        recovery = checkpointer.resume()
        journal.write(
            "resumed",
            step=recovery.step,
            exact=recovery.exact,
            evidence=str(recovery.evidence),
            source=str(recovery.source),
            seconds=recovery.seconds,
        )
        for step in range(recovery.step + 1, steps + 1):
            if os.getppid() != parent:
                return EXIT_ORPHANED  # the supervisor is dead: nobody would compare the result
            loss = training.step()
            journal.write("step", step=step, loss=loss.hex())
            if step == order["fails_at"]:
                arm(order["failpoint"], "kill")  # inside the base of this step
            checkpointer.step()
        described = fingerprint(training)
        checkpointer.save().durable.result(timeout=_DURABLE_TIMEOUT_S)
    journal.write("finished", step=steps, fingerprint=described)
    return 0


if __name__ == "__main__":
    sys.exit(main())
