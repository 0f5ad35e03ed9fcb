"""Parts of a base over several steps that fill their windows: what is cut, what it costs, and how
it is copied."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import everstep
from everstep.capture.batches import Batch
from everstep.capture.lane import CpuLane, Progress, Transfer
from everstep.cli import app
from everstep.plan.multistep import Pipeline, best_cut
from everstep.seams import Seams
from everstep.trainer.multistep.partition import (
    Unit,
    cut_by_cost,
    cut_by_shares,
    cut_parts,
    modelled_overlap,
    shares_of,
)
from tests.support.following import opened, run_steps, steps_on_disk
from tests.support.multistep.measured import Bench as Steps
from tests.support.multistep.rows import restored
from tests.support.serving import Bench, serving

STATE_BYTES = 14_000_000


def units_of(sizes: Sequence[int]) -> list[Unit]:
    return [Unit("o", str(number), (), size, size // 7) for number, size in enumerate(sizes)]


def steps(copy_steps: float, ratio: float) -> Pipeline:
    return Pipeline(copy_steps, copy_steps * ratio, 1 / 3, 2 / 3)


# --- What is cut ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "shares", "wanted"),
    [
        ([5], [1.0], [[5]]),
        ([1, 1, 1, 1], [0.5, 0.25, 0.25], [[1, 1], [1], [1]]),
        ([1, 1, 1, 1], [0.6, 0.3, 0.1], [[1, 1], [1], [1]]),
        ([1, 1, 1, 1], [1.0, 0.0, 0.0], [[1, 1], [1], [1]]),
        ([1, 1, 1, 1], [0.0, 0.0, 1.0], [[1], [1], [1, 1]]),
        ([1, 1, 9, 1], [0.5, 0.5], [[1, 1], [9, 1]]),
        ([1, 1, 9, 1], [0.7, 0.3], [[1, 1, 9], [1]]),
        ([0, 0, 0], [0.5, 0.5], [[0], [0, 0]]),
        ([1, 1], [0.25] * 4, [[1], [1]]),
    ],
)
def test_cut_as_close_as_can_be(
    sizes: list[int], shares: list[float], wanted: list[list[int]]
) -> None:
    found = cut_by_shares(units_of(sizes), shares)
    assert [[unit.size_bytes for unit in part] for part in found] == wanted


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    st.integers(1, 24),
    st.floats(0.1, 12),
    st.floats(0.02, 0.9),
    st.sampled_from([None, 1]),
)
def test_every_parameter_is_in_one_part_and_no_cut_is_worse_than_equal_parts(
    sizes: list[int], parts: int, copy_steps: float, ratio: float, held: int | None
) -> None:
    units, given_steps = units_of(sizes), steps(copy_steps, ratio)
    cut = cut_by_cost(units, given_steps, parts, held)
    assert [unit for part in cut for unit in part] == units
    assert all(cut)
    assert len(cut) == min(parts, len(units))
    equal = modelled_overlap(cut_parts(units, parts), given_steps, held)
    assert modelled_overlap(cut, given_steps, held).stall_s <= equal.stall_s + 1e-9


def test_many_units_come_close_to_what_is_best() -> None:
    units = units_of([STATE_BYTES // 960] * 960)
    for copy_steps, ratio in ((4, 2 / 14), (8, 2 / 14), (4, 4 / 12), (8, 4 / 12)):
        for held in (None, 1):
            for parts in range(1, 25):
                found = modelled_overlap(
                    cut_by_cost(units, steps(copy_steps, ratio), parts, held),
                    steps(copy_steps, ratio),
                    held,
                )
                best = best_cut(steps(copy_steps, ratio), parts, held)
                if min(best.shares) > 2 / 960:  # a part has one unit at least
                    assert found.stall_s == pytest.approx(best.overlap.stall_s, abs=0.08)


def test_equal_parts_where_there_is_no_memory_for_more_gradients() -> None:
    units, given_steps = units_of([10] * 100), steps(4, 0.1)
    filling = modelled_overlap(cut_by_cost(units, given_steps, 5, 1), given_steps, 1)
    equal = modelled_overlap(cut_parts(units, 5), given_steps, 1)
    assert filling.gradients_s > equal.gradients_s
    assert cut_by_cost(units, given_steps, 5, 1, filling.gradients_s) != cut_parts(units, 5)
    assert cut_by_cost(units, given_steps, 5, 1, equal.gradients_s) == cut_parts(units, 5)


# --- What is chosen ---------------------------------------------------------------------


def cut_by(bench: Steps, now: Any = None, *, arena: int = 1 << 40, sizes: Any = None) -> Any:
    units = units_of(sizes or [STATE_BYTES // 700] * 700)
    return bench.choice.cut(units, STATE_BYTES, arena, waits=False, now=now)


@pytest.mark.parametrize("parts", [2, 4, 5, 7, 12])
def test_the_command_tells_what_the_engine_plans(parts: int) -> None:
    """Steps of 1 s, a copy of 4."""
    cut = cut_by(Steps(link=STATE_BYTES / 4, parts=parts))
    found = modelled_overlap(cut, Pipeline(4.0, 4 / 7, 1.0, 0.0), 1)
    words = f"--state-bytes 14MB --grad-bytes 2MB --link {STATE_BYTES // 4}B/s --step-ms 1000"
    result = CliRunner().invoke(app, ["plan", "multistep", *words.split(), "--json"])
    told = json.loads(result.stdout)["held"][parts - 1]
    assert len(cut) == parts
    assert found.stall_s == pytest.approx(told["stall_s"], abs=0.02)
    assert found.gradients_s == pytest.approx(told["gradients_s"], abs=0.02)


def test_parts_are_equal_until_the_link_is_known() -> None:
    assert shares_of(cut_by(Steps(parts=5))) == pytest.approx([0.2] * 5)
    assert shares_of(cut_by(Steps(parts=5, link=STATE_BYTES / 4)))[0] == pytest.approx(0.25, 0.01)
    assert len(cut_by(Steps())) == 1


def test_one_part_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A user of GoCkpt learns that bases are lazy: here a copy takes a tenth of a step."""
    bench = Steps(link=10 * STATE_BYTES)
    assert [len(cut_by(bench)) for _ in range(3)] == [1, 1, 1]
    assert capsys.readouterr().err.count('as with method="lazy"') == 1
    assert len(cut_by(Steps(link=STATE_BYTES / 4))) == 6
    assert len(cut_by(Steps())) == 1
    assert not capsys.readouterr().err


