"""Plain data: read from the user's dict at each save, put back into it on resume."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep import LogOptions
from everstep.errors import MismatchError, StateError
from tests.support.oracle import save_and_resume
from tests.support.world import assert_same, opened

DATA: dict[str, Any] = {
    "scalars": [None, True, -1, 2**63, -(2**127), 1.5, float("inf"), 1 - 2j, "täxt", b"\0\xff"],
    "nested": {"a": [1, (2, {"b": ()})], 3: {(): [], (1, "x"): 4}, None: 5, 2.5: 6},
    "containers": {
        "set": {1, "a"},
        "frozen": frozenset({(1, 2)}),
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("hello"),
        "deque": deque([1, 2], maxlen=3),
        "range": range(1, 9, 2),
        "slice": slice(None, 3),
        "size": torch.Size([2, 3]),
    },
    "numpy": [np.float32(0.1), np.int8(-3), np.bool_(True), np.arange(6).reshape(2, 3)[:, ::2]],
    "torch": [torch.float8_e4m3fn, torch.device("cpu"), torch.channels_last, torch.strided],
    "bit_generator": np.random.PCG64(3).state,
}


def test_every_kind_comes_back_with_its_type(run_folder: Path) -> None:
    live = dict.fromkeys(DATA)
    save_and_resume(run_folder, dict(DATA), live)
    assert_same(live, DATA)


class Holder:
    """An object whose state may be nothing."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["sync", "lazy", "logged"])
@pytest.mark.parametrize("live", [0.5, {"loss": 1}, [1], np.arange(3)])
def test_none_comes_back_over_whatever_is_there(method: str, live: Any, run_folder: Path) -> None:
    """It is a value as any other: the best loss of a run that has none yet."""
    model = nn.Linear(2, 2)
    state = {"model": model, "best": None, "object": Holder(None)}
    state["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    with opened(run_folder, state, method=method, every=None) as ckpt:
        ckpt.save()
        state["best"], state["object"].value = copy.deepcopy(live), {"a": 1}
        found = ckpt.rewind(0)
        assert found.exact
        assert state["best"] is None
        assert state["object"].value is None
    state["best"], state["object"] = copy.deepcopy(live), Holder("as it was made")
    with opened(run_folder, state, method=method, every=None) as ckpt:
        assert ckpt.resume().exact
    assert state["best"] is None
    assert state["object"].value is None


def test_none_comes_back_from_the_log(run_folder: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    holder = Holder(None)
    state = {"model": model, "optimizer": optimizer, "best": None, "object": holder}
    seen: list[Any] = []
    log = LogOptions(to="disk", batch_steps=1)
    with opened(run_folder, state, method="logged", every=100, log=log) as ckpt:
        ckpt.resume()
        for value in (1.0, None, 2.0, None):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state["best"], holder.value = value, value
            ckpt.step()
            seen.append(value)
        ckpt.wait()
        for step in (3, 2, 4, 1):
            state["best"], holder.value = "something else", "something else"
            assert ckpt.rewind(step).exact
            assert state["best"] == seen[step - 1]
            assert holder.value == seen[step - 1]


def test_an_object_without_state_need_not_take_any(run_folder: Path) -> None:
    class Stateless(Holder):
        def load_state_dict(self, value: Any) -> None:
            raise AssertionError("there is nothing to load")

    live = {"object": Stateless(None), "epoch": 0}
    save_and_resume(run_folder, {"object": Stateless(None), "epoch": 3}, live)
    assert live["epoch"] == 3


def test_it_is_read_at_each_save(run_folder: Path) -> None:
    state: dict[str, Any] = {"epoch": 0}
    with opened(run_folder, state) as ckpt:
        state["epoch"] = 7
        ckpt.save()
    live = {"epoch": -1}
    with opened(run_folder, live) as ckpt:
        ckpt.resume()
    assert live == {"epoch": 7}


def test_containers_arrays_and_tensors_keep_their_identity(run_folder: Path) -> None:
    saved = {
        "dict": {"a": 1, "t": torch.ones(2)},
        "list": [1, 2, 3],
        "array": np.arange(4.0),
        "tensor": torch.arange(4.0),
        "scalar": torch.tensor(3),
    }
    live: dict[str, Any] = {
        "dict": {"old": 0},
        "list": [],
        "array": np.zeros(4),
        "tensor": torch.zeros(4),
        "scalar": torch.tensor(0),
    }
    held = dict(live)
    save_and_resume(run_folder, saved, live)
    assert all(live[key] is held[key] for key in live)
    assert_same(live, saved)


def test_an_array_of_another_shape_is_replaced(run_folder: Path) -> None:
    live: dict[str, Any] = {"a": np.zeros(2), "b": np.zeros(3)}
    live["b"].flags.writeable = False
    save_and_resume(run_folder, {"a": np.arange(3), "b": np.arange(3.0)}, live)
    assert_same(live, {"a": np.arange(3), "b": np.arange(3.0)})


def test_tensors_of_one_memory_stay_one(run_folder: Path) -> None:
    shared = torch.ones(2)
    live: dict[str, Any] = {"d": None}
    save_and_resume(run_folder, {"d": {"a": shared, "b": [shared]}}, live)
    live["d"]["a"].add_(1)
    assert live["d"]["b"][0].tolist() == [2.0, 2.0]


def test_keys_that_share_a_path(run_folder: Path) -> None:
    saved = {"d": {0: torch.zeros(1), "0": torch.ones(1), "a/b": torch.ones(2), "a": {"b": 1}}}
    saved["d"]["a"] = {"b": torch.zeros(2)}  # type: ignore[assignment]
    live: dict[str, Any] = {"d": {}}
    save_and_resume(run_folder, saved, live)
    assert_same(live, saved)


@pytest.mark.parametrize("strict", [True, False])
def test_a_tensor_of_another_shape_or_dtype(strict: bool, run_folder: Path) -> None:
    saved = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int32), "c": 5, "d": 6}
    live: dict[str, Any] = {"a": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(1), "d": 0}
    held = dict(live)
    if strict:
        with pytest.raises(MismatchError) as error:
            save_and_resume(run_folder, saved, live)
        found = dict(error.value.mismatches)
    else:
        recovery = save_and_resume(run_folder, saved, live, strict=False)
        assert not recovery.exact
        found = dict(recovery.mismatched)
    assert found == {
        "a": "saved F32 [3], live F32 [4]",
        "b": "saved I32 [2], live F32 [2]",
        "c": "the checkpoint has no tensor here, the state has one",
    }
    assert all(live[key] is held[key] for key in "abc")
    assert torch.equal(live["a"], torch.zeros(4))
    assert torch.equal(live["c"], torch.zeros(1))
    assert live["d"] == (0 if strict else 6)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("saved", "live"),
    [("data", "module"), ("module", "optimizer"), ("data", "optimizer"), ("list", "optimizer")],
)
def test_a_part_of_another_kind(saved: str, live: str, strict: bool, run_folder: Path) -> None:
    def part(kind: str) -> Any:
        module = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return {"data": 5, "list": [1], "module": module, "optimizer": optimizer}[kind]

    state = {"x": part(live), "y": 0}
    if strict:
        with pytest.raises(
            MismatchError, match=r"x: the checkpoint has no .* here, the state has one"
        ):
            save_and_resume(run_folder, {"x": part(saved), "y": 1}, state)
        return
    recovery = save_and_resume(run_folder, {"x": part(saved), "y": 1}, state, strict=False)
    assert [name for name, _ in recovery.mismatched] == ["x"]
    assert state["y"] == 1


