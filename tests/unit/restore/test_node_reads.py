"""What several ranks of a node need of a base is read once on that node, and comes to each of them
right, whatever is damaged or missing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep.commit.job.offers import Needs, Source, all_ranks
from everstep.commit.retention import TIERS
from everstep.errors import DamageError
from everstep.format.reader import _chunks
from everstep.format.writer import ChunkRing
from everstep.restore.fetch import node_reads
from everstep.restore.fetch.held import KeeperContents
from everstep.restore.fetch.node_reads import NodeReads, NodeStart, NodeWindow
from everstep.restore.fetch.sources import Place
from everstep.restore.load.load import LoadedBase
from everstep.restore.start.rank_restore import RankLoader
from everstep.restore.start.report import ResumeRequest
from everstep.run.scan import BaseFound
from everstep.seams import PosixFileSystem, Seams, SystemClock
from everstep.seams.filesystem import ReadFile
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from everstep.trainer.job.run_folder import SharedRun
from tests.support.ranks.sharding import Values, as_rank, build, locals_of, save
from tests.support.ranks.together import on_all, rank_seams, trained, trainings
from tests.support.world import TIMEOUT_S, flip

SEED, OTHER = 3, 9
WORLD = 3


class Counted(PosixFileSystem):
    """Counts what is read of bodies in pages, all that a disk or a store would have to send.

    Attributes:
        before: called before each of these reads, with the file's name.
    """

    def __init__(self) -> None:
        self.read_bytes = 0
        self.before: Callable[[str], None] = lambda name: None
        self._lock = threading.Lock()

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        return _Counted(self, super().open(path, direct=direct), path.name)

    def count(self, name: str, size_bytes: int) -> None:
        self.before(name)
        with self._lock:
            self.read_bytes += size_bytes


class _Counted:
    def __init__(self, files: Counted, file: ReadFile, name: str) -> None:
        self._files, self._file, self._name = files, file, name

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if offset and buffer.nbytes % 4096 == 0:
            self._files.count(self._name, min(buffer.nbytes, self.size_bytes - offset))
        return self._file.read_into(buffer, offset)

    def close(self) -> None:
        self._file.close()


def widen(values: Values, info: Any) -> None:
    """Some cells more, and each rank has something of its own."""
    wide = nn.Linear(1024, 2048)
    with torch.no_grad():
        wide.weight.fill_(values["own"]["n"] + 0.5)
        wide.weight[:, 0] = torch.arange(2048.0)
    values["wide"] = nn.parallel.DistributedDataParallel(wide, init_sync=False)


@dataclass
class Ranks:
    """The ranks of a job that starts, in one process."""

    base: BaseFound
    states: list[State]
    values: list[Values]
    want: dict[str, torch.Tensor]
    files: Counted = field(default_factory=Counted)
    copies: Counted = field(default_factory=Counted)

    def load(
        self,
        *,
        nodes: Sequence[str] | None = None,
        local: bool = False,
        needs: Needs = all_ranks,
        places: Sequence[str] = ("disk",),
    ) -> list[LoadedBase | Exception]:
        """What each rank's load returns or raises.

        Args:
            nodes: by rank: what its node is called; all are on one if nothing is said.
        """
        assert self.base.manifest is not None
        world = len(self.states)
        about = nodes or ["node"] * world, SystemClock()
        starts = [
            NodeStart(rank, *about, local=local, timeout_s=TIMEOUT_S) for rank in range(world)
        ]
        said = [{"window": one.offer(f"{n:032}")} for n, one in enumerate(starts)]
        reads = [one.join(said, needs) for one in starts]
        rings = [ChunkRing(8, 6) for _ in starts]

        def one_loads(rank: int) -> LoadedBase | Exception:
            request = ResumeRequest(
                Seams(self.files),
                PurePath("run"),
                self.states[rank],
                rings[rank],
                KeeperContents(),
                step=None,
                strict=True,
                timeout_s=TIMEOUT_S,
            )
            load = RankLoader(request, reads[rank]).load
            tier = places[rank % len(places)]
            files = self.files if tier == "disk" else self.copies
            source = Source(TIERS.index(tier), rank)
            markers = self.base.manifest.markers  # type: ignore[union-attr]
            where = {one.rank: Place(source, files, "here") for one in markers}
            try:
                return load(self.base, where, lambda: None)
            except Exception as error:
                return error
            finally:
                starts[rank].close()

        try:
            return on_all(*(lambda rank=rank: one_loads(rank) for rank in range(world)))  # type: ignore[misc]
        finally:
            for ring in rings:
                ring.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with started(tmp_path, WORLD, WORLD) as found:
        yield found


@contextlib.contextmanager
def started(folder: Path, before: int, now: int) -> Iterator[Ranks]:
    """A base that ``before`` DDP ranks have saved, and ``now`` that restore it."""
    ring = ChunkRing(4, 2)
    try:
        base = save(folder, "ddp", before, SEED, ring, change=widen)
    finally:
        ring.close()
    with as_rank(0, 1) as info:
        want = locals_of(build("one", info, SEED))
    states, values = [], []
    with as_rank(0, now):  # of the group each only wants to know who is in it
        for rank in range(now):
            info = RankInfo(rank, now)
            values.append(build("ddp", info, OTHER))
            widen(values[-1], info)
            states.append(State(values[-1], ranks=info))
        yield Ranks(base, states, values, want)


def size_of(base: BaseFound) -> int:
    assert base.manifest is not None
    return sum(file.length for marker in base.manifest.markers for file in marker.files)


def check(ranks: Ranks, found: Sequence[LoadedBase | Exception]) -> None:
    """All have what was saved."""
    for one, values in zip(found, ranks.values, strict=True):
        assert isinstance(one, LoadedBase), one
        got = locals_of(values)
        for name, tensor in ranks.want.items():
            assert torch.equal(got[name], tensor), name
        wide = values["wide"].module.weight
        assert torch.equal(wide[:, 0], torch.arange(2048.0))
        assert bool((wide[:, 1:] == SEED + 0.5).all())


def test_a_node_reads_a_base_once(ranks: Ranks) -> None:
    check(ranks, ranks.load())
    assert size_of(ranks.base) > 4 * node_reads.CELL_BYTES
    assert ranks.files.read_bytes < 1.1 * size_of(ranks.base)


@pytest.mark.parametrize("now", [2, 4])
def test_so_does_a_job_of_another_size(tmp_path: Path, now: int) -> None:
    with started(tmp_path, WORLD, now) as ranks:
        check(ranks, ranks.load())
        assert ranks.files.read_bytes < 1.1 * size_of(ranks.base)


@pytest.mark.parametrize(
    "given",
    [{"nodes": ["a", "b", "c"]}, {"local": True}],
    ids=["one rank per node", "a disk of the node"],
)
def test_where_nothing_is_shared_each_rank_reads_as_ever(
    ranks: Ranks, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = NodeWindow.take
    taken: list[int] = []
    monkeypatch.setattr(NodeWindow, "take", lambda *about: taken.append(1) or take(*about))
    check(ranks, ranks.load(**given))
    assert ranks.files.read_bytes > 2.9 * (size_of(ranks.base) - 100_000)
    assert not taken


def test_files_are_cut_at_the_same_places_wherever_a_range_begins() -> None:
    """Or ranks that want other parts of a file would share nothing of what they both want."""
    last = 40 << 20
    for first in (0, 3 * 4096, (5 << 20) + 100):
        ends = [chunk.end for chunk in _chunks([(first, last)])]
        assert all(end % node_reads.CELL_BYTES == 0 for end in ends), first


def test_two_nodes_read_it_twice(tmp_path: Path) -> None:
    with started(tmp_path, WORLD, 4) as ranks:
        check(ranks, ranks.load(nodes=["a", "b", "a", "b"]))
        read_bytes, size_bytes = ranks.files.read_bytes, size_of(ranks.base)
        assert 1.9 * (size_bytes - 100_000) < read_bytes < 2.2 * size_bytes


def test_ranks_that_read_other_places_share_nothing(ranks: Ranks) -> None:
    """What is damaged in one of them would count as damaged in the other."""
    check(ranks, ranks.load(places=("disk", "copy", "copy")))
    assert ranks.files.read_bytes > 0.9 * size_of(ranks.base)
    assert ranks.copies.read_bytes > 0.9 * size_of(ranks.base)


def test_damage_in_a_file_is_found_by_all_alike(ranks: Ranks) -> None:
    assert ranks.base.manifest is not None
    marker = max(ranks.base.manifest.markers, key=lambda one: one.files[0].length)
    flip(Path(ranks.base.path / marker.files[0].name), 3 << 20)
    found = ranks.load()
    assert all(isinstance(one, DamageError) for one in found), found
    assert len({str(one) for one in found}) == 1


def test_damage_on_the_way_is_not_damage_to_the_file(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds it reads the file itself, before it says anything against it."""
    copyto, lock, left = np.copyto, threading.Lock(), [1]

    def spoiling(target: Any, source: Any) -> None:
        copyto(target, source)
        with lock:
            if left and target.nbytes > 4096:
                left.clear()
                target[100] ^= 1

    monkeypatch.setattr(node_reads.np, "copyto", spoiling)
    check(ranks, ranks.load())
    assert not left


