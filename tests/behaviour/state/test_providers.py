"""A provider of the user's in the state: its chunks are saved, and come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep.data import register_type
from everstep.errors import EverstepError, MismatchError, OptionError, UnsupportedStateError
from everstep.state.values import registered
from everstep.testing.providers import CHECKS, Check, Subject, conformance
from tests.support.world import opened


class Counters(everstep.Provider):
    """A provider inside of another one."""

    def __init__(self) -> None:
        self.counts = torch.zeros(4, dtype=torch.int64)

    def chunks(self) -> Iterator[tuple[str, Any]]:
        yield "counts", self.counts

    def restore(self, chunks: Mapping[str, Any]) -> None:
        self.counts = chunks["counts"]


class Replay(everstep.Provider):
    """A replay buffer: frames, flags and weights in memory, a table that is serialized."""

    def __init__(self) -> None:
        self.frames = np.zeros((8, 3), np.float32)
        self.flags = bytearray(8)
        self.weights = torch.zeros(5, dtype=torch.bfloat16)
        self.table: dict[str, str] = {}
        self.inner = Counters()
        self.used = 0

    def chunks(self) -> Iterator[tuple[str, Any]]:
        yield "frames", self.frames
        yield "flags", memoryview(self.flags)
        table = dict(self.table)
        yield "table", lambda: (f"{key}={value};".encode() for key, value in table.items())
        yield "inner", self.inner
        yield "weights", self.weights
        yield "used", self.used

    def restore(self, chunks: Mapping[str, Any]) -> None:
        self.frames = chunks["frames"].numpy()
        self.flags = bytearray(chunks["flags"].numpy().tobytes())
        self.weights = chunks["weights"]
        pairs = chunks["table"].decode().split(";")[:-1]
        self.table = dict(pair.split("=") for pair in pairs)
        self.used = chunks["used"]

    def add(self) -> None:
        self.used += 1
        self.frames[self.used % 8] += self.used
        self.flags[self.used % 8] += 1
        self.weights += 0.5
        self.inner.counts[self.used % 4] += 1
        self.table[f"key {self.used}"] = str(self.used)


def values(replay: Replay) -> tuple[Any, ...]:
    lists = replay.frames.tolist(), replay.weights.tolist(), replay.inner.counts.tolist()
    return (*lists, bytes(replay.flags), dict(replay.table), replay.used)


REPLAY = Subject(Replay, Replay.add)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_conforms(check: Check) -> None:
    check(REPLAY)


@pytest.mark.parametrize("method", ["sync", "lazy"])
def test_it_comes_back(run_folder: Path, method: str) -> None:
    replay = Replay()
    with opened(run_folder, {"replay": replay, "epoch": 0}, method=method) as ckpt:
        ckpt.resume()
        for _ in range(3):
            replay.add()
        ckpt.step()
        expected = values(replay)
        ckpt.save()
        replay.add()  # after the mark: not part of the base
        ckpt.wait()
    again = Replay()
    frames = again.frames
    with opened(run_folder, {"replay": again, "epoch": 0}, method=method) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.exact) == (1, True)
    assert values(again) == expected
    assert np.shares_memory(again.frames, frames), "the saved frames were read into others"


def test_readers_see_tensors_and_bytes(run_folder: Path) -> None:
    """Commands and ``load()`` need no code of the user's."""
    replay = Replay()
    with opened(run_folder, {"replay": replay}) as ckpt:
        replay.add()
        ckpt.step()
        ckpt.save()
        ckpt.wait()
    state = everstep.load(run_folder).objects["replay"]
    assert state["frames"].dtype == torch.float32
    assert state["flags"].dtype == torch.uint8
    assert (state["table"], state["used"]) == (b"key 1=1;", 1)
    assert state["inner"]["counts"].tolist() == [0, 1, 0, 0]


class Given(everstep.Provider):
    """A provider of the given chunks, which remembers what it gets back."""

    def __init__(self, *chunks: tuple[Any, Any]) -> None:
        self.given = chunks
        self.restored: Mapping[str, Any] = {}

    def chunks(self) -> Iterator[tuple[Any, Any]]:
        yield from self.given

    def restore(self, chunks: Mapping[str, Any]) -> None:
        self.restored = chunks


def restored(run: Path, saved: Given, live: Given) -> Mapping[str, Any]:
    """Save one provider, and restore it into another."""
    with opened(run, {"one": saved}) as ckpt:
        ckpt.step()
        ckpt.save()
        ckpt.wait()
    with opened(run, {"one": live}) as ckpt:
        ckpt.resume()
    return live.restored


def test_memory_of_another_form_is_new(run_folder: Path) -> None:
    """A buffer that has grown since the program started."""
    live = torch.zeros(2)
    found = restored(run_folder, Given(("a", torch.arange(3.0))), Given(("a", live), ("b", live)))
    assert found["a"].tolist() == [0, 1, 2]
    assert live.tolist() == [0, 0]


