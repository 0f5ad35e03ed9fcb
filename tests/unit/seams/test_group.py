"""What each rank says to all, in as few rounds as it takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everstep.seams.group import TorchGroup
from everstep.trainer.job import place

_ROUND = 1024 - 8
_TIMEOUT_S = 20.0


def group_of(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> TorchGroup:
    """The group of a rank, as torch would make it; ``group=`` of its collectives is the rank."""
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "new_group", lambda **_: rank)
    return TorchGroup(_TIMEOUT_S)


def exchanged(monkeypatch: pytest.MonkeyPatch, said: list[bytes]) -> tuple[list[list[bytes]], int]:
    """What each rank has from all, a thread each, and the rounds that it took."""
    meet = threading.Barrier(len(said), timeout=_TIMEOUT_S)
    there: dict[int, torch.Tensor] = {}
    rounds: list[int] = []

    def all_gather(found: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        there[group] = mine
        meet.wait()
        for rank, one in enumerate(found):
            assert one.shape == there[rank].shape
            one.copy_(there[rank])
        if meet.wait() == 0:
            rounds.append(1)
        meet.wait()

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "monitored_barrier", lambda *_, **__: None)
    groups = [group_of(monkeypatch, rank, len(said)) for rank in range(len(said))]
    with ThreadPoolExecutor(len(said)) as pool:
        found = list(pool.map(lambda group: group.exchange("a test", said[group.rank]), groups))
    return found, len(rounds)


@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [
        ((0, 0, 0), 1),
        ((0, 21, _ROUND), 1),
        ((1, _ROUND + 1, 0), 2),
        ((_ROUND, 2 * _ROUND + 17, 70_000), 2),
    ],
)
def test_every_rank_has_what_each_has_said(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], rounds: int
) -> None:
    said = [bytes((7 * i + rank) % 256 for i in range(size)) for rank, size in enumerate(sizes)]
    found, took = exchanged(monkeypatch, said)
    assert found == [said] * len(said)
    assert took == rounds


def test_it_is_said_in_host_memory_whatever_the_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``torch.set_default_device("cuda")``: gloo takes no tensors of both."""

    def all_gather(found: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        for one in found:
            one.copy_(mine)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "monitored_barrier", lambda *_, **__: None)
    group = group_of(monkeypatch, rank=0, world=2)
    with torch.device("meta"):
        assert group.exchange("a test", b"said") == [b"said"] * 2


class Work:
    """A collective that others take part in as late as they like."""

    def __init__(self, answer: torch.Tensor, others: bool, done: list[str]) -> None:
        self._answer, self._others, self._done = answer, others, done

    def wait(self) -> None:
        self._answer[0] = max(int(self._answer[0]), self._others)
        self._done.append("answered")


@pytest.mark.parametrize(("mine", "others"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_whether_any_says_yes_is_waited_for_when_it_is_needed_or_before_an_exchange(
    monkeypatch: pytest.MonkeyPatch, mine: int, others: int
) -> None:
    done: list[str] = []

    def all_reduce(answer: torch.Tensor, op: Any, group: Any, async_op: bool) -> Work:
        assert (answer.device.type, op, async_op) == ("cpu", dist.ReduceOp.MAX, True)
        return Work(answer, bool(others), done)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "monitored_barrier", lambda *_, **__: done.append("met"))
    monkeypatch.setattr(dist, "all_gather", lambda found, mine, group: found[0].copy_(mine))
    group = group_of(monkeypatch, rank=0, world=1)
    with torch.device("meta"):
        heard = group.begin_any("a test", bool(mine))
    assert done == []
    assert heard() is bool(mine or others)
    assert done == ["answered"]
    group.exchange("a test", b"")
    assert done == ["answered", "met"], "not twice"
    group.begin_any("a test", bool(mine))
    group.exchange("a test", b"")
    assert done == ["answered", "met", "answered", "met"]


class OneOfTwo:
    world, host = 2, "127.0.0.1"

    def __init__(self, rank: int) -> None:
        self.rank = rank


Stores = dict[str, Any]


@pytest.fixture
def stores(tmp_path: Path, fresh_warning: None) -> Stores:
    """Stores of a default group; "agent" is the one that torchrun serves to its workers."""
    return {
        "agent": dist.TCPStore("127.0.0.1", 0, is_master=True),
        "another": dist.TCPStore("127.0.0.1", 0, is_master=True),
        "file": dist.FileStore(str(tmp_path / "store"), 1),
    }


@pytest.fixture
def fresh_warning() -> Iterator[None]:
    """A process that has not warned yet."""
    place._warn_of_kept_store.cache_clear()
    yield
    place._warn_of_kept_store.cache_clear()


KEPT = {
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
"""Environment of a worker in torchrun --max-restarts=3 with torch's defaults."""


@pytest.mark.parametrize(
    ("changed", "rank", "store", "warned"),
    [
        ({}, 0, "agent", 1),
        ({}, 1, "agent", 0),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, 0, "agent", 1),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, 0, "agent", 0),  # no restart is left
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, 0, "agent", 0),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, 0, "agent", 0),
        (dict.fromkeys(KEPT, ""), 0, "agent", 0),  # not started by torchrun
        ({}, 0, "another", 0),
        ({}, 0, "file", 0),
    ],
)
def test_a_launcher_whose_restarts_will_fail_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stores: Stores,
    changed: dict[str, str],
    rank: int,
    store: str,
    warned: int,
) -> None:
    for name, value in (KEPT | changed).items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", str(stores["agent"].port))
    seams: Any = SimpleNamespace(group=lambda timeout_s: OneOfTwo(rank))
    dist.init_process_group("fake", rank=rank, world_size=2, store=stores[store])
    try:
        for _ in range(2):
            assert place.join_job(seams, 1.0) is not None
    finally:
        dist.destroy_process_group()
    assert caplog.text.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == warned


def test_a_process_that_trains_alone_is_not_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fresh_warning: None
) -> None:
    for name, value in KEPT.items():
        monkeypatch.setenv(name, value)
    seams: Any = SimpleNamespace(group=lambda timeout_s: None)
    assert place.join_job(seams, 1.0) is None
    assert not caplog.records
