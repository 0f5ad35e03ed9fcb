"""Values of a user's own class in plain data: stored as their bytes, and made again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.data import register_type
from everstep.errors import MismatchError, OptionError, UnsupportedStateError
from everstep.state.values import registered
from everstep.state.values.registered import RegisteredValue
from tests.support.world import opened


class Window:
    """A running window of the last values."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def to_bytes(self) -> bytes:
        return bytes(self.values)

    @classmethod
    def from_bytes(cls, data: bytes) -> Window:
        return cls(list(data))


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """As it was before, after each test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registered, "_BY_KIND", {})
        patch.setattr(registered, "_BY_NAME", {})
        yield


def state_of(values: list[int]) -> dict[str, Any]:
    windows = [Window([*values]), (1, 2)]
    return {"window": Window([*values]), "data": {"step": 0, "windows": windows}}


def saved(run: Path) -> None:
    """A run with a base of step 1, in which the values have changed since the start."""
    register_type(Window, name="tests.Window")
    state = state_of([1])
    with opened(run, state) as ckpt:
        ckpt.resume()
        state["window"].values.append(2)
        state["data"]["windows"][0].values.append(3)
        ckpt.step()
        ckpt.save()
        # The base has what was there when it was taken.
        state["window"].values.append(9)
        ckpt.wait()


def test_they_come_back(run_folder: Path) -> None:
    saved(run_folder)
    state = state_of([])
    with opened(run_folder, state) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.exact) == (1, True)
    assert state["window"].values == [1, 2]
    window, pair = state["data"]["windows"]
    assert (type(window), window.values, pair) == (Window, [1, 3], (1, 2))


def test_without_the_class_a_run_is_read_and_not_resumed(run_folder: Path) -> None:
    saved(run_folder)
    registered._BY_KIND.clear()
    registered._BY_NAME.clear()
    assert everstep.load(run_folder).objects["window"] == RegisteredValue("tests.Window", b"\1\2")
    state = {"window": None, "data": {"step": 0}}
    refused = pytest.raises(
        MismatchError, match=r"tests\.Window: call everstep\.data\.register_type"
    )
    with opened(run_folder, state) as ckpt, refused:
        ckpt.resume()


def test_an_unregistered_class_is_refused_with_advice(run_folder: Path) -> None:
    refused = pytest.raises(UnsupportedStateError, match=r"everstep\.data\.register_type")
    with refused, opened(run_folder, state_of([1])):
        pass


@pytest.mark.parametrize(
    ("to_bytes", "reason"),
    [(lambda value: "text", "returned str, not bytes"), (lambda value: 1 / 0, "failed: ZeroDiv")],
    ids=["no bytes", "an error"],
)
def test_bad_bytes_are_refused(run_folder: Path, to_bytes: Any, reason: str) -> None:
    register_type(Window, to_bytes=to_bytes)
    refused = pytest.raises(UnsupportedStateError, match=reason)
    with refused, opened(run_folder, state_of([1])):
        pass


def test_registrations_that_cannot_be() -> None:
    register_type(Window, name="tests.Window")
    register_type(Window, name="tests.Window")
    other = type("Other", (Window,), {})
    with pytest.raises(OptionError, match="is registered for Window"):
        register_type(other, name="tests.Window")
    with pytest.raises(OptionError, match=r"has no to_bytes\(\) and from_bytes\(\)"):
        register_type(object)
    with pytest.raises(OptionError, match="takes a class"):
        register_type(Window([]))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="short text"):
        register_type(Window, name="")
