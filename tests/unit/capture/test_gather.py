"""Elements that are read in one go are those that the views show, wherever they lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everstep.capture.batches import plan_batches, run_batch
from everstep.capture.spot_check import SpotCheck
from everstep.seams.memory import Gather
from everstep.state.layout.shards import plan_shards
from everstep.state.values.tensors import tensor_entry


@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "i8"])
def test_it_reads_what_the_views_show_now(kind: str) -> None:
    one = np.arange(60, dtype=kind).reshape(3, 4, 5)
    other = np.arange(100, 107, dtype=kind)
    views = [one[:, 1:3, ::2], other[::3], one[0], one[2, 3, 4:], other[:0], one[::-1, 0, 0]]
    gather = Gather(views)
    for _ in range(2):
        expected = np.concatenate([view.ravel() for view in views])
        assert gather.take().dtype == expected.dtype
        assert gather.take().tolist() == expected.tolist()
        one += 1
        other[:] = other[::-1].copy()


def test_what_was_read_stays_as_it_was() -> None:
    values = np.arange(20, dtype=np.int32)
    taken = Gather([values[::5]]).take()
    values[:] = -1
    assert taken.tolist() == [0, 5, 10, 15]


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_elements_may_begin_anywhere(offset: int) -> None:
    raw = np.arange(250, dtype=np.uint8)
    odd = np.frombuffer(raw.data[offset : offset + 200], np.int32)[::7]
    even = np.arange(9, dtype=np.int32)[::4]
    assert Gather([odd, even]).take().tolist() == [*odd.tolist(), *even.tolist()]


def test_nothing_is_read_where_there_is_nothing() -> None:
    assert Gather([]).take().size == 0
    assert Gather([np.empty(0, np.int64)]).take().size == 0


def test_a_spot_check_reads_tensors_that_begin_at_an_odd_address() -> None:
    raw = np.arange(250, dtype=np.uint8)
    odd = torch.frombuffer(raw.data[1:201], dtype=torch.int32)
    live = {"even": torch.arange(40, dtype=torch.int32), "odd": odd}
    (layout,) = plan_shards([tensor_entry(name, tensor) for name, tensor in live.items()])
    block = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for batch in plan_batches(layout, live, live.keys()):
        run_batch(batch, block)
    check = SpotCheck([(layout, 0)], live, live.keys())
    assert check.differing(check.take(), block) is None
    odd.add_(1)
    assert check.differing(check.take(), block) == "odd"
