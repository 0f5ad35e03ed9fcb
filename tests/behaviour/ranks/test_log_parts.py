"""The log of ranks that train alike: each records a part, and replay takes all of them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePath

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import DamageError, EverstepError, FormatError
from everstep.format.log import LogRecord
from everstep.format.names import marker_name, shard_name
from everstep.restore.fetch import start_channel
from everstep.restore.redo.driver import ReplayDriver
from everstep.restore.redo.live import LiveMemory
from everstep.restore.redo.updates import update_from_record
from everstep.restore.start import rank_log, rank_sources
from everstep.restore.start.rank_log import decode_records, encode_records
from everstep.seams import ReadFile
from everstep.state.layout.entries import PART_OBJECT, UPDATE_OBJECT
from everstep.state.ranks.log_shares import bytes_logged_elsewhere, log_shares
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from tests.support.ranks import replicas as parts
from tests.support.ranks.logs import die, segment
from tests.support.ranks.replicas import (
    folders,
    layers,
    records_of,
    replicas,
    resume,
    train,
    trained,
    until,
)
from tests.support.ranks.together import on_all, rank_seams
from tests.support.world import HookedFileSystem

alike = parts.alike  # which every test here takes, too
two = parts.two


def resumed(paths: tuple[Path, ...], step: int, replayed: int) -> list[everstep.Recovery]:
    """What all come back to, and that it is what training had; and trains on."""
    with replicas(*paths) as ranks:
        found = resume(ranks)
        for one, training in zip(found, ranks, strict=True):
            assert (one.step, one.replayed, one.exact) == (step, replayed, True), one
            assert all(map(torch.equal, training.weights, trained(step)))
        train(ranks, 2)
        for training in ranks:
            assert all(map(torch.equal, training.weights, trained(step + 2)))
        die(ranks)
        return found


@pytest.mark.thinned(4)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
def test_each_rank_records_a_part_and_all_come_back(
    tmp_path: Path, shared: bool, world: int
) -> None:
    paths = folders(tmp_path, shared, world)
    until(paths, 6)
    resumed(paths, 6, 2)


def gradients_in(record: LogRecord) -> set[str]:
    return {p.entry.name for p in record.layout.placed if p.entry.name.startswith("gradient/")}


def test_every_gradient_is_recorded_once(tmp_path: Path) -> None:
    path = tmp_path / "run"
    until((path, path), 3)
    parts = [gradients_in(records_of(path, 3, rank)[0]) for rank in range(2)]
    assert not parts[0] & parts[1]
    named = layers(None).named_parameters()
    assert parts[0] | parts[1] == {f"gradient/model.{name}" for name, _ in named}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_parts_are_about_as_large(world: int) -> None:
    states = []
    for rank in range(world):
        model = layers(tuple(range(world)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        states.append(State({"m": model, "o": optimizer}, ranks=RankInfo(rank, world)))
    found = [log_shares(state) for state in states]
    assert all(one == found[0] for one in found), "without a word between them"
    sizes = [p.numel() * 4 for p in layers(None).parameters()]
    own = [sum(sizes) - bytes_logged_elsewhere(state) for state in states]
    assert sum(own) == sum(sizes)
    assert max(own) - min(own) <= max(sizes)
    assert {part.owner for part in found[0]["o"].values()} == set(range(world))


def test_a_rank_alone_records_everything() -> None:
    model = layers((0,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert log_shares(State({"m": model, "o": optimizer})) == {}


def test_what_is_not_trained_alike_is_recorded_by_each() -> None:
    model, own = layers((0, 1)), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW([*model.parameters(), *own.parameters()], lr=0.1)
    about = {"m": model, "own": own, "o": optimizer}
    parts = log_shares(State(about, ranks=RankInfo(1, 2)))["o"]
    assert len(parts) == len(list(model.parameters()))
    assert not any(name.startswith("own") for name in parts)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "disks of their own"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_in_one_part_takes_all_to_the_step_before(
    tmp_path: Path, rank: int, shared: bool
) -> None:
    paths = folders(tmp_path, shared)
    until(paths, 7)
    shard = next(p for p in segment(paths[rank], 6).iterdir() if p.name == shard_name(rank))
    data = bytearray(shard.read_bytes())
    values = [torch.full((4,), 0.6 + number).numpy().tobytes() for number in range(6)]
    at = max(data.find(value) for value in values)
    assert at > 0
    data[at] ^= 1
    shard.write_bytes(data)
    resumed(paths, 5, 1)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_is_gone_takes_all_to_the_step_before(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "run"
    until((path, path), 7)
    (segment(path, 6) / marker_name(rank)).unlink()
    resumed((path, path), 5, 1)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("times", [1, 2], ids=["once", "always"])
def test_steps_are_redone_one_by_one_on_the_base_and_not_on_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Behind all updates a mark cannot be taken back: once, though nothing compares what they give;
    or always, and then no step before it is lost."""
    path = tmp_path / "run"
    until((path, path), 7)
    finish = ReplayDriver.finish
    failed = dict[int, int]()

    def fails(self: ReplayDriver) -> list[str]:
        self.idle()
        assert self.last is not None
        found = failed.setdefault(threading.get_ident(), 0)
        if self.last.head.step == 7 and found < times:
            failed[threading.get_ident()] += 1
            raise FormatError("as asked")
        return finish(self)

    monkeypatch.setattr(ReplayDriver, "finish", fails)
    if times == 1:
        monkeypatch.setattr(LiveMemory, "first_difference", lambda *_: None)
    resumed((path, path), 8 - times, 4 - times)


