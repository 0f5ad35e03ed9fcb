"""Request of a process to restore a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from everstep.format.writer import ChunkRing
from everstep.restore.fetch.held import KeeperContents
from everstep.seams import Seams
from everstep.state.training_state import State


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """State to restore, the sources of one rank, and what is accepted.

    Attributes:
        seams: file system, clock and other services.
        run: run folder.
        state: live state, which is overwritten.
        ring: memory through which files are read.
        recalled: base and log records in the memory of this rank's keeper.
        step: step to restore; None: the newest; 0 without such a base: start afresh.
        strict: refuse bases that do not match the live state completely.
        timeout_s: seconds without progress after which an operation, or another rank, is reported.
        on_touch: called before live state is overwritten.
        trained: this process has trained, so its state is not that of a fresh start.
        restores: False if ``resume()`` was not called: a base is then an error.
    """

    seams: Seams
    run: PurePath
    state: State
    ring: ChunkRing
    recalled: KeeperContents
    step: int | None
    strict: bool
    timeout_s: float
    on_touch: Callable[[], None] = lambda: None
    trained: bool = False
    restores: bool = True
