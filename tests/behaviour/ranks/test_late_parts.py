"""Parts whose ``state_dict()`` shows a tensor only while training runs, as loops of frameworks do:
a process that resumes does not show it yet, and the log goes on from where it was all the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.capture.mark_samples import MarkComparison, MarkSampler, mark_entries, sampled_bits
from everstep.errors import FormatError
from tests.support.logged import World, opened
from tests.support.ranks.logs import ON_DISK, die
from tests.support.ranks.together import resume, train, trained, trainings
from tests.support.world import forget, inventory_of

STEPS = 7
ZEROS = torch.zeros(5)


class Loop:
    """Shows a tensor of its own once it runs (``late``), or another one until it does (``early``).

    Attributes:
        kept: what was loaded, until it runs.
        running: what it works on then.
    """

    def __init__(self, shows: str = "late") -> None:
        self.shows, self.count = shows, 0
        self.kept: torch.Tensor | None = None
        self.running: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.shows == "early":
            return {"count": self.count} | ({} if self.running is not None else {"e": ZEROS})
        return {"count": self.count} | ({} if self.running is None else {"shown": self.running})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.kept = state.get("shown")

    def begin(self) -> None:
        self.running = torch.zeros(24) if self.kept is None else self.kept
        self.kept = None

    def step(self) -> None:
        assert self.running is not None
        self.count += 1
        self.running += self.count

    def snapshot(self) -> bytes:
        assert self.running is not None
        shown = None if self.shows == "early" else self.running.tolist()
        return repr((self.count, shown)).encode()


class Looping(World):
    """A world with such a part, before or after the model in the order of names."""

    def __init__(self, name: str, shows: str) -> None:
        super().__init__()
        self.loop = self.state[name] = Loop(shows)

    def train(self) -> None:
        super().train()
        self.loop.step()

    def snapshot(self) -> dict[str, bytes]:
        return super().snapshot() | {"loop": self.loop.snapshot()}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("shows", ["late", "early"])
@pytest.mark.parametrize("name", ["a", "z"])
def test_three_kills(tmp_path: Path, name: str, shows: str) -> None:
    """Each process comes back to the last step, by the log, and goes on with the same bits."""
    undisturbed = Looping(name, shows)
    expected = {}
    with opened(tmp_path / "whole", undisturbed) as ckpt:
        ckpt.resume()
        undisturbed.loop.begin()
        for step in range(1, 3 * STEPS + 1):
            undisturbed.train()
            ckpt.step()
            expected[step] = undisturbed.snapshot()
    run = tmp_path / "run"
    for start in range(0, 3 * STEPS, STEPS):
        world = Looping(name, shows)
        with opened(run, world) as ckpt:
            recovery = ckpt.resume()
            assert (recovery.step, recovery.exact, recovery.notes) == (start, True, ())
            assert (recovery.replayed > 0) == (start > 0)
            world.loop.begin()
            if start:
                assert world.snapshot() == expected[start]
            for step in range(start + 1, start + STEPS + 1):
                world.train()
                ckpt.step()
                assert world.snapshot() == expected[step]
        newest = max(inventory_of(run).bases, key=lambda base: base.id)
        assert newest.id.step == start + STEPS
        shutil.rmtree(newest.path)  # as after a kill: the log alone leads there
    forget(run)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shows", ["late", "early"])
def test_several_ranks(tmp_path: Path, shows: str) -> None:
    path = tmp_path / "run"
    undisturbed = Loop(shows)
    undisturbed.begin()
    for start in range(0, 3 * STEPS, STEPS):
        with trainings(path, path, parts=lambda rank: {"a": Loop(shows)}, **ON_DISK) as ranks:
            loops = [one.state["a"] for one in ranks]
            for one in resume(ranks):
                assert (one.step, one.exact, one.replayed > 0) == (start, True, start > 0), one
            for one, loop in zip(ranks, loops, strict=True):
                loop.begin()
                assert torch.equal(one.weight, trained(one.rank, start))
                assert loop.snapshot() == undisturbed.snapshot()
            for _ in range(STEPS):
                undisturbed.step()
                for loop in loops:
                    loop.step()
                train(ranks, 1)
            die(ranks)


def test_a_tensor_that_an_optimizer_updates_must_be_there() -> None:
    """Samples are of what was there when the mark was made, whatever the state shows now."""
    state = {"a/late": torch.ones(3), "m/weight": torch.arange(4.0), "z": torch.zeros(2)}
    names = sorted(state)
    spots = MarkSampler({"m/weight": state["m/weight"]})
    logged = mark_entries(spots, sampled_bits(spots, names), 5)
    now = {name: tensor for name, tensor in state.items() if name != "a/late"}
    assert MarkComparison().other(logged, now | {"b": torch.ones(7)}, 5, names) is None
    state["m/weight"][1] += 1
    assert MarkComparison().other(logged, now, 5, names) == "m/weight"
    del now["m/weight"]
    with pytest.raises(FormatError, match="'m/weight', which the state does not have"):
        MarkComparison().other(logged, now, 5, names)