def test_read_only_memory_is_left_alone(run_folder: Path) -> None:
    data = b"abcd"
    array = np.arange(4.0)
    array.flags.writeable = False
    saved = Given(("bytes/~", memoryview(b"wxyz")), ("array", np.ones(4)))
    live = Given(("bytes/~", memoryview(data)), ("array", array))
    found = restored(run_folder, saved, live)
    assert bytes(found["bytes/~"].numpy()) == b"wxyz"
    assert found["array"].tolist() == [1] * 4
    assert (data, array.tolist()) == (b"abcd", [0, 1, 2, 3])


def test_memory_that_two_chunks_share_is_not_filled(run_folder: Path) -> None:
    shared = torch.zeros(3)
    saved = Given(("a", torch.ones(3)), ("b", torch.full((3,), 2.0)))
    found = restored(run_folder, saved, Given(("a", shared), ("b", shared)))
    assert (found["a"].tolist(), found["b"].tolist()) == ([1] * 3, [2] * 3)


class Keeps(Given):
    """A provider that reads its own memory, and not what it is given."""

    def restore(self, chunks: Mapping[str, Any]) -> None:
        self.restored = {name: content for name, content in self.given if name in chunks}


def test_memory_of_one_storage_is_filled(run_folder: Path) -> None:
    whole = torch.zeros(10)
    saved = Given(("a", torch.arange(5.0)), ("b", torch.arange(5.0, 10.0)))
    restored(run_folder, saved, Keeps(("a", whole[:5]), ("b", whole[5:])))
    assert whole.tolist() == list(range(10))


def test_a_tie_with_a_module_is_kept(run_folder: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        model = torch.nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            model.weight.fill_(value)
        return {"one": Given(("w", model.weight)), "model": model}

    with opened(run_folder, state(5.0)) as ckpt:
        ckpt.step()
        ckpt.save()
        ckpt.wait()
    again = state(0.0)
    with opened(run_folder, again) as ckpt:
        ckpt.resume()
    weight = again["model"].weight
    assert weight.tolist() == [[5.0] * 3] * 2
    assert again["one"].restored["w"].data_ptr() == weight.data_ptr()


def test_elements_that_overlap_are_not_filled(run_folder: Path) -> None:
    memory = np.zeros(5, np.float32)
    windows = np.lib.stride_tricks.as_strided(memory, (4, 2), (4, 4))
    found = restored(
        run_folder,
        Given(("a", np.arange(8, dtype=np.float32).reshape(4, 2))),
        Given(("a", windows)),
    )
    assert found["a"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert memory.tolist() == [0] * 5


def test_a_registered_value_that_can_be_called_is_stored(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered, "_BY_KIND", {})
    monkeypatch.setattr(registered, "_BY_NAME", {})

    class Loss:
        def __call__(self) -> bytes:
            return b"called"

    register_type(Loss, to_bytes=lambda one: b"mine", from_bytes=lambda data: data)  # type: ignore[arg-type,return-value]
    assert restored(run_folder, Given(("a", Loss())), Given())["a"] == b"mine"


@pytest.mark.parametrize("given", [b"abc", bytearray(b"abc"), memoryview(b"abc"), [b"a", b"bc"]])
def test_forms_of_bytes(run_folder: Path, given: Any) -> None:
    found = restored(run_folder, Given(("a", lambda: given)), Given(("a", lambda: b"")))
    assert found["a"] == b"abc"


def test_what_is_two_things_is_refused(run_folder: Path) -> None:
    class Both(torch.nn.Module, everstep.Provider):
        def chunks(self) -> Iterator[tuple[str, Any]]:
            yield "a", 1

    with pytest.raises(OptionError, match="Provider and a Both"), opened(run_folder, {"m": Both()}):
        pass


def test_an_optimizer_of_the_checkpoint_is_no_provider(run_folder: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with opened(run_folder, {"one": torch.optim.SGD(model.parameters()), "m": model}) as ckpt:
        ckpt.step()
        ckpt.save()
        ckpt.wait()
    refused = pytest.raises(MismatchError, match="one: the checkpoint has an optimizer here")
    with refused, opened(run_folder, {"one": Given(), "m": model}) as ckpt:
        ckpt.resume()


def test_empty_memory(run_folder: Path) -> None:
    found = restored(run_folder, Given(("none", memoryview(b""))), Given())
    assert found["none"].shape == (0,)


def test_a_provider_that_the_checkpoint_does_not_have(run_folder: Path) -> None:
    inner = Given(("a", 1))
    with pytest.raises(MismatchError, match=r"one/inner: a provider"):
        restored(run_folder, Given(("b", 2)), Given(("inner", inner)))
    assert inner.restored == {}


def test_a_function_runs_in_another_thread(run_folder: Path) -> None:
    """The first call plans the layout; a save's call is not made by the training thread."""
    threads: list[int] = []

    def function() -> bytes:
        threads.append(threading.get_ident())
        return b"data"

    with opened(run_folder, {"one": Given(("a", function))}, method="lazy") as ckpt:
        ckpt.step()
        threads.clear()
        ckpt.save()
        ckpt.wait()
    assert threads
    assert threading.get_ident() not in threads


def test_a_function_that_fails_is_a_failed_save(run_folder: Path) -> None:
    """The state of before is there; the error names the chunk."""
    fails = [False]

    def function() -> bytes:
        return b"x" if not fails[0] else (1 / 0).to_bytes()  # type: ignore[attr-defined,no-any-return]

    state = {"one": Given(("bad", function))}
    with opened(run_folder, state, method="lazy") as ckpt:
        ckpt.step()
        ckpt.save()
        ckpt.wait()
        fails[0] = True
        ckpt.step()
        with pytest.raises(EverstepError, match=r"one/bad: .*ZeroDivisionError"):
            ckpt.save()
            ckpt.wait()
        fails[0] = False
    with opened(run_folder, state) as ckpt:
        assert ckpt.resume().step == 1


def itself() -> Given:
    found = Given()
    found.given = (("again", found),)
    return found


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Given(("", 1)), "one: the name of a chunk must be a non-empty text"),
        (lambda: Given((1, 1)), "must be a non-empty text"),
        (lambda: Given(("a", 1), ("a", 2)), "one/a: two chunks have this name"),
        (lambda: Given(("a", object())), "one/a: object"),
        (lambda: Given(("a", np.array(["x"], object))), "one/a: memory that torch cannot view"),
        (lambda: Given(("a", np.arange(3)[::-1])), "one/a: memory that torch cannot view"),
        (lambda: Given(("a", memoryview(bytearray(8))[::2])), "one/a: memory that torch cannot"),
        (lambda: Given(("a", lambda: "text")), "one/a: the function of this chunk failed"),
        (lambda: Given(("a", lambda: None)), "must return bytes or an iterable of bytes, not None"),
        (lambda: Given(("a", dict)), "one/a: "),
        (lambda: Given(("a", torch.nn.Linear(1, 1))), "one/a: a Linear needs a key of its own"),
        (lambda: Given(("a", np.ma.masked_array([1, 2], [0, 1]))), "one/a: .*a subclass of numpy"),
        (lambda: Given("ab", ("a",)), r"one: chunks\(\) must yield pairs"),
        (itself, "contain themselves"),
    ],
)
def test_chunks_that_cannot_be_stored(
    run_folder: Path, make: Callable[[], Given], reason: str
) -> None:
    refused = pytest.raises(UnsupportedStateError, match=reason)
    with refused, opened(run_folder, {"one": make()}):
        pass


