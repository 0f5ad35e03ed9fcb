"""What a state consists of, and what is refused when a Checkpointer is made."""

from __future__ import annotations

import enum
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep
from everstep.errors import OptionError, UnsupportedStateError
from everstep.state import survey as survey_module
from everstep.state.layout.entries import OBJECT_PREFIX, RNG_SECTION
from everstep.state.training_state import State

Pair = namedtuple("Pair", "a b")


class Colour(enum.Enum):
    RED = 1


def test_entries_of_a_training() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    state = State({"model": model, "optimizer": optimizer, "note": {"w": torch.ones(2)}})
    survey = state.survey()
    shape = survey.shape
    names = [entry.name for entry in shape.entries]
    assert list(survey.tensors) == list(shape.owners) == names
    assert names[:2] == ["model/0.weight", "model/0.bias"]
    assert "model/1.running_mean" in names
    assert "optimizer/state/model.0.weight/exp_avg" in names
    assert "note/w" in names
    assert f"{RNG_SECTION}/torch" in names
    assert {entry.lsn for entry in shape.entries} == {0}
    sections = ["model", "optimizer", "note", RNG_SECTION]
    objects = survey.objects()
    assert list(objects) == list(shape.objects_bytes) == [OBJECT_PREFIX + key for key in sections]
    assert shape.objects_bytes == {name: len(data) for name, data in objects.items()}
    tensors = sum(t.numel() * t.element_size() for t in survey.tensors.values())
    assert shape.size_bytes == tensors + sum(map(len, objects.values()))


def test_a_survey_refers_to_live_tensors_and_copies_objects() -> None:
    values: dict[str, Any] = {"t": torch.zeros(2), "d": {"n": 1}}
    survey = State(values).survey()
    assert survey.tensors["t"].data_ptr() == values["t"].data_ptr()
    before = State(values).survey().objects()
    values["d"]["n"] = 2
    assert survey.objects() == before


def test_ties_are_found_by_memory() -> None:
    shared = torch.randn(3, 2)
    values = {"a": shared, "b": [shared, shared.t(), shared[1:], shared.view(6)], "c": shared}
    assert dict(State(values).survey().shape.aliases) == {"b/0": "a", "c": "a"}


@pytest.mark.parametrize("make", [lambda: torch.empty(0), lambda: torch.empty(2, 0)])
def test_empty_tensors_are_never_ties(make: Any) -> None:
    assert not State({"a": make(), "b": make()}).survey().shape.aliases


def unstorable() -> dict[str, Any]:
    deep: Any = 1
    for _ in range(150):
        deep = [deep]
    endless: dict[str, Any] = {}
    endless["self"] = endless
    return {
        "function": lambda: None,
        "partial": partial(print, 1),
        "class": nn.Linear,
        "object": object(),
        "namedtuple": Pair(1, 2),
        "enum": Colour.RED,
        "iterator": iter([1]),
        "bit generator": np.random.PCG64(),
        "path": Path("/x"),
        "set of functions": {1, len},
        "surrogate": "\ud800",
        "subclass": type("MyInt", (int,), {})(3),
        "tensor in a set": {torch.ones(1)},
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "deep": deep,
        "endless": endless,
    }


def test_everything_that_cannot_be_stored_is_listed_at_once(run_folder: Path) -> None:
    kinds = {k: v for k, v in unstorable().items() if k not in ("deep", "endless")}
    state = {
        "data": {"good": 1, **kinds},
        "module": nn.Sequential(nn.Linear(1, 1), nn.LazyLinear(2)),
    }
    with pytest.raises(UnsupportedStateError) as error:
        everstep.Checkpointer(run_folder, state)
    named = [name for name, _ in error.value.leaves]
    for kind in kinds:
        assert any(name.startswith(f"data/{kind}") for name in named), kind
    assert {"module/1.weight", "module/1.bias"} <= set(named)
    assert all(name in str(error.value) for name in named)
    assert "data/good" not in named
    assert not run_folder.exists()


@pytest.mark.parametrize("kind", unstorable())
def test_each_is_named_with_a_reason(kind: str) -> None:
    with pytest.raises(UnsupportedStateError) as error:
        State({"data": {"x": unstorable()[kind]}})
    ((name, reason),) = error.value.leaves
    assert name.startswith("data/x")
    assert len(reason) > 10


def test_objects_too_large_to_be_loaded_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"small": 1, "large": 2}
    state = State(values)
    monkeypatch.setattr(survey_module, "OBJECT_BYTES_MAX", 2000)
    with pytest.raises(UnsupportedStateError) as error:
        State({"small": 1, "large": "x" * 3000})
    assert "large" in [name for name, _ in error.value.leaves]
    assert "small" not in [name for name, _ in error.value.leaves]
    values["large"] = "x" * 3000
    with pytest.raises(UnsupportedStateError, match="large: objects of more than"):
        state.survey().objects()


@pytest.mark.parametrize("state", [None, [1], nn.Linear(1, 1), ("a", 1), {1: 2}, {"": 1}])
def test_a_state_that_is_no_dict_of_named_values(state: Any) -> None:
    with pytest.raises(OptionError):
        State(state)


@pytest.mark.parametrize("name", ["a/b", "everstep", "__metadata__", "/"])
def test_names_that_are_reserved(name: str, run_folder: Path) -> None:
    with pytest.raises(OptionError, match="cannot be a key of the state dict"):
        everstep.Checkpointer(run_folder, {name: 1})


@pytest.mark.parametrize("name", ["ü", "a.b", "~", "a b", "everstep2", "0", "state_dict", "\n"])
def test_other_names_are_fine(name: str) -> None:
    assert State({name: torch.ones(1)}).survey().shape.entries[0].name == name


def test_an_object_whose_state_dict_is_no_optimizers() -> None:
    class Strange(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"nothing": 1}

    with pytest.raises(UnsupportedStateError, match=r"o: Strange\.state_dict"):
        State({"o": Strange([torch.nn.Parameter(torch.ones(1))], lr=0.1)})


def test_the_generators_are_restored_last() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = State({"d": 1, "o": optimizer, "m": model}).restore_order()
    assert order == ["m", "o", "d", RNG_SECTION]
