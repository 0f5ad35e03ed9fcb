"""Files of a store that are on their way before they are read: the same bytes, once, and begun
while other ranks still fetch."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from everstep.commit.job.messages import decode_offer, encode_offer
from everstep.format.reader import read_record_bytes
from everstep.restore.fetch import sources as sources_module
from everstep.restore.fetch.node_reads import NodeReads
from everstep.restore.fetch.peers import FetchResult, fetch_plan
from everstep.restore.fetch.sources import FilesAhead
from everstep.seams import PosixFileSystem
from everstep.testing import inspect
from everstep.tiers.memory import MemoryTier
from everstep.trainer.job import job as job_module
from everstep.trainer.job import run_folder
from tests.support.ranks.copying import store
from tests.support.ranks.tiers import apart, fill, started, up_to
from tests.support.ranks.together import resume, trained

__all__ = ["apart", "store"]  # fixtures

DEADLINE_S = 20.0


class Watched(PosixFileSystem):
    """Notes opens and reads, and may hold reads back."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.reads: list[tuple[int, int]] = []
        self.first = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def open(self, path: PurePath, *, direct: bool = False) -> Any:
        self.opened.append(path.name)
        return _Watched(self, super().open(path, direct=direct))


class _Watched:
    def __init__(self, files: Watched, file: Any) -> None:
        self._files, self._file = files, file
        self.size_bytes: int = file.size_bytes
        self.close = file.close

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self._files.reads.append((offset, buffer.nbytes))
        self._files.first.set()
        assert self._files.go.wait(DEADLINE_S)
        return int(self._file.read_into(buffer, offset))


@pytest.fixture
def body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, bytes]:
    """A file of several parts."""
    monkeypatch.setattr(sources_module, "_CHUNK_BYTES", 1000)
    data = bytes(number * number % 251 for number in range(4321))
    (tmp_path / "file").write_bytes(data)
    return tmp_path / "file", data


def test_any_piece_of_it_is_what_is_in_the_file(body: tuple[Path, bytes]) -> None:
    path, data = body
    files = Watched()
    ahead = FilesAhead(files)
    ahead.begin(path, len(data))
    file = ahead.open(path)
    assert file.size_bytes == len(data)
    for offset, size in [(0, 4321), (0, 1), (999, 2), (1000, 1000), (1500, 2900), (4320, 9)]:
        buffer = bytearray(size)
        got = file.read_into(memoryview(buffer), offset)
        assert bytes(buffer[:got]) == data[offset : offset + size]
    assert file.read_into(memoryview(bytearray(9)), 4321) == 0
    assert sorted(files.reads)[:5] == [(1000 * n, min(1000, 4321 - 1000 * n)) for n in range(5)]
    assert len([one for one in files.reads if one[0] < len(data)]) == 5, "each byte once"
    ahead.close()
    ahead.close()


def test_it_is_read_before_anybody_opens_it_and_whoever_reads_waits(
    body: tuple[Path, bytes],
) -> None:
    path, data = body
    files = Watched()
    files.go.clear()
    ahead = FilesAhead(files)
    ahead.begin(path, len(data))
    assert files.first.wait(DEADLINE_S)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(read_record_bytes(ahead, path)))
    reader.start()
    assert not found
    files.go.set()
    reader.join(DEADLINE_S)
    assert found == [data]
    ahead.close()


@pytest.mark.parametrize("size_bytes", [4320, 9000])
def test_a_file_of_another_length_is_shown_as_it_is(
    body: tuple[Path, bytes], size_bytes: int
) -> None:
    """So that whoever reads it finds that it is not what its marker says."""
    path, data = body
    ahead = FilesAhead(PosixFileSystem())
    ahead.begin(path, size_bytes)
    assert read_record_bytes(ahead, path) == data
    ahead.close()


def test_what_fails_is_raised_where_it_is_used(body: tuple[Path, bytes]) -> None:
    path, data = body
    ahead = FilesAhead(PosixFileSystem())
    gone = path.with_name("gone")
    ahead.begin(gone, 10)
    ahead.begin(path, len(data))
    with pytest.raises(FileNotFoundError):
        ahead.open(gone)
    assert read_record_bytes(ahead, path) == data
    ahead.close()


def test_what_was_not_begun_is_read_as_ever(body: tuple[Path, bytes]) -> None:
    path, data = body
    files = Watched()
    ahead = FilesAhead(files)
    assert read_record_bytes(ahead, path) == data
    assert [entry.name for entry in ahead.scan(path.parent)] == ["file"]
    assert files.opened == ["file"]
    ahead.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_part_of_a_base_comes_from_the_store_while_others_fetch(
    apart: list[Path],
    tmp_path: Path,
    store: MemoryTier,
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
) -> None:
    """Rank 1 has lost its disk; that others still wait for a peer does not keep it from beginning,
    unless it is to read together with neighbours. What it restores has the right bits, and
    was read once."""
    fill(store, apart, tmp_path, 2)
    runs = up_to(apart, tmp_path, 2)
    shutil.rmtree(runs[1])
    opened: list[str] = []
    begun = threading.Event()
    own = MemoryTier.open

    def noting(self: MemoryTier, name: str) -> Any:
        if name.endswith(".safetensors"):
            opened.append(name)
            begun.set()
        return own(self, name)

    def fetch(
        meeting: Any, clock: Any, say: Any, offer: Any, *about: Any, **more: Any
    ) -> FetchResult:
        said = say("fetch", {"offer": encode_offer(offer)})
        offers = [decode_offer(one["offer"]) for one in said]
        more["extras"].planned(fetch_plan(offers, [], about[1], None)[1])
        assert shared or begun.wait(DEADLINE_S), "nothing is read meanwhile"
        say("have fetched", {})
        return FetchResult([], [])

    monkeypatch.setattr(MemoryTier, "open", noting)
    monkeypatch.setattr(job_module, "fetch_from_peers", fetch)
    if shared:

        def never(self: FilesAhead, path: PurePath, size_bytes: int) -> None:
            raise AssertionError(path)

        monkeypatch.setattr(FilesAhead, "begin", never)
        monkeypatch.setattr(NodeReads, "needs_alone", lambda self, rank, manifest: ())
        monkeypatch.setattr(run_folder, "NodeStart", _Together)
    with started(*runs) as ranks:
        for one in ranks:
            inspect(one.ckpt).starter.job.shared.fetches = True
        found = resume(ranks)
        assert [(one.step, one.source) for one in found] == [(2, "disk"), (2, "copy")]
        for rank in range(2):
            assert torch.equal(ranks[rank].weight, trained(rank, 2))
    assert opened == ["timeline-00001/base/000000000002/rank-00001.safetensors"]


class _Together:
    """A node whose ranks read together, without the memory for it."""

    def __init__(self, *about: Any, **more: Any) -> None: ...

    def offer(self, name: str) -> None: ...

    def join(self, said: Any, needs: Any) -> Any:
        class Alone(NodeReads):
            def __init__(self) -> None: ...
            def begin(self, base: Any, places: Any) -> bool:
                return False

        return Alone()

    def close(self) -> None: ...
