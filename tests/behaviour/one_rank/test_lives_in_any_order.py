"""Processes that resume, save, rewind and crash in any order: a plain list is the oracle."""

from __future__ import annotations

import contextlib
from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import everstep
from everstep.errors import FencedError, RecoveryError
from everstep.run.scan import scan_run
from everstep.seams import ManualClock, Seams
from everstep.testing import inspect
from everstep.trainer.checks.first_batches import FirstBatches
from tests.crash.sim.filesystem import SimFileSystem
from tests.support.world import forget

RUN = PurePath("/disk/run")
ACTORS = 3

actions = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "save", "resume", "rewind", "crash", "step"]),
        st.integers(0, ACTORS - 1),
        st.integers(0, 9),
    ),
    min_size=4,
    max_size=30,
)


class World:
    """Several processes on one simulated disk, and what their run must hold.

    Attributes:
        history: ``(step, value)`` of every base that the present owner descends from.
        owner: the process that resumed last; nobody else may commit.
    """

    def __init__(self, keep: int) -> None:
        self.fs = SimFileSystem()
        self.fs.make_dir(RUN.parent)
        self.keep = keep
        self.actors: list[tuple[everstep.Checkpointer, dict[str, int]] | None] = [None] * ACTORS
        self.crashed: list[everstep.Checkpointer] = []
        self.resumed = [False] * ACTORS
        self.history: list[tuple[int, int]] = []
        self.owner: int | None = None
        self.value = 0

    def actor(self, number: int) -> tuple[everstep.Checkpointer, dict[str, int]]:
        found = self.actors[number]
        if found is None:
            forget(RUN)  # type: ignore[arg-type]
            state = {"value": -1}
            ckpt = everstep.Checkpointer(
                str(RUN),
                state,
                method="sync",
                every=None,
                keep=self.keep,
                seams=Seams(filesystem=self.fs, clock=ManualClock()),
            )
            found = self.actors[number] = (ckpt, state)
            self.resumed[number] = False
        return found

    def resume(self, number: int, step: int | None = None) -> None:
        ckpt, state = self.actor(number)
        if step is None and not self.history and self.resumed[number] and ckpt.stats().step:
            with pytest.raises(RecoveryError, match="is not that of a fresh start"):
                ckpt.resume()
            return
        state["value"] = -1
        recovery = ckpt.resume(step=step)
        if step is not None:
            self.history = [base for base in self.history if base[0] <= step]
        expected = self.history[-1] if self.history else (0, -1)
        assert (recovery.step, state["value"]) == expected
        self.owner, self.resumed[number] = number, True

    def rewind(self, number: int, choice: int) -> None:
        """To a base of the history that is still there."""
        there = {base.id.step for base in scan_run(self.fs, RUN).bases}
        steps = [step for step, _ in self.history if step in there]
        if not steps:
            return
        step = steps[choice % len(steps)]
        try:
            self.resume(number, step)
        except RecoveryError:
            raise AssertionError(f"step {step} is there and cannot be resumed") from None

    def save(self, number: int) -> None:
        ckpt, state = self.actor(number)
        if not self.resumed[number]:
            return
        self.value += 1
        state["value"] = self.value
        ckpt.step()
        try:
            ckpt.save()
        except FencedError:
            assert self.owner != number, "the owner is fenced off"
            return
        assert self.owner == number, "a fenced process has committed"
        self.history.append((ckpt.stats().step, self.value))

    def step(self, number: int) -> None:
        if self.resumed[number] and self.actors[number] is not None:
            self.actor(number)[0].step()

    def crash(self, number: int) -> None:
        found = self.actors[number]
        if found is not None:
            # All that would outlive it in this process.
            inspect(found[0]).ring.close()
            inspect(found[0]).part(FirstBatches).close()
            self.crashed.append(found[0])
        self.actors[number] = None
        self.resumed[number] = False

    def check(self) -> None:
        """A new process finds the newest base of the owner, and no more bases than are kept."""
        kept = [base for base in scan_run(self.fs, RUN).bases if base.status == "committed"]
        self.crash(0)
        self.resume(0)
        if self.history:
            assert self.history[-1][0] in {base.id.step for base in kept}

    def close(self) -> None:
        for found in self.actors:
            if found is not None:
                with contextlib.suppress(FencedError):
                    found[0].close()
        for ckpt in self.crashed:  # or their keeper threads would hold all memory to the end
            with contextlib.suppress(everstep.EverstepError):
                ckpt.close()


def play(keep: int, script: list[tuple[str, int, int]]) -> None:
    world = World(keep)
    try:
        world.resume(0)
        for action, number, choice in script:
            method: Any = getattr(world, action)
            method(number, choice) if action == "rewind" else method(number)
        world.check()
    finally:
        world.close()


@pytest.mark.slow
@settings(max_examples=60)
@given(keep=st.integers(1, 3), script=actions)
def test_any_order(keep: int, script: list[tuple[str, int, int]]) -> None:
    play(keep, script)


@pytest.mark.slow
@settings(max_examples=3000)
@given(keep=st.integers(1, 3), script=actions)
def test_any_order_of_many(keep: int, script: list[tuple[str, int, int]]) -> None:
    play(keep, script)
