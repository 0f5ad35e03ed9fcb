"""Several ranks in one process: threads with a group, mailboxes and Checkpointers of their own.

Random generators belong to the process, so these trainings draw nothing from them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import everstep
from everstep.errors import DeadlineError
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem, Seams
from tests.support.world import forget_open_runs

__all__ = ["RankTraining", "ThreadGroup", "on_all", "rank_seams", "trained", "trainings"]

T = TypeVar("T")
DEADLINE_S = 30.0


class ThreadGroup:
    """A :class:`everstep.seams.group.Group` whose ranks are threads."""

    host = "127.0.0.1"

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.world = rank, shared.world
        self._shared = shared
        self._asked = 0

    def exchange(self, what: str, data: bytes) -> list[bytes]:
        shared = self._shared
        try:
            shared.barrier.wait(DEADLINE_S)
            shared.said[self.rank] = data
            shared.barrier.wait(DEADLINE_S)
            found = [shared.said[rank] for rank in range(self.world)]
            shared.barrier.wait(DEADLINE_S)
        except threading.BrokenBarrierError as error:
            raise DeadlineError(f"not all ranks {what}") from error
        return found

    def begin_any(self, what: str, mine: bool) -> Callable[[], bool]:
        """Waits for nobody; what it returns does."""
        shared, asked = self._shared, self._asked
        self._asked += 1
        with shared.changed:
            shared.flags.setdefault(asked, {})[self.rank] = mine
            shared.changed.notify_all()

        def heard() -> bool:
            flags = shared.flags[asked]
            with shared.changed:
                if not shared.changed.wait_for(lambda: len(flags) == self.world, DEADLINE_S):
                    raise DeadlineError(f"not all ranks {what}")
            return any(flags.values())

        return heard


class _Shared:
    def __init__(self, world: int) -> None:
        self.world = world
        self.changed = threading.Condition()
        self.flags: dict[int, dict[int, bool]] = {}
        self.barrier = threading.Barrier(world)
        self.said: dict[int, bytes] = {}


def rank_seams(world: int, **seams: Any) -> list[Seams]:
    """One world for each rank of a job."""
    shared = _Shared(world)
    return [Seams(group=_maker(rank, shared), **seams) for rank in range(world)]


def _maker(rank: int, shared: _Shared) -> Callable[[float], ThreadGroup]:
    return lambda timeout_s: ThreadGroup(rank, shared)


def on_all(*calls: Callable[[], T]) -> list[T]:
    """Does something on every rank at once; raises the first error when all are over."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        for future in futures:
            future.exception(4 * DEADLINE_S)
        return [future.result() for future in futures]


@dataclass
class RankTraining:
    """A rank: its model differs from the others', so that a swap of files would show.

    Attributes:
        trail: weights after each step, from step 0.
    """

    rank: int
    ckpt: everstep.Checkpointer
    model: nn.Linear
    state: dict[str, Any]
    optimizer: torch.optim.Optimizer
    trail: list[torch.Tensor] = field(default_factory=list)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            at = self.state["data"]["step"]
            self.model.weight.grad = torch.full_like(self.model.weight, 0.1 * (at + 1 + self.rank))
            self.optimizer.step()
            self.state["data"]["step"] = at + 1
            self.ckpt.step()

    @property
    def weight(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


def trained(rank: int, steps: int) -> torch.Tensor:
    """The weights of a rank that was never interrupted."""
    model = _model(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for at in range(steps):
        model.weight.grad = torch.full_like(model.weight, 0.1 * (at + 1 + rank))
        optimizer.step()
    return model.weight.detach().clone()


def _model(rank: int) -> nn.Linear:
    model = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(12.0).reshape(3, 4) + 100 * rank)
    return model


@contextlib.contextmanager
def trainings(
    *paths: Path,
    seams: list[Seams] | None = None,
    parts: Callable[[int], dict[str, Any]] = lambda rank: {},
    **options: Any,
) -> Iterator[list[RankTraining]]:
    """One training for each path, all ranks of one job; let go of without a last word.

    Args:
        parts: of the state of a rank, beside those that all have.
    """
    world = len(paths)
    seams = seams or rank_seams(world)
    keeper = everstep.KeeperOptions(process=False)
    options = {
        "method": "sync",
        "every": None,
        "keeper": keeper,
        "progress_timeout_s": 20.0,
        **options,
    }

    def start(rank: int) -> RankTraining:
        model = _model(rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer, "data": {"step": 0}, **parts(rank)}
        ckpt = everstep.Checkpointer(paths[rank], state, seams=seams[rank], **options)
        forget_open_runs()  # another start of the job is another process
        return RankTraining(rank, ckpt, model, state, optimizer)

    ranks = on_all(*(lambda rank=rank: start(rank) for rank in range(world)))  # type: ignore[misc]
    try:
        yield ranks
    finally:
        close_all([one.ckpt for one in ranks])


def close_all(opened: Sequence[everstep.Checkpointer]) -> None:
    """Close all ranks together, as the bases of one wait for those of the others."""

    def close(ckpt: everstep.Checkpointer) -> None:
        with contextlib.suppress(everstep.EverstepError):
            ckpt.close()

    on_all(*(partial(close, ckpt) for ckpt in opened))


FS = PosixFileSystem()


def bases(path: Path) -> dict[int, str]:
    """Status of each base by step."""
    return {base.id.step: base.status for base in scan_run(FS, path).bases}


def resume(ranks: list[RankTraining], step: int | None = None) -> list[everstep.Recovery]:
    return on_all(*(lambda one=one: one.ckpt.resume(step) for one in ranks))  # type: ignore[misc]


def train(ranks: list[RankTraining], steps: int) -> None:
    on_all(*(lambda one=one: one.train(steps) for one in ranks))  # type: ignore[misc]


def save(ranks: list[RankTraining]) -> None:
    def one_saves(one: RankTraining) -> None:
        one.ckpt.save()
        one.ckpt.wait(20)

    on_all(*(lambda one=one: one_saves(one) for one in ranks))  # type: ignore[misc]


def folders(tmp_path: Path, shared: bool) -> tuple[Path, Path]:
    return (tmp_path / "run", tmp_path / "run") if shared else (tmp_path / "a", tmp_path / "b")
