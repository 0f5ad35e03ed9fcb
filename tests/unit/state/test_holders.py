"""Holders of an object are found without touching what other threads are making."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import nn

from everstep.state.values.tree import find_referrers


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held


class Around(Holder):
    pass


def test_holders_by_attribute_and_in_lists() -> None:
    held = nn.Linear(1, 1)
    direct, listed, other = Holder(held), Around([held]), Holder(nn.Linear(1, 1))
    found = {id(one) for one in find_referrers([held], Holder, depth=3)}
    assert found == {id(direct), id(listed)}
    assert [id(one) for one in find_referrers([held], Around, depth=3)] == [id(listed)]
    assert find_referrers([other.held], Around, depth=3) == []


def test_a_module_is_found_through_the_dict_of_its_modules() -> None:
    inner = nn.Linear(1, 1)
    outer = nn.Sequential(inner)
    assert [id(one) for one in find_referrers([inner], nn.Module, depth=3)] == [id(outer)]


def test_a_tuple_that_another_thread_fills_is_left_alone() -> None:
    """With gc.get_objects() the tuple would have a second owner while it grows: SystemError."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    begun, go_on = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def items() -> Iterator[int]:
        yield from range(100)
        begun.set()
        go_on.wait(30)
        yield from range(10_000)

    def fill() -> None:
        try:
            assert len(tuple(items())) == 10_100
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    assert begun.wait(30)
    kept = find_referrers([optimizer], torch.optim.lr_scheduler.LRScheduler, depth=2)
    go_on.set()
    thread.join(30)
    assert not failed
    assert kept == []
