"""Train a program without interruption, and with SIGKILLs at given steps; compare what it wrote.

A program is a file in ``programs/`` that trains with a framework and everstep. Its environment
names the run folder (``RUN``) and a folder for its record (``OUT``). It reports each finished step
and its final state by :mod:`tests.frameworks.record`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Trained", "train"]

PROGRAMS = Path(__file__).with_name("programs")
ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 300.0


@dataclass
class Trained:
    """The record of a training, which may have been killed and resumed.

    Attributes:
        steps: by number of the step, what the program recorded of it: ids of the samples, loss.
            A step that was trained again replaces the one before.
        final: digests of the parts of the final state.
        recoveries: what each start has said of its resume: step, exact, notes.
        output: stdout and stderr of the last start.
        others: records of the ranks after the first, if they have any.
    """

    steps: dict[int, Any] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""
    others: list[Trained] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Trained:
        """Read the record of one rank."""
        trained = cls()
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if "recovery" in entry:
                trained.recoveries.append(entry["recovery"])
            elif "final" in entry:
                trained.final = entry["final"]
            else:
                trained.steps[entry["step"]] = entry["saw"]
        return trained


def train(
    program: str,
    folder: Path,
    kill_at: Sequence[float | tuple[float, str] | Mapping[str, str]] = (),
    env: Mapping[str, str] | None = None,
    ranks: int = 1,
) -> Trained:
    """Run ``programs/<program>.py`` to its end, killing it after each of the steps ``kill_at``.

    Args:
        program: the name of a file in ``programs/``, without its suffix.
        folder: an empty folder for the run and the record.
        kill_at: numbers of steps, ascending: the n-th start is killed once it has recorded the
            n-th of these, or amid the next step if a half is added; the last start is left alone.
            Of several ranks the first is killed, or those named: ``(7, "0,1")``. torchrun ends
            the others. A mapping holds variables of the environment by which a start is killed.
        env: further environment variables of the program.
        ranks: number of processes that torchrun starts.
    """
    for point in kill_at:
        if not isinstance(point, Mapping):
            number, killed = point if isinstance(point, tuple) else (point, "0")
            point = {"KILL_AT": str(number), "KILL_RANKS": killed}
        _start(program, folder, env, ranks, point)
    output = _start(program, folder, env, ranks, {})
    out = folder / "out"
    trained = Trained.read(out / "record.jsonl")
    trained.output = output
    others = [out / f"record-{rank}.jsonl" for rank in range(1, ranks)]
    trained.others = [Trained.read(path) for path in others if path.exists()]
    return trained


def _start(
    program: str,
    folder: Path,
    env: Mapping[str, str] | None,
    ranks: int,
    kill: Mapping[str, str],
) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "RUN": str(folder / "run"),
        "OUT": str(folder / "out"),
        "KILL_AT": "",
        **kill,
        **(env or {}),
    }
    command = ["-W", "ignore::DeprecationWarning", str(PROGRAMS / f"{program}.py")]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launcher, command[-1]]
        variables |= {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    killed = -signal.SIGKILL if ranks == 1 else 1  # torchrun's own status
    expected = killed if kill else 0
    assert process.returncode == expected, process.stdout[-4000:]
    return process.stdout
