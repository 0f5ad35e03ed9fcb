"""One training process: resumes what its run folder holds and trains to the last step.

Started as ``python -m everstep.demo.child``; knows nothing of kills. What it does is
what any user's script does: build, :meth:`Checkpointer.resume`, loop. The journal is the
only addition, and the keeper, if it is a process, waits less long for a trainer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import everstep
from everstep.config.options import LogOptions
from everstep.demo.fingerprint import fingerprint
from everstep.demo.journal import JournalWriter
from everstep.workloads import (
    GPTConfig,
    Training,
    TrainingConfig,
    make_deterministic,
    training_of,
)

__all__ = ["EXIT_ORPHANED", "main"]

EXIT_ORPHANED = 70
_DURABLE_TIMEOUT_S = 60.0
_LINGER_S = 120.0  # longer than any restart takes; a keeper that nobody ended stays so long


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains; returns the exit status."""
    options = _parser().parse_args(arguments)
    make_deterministic(options.seed)
    training = training_of(
        GPTConfig(options.layers, options.width, options.heads, options.context),
        TrainingConfig(
            options.steps,
            batch=options.batch,
            seed=options.seed,
            warmup_steps=max(1, options.steps // 8),
        ),
        options.text.read_bytes(),
    )
    journal = JournalWriter(options.journal)
    try:
        return _train(options, training, journal)
    finally:
        journal.close()


def _train(options: argparse.Namespace, training: Training, journal: JournalWriter) -> int:
    steps: int = options.steps
    logs = everstep.presets[options.method].log != "none"
    journal.write("built", params=training.model.config.params, batches=training.loader.batches)
    with everstep.Checkpointer(
        options.run,
        training.state(),
        method=options.method,
        every=options.every or None,
        keep=options.keep,
        keeper=everstep.KeeperOptions(process=options.keeper == "process", linger_s=_LINGER_S),
        log=LogOptions(to="disk", batch_steps=1, lag_steps=0) if logs else None,
    ) as checkpointer:
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
            skipped=[str(item) for item in recovery.skipped],
        )
        for step in range(recovery.step + 1, steps + 1):
            if os.getppid() != options.parent:
                return EXIT_ORPHANED  # nobody is left to compare the result
            loss = training.step()
            journal.write("step", step=step, loss=loss.hex())
            checkpointer.step()
        described = fingerprint(training)
        checkpointer.save().durable.result(timeout=_DURABLE_TIMEOUT_S)
    journal.write("finished", step=steps, fingerprint=described)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="everstep.demo.child", allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--text", type=Path, required=True, help="file with the text")
    parser.add_argument("--journal", type=Path, required=True, help="JSON lines, created")
    parser.add_argument("--parent", type=int, required=True, help="process to live and die with")
    parser.add_argument("--method", required=True)
    parser.add_argument("--keeper", required=True, choices=("process", "thread"))
    for name in ("steps", "seed", "keep", "batch", "layers", "width", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="0: only the last step is saved")
    return parser


if __name__ == "__main__":
    sys.exit(main())