# --- Providers that break the contract: each check finds one --------------------------------


class TwiceNamed(Replay):
    def chunks(self) -> Iterator[tuple[str, Any]]:
        yield "used", self.used
        yield "used", self.used


class LateReader(Replay):
    """Its function reads the table that training changes."""

    def chunks(self) -> Iterator[tuple[str, Any]]:
        for name, content in super().chunks():
            yield name, (lambda: str(self.table).encode()) if name == "table" else content

    def restore(self, chunks: Mapping[str, Any]) -> None:
        raise NotImplementedError


class Counting(Replay):
    """Being saved changes it."""

    def chunks(self) -> Iterator[tuple[str, Any]]:
        self.used += 1
        yield from super().chunks()


class Forgetful(Replay):
    """It does not take its count back."""

    def restore(self, chunks: Mapping[str, Any]) -> None:
        super().restore({**chunks, "used": 0})


class OnceOnly(Replay):
    """It takes a state back only while it has none."""

    def restore(self, chunks: Mapping[str, Any]) -> None:
        if self.used == 0:
            super().restore(chunks)


class HiddenState(Replay):
    """A part of its state is in no chunk."""

    hidden = 0

    def add(self) -> None:
        super().add()
        self.hidden += 1
        self.weights *= self.hidden


class Sharing(Replay):
    """All of them have the same frames."""

    FRAMES = np.zeros((8, 3), np.float32)

    def __init__(self) -> None:
        super().__init__()
        self.frames = Sharing.FRAMES
        self.frames[:] = 0


@pytest.mark.parametrize(
    ("subject", "check"),
    [
        (Subject(TwiceNamed, Replay.add), "its_chunks_can_be_stored"),
        (Subject(Replay, lambda replay: None), "change_changes_its_state"),
        (Subject(Counting, Replay.add), "saving_changes_nothing"),
        (Subject(LateReader, Replay.add), "a_function_reads_what_was_there"),
        (Subject(Forgetful, Replay.add), "a_new_provider_takes_the_state"),
        (Subject(OnceOnly, Replay.add), "a_provider_in_use_takes_the_state"),
        (Subject(HiddenState, HiddenState.add), "a_restored_provider_continues"),
        (Subject(Sharing, Replay.add), "the_saved_state_is_its_own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_check_finds_a_provider_that_breaks_it(subject: Subject, check: str) -> None:
    problems = {one.check: one.problem for one in conformance(subject)}
    assert problems[check] is not None


def test_a_good_provider_passes_all_checks() -> None:
    assert [one.problem for one in conformance(REPLAY)] == [None] * len(CHECKS)