@pytest.mark.parametrize("strict", [True, False])
def test_parts_that_are_not_on_both_sides(strict: bool, run_folder: Path) -> None:
    saved, live = {"a": 1, "gone": 2}, {"a": 0, "new": 3}
    if strict:
        with pytest.raises(MismatchError) as error:
            save_and_resume(run_folder, saved, live)
        found = error.value.mismatches
    else:
        found = save_and_resume(run_folder, saved, live, strict=False).mismatched
    assert dict(found) == {
        "new": "not in the checkpoint",
        "gone": "in the checkpoint, not in the state",
    }
    assert live == ({"a": 0, "new": 3} if strict else {"a": 1, "new": 3})


def test_a_key_added_removed_or_replaced_is_noticed(run_folder: Path) -> None:
    """Nothing is left out of a base, or saved in place of what is trained, without a word."""
    state: dict[str, Any] = {"model": nn.Linear(1, 1), "epoch": 0}
    with opened(run_folder, state) as ckpt:
        state["late"] = 5
        with pytest.raises(StateError, match="late"):
            ckpt.save()
        del state["late"]
        ckpt.save()
        ckpt.step()
        epoch = state.pop("epoch")
        with pytest.raises(StateError, match="epoch"):
            ckpt.save()
        state["epoch"] = epoch
        ckpt.save()
        ckpt.step()
        state["model"] = nn.Linear(1, 1)
        with pytest.raises(StateError, match="model"):
            ckpt.save()


def test_what_became_unstorable_is_named_and_the_next_save_works(run_folder: Path) -> None:
    state: dict[str, Any] = {"data": {"f": 1}}
    with opened(run_folder, state) as ckpt:
        ckpt.step()
        state["data"]["f"] = {"inner": lambda: None}
        with pytest.raises(StateError, match="data/f/inner"):
            ckpt.save()
        state["data"]["f"] = 2
        ckpt.save()
    live: dict[str, Any] = {"data": {}}
    with opened(run_folder, live) as ckpt:
        assert ckpt.resume().step == 1
    assert live == {"data": {"f": 2}}
