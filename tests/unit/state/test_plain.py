"""What is found to be plain at a glance is what a walk through it has nothing against."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everstep.state.values.objects import _Walker, decode, encode, is_fixed, is_plain
from everstep.state.values.tree import split


class Text(str):
    """A text that would not come back as what it was."""


class Number(float):
    """Likewise."""


LEAVES = (
    st.sampled_from([None, True, 1 << 80, -0.0, float("nan"), "a", "ü", "\ud800", b"b"])
    | st.sampled_from([Text("t"), Number(1), object(), np.ones(2), torch.ones(1), {1}, len])
    | st.integers()
    | st.text(max_size=3)
)
KEYS = st.sampled_from(["a", "b", "ü", "\ud800", Text("c"), 1, None, (1, 2)])
VALUES = st.recursive(
    LEAVES,
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(KEYS, parts, max_size=3)
        | st.dictionaries(KEYS, parts, max_size=3).map(OrderedDict)
    ),
    max_leaves=6,
)


def walked(value: Any) -> list[tuple[str, str]]:
    walker = _Walker()
    walker.walk(value, "x", "", 0)
    return walker.found


@given(VALUES)
def test_what_is_plain_can_be_stored(value: Any) -> None:
    if is_plain(value):
        assert walked(value) == []
        assert encode(decode(encode(value))) == encode(value)


@given(st.dictionaries(KEYS, VALUES, max_size=3))
def test_what_is_fixed_needs_no_copy(value: dict[Any, Any]) -> None:
    if is_fixed(value):
        tensors: dict[str, torch.Tensor] = {}
        assert encode(split(value, "x", tensors)) == encode(value)
        assert tensors == {}
        assert walked(value) == []
        assert not any(isinstance(part, (dict, list)) for part in value.values())


def test_what_training_has_mostly_is_found_at_a_glance() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    assert is_fixed(options)
    assert is_plain({"base": [scheduler.state_dict()["base_lrs"]], "text": "a" * 100})


@pytest.mark.parametrize(
    "value",
    [
        {"a": Text("b")},
        {Text("a"): 1},
        {1: 2},
        [Number(1)],
        "ü",
        "a" * (2 << 20),
        np.float64(1),
        OrderedDict(a=1),
        [[[[[[[[[[1]]]]]]]]]],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_left_to_a_walk(value: Any) -> None:
    assert not is_plain(value)


@pytest.mark.parametrize("part", [[1], {"b": 1}, "text", ([1],), torch.ones(1), Number(1)])
def test_what_may_change_or_is_more_is_not_fixed(part: Any) -> None:
    assert is_fixed({"a": 1, "b": (1, None)})
    assert not is_fixed({"a": part})


def test_a_list_that_contains_itself_ends() -> None:
    value: list[Any] = [1]
    value += [value] * 100
    assert not is_plain(value)
