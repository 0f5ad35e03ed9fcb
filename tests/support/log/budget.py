"""A training whose log goes to disk, and the spans of steps that can be rebuilt from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.seams import ManualClock, PosixFileSystem, Seams
from everstep.testing import inspect
from everstep.trainer.attach.keeper import ThreadKeeper
from tests.support.logged import World, opened, rebuilder_of, segments_of
from tests.support.world import TIMEOUT_S, forget


class Trained:
    """A run with a log on disk, trained step by step by a clock that the test moves.

    Attributes:
        states: after each step.
    """

    def __init__(self, run: Path, *, fs: Any = None, **options: Any) -> None:
        self.run, self.world, self.clock = run, World(), ManualClock()
        self.states: dict[int, Any] = {}
        self.step = 0
        self.seams = Seams(filesystem=fs or PosixFileSystem(), clock=self.clock)
        self.options = options

    def __enter__(self) -> Trained:
        self._context = opened(self.run, self.world, seams=self.seams, **self.options)
        self.ckpt = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        forget(self.run)

    def train_slowly(self, steps: int) -> None:
        """Each step when all before it is on disk, as far as it goes there."""
        for _ in range(steps):
            self.train(1)
            self.settle()

    def settle(self) -> None:
        keeper = inspect(self.ckpt).keeper
        assert isinstance(keeper, ThreadKeeper)
        assert keeper.records is not None
        keeper.records.settle(TIMEOUT_S)

    def train(self, steps: int, *, step_s: float = 1.0) -> None:
        for _ in range(steps):
            self.clock.advance(step_s)
            self.world.train()
            self.ckpt.step()
            self.ckpt.wait()
            self.step += 1
            self.states[self.step] = self.world.snapshot()


def spans(run: Path) -> list[tuple[int, int]]:
    """Steps on disk: those behind the first number up to the second, joined."""
    found: list[tuple[int, int]] = []
    for segment in segments_of(run):
        assert segment.problem is None
        if found and found[-1][1] == segment.after:
            found[-1] = (found[-1][0], segment.last)
        else:
            found.append((segment.after, segment.last))
    return found


def assert_rebuilt(run: Path, states: dict[int, Any], steps: range) -> None:
    with rebuilder_of(run) as rebuilder:
        for step in steps:
            rebuilt = rebuilder.state_at(step)
            assert (rebuilt.step, rebuilt.exact) == (step, True)
            assert bytes(rebuilt.state.bytes_of("model/0.weight")) == states[step]["0.weight"]