def test_an_error_of_the_disk_is_that_of_each_rank_that_meets_it(ranks: Ranks) -> None:
    """The first read fails: that rank says so, and the others go on without it."""
    lock, left = threading.Lock(), [1]

    def fails(name: str) -> None:
        with lock:
            if left:
                left.clear()
                raise OSError(5, "the disk says no")

    ranks.files.before = fails
    found = ranks.load()
    assert sorted(isinstance(one, LoadedBase) for one in found) == [False, True, True]
    assert ranks.files.read_bytes < 2.2 * size_of(ranks.base)


def test_the_ranks_of_a_job_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the making of a Checkpointer to what they restore; and nothing is left behind."""
    monkeypatch.setattr("everstep.trainer.job.run_folder.is_local_device", lambda path: False)
    monkeypatch.setattr("everstep.trainer.job.job.needs_on_disk", lambda *about: all_ranks)
    shared: list[bool] = []
    begin, close = NodeReads.begin, NodeWindow.close
    closed: list[NodeWindow] = []

    def begins(self: NodeReads, *about: Any) -> bool:
        shared.append(begin(self, *about))
        return shared[-1]

    def closes(self: NodeWindow) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(NodeReads, "begin", begins)
    monkeypatch.setattr(NodeWindow, "close", closes)
    run = tmp_path / "run"
    for step in (0, 2):
        with trainings(run, run, every=1, seams=rank_seams(2)) as both:
            assert [one.step for one in on_all(*(one.ckpt.resume for one in both))] == [step] * 2
            if step:
                assert all(torch.equal(one.weight, trained(one.rank, step)) for one in both)
            on_all(*(lambda one=one: one.train(2) for one in both))  # type: ignore[misc]
    assert shared == [True, True]
    assert len(closed) == 4


def test_a_job_knows_whether_its_disk_is_the_nodes_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[bool, int]] = []
    init = NodeStart.__init__

    def spy(self: NodeStart, rank: int, names: Any, *about: Any, local: bool, **given: Any) -> None:
        found.append((local, sum(name == names[rank] for name in names)))
        init(self, rank, names, *about, local=local, **given)

    monkeypatch.setattr(NodeStart, "__init__", spy)
    for own in (True, False):
        monkeypatch.setattr(
            "everstep.trainer.job.run_folder.is_local_device", lambda path, own=own: own
        )
        with trainings(tmp_path / str(own), tmp_path / str(own), seams=rank_seams(2)) as both:
            on_all(*(one.ckpt.resume for one in both))
        assert found == [(own, 2)] * 2
        found.clear()
    # The ranks of two nodes see one folder: it is a network's.
    monkeypatch.setattr("everstep.trainer.job.run_folder.is_local_device", lambda path: True)
    for memories, local in ((("a", "b"), False), (("a", "a"), True)):
        shared = SharedRun(disks=("0", "0"), memories=memories)
        shared.node_start(tmp_path, 0, SystemClock(), TIMEOUT_S)
        assert found.pop()[0] is local