def test_parts_come_in_pieces_and_a_few_steps_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (rank_log, start_channel):
        monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    monkeypatch.setattr(start_channel, "_IN_FLIGHT_MAX", 2)
    monkeypatch.setattr(rank_log, "_CACHE_BYTES", 1)
    monkeypatch.setattr(rank_log, "_FETCH_BYTES_MAX", 1)
    paths = folders(tmp_path, shared=False)
    until(paths, 7)
    resumed(paths, 7, 3)


class OpenLog(HookedFileSystem):
    """Knows which files of the log are open for reading, and how many have been."""

    def __init__(self) -> None:
        super().__init__()
        self.open_paths: list[PurePath] = []
        self.opened = 0

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        file = super().open(path, direct=direct)
        if "log" not in path.parts:
            return file
        self.open_paths.append(path)
        self.opened += 1
        return _OpenFile(file, lambda: self.open_paths.remove(path))


class _OpenFile:
    def __init__(self, file: ReadFile, on_close: Callable[[], None]) -> None:
        self._file, self._on_close = file, on_close
        self.size_bytes, self.read_into = file.size_bytes, file.read_into

    def close(self) -> None:
        self._file.close()
        self._on_close()


@pytest.mark.parametrize("fails", [False, True], ids=["all resume", "a rank fails behind it"])
def test_what_was_read_for_other_ranks_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    paths = folders(tmp_path, shared=False)
    until(paths, 7)
    there = [OpenLog(), OpenLog()]
    seams = [replace(one, filesystem=fs) for one, fs in zip(rank_seams(2), there, strict=True)]
    with replicas(*paths, seams=seams) as ranks:
        if fails:
            monkeypatch.setattr(rank_sources, "open_on_disk", refuse)
            with pytest.raises(EverstepError):
                resume(ranks)
        else:
            resume(ranks)
        assert all(fs.opened > 2 for fs in there), "its own, and for the other one"
        assert [fs.open_paths for fs in there] == [[], []]
        if not fails:  # else there is no keeper yet
            die(ranks)


def refuse(*args: object) -> bool:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_log_in_memory_leads_back_in_the_same_processes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with replicas(path, path, method="logged", every=4, log=everstep.LogOptions()) as ranks:
        resume(ranks)
        train(ranks, 6)
        found = on_all(*(lambda one=one: one.ckpt.rewind(5) for one in ranks))  # type: ignore[misc]
        assert [(one.step, one.replayed, one.exact) for one in found] == [(5, 1, True)] * 2
        assert all(all(map(torch.equal, one.weights, trained(5))) for one in ranks)
        die(ranks)


# --- A part is never taken for the whole --------------------------------------------------


def test_both_parts_are_the_update(two: list[list[LogRecord]]) -> None:
    updates = [
        update_from_record(replace(two[r][1], parts={1 - r: two[1 - r][1]})) for r in range(2)
    ]
    names = {f"model.{name}" for name, _ in layers(None).named_parameters()}
    for update in updates:
        assert update.gradients.keys() == names
    for name, gradient in updates[0].gradients.items():
        assert torch.equal(gradient, updates[1].gradients[name])  # type: ignore[arg-type]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (lambda two: {}, "missing"),
        (lambda two: {1: two[1][0]}, "rank 1 has"),
        (lambda two: {1: two[0][1]}, "missing"),
        (lambda two: {2: two[1][1]}, "missing"),
    ],
    ids=["none", "another step's", "this rank's own", "another rank's"],
)
def test_parts_that_do_not_fit_are_refused(
    two: list[list[LogRecord]],
    parts: Callable[[list[list[LogRecord]]], dict[int, LogRecord]],
    why: str,
) -> None:
    with pytest.raises(FormatError, match=why):
        update_from_record(replace(two[0][1], parts=parts(two)))


def test_who_does_not_know_of_parts_finds_no_update(two: list[list[LogRecord]]) -> None:
    for record in (record for own in two for record in own):
        assert PART_OBJECT in record.objects
        assert UPDATE_OBJECT not in record.objects


def test_a_part_on_its_way_is_compared_with_its_digests(two: list[list[LogRecord]]) -> None:
    data = encode_records(two[0])
    assert [r.head for r in decode_records(bytearray(data), 1)] == [r.head for r in two[0]]
    for at in range(16, len(data), 7):
        other = bytearray(data)
        other[at] ^= 4
        try:
            found = decode_records(other, 1)
        except (DamageError, FormatError):
            continue
        for here, there in zip(found, two[0], strict=True):  # between records
            assert (here.data, here.objects) == (there.data, there.objects)
