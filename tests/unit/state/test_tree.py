"""Nested state taken apart and put together again."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import UnsupportedStateError
from everstep.state.values.objects import MAX_DEPTH, TensorRef
from everstep.state.values.tree import join, references, split
from tests.support.world import assert_same

leaves = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.builds(Counter, st.text(max_size=4)),
    st.builds(lambda items: deque(items, maxlen=9), st.lists(st.integers(), max_size=3)),
    st.integers(0, 3).map(lambda n: torch.arange(n, dtype=torch.int16)),
)
keys = st.one_of(st.text(max_size=3), st.integers(-2, 3), st.booleans(), st.none())
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    nested = type(tree) in (dict, OrderedDict, list, tuple)
    return [tensor for part in parts for tensor in tensors_in(part)] if nested else []


@given(tree=trees)
def test_join_is_the_inverse_of_split(tree: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    apart = split(tree, "part", tensors)
    assert list(references(apart)) == list(tensors)
    assert_same(list(tensors.values()), tensors_in(tree))
    again = join(apart, tensors)
    assert_same(again, tree)
    assert repr(again) == repr(tree)  # types of keys and containers, too


def test_a_counter_is_not_counted_again() -> None:
    tree = {"milestones": Counter([30, 60, 60])}
    assert join(split(tree, "s", {}), {}) == tree


def test_names_are_unique_and_readable() -> None:
    tensors: dict[str, torch.Tensor] = {}
    one = torch.ones(1)
    split({0: one, "0": one, "a/b": one, "~": one, "a": {"b": one, "c": [one, one]}}, "s", tensors)
    names = ["s/0", "s/0~2", "s/a~1b", "s/~0", "s/a/b", "s/a/c/0", "s/a/c/1"]
    assert list(tensors) == names


def test_tensors_are_detached_and_containers_copied() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    tree = {"p": [parameter]}
    tensors: dict[str, torch.Tensor] = {}
    apart = split(tree, "s", tensors)
    assert not tensors["s/p/0"].requires_grad
    assert tensors["s/p/0"].data_ptr() == parameter.data_ptr()
    assert tree["p"][0] is parameter
    assert apart == {"p": [TensorRef("s/p/0")]}


def test_what_contains_itself_is_refused_by_name() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedStateError, match="contains itself") as error:
        split({"a": endless}, "part", {})
    assert error.value.leaves[0][0].startswith("part/a/0/0")


def test_as_deep_as_allowed_and_one_deeper() -> None:
    deep: Any = torch.ones(1)
    for _ in range(MAX_DEPTH):
        deep = [deep]
    tensors: dict[str, torch.Tensor] = {}
    assert_same(join(split(deep, "s", tensors), tensors), deep)
    with pytest.raises(UnsupportedStateError):
        split([deep], "s", {})


def test_a_reference_to_nothing() -> None:
    with pytest.raises(KeyError):
        join({"a": TensorRef("gone")}, {})
