"""Programs under torchrun, of which processes are killed at chosen steps.

The program knows nothing of it: torchrun starts :mod:`tests.support.ranks.launched_rank`, which
runs the program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.world import TIMEOUT_S

__all__ = ["REPAIRED", "WORLD", "Kill", "Launched", "launch"]

ROOT = Path(__file__).parents[3]
WORLD = 2
REPAIRED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""The environment in which torchrun can start several ranks again."""

_LIMIT_S = 30 * TIMEOUT_S  # torch is loaded up to seven times


@dataclass(frozen=True)
class Kill:
    """Processes to kill.

    Attributes:
        step: step at whose end they are killed, before it is marked.
        ranks: numbers of the ranks.
        keeper: kill their keepers, and not them.
        start: number of the start by torchrun; 0 is the first.
    """

    step: int
    ranks: tuple[int, ...]
    keeper: bool = False
    start: int = 0


@dataclass(frozen=True)
class Launched:
    """Result of one call of torchrun.

    Attributes:
        status: exit status of torchrun.
        stdout: lines of each rank, for each start of the ranks by torchrun.
        stderr: the same of standard error.
        agent: output of torchrun itself.
    """

    status: int
    stdout: list[list[list[str]]]
    stderr: list[list[list[str]]]
    agent: str

    def __str__(self) -> str:
        parts = [self.agent]
        for attempt, (out, err) in enumerate(zip(self.stdout, self.stderr, strict=True)):
            for rank, lines in enumerate(zip(out, err, strict=True)):
                parts.append(f"--- start {attempt}, rank {rank}")
                parts += [*lines[0], *lines[1]]
        return "\n".join(parts)


def launch(
    program: Path,
    *arguments: str,
    logs: Path,
    kills: Sequence[Kill] = (),
    env: Mapping[str, str] = REPAIRED,
    options: Sequence[str] = ("--standalone",),
    folder: Path = ROOT,
) -> Launched:
    """Run a program on two ranks under ``torchrun --max-restarts=2`` until torchrun ends.

    Args:
        program: the program, as its user has it.
        arguments: arguments of the program.
        logs: folder that does not exist yet.
        kills: processes that are killed.
        env: further environment variables.
        options: further options of torchrun.
        folder: working directory.
    """
    order = json.dumps([vars(kill) for kill in kills])
    launcher = ["-m", "torch.distributed.run", *options, f"--nproc-per-node={WORLD}"]
    launcher += ["--max-restarts=2", "--monitor-interval=0.1", "--redirects=3", f"--log-dir={logs}"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, *launcher, "-m", f"{__name__}_rank", order, str(program), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **env},
    ) as process:
        try:
            agent, _ = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks, which have sessions of their own
            agent, _ = process.communicate(timeout=_LIMIT_S)
            raise AssertionError(f"torchrun hangs:\n{agent}") from None
        finally:
            process.kill()
    starts = sorted(logs.glob("*/attempt_*"), key=lambda path: int(path.name[len("attempt_") :]))
    out, err = (
        [
            [(start / f"{rank}" / name).read_text().splitlines() for rank in range(WORLD)]
            for start in starts
        ]
        for name in ("stdout.log", "stderr.log")
    )
    return Launched(process.returncode, out, err, agent)
