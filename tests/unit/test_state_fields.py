"""What torch keeps of tensors, read as memory: what it notices, and that nothing needs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from everstep.capture.versions import Versions
from everstep.state import fields, proofs
from everstep.state.fields import Fields
from everstep.state.image import State
from everstep.state.proofs import Watch
from tests.unit.state_changes import CHANGES, Values, world

needs_places = pytest.mark.skipif(fields._places is None, reason="not known where torch keeps it")


def _refuse(*_: object) -> NoReturn:
    raise AssertionError("a tensor was asked")


def test_this_torch_is_known() -> None:
    """Where it is not, surveys take longer, and everything else is as it was."""
    assert fields._places is not None


@needs_places
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_training_leaves_them(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so no tensor is asked again, under a default device neither."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Conv1d(4, 2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)

    def step() -> None:
        model[0](torch.randn(2, 3)).sum().backward()
        model[2](torch.randn(2, 4, 1)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    watch = Watch(tensors, [tensor.detach() for tensor in tensors])
    assert watch.holds()
    monkeypatch.setattr(proofs, "_is_set_to", _refuse)
    monkeypatch.setattr(proofs, "_data_ptr", _refuse)
    step()
    with torch.device("meta"):
        assert watch.holds()
    with torch.inference_mode():
        assert watch.holds()


MOVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "memory": lambda t: setattr(t, "data", t.data.clone()),
    "freed": lambda t: t.untyped_storage().resize_(0),
    "longer": lambda t: t.untyped_storage().resize_(1 << 22),
    "offset": lambda t: setattr(t, "data", t.data[..., 1:]),
    "shape": lambda t: setattr(t, "data", t.data.flatten()),
    "last size": lambda t: setattr(t, "data", t.data[..., :1]),
    "strides": lambda t: setattr(t, "data", t.data.transpose(-1, -2)),
    "one stride": lambda t: setattr(t, "data", t.data.as_strided(t.shape, [0, *t.stride()[1:]])),
    "integers": lambda t: setattr(t, "data", t.data.view(torch.int32)),
    "conjugated": lambda t: setattr(t, "data", t.data.to(torch.complex64).conj()),
    "swapped": lambda t: torch.utils.swap_tensors(t, torch.ones_like(t)),
    "class": lambda t: setattr(t, "__class__", type("Mine", (torch.Tensor,), {})),
}


@needs_places
@pytest.mark.parametrize("dims", [2, 3, 5, 6])
@pytest.mark.parametrize("move", MOVES)
def test_what_moves_is_noticed(move: str, dims: int) -> None:
    """What torch keeps elsewhere, of tensors of many dimensions, is not read."""
    tensors = [torch.ones([2] * (dims - 2) + [3, 4]) for _ in range(3)]
    kept = [tensor.detach() for tensor in tensors]
    found, watch = Fields.of(tensors), Watch(tensors, kept)
    assert (found is None) == (dims > 5)
    assert watch.holds()
    assert watch.holds()
    assert found is None or found.hold()
    MOVES[move](tensors[1])
    assert found is None or not found.hold()
    assert not watch.holds()


@needs_places
@pytest.mark.parametrize(
    "wrong",
    [
        {"kept": ()},
        {"storage": ()},
        {"inner": 0},
        {"version": 0},
        {"kept": (8,)},  # how many refer to it
        {"storage": (0,)},
    ],
    ids=["nothing kept", "no storage", "another object", "no version", "count", "kind of storage"],
)
def test_what_notices_less_is_not_used(wrong: dict[str, Any]) -> None:
    places: Any = fields._places
    assert fields._notices(places)
    assert not fields._notices(places._replace(**wrong))


@needs_places
def test_each_place_is_needed() -> None:
    """Sizes and strides of the third to fifth dimension apart, which move with others."""
    places: Any = fields._places
    unnoticed = [
        offset
        for offset in places.kept
        if not fields._notices(places._replace(kept=tuple(sorted({*places.kept} - {offset}))))
    ]
    assert unnoticed, "at least the storage, and what says that elements are conjugated"


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_survey_finds_the_same_without(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round is what all tests of surveys look at."""
    monkeypatch.setattr(fields, "_places", None)
    values: Values = world()
    state = State(values)
    state.survey()
    state.survey()
    CHANGES[change](values)
    assert _outcome(state.survey) == _outcome(lambda: State(values).survey())


def _outcome(survey: Callable[[], Any]) -> Any:
    try:
        found = survey()
    except Exception as error:  # of a hook, for example
        return type(error), getattr(error, "leaves", None)
    return found.shape.entries, found.shape.aliases, found.objects()


@pytest.mark.parametrize("known", [True, False], ids=["read", "asked"])
def test_versions_are_those_that_tensors_tell(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        monkeypatch.setattr(fields, "_places", None)
    tensors = {"a": torch.ones(3), "b": nn.Parameter(torch.ones(2)), "c": torch.zeros(())}
    versions = Versions(tensors)
    assert (versions._read is not None) == (known and fields._places is not None)
    for number in range(300):
        before = versions.now()
        assert before == [tensor._version for tensor in tensors.values()]
        assert versions.moved(before) is None
        name = "abc"[number % 3]
        with torch.no_grad():
            tensors[name].detach().add_(1)  # a view
        assert versions.moved(before) == name


def test_versions_of_nothing() -> None:
    versions = Versions({})
    assert versions.moved(versions.now()) is None


MODES = ["with torch.inference_mode()", "with torch.no_grad()", "with torch.device('meta')"]


@pytest.mark.parametrize("mode", MODES, ids=["inference", "no grad", "default device"])
def test_the_mode_of_the_first_import_does_not_matter(mode: str) -> None:
    code = f"import torch\n{mode}:\n    from everstep.state import fields\nprint(fields._places)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(fields._places)
