"""Canonical JSON is what the standard library gives, byte for byte."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.format.records import canonical, rows_of

reals = st.floats(allow_nan=False, allow_infinity=False)
plain = st.none() | st.booleans() | st.integers() | reals | st.text()
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)


def oracle(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, indent=1, allow_nan=False).encode("ascii") + b"\n"


@given(st.dictionaries(st.text(), values, min_size=1, max_size=6))
def test_the_bytes_are_those_of_the_standard_library(fields: dict[str, Any]) -> None:
    assert canonical(rows_of(fields)) == oracle(fields)


@pytest.mark.parametrize(
    "value",
    [[], {}, (), "", 0, -0.0, 1e300, "\ud800", '\x7f\u2028\\"', [[], [{}]], {"": {"a": []}}, True],
    ids=repr,
)
def test_corners(value: Any) -> None:
    assert canonical(rows_of({"v": value})) == oracle({"v": value})


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf], {"a": math.nan}], ids=repr)
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        rows_of({"v": value})


@pytest.mark.parametrize("value", [object(), {1, 2}, {1: 2}, b"a"], ids=["object", "set", "1", "b"])
def test_what_is_no_json_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        rows_of({"v": value})
