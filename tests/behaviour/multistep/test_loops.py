"""Bases over several steps (GoCkpt): bit for bit the state of their step, whatever a loop does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.replay.blocked import Blocked
from everstep.trainer.multistep.partition import Unit, cut_parts
from tests.support.following import Odd, opened, run_steps
from tests.support.matrix import CASES, LOOPS, snapshot_of
from tests.support.matrix import World as MatrixWorld
from tests.support.multistep.rows import ROWS, STEPS, check, matrix, over
from tests.support.serving import Bench, serving

HELD = (0, 1, 3)


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


@pytest.mark.thinned(18)
@pytest.mark.parametrize("overlap", HELD, ids=["gockpt", "gockpt_o", "held for 3"])
@pytest.mark.parametrize("case", ROWS)
def test_every_trap_at_once(case: str, overlap: int, served: Bench) -> None:
    check(served, matrix(case, "all"), over(3, overlap=overlap))


@pytest.mark.thinned(36)
@pytest.mark.parametrize("overlap", HELD, ids=["gockpt", "gockpt_o", "held for 3"])
@pytest.mark.parametrize("loop", [name for name in LOOPS if name != "all"])
def test_each_trap(loop: str, overlap: int, served: Bench) -> None:
    check(served, matrix("AdamW-foreach", loop), over(4, overlap=overlap))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("parts", range(1, 7))
def test_any_number_of_parts(parts: int, served: Bench) -> None:
    method = over(parts, overlap=parts % 3)
    ckpt = check(served, matrix("AdamW-fused", "norm"), method, every=6)
    report = ckpt.stats().multistep
    assert report is not None
    assert report.parts == parts
    assert report.windows == (0 if parts == 1 else 2)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", HELD, ids=["gockpt", "gockpt_o", "held for 3"])
@pytest.mark.parametrize("case", CASES)
def test_every_row_of_the_matrix(case: str, overlap: int, served: Bench) -> None:
    check(served, matrix(case, "all"), over(3, overlap=overlap), late=False)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("overlap", HELD, ids=["gockpt", "gockpt_o", "held for 3"])
def test_parameters_of_all_kinds_and_two_optimizers(overlap: int, served: Bench) -> None:
    """One parameter is shared by both, the rate of one is a tensor that a schedule writes to, and
    one of them updates in every other step only."""
    check(served, Odd, over(4, overlap=overlap))


class Compressed:
    """Training consumes a tenth of each gradient of so many elements."""

    def __init__(self, dense_below: int, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        compressor = everstep.compress.Compressor(
            self.optimizer, ratio=0.1, dense_below=dense_below
        )
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "compressor": compressor,
        }

    def train(self) -> None:
        """One step."""
        self.model(torch.randn(5, 6)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> dict[str, str]:
        """Digest of every part."""
        return snapshot_of(self.state)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("overlap", HELD, ids=["gockpt", "gockpt_o", "held for 3"])
@pytest.mark.parametrize("dense_below", [0, 1000], ids=["all", "the large ones"])
def test_gradients_that_training_consumes_compressed(
    dense_below: int, overlap: int, served: Bench
) -> None:
    method = over(3, overlap=overlap)
    check(served, lambda *, seed: Compressed(dense_below, seed=seed), method)


@pytest.mark.slow
def test_a_resumed_training_goes_on_as_if_nothing_had_been(served: Bench) -> None:
    make = matrix("AdamW-foreach", "all")
    check(served, make, over(3), steps=7)
    world = make(seed=9)
    with opened(served.run, world, method=over(3), every=4) as ckpt:
        begin = ckpt.resume().step
        assert begin == 6
        found = run_steps(ckpt, world, STEPS - begin)
    wanted = make(seed=1)
    for _ in range(STEPS):
        wanted.train()
    assert found[STEPS] == wanted.snapshot()


def test_threads_share_the_work_of_making_it_whole(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the keeper: half of as many as there are cores."""
    seen: list[int] = []

    class Noted(Blocked):
        def __init__(self, *about: Any, threads: int, **options: Any) -> None:
            seen.append(threads)
            super().__init__(*about, threads=threads, **options)

    monkeypatch.setattr("everstep.replay.engine.Blocked", Noted)
    monkeypatch.setattr("everstep.trainer.attach.terms.available_cores", lambda: range(6))
    check(served, matrix("AdamW-fused", "norm"), over(3))
    assert set(seen) == {3}


def test_what_each_base_has_cost_is_told(served: Bench) -> None:
    ckpt = check(served, matrix("AdamW-foreach", "plain"), over(3), steps=14)
    stats = ckpt.stats()
    assert stats.multistep is not None
    bases = stats.multistep.bases
    assert [(base.step, base.parts) for base in bases] == [(6, 3), (10, 3)]  # 14 ended with all
    for base in bases:
        assert base.state_bytes > base.gradient_bytes > 0
        assert base.stall_s == base.begin_s + base.state_wait_s + base.gradients_wait_s
    causes = ("begin_s", "capture"), ("state_wait_s", "gate"), ("gradients_wait_s", "gradients")
    for name, cause in causes:
        assert 0 <= sum(getattr(base, name) for base in bases) <= stats.stall_s[cause]
    # Own work of a part, of the second base: the first one was planned.
    assert stats.multistep.part_s == bases[1].begin_s / 3 > 0
    lazy = opened(served.run.parent / "lazy", MatrixWorld(CASES["AdamW-foreach"], LOOPS["plain"]))
    assert lazy.stats().multistep is None
    lazy.close()


@pytest.mark.parametrize(
    ("sizes", "count", "wanted"),
    [
        ([], 3, [[]]),
        ([5], 3, [[5]]),
        ([1, 1, 1, 1], 2, [[1, 1], [1, 1]]),
        ([9, 1, 1, 1], 2, [[9], [1, 1, 1]]),
        ([1, 1, 9, 1], 3, [[1, 1], [9], [1]]),
        ([0, 0, 0], 3, [[0], [0], [0]]),
        ([2, 2, 2, 2, 2, 2, 2], 3, [[2, 2, 2], [2, 2, 2], [2]]),
    ],
)
def test_parts_are_balanced(sizes: list[int], count: int, wanted: list[list[int]]) -> None:
    units = [Unit("o", str(number), (), size) for number, size in enumerate(sizes)]
    found = cut_parts(units, count)
    assert [[unit.size_bytes for unit in part] for part in found] == wanted
    assert [unit for part in found for unit in part] == units


def test_no_part_is_larger_than_it_must_be() -> None:
    generator = torch.Generator().manual_seed(5)
    for count in range(1, 8):
        sizes = torch.randint(0, 50, (9,), generator=generator).tolist()
        units = [Unit("o", str(number), (), size) for number, size in enumerate(sizes)]
        found = cut_parts(units, count)
        assert len(found) == count
        assert max(sum(u.size_bytes for u in part) for part in found) == _least(sizes, count)


def _least(sizes: list[int], count: int) -> int:
    """By trying all ways."""
    if count == 1:
        return sum(sizes)
    return min(
        max(sum(sizes[:at]), _least(sizes[at:], count - 1))
        for at in range(1, len(sizes) - count + 2)
    )
