"""Version tags of dicts: what they notice, and that surveys need none."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from everstep.state.survey import guards
from everstep.state.survey.guards import _DictGuard, dict_versions, keep_order
from everstep.state.training_state import State
from tests.support.state_changes import CHANGES, Values, outcome, world

needs_tags = pytest.mark.skipif(guards._tag is None, reason="dicts have no version tags here")


@needs_tags
def test_a_tag_stays_until_something_changes() -> None:
    module = nn.Linear(2, 2)
    dicts = [module.__dict__, module._parameters, defaultdict(dict)]
    before = dict_versions(dicts)
    with torch.no_grad():
        module(torch.ones(1, 2))
        module.weight.add_(1)
    assert dict_versions(dicts) == before
    module.weight = nn.Parameter(torch.zeros(2, 2))
    after = dict_versions(dicts)
    assert before is not None
    assert after is not None
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True]


@pytest.mark.parametrize(
    "tag",
    [
        lambda held: 1,  # never moves
        lambda held: len(held),  # only with the number of keys
        lambda held: id(object()) + len(held) + _count(),  # always moves
        lambda held: held.nothing,
    ],
    ids=["never", "length", "always", "none"],
)
def test_a_function_that_reads_something_else_is_not_used(tag: Callable[[Any], int]) -> None:
    def read(held: Any) -> int:
        try:
            return tag(held)
        except AttributeError as error:
            raise TypeError("no dict") from error

    assert not guards._detects_changes(read)


_counted = iter(range(1 << 30))


def _count() -> int:
    return next(_counted)


def test_an_order_that_changes_without_a_tag_is_looked_at() -> None:
    ordered: OrderedDict[str, object] = OrderedDict(a=1, b=2)
    assert not keep_order([{}, ordered])
    assert keep_order([{}, defaultdict(list)])
    containers = _DictGuard([ordered])
    assert containers.hold()
    assert containers.hold()
    ordered.move_to_end("a")
    assert not containers.hold()


def test_containers_that_were_changed_and_put_back_hold_again() -> None:
    held: dict[str, object] = {"a": object(), "b": object()}
    containers = _DictGuard([held, {}])
    assert containers.hold()
    kept = held.pop("b")
    assert not containers.hold()
    assert not containers.hold()
    held["b"] = kept
    assert containers.hold()
    held["b"] = object()
    assert not containers.hold()


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize(
    "fill",
    [
        lambda module: module.register_parameter("a", nn.Parameter(torch.ones(2))),
        lambda module: module.register_buffer("a", torch.ones(2)),
        lambda module: module.add_module("a", nn.Linear(2, 2)),
    ],
    ids=["parameter", "buffer", "module"],
)
def test_what_was_empty_is_looked_at(
    fill: Callable[[nn.Module], object], tagged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tagged:
        monkeypatch.setattr(guards, "_tag", None)
    empty = nn.Module()
    values: Values = {"model": nn.Sequential(empty, nn.Linear(2, 2))}
    state = State(values)
    for _ in range(2):
        assert len(state.survey().tensors) == 3  # with torch's generator
    fill(empty)
    assert len(state.survey().tensors) > 3
    assert outcome(state.survey) == outcome(lambda: State(values).survey())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("change", sorted(CHANGES)[::3])
def test_without_tags_a_survey_finds_the_same(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round is what all tests of surveys look at."""
    monkeypatch.setattr(guards, "_tag", None)
    values: Values = world()
    state = State(values)
    state.survey()
    state.survey()
    CHANGES[change](values)
    assert outcome(state.survey) == outcome(lambda: State(values).survey())