def test_a_cut_is_kept_unless_another_is_worth_it() -> None:
    bench = Steps(link=STATE_BYTES / 4)
    now = cut_by(bench)
    assert len(now) == 6
    assert cut_by(bench, now) is now
    assert cut_by(Steps(link=STATE_BYTES / 3.98), now) is now
    assert len(cut_by(Steps(link=STATE_BYTES / 8), now)) > 12
    assert len(cut_by(Steps(link=STATE_BYTES / 4, every=3), now)) == 3
    assert len(cut_by(bench, now, arena=STATE_BYTES + STATE_BYTES // 7)) < 6
    assert cut_by(Steps(parts=5), now) is not now
    equal = cut_by(Steps(parts=5))
    assert cut_by(Steps(parts=5), equal) is equal


@pytest.mark.parametrize(
    ("link", "wanted"),
    [(None, 4 << 20), (25e9, 4 << 20), (0.12e9, 65536), (0.5e9, 262144), (1e6, 65536)],
)
def test_a_chunk_is_what_the_link_copies_in_a_millisecond(link: float | None, wanted: int) -> None:
    assert Steps(link=link).choice.chunk_bytes == wanted
    assert Steps(link=link, chunk_bytes=1 << 20).choice.chunk_bytes == 1 << 20


# --- How it is copied -------------------------------------------------------------------


class Recording(CpuLane):
    """Remembers what was submitted."""

    made: list[Recording]

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[int] = []
        self.lock = threading.Lock()
        Recording.made.append(self)

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        with self.lock:
            self.largest.append(max((batch.end - batch.begin for batch in batches), default=0))
        return super().submit(batches, block, progress)


class Wide:
    """Parameters of several chunks, one of them not in row-major order."""

    def __init__(self, *, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 32), nn.Linear(32, 3)
        )
        weight = self.model[2].weight
        weight.data = weight.data.t().contiguous().t()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        """One step."""
        self.model(torch.randn(5, 40)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> list[bytes]:
        """All bits of the state."""
        held = [*self.model.parameters()]
        held += [t for some in self.optimizer.state.values() for t in some.values()]
        return [t.detach().contiguous().numpy().tobytes() for t in [*held, torch.get_rng_state()]]


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


@pytest.mark.parametrize("overlap", [False, True], ids=["gockpt", "gockpt_o"])
def test_parts_and_gradients_are_copied_in_chunks(overlap: bool, served: Bench) -> None:
    """Bit for bit the state of their steps."""
    Recording.made = []
    chunk_bytes = 4096
    method = everstep.Method(
        base="multistep", parts=3, overlap_forward=overlap, chunk_bytes=chunk_bytes
    )
    world = Wide()
    ckpt = opened(served.run, world, method=method, every=4, seams=Seams(lane=Recording))
    ckpt.resume()
    states = run_steps(ckpt, world, 12)
    ckpt.close()
    (lane,) = Recording.made
    assert len(lane.largest) > 8
    assert 0 < max(lane.largest) <= chunk_bytes
    for step in steps_on_disk(served.run):
        assert restored(served.run, Wide(seed=9), step) == states[step], step
