"""Generators' states in a survey: of the moment, read into memory that stays where it is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from everstep.errors import UnsupportedStateError
from everstep.state.layout.entries import OBJECT_PREFIX, RNG_SECTION
from everstep.state.survey import Survey
from everstep.state.training_state import State
from everstep.state.values.generators import capture_rng, restore_rng
from everstep.state.values.objects import decode
from everstep.state.values.tree import join

NAME = f"{RNG_SECTION}/torch"


@pytest.fixture(autouse=True)
def as_they_were() -> Iterator[None]:
    """All generators back to where they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    generator: Any = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(generator)
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def drawn() -> list[float]:
    return [random.gauss(0, 1), random.random(), float(np.random.randn()), float(torch.rand(1))]


def restore(survey: Survey) -> None:
    """What a base of this survey would bring back."""
    tree: Any = decode(survey.objects()[OBJECT_PREFIX + RNG_SECTION])
    tensors = {name: tensor.clone() for name, tensor in survey.tensors.items()}
    assert restore_rng(join(tree, tensors)) == []  # type: ignore[arg-type]


def test_a_survey_has_the_states_of_its_moment() -> None:
    """With numbers that are kept for the next call (two normal ones are drawn at once), too."""
    state = State({"a": 1})
    tensor = state.survey().tensors[NAME]
    for _ in range(5):
        drawn()
        survey = state.survey()
        assert survey.tensors[NAME] is tensor, "nothing has to be planned anew"
        wanted = drawn()
        assert not torch.equal(tensor, torch.get_rng_state())
        restore(survey)
        assert drawn() == wanted


def test_encoded_later_they_are_what_they_were() -> None:
    state = State({"a": 1})
    survey = state.survey()
    wanted = state.survey().objects()
    drawn()
    assert survey.objects() == wanted


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_makes_no_difference(first: bool) -> None:
    with torch.inference_mode(first):
        state = State({"a": 1})
    drawn()
    with torch.inference_mode(not first):
        survey = state.survey()
    wanted = drawn()
    restore(survey)
    assert drawn() == wanted


def test_another_generator_of_numpy() -> None:
    state = State({"a": 1})
    np.random.set_bit_generator(np.random.PCG64(7))
    survey = state.survey()
    wanted = drawn()
    restore(survey)
    assert drawn() == wanted


def test_what_cannot_be_stored_is_refused_at_once() -> None:
    state = State({"a": 1})
    random.setstate((*random.getstate()[:2], object()))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedStateError, match="gauss"):
        state.survey()


def test_a_device_is_in_use_before_its_generator_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch only notes down what is asked of CUDA before that, and seeds, those of long ago too,
    last."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: calls.append(device))
    saved = capture_rng()
    states = [torch.zeros(16, dtype=torch.uint8)] * 2
    assert restore_rng({**saved, "cuda": states}) == [
        "RNG of 1 CUDA device(s) that this machine does not have"
    ]
    assert calls == ["init", 0]
    calls.clear()
    assert restore_rng(saved) == []
    assert calls == [], "a state of the CPU alone brings no device into use"
