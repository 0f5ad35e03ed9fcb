"""A run folder that is put back as it was once, while a keeper still has what came behind that in
memory: timelines of the same numbers are opened again, and nothing of the two gets mixed."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep import KeeperOptions
from everstep.errors import EverstepError, FencedError
from everstep.testing import inspect
from everstep.trainer.attach.keeper import ThreadKeeper
from tests.support.lost_keepers import cut
from tests.support.serving import Bench, die, serving
from tests.support.takeover import opened, until
from tests.support.world import TIMEOUT_S


class World:
    """Plain SGD of a few rows of many: samples of the state do not see who has trained it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Embedding(4000, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def train(self, at: float) -> None:
        self.optimizer.zero_grad()
        (self.model(torch.randint(0, 4000, (8,))) * at).sum().backward()
        self.optimizer.step()

    def snapshot(self) -> bytes:
        return self.model.weight.detach().numpy().tobytes()


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def settle(keeper: object) -> None:
    """The thread of a keeper in this process has done what it was told so far: it does not clean up
    in a folder that is put back, which it would report, and rightly."""
    assert isinstance(keeper, ThreadKeeper)
    done = threading.Event()
    keeper.queue(done.set)
    assert done.wait(TIMEOUT_S)


def but_cleaning(error: EverstepError) -> None:
    """The policy of who puts a folder back under a keeper process that cleans up in it."""
    if "could not clean up" not in error.message and "is gone" not in error.message:
        raise error


def trained(
    served: Bench, steps: int, at: float, *, dies: bool, **options: Any
) -> tuple[int, dict[int, bytes]]:
    """Resumes, trains so many steps of a history of its own, and is killed, or closed; where it
    began, and its states."""
    world = World()
    ckpt = opened(served.run, world, **{"every": 4, **options})  # type: ignore[arg-type]
    recovery = ckpt.resume()
    assert recovery.exact
    states = {recovery.step: world.snapshot()}
    for step in range(recovery.step + 1, recovery.step + 1 + steps):
        world.train(at)
        ckpt.step()
        states[step] = world.snapshot()
    inspect(ckpt).saver.finish_captures()
    if not dies:
        ckpt.close()
        return recovery.step, states
    if recovery.step + steps:
        server: Any = served.server
        until(lambda: not server.duties.writer.waiting)
    die(ckpt)
    return recovery.step, states


def copied(source: Path, target: Path) -> Path:
    """In place of what is there; again, if the keeper changes one of them meanwhile."""

    def try_to() -> bool:
        try:
            if target.exists():
                shutil.rmtree(target)
            shutil.copytree(source, target)
        except OSError:
            return False
        return True

    until(try_to)
    return target


@pytest.fixture
def backup(served: Bench, tmp_path: Path) -> Path:
    """The folder behind step 4, in timeline 1."""
    _, states = trained(served, 4, 1.0, dies=False)
    assert max(states) == 4
    return copied(served.run, tmp_path / "backup")


@pytest.mark.thinned(9)
@pytest.mark.parametrize("second", [1, 3, 5])
@pytest.mark.parametrize("method", ["logged", "lazy", "gemini"])
def test_a_keeper_that_hears_of_it_lets_go_of_what_it_has(
    method: str, second: int, served: Bench, backup: Path
) -> None:
    first, _ = trained(served, 7, 2.0, dies=True, method=method)
    copied(backup, served.run)
    began, states = trained(served, second, 3.0, dies=True, method=method)
    assert (first, began) == (4, 4)
    found, again = trained(served, 0, 0.0, dies=False, method=method)
    assert found == (4 + second if method == "logged" else 4 * ((4 + second) // 4))
    assert again[found] == states[found]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["logged", "lazy", "gemini"])
def test_what_a_keeper_has_that_did_not_hear_of_it_is_left_out(
    method: str,
    served: Bench,
    backup: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained(served, 7, 2.0, dies=True, method=method)
    copied(backup, served.run)
    alone = KeeperOptions(process=False)
    began, states = trained(served, 6, 3.0, dies=False, method="lazy", keeper=alone)
    assert began == 4
    caplog.clear()
    found, again = trained(served, 0, 0.0, dies=False, method=method)
    assert found == 8
    assert again[found] == states[found]
    assert "another process opened" in caplog.text


@pytest.mark.thinned(4)
@pytest.mark.parametrize("another", [True, False])
@pytest.mark.parametrize("method", ["logged", "lazy"])
def test_a_process_that_lives_is_fenced_off(
    method: str, another: bool, served: Bench, backup: Path
) -> None:
    """Though the timeline that took the run over has the number of its own, or none has yet."""
    world, alone = World(), KeeperOptions(process=False)
    ckpt = opened(served.run, world, every=4, method=method, keeper=alone)  # type: ignore[arg-type]
    assert ckpt.resume().step == 4
    settle(inspect(ckpt).keepers.current)
    copied(backup, served.run)
    if another:
        began, states = trained(served, 4, 3.0, dies=False, method="lazy", keeper=alone)
        assert (began, max(states)) == (4, 8)
    with pytest.raises(
        FencedError, match="was also opened by another" if another else "has disappeared"
    ):
        for _ in range(4):
            world.train(2.0)
            ckpt.step()
            ckpt.wait()
    with contextlib.suppress(FencedError):
        ckpt.close()
    if not another:
        began, states = trained(served, 4, 3.0, dies=False, method="lazy", keeper=alone)
    found, again = trained(served, 0, 0.0, dies=False, method="lazy", keeper=alone)
    assert found == 8
    assert again[found] == states[found]


def test_a_keeper_is_not_replaced_in_the_timeline_of_another(served: Bench, backup: Path) -> None:
    """What the timeline was is known since it was opened, not since its keeper was lost."""
    options: dict[str, Any] = {"method": "lazy", "on_failure": but_cleaning}
    ckpt = opened(served.run, World(), every=4, **options)  # type: ignore[arg-type]
    assert ckpt.resume().step == 4
    ckpt.save().durable.result(TIMEOUT_S)  # its keeper has cleaned up before
    ckpt.wait()
    copied(backup, served.run)
    trained(served, 4, 3.0, dies=False, method="lazy", keeper=KeeperOptions(process=False))
    cut(ckpt)
    with pytest.raises(FencedError, match="was also opened by another process"):
        inspect(ckpt).keepers.replace_if_lost(inspect(ckpt).timeline)
    with contextlib.suppress(FencedError):
        ckpt.close()


def test_who_resumes_what_was_put_back_is_not_fenced_off_by_itself(
    served: Bench, backup: Path
) -> None:
    """It may open the number once more that it had."""
    options: dict[str, Any] = {"method": "lazy", "on_failure": but_cleaning}
    ckpt = opened(served.run, World(), every=4, **options)  # type: ignore[arg-type]
    numbers = [ckpt.resume().timeline]
    ckpt.save().durable.result(TIMEOUT_S)  # its keeper has cleaned up before
    ckpt.wait()
    copied(backup, served.run)
    numbers.append(ckpt.resume().timeline)
    assert numbers[0] == numbers[1]
    cut(ckpt)
    with pytest.warns(RuntimeWarning, match=r"process \d+\) is gone"):
        ckpt.wait()
    ckpt.close()
